"""Every use of Megatron's globals in a project, by what names stand for and not by how they look.

Nothing of the project is imported or run. A file that can't be parsed is reported and passed over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from megapg.migrate.config import Config
from megapg.migrate.find import carriers
from megapg.migrate.find.meaning import (
    GLOBALS,
    ONLY_UNKNOWN,
    Resolver,
    Thing,
    Things,
    is_parallel_state,
)
from megapg.migrate.find.namesakes import Namesake, find_namesakes
from megapg.migrate.find.privates import as_it_is_read, as_it_is_taken
from megapg.migrate.find.sites import Carrier, Kind, Site
from megapg.migrate.python.analysis import Analysis, analyse
from megapg.migrate.python.locate import locate, parses_to
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Use, last_name
from megapg.migrate.python.source import Problem, Source, parse, read_bytes
from megapg.migrate.python.tree import File, Modules, Notebook, find_files, is_test
from megapg.upstream.expressions import known, replacement
from megapg.upstream.mapping import OF_SEVERAL_PIPELINES, Argument, Refusal, Replacement

# A file without any of these can only use what another one hands on by a name of its own.
_TRIGGER = re.compile(rb"parallel_state|\bmpu\b|[a-z]_parallel_|pipeline_(?:first|last)_stage")
_WORD = re.compile(rb"\w+")
_STAR = re.compile(rb"import\s*\(?\s*\*")
_KEEP = re.compile(r"#\s*megapg:\s*keep\b")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+\Z")

_PATCHING = frozenset({"setattr", "delattr", "patch", "object", "multiple"})
_ASKING = frozenset({"getattr", "hasattr"})
_IMPORTING = frozenset({"import_module", "importorskip", "find_spec", "__import__"})
_MODULES_NAMES = ("parallel_state", "mpu")
# Packages that have functions of the same names, for groups of their own.
_FOREIGN = ("vllm", "sglang", "apex", "fairscale", "deepspeed")

_WITHOUT_READING = {
    Kind.VALUE: "as-value",
    Kind.ASSIGNED: "assigned",
    Kind.PATCHED: "patched",
    Kind.STRING: "patched",
    Kind.DYNAMIC: "dynamic",
    Kind.MODULE: "module-as-value",
}


Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of that is done, and how much there is to do."""


def unseen(doing: str, done: int, total: int) -> None:
    """The progress of a run that nobody watches."""


@dataclass(frozen=True)
class Findings:
    """What is in a project."""

    sites: tuple[Site, ...]  # every use, by file and position
    problems: tuple[Problem, ...]  # files that could not be looked into
    files: int  # how many files there are
    notebooks: int = 0  # how many there are in directories, which are not read
    # Packages of the project that are called as Megatron's module was and are left alone.
    namesakes: tuple[Namesake, ...] = ()

    @property
    def kept(self) -> int:
        """How many uses have ``# megapg: keep``."""
        return sum(site.keep for site in self.sites)


def find_sites(paths: Sequence[Path], config: Config, on_progress: Progress = unseen) -> Findings:
    """Every use of the globals at and under the paths.

    Args:
        paths: files and directories.
        config: what is excluded, what else stands for the globals, which versions may run it.
        on_progress: called with what is done, how many files of it, and of how many.
    """
    return Index(paths, config).run(on_progress)


@dataclass(frozen=True, eq=False)
class Located:
    """A site with what a rewriter needs: where it stands in the file's text and syntax tree."""

    site: Site  # the use
    path: Path  # of its file
    begin: int  # index of its first character in the file's text
    end: int  # index behind its last one
    node: ast.expr  # the expression
    use: Use  # the name or chain in it, with its scope and the nodes around it


