"""Patched getters in tests, rewritten to a collection of fake groups where that answers the same.

``with patch("pkg.mod.parallel_state.get_tensor_model_parallel_rank", return_value=1)`` is no use
once the code under test reads a collection. ``with megapg.testing.fake_collection(tp=2, rank=1) as
pg, megapg.published(pg)`` serves getters and collections alike. It stands in for a patch only if

* what the patches of a scope say is written out, and one rank of one layout says all of it;
* nothing else in the scope, in fixtures and helpers that it uses included, touches the globals;
* nobody looks at the mock itself.

What the patches did not say was not there before: reading it failed. The collection has it, and
``torch.distributed`` is initialised in it. Where a test or a fixture sets that up itself, or
patches it around the getters, the patches are left.
"""

from __future__ import annotations

import ast
import itertools
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TypeAlias

from megapg.migrate.mapping import GROUP_GLOBALS, Refusal, replacement
from megapg.migrate.migration import Edit, applied
from megapg.migrate.played import Answer, Played, asks_of, is_expressible, played
from megapg.migrate.scopes import Analysis, Binding, Imported, Scope, last_name
from megapg.migrate.signatures import VERSIONS, signature
from megapg.migrate.sites import Kind, Site
from megapg.migrate.source import Source

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_With: TypeAlias = ast.With | ast.AsyncWith

_PATCHED = frozenset({Kind.PATCHED, Kind.STRING})
_FIXTURES_OF_PATCHES = ("monkeypatch", "mocker")
_SETUPS = re.compile(
    r"(?:setup|teardown|setUp|tearDown|asyncSetUp|asyncTearDown)(?:_\w+|[A-Z]\w*)?\Z"
)
_NAMES_OF_GLOBALS = re.compile(r"\b(?:parallel_state|mpu)\b|_parallel_(?:rank|world_size|group)\b")
_NAMES_OF_DISTRIBUTED = re.compile(r"\b(?:distributed|dist|c10d)\b")
# Calls, and classes of helpers, that start torch.distributed or fill the globals.
_STARTS = re.compile(
    r"init_process_group|destroy_process_group|initialize_model_parallel|destroy_model_parallel"
    r"|initialize_distributed|init_distributed\w*|initialize_megatron|fake_collection|spawn"
    r"|run_distributed|megapg_collection"
)
_NAMES = ("pg", "fake_pg", "pg_collection", "fake_groups")


@dataclass(frozen=True)
class PatchPlan:
    """What becomes of the patches of one file.

    Attributes:
        edits: in the order of the file. The new text parses to what the old one does but for what
            they are meant to change; that is checked. It needs ``import megapg``.
        served: the sites that they rewrite.
        stands: sites that are right as they are: nothing that they patch is ever migrated, or what
            is read after a migration is what they patch.
        left: other sites, and what to write.
    """

    edits: tuple[Edit, ...]
    served: tuple[Site, ...]
    stands: tuple[Site, ...]
    left: Mapping[Site, str]


def plan_patches(
    source: Source,
    analysis: Analysis,
    sites: Sequence[Site],
    conftests: Sequence[tuple[Source, Sequence[Site]]] = (),
) -> PatchPlan:
    """Rewrite the patches of a file, as far as it is certain that they mean the same.

    Args:
        source: the file.
        analysis: its scopes.
        sites: all its sites, of whatever kind.
        conftests: the ``conftest.py`` files whose fixtures its tests may use, with their sites.
    """
    return _Planner(source, analysis, sites, conftests).plan()


# -- patches as they are written -------------------------------------------------------------------


@dataclass(eq=False)
class _Patch:
    """One patch of a getter.

    ``why`` is empty where the patch says what it answers; ``injected`` is the parameter that a
    decorator fills with the mock, and ``sets`` the statement that tells the mock what to answer.
    """

    site: Site
    call: ast.Call
    answer: Answer | None = None
    why: str = ""
    injected: ast.arg | None = None
    sets: ast.stmt | None = None


@dataclass(eq=False)
class _Unit:
    """Patches that one collection stands in for: of a with statement, or of a whole function."""

    node: _With | _Function
    function: _Function
    patches: list[_Patch] = field(default_factory=list)


