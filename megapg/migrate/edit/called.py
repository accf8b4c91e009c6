"""What a file calls Megatron's globals, and what is ours: what its imports are called in it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence

from megapg.migrate.find.axes import AXES
from megapg.migrate.python.scopes import last_name
from megapg.migrate.reasons import UNSERVED
from megapg.upstream.askers import ASKING, Asking
from megapg.upstream.expressions import known, replacement
from megapg.upstream.mapping import GroupArgument, Refusal

GETTING_A_SCHEDULE = "get_forward_backward_func"
"""Megatron-core's function that gives one."""


def is_of_a_core(file: str) -> bool:
    """Whether a file of a project is of a Megatron-core in it, which is code like the other."""
    return "/megatron/core/tensor_parallel" in f"/{file}"


# What nothing serves, and does not stand for a group either.
_OF_NO_GROUP = UNSERVED - {"no-field"}


class Names:
    """What the imports of a file are called in it."""

    def __init__(
        self, imports: Iterable[ast.AST], versions: Collection[int], has_core: bool, runtime: str
    ) -> None:
        self.megapg, self.getters, self.modules = set[str](), set[str](), set[str]()
        self.members: dict[str, str] = {}
        self.homes: dict[str, str] = {}  # of what is imported: the folder, or file, that has it
        self.originals: dict[str, str] = {}  # what is imported by another name
        self._versions, self._has_core, self._runtime = versions, has_core, runtime
        self._served: dict[str, bool] = {}
        self.has_star = False  # whether the getters come by a star
        for node in imports:
            if isinstance(node, ast.Import):
                self.megapg |= {e.asname or e.name for e in node.names if e.name == runtime}
                self.homes |= {
                    e.asname or e.name: f"/{e.name}".replace(".", "/") for e in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                home = "/".join(["", *filter(None, (node.module or "").split("."))])
                self.homes |= {each.asname or each.name: home for each in node.names}
                self._imported_from(node.module or "", node.names)
        if runtime != "megapg":  # one module has all
            self.getters |= self.megapg
        self.all = self.megapg | self.getters | self.modules | self.members.keys()

    def _imported_from(self, module: str, names: Sequence[ast.alias]) -> None:
        for each in names:
            bound = each.asname or each.name
            self.originals[bound] = each.name
            if module == "megapg.megatron" and each.name == "getters":
                self.getters.add(bound)
            elif each.name == self._runtime:
                self.megapg.add(bound)
            elif not module.startswith("megatron") and module:
                continue
            elif each.name in ("parallel_state", "mpu"):
                self.modules.add(bound)
            elif module.endswith(("parallel_state", "mpu")):
                self.has_star = self.has_star or bound == "*"
                if known(each.name):
                    self.members[bound] = each.name

    def is_of_core(self, called: ast.expr) -> bool:
        """Whether what is called is imported from Megatron-core."""
        return self._home(called).startswith("/megatron/core") and not self._has_core

    def _home(self, called: ast.expr) -> str:
        """From where what is called is imported."""
        while isinstance(called, ast.Attribute):
            called = called.value
        return self.homes.get(called.id, "") if isinstance(called, ast.Name) else ""

    def asks_outside(
        self, call: ast.Call, left_out: Collection[str]
    ) -> tuple[str, Asking, str] | None:
        """The function of Megatron-core, or of its training loop, that asks the globals when it is
        called where some parameters are left out; what it asks; and which of those it would be
        passed.
        """
        name = last_name(call.func)
        if isinstance(call.func, ast.Name):
            name = self.originals.get(name, name)
        found = ASKING.get(name)
        if found is None or all(each >= found.until for each in self._versions):
            return None
        home = self._home(call.func).replace("/", ".")
        if not f"{home}.".startswith(tuple(f".{each}." for each in found.packages)):
            return None
        given = _given(call, found.instead)
        unless = given.id if isinstance(given, ast.Name) and given.id in left_out else ""
        return None if given is not None and not unless else (name, found, unless)

    def gets_a_schedule(self, call: ast.Call) -> bool:
        """Whether Megatron-core is asked for its schedule, which is one for the globals' stages."""
        is_one = last_name(call.func) == GETTING_A_SCHEDULE and self.is_of_core(call.func)
        return is_one and not call.args and not call.keywords

    def is_private(self, node: ast.Attribute) -> bool:
        """Whether a private global of Megatron's is read."""
        is_of_it = isinstance(node.value, ast.Name) and node.value.id in self.modules
        return is_of_it and node.attr.startswith("_") and isinstance(node.ctx, ast.Load)

    def left(self, called: ast.expr) -> str:
        """The getter of Megatron's that is called, and that is about a group."""
        name = self.members.get(called.id, "") if isinstance(called, ast.Name) else ""
        if self.has_star and isinstance(called, ast.Name) and known(called.id):
            name = called.id
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            name = called.attr if called.value.id in self.modules else ""
        return name if name and self._is_of_a_group(name) else ""

    def read_by_name(self, call: ast.Call) -> Iterator[str]:
        """The getter that ``getattr(mpu, name)`` is, where that is written out; what of the module
        is handed on, or asked for by another name, may read anything.
        """
        match call:
            case ast.Call(ast.Name("hasattr")):
                pass
            case ast.Call(ast.Name("getattr"), [ast.Name(), ast.Constant(str(name)), *_]):
                yield from (name,) if known(name) and self._is_of_a_group(name) else ()
            case _:
                yield from sorted(AXES)

    def _is_of_a_group(self, name: str) -> bool:
        """Whether something serves a getter, or it stands for a group all the same."""
        if name not in self._served:
            answers = [replacement(name, (), (each,)) for each in self._versions]
            self._served[name] = any(
                not isinstance(each, Refusal) or each.reason not in _OF_NO_GROUP for each in answers
            )
        return self._served[name]


def _given(call: ast.Call, instead: GroupArgument | None) -> ast.expr | None:
    """What a call passes for what it would be asked for, or may pass; None where that is None."""
    if instead is None:
        return None
    named = {each.arg: each.value for each in call.keywords}
    starred = next((each for each in call.args if isinstance(each, ast.Starred)), named.get(None))
    by_place = call.args[instead.after] if len(call.args) > instead.after else None
    given = starred or named.get(instead.name, by_place)
    return None if isinstance(given, ast.Constant) and given.value is None else given
