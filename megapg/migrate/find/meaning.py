"""What a name stands for, followed through imports, assignments and the modules of the project.

An answer is a set: a name that is bound in several branches may stand for several things.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import (
    Alias,
    Binding,
    Defined,
    Imported,
    Instance,
    Opaque,
    Scope,
    last_name,
)
from megapg.migrate.python.tree import Modules, relative_parts
from megapg.upstream.expressions import known

PARALLEL_STATE = ("megatron", "core", "parallel_state")

# Where Megatron-LM had it before there was a core, and what calls it by another name.
_OTHER_NAMES = frozenset(
    {
        ("megatron", "core", "mpu"),
        ("megatron", "mpu"),
        ("megatron", "mpu", "initialize"),
        ("megatron", "legacy", "mpu"),
    }
)
# Megatron's own modules import the getters, and users import them from there.
_REEXPORTING = re.compile(r"megatron\.(core|training|legacy)\.")
_MOVED = "get_moe_layer_wise_logging_tracker"  # a function of its own elsewhere, since 0.13
_OTHERS = "communication_utils"  # has functions of the same names, which take a group

# Names of Megatron-core's module that begin so are Python's, not its.
_DUNDER = re.compile(r"__\w+__\Z")


class Thing(NamedTuple):  # there are many of them, in sets
    """One thing that a name may stand for."""

    # ``globals`` for Megatron's module, ``member`` for a name in it, ``snapshot`` for what the
    # value of a member was at an import, ``file`` for a module of the project, ``name`` for
    # something outside of it, ``self`` for an instance of a class, ``class`` for the class,
    # ``function`` for one of the project, ``unknown``.
    kind: str
    name: str = ""  # the member, or the dotted name
    path: Path | None = None  # of the file; of something outside, the file that asks
    scope: Scope | None = None  # of the class or function


Things: TypeAlias = frozenset[Thing]

GLOBALS = Thing("globals")
UNKNOWN = Thing("unknown")
ONLY_UNKNOWN: Things = frozenset({UNKNOWN})
_NOTHING: Things = frozenset()

_DEEPEST = 40  # names bound to names: further than anyone writes, and less than Python recurses


class Resolver:
    """Resolves names in the modules of one project.

    Args:
        modules: the project's files.
        analysis: gives the scopes of a file, parsed when first asked for; None where it can't be.
        may_define: whether a file can have a name at its top level, at a glance.
        wrappers: dotted names of modules that stand for ``parallel_state``.
        namesakes: dotted names that meant it once, and mean packages of the project here.
    """

    def __init__(
        self,
        modules: Modules,
        analysis: Callable[[Path], Analysis | None],
        may_define: Callable[[Path, str], bool],
        wrappers: Collection[str] = (),
        namesakes: Collection[str] = (),
    ) -> None:
        self._modules, self._analysis, self._may_define = modules, analysis, may_define
        self._wrappers = {tuple(name.split(".")) for name in wrappers}
        own = {tuple(name.split(".")) for name in namesakes}
        others = {name for name in _OTHER_NAMES if name not in own and name[:-1] not in own}
        self._same = others | {PARALLEL_STATE} | self._wrappers
        self._known: dict[tuple[Scope | Path, str], Things] = {}
        self._asking: set[object] = set()
        self._cut = 0  # how often a circle was cut short: what came of it is not for keeps

    def expression(self, node: ast.expr, scope: Scope, path: Path) -> Things:
        """What an expression's value may be."""
        if isinstance(node, ast.Name):
            return self.name(node.id, scope, path)
        if isinstance(node, ast.Attribute):
            return self.attribute(self.expression(node.value, scope, path), node.attr)
        if isinstance(node, ast.Constant) and not node.value:
            return _NOTHING  # None, False: not there rather than something else
        if isinstance(node, ast.IfExp):
            return self._either((node.body, node.orelse), scope, path)
        if isinstance(node, ast.BoolOp):
            return self._either(node.values, scope, path)
        if isinstance(node, ast.NamedExpr):
            return self.expression(node.value, scope, path)
        if isinstance(node, ast.Call) and (module := _imported_by_call(node)):
            return self._dotted(module, path)
        if isinstance(node, ast.Subscript) and (module := _in_sys_modules(node)):
            return self._dotted(module, path)
        return ONLY_UNKNOWN

    def _either(self, nodes: Iterable[ast.expr], scope: Scope, path: Path) -> Things:
        return _NOTHING.union(*(self.expression(node, scope, path) for node in nodes))

    def name(self, name: str, scope: Scope, path: Path) -> Things:
        """What a name may stand for where it is used."""
        known = self._known.get((scope, name))
        if known is not None:
            return known
        found = scope.find(name)
        if found is not None and all(each.__class__ is Opaque for each in found[1]):
            self._known[scope, name] = ONLY_UNKNOWN  # most are local variables
            return ONLY_UNKNOWN
        return self._once(scope, name, lambda: self._looked_up(name, found, scope, path))

    def _looked_up(
        self, name: str, found: tuple[Scope, list[Binding]] | None, scope: Scope, path: Path
    ) -> Things:
        if found is None:
            return self._starred(name, scope, path) or ONLY_UNKNOWN
        owner, bindings = found
        if owner is scope:
            return self._bindings(bindings, path)
        return self._once(owner, name, lambda: self._bindings(bindings, path))

    def _once(self, where: Scope | Path, name: str, answer: Callable[[], Things]) -> Things:
        """The answer about a name in a scope, or of a module, kept for the next time; nothing where
        it is being looked for already: names may be bound to each other in circles.
        """
        key = (where, name)
        if key in self._known:
            return self._known[key]
        if key in self._asking:
            self._cut += 1
            return _NOTHING
        if len(self._asking) > _DEEPEST:
            return ONLY_UNKNOWN
        self._asking.add(key)
        cut = self._cut
        things = answer()
        self._asking.discard(key)
        if cut == self._cut or not self._asking:
            self._known[key] = things
        return things

    def _starred(self, name: str, scope: Scope, path: Path) -> Things:
        outside = []
        for each in scope.chain():
            for star in reversed(each.stars):
                offering = (e for e in self.module(star, path) if self._offers(e, name))
                things = self.attribute(frozenset(offering), name)
                if any(thing.kind not in ("unknown", "name") for thing in things):
                    return things
                if any(thing.kind == "name" for thing in things):
                    outside.append(things)
        # A class of the only module that may have it; what that imports itself it hands on, too.
        if name[:1].isupper() and name != name.upper() and not hasattr(builtins, name):
            things = outside[0] if len(outside) == 1 else _NOTHING
            if all(thing.name.startswith("megatron.core.") for thing in things):
                return things
        return _NOTHING

    def _offers(self, module: Thing, name: str) -> bool:
        """Whether a star may import a name of a module: an ``__all__`` that is written out, and
        that nothing adds to, says which it does.
        """
        path = module.path if module.kind == "file" else None
        if path is None or path not in self._modules or not self._may_define(path, "__all__"):
            return True
        analysis = self._analysis(path)
        top = analysis.module if analysis else None
        bound = top.bindings.get("__all__", ()) if top else ()
        value = bound[0].value if len(bound) == 1 and isinstance(bound[0], Alias) else None
        if top is None or not isinstance(value, ast.List | ast.Tuple):
            return True
        offered = [each.value for each in value.elts if isinstance(each, ast.Constant)]
        is_whole = len(offered) == len(value.elts)
        return name in offered or not is_whole or any(of == "__all__" for of, _ in top.said)

    def _bindings(self, bindings: Sequence[Binding], path: Path) -> Things:
        if len(bindings) == 1:
            return self._binding(bindings[0], path)
        return _NOTHING.union(*(self._binding(binding, path) for binding in bindings))

    def _binding(self, binding: Binding, path: Path) -> Things:
        if isinstance(binding, Alias):
            return _kept(self.expression(binding.value, binding.scope, path), UNKNOWN)
        if isinstance(binding, Imported):
            if not binding.level and (*binding.module, binding.member) in self._same:
                return frozenset({GLOBALS})
            module = self.module(binding, path)
            if not binding.member:
                return module
            snapshot = Thing("snapshot", binding.member)
            return _kept(self.attribute(module, binding.member), snapshot)
        if isinstance(binding, Instance):
            return frozenset({Thing("self", path=path, scope=binding.of)})
        if isinstance(binding, Defined):
            return frozenset({Thing(binding.scope.kind, path=path, scope=binding.scope)})
        return ONLY_UNKNOWN

    # -- modules -----------------------------------------------------------------------------

    def module(self, imported: Imported, path: Path) -> Things:
        """The module that an import is about."""
        if not imported.level:
            return self._dotted(imported.module, path)
        parts = relative_parts(path, imported.level, imported.module)
        found = self._modules.exactly(parts)  # a folder without __init__ is a module, too
        return self._file(found) if found else frozenset({Thing("file", path=Path(*parts))})

    def dotted(self, name: str, path: Path) -> Things:
        """What an absolute dotted name may mean, as a string in a test has it."""
        return self._dotted(tuple(name.split(".")), path)

    def _dotted(self, parts: tuple[str, ...], path: Path) -> Things:
        if parts in self._same:
            return frozenset({GLOBALS})
        for length in range(len(parts), 0, -1):
            if parts[:length] in self._same:
                return self._through(frozenset({GLOBALS}), parts[length:])
            if (found := self._modules.find(parts[:length], path)) is not None:
                return self._through(self._file(found), parts[length:])
        return frozenset({Thing("name", ".".join(parts), path)})

    def _through(self, things: Things, parts: Iterable[str]) -> Things:
        for part in parts:
            things = self.attribute(things, part)
        return things

    def _file(self, path: Path) -> Things:
        parts = self._modules.parts(path)
        wraps = any(parts[-len(wrapper) :] == wrapper for wrapper in self._wrappers)
        stands_for_them = wraps or is_parallel_state(path)
        return frozenset({GLOBALS if stands_for_them else Thing("file", path=path)})

    # -- attributes --------------------------------------------------------------------------

    def attribute(self, things: Things, name: str) -> Things:
        """What an attribute may be."""
        if things is ONLY_UNKNOWN:
            return things
        if len(things) == 1:
            (thing,) = things
            return self._attribute(thing, name)
        return _NOTHING.union(*(self._attribute(thing, name) for thing in things))

    def _attribute(self, thing: Thing, name: str) -> Things:
        if thing.kind == "globals":
            if name == "initialize":  # of the mpu package that came before the core
                return frozenset({GLOBALS})
            return frozenset({UNKNOWN if _DUNDER.match(name) else Thing("member", name)})
        if thing.kind == "file" and thing.path is not None:
            return self._member(thing.path, name)
        if thing.kind == "name":
            return self._outside(f"{thing.name}.{name}", thing.path)
        if thing.kind in ("self", "class") and thing.scope is not None and thing.path is not None:
            held = [*thing.scope.attributes.get(name, ()), *thing.scope.bindings.get(name, ())]
            key = (id(thing.scope), f".{name}")
            if held and key not in self._asking:
                self._asking.add(key)
                found = self._bindings(held, thing.path)
                self._asking.discard(key)
                return found
        return ONLY_UNKNOWN

    @kept
    def _outside(self, dotted: str, importer: Path | None) -> Things:
        parts = tuple(dotted.split("."))
        if parts in self._same:
            return frozenset({GLOBALS})
        # A package without __init__ is found by what is in it.
        if importer is not None and (found := self._modules.find(parts, importer)) is not None:
            return self._file(found)
        if _REEXPORTING.match(dotted):
            if parts[-1] in ("parallel_state", "mpu"):
                return frozenset({GLOBALS})
            is_another = parts[-1] == _MOVED or _OTHERS in parts
            if not is_another and parts[-1] != parts[-1].upper() and known(parts[-1]):
                return frozenset({Thing("member", parts[-1])})
        return frozenset({Thing("name", dotted, importer)})

    def _member(self, path: Path, name: str) -> Things:
        return self._once(path, name, lambda: self._top_level(path, name))

    def _top_level(self, path: Path, name: str) -> Things:
        is_file = path in self._modules
        if is_file and self._may_define(path, name):
            analysis = self._analysis(path)
            if analysis is not None:
                if name in analysis.module.bindings:
                    found = self._bindings(analysis.module.bindings[name], path)
                    # A package that imports its own submodule: `from . import name`.
                    if found:
                        return found
                if things := self._starred(name, analysis.module, path):
                    return things
        if not is_file or path.stem == "__init__":
            parts = self._modules.parts(path) if is_file else path.parts
            inner = self._modules.exactly((*parts, name))
            if inner is not None:
                return self._file(inner)
        return ONLY_UNKNOWN