class _Nodes:
    """Where what is in a file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.parents: dict[ast.AST, ast.AST] = {}
        self._by_place: dict[tuple[int, int], ast.expr] = {}
        waiting: list[ast.AST] = [source.tree]
        for node in waiting:  # grows
            children = list(ast.iter_child_nodes(node))
            self.parents |= dict.fromkeys(children, node)
            waiting += children
            if isinstance(node, ast.expr):
                self._by_place.setdefault(source.extent(node), node)

    def at(self, site: Site) -> ast.expr | None:
        """The expression of a site; None where it is not certain where it is."""
        starts, span = self._source.line_starts, site.span
        begin = starts[span.line - 1] + span.column - 1
        return self._by_place.get((begin, starts[span.end_line - 1] + span.end_column - 1))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around one, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: ast.AST) -> _Function | None:
        """The outermost function around it, or itself."""
        around = [node, *self.above(node)]
        return next((each for each in reversed(around) if isinstance(each, _Function)), None)

    def class_of(self, function: _Function) -> ast.ClassDef | None:
        """The class that it is a method of."""
        parent = self.parents.get(function)
        return parent if isinstance(parent, ast.ClassDef) else None


@lru_cache(maxsize=4096)
def _words(tree: ast.AST) -> frozenset[str]:
    """Every name in it, and every string that might be one, as usefixtures() takes them."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.arg):
            words.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return frozenset(words)


def _imported_as(node: ast.expr, scope: Scope) -> str:
    """The dotted name that an expression of imported names stands for; empty where it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    found = scope.find(node.id) if isinstance(node, ast.Name) else None
    bindings: Sequence[Binding] = found[1] if found else ()
    origins = {_origin(binding) for binding in bindings}
    return ".".join([*origins, *parts]) if len(origins) == 1 and "" not in origins else ""


def _origin(binding: Binding) -> str:
    if not isinstance(binding, Imported) or binding.level:
        return ""
    return ".".join([*binding.module, *filter(None, [binding.member])])


def _is_of_core(name: str) -> bool:
    return re.match(r"megatron\.(?:core\.)?(?:parallel_state|mpu)\b", name) is not None


def _literal(node: ast.expr | None) -> object:
    """What is written there; Ellipsis where it shows at run time only."""
    if node is None:
        return ...
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ...
    return value


def _answer_of_new(node: ast.expr) -> object:
    """What calling it gives: ``lambda: 2``, ``Mock(return_value=2)``."""
    if isinstance(node, ast.Lambda):
        return _literal(node.body)
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("Mock", "MagicMock"):
        return ...
    if node.args or [each.arg for each in node.keywords] != ["return_value"]:
        return ...
    return _literal(node.keywords[0].value)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Reader:
    """Reads patches: who is patched how, and what it answers from then on."""

    def __init__(self, analysis: Analysis, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._scopes = {use.node: use.scope for use in analysis.uses}

    def is_mock(self, call: ast.Call) -> bool:
        """Whether it is ``unittest.mock``'s patch() or patch.object(), by whatever name."""
        scope = self._scopes.get(call.func)
        origin = _imported_as(call.func, scope) if scope else ""
        return re.match(r"(?:unittest\.)?mock\.patch(?:\.object)?\Z", origin) is not None

    def is_of_fixture(self, call: ast.Call, function: _Function) -> bool:
        """Whether pytest's or pytest-mock's fixture patches, until the test ends."""
        root = _root(call.func)
        given = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
        if root not in _FIXTURES_OF_PATCHES or root not in given:
            return False
        chain = ast.unparse(call.func)
        return chain in ("monkeypatch.setattr", "mocker.patch", "mocker.patch.object")

    def injects(self, node: ast.expr) -> bool:
        """Whether a decorator passes a mock on."""
        if not isinstance(node, ast.Call) or not self.is_mock(node):
            return False
        target = 2 if last_name(node.func) == "object" else 1
        return len(node.args) <= target and all(each.arg != "new" for each in node.keywords)

    def read(
        self, site: Site, call: ast.Call, mock: str, body: Sequence[ast.stmt], around: ast.AST
    ) -> _Patch:
        """The patch of a site.

        Args:
            site: the site.
            call: of patch() or setattr().
            mock: the variable that holds the mock; empty where none does.
            body: what is done while the patch holds.
            around: where the variable may be used.
        """
        patch = _Patch(site, call)
        named = {keyword.arg or "": keyword.value for keyword in call.keywords}
        positional = call.args[1 if site.kind is Kind.STRING else 2 :]
        new = positional.pop(0) if positional else named.pop("new", named.pop("value", None))
        returned = named.pop("return_value", None)
        named.pop("raising", None)  # of setattr(): the getters are there
        uses = sum(
            isinstance(node, ast.Name) and node.id == mock and isinstance(node.ctx, ast.Load)
            for node in ast.walk(around)
        )
        value: object = ...
        if positional or named:
            patch.why = f"the patch takes {', '.join(named) or 'more arguments'}"
        elif new is not None:
            value = _answer_of_new(new)
        elif returned is not None:
            value = _literal(returned)
        elif (found := _set_first(mock, body)) is not None:
            (patch.sets, value), uses = found, uses - 1
        else:
            patch.why = "it answers with a mock"
        if not patch.why and uses:
            patch.why = "the test uses the mock itself"
        elif not patch.why and value is ...:
            patch.why = "what it answers shows at run time only"
        elif not patch.why and not is_expressible(Answer(site.name, value)):
            patch.why = f"in no layout it is {value!r}"
        if not patch.why:
            patch.answer = Answer(site.name, value)
        return patch


