"""NVIDIA's own migration of Megatron-core, release by release, as the measure of ours.

From 0.11 to 0.19 functions of Megatron-core went off the globals by hand. Where a function of one
release is in the next one with fewer reads of the globals and more uses of groups, both its
versions say what a human chose for each read that went: which group, and from where it comes. The
migration at the older release makes the same two choices, and is held against it:

- the *field*: is the one that the mapping chooses among those that the new body uses?
- the *carrier*: does it come from the same sort of place, such as an attribute of self or a
  parameter that is one group?

Text is not compared: there is no one way to write it. What the new body uses is read from names
(``pg_collection.dp_cp``, ``tp_group``) and from what a class assigns to its attributes. Where
NVIDIA changed what the function does at the same time, there is nothing to agree with; those are
listed with the reason in :data:`CHANGED`, and left out of the score but not of the list.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import TypeGuard

from benchmarks.corpora import CORES, Wheel
from megapg.layout import FIELDS
from megapg.migrate.config import Config, parse_versions
from megapg.migrate.engine import migrate
from megapg.migrate.find.carriers import MODEL_NAMES
from megapg.migrate.find.sites import Kind, Site
from megapg.upstream.mapping import COLLECTION_NAMES, GROUP_PARAMETERS, Refusal

FIELD_TARGET = 0.98
CARRIER_TARGET = 0.70
CENSUS = 109
"""How many functions an earlier count by hand found, looser in what a use of a group is."""

# What takes now one group and now another: the name tells nothing.
_ANY_GROUP = frozenset(
    {"group", "process_group", "reduce_group", "data_parallel_group", "parallelization_group"}
)
# (end of the file, function) -> what its callers in the newer release pass for such a name.
_PASSED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("tensor_parallel/mappings.py", "_reduce"): ("tp", "expt_tp"),
    ("tensor_parallel/mappings.py", "_split_along_last_dim"): ("tp", "expt_tp"),
    ("tensor_parallel/mappings.py", "_gather_along_last_dim"): ("tp", "expt_tp"),
    ("tensor_parallel/mappings.py", "_reduce_scatter_along_last_dim"): ("tp", "expt_tp"),
    ("pipeline_parallel/p2p_communication.py", "_p2p_ops"): ("pp",),
}
_TP_IF_NONE = "get_tensor_model_parallel_group_if_none"
_OF_GLOBALS = ("use_mpu_process_groups", _TP_IF_NONE, "parallel_state", "mpu")
_OF_MODEL = ("get_pg_collection", "get_attr_wrapped_model")
_COLLECTIONS = ("ProcessGroupCollection", "use_mpu_process_groups")
_OURS = ("resolve", "groups_of")

# (release from which, end of the file, function, getters) -> why there is nothing to agree with.
CHANGED: Mapping[tuple[str, str, str, tuple[str, ...]], str] = {
    (
        "0.12.0",
        "distributed/distributed_data_parallel.py",
        "DistributedDataParallel.__init__._allocate_buffers_for_parameters",
        ("get_expert_model_parallel_world_size",),
    ): "the assertion that read it is gone: what it forbade was allowed",
    (
        "0.12.0",
        "distributed/distributed_data_parallel.py",
        "DistributedDataParallel.broadcast_params",
        ("get_data_parallel_group",),
    ): "broadcasts over all of dp_cp now, no longer within one instance of the optimizer",
    (
        "0.12.0",
        "transformer/moe/experts.py",
        "GroupedMLP.sharded_state_dict",
        ("get_tensor_model_parallel_world_size", "get_tensor_model_parallel_rank"),
    ): "shards over expt_tp now, no longer over tp",
    (
        "0.12.0",
        "transformer/moe/router.py",
        "TopKRouter.apply_load_balancing_loss",
        ("get_context_parallel_group", "get_tensor_model_parallel_world_size"),
    ): "the branch for alltoall_seq that read them is gone",
    (
        "0.13.1",
        "pipeline_parallel/schedules.py",
        "finish_embedding_wgrad_compute",
        ("is_pipeline_last_stage",),
    ): "is told by a new flag, is_last_stage, and asks no group",
    (
        "0.13.1",
        "pipeline_parallel/schedules.py",
        "get_tensor_shapes",
        ("is_inside_encoder", "is_inside_decoder"),
    ): "the branch for encoders that read them is gone",
    (
        "0.17.1",
        "transformer/cuda_graphs.py",
        "TECudaGraphHelper._get_cuda_graph_input_data.get_make_graphed_callables_kwargs",
        ("get_amax_reduction_group",),
    ): "calls a new method, which chooses among the same fields by the same flags",
}


class Carrier(StrEnum):
    """From where a function has its group."""

    SELF = "attribute of self"
    GROUP = "parameter, one group"
    COLLECTION = "parameter, a collection"
    MODEL = "a model"
    GLOBALS = "the globals"
    OTHER = "another object"


@dataclass(frozen=True)
class Use:
    """A use of a group, or of a collection as a whole, in a function's body.

    Attributes:
        text: as it is written.
        fields: which it may be of; none where that can't be seen.
        carriers: from where it may come.
    """

    text: str
    fields: frozenset[str]
    carriers: frozenset[Carrier]


@dataclass(frozen=True)
class Choice:
    """One read of the globals that NVIDIA removed, and what either chose for it.

    Attributes:
        older: the release that has it.
        newer: the one that has not.
        file: of both.
        function: of both.
        getter: as it is called.
        fields: what ours reads instead; none where it refuses.
        refusal: the code of why; empty where it does not.
        their_fields: what the new body uses; none where names don't tell.
        carriers: from where ours has it; none where it writes nothing.
        their_carriers: from where the new body has it.
        changed: why this is no measure; empty where it is one.
    """

    older: str
    newer: str
    file: str
    function: str
    getter: str
    fields: frozenset[str]
    refusal: str
    their_fields: frozenset[str]
    carriers: frozenset[Carrier]
    their_carriers: frozenset[Carrier]
    changed: str

    @property
    def visible(self) -> bool:
        """Whether both chose a field."""
        return bool(self.fields and self.their_fields)

    @property
    def scored(self) -> bool:
        """Whether, besides, the function still does what it did."""
        return self.visible and not self.changed

    @property
    def one_field(self) -> bool:
        """Whether the new body uses one field; tp_group is one name for tp and expt_tp."""
        return len(self.their_fields - {"expt_tp"}) == 1

    @property
    def same_field(self) -> bool:
        return self.fields <= self.their_fields

    @property
    def carried(self) -> bool:
        """Whether both chose a carrier."""
        return self.scored and bool(self.carriers) and bool(self.their_carriers)

    @property
    def same_carrier(self) -> bool:
        return bool(self.carriers & self.their_carriers)

    @property
    def same_place(self) -> bool:
        """The same, whether a parameter is one group or a collection."""
        return bool(set(map(_place, self.carriers)) & set(map(_place, self.their_carriers)))


@dataclass
class Score:
    """All choices, and in how many functions they are."""

    choices: list[Choice] = field(default_factory=list)

    @property
    def functions(self) -> int:
        return len({(choice.older, choice.file, choice.function) for choice in self.choices})

    @property
    def visible(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.visible]

    @property
    def scored(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.scored]

    @property
    def carried(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.carried]

    @property
    def same_field(self) -> float:
        return _share(choice.same_field for choice in self.scored)

    @property
    def same_field_of_all(self) -> float:
        return _share(choice.same_field for choice in self.visible)

    @property
    def same_carrier(self) -> float:
        return _share(choice.same_carrier for choice in self.carried)

    @property
    def same_place(self) -> float:
        return _share(choice.same_place for choice in self.carried)

    @property
    def unmigrated(self) -> int:
        """Choices of which the field is scored and that ours leaves as they are."""
        return sum(not choice.carriers for choice in self.scored)

    @property
    def invisible(self) -> int:
        """Choices where the new body's names don't tell the field."""
        return sum(not choice.their_fields and bool(choice.fields) for choice in self.choices)

    @property
    def refused(self) -> Counter[str]:
        return Counter(choice.refusal for choice in self.choices if choice.refusal)

    @property
    def fieldless(self) -> int:
        """Choices for what no field serves, such as whether anything is initialised."""
        return sum(not choice.fields and not choice.refusal for choice in self.choices)

    def disagreements(self) -> Iterator[tuple[str, Choice]]:
        """What is to be judged by reading: about which of the two, and the choice."""
        return ((about, choice) for choice in self.choices if (about := _about(choice)))


def _place(carrier: Carrier) -> Carrier:
    return Carrier.COLLECTION if carrier is Carrier.GROUP else carrier


def _about(choice: Choice) -> str:
    if choice.changed:
        return "left out"
    if choice.scored and not choice.same_field:
        return "field"
    return "carrier" if choice.carried and not choice.same_carrier else ""


def _share(agreed: Iterator[bool]) -> float:
    votes = list(agreed)
    return sum(votes) / len(votes) if votes else 0.0


def run(on_progress: Callable[[], None] = lambda: None) -> Score:
    """Score all pairs of releases that follow each other."""
    score = Score()
    releases = []
    for wheel in CORES:
        releases.append(_Release(wheel))
        on_progress()
    for older, newer in pairwise(releases):
        score.choices += _choices(older, newer)
    return score


# -- one release -----------------------------------------------------------------------------------


class _Release:
    """A release's functions, its reads of the globals, and what the migration does with them."""

    def __init__(self, wheel: Wheel) -> None:
        self.version = wheel.version
        self._root = wheel.tree()
        config = Config(self._root, versions=parse_versions(wheel.version))
        self.reads: dict[tuple[str, str], list[Site]] = {}
        found = migrate([self._root], config)
        sites = [*(each.site for each in found.served), *(each.site for each in found.left)]
        for site in sorted(sites, key=lambda site: (site.file, site.span.start)):
            if site.kind is Kind.CALL and site.function and site.reason not in _NO_GROUP:
                self.reads.setdefault((site.file, site.function), []).append(site)
        self._served = {(each.site.file, each.site.span): each for each in found.served}
        self._rewritten = {file.file: file for file in found.files}
        self._migrated: dict[str, Mapping[str, _Function]] = {}
        self._modules: dict[str, Mapping[str, _Function]] = {}

    def function(self, file: str, name: str) -> _Function | None:
        if file not in self._modules:
            path = self._root / file
            tree = ast.parse(path.read_bytes()) if path.exists() else ast.Module([], [])
            self._modules[file] = dict(_functions(tree))
        return self._modules[file].get(name)

    def uses(self, file: str, name: str) -> list[Use] | None:
        """The uses of groups in a function; None where it is not there."""
        function = self.function(file, name)
        if function is None:
            return None
        left = {
            field for site in self.reads.get((file, name), ()) for field in _needs(site)
        }  # `if group is None: group = get_x()`: then the group is one of x
        passed = next(
            (f for (end, g), f in _PASSED.items() if (g, file[-len(end) :]) == (name, end)), ()
        )
        return list(function.uses(frozenset(left) | frozenset(passed)))

    def our_carriers(self, site: Site) -> frozenset[Carrier]:
        """From where the migrated function has its group; none where the use is left."""
        served, file = self._served.get((site.file, site.span)), self._rewritten.get(site.file)
        if served is None or file is None:
            return frozenset()
        if site.file not in self._migrated:
            self._migrated[site.file] = dict(_functions(ast.parse(file.after)))
        function = self._migrated[site.file].get(site.function)
        if function is None:
            return frozenset()
        return frozenset(function.carriers_of_ours(ast.parse(served.text, mode="eval").body))