def is_parallel_state(path: Path) -> bool:
    """Whether the file is Megatron-core's module itself."""
    return (*path.parent.parts, path.stem)[-3:] == PARALLEL_STATE


def is_in_core(path: Path) -> bool:
    """Whether a file is one of a Megatron-core: an import that stays there may close a circle."""
    return any(
        path.parts[i : i + 2] == PARALLEL_STATE[:2]
        and not Path(*path.parts[:i], "__init__.py").exists()  # else another package's part
        for i in range(len(path.parts))
    )


def _kept(things: Things, value: Thing) -> Things:
    """What a name stands for that is bound to one of these: that of a private global keeps the
    value which it had then, whatever is written to the global later.
    """
    if not any(_is_variable(each) for each in things):  # as with most
        return things
    return frozenset(value if _is_variable(each) else each for each in things)


def _is_variable(thing: Thing) -> bool:
    """Whether it is a private global, and neither the module nor a function."""
    return thing.kind == "member" and thing.name[:1] == "_" and thing.name == thing.name.upper()


def _imported_by_call(node: ast.Call) -> tuple[str, ...] | None:
    imports = last_name(node.func) in ("import_module", "importorskip")
    return _dotted_string(node.args[0]) if imports and node.args else None


def _in_sys_modules(node: ast.Subscript) -> tuple[str, ...] | None:
    is_modules = isinstance(node.value, ast.Attribute) and node.value.attr == "modules"
    return _dotted_string(node.slice) if is_modules else None


def _dotted_string(node: ast.expr) -> tuple[str, ...] | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = tuple(node.value.split("."))
        if all(part.isidentifier() for part in parts):
            return parts
    return None