class Index:
    """The files of a project, each parsed when it is first looked into, and their sites.

    Args:
        paths: files and directories.
        config: see :func:`find_sites`.

    Attributes:
        root: of the project.
        config: what it was told.
        resolver: what names in the files stand for.
        located: the sites, once :meth:`run` has found them.
    """

    def __init__(self, paths: Sequence[Path], config: Config) -> None:
        self.config = config
        self.root = config.root
        found = list(find_files(paths, config.root, config.exclude))
        self._files = {each.path: each for each in found if isinstance(each, File)}
        self._problems = [each for each in found if isinstance(each, Problem)]
        self._failed: set[Path] = set()
        self._notebooks = sum(isinstance(each, Notebook) for each in found)
        self._data: dict[Path, bytes] = {}
        self._parsed: dict[Path, tuple[Source, Analysis]] = {}
        self._words: dict[Path, frozenset[bytes]] = {}  # of those, once a word is looked for
        self.modules = Modules(self._files.values())
        source = [path for path in self._files if not self.modules.is_test(path)]
        self._namesakes = find_namesakes(
            source or self._files, config.root, self._texts_of_project(), config.wrappers
        )
        self.resolver = self.resolver_of(self.analysis)
        self.located: list[Located] = []

    def run(self, on_progress: Progress) -> Findings:
        """Find every site."""
        located: list[Located] = []
        waiting = dict(self._files)
        words: set[str] = set()
        triggered = [path for path in waiting if _TRIGGER.search(self.data(path))]
        done, looked_at = len(waiting) - len(triggered), 0
        while triggered:
            for path in triggered:
                del waiting[path]
                looked_at += 1
                on_progress("looking", done + looked_at, done + looked_at + len(triggered))
                if not is_parallel_state(path):
                    located += self._sites_or_problem(path)
            # Who uses what these hand on under a name that says nothing?
            words = {name for path in triggered for name in self._handed_on(path)} - words
            pattern = re.compile(rb"\b(?:" + "|".join(map(re.escape, words)).encode() + rb")\b")
            triggered = [path for path in waiting if words and pattern.search(self.data(path))]
        located.sort(key=lambda at: (at.site.file, at.begin, at.end))
        self.located = located
        sites = (at.site for at in located)
        problems = sorted(self._problems, key=lambda problem: (problem.file, problem.line))
        return Findings(
            tuple(sites), tuple(problems), len(self._files), self._notebooks, self._namesakes
        )

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    def resolver_of(self, analysis: Callable[[Path], Analysis | None]) -> Resolver:
        """What names stand for in the files, with the scopes of their texts as something has them:
        these define what the files do now.
        """
        own = [each.name for each in self._namesakes]
        return Resolver(self.modules, analysis, self._may_define, self.config.wrappers, own)

    # -- files -------------------------------------------------------------------------------

    def data(self, path: Path) -> bytes:
        """The bytes of a file; none where it can't be read."""
        if path not in self._data:
            data = read_bytes(path, self._files[path].name)
            if isinstance(data, Problem):
                self._problems.append(data)
                self._failed.add(path)
                data = b""
            self._data[path] = data
        return self._data[path]

    def _texts_of_project(self) -> Iterator[bytes]:
        """Of the files given, then of the others: read only as far as somebody wants to know."""
        yield from (self.data(path) for path in self._files if not self.modules.is_test(path))
        root = self.config.root
        for each in find_files([root], root, self.config.exclude):
            is_new = isinstance(each, File) and each.path not in self._files
            if isinstance(each, File) and is_new and not is_test(each.name):
                data = read_bytes(each.path, each.name)
                yield b"" if isinstance(data, Problem) else data

    def look(self, path: Path) -> tuple[Source, Analysis] | None:
        """The file, parsed when it is first asked for."""
        known = self._parsed.get(path)
        if known is None and path not in self._failed:
            source = parse(path, self._files[path].name, self.data(path))
            if isinstance(source, Problem):
                self._problems.append(source)
                self._failed.add(path)
            else:
                known = self._parsed[path] = source, analyse(source.tree)
        return known

    def analysis(self, path: Path) -> Analysis | None:
        """The file's scopes and uses; None where it can't be parsed."""
        looked = self.look(path)
        return looked[1] if looked else None

    def analyses(self) -> list[tuple[Path, Analysis]]:
        """The files that were parsed, with their scopes and uses."""
        return [(path, analysis) for path, (_, analysis) in self._parsed.items()]

    @kept
    def carriers(self, use: Use, path: Path) -> tuple[Carrier, ...]:
        """What is in scope at a use: collections, and models that may carry one."""
        return carriers.carriers(use, path, self.resolver)

    def mentioning(self, word: str, seen_from: Path) -> Sequence[Path]:
        """The files that have a word, in text that may be a comment, as far as a file sees them."""
        return [path for path in self.everywhere(word) if self.modules.sees(seen_from, path)]

    @kept
    def everywhere(self, word: str) -> Sequence[Path]:
        """The files that have a word, in source and in tests."""
        sought, is_ascii = word.encode(), word.isascii()
        in_text = re.compile(rb"\b" + re.escape(sought) + rb"\b").search
        found = []
        for path in self._files:
            if is_ascii and path in self._parsed:  # it is asked about each of its functions
                if path not in self._words:
                    self._words[path] = frozenset(_WORD.findall(self.data(path)))
                has_it = sought in self._words[path]
            else:
                data = self.data(path)
                has_it = sought in data and in_text(data) is not None  # the first is much faster
            if has_it:
                found.append(path)
        return found

    def _may_define(self, path: Path, name: str) -> bool:
        if path in self._parsed:
            return True
        data = self.data(path)
        return name.encode() in data or _STAR.search(data) is not None

    def _handed_on(self, path: Path) -> Iterator[str]:
        """Names at the top of a module that stand for the globals and do not look like it."""
        analysis = self.analysis(path)
        if analysis is None:
            return
        for name in analysis.module.bindings:
            things = self.resolver.name(name, analysis.module, path)
            if _is_of(things) and not _TRIGGER.search(name.encode()):
                yield name

    # -- sites -------------------------------------------------------------------------------

    def _sites_or_problem(self, path: Path) -> list[Located]:
        try:
            return list(self._sites(path))
        except RecursionError:
            name = self._files[path].name
            self._problems.append(Problem(name, 0, "is nested too deeply to look into"))
            return []

    def _sites(self, path: Path) -> Iterator[Located]:
        looked = self.look(path)
        if looked is None:
            return
        source, analysis = looked
        for use in analysis.uses:
            is_string = isinstance(use.node, ast.Constant)
            found = self._string(use, path) if is_string else self._chain(use, path)
            if found is not None:
                yield self._site(source, use, *found)

    def _chain(self, use: Use, path: Path) -> tuple[Kind, str, ast.expr, Things] | None:
        """The use of a name or a chain: what it is, and of which expression."""
        if use.root and self.resolver.name(use.root, use.scope, path) is ONLY_UNKNOWN:
            return None  # as with most
        outer = [use.node]
        while isinstance(outer[-1], ast.Attribute):
            outer.append(outer[-1].value)
        things: Things = frozenset()
        for node in list(reversed(outer)):
            outer.pop()
            if isinstance(node, ast.Attribute) and things:
                things = self.resolver.attribute(things, node.attr)
            else:
                things = self.resolver.expression(node, use.scope, path)
            if things == ONLY_UNKNOWN:
                return None
            if name := _name_of(things):
                parent = outer[-1] if outer else use.parents.node
                return (*_of_a_member(name, node, parent), things)
        return _module_as_value(use, things) if GLOBALS in things else None

    def _string(self, use: Use, path: Path) -> tuple[Kind, str, ast.expr, Things] | None:
        """A string passed to a call: it may name a getter, or the name of one in a module."""
        text, call = use.node.value, use.parents.node  # type: ignore[attr-defined]
        if not isinstance(call, ast.Call) or (called := last_name(call.func)) in _IMPORTING:
            return None
        if text.isidentifier():
            second = len(call.args) > 1 and call.args[1] is use.node
            if called not in _PATCHING or not second:
                return None
            target = self.resolver.expression(call.args[0], use.scope, path)
            things = self.resolver.attribute(target, text)
            return (Kind.PATCHED, _name_of(things), call, things) if _is_of(things) else None
        if not _DOTTED.match(text) or text.startswith(_FOREIGN):
            return None
        *_, before, last = text.split(".")
        if not known(last) and called not in _PATCHING:
            return None
        if any(text.startswith(f"{each.name}.") for each in self._namesakes):
            return None
        things = self.resolver.dotted(text, path)
        is_outside = all(thing.kind in ("name", "unknown") for thing in things)
        if is_outside and before in _MODULES_NAMES:
            things = frozenset({Thing("member", last)})  # through a module that is not here
        return (Kind.STRING, _name_of(things), use.node, things) if _is_of(things) else None

    def _site(
        self, source: Source, use: Use, kind: Kind, name: str, node: ast.expr, things: Things
    ) -> Located:
        begin, end, exact = locate(source, node, use.parents)
        span = source.span(begin, end)
        arguments = _arguments(source, node, exact) if kind is Kind.CALL else ()
        or_several = name in OF_SEVERAL_PIPELINES and _may_be_a_list(use, name)
        answer = _refused(kind, name, things) or replacement(
            name, arguments, self.config.versions, or_several=or_several
        )
        if kind is Kind.PRIVATE and isinstance(answer, Replacement):
            answer = as_it_is_read(name, use, node, answer)
        if kind is Kind.CALL and isinstance(answer, Replacement):
            answer = as_it_is_taken(use, node, answer)
        function, klass = use.scope.enclosing("function"), use.scope.enclosing("class")
        lines = range(span.line, span.end_line + 1)
        site = Site(
            file=source.name,
            span=span,
            exact=exact,
            name=name,
            kind=kind,
            text=source.text[begin:end],
            arguments=arguments,
            function=function.qualname if function else "",
            class_name=klass.qualname if klass else "",
            carriers=self.carriers(use, source.path),
            answer=answer,
            keep=any(_KEEP.search(source.line_text(line)) for line in lines),
            in_fstring=any(isinstance(each, ast.JoinedStr) for each in use.parents),
        )
        return Located(site, source.path, begin, end, node, use)


