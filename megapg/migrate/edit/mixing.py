"""Whether a new text mixes carriers: what a function, or a class, asks about one kind of group has
to come from one of them. Else who is in a group is asked of one, and the collective runs on the
group of another.

Nothing here knows how the edits were planned: the new text is read, and what is written there.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megapg.migrate.find.axes import AXES, axes_of, group_argument
from megapg.migrate.python.scopes import last_name, walk
from megapg.migrate.reasons import UNSERVED
from megapg.upstream.expressions import known, replacement
from megapg.upstream.mapping import COLLECTION_NAMES, Refusal
from megapg.upstream.signatures import VERSIONS

PASSED, GLOBALS = "pg_collection", "the globals"
"""What was passed, else the globals; and the globals alone."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_CONSTRUCTOR = "__init__"
# What a collection has beside its fields.
_OTHERS = frozenset({"rank", "size", "ranks", "extras", "holds", "require"})


@dataclass(frozen=True)
class Asking:
    """A place at which something about a group is asked."""

    carrier: str  # of what: one of the two above, or an expression
    what: str  # a field, or a getter
    line: int  # where
    by_core: bool = False  # whether it is Megatron-core that asks, since it is passed no group


@dataclass(frozen=True)
class Mixed:
    """A function, or a class, in which two carriers are asked about one kind of group."""

    where: str  # its name
    one: Asking
    other: Asking


def mixed(
    trees: Mapping[str, ast.Module], versions: Collection[int] = tuple(VERSIONS)
) -> Iterator[tuple[str, Mixed]]:
    """The functions and classes of a project that ask two carriers about one kind of group, with
    their files. What a class is made of asks the same object.

    Args:
        trees: the new texts, parsed, by their files.
        versions: of Megatron-core, that may run them.
    """
    of_files: dict[str, _Classes] = {}
    everywhere = _Classes(list)
    # A core in the project is code like the other.
    has_core = any("megatron/core/tensor_parallel" in file for file in trees)
    for file, tree in trees.items():
        names, of_files[file] = _Names(tree, versions, has_core), _Classes(list)
        for node in ast.walk(tree):
            if isinstance(node, _Function):
                yield from ((file, e) for e in _apart(node.name, _Reading(node, names).asked()))
            elif isinstance(node, ast.ClassDef):
                of_files[file][node.name].append((node, names, file))
                everywhere[node.name].append((node, names, file))
    for file, here in of_files.items():
        for klass in (each for several in here.values() for each in several):
            asked = [
                asking
                for of, names, _ in _line(klass, here, everywhere)
                for each in of.body
                if isinstance(each, _Function) and not _makes_groups(each)
                for asking in _Reading(each, names).asked()
                if asking.carrier in ("self", GLOBALS) and not asking.by_core
            ]
            yield from ((file, each) for each in _apart(f"class {klass[0].name}", asked))


def _line(klass: _Class, here: _Classes, everywhere: _Classes) -> Iterator[_Class]:
    """A class and what it is made of, as far as one class alone has the name, in its file or else
    where that is imported from.
    """
    waiting = [klass]
    for each in waiting:  # grows
        yield each
        for base in each[0].bases:
            name, of = last_name(base), ast.unparse(base).partition(".")[0]
            found = here.get(name) or [
                one
                for one in everywhere.get(name, ())
                if each[1].homes.get(of, "?") in f"/{one[2]}"
            ]
            if len(found) == 1 and found[0] not in waiting:
                waiting += found


def lost_in(tree: ast.Module) -> Iterator[str]:
    """The classes whose constructor takes a collection and keeps it nowhere, while others of their
    methods ask the object for one.
    """
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.ClassDef) else ()
        methods = [each for each in body if isinstance(each, _Function)]
        if isinstance(node, ast.ClassDef) and any(map(_drops, methods)):
            others = (each for each in methods if each.name != _CONSTRUCTOR)
            if any(_asks_self(call) for each in others for call in walk(each)):
                yield node.name


