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
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import UNKNOWN, Thing
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.methods import decorators, kept
from megapg.migrate.python.scopes import (
    Alias,
    Binding,
    FunctionNode,
    Imported,
    Opaque,
    Scope,
    Use,
    last_name,
    scopes,
    walk,
)

_PATCHING = re.compile("[Pp]atch|setattr|mock")
_MAY_PATCH = re.compile(rb"[Pp]atch|setattr|mock|globals\(\)|vars\(|__dict__")
# With these what is patched are names of arguments.
_BY_KEYWORD = frozenset({"multiple", "dict"})
_MAY_HAVE_KEYWORDS = re.compile(rb"\.multiple\(|patch\.dict\(")
# What something is written to, and what a string may say. A look at the whole file for each name
# would take a file with many functions twice as long for each line.
_WRITTEN = re.compile(rb"\.([\w\x80-\xff]+)(?=\s*=[^=])")
# By what a class is run: its constructor, or what applies an autograd function.
_RUNNING = ("__init__", "apply")
_RUN_WRITTEN = re.compile(rb"\.(?:__init__|apply)\s*=[^=]")
_QUOTED = re.compile(rb"[\"'.}]([\w\x80-\xff]+)(?=[\"'])")
_RUN_QUOTED = re.compile(rb",\s*[\"'](?:__init__|apply)[\"']")
_LAST_WORD = re.compile(rb"[\w\x80-\xff]+\Z")
_LONGEST_WORD = 1000
_OF_OBJECTS = frozenset({"self", "cls"})


@dataclass(frozen=True)
class _Words:
    """Words of a file, at a glance."""

    # Attributes that something is assigned to, and what has a constructor to which something is.
    written: frozenset[bytes]
    # Where the file may patch, the last words of strings, and what a constructor is named of.
    quoted: frozenset[bytes] = frozenset()
    has_keywords: bool = False  # whether it patches by names of arguments


class Replaced:
    """Answers what may be replaced in the files of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def may_be(self, thing: Thing) -> bool:
        """Whether something may be put in the place of a function or a class of the project."""
        name = thing.scope.name if thing.scope is not None else ""
        at = thing.path
        return at is not None and any(
            self._is_replaced_in(file, name, thing) for file in self._index.mentioning(name, at)
        )

    def by_tests(self, thing: Thing) -> Iterator[tuple[Path, int]]:
        """Where tests may put something in the place of a thing of the source: file and line."""
        name = thing.scope.name if thing.scope is not None else ""
        for file in self._index.everywhere(name):
            if self._index.modules.is_test(file) and self._is_replaced_in(file, name, thing):
                yield file, _line_of(name.encode(), self._index.data(file))

    def _is_replaced_in(self, file: Path, name: str, thing: Thing) -> bool:
        words = self._words(file)
        if name.encode() in words.written:
            return True
        named = words.has_keywords or name.encode() in words.quoted
        return named and self._patches(file, name, thing)

    @kept
    def _words(self, file: Path) -> _Words:
        data = self._index.data(file)
        written = {*_WRITTEN.findall(data), *_before(data, _RUN_WRITTEN)}
        if not _MAY_PATCH.search(data):  # as with most
            return _Words(frozenset(written))
        quoted = {*_QUOTED.findall(data), *_before(data, _RUN_QUOTED)}
        has_keywords = _MAY_HAVE_KEYWORDS.search(data) is not None
        return _Words(frozenset(written), frozenset(quoted), has_keywords)

    def _patches(self, file: Path, name: str, thing: Thing) -> bool:
        patches = self._of(file)
        if patches is None or name in patches.names:
            return True
        if any(self._means(use, file, thing) for use in patches.written):
            return True
        if any(self._is_passed_to_helper(use, file) for use in patches.passed.get(name, ())):
            return True
        return any(
            each is None or table in each.read
            for table in patches.tables.get(name, ())
            for each in self._mentioning(table, file)
        )

    def _mentioning(self, word: str, seen_from: Path) -> Iterator[_Patches | None]:
        """What the files patch that have a word."""
        for file in self._index.mentioning(word, seen_from):
            if _MAY_PATCH.search(self._index.data(file)):
                yield self._of(file)

    @kept
    def _of(self, file: Path) -> _Patches | None:
        """What a file patches; None where it can't be parsed."""
        looked = self._index.look(file)
        return _Patches(looked[0].tree, looked[1]) if looked else None

    # -- what a string means -----------------------------------------------------------------

    def _means(self, use: Use, file: Path, thing: Thing) -> bool:
        """Whether a string that a call patches by may mean a thing of the project."""
        text, call = _text(use.node), use.parents.node
        if thing.scope is None or not isinstance(call, ast.Call):
            return False
        *module, last = text.split(".")
        if last != thing.scope.name and text not in _RUNNING:
            return False
        if module:
            return any(self._has(at, last, thing) for at in self._index.modules.ending(module))
        first = call.args[0] if call.args else None
        if first is None or first is use.node:
            return last not in _RUNNING
        owners = self._index.resolver.expression(first, use.scope, file)
        if last in _RUNNING:  # a mock in its place takes whatever it is given
            is_unknown = not owners or UNKNOWN in owners
            is_it = thing in owners or (is_unknown and last_name(first) == thing.scope.name)
            return last_name(call.func) == "setattr" and is_it
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
        by_name = isinstance(call.func, ast.Name)
        return by_name and self._is_helping_fixture(last_name(call.func), use.scope, file)

    def _is_helping_fixture(self, name: str, scope: Scope, file: Path) -> bool:
        """Whether a name is a parameter's, and a fixture of that name gives such a function."""
        found = scope.find(name)
        if found is None or not all(isinstance(e, Opaque) and e.parameter for e in found[1]):
            return False
        return any(each is None or name in each.helpers for each in self._mentioning(name, file))