def _refused(kind: Kind, name: str, things: Things) -> Refusal | None:
    """Why nothing serves a use, whatever the versions have."""
    if kind in _WITHOUT_READING:
        unknown = kind is Kind.VALUE and not known(name)
        return Refusal("unknown-name" if unknown else _WITHOUT_READING[kind])
    if len(things) > 1:
        return Refusal("ambiguous")
    if any(thing.kind == "snapshot" for thing in things):
        return Refusal("at-import", "it keeps the value that it had at the import")
    return None


def _of_a_member(name: str, node: ast.expr, parent: ast.AST) -> tuple[Kind, str, ast.expr]:
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return Kind.ASSIGNED, name, node
    if isinstance(parent, ast.Call) and parent.func is node:
        return Kind.CALL, name, parent
    return Kind.PRIVATE if name.startswith("_") else Kind.VALUE, name, node


def _may_be_a_list(use: Use, getter: str) -> bool:
    """Whether a function knows that what a getter gives may be a list: it asks that of what the
    getter gave it, or goes through it.
    """
    nodes = use.scope.nodes
    bound = [e for e in nodes if isinstance(e, ast.Assign) and _calls(getter, e.value)]
    names = {n.id for e in bound for n in e.targets if isinstance(n, ast.Name)}
    return any(
        _calls(getter, each) or (isinstance(each, ast.Name) and each.id in names)
        for node in nodes
        for each in _taken_for_lists(node)
    )