def _drops(method: _Function) -> bool:
    """Whether a constructor takes a collection, and neither keeps it nor hands it on whole."""
    arguments = method.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    if method.name != _CONSTRUCTOR or all(each.arg != PASSED for each in every):
        return False
    kept = [
        each.value
        for each in walk(method)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute)
    ]
    kept += [
        given
        for each in walk(method)
        if isinstance(each, ast.Call)
        for given in (*each.args, *(keyword.value for keyword in each.keywords))
        if last_name(each.func) not in ("resolve", "groups_of")
    ]
    whole = [value for each in kept for value in (each, *getattr(each, "values", ()))]
    return not any(isinstance(each, ast.Name) and each.id == PASSED for each in whole)


def _asks_self(node: ast.AST) -> bool:
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) == "groups_of"
        and isinstance(first, ast.Name)
        and first.id == "self"
    )


def _makes_groups(function: _Function) -> bool:
    called = (last_name(e.func) for e in walk(function) if isinstance(e, ast.Call))
    return any(each in ("initialize_model_parallel", "destroy_model_parallel") for each in called)


def _apart(where: str, asked: Sequence[Asking]) -> Iterator[Mixed]:
    seen = set()
    for at, one in enumerate(asked):
        for other in asked[at + 1 :]:
            both = frozenset({one.carrier, other.carrier})
            if len(both) > 1 and both not in seen and axes_of(one.what) & axes_of(other.what):
                seen.add(both)
                yield Mixed(where, one, other)