def _set_first(mock: str, body: Sequence[ast.stmt]) -> tuple[ast.stmt, object] | None:
    """``mock.return_value = 2``, where nothing but docstring, imports and the like comes before."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
            return None
        target = statement.targets[0]
        if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
            return None
        if target.attr not in ("return_value", "side_effect"):
            return None
        if target.value.id == mock:
            fits = target.attr == "return_value"
            return (statement, _literal(statement.value)) if fits else None
    return None


# -- what else touches the globals -----------------------------------------------------------------


class _Surroundings:
    """Which functions of a file touch the globals, and which of them have to do with each other."""

    def __init__(
        self,
        source: Source,
        nodes: _Nodes,
        touching: Iterable[ast.AST],
        conftests: Sequence[tuple[Source, Sequence[Site]]],
    ) -> None:
        self._nodes = nodes
        self.everywhere = False  # something at the level of the module or of a class does
        self.touching: set[_Function] = set()
        self._functions = [each for each in ast.walk(source.tree) if isinstance(each, _Function)]
        self._classes = [each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef)]
        for node in touching:
            function = nodes.function(node)
            self.everywhere |= function is None
            self.touching |= {function} if function else set()
        for function in self._functions:
            if _starts_something(function) or any(_patches_distributed(function)):
                self.touching.add(function)
        self._from_conftests: list[_Function] = []
        for conftest, sites in conftests:
            found = [each for each in conftest.tree.body if isinstance(each, _Function)]
            names = {site.function.partition(".")[0] for site in sites if _touches(site)}
            self._from_conftests += found
            self.touching |= {
                each
                for each in found
                if each.name in names or _starts_something(each) or any(_patches_distributed(each))
            }
        self._named: dict[str, list[_Function]] = {}
        for function in (*self._functions, *self._from_conftests):
            self._named.setdefault(function.name, []).append(function)
        for klass in self._classes:
            methods = [each for each in klass.body if isinstance(each, _Function)]
            self._named.setdefault(klass.name, []).extend(methods)
        self._related: dict[_Function, frozenset[_Function]] = {}

    def others(self, function: _Function) -> list[str]:
        """Names of other functions that touch the globals while this one's patches hold."""
        found: set[_Function] = set()
        for each in self._functions:
            together = self._with(each)
            if function in together:
                found |= together & self.touching
        return sorted(each.name for each in found - {function})

    def _with(self, function: _Function) -> frozenset[_Function]:
        """The function and all that runs with it: what it names, fixtures, set-up."""
        if function not in self._related:
            found: set[_Function] = set()
            waiting = [function, *self._implied(function)]
            while waiting:
                each = waiting.pop()
                if each not in found:
                    found.add(each)
                    waiting += [f for word in _words(each) for f in self._named.get(word, ())]
            self._related[function] = frozenset(found)
        return self._related[function]

    def _implied(self, function: _Function) -> Iterator[_Function]:
        """Fixtures and set-up that nobody names."""
        if not function.name.startswith("test"):
            return
        klass = self._nodes.class_of(function)
        bases = {last_name(base) for base in klass.bases} if klass else set()
        for each in (*self._functions, *self._from_conftests):
            if _is_autouse(each) or _SETUPS.match(each.name):
                home = self._nodes.class_of(each)
                if home is None or home is klass or home.name in bases:
                    yield each


