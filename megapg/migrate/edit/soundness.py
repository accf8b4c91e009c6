"""Whether a rewrite is what it says: its edits taken back on the new tree give the old tree.

Nothing here knows how the edits were planned.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from megapg.migrate.edit.texts import NEWLINE
from megapg.migrate.edit.trees import TakingBack, Unsound
from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.python.methods import calls_of_bases, of_its_class
from megapg.migrate.python.scopes import bound_name
from megapg.migrate.python.source import Problem, Source, parse

_KEEPING = re.compile(r"\s*\w+\.(?P<name>\w+) = (?P=name)\s*")
_BOM = b"\xef\xbb\xbf"


def verify(rewritten: Rewritten, old: Source | None = None) -> str | None:
    """What is wrong with a rewrite, in one line; None where it is sound.

    Sound means: the edits applied to the old text are the new bytes, none outside of their spans
    differs, and encoding, byte order mark and newlines are kept; the new file compiles; the edits
    taken back on the new syntax tree give the old one, each of them at one place and as the kind
    of change that it says; what is replaced was read, not written; no docstring is lost; what a
    constructor keeps is not lost to one of its bases in the file; no name is left without its
    import, and none that was in use comes to mean something else.

    What the new texts read can't be told from the edits: which group, say.

    Args:
        rewritten: the file, before and after.
        old: the file before, where it is parsed already; not having to do it again saves a third.
    """
    found = verified(rewritten, old)
    return found if isinstance(found, str) else None


def verified(rewritten: Rewritten, old: Source | None = None) -> ast.Module | str:
    """The syntax tree of the new text of a rewrite; what is wrong with it where it is not sound,
    as :func:`verify` says it.
    """
    try:
        old, new = _sources(rewritten, old)
        _compiles(rewritten, new)
        undo = TakingBack(old, new, rewritten.edits)
        undo.compare(old.tree, new.tree)
        undo.all_undone()
        _keeps_what_it_is_passed(new, rewritten.edits)
        _names_keep_their_meaning(old, new, undo)
    except Unsound as unsound:
        return str(unsound)
    except (RecursionError, MemoryError):
        return "is nested too deeply to verify"
    return new.tree


# ---- bytes -------------------------------------------------------------------------------------


def _sources(rewritten: Rewritten, old: Source | None) -> tuple[Source, Source]:
    """Both files, after the bytes are found to differ only where the edits are."""
    if old is None or old.data != rewritten.before:
        old = _parsed(rewritten, rewritten.before)
    if old.text != rewritten.text:
        raise Unsound("the text that the edits are about is not the file's")
    text = _applied(old, rewritten.edits)
    mark = _BOM if rewritten.before.startswith(_BOM) else b""
    try:
        expected = mark + text.encode(old.encoding)
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise Unsound(f"{character!r} can't be written in {old.encoding}") from error
    if expected != rewritten.after:
        raise Unsound("the new bytes are not the old ones with the edits")
    if rewritten.before.startswith(b"#!") and not rewritten.after.startswith(b"#!"):
        raise Unsound("line 1: the interpreter line would not be the first any more")
    new = _parsed(rewritten, rewritten.after, "would be unreadable: ")
    if new.encoding != old.encoding or new.text != text:
        raise Unsound(f"would be read as {new.encoding} instead of {old.encoding}")
    return old, new


def _parsed(rewritten: Rewritten, data: bytes, what: str = "") -> Source:
    source = parse(rewritten.path, rewritten.file, data)
    if isinstance(source, Problem):
        raise Unsound(f"{what}{f'line {source.line}: ' * bool(source.line)}{source.message}")
    return source


def _applied(old: Source, edits: Sequence[Edit]) -> str:
    """The text with the edits, which are in order and apart, in the newlines of the file."""
    text, pieces, at = old.text, [], 0
    newlines = set(NEWLINE.findall(text) if "\r" in text else "\n" * ("\n" in text))
    for edit in edits:
        line = f"line {bisect_right(old.line_starts, edit.start)}"
        if not at <= edit.start <= edit.stop <= len(text):
            raise Unsound(f"characters {edit.start} to {edit.stop}: edits overlap or lie outside")
        if newlines and not newlines.issuperset(NEWLINE.findall(edit.new)):
            raise Unsound(f"{line}: a newline of another style would come in")
        if any(text[i - 1 : i + 1] == "\r\n" for i in (edit.start, edit.stop) if i):
            raise Unsound(f"{line}: an edit ends in the middle of a newline")
        pieces += [text[at : edit.start], edit.new]
        at = edit.stop
    return "".join([*pieces, text[at:]])


def _compiles(rewritten: Rewritten, new: Source) -> None:
    with warnings.catch_warnings(action="ignore"):
        try:
            compile(new.tree, rewritten.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise Unsound(f"would not compile: line {error.lineno}: {error.msg}") from error
        except ValueError as error:
            raise Unsound(f"would not compile: {error}") from error


# ---- constructors ------------------------------------------------------------------------------


def _keeps_what_it_is_passed(new: Source, edits: Sequence[Edit]) -> None:
    """Raise where a constructor keeps a parameter, and then calls that of a base which keeps one as
    well, and is not passed it.
    """
    matched = (_KEEPING.fullmatch(edit.new) for edit in edits if edit.what == "statement")
    names = [each["name"] for each in matched if each]
    for name in {each for each in names if names.count(each) > 1}:
        classes = {each.name: each for each in ast.walk(new.tree) if isinstance(each, ast.ClassDef)}
        keepers = {each: _last_kept(klass, name) for each, klass in classes.items()}
        for one, line in keepers.items():
            above = _above(classes[one], classes) if line else set()
            if any(keepers[each] for each in above) and _passes_nothing(classes[one], name, line):
                raise Unsound(f"line {line}: the {name} that is kept would be lost to a base")


def _constructors(klass: ast.ClassDef) -> list[ast.FunctionDef]:
    return [e for e in klass.body if isinstance(e, ast.FunctionDef) and e.name == "__init__"]


def _last_kept(klass: ast.ClassDef, name: str) -> int:
    """The line in which a constructor puts a parameter on its object; or 0."""
    lines = [
        each.lineno
        for constructor in _constructors(klass)
        for each in of_its_class(constructor)
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Attribute)
        and each.targets[0].attr == name
        and isinstance(each.value, ast.Name)
        and each.value.id == name
    ]
    return max(lines, default=0)


def _passes_nothing(klass: ast.ClassDef, name: str, line: int) -> bool:
    """Whether from a line on a constructor calls another one, and does not pass it a parameter."""
    return any(
        call.lineno > line and not any(each.arg in (name, None) for each in call.keywords)
        for constructor in _constructors(klass)
        for call in calls_of_bases(constructor)
    )


def _above(klass: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """The classes of the file that a class is made of."""
    found: set[str] = set()
    waiting = [klass]
    while waiting:
        names = {each.id for each in waiting.pop().bases if isinstance(each, ast.Name)}
        waiting += [classes[each] for each in names - found if each in classes]
        found |= names & classes.keys()
    return found - {klass.name}


# ---- names -------------------------------------------------------------------------------------


def _names_keep_their_meaning(old: Source, new: Source, undo: TakingBack) -> None:
    """No read of a name whose import went; none that was in use is taken by an import."""
    came, went = _bound(undo.came), _bound(undo.went)
    for name in went - came:
        if not hasattr(builtins, name):
            own, inner = _symbols(new, name)
            read = any(e.is_referenced() for e in own) or any(
                e.is_global() and e.is_referenced() for e in inner
            )
            imported = any(e.is_imported() for e in own) or any(
                e.is_declared_global() and e.is_imported() for e in inner
            )
            if read and not imported and not _has_star(new.tree):
                raise Unsound(f"{name} would still be read, and its import be gone")
    for name in came - went:
        own, inner = _symbols(old, name)
        if any(e.is_assigned() and not e.is_imported() for e in own) or any(
            e.is_declared_global() and e.is_assigned() for e in inner
        ):
            raise Unsound(f"{name} is in use where it would be imported")


def _bound(imports: Iterable[ast.AST]) -> set[str]:
    """The names that imports, or parts of such, bind."""
    aliases = (alias for each in imports for alias in getattr(each, "names", [each]))
    return {bound_name(each) for each in aliases if isinstance(each, ast.alias)}


def _symbols(source: Source, name: str) -> tuple[list[symtable.Symbol], list[symtable.Symbol]]:
    """What a name is at the top of a module, and in each scope further in."""
    # The search for a string alone is much faster, and mostly enough.
    if name not in source.text or not re.search(rf"\b{re.escape(name)}\b", source.text):
        return [], []
    with warnings.catch_warnings(action="ignore"):
        table = symtable.symtable(source.text, source.name, "exec")
    found: list[list[symtable.Symbol]] = [[], []]
    waiting = [table]
    for each in waiting:  # grows
        if name in each.get_identifiers():
            found[each is not table].append(each.lookup(name))
        waiting += each.get_children()
    return found[0], found[1]


def _has_star(tree: ast.Module) -> bool:
    return any(
        alias.name == "*"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