def _calls(getter: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == getter


def _taken_for_lists(node: ast.AST) -> Iterator[ast.expr]:
    """What a node asks about whether it is a list, or goes through."""
    match node:
        case ast.Call(ast.Name("isinstance"), [asked, of]):
            if any(isinstance(each, ast.Name) and each.id == "list" for each in ast.walk(of)):
                yield asked
        case ast.Call(ast.Name("enumerate" | "len"), [gone_through, *_]):
            yield gone_through
        case ast.For(iter=gone_through) | ast.comprehension(iter=gone_through):
            yield gone_through
        case ast.Call(ast.Name("zip"), several):
            yield from several


def _is_of(things: Things) -> bool:
    return any(thing.kind in ("globals", "member") for thing in things)


def _name_of(things: Things) -> str:
    for thing in things:
        if thing.kind in ("member", "snapshot"):
            return thing.name
    return ""


def _module_as_value(use: Use, things: Things) -> tuple[Kind, str, ast.expr, Things] | None:
    """The module itself: bound to another name, tested, asked by name, or handed on."""
    node: ast.AST = use.node
    around = iter(use.parents)
    for parent in around:
        if isinstance(parent, ast.BoolOp) and parent.values[-1] is not node:
            return None  # only whether it is there
        if not isinstance(parent, ast.IfExp | ast.BoolOp | ast.NamedExpr):
            break
        if isinstance(parent, ast.IfExp) and parent.test is node:
            return None
        node = parent
    else:
        return None
    # A statement of its own, a test, or an attribute such as __name__.
    passive = ast.Compare | ast.If | ast.While | ast.Assert | ast.UnaryOp | ast.Expr | ast.Attribute
    if isinstance(parent, passive):
        return None
    if isinstance(parent, ast.Assign | ast.AnnAssign) and _followed(parent):
        return None
    if isinstance(parent, ast.Tuple | ast.List) and isinstance(next(around, None), ast.Assign):
        return None  # unpacked
    if isinstance(parent, ast.Call) and node in parent.args:
        named = parent.args[1] if len(parent.args) > 1 else None
        name = named.value if isinstance(named, ast.Constant) else None
        called = last_name(parent.func)
        if called in _ASKING:
            return Kind.DYNAMIC, name if isinstance(name, str) else "", parent, things
        if called in _PATCHING:
            # With a name that is written out the string tells.
            return None if isinstance(name, str) else (Kind.PATCHED, "", parent, things)
    return Kind.MODULE, "", use.node, things


def _followed(statement: ast.Assign | ast.AnnAssign) -> bool:
    """Whether every target is one that the resolver follows."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(
        isinstance(target, ast.Name)
        or (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name))
        for target in targets
    )


def _arguments(source: Source, node: ast.expr, exact: bool) -> tuple[Argument, ...]:
    """The arguments as written; as Python writes them where they can't be located."""
    if not isinstance(node, ast.Call):
        return ()

    def text(value: ast.expr) -> str:
        if not exact or value.lineno != (value.end_lineno or 0):
            return ast.unparse(value)
        begin, end = source.extent(value)
        written = source.text[begin:end]
        return written if parses_to(written, value) else ast.unparse(value)

    positional = [
        Argument(f"*{text(each.value)}" if isinstance(each, ast.Starred) else text(each))
        for each in node.args
    ]
    named = [
        Argument(text(each.value) if each.arg else f"**{text(each.value)}", each.arg or "")
        for each in node.keywords
    ]
    return (*positional, *named)