def _touches(site: Site) -> bool:
    changes = site.kind in _PATCHED or site.kind is Kind.ASSIGNED
    return changes or (site.kind is Kind.CALL and site.reason in ("lifecycle", "setter"))


def _starts_something(function: _Function) -> bool:
    return any(_STARTS.fullmatch(word) for word in _words(function))


def _is_autouse(function: _Function) -> bool:
    return any(
        keyword.arg == "autouse"
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
    )


def _patching_calls(tree: ast.AST) -> Iterator[ast.Call]:
    called = ("patch", "object", "multiple", "dict", "setattr", "delattr")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and last_name(node.func) in called:
            yield node


def _patches_distributed(tree: ast.AST) -> Iterator[ast.Call]:
    """Patches of what tells whether, and as which rank, torch.distributed runs."""
    for call in _patching_calls(tree):
        if _NAMES_OF_DISTRIBUTED.search(ast.unparse(call.args[0])):
            yield call


# -- the plan --------------------------------------------------------------------------------------

_NEVER_MIGRATED = ("lifecycle", "setter", "vp-stage", "encoder-decoder", "no-state", "buffer")
_ONLY_GLOBAL_OF_ITS_FIELD = frozenset(
    name for name, of in GROUP_GLOBALS.items() if [*GROUP_GLOBALS.values()].count(of) == 1
)
_UNCLEAR = "how long the patch holds can't be told from here"
_COMMENT = "a comment stands between the patches"


