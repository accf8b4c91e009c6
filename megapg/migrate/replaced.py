"""What may be put in the place of a function or a class at run time, as tests do: whatever is put
there is called as before, and has no parameter more.

A string counts where it comes to a call that patches, be it by way of a table, of a loop or of a
helper, and means what its module, or the object beside it, makes of it. Elsewhere a string with a
function's name is no patch: in a table of lazy imports, or in ``__all__``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megapg.migrate.imports import scopes
from megapg.migrate.index import Index
from megapg.migrate.resolve import UNKNOWN, Thing
from megapg.migrate.scopes import (
    Alias,
    Analysis,
    Binding,
    Imported,
    Opaque,
    Scope,
    Use,
    last_name,
    walk,
)

_PATCHING = re.compile("[Pp]atch|setattr|mock")
_MAY_PATCH = re.compile(rb"[Pp]atch|setattr|mock|globals\(\)|vars\(|__dict__")
# With these what is patched are names of arguments.
_BY_KEYWORD = frozenset({"multiple", "dict"})
_MAY_HAVE_KEYWORDS = re.compile(rb"\.multiple\(|patch\.dict\(")
_OF_OBJECTS = frozenset({"self", "cls"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Patches:
    """What a file patches.

    Attributes:
        written: strings that are arguments of calls that patch.
        names: the last names of other strings that may come to such a call.
        read: the names that functions read which patch what they are told to.
        helpers: the names of these functions.
        tables: the names that strings of a table may come by: last name -> the table's.
        passed: strings that are arguments of other calls.
    """

    written: list[Use] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    helpers: set[str] = field(default_factory=set)
    tables: dict[str, set[str]] = field(default_factory=dict)
    passed: dict[str, list[Use]] = field(default_factory=dict)


class Replaced:
    """Answers what may be replaced in the files of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: dict[Path, _Patches | None] = {}

    def may_be(self, thing: Thing) -> bool:
        """Whether something may be put in the place of a function or a class of the project."""
        name = thing.scope.name if thing.scope is not None else ""
        word = re.escape(name.encode())
        # What begins with the name itself is found much faster than what stands before it.
        written = re.compile(word + rb"(\.__init__)?\s*=[^=]")
        quoted = re.compile(word + rb"(\s*,\s*[\"']__init__)?[\"']")
        for file in self._index.mentioning(name):
            data = self._index.data(file)
            if _has(data, written, b"."):
                return True
            named = _has(data, quoted, b"\"'.}") or _MAY_HAVE_KEYWORDS.search(data)
            if named and _MAY_PATCH.search(data) and self._patches(file, name, thing):
                return True
        return False

    def _patches(self, file: Path, name: str, thing: Thing) -> bool:
        patches = self._of(file)
        if patches is None or name in patches.names:
            return True
        if any(self._means(use, file, thing) for use in patches.written):
            return True
        if any(self._is_passed_to_helper(use, file) for use in patches.passed.get(name, ())):
            return True
        return any(
            (other := self._of(at)) is None or table in other.read
            for table in patches.tables.get(name, ())
            for at in self._index.mentioning(table)
            if _MAY_PATCH.search(self._index.data(at))
        )

    def _of(self, file: Path) -> _Patches | None:
        """What a file patches; None where it can't be parsed."""
        if file not in self._known:
            looked = self._index.look(file)
            self._known[file] = _Reader(looked[0].tree, looked[1]).read() if looked else None
        return self._known[file]

    # -- what a string means -----------------------------------------------------------------

    def _means(self, use: Use, file: Path, thing: Thing) -> bool:
        """Whether a string that a call patches by may mean a thing of the project."""
        text, call = _text(use.node), use.parents.node
        if thing.scope is None or not isinstance(call, ast.Call):
            return False
        *module, last = text.split(".")
        if last != thing.scope.name and text != "__init__":
            return False
        if module:
            return any(self._has(at, last, thing) for at in self._index.modules.ending(module))
        first = call.args[0] if call.args else None
        if first is None or first is use.node:
            return last != "__init__"
        owners = self._index.resolver.expression(first, use.scope, file)
        if last == "__init__":  # a mock in its place takes whatever it is given
            return last_name(call.func) == "setattr" and thing in owners
        return not owners or any(self._may_have(owner, last, thing) for owner in owners)

    def _may_have(self, owner: Thing, name: str, thing: Thing) -> bool:
        if owner.kind == "name":
            files = self._index.modules.ending(owner.name.split("."))
            return any(self._has(at, name, thing) for at in files)
        if owner.kind == "file" and owner.path is not None:
            return self._has(owner.path, name, thing)
        if owner.kind in ("class", "self"):
            return thing in self._index.resolver.attribute(frozenset({owner}), name)
        return owner.kind == "unknown"

    def _has(self, file: Path, name: str, thing: Thing) -> bool:
        found = self._index.resolver.attribute(frozenset({Thing("file", path=file)}), name)
        return thing in found or UNKNOWN in found

    def _is_passed_to_helper(self, use: Use, file: Path) -> bool:
        """Whether a string is passed to a function that patches what it is told to."""
        call = use.parents.node
        if not isinstance(call, ast.Call):
            return False
        for each in self._index.resolver.expression(call.func, use.scope, file):
            if each.kind == "function" and each.path is not None and each.scope is not None:
                patches = self._of(each.path)
                if patches is None or each.scope.name in patches.helpers:
                    return True
        return isinstance(call.func, ast.Name) and self._is_helping_fixture(call.func.id, use.scope)

    def _is_helping_fixture(self, name: str, scope: Scope) -> bool:
        """Whether a name is a parameter's, and a fixture of that name gives such a function."""
        found = scope.find(name)
        if found is None or not all(isinstance(e, Opaque) and e.parameter for e in found[1]):
            return False
        return any(
            (patches := self._of(at)) is None or name in patches.helpers
            for at in self._index.mentioning(name)
            if _MAY_PATCH.search(self._index.data(at))
        )