class _Names:
    """What the imports of a file are called in it."""

    def __init__(self, tree: ast.Module, versions: Collection[int], has_core: bool) -> None:
        self.megapg, self.getters, self.modules = set[str](), set[str](), set[str]()
        self.members: dict[str, str] = {}
        self.homes: dict[str, str] = {}  # of what is imported: the folder, or file, that has it
        self._versions, self._has_core = versions, has_core
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.megapg |= {e.asname or e.name for e in node.names if e.name == "megapg"}
                self.homes |= {
                    e.asname or e.name: f"/{e.name}".replace(".", "/") for e in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                home = "/".join(["", *filter(None, (node.module or "").split("."))])
                self.homes |= {each.asname or each.name: home for each in node.names}
                self._imported_from(node.module or "", node.names)

    def _imported_from(self, module: str, names: Sequence[ast.alias]) -> None:
        for each in names:
            bound = each.asname or each.name
            if module == "megapg.megatron" and each.name == "getters":
                self.getters.add(bound)
            elif not module.startswith("megatron") and module:
                continue
            elif each.name in ("parallel_state", "mpu"):
                self.modules.add(bound)
            elif module.endswith(("parallel_state", "mpu")) and known(each.name):
                self.members[bound] = each.name

    def is_of_core(self, called: ast.expr) -> bool:
        """Whether what is called is imported from Megatron-core."""
        while isinstance(called, ast.Attribute):
            called = called.value
        home = self.homes.get(called.id, "") if isinstance(called, ast.Name) else ""
        return home.startswith("/megatron/core") and not self._has_core

    def left(self, called: ast.expr) -> str:
        """The getter of Megatron's that is called, and that something could serve."""
        name = self.members.get(called.id, "") if isinstance(called, ast.Name) else ""
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            name = called.attr if called.value.id in self.modules else ""
        answers = [replacement(name, (), (each,)) for each in self._versions] if name else []
        served = [e for e in answers if not isinstance(e, Refusal) or e.reason not in UNSERVED]
        return name if served else ""


_Class: TypeAlias = tuple[ast.ClassDef, _Names, str]
_Classes = defaultdict[str, list[_Class]]


class _Reading:
    """What one function asks, without the functions in it that have a model of their own."""

    def __init__(self, function: _Function, names: _Names, around: _Reading | None = None) -> None:
        self._function, self._names = function, names
        # Variables -> the carrier of which each is a collection; or a model.
        self._holds: dict[str, str] = dict(around._holds) if around else {}
        self._comes_of: dict[str, str] = dict(around._comes_of) if around else {}
        every = list(walk(function))
        inner = [each for each in every if isinstance(each, _Function) and each is not function]
        inside = {id(each) for one in inner for each in walk(one)} - {id(one) for one in inner}
        self._nodes = [each for each in every if id(each) not in inside]
        nested = {id(each) for one in inner for each in walk(one) if each is not one}
        self._inner = [each for each in inner if id(each) not in nested]
        self._of_others = {
            each.arg
            for node in self._nodes
            if isinstance(node, _Function | ast.Lambda) and node is not function
            for each in (*node.args.args, *node.args.kwonlyargs)
        }
        own = (*function.args.args, *function.args.kwonlyargs)
        if any(each.arg == PASSED for each in own):
            self._holds[PASSED] = PASSED
        self._says_none = any(
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Name)
            and node.left.id == PASSED
            and isinstance(node.comparators[0], ast.Constant)
            for node in self._nodes
        )

    def asked(self) -> list[Asking]:
        """All that it asks, in the order of its text."""
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                self._bind(node.targets[0], node.value)
            elif isinstance(node, ast.For):
                self._bind(node.target, node.iter)
        found = [asking for node in self._nodes for asking in self._of(node)]
        found += [e for each in self._inner for e in _Reading(each, self._names, self).asked()]
        if self._says_none:  # what the globals answer where nothing was passed is what it means
            found = [each for each in found if each.carrier != GLOBALS]
        own = [each for each in found if each.carrier not in self._of_others]
        return sorted(own, key=lambda each: each.line)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            return
        if carrier := self._carrier(value):
            self._holds[target.id] = carrier
        elif isinstance(value, ast.Call):  # a model that is made with a collection
            given = [each.value for each in value.keywords if each.arg == PASSED]
            if given and (carrier := self._carrier(given[0])):
                self._comes_of[target.id] = carrier
        elif isinstance(value, ast.Attribute):
            self._comes_of[target.id] = self._model(value)

    def _of(self, node: ast.AST) -> Iterator[Asking]:
        line = getattr(node, "lineno", 0)
        is_field = isinstance(node, ast.Attribute) and node.attr not in _OTHERS
        if isinstance(node, ast.Attribute) and is_field and (carrier := self._carrier(node.value)):
            yield Asking(carrier, node.attr, line)
        if not isinstance(node, ast.Call):
            return
        if name := self._names.left(node.func):
            yield Asking(GLOBALS, name, line)
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        if any(isinstance(e, ast.Name) and e.id in self._names.modules for e in given):
            yield from (Asking(GLOBALS, axis, line) for axis in sorted(AXES))  # whatever it reads
        if group_argument(node) and self._names.is_of_core(node.func):
            yield Asking(GLOBALS, "tp", line, by_core=True)
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and first is not None:
            carrier = self._carrier(node.func.value)
            if carrier and isinstance(first, ast.Constant):
                yield Asking(carrier, str(first.value), line)
            if last_name(node.func.value) in self._names.getters and self._carrier(first):
                yield Asking(self._carrier(first), node.func.attr, line)
        if carrier := self._carrier(node):  # it is asked, or passed on, for what it is looked up
            for each in node.args[1:]:
                if isinstance(each, ast.Constant):
                    yield Asking(carrier, str(each.value), line)

    def _carrier(self, node: ast.expr) -> str:
        """Of what an expression is a collection; empty where it is none."""
        if isinstance(node, ast.Name):
            return self._holds.get(node.id, "")
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return next(filter(None, map(self._carrier, node.values)), "")
        if isinstance(node, ast.Attribute) and node.attr in COLLECTION_NAMES:
            return self._model(node.value)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return ""
        if last_name(node.func.value) not in self._names.megapg or not node.args:
            return ""
        if node.func.attr not in ("resolve", "groups_of"):
            return ""
        given = node.args[0]
        if isinstance(given, ast.Constant) and given.value is None:
            return GLOBALS
        return self._carrier(given) or self._model(given)

    def _model(self, node: ast.expr) -> str:
        """The model, or the object, from which an expression comes."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        name = node.id if isinstance(node, ast.Name) else ast.unparse(node)
        return self._comes_of.get(name, name)