def _line_of(name: bytes, data: bytes) -> int:
    """The line in which something is written to a name, or a string says it; else the first that
    has it.
    """
    word = rb"(?<![\w\x80-\xff])" + re.escape(name) + rb"(?![\w\x80-\xff])"
    written, constructor = _RUN_WRITTEN.pattern, _RUN_QUOTED.pattern
    said = (rb"\." + word + rb"\s*=[^=]", word + written, word + constructor, word + rb"[\"']")
    found = next(filter(None, (re.search(sought, data) for sought in (*said, word))), None)
    return data[: found.end()].count(b"\n") + 1 if found is not None else 0


def _before(data: bytes, what: re.Pattern[bytes]) -> Iterator[bytes]:
    """The words before each place where something stands."""
    for found in what.finditer(data):
        before = data[max(found.start() - _LONGEST_WORD, 0) : found.start()].rstrip()
        if word := _LAST_WORD.search(before):
            yield word[0]


class _Patches:
    """What a file patches."""

    def __init__(self, tree: ast.Module, analysis: Analysis) -> None:
        self.written: list[Use] = []  # strings that are arguments of calls that patch
        self.passed: dict[str, list[Use]] = {}  # those of other calls, by their last names
        self.names: set[str] = set()  # last names of other strings that may come to such a call
        self.read: set[str] = set()  # what functions read that patch what they are told to
        self.helpers: set[str] = set()  # the names of these functions
        self.tables: dict[str, set[str]] = {}  # last name -> the tables with such a string
        self._other_names = set(_names_for_patching(analysis.module))
        nodes = list(walk(tree))
        units: list[ast.AST] = []
        for use in analysis.uses:
            call = use.parents.node
            if isinstance(use.node, ast.Constant):
                self._string(use)
            elif isinstance(call, ast.Call) and call.func is use.node and self._is_patching(call):
                self._in_arguments(call)
                if _is_told(call) and not _is_of_an_object(call, use.scope):
                    units += _units(use)
        for node in nodes:
            self.names |= _written_by_name(node)
        self._follow(units, tree, [each for each in nodes if isinstance(each, ast.Call)])

    def _is_patching(self, call: ast.Call) -> bool:
        return any(
            _PATCHING.search(name) or name in self._other_names
            for name in map(last_name, _named(call.func))
        )

    def _string(self, use: Use) -> None:
        call = use.parents.node
        if isinstance(call, ast.Call) and self._is_patching(call):
            self.written.append(use)
        else:
            self.passed.setdefault(_last(_text(use.node)), []).append(use)

    def _in_arguments(self, call: ast.Call) -> None:
        """Strings further in than the arguments themselves, and names of arguments."""
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            if not isinstance(value, ast.Constant):
                self.names |= set(_strings(value))
        if last_name(call.func) in _BY_KEYWORD:
            self.names |= {keyword.arg for keyword in call.keywords if keyword.arg}

    def _follow(self, units: list[ast.AST], tree: ast.Module, calls: list[ast.Call]) -> None:
        """What may come to functions that patch what they are told to."""
        tables = _tables(tree)
        seen: set[int] = set()
        for unit in units:  # grows
            if id(unit) in seen:
                continue
            seen.add(id(unit))
            self.names |= set(_strings(unit))
            read = {last_name(each) for each in _named(unit)}
            self.read |= read
            units += [table for name in read for table in tables.get(name, ())]
            if isinstance(unit, FunctionNode):
                self.helpers.add(unit.name)
                units += [each for each in calls if last_name(each.func) == unit.name]
        for name, values in tables.items():
            for value in values if name != "__all__" else ():
                for last in _strings(value):
                    self.tables.setdefault(last, set()).add(name)


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


def _tables(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """What is assigned at the top of a module, or in a class, to each name; and what gives it as a
    fixture does.
    """
    found: dict[str, list[ast.AST]] = {}
    waiting: list[ast.stmt] = list(tree.body)
    for statement in waiting:  # grows
        if isinstance(statement, ast.ClassDef | ast.If | ast.Try | ast.With):
            inside = ast.iter_child_nodes(statement)
            waiting += [each for each in inside if isinstance(each, ast.stmt)]
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
            targets = [statement.target]
        elif isinstance(statement, FunctionNode) and "fixture" in decorators(statement):
            found.setdefault(statement.name, []).append(statement)
        for target in targets:
            value = getattr(statement, "value", None)
            if value is not None and (name := last_name(target)):
                found.setdefault(name, []).append(value)
    return found


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
