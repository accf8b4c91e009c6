"""Decide about every use, and list the changes of each file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.carriers import NONE, PARAMETER, Carrier, Carriers, Node, in_order
from megapg.migrate.facts import Call, Everything, FoundUse, Function, Where
from megapg.migrate.migration import How, Left, Root, Served
from megapg.migrate.project import PARALLEL_STATE, Project, is_test
from megapg.migrate.replaced import Replaced
from megapg.migrate.runtime import Runtime
from megapg.migrate.thread import Edge, Threads, find_roots
from megapg.migrate.uses import Kind, Span
from megapg.upstream.mapping import COLLECTION_NAMES, Refusal, Replacement, Takes

_VARIABLE = "pg"
_WHETHER = "no collection can say whether there are groups"
_OWNERS = ("collection", "self", "model")  # kinds of carriers that groups_of() asks


@dataclass
class FileChanges:
    """The changes of one file."""

    runtime: Runtime
    name: str  # by which the file calls megapg, or the vendored module
    getters: str  # by which the file calls megapg.megatron.getters
    replaced: dict[Span, str] = field(default_factory=dict)  # uses -> new expressions
    unused: set[str] = field(default_factory=set)  # names of imports that all uses of are replaced
    passed: dict[Span, str] = field(default_factory=dict)  # calls -> what pg_collection= is passed
    parameters: set[Span] = field(default_factory=set)  # functions that take the parameter
    # Functions -> statements at the top of their body.
    statements: dict[Span, list[str]] = field(default_factory=lambda: defaultdict(list))
    before: dict[int, str] = field(default_factory=dict)  # lines of statements -> one more before

    def text(self) -> str:
        """Return all new code."""
        statements = [line for lines in self.statements.values() for line in lines]
        return "\n".join(
            [*self.replaced.values(), *self.passed.values(), *statements, *self.before.values()]
        )


@dataclass
class Decisions:
    """What is decided."""

    served: list[Served] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    files: dict[Path, FileChanges] = field(default_factory=dict)
    roots: list[Root] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """A use with its replacement and carrier."""

    path: Path
    found: FoundUse
    answer: Replacement
    carrier: Carrier


@dataclass(frozen=True)
class _Request:
    """A use, or a call that passes the parameter, with its carrier."""

    path: Path
    place: FoundUse | Call
    carrier: Carrier
    needs: tuple[str, ...]


class Decider:
    """Makes the decisions for a project.

    Args:
        project: the files.
        everything: the facts of each scanned file.
        replaced: what some file replaces at run time.
        runtime_of: says what the new text of a file imports.
        frozen: files that are left as they are, and why.
        unsafe: also rewrite uses with a caution.
    """

    def __init__(
        self,
        project: Project,
        everything: Everything,
        replaced: Collection[Replaced],
        runtime_of: Callable[[Path], Runtime],
        frozen: Mapping[Path, str],
        unsafe: bool,
    ) -> None:
        self._project, self._everything, self._runtime_of = project, everything, runtime_of
        self._frozen, self._unsafe = frozen, unsafe
        self._sources = [
            path for path in everything if not is_test(project.files[path]) and path not in frozen
        ]
        facts = {path: everything[path] for path in self._sources}
        self._carriers = Carriers(project, facts, replaced)
        self._replaced = replaced
        self._assigned = {
            each.use.name
            for path in self._sources
            for each in everything[path].uses
            if each.use.kind is Kind.ASSIGNED
        }
        self._decisions = Decisions()
        self._shared: set[tuple[Path, Span]] = set()  # served by the variable of their function
        self._sharing: set[tuple[Path, str]] = set()  # functions with such a variable
        self._resolving: set[tuple[Path, str]] = set()  # functions with ``resolve(pg_collection)``
        self._uses: dict[Node, int] = defaultdict(int)  # served by a node's parameter
        self._alone: dict[Node, int] = defaultdict(int)  # served by the globals alone

    def decide(self) -> Decisions:
        """Return the decisions."""
        found = [
            self._choose(path, found)
            for path in self._everything
            for found in self._everything[path].uses
            if not found.use.keep
        ]
        patched = self._patched(found)
        choices = []
        for each in found:
            if isinstance(each, Left):
                self._decisions.left.append(each)
            elif (each.path, each.found.root) in patched:
                left = Left(each.found.use, "assigned", "another file replaces the getter")
                self._decisions.left.append(left)
            else:
                choices.append(each)
        wanted: dict[Node, list[tuple[str, ...]]] = defaultdict(list)
        for each in choices:
            is_whether = each.answer.takes is Takes.OPTIONAL  # which alone needs no parameter
            if each.carrier.node is not None and not is_whether:
                wanted[each.carrier.node].append(each.answer.needs)
        starts = self._thread_from()
        threads = Threads(self._everything, self._carriers, self._sources, wanted, starts)
        asked = [
            _Request(each.path, each.found, each.carrier, each.answer.needs)
            for each in choices
            if each.answer.takes is not Takes.OPTIONAL
        ]
        asked += [
            _Request(edge.path, edge.call, edge.carrier, needs) for edge, needs in threads.passing()
        ]
        self._share(asked)
        for choice in choices:
            node = choice.carrier.node
            if choice.answer.takes is Takes.OPTIONAL and node not in {None, *threads.taking}:
                self._decisions.left.append(Left(choice.found.use, "lifecycle", _WHETHER))
            else:
                self._serve(choice, threads)
        for edge, needs in threads.passing():
            self._file(edge.path).passed[edge.call.span] = self._passed(edge, needs)
        for node in threads.taking:
            self._take(node)
        self._find_unused()
        self._rename_patched()
        self._decisions.roots = find_roots(
            self._project, self._carriers, threads, self._uses, self._alone
        )
        return self._decisions

    def _patched(self, found: Sequence[Choice | Left]) -> set[tuple[Path, str]]:
        """Return the names of getters in modules whose replacement the new code would not see.

        A string that names such a getter is rewritten to the getter in ``parallel_state``, which
        the new code calls. That works if nothing else in the module calls the getter.
        """
        left = {id(each.use) for each in found if isinstance(each, Left)}
        stays = {
            (path, each.root)
            for path in self._sources
            for each in self._everything[path].uses
            if each.use.keep or id(each.use) in left
        }
        return {
            (each.module, each.parts[0])
            for each in self._replaced
            if len(each.parts) == 1 and (each.span is None or (each.module, each.parts[0]) in stays)
        }

    def _find_unused(self) -> None:
        """Note the imports of which every use is replaced."""
        for path, file in self._decisions.files.items():
            facts = self._everything[path]
            others = {e.parts[0] for e in self._replaced if e.module == path and e.span is None}
            replaced = Counter(e.root for e in facts.uses if e.use.span in file.replaced)
            unused = {name for name in replaced if replaced[name] == facts.loads.get(name)}
            file.unused = unused - others

    def _rename_patched(self) -> None:
        for each in self._replaced:
            file = self._decisions.files.get(each.module)
            if each.span is not None and file is not None and each.parts[0] in file.unused:
                name = f"{PARALLEL_STATE}.{each.getter}".rstrip(".")
                self._file(each.path).replaced[each.span] = f'"{name}"'

    def _thread_from(self) -> list[Node]:
        named = []
        for name in self._project.config.thread_from:
            found = [
                Node(path, each)
                for path in self._sources
                for each in [*self._everything[path].functions, *self._everything[path].classes]
                if f".{self._project.module(path)}.{each}".endswith(f".{name}")
            ]
            defined = re.compile(rf"\b(def|class) {name.rpartition('.')[2]}\b".encode())
            if not found and not any(self._project.mentioning(defined)):
                raise UnsupportedOptionError(
                    f"--thread-from {name}: these files have no function or class of that name. "
                    "Name it as module.function or module.Class, and give its file among the paths."
                )
            named += found
        return named

    def _share(self, asked: Sequence[_Request]) -> None:
        """Ask a model once in a function that needs it several times.

        The variable is set before the first statement that needs it, if that always runs: asking a
        model whose groups are closed is an error.
        """
        together: dict[tuple[Path, str, str], list[_Request]] = defaultdict(list)
        for each in asked:
            around = self._carriers.around(each.path, each.place.function)
            is_free = around and self._is_free(around)
            if is_free and each.carrier.kind in _OWNERS and not each.place.where.inline:
                together[each.path, each.place.function, each.carrier.expression].append(each)
        for (path, _, expression), several in together.items():
            first = min(several, key=lambda each: each.place.span)
            if len(several) < 2 or not first.place.where.line:
                continue
            needs = in_order([need for each in several for need in each.needs])
            file = self._file(path)
            call = f"{_VARIABLE} = {file.name}.groups_of({_arguments(expression, needs)})"
            file.before[first.place.where.line] = call
            self._shared |= {(path, each.place.span) for each in several}
            self._sharing.add((path, first.place.function))

    # -- one use -----------------------------------------------------------------------------------

    def _choose(self, path: Path, found: FoundUse) -> Choice | Left:
        """Return the carrier of a use, or why it stays."""
        use, where, answer = found.use, found.where, found.use.answer
        if path in self._frozen:
            return Left(use, "unverified", self._frozen[path])
        if is_test(use.file):
            return Left(use, "test")
        without = any(name.rpartition(".")[2] in COLLECTION_NAMES for name in where.none)
        if isinstance(answer, Refusal):
            if without and answer.reason == "inside-core":
                return Left(use, "fallback")
            return Left(use, answer.reason, answer.detail)
        if use.name in self._assigned:
            return Left(use, "assigned", "another file replaces the getter")
        if answer.caution and not self._unsafe:
            return Left(use, answer.caution, "--unsafe rewrites it")
        if without:
            return Left(use, "fallback")
        around = self._carriers.around(path, use.function)
        if any(function.makes_groups for function in around):
            return Left(use, "lifecycle", "its function makes or ends the groups")
        carrier = NONE
        if answer.takes is not Takes.GLOBALS:
            carrier = self._carriers.of(path, use.function, where)
        if answer.takes is Takes.OPTIONAL and carrier.kind not in ("parameter", "collection"):
            return Left(use, "lifecycle", _WHETHER)
        if "'" in where.quotes and '"' in where.quotes:
            return Left(use, "in-a-string")
        return Choice(path, found, answer, carrier)

    def _serve(self, choice: Choice, threads: Threads) -> None:
        carrier, use, file = choice.carrier, choice.found.use, self._file(choice.path)
        how = carrier.how
        if how is How.THREADED and carrier.node is not None:
            self._uses[carrier.node] += 1
            how = How.THREADED if carrier.node in threads.always_passed else How.RESOLVED
        elif how is How.RESOLVED:
            self._alone[Node(choice.path, use.function)] += 1
        text = self._text(choice, file)
        if '"' in choice.found.where.quotes:
            text = text.replace('"', "'")
        file.replaced[use.span] = text
        self._decisions.served.append(Served(use, how, text))

    def _text(self, choice: Choice, file: FileChanges) -> str:
        """Return the new expression of a use."""
        carrier, answer, runtime = choice.carrier, choice.answer, file.name
        if answer.takes is Takes.OPTIONAL:
            return answer.write(carrier.expression, file.getters)
        if carrier.kind in _OWNERS:
            if (choice.path, choice.found.use.span) in self._shared:
                return answer.write(_VARIABLE, file.getters)
            pg = f"{runtime}.groups_of({_arguments(carrier.expression, answer.needs)})"
            return answer.write(pg, file.getters)
        passed = PARAMETER if carrier.kind == "parameter" else "None"
        around = self._carriers.around(choice.path, choice.found.use.function)
        statement = f"{_VARIABLE} = {runtime}.resolve({passed})"
        if (
            not around
            or choice.found.where.inline
            or not self._is_free(around)
            or self._carriers.is_repeated(around)
            or (choice.path, choice.found.use.function) in self._sharing
            or (answer.takes is Takes.GLOBALS and self._has_carrier(around))
        ):
            return answer.write(f"{runtime}.resolve({passed})", file.getters)
        statements = file.statements[around[0].span]
        if statement not in statements:
            statements.append(statement)
        if passed == PARAMETER:
            self._resolving.add((choice.path, choice.found.use.function))
        return answer.write(_VARIABLE, file.getters)

    @staticmethod
    def _is_free(around: Sequence[Function]) -> bool:
        """True if a function may have one more variable ``pg``."""
        is_used = any(_VARIABLE in each.names | each.bound for each in around)
        return not is_used and not around[0].looks_at_itself

    def _has_carrier(self, around: list[Function]) -> bool:
        return self._carriers.of(around[0].path, around[0].name, Where()).kind != "none"

    def _passed(self, edge: Edge, needs: tuple[str, ...]) -> str:
        """Return what a call passes as the parameter."""
        carrier, file = edge.carrier, self._file(edge.path)
        if carrier.kind == "collection":
            return carrier.expression
        if carrier.kind == "parameter":
            resolves = (edge.path, edge.call.function) in self._resolving
            return _VARIABLE if resolves and not edge.call.where.inline else carrier.expression
        if (edge.path, edge.call.span) in self._shared:
            return _VARIABLE
        return f"{file.name}.groups_of({_arguments(carrier.expression, needs)})"

    def _take(self, node: Node) -> None:
        """Have a function or constructor take the parameter; a constructor also keeps it."""
        of = self._carriers.class_at(node.path, node.name)
        name = f"{node.name}.__init__" if of is not None else node.name
        function = self._carriers.function(node.path, name)
        assert function is not None  # can_take() has looked at it
        file = self._file(node.path)
        file.parameters.add(function.span)
        if of is not None:
            # If nothing was passed, the object has no attribute more than before.
            keep = f"{function.self_name}.{PARAMETER} = {PARAMETER}"
            statement = f"if {file.name}.was_passed({PARAMETER}):\n    {keep}\n"
            file.statements[function.span].insert(0, statement)

    def _file(self, path: Path) -> FileChanges:
        if path not in self._decisions.files:
            runtime, data = self._runtime_of(path), self._project.data(path)
            # ``from module import *`` leaves names with an underscore out.
            private = "_" * self._project.is_star_imported(path)
            name = private + _free(runtime.name, runtime.module, data)
            getters = name
            if runtime.getters_name != runtime.name:
                getters = private + _free(runtime.getters_name, runtime.getters_module, data)
            self._decisions.files[path] = FileChanges(runtime, name, getters)
        return self._decisions.files[path]


def _arguments(expression: str, needs: tuple[str, ...]) -> str:
    return ", ".join([expression, *(f'"{each}"' for each in needs)])


def _free(name: str, module: str, data: bytes) -> str:
    """Return a name for an import from a module that a file does not use for something else."""
    start = f"from {module} import" if name != module else "import"
    data = re.sub(rb"#[^\n]*", b"", data)
    imported = re.search(rf"^[ \t]*{re.escape(start)} (.*, *)?{name} *(,|#|$)".encode(), data, re.M)
    is_used = re.search(rf"(?<![\w.]){name}\b".encode(), data)
    return name if imported or not is_used else f"{name}_"