class _Planner:
    def __init__(
        self,
        source: Source,
        analysis: Analysis,
        sites: Sequence[Site],
        conftests: Sequence[tuple[Source, Sequence[Site]]],
    ) -> None:
        self._source, self._analysis = source, analysis
        self._nodes = _Nodes(source)
        self._reader = _Reader(analysis, self._nodes)
        self._units: dict[ast.AST, _Unit] = {}
        self._stands: list[Site] = []
        self._left: dict[Site, str] = {}
        self._loose: list[ast.AST] = []  # what touches the globals otherwise
        calls: set[ast.AST] = set()
        for site in sites:
            if _touches(site):
                node = self._nodes.at(site)
                call = self._nodes.parents.get(node) if isinstance(node, ast.Constant) else node
                if site.kind in _PATCHED and isinstance(call, ast.Call):
                    calls.add(call)
                    self._sort(site, call)
                else:
                    self._loose.append(node or source.tree)
                    self._left |= {site: _UNCLEAR} if site.kind in _PATCHED else {}
        self._units = {node: unit for node, unit in self._units.items() if unit.patches}
        for call in _patching_calls(source.tree):
            names = [each for each in call.args[1:2] if isinstance(each, ast.Constant)]
            if call not in calls and any(map(_names_globals, (call.args[0], *names))):
                self._loose.append(call)
        self._conftests = conftests

    @cached_property
    def _around(self) -> _Surroundings:
        touching = [*self._loose, *self._units]
        return _Surroundings(self._source, self._nodes, touching, self._conftests)

    def plan(self) -> PatchPlan:
        """Everything together, and once more one by one if that does not hold."""
        planned: list[tuple[_Unit, _Rewrite]] = []
        for unit in self._units.values():
            answers = [patch.answer for patch in unit.patches if patch.answer]
            rank = played(answers)
            why = next((patch.why for patch in unit.patches if patch.why), "")
            why = why or self._why_not(unit, rank)
            if not why and rank is not None:
                rewrite = _Rewrite(self._source, unit, rank, self._name(unit.function))
                why = rewrite.why
                planned += [(unit, rewrite)] if not why else []
            if why:
                self._leave(unit, why, rank)
        if planned and not _holds(self._source, planned):
            alone = [each for each in planned if _holds(self._source, [each])]
            for unit, _ in [each for each in planned if each not in alone]:
                self._leave(unit, "the rewritten test would not be what it should", None)
            planned = alone
        edits = sorted(
            (edit for _, rewrite in planned for edit in rewrite.edits),
            key=lambda edit: (edit.start, edit.stop),
        )
        served = [patch.site for unit, _ in planned for patch in unit.patches]
        return PatchPlan(tuple(edits), tuple(served), tuple(self._stands), self._left)

    def _sort(self, site: Site, call: ast.Call) -> None:
        """Into the unit that the patch belongs to, or to those that stand or are left."""
        if site.keep:
            self._loose.append(call)
            return
        place = self._place(call)
        unit = self._units.setdefault(place[0], _Unit(*place)) if place else None
        if _stands(site, call):
            self._stands.append(site)
            if site.name in GROUP_GLOBALS:  # published() would set it too
                self._loose.append(call)
        elif unit is None:
            self._loose.append(call)
            self._left[site] = _suggestion(site, _UNCLEAR, None)
        elif not site.name:
            unit.patches.append(_Patch(site, call, why="the module as a whole is patched"))
        else:
            unit.patches.append(self._read(site, call, unit))

    def _place(self, call: ast.Call) -> tuple[_With | _Function, _Function] | None:
        """The node of the unit that a patch belongs to, and the function that it is in."""
        parent = self._nodes.parents[call]
        function = self._nodes.function(call)
        if function is None:
            return None
        inner = next(each for each in self._nodes.above(call) if isinstance(each, _Function))
        if isinstance(parent, ast.withitem) and inner is function and self._reader.is_mock(call):
            around = self._nodes.parents[parent]
            return (around, function) if isinstance(around, _With) else None
        if inner is not function or not function.name.startswith("test"):
            return None
        if parent is function:
            decorates = call in function.decorator_list and self._reader.is_mock(call)
            return (function, function) if decorates else None
        stated = isinstance(parent, ast.Expr) and parent in function.body
        by_fixture = stated and self._reader.is_of_fixture(call, function)
        return (function, function) if by_fixture else None

    def _read(self, site: Site, call: ast.Call, unit: _Unit) -> _Patch:
        parent, function = self._nodes.parents[call], unit.function
        if isinstance(parent, ast.withitem) and isinstance(unit.node, _With):
            name = parent.optional_vars
            if name is not None and not isinstance(name, ast.Name):
                return _Patch(site, call, why=_UNCLEAR)
            mock = name.id if name else ""
            return self._reader.read(site, call, mock, unit.node.body, function)
        if parent is not function or not self._reader.injects(call):
            return self._reader.read(site, call, "", (), function)
        injected = [
            each for each in reversed(function.decorator_list) if self._reader.injects(each)
        ]
        at = injected.index(call) + (self._nodes.class_of(function) is not None)
        if at >= len(function.args.args) - len(function.args.defaults) or function.args.posonlyargs:
            return _Patch(site, call, why="the parameter for its mock can't be told")
        parameter = function.args.args[at]
        patch = self._reader.read(site, call, parameter.arg, function.body, function)
        patch.injected = parameter
        return patch

    def _why_not(self, unit: _Unit, rank: Played | None) -> str:
        """What is in the way of a collection in place of the patches, whose answers are known."""
        function = unit.function
        if rank is None:
            said = ", ".join(
                f"{each.answer.name}() is {each.answer.value}"
                for each in unit.patches
                if each.answer
            )
            return f"no rank of any layout answers all of it: {said}"
        if self._source.path.name == "conftest.py":
            return "which tests use the fixture can't be told from here"
        if self._around.everywhere:
            return "the module or class patches or sets the globals too"
        if others := self._around.others(function):
            return f"{', '.join(others)} patches or sets the globals or torch.distributed too"
        if _starts_something(function):
            return "the test sets up or ends process groups itself"
        by_fixture = isinstance(unit.node, ast.FunctionDef | ast.AsyncFunctionDef)
        if by_fixture and _words(function) & {"undo", "stop", "stopall"}:
            return "patches are taken back before the test ends"
        others_here = [
            each
            for each in (*self._loose, *self._units)
            if each is not unit.node and self._nodes.function(each) is function
        ]
        for each in others_here:
            apart = isinstance(each, _With) and isinstance(unit.node, _With)
            if not apart or each in self._nodes.above(unit.node):
                return "something else in the same test patches or sets the globals"
            if unit.node in self._nodes.above(each):
                return "something else in the same test patches or sets the globals"
        return self._order(unit)

    def _order(self, unit: _Unit) -> str:
        """Whether torch.distributed is patched where the collection has to start it, or end it."""
        within = set(ast.walk(unit.node)) if isinstance(unit.node, _With) else set()
        for call in _patches_distributed(unit.function):
            parent = self._nodes.parents[call]
            in_body = call in within and parent not in getattr(unit.node, "items", ())
            if in_body and _root(call.func) not in _FIXTURES_OF_PATCHES:
                continue
            if isinstance(unit.node, _With) and parent in unit.node.items:
                continue  # the collection goes in front
            if isinstance(parent, ast.withitem) and isinstance(unit.node, _Function):
                continue  # a block inside of it
            return "torch.distributed is patched around it, where the collection has to start it"
        if isinstance(unit.node, _With):
            first, front = _first_and_front(unit.node, [patch.call for patch in unit.patches])
            if any(
                not isinstance(item.context_expr, ast.Call)
                or not self._reader.is_mock(item.context_expr)
                for item in unit.node.items[front:first]
            ):
                return "torch.distributed is patched before it"
        return ""

    def _leave(self, unit: _Unit, why: str, rank: Played | None) -> None:
        for patch in unit.patches:
            self._left[patch.site] = _suggestion(patch.site, patch.why or why, rank)

    def _name(self, function: _Function) -> str:
        """What to call the collection."""
        taken = _words(function) | set(self._analysis.module.bindings)
        return next((name for name in _NAMES if name not in taken), "")