# Not reads of a group: what sets them up, and the state of a schedule.
_NO_GROUP = frozenset({"lifecycle", "setter", "vp-stage", "no-state", "buffer", "encoder-decoder"})


# Whether there is anything: not a choice of a group.
_WHETHER = frozenset({"is_initialized", "is_unitialized", "model_parallel_is_initialized"})


def _needs(site: Site) -> tuple[str, ...]:
    answer = site.answer
    if isinstance(answer, Refusal) or site.name in _WHETHER:
        return ()
    return (answer.field,) if answer.field else answer.needs


def _choices(older: _Release, newer: _Release) -> Iterator[Choice]:
    for (file, function), before in older.reads.items():
        after = newer.reads.get((file, function), [])
        ours, theirs = older.uses(file, function), newer.uses(file, function)
        if (
            ours is None
            or theirs is None
            or not (len(after) < len(before) and len(theirs) > len(ours))
        ):
            continue
        kept = Counter(map(_called, after))
        for site in before:
            if kept[_called(site)]:
                kept[_called(site)] -= 1
            else:
                yield _choice(older, newer.version, site, theirs)


def _choice(older: _Release, newer: str, site: Site, theirs: Sequence[Use]) -> Choice:
    fields = frozenset(_needs(site))
    fitting = [use for use in theirs if use.fields & fields]
    return Choice(
        older=older.version,
        newer=newer,
        file=site.file,
        function=site.function,
        getter=_called(site),
        fields=fields,
        refusal=site.reason,
        their_fields=frozenset().union(*(use.fields for use in theirs)),
        carriers=older.our_carriers(site),
        their_carriers=frozenset().union(*(use.carriers for use in fitting)),
        changed=_changed(older.version, site),
    )