def _has(data: bytes, name: re.Pattern[bytes], behind: bytes) -> bool:
    """Whether a name stands behind one of some characters, or is a whole one with its __init__."""
    for found in name.finditer(data):
        before = data[max(found.start() - 1, 0) : found.start()]
        if not re.match(rb"\w", before) if found[1] else before and before in behind:
            return True
    return False


class _Reader:
    """Finds what a file patches."""

    def __init__(self, tree: ast.Module, analysis: Analysis) -> None:
        self._tree, self._analysis = tree, analysis
        self._nodes = list(walk(tree))
        self._other_names = set(_names_for_patching(analysis.module))
        self._found = _Patches()

    def read(self) -> _Patches:
        """All of it."""
        units: list[ast.AST] = []
        for use in self._analysis.uses:
            call = use.parents.node
            if isinstance(use.node, ast.Constant):
                self._string(use)
            elif isinstance(call, ast.Call) and call.func is use.node and self._is_patching(call):
                self._in_arguments(call)
                if _is_told(call) and not _is_of_an_object(call, use.scope):
                    units += _units(use)
        for node in self._nodes:
            self._found.names |= _written_by_name(node)
        self._follow(units)
        return self._found

    def _is_patching(self, call: ast.Call) -> bool:
        return any(
            _PATCHING.search(name) or name in self._other_names
            for name in map(last_name, _named(call.func))
        )

    def _string(self, use: Use) -> None:
        call = use.parents.node
        if isinstance(call, ast.Call) and self._is_patching(call):
            self._found.written.append(use)
        else:
            self._found.passed.setdefault(_last(_text(use.node)), []).append(use)

    def _in_arguments(self, call: ast.Call) -> None:
        """Strings further in than the arguments themselves, and names of arguments."""
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            if not isinstance(value, ast.Constant):
                self._found.names |= set(_strings(value))
        if last_name(call.func) in _BY_KEYWORD:
            self._found.names |= {keyword.arg for keyword in call.keywords if keyword.arg}

    def _follow(self, units: list[ast.AST]) -> None:
        """What may come to functions that patch what they are told to."""
        found, tables = self._found, dict(_tables(self._tree))
        calls = [each for each in self._nodes if isinstance(each, ast.Call)]
        waiting, seen = units, set[int]()
        for unit in waiting:  # grows
            if id(unit) in seen:
                continue
            seen.add(id(unit))
            found.names |= set(_strings(unit))
            read = {last_name(each) for each in _named(unit)}
            found.read |= read
            waiting += [table for name in read for table in tables.get(name, ())]
            if isinstance(unit, _Function):
                found.helpers.add(unit.name)
                waiting += [each for each in calls if last_name(each.func) == unit.name]
        for name, values in tables.items():
            for value in values if name != "__all__" else ():
                for last in _strings(value):
                    found.tables.setdefault(last, set()).add(name)


