"""Whether a new text mixes carriers: what a function, or a class, asks about one kind of group has
to come from one of them. Else who is in a group is asked of one, and the collective runs on the
group of another. A function that asks the globals asks nothing else, about whatever kinds.

Nothing here knows how the edits were planned: the new text is read, and what is written there.
"""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from megapg.migrate.edit.absent import for_none
from megapg.migrate.edit.called import Names, is_of_a_core
from megapg.migrate.find.axes import axes_of, group_argument
from megapg.migrate.find.carriers import MODEL_NAMES
from megapg.migrate.find.roles import is_of_another_role
from megapg.migrate.python.methods import (
    attributes_kept,
    attributes_read,
    kept,
    making,
    parameters,
    setting_up,
)
from megapg.migrate.python.scopes import FunctionNode, children_of, last_name, walk
from megapg.upstream.mapping import COLLECTION_NAMES
from megapg.upstream.signatures import VERSIONS

PASSED, GLOBALS = "pg_collection", "the globals"
"""What was passed, else the globals; and the globals alone."""

CONSTRUCTOR = "__init__"
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
    """A function, or a class, in which two carriers are asked that must not be."""

    where: str  # its name
    number: int  # which one of its file, as definitions_in() has them
    axes: frozenset[str]  # the kinds of groups
    one: Asking
    other: Asking

    def __str__(self) -> str:
        is_one_kind = axes_of(self.one.what) & axes_of(self.other.what)
        about = "about one kind of groups" if is_one_kind else "in one function"
        return (
            f"{self.where} would ask {self.one.carrier} ({self.one.what}) and {self.other.carrier} "
            f"({self.other.what}) {about} ({', '.join(sorted(self.axes))})"
        )


def definitions_in(tree: ast.Module) -> list[FunctionNode | ast.ClassDef]:
    """The functions and classes of a file, in an order that no edit changes."""
    return [each for each in walk(tree) if isinstance(each, FunctionNode | ast.ClassDef)]


def mixed(
    trees: Mapping[str, ast.Module],
    versions: Collection[int] = tuple(VERSIONS),
    unchanged: Mapping[str, ast.Module] | None = None,
    runtime: str = "megapg",
) -> Iterator[tuple[str, Mixed]]:
    """The functions and classes of a project that ask two carriers about one kind of group, with
    their files. What a class is made of asks the same object.

    Args:
        trees: the new texts, parsed, by their files.
        versions: of Megatron-core, that may run them.
        unchanged: other files, whose classes may be made of those, or the other way round. What is
            there alone is not looked at.
        runtime: what the new texts import.
    """
    every = {**(unchanged or {}), **trees}
    has_core = any(map(is_of_a_core, every))
    files = {
        name: text_of(tree, name, tuple(versions), has_core, runtime)
        for name, tree in every.items()
    }
    everywhere: dict[str, list[_Class]] = defaultdict(list)
    for name, file in files.items():
        for klass in file.classes:
            everywhere[klass.node.name].append(klass)
        for number, node in enumerate(file.definitions if name in trees else ()):
            if isinstance(node, FunctionNode):
                asked = file.asked_by(node)
                found = [*_apart(node.name, number, asked)]
                yield from (
                    (name, e) for e in found or _beside_the_globals(node.name, number, asked)
                )
    for name, file in files.items():
        for klass in file.classes:
            line = list(_line(klass, everywhere))
            if any(each.file.name in trees for each in line):
                asked = [asking for each in line for asking in each.asked]
                where = f"class {klass.node.name}"
                yield from ((name, each) for each in _apart(where, klass.number, asked))
                beside = klass.beside_what_is_kept([each.kept for each in line])
                for pair in beside:
                    yield from ((name, each) for each in _apart(where, klass.number, pair))


def new_in(
    found: Iterable[tuple[str, Mixed]], before: Callable[[], Iterable[tuple[str, Mixed]]]
) -> list[tuple[str, Mixed]]:
    """What mixes carriers and did not before: what the same function, or class, asked the same two
    about the same kinds of groups then is the project's own.

    Args:
        found: in the new texts, by their files.
        before: finds it in the old ones; is called where there is something to compare with.
    """
    found = list(found)
    known = {_key(file, each): each.axes for file, each in before()} if found else {}
    return [
        (file, each) for file, each in found if not each.axes <= known.get(_key(file, each), set())
    ]


def _key(file: str, found: Mixed) -> tuple[str, int, frozenset[str]]:
    return file, found.number, frozenset({found.one.carrier, found.other.carrier})