def _changed(older: str, site: Site) -> str:
    for (version, end, function, getters), why in CHANGED.items():
        same = (version, function) == (older, site.function) and site.file.endswith(end)
        if same and (not getters or site.name in getters):
            return why
    return ""


def _called(site: Site) -> str:
    written = (f"{a.keyword}={a.text}" if a.keyword else a.text for a in site.arguments)
    return f"{site.name}({', '.join(written)})"


# -- what a body uses ------------------------------------------------------------------------------


def _functions(
    tree: ast.AST, prefix: str = "", outer: _Function | None = None, of: ast.ClassDef | None = None
) -> Iterator[tuple[str, _Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = _Function(node, outer, of)
            yield prefix + node.name, function
            yield from _functions(node, f"{prefix}{node.name}.", function, of)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.", outer, node)
        else:
            yield from _functions(node, prefix, outer, of)


@dataclass(frozen=True, eq=False)
class _Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef
    outer: _Function | None
    of: ast.ClassDef | None

    def uses(self, of_any_group: frozenset[str]) -> Iterator[Use]:
        """Every use of a group; ``of_any_group`` is what a name that tells nothing may be."""
        part: set[ast.AST] = set()  # of what was a use already, or the function that is called
        for node in self._body:
            if isinstance(node, ast.Call):
                part.add(node.func)
                if _ident(node.func) == _TP_IF_NONE:
                    yield Use(ast.unparse(node), frozenset({"tp", "expt_tp"}), frozenset())
                elif by_name := self._read_by_name(node):
                    part.add(node.args[0])
                    yield self._use(node.args[0], frozenset({by_name}))
            elif (
                isinstance(node, ast.Attribute)
                and node.attr in FIELDS
                and self._is_collection(node.value)
            ):
                part.add(node.value)
                yield self._use(node, frozenset({node.attr}))
            elif node in part or not _is_load(node):
                continue
            elif _ident(node) in GROUP_PARAMETERS:
                yield self._use(node, self._fields(node))
            elif _ident(node) in _ANY_GROUP and _root(node) != "torch":
                yield self._use(node, of_any_group)
            elif _is_collection(node):
                yield self._use(node, frozenset())

    def _read_by_name(self, call: ast.Call) -> str:
        """The field of ``getattr(collection, "field", None)``; empty for anything else."""
        if _ident(call.func) != "getattr" or not self._is_collection(call.args[0]):
            return ""
        name = call.args[1].value if isinstance(call.args[1], ast.Constant) else ""
        return str(name) if name in FIELDS else ""

    def _is_collection(self, node: ast.AST) -> bool:
        """By its name, or by the name of the function that it comes from."""
        return _is_collection(node) or any(
            isinstance(value, ast.Call)
            and (_is_collection(value.func) or _ident(value.func) in _COLLECTIONS)
            for target, value in _assignments(self._body)
            if isinstance(node, ast.Name) and ast.unparse(target) == node.id
        )

    def carriers_of_ours(self, written: ast.expr) -> Iterator[Carrier]:
        """Those of an expression that the migration wrote."""
        for node in ast.walk(written):
            if isinstance(node, ast.Call) and _ident(node.func) in _OURS:
                return self._carriers(node)
            if isinstance(node, ast.Name) and node.id in self._known:
                return self._carriers(node)
        return iter(())

    @cached_property
    def _known(self) -> frozenset[str]:
        """Names that are bound in it and around it."""
        own = {_root(target) for target, _ in _assignments(self._body)}
        outer = self.outer._known if self.outer else frozenset({"self", "cls", "ctx"})
        return self._parameters | own | outer

    @cached_property
    def _body(self) -> list[ast.AST]:
        """What is in it, outermost first, without the functions within."""
        found: list[ast.AST] = []
        waiting: list[ast.AST] = [*self.node.body]
        while waiting:
            node = waiting.pop(0)
            found.append(node)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                waiting += ast.iter_child_nodes(node)
        return found

    @cached_property
    def _parameters(self) -> frozenset[str]:
        given = self.node.args
        every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        return frozenset(each.arg for each in every if each)

    def _use(self, node: ast.expr, fields: frozenset[str]) -> Use:
        return Use(ast.unparse(node), fields, frozenset(self._carriers(node)))

    def _fields(self, node: ast.expr) -> frozenset[str]:
        """Those of a name: what the class assigns to it if that tells, else what it may hold."""
        if _root(node) == "self" and self.of is not None:
            assigned = {
                value.attr
                for target, value in _assignments(ast.walk(self.of))
                if ast.unparse(target) == ast.unparse(node)
                and isinstance(value, ast.Attribute)
                and value.attr in FIELDS
            }
            if assigned:
                return frozenset(assigned)
        return frozenset(GROUP_PARAMETERS[_ident(node)])

    def _carriers(self, node: ast.expr, depth: int = 0) -> Iterator[Carrier]:
        text, root = ast.unparse(node), _root(node)
        if isinstance(node, ast.Call) and _ident(node.func) in _OURS:
            carrier = node.args[0]
            if isinstance(carrier, ast.Constant):
                yield Carrier.GLOBALS
            elif _ident(node.func) == "resolve":
                yield from self._carriers(carrier, depth)
            else:  # what self carries is an attribute of self
                yield Carrier.SELF if _ident(carrier) == "self" else Carrier.MODEL
        elif any(name in text for name in _OF_MODEL) or root in MODEL_NAMES:
            yield Carrier.MODEL
        elif any(name in text.split("(")[0].split(".") for name in _OF_GLOBALS):
            yield Carrier.GLOBALS
        elif root in ("self", "cls", "ctx"):
            yield Carrier.SELF
        elif root in self._parameters:
            if _is_collection(node) or _of_collection(node):
                yield Carrier.COLLECTION
            else:
                yield Carrier.GROUP if isinstance(node, ast.Name) else Carrier.OTHER
        else:
            values = [value for target, value in _assignments(self._body) if _root(target) == root]
            if values and depth < _DEPTH:
                for value in values:
                    yield from self._carriers(value, depth + 1)
            elif self.outer is not None:
                yield from self.outer._carriers(node, depth)
            else:
                yield Carrier.OTHER


_DEPTH = 4  # how many assignments a name is followed through


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield target, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _is_load(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)


def _ident(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return _ident(node)


def _is_collection(node: ast.AST) -> bool:
    name = _ident(node)
    return name in COLLECTION_NAMES or name.endswith(("pg_collection", "pgs", "process_groups"))


def _of_collection(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_collection(node.value)