def _names_for_patching(module: Scope) -> Iterator[str]:
    """Other names for what patches."""
    for scope in scopes(module):
        for name, bindings in scope.bindings.items():
            if any(map(_PATCHING.search, _said_of(bindings))):
                yield name


def _said_of(bindings: Iterable[Binding]) -> Iterator[str]:
    """The names from which a variable comes."""
    for each in bindings:
        if isinstance(each, Imported):
            yield each.member
        elif isinstance(each, Alias):
            yield from map(last_name, _named(each.value))


def _named(node: ast.AST) -> Iterator[ast.expr]:
    return (each for each in walk(node) if isinstance(each, ast.Name | ast.Attribute))


def _is_told(call: ast.Call) -> bool:
    """Whether what a call patches is not written in it."""
    named = [each.value for each in call.keywords if each.arg in ("target", "attribute", "name")]
    return bool(call.args or named) and not any(
        isinstance(each, ast.Constant) and isinstance(each.value, str)
        for each in (*call.args[:2], *named)
    )


def _is_of_an_object(call: ast.Call, scope: Scope) -> bool:
    """Whether a call sets an attribute of ``self``, which is no module."""
    first = call.args[0] if call.args else None
    return isinstance(first, ast.Name) and first.id in _OF_OBJECTS and scope.kind == "function"


def _units(use: Use) -> Iterator[ast.AST]:
    """The function around, with all that is in it, or else the statement; and what decorates the
    classes around that.
    """
    classes: list[ast.ClassDef] = []
    for each in list(use.parents)[::-1]:
        if isinstance(each, ast.ClassDef):
            classes.append(each)
        elif isinstance(each, ast.stmt):
            yield each
            break
    for klass in classes:
        yield from klass.decorator_list


def _tables(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """What is assigned at the top of a module, or in a class, to each name; and what gives it as a
    fixture does.
    """
    found: dict[str, list[ast.AST]] = {}
    waiting: list[ast.stmt] = list(tree.body)
    for statement in waiting:  # grows
        if isinstance(statement, ast.ClassDef | ast.If | ast.Try | ast.With):
            waiting += [
                each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)
            ]
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
            targets = [statement.target]
        elif isinstance(statement, _Function):
            given = (
                each.func if isinstance(each, ast.Call) else each
                for each in statement.decorator_list
            )
            if "fixture" in map(last_name, given):
                found.setdefault(statement.name, []).append(statement)
        for target in targets:
            value = getattr(statement, "value", None)
            if value is not None and (name := last_name(target)):
                found.setdefault(name, []).append(value)
    yield from found.items()


def _written_by_name(node: ast.AST) -> set[str]:
    """The name of what is written among the variables of a module: ``vars(module)["f"] = g``."""
    if not isinstance(node, ast.Subscript) or isinstance(node.ctx, ast.Load):
        return set()
    owner = node.value.func if isinstance(node.value, ast.Call) else node.value
    if last_name(owner) not in ("globals", "vars", "__dict__"):
        return set()
    return set(_strings(node.slice))


def _strings(node: ast.AST) -> Iterable[str]:
    """What is behind the last dot of each string."""
    return (_last(_text(each)) for each in ast.walk(node) if _text(each))


def _text(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else ""


def _last(text: str) -> str:
    return text.rpartition(".")[2]