def _line(klass: _Class, everywhere: Mapping[str, Sequence[_Class]]) -> Iterator[_Class]:
    """A class and what it is made of, as far as one class alone has the name, in its file or else
    where that is imported from.
    """
    waiting = [klass]
    for each in waiting:  # grows
        yield each
        for base in each.node.bases:
            name, of = last_name(base), ast.unparse(base).partition(".")[0]
            alike = everywhere.get(name, ())
            home = each.file.names.homes.get(of, "?")
            found = [one for one in alike if one.file is each.file]
            found = found or [one for one in alike if home in f"/{one.file.name}"]
            if len(found) == 1 and found[0] not in waiting:
                waiting += found


def kept_or_handed_on(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is put into an attribute, and what is passed to a call that is none of ours."""
    for each in nodes:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute):
            yield each.value
        elif isinstance(each, ast.Call) and last_name(each.func) not in ("resolve", "groups_of"):
            yield from (*each.args, *(keyword.value for keyword in each.keywords))


def _makes_groups(function: FunctionNode) -> bool:
    called = (last_name(e.func) for e in walk(function) if isinstance(e, ast.Call))
    return any(each in ("initialize_model_parallel", "destroy_model_parallel") for each in called)


def _is_passed(carrier: str, method: FunctionNode) -> bool:
    return any(each.arg == carrier for each in parameters(method))


def _apart(where: str, number: int, asked: Sequence[Asking]) -> Iterator[Mixed]:
    if len({each.carrier for each in asked}) < 2:
        return
    of_carriers: dict[str, dict[str, Asking]] = {}
    for each in asked:
        known = of_carriers.setdefault(each.carrier, {})
        for axis in axes_of(each.what):
            known.setdefault(axis, each)
    for (_, one), (_, other) in combinations(of_carriers.items(), 2):
        if axes := one.keys() & other.keys():
            first = min(axes)
            yield Mixed(where, number, frozenset(axes), one[first], other[first])


def _beside_the_globals(where: str, number: int, asked: Sequence[Asking]) -> Iterator[Mixed]:
    """A function that asks the globals about some kinds of groups, and an object about others."""
    of_carriers: dict[str, list[Asking]] = defaultdict(list)
    for each in asked:
        if axes_of(each.what) and not each.by_core:
            of_carriers[each.carrier].append(each)
    of_globals = of_carriers.pop(GLOBALS, [])
    for others in of_carriers.values() if of_globals else ():
        both = frozenset[str]().union(*(axes_of(each.what) for each in of_globals + others))
        yield Mixed(where, number, both, of_globals[0], others[0])


class TextOfFile:
    """What is in a file."""

    def __init__(
        self,
        name: str,
        tree: ast.Module,
        versions: Collection[int],
        has_core: bool,
        runtime: str,
    ) -> None:
        self.name = name
        nodes = list(walk(tree))
        self.definitions = [each for each in nodes if isinstance(each, FunctionNode | ast.ClassDef)]
        imports = [each for each in nodes if isinstance(each, ast.Import | ast.ImportFrom)]
        self.names = Names(imports, versions, has_core, runtime)
        self.classes = [
            _Class(each, number, self)
            for number, each in enumerate(self.definitions)
            if isinstance(each, ast.ClassDef)
        ]
        said = self.names.all | {*COLLECTION_NAMES}
        self._lines = sorted(  # in the others nothing is asked
            each.lineno
            for each in nodes
            if (isinstance(each, ast.Name) and (each.id in said or self.names.has_star))
            or (isinstance(each, ast.Attribute) and each.attr in COLLECTION_NAMES)
        )
        self._asked: dict[FunctionNode, list[Asking]] = {}

    def asked_by(self, function: FunctionNode) -> list[Asking]:
        """All that a function asks."""
        if function not in self._asked:
            begin = bisect_left(self._lines, function.lineno)
            says = bisect_right(self._lines, function.end_lineno or function.lineno) > begin
            self._asked[function] = _Reading(function, self.names).asked() if says else []
        return self._asked[function]


@kept
def text_of(
    tree: ast.Module, name: str, versions: tuple[int, ...], has_core: bool, runtime: str
) -> TextOfFile:
    """What is in a file, which is found out once for all who ask about its tree."""
    return TextOfFile(name, tree, versions, has_core, runtime)


class _Class:
    """A class of a file."""

    def __init__(self, node: ast.ClassDef, number: int, file: TextOfFile) -> None:
        self.node, self.number, self.file = node, number, file

    @property
    def asked(self) -> Iterator[Asking]:
        """What its methods ask, of the object or of the globals."""
        methods = [each for each in self.node.body if isinstance(each, FunctionNode)]
        makers = [each for each in methods if each.name == CONSTRUCTOR]
        takes_one = any(e.arg in COLLECTION_NAMES for each in makers for e in parameters(each))
        without_one, of_object = making(self.node), setting_up(self.node)
        for method in methods:
            asked = self.file.asked_by(method)
            if not asked or _makes_groups(method):
                continue
            # What a constructor is passed is what the object has.
            is_maker = method.name == CONSTRUCTOR
            of_self = ("self", PASSED) if is_maker else ("self",)
            for asking in asked:
                if asking.carrier in of_self:
                    yield replace(asking, carrier="self")
                elif asking.carrier == GLOBALS:
                    if not asking.by_core:
                        yield asking
                elif takes_one and (
                    is_maker
                    or (method.name in without_one and asking.carrier not in COLLECTION_NAMES)
                    or (method.name in of_object and not _is_passed(asking.carrier, method))
                ):
                    yield asking

    @cached_property
    def kept(self) -> dict[str, list[Asking]]:
        """What its constructor asked for each attribute that it gives the object."""
        found: dict[str, list[Asking]] = {}
        for each in self.node.body:
            if not isinstance(each, FunctionNode) or each.name != CONSTRUCTOR:
                continue
            asked = self.file.asked_by(each)
            lines_of = {id(e): e.lineno for e in walk(each) if asked and isinstance(e, ast.expr)}
            for attribute, nodes in attributes_kept(each).items() if asked else ():
                lines = {lines_of[node] for node in nodes & lines_of.keys()}
                found.setdefault(attribute, []).extend(e for e in asked if e.line in lines)
        return found

    def beside_what_is_kept(
        self, kept: Sequence[Mapping[str, Sequence[Asking]]]
    ) -> Iterator[list[Asking]]:
        """What each of its methods asks, with what a constructor asked for what that one reads."""
        for each in self.node.body if any(kept) else ():
            if (
                not isinstance(each, FunctionNode)
                or each.name == CONSTRUCTOR
                or _makes_groups(each)
            ):
                continue
            others = [e for e in self.file.asked_by(each) if e.carrier not in ("self", GLOBALS)]
            read = attributes_read(each) if others else set()
            of_it = [e for some in kept for name in read & some.keys() for e in some[name]]
            if of_it:
                asked = [
                    replace(e, carrier="self" if e.carrier == PASSED else e.carrier) for e in of_it
                ]
                yield [*asked, *others]


class _Reading:
    """What one function asks. The functions in it that have a model of their own count where it
    asks the globals.
    """

    def __init__(
        self, function: FunctionNode, names: Names, around: _Reading | None = None
    ) -> None:
        self._function, self._names = function, names
        # Variables -> since which lines each holds a collection, and of which carrier. A model.
        self._holds: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._comes_of: dict[str, str] = dict(around._comes_of) if around else {}
        if around:
            self._holds.update({name: list(held) for name, held in around._holds.items()})
        self._nodes: list[ast.AST] = []
        self._inner: list[FunctionNode] = []
        waiting: list[ast.AST] = [function]
        while waiting:
            each = waiting.pop()
            self._nodes.append(each)
            if isinstance(each, FunctionNode) and each is not function:
                self._inner.append(each)
            else:
                waiting += children_of(each)
        self._of_lambdas = {
            each.arg
            for node in self._nodes
            if isinstance(node, ast.Lambda)
            for each in parameters(node)
        }
        # What runs where a collection, or a model, is None: what is asked there stands in for it.
        self._for_none = {
            id(inner): name
            for each in self._nodes
            for name, branch in for_none(each)
            for inner in walk(branch)
        }

    def asked(self) -> list[Asking]:
        """All that it asks, in the order of its text."""
        binding = (each for each in self._nodes if isinstance(each, ast.Assign | ast.For))
        for node in sorted(binding, key=lambda each: each.lineno):
            if isinstance(node, ast.For):
                self._bind(node.target, node.iter)
            elif id(node) not in self._for_none:
                self._bind(node.targets[0], node.value)
        found = []
        instead = {  # of a collection that is None: ``pg_collection or groups_of(model)``
            id(inner)
            for each in self._nodes
            if isinstance(each, ast.BoolOp) and isinstance(each.op, ast.Or)
            if self._carrier(each.values[0])
            for value in each.values[1:]
            for inner in walk(value)
        }
        for each in self._nodes:
            if id(each) in instead:
                continue
            absent = self._for_none.get(id(each), "")
            means = (GLOBALS,) if absent in COLLECTION_NAMES else (GLOBALS, PASSED)
            for asking in self._of(each):
                stands_in = absent and asking.carrier in means
                found.append(replace(asking, carrier=absent) if stands_in else asking)
        of_inner: list[Asking] = []  # what functions in it ask that have a model of their own
        for each in self._inner:
            of_it = {one.arg for one in parameters(each)}
            for asking in _Reading(each, self._names, self).asked():
                if asking.carrier not in of_it:
                    found.append(asking)
                elif asking.carrier not in COLLECTION_NAMES:
                    of_inner.append(asking)
        if any(each.carrier == GLOBALS and not each.by_core for each in found):
            found += of_inner  # the globals are beside no model, whosever it is
        own = [
            each
            for each in found
            if each.carrier not in self._of_lambdas and not is_of_another_role(each.carrier)
        ]
        if self._function.name == CONSTRUCTOR and any(
            isinstance(each, ast.Name) and each.id == PASSED
            for each in kept_or_handed_on(self._nodes)
        ):  # the object has what it was passed
            own = [replace(e, carrier=PASSED) if e.carrier == "self" else e for e in own]
        return sorted(own, key=lambda each: each.line)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            return
        if carrier := self._carrier(value):
            self._holds[target.id].append((target.lineno, carrier))
        elif isinstance(value, ast.Call):  # a model that is made with a collection
            given = [each.value for each in value.keywords if each.arg == PASSED]
            if given and (carrier := self._carrier(given[0])):
                self._comes_of[target.id] = carrier
            elif target.id in COLLECTION_NAMES and value.args:  # or one that is had of a model
                of = self._model(value.args[0])
                if of == "self" or of in MODEL_NAMES:
                    self._holds[target.id].append((target.lineno, of))
        elif isinstance(value, ast.Attribute):
            self._comes_of[target.id] = self._model(value)

    def _of(self, node: ast.AST) -> Iterator[Asking]:
        if isinstance(node, ast.Attribute):
            if self._names.is_private(node):
                yield Asking(GLOBALS, node.attr.lower(), node.lineno)
            is_read = node.attr not in _OTHERS and isinstance(node.ctx, ast.Load)
            if is_read and (carrier := self._carrier(node.value)):
                yield Asking(carrier, node.attr, node.lineno)
            return
        if not isinstance(node, ast.Call):
            return
        line = node.lineno
        if name := self._names.left(node.func):
            yield Asking(GLOBALS, name, line)
            yield from _of_context_too(node, GLOBALS)
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        if any(isinstance(e, ast.Name) and e.id in self._names.modules for e in given):
            yield from (Asking(GLOBALS, each, line) for each in self._names.read_by_name(node))
        if group_argument(node) and self._names.is_of_core(node.func):
            yield Asking(GLOBALS, "tp", line, by_core=True)
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and first is not None:
            carrier = self._carrier(node.func.value)
            if carrier and isinstance(first, ast.Constant):
                yield Asking(carrier, str(first.value), line)
        carrier = self._carrier(node)  # it is asked, or passed on, for what it is looked up
        if not carrier and first is not None and self._is_getter(node.func):
            carrier = self._carrier(first)
            if carrier and isinstance(node.func, ast.Attribute):
                yield Asking(carrier, node.func.attr, line)
                yield from _of_context_too(node, carrier)
        for each in node.args[1:] if carrier else ():
            if isinstance(each, ast.Constant):
                yield Asking(carrier, str(each.value), line)

    def _is_getter(self, called: ast.expr) -> bool:
        """Whether it is asked what a collection, its first argument, says or has."""
        if isinstance(called, ast.Attribute):
            return last_name(called.value) in self._names.getters
        return isinstance(called, ast.Name) and called.id == "getattr"

    def _carrier(self, node: ast.expr) -> str:
        """Of what an expression is a collection; empty where it is none."""
        if isinstance(node, ast.Name):
            held = self._holds.get(node.id) or []
            before = [carrier for line, carrier in held if line <= node.lineno]
            if before or held:
                return before[-1] if before else held[0][1]
            return node.id if node.id in COLLECTION_NAMES else ""
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
        return name if is_of_another_role(name) else self._comes_of.get(name, name)


def _of_context_too(call: ast.Call, carrier: str) -> Iterator[Asking]:
    """What is asked by an argument that says that a group is one with context parallel ranks."""
    if any(each.arg == "with_context_parallel" for each in call.keywords):
        yield Asking(carrier, "cp", call.lineno)
