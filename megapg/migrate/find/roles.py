"""Models of other roles than the trained one: teachers, references, critics. Whoever holds several
has no one collection, and which is meant shows in what a function does only.
"""

from __future__ import annotations

import ast
import re

from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Alias, Scope, Use, last_name, walk

# No student, which is the one that is trained; no draft model and no average of weights: they are
# on its ranks.
_ROLES = "teacher|reference|ref|reward|critic"
_MODEL = re.compile(rf"_*(?:(?:un)?wrapped_|mcore_)?({_ROLES})_(?:model|module)s?|(teacher)s?")
_OF_THE_TRAINED = re.compile(r"_*(?:(?:un)?wrapped_|mcore_|student_)*(?:model|module)s?")


@kept
def has_another_role(function: Scope) -> bool:
    """Whether a function, or method, names a model of a role that is not its class's own."""
    outer = function.enclosing("class")
    its_own = outer.name.lower() if outer is not None else ""
    for of, name in function.said:
        found = _MODEL.fullmatch(name) if not of or of in function.instances else None
        if found is not None and (found[1] or found[2]) not in its_own:
            return True
    return False


def is_of_another_role(name: str) -> bool:
    """Whether a variable is named for a model of another role than the trained one's."""
    return _MODEL.fullmatch(name) is not None


def role_asked_about(use: Use) -> str:
    """The variable with such a model that the call around a use is about, as its arguments come of
    it, and of no other model; empty where there is none.
    """
    function = use.scope
    models = _reached(function, [each for each in use.parents if isinstance(each, ast.Call)])
    name = models.pop() if len(models) == 1 else ""
    bound = function.bindings.get(name, [])
    of_another = _MODEL.fullmatch(name) and all(isinstance(each, Alias) for each in bound)
    return name if bound and of_another else ""


def _reached(function: Scope, calls: list[ast.Call]) -> set[str]:
    """The models from which the arguments of calls come, by name."""
    waiting: list[ast.AST] = [
        given for call in calls for given in (*call.args, *(k.value for k in call.keywords))
    ]
    seen: set[str] = set()
    models: set[str] = set()
    while waiting:
        for each in walk(waiting.pop()):
            name = last_name(each) if isinstance(each, ast.Name | ast.Attribute) else ""
            if _MODEL.fullmatch(name) or _OF_THE_TRAINED.fullmatch(name):
                models.add(name)
            elif isinstance(each, ast.Name) and name not in seen:
                seen.add(name)
                bound = function.bindings.get(name, ())
                waiting += [other.value for other in bound if isinstance(other, Alias)]
    return models