def _names_globals(node: ast.expr) -> bool:
    return _NAMES_OF_GLOBALS.search(ast.unparse(node)) is not None


@cache
def _is_never_migrated(name: str) -> bool:
    answers = [
        replacement(name, (), (version,))
        for version in VERSIONS
        if signature(name, version) is not None
    ]
    return bool(answers) and all(
        isinstance(answer, Refusal) and answer.reason in _NEVER_MIGRATED for answer in answers
    )


def _stands(site: Site, call: ast.Call) -> bool:
    """Whether the patch does after a migration what it did before."""
    if site.name in _ONLY_GLOBAL_OF_ITS_FIELD:
        # A collection of the globals reads it, and both fail where it is unset.
        new = call.args[1 if site.kind is Kind.STRING else 2 :]
        return not call.keywords and len(new) == 1 and _literal(new[0]) is None
    return bool(site.name) and _is_never_migrated(site.name)


def _suggestion(site: Site, why: str, rank: Played | None) -> str:
    wanted = str(rank) if rank is not None else "tp=2, rank=1"
    asked = {of for asks, of in asks_of(site.name) if asks == "group"} if site.name else set()
    compare = f", and compare with pg.{min(asked, key=len)}" if asked else ""
    block = f"with megapg.testing.fake_collection({wanted}) as pg, megapg.published(pg):"
    return f"{why}. Write `{block}` around what is tested, or pass it pg_collection=pg{compare}."


# -- the edits -------------------------------------------------------------------------------------


def _first_and_front(node: _With, calls: Sequence[ast.Call]) -> tuple[int, int]:
    """The first item that is replaced, and that in front of which the collection goes."""
    first = min(i for i, item in enumerate(node.items) if item.context_expr in calls)
    distributed = [
        i for i, item in enumerate(node.items[:first]) if any(_patches_distributed(item))
    ]
    return first, min([first, *distributed])


class _Rewrite:
    """The edits for one unit, and the tree that has to come of them."""

    def __init__(self, source: Source, unit: _Unit, rank: Played, name: str) -> None:
        self._source, self._text, self._unit = source, source.text, unit
        self._collection = f"megapg.testing.fake_collection({rank}) as {name}"
        self._published = f"megapg.published({name})"
        self._calls = [patch.call for patch in unit.patches]
        self._gone = [patch.sets for patch in unit.patches if patch.sets is not None]
        self.edits: list[Edit] = []
        self.why = "" if name else "every good name for the collection is taken"
        if isinstance(unit.node, _With):
            self._with(unit.node)
        else:
            self._function(unit.node)

    # -- a with statement --------------------------------------------------------------------

    def _with(self, node: _With) -> None:
        if all(statement in self._gone for statement in node.body):
            self.why = "nothing is done with the patches"
            return
        first, front = _first_and_front(node, self._calls)
        spans = [self._item(item) for item in node.items]
        begin = spans[front][0]
        before = self._text[self._source.index(node.items[front].context_expr.lineno, 0) : begin]
        between = f",{self._newline(begin)}{before}" if not before.strip() else ", "
        new = f"{self._collection}{between}{self._published}"
        if front == first:
            self._replace(*spans[first], new, "site")
        else:
            self._replace(begin, begin, new + between, "site")
        gone = [i for i, item in enumerate(node.items) if item.context_expr in self._calls]
        self._drop(spans, [i for i in gone if i != first or front != first])
        self._drop_statements(self._gone)

    def _item(self, item: ast.withitem) -> tuple[int, int]:
        begin, end = self._source.extent(item.context_expr)
        return begin, self._source.extent(item.optional_vars)[1] if item.optional_vars else end

    def _drop(self, spans: Sequence[tuple[int, int]], gone: Sequence[int]) -> None:
        """Leave elements of a list out, with the commas that go with them."""
        for _, run in itertools.groupby(enumerate(gone), lambda each: each[1] - each[0]):
            indices = [index for _, index in run]
            i, j = indices[0], indices[-1]
            if j + 1 < len(spans):
                begin, end = spans[i][0], spans[j + 1][0]
            else:
                begin, end = spans[i - 1][1] if i else spans[i][0], spans[j][1]
            kept = self._text[begin:end]
            for a, b in (spans[k] for k in reversed(indices)):
                kept = kept[: a - begin] + kept[b - begin :]
            if "#" in kept:
                self.why = _COMMENT
            self._replace(begin, end, "", "site")

    # -- a whole function --------------------------------------------------------------------

    def _function(self, node: _Function) -> None:
        stated = [
            each for each in node.body if isinstance(each, ast.Expr) and each.value in self._calls
        ]
        self._gone += stated
        decorators = [each for each in node.decorator_list if each in self._calls]
        begin = self._first_statement(node, bool(decorators))
        rest = node.body[begin:]
        if all(statement in self._gone for statement in rest):
            self.why = "nothing is done with the patches"
            return
        for decorator in decorators:
            self._drop_lines(*self._source.extent(decorator), before="@")
        parameters = node.args.args
        injected = [patch.injected for patch in self._unit.patches if patch.injected is not None]
        spans = [self._extent(each) for each in parameters]
        self._drop(spans, [i for i, each in enumerate(parameters) if each in injected])
        self._drop_statements(self._gone)
        self._wrap(node, rest)

    def _first_statement(self, node: _Function, decorated: bool) -> int:
        """The first that goes into the block: with decorators all but docstring and imports."""
        for i, statement in enumerate(node.body):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            passes = is_text or isinstance(statement, ast.Import | ast.ImportFrom)
            if (decorated and not passes) or statement in self._gone:
                return i
        return len(node.body)

    def _wrap(self, node: _Function, rest: Sequence[ast.stmt]) -> None:
        """Put the statements into a block, by what is inserted at the starts of their lines."""
        starts = self._source.line_starts
        first, last = rest[0].lineno, rest[-1].end_lineno or rest[-1].lineno
        if isinstance(rest[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([first, *(each.lineno for each in rest[0].decorator_list)])
        indent = self._indent(first)
        outer = self._indent(node.lineno)
        if not indent.startswith(outer) or indent == outer or self._is_shared(rest):
            self.why = "two statements stand in one line"
            return
        step = indent[len(outer) :]
        inside = _inside_of_strings(self._source)
        deleted = [(edit.start, edit.stop) for edit in self.edits if edit.stop > edit.start]
        block = (
            f"{indent}with {self._collection}, {self._published}:{self._newline(starts[first - 1])}"
        )
        self._replace(starts[first - 1], starts[first - 1], block, "statement")
        for line in range(first, last + 1):
            at = starts[line - 1]
            gone = any(start <= at < stop for start, stop in deleted)
            if line not in inside and not gone and self._source.line_text(line).strip():
                self._replace(at, at, step, "statement")
        self._join()

    def _is_shared(self, rest: Sequence[ast.stmt]) -> bool:
        lines = [statement.lineno for statement in rest]
        before = self._source.index(rest[0].lineno, rest[0].col_offset)
        line_start = self._source.line_starts[rest[0].lineno - 1]
        return len(set(lines)) < len(lines) or bool(self._text[line_start:before].strip(" \t@"))

    def _join(self) -> None:
        """One edit where several begin at the same place."""
        joined: dict[int, Edit] = {}
        for edit in sorted(self.edits, key=lambda edit: (edit.start, edit.stop)):
            if (other := joined.get(edit.start)) is not None:
                edit = Edit(edit.start, edit.stop, other.new + edit.new, "statement")
            joined[edit.start] = edit
        self.edits = [*joined.values()]

    # -- text --------------------------------------------------------------------------------

    def _extent(self, node: ast.arg) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return (
            self._source.index(node.lineno, node.col_offset),
            self._source.index(end_line, end_column),
        )

    def _indent(self, line: int) -> str:
        text = self._source.line_text(line)
        return text[: len(text) - len(text.lstrip(" \t"))]

    def _newline(self, index: int) -> str:
        found = re.compile(r"\r\n|\r|\n").search(self._text, index)
        return found[0] if found else "\n"

    def _replace(self, begin: int, end: int, new: str, what: str) -> None:
        self.edits.append(Edit(begin, end, new, what))

    def _drop_statements(self, statements: Iterable[ast.stmt]) -> None:
        for each in statements:
            end_line, end_column = each.end_lineno or each.lineno, each.end_col_offset or 0
            begin = self._source.index(each.lineno, each.col_offset)
            self._drop_lines(begin, self._source.index(end_line, end_column))

    def _drop_lines(self, begin: int, end: int, before: str = "") -> None:
        """Delete whole lines, if nothing else stands in them."""
        start = max(self._text.rfind("\n", 0, begin), self._text.rfind("\r", 0, begin)) + 1
        rest = re.compile(r"[ \t]*(?:\r\n|\r|\n|\Z)").match(self._text, end)
        if self._text[start:begin].strip() != before or rest is None:
            self.why = "a comment or a statement stands beside a patch"
            return
        self._replace(start, rest.end(), "", "statement")

    # -- the tree that is wanted -------------------------------------------------------------

    def expect(self, places: Mapping[tuple[type, int, int], ast.AST]) -> None:
        """Change a tree of the old text as the edits change the text."""
        node = places[_place_of(self._unit.node)]
        gone = {_place_of(each) for each in (*self._gone, *self._calls)}
        written = f"with {self._collection}, {self._published}: pass"
        block = ast.parse(written).body[0]
        if isinstance(node, _With) and isinstance(block, ast.With):
            _, front = _first_and_front_of(node, gone)
            kept = [each for each in node.items[front:] if _place_of(each.context_expr) not in gone]
            node.items[front:] = [*block.items, *kept]
            node.body = [each for each in node.body if _place_of(each) not in gone]
        elif isinstance(node, _Function) and isinstance(block, ast.With):
            begin = self._first_statement(self._unit.function, self._has_decorators())
            block.body = [each for each in node.body[begin:] if _place_of(each) not in gone]
            node.body[begin:] = [block]
            node.decorator_list = [e for e in node.decorator_list if _place_of(e) not in gone]
            injected = {each.injected.arg for each in self._unit.patches if each.injected}
            node.args.args = [each for each in node.args.args if each.arg not in injected]

    def _has_decorators(self) -> bool:
        return any(each in self._calls for each in self._unit.function.decorator_list)


def _first_and_front_of(node: _With, gone: set[tuple[type, int, int]]) -> tuple[int, int]:
    calls = [
        item.context_expr
        for item in node.items
        if _place_of(item.context_expr) in gone and isinstance(item.context_expr, ast.Call)
    ]
    return _first_and_front(node, calls)


def _place_of(node: ast.AST) -> tuple[type, int, int]:
    return type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _holds(source: Source, planned: Sequence[tuple[_Unit, _Rewrite]]) -> bool:
    """Whether the edits make of the file what they are meant to."""
    text = applied(source.text, [edit for _, rewrite in planned for edit in rewrite.edits])
    wanted = ast.parse(source.text)
    places: dict[tuple[type, int, int], ast.AST] = {}
    for node in ast.walk(wanted):
        places.setdefault(_place_of(node), node)
    for _, rewrite in planned:
        rewrite.expect(places)
    try:
        return ast.dump(ast.parse(text)) == ast.dump(wanted)
    except SyntaxError:
        return False


def _inside_of_strings(source: Source) -> set[int]:
    """Numbers of the lines that begin inside of a string."""
    lines = (source.line_text(number) for number in range(1, len(source.line_starts) + 1))
    inside: set[int] = set()
    opened: list[int] = []
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        kind = tokenize.tok_name[token.type]
        if kind in ("STRING", "FSTRING_START", "TSTRING_START"):
            opened.append(token.start[0])
        if kind in ("STRING", "FSTRING_END", "TSTRING_END"):
            inside |= set(range(opened.pop() + 1, token.end[0] + 1))
    return inside
