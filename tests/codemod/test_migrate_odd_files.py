"""``megapg migrate`` on files as they are found in the wild: the right thing, or a line saying why
not; never a hang, a crash, or a file that is not what it was.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Done, megapg
from trees import contents

RANK = "get_tensor_model_parallel_rank"
READS = f"from megatron.core import mpu\n\n\ndef f():\n    return mpu.{RANK}()\n"
UNTOUCHED = "SURELY_UNTOUCHED = 'é'  # and this\n"


def migrate(*arguments: object, at: Path, without_privileges: bool = False) -> Done:
    return megapg("migrate", *arguments, at=at, without_privileges=without_privileges, NO_COLOR="1")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one file in which nothing is odd."""
    (tmp_path / "pyproject.toml").write_text('[tool.megapg]\nfrom-core = "0.16"\n')
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_bytes(b"")
    (tmp_path / "pkg" / "plain.py").write_text(READS)
    return tmp_path


def output_of(run: Done) -> str:
    # The diff has the bytes of the file, whatever its encoding.
    output = (run.stdout + run.stderr).decode(errors="replace")
    assert "Traceback" not in output, output
    return output


def said(run: Done) -> str:
    return re.sub(r"\s+", " ", output_of(run))


def ended(code: int, *arguments: object, at: Path, without_privileges: bool = False) -> Done:
    """A migration that ended so."""
    run = migrate(*arguments, at=at, without_privileges=without_privileges)
    assert run.returncode == code, said(run)
    return run


# --- files that are rewritten ---------------------------------------------------------------------

_LATIN = "# -*- coding: latin-1 -*-\n" + READS + UNTOUCHED
REWRITTEN = {
    "crlf": (READS + UNTOUCHED).replace("\n", "\r\n").encode(),
    "old_mac": (READS + UNTOUCHED).replace("\n", "\r").encode(),
    "mixed": READS.replace("\n", "\r\n", 2).encode()
    + b"X = 1\r"
    + UNTOUCHED.encode()
    + b"Y = 2\r\n",
    "tabs": (READS + UNTOUCHED).replace("    ", "\t").encode(),
    "tabs_after_spaces": f"from megatron.core import mpu\nif 1:\n  \tX = mpu.{RANK}()\n".encode(),
    "form_feed": READS.replace("def", "\fdef").encode() + b"\f\n" + UNTOUCHED.encode(),
    "form_feed_in_line": READS.replace("return ", "return \f").encode(),
    "byte_order_mark": b"\xef\xbb\xbf" + (READS + UNTOUCHED).encode(),
    "mark_and_crlf": b"\xef\xbb\xbf" + READS.replace("\n", "\r\n").encode(),
    "mark_and_cookie": b"\xef\xbb\xbf# coding: utf-8\n" + READS.encode(),
    "latin": _LATIN.encode("latin-1"),
    "latin_crlf": _LATIN.replace("\n", "\r\n").encode("latin-1"),
    "windows": _LATIN.replace("latin-1", "cp1252").replace("é", "\u2019").encode("cp1252"),
    "japanese": ("# vim: set fileencoding=shift_jis :\n" + READS + "# 日本\n").encode("shift_jis"),
    "cookie_in_second_line": ("#!/usr/bin/python\n" + _LATIN).encode("latin-1"),
    "no_newline": READS.rstrip("\n").encode(),
    "trailing_blanks": READS.replace("()\n", "()   \t\n").encode() + b"   \n\n\n",
    "unicode_names": (
        f"from megatron.core import mpu as ünï\nª名 = '\U0001d518'; ß = ünï.{RANK}(); é = 1\n"
    ).encode(),
    "docstring_and_future": b'"""Doc."""\nfrom __future__ import annotations\n' + READS.encode(),
    "only_one_line": f"from megatron.core import mpu; X = mpu.{RANK}()".encode(),
    "crlf_continued": (
        f"from megatron.core import \\\r\n  mpu\r\nX = 1 + \\\r\n  mpu.{RANK}()\r\n"
    ).encode(),
    "null_in_a_string": READS.encode() + rb"X = '\0\x1a'" + b"\n",
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(tree: Path, name: str) -> None:
    file, before = tree / "pkg" / f"{name}.py", REWRITTEN[name]
    file.write_bytes(before)
    ended(1, "pkg", at=tree)
    assert file.read_bytes() == before
    ended(0, "pkg", "--write", at=tree)
    after = file.read_bytes()
    assert RANK.encode() not in after
    assert b"megapg" in after
    compile(after, str(file), "exec")
    # What a line of its own was stays one, byte for byte; nothing but reads and imports is gone.
    lines = after.splitlines(keepends=True)
    for line in before.splitlines(keepends=True):
        assert line in lines or re.search(rb"mpu|megatron|\xc3\xbcn|def f", line), line
    # Added lines end as the file's lines do.
    newlines = set(re.findall(rb"\r\n|\r|\n", before))
    assert set(re.findall(rb"\r\n|\r|\n", after)) <= (newlines or {b"\n", b"\r\n", b"\r"})
    assert after.startswith(b"\xef\xbb\xbf") == before.startswith(b"\xef\xbb\xbf")
    at = file.stat().st_mtime_ns
    again = migrate("pkg", "--write", at=tree)
    assert (again.returncode, file.read_bytes(), file.stat().st_mtime_ns) == (0, after, at)


def test_a_stub_with_reads(tree: Path) -> None:
    stub = tree / "pkg" / "stub.pyi"
    stub.write_text(f"from megatron.core import mpu\nX: int = mpu.{RANK}()\n")
    run = migrate("pkg", "--write", at=tree)
    said(run)
    compile(stub.read_bytes(), str(stub), "exec")
    assert (RANK in stub.read_text()) == (run.returncode == 1)


NOTHING_TO_DO = {
    "empty": b"",
    "only_a_mark": b"\xef\xbb\xbf",
    "only_comments": f"# from megatron.core import mpu\n# mpu.{RANK}()\n".encode(),
    "only_a_string": f'"""from megatron.core import mpu\nmpu.{RANK}()\n"""'.encode(),
    "only_newlines": b"\r\n\n\r\f\n",
    "not_megatrons": f"from vllm.distributed import parallel_state as ps\nps.{RANK}()\n".encode(),
}


def test_nothing_to_do(tree: Path) -> None:
    (tree / "pkg" / "plain.py").unlink()
    for name, data in NOTHING_TO_DO.items():
        (tree / "pkg" / f"{name}.py").write_bytes(data)
    (tree / "pkg" / "notebook.ipynb").write_text('{"cells": [{"source": "mpu.' + RANK + '()"}]}')
    (tree / "pkg" / "script").write_text(READS)
    before = contents(tree)
    ended(0, ".", "--write", at=tree)
    assert contents(tree) == before


# --- files that can't be looked into --------------------------------------------------------------

# name -> bytes, what the line about it says; None where there need not be one: no Python reads
# UTF-16, so nothing in it can be a use.
LEFT_ALONE = {
    "syntax_error": (READS.encode() + b"def broken(:\n", "no Python"),
    "half_a_file": (READS.encode() + b"X = (1,\n", "no Python"),
    "bad_indentation": (READS.encode() + b"def g():\n    a\n  b\n", "no Python"),
    "merge_conflict": (READS.encode() + b"<<<<<<< HEAD\nX = 1\n=======\n>>>>>>> b\n", "no Python"),
    "python_2": (READS.encode() + b"print 'x' % mpu.get_x()\n", "no Python"),
    "python_2_except": (READS.encode() + b"try: pass\nexcept E, e: raise E, 'x'\n", "no Python"),
    "not_utf8": (READS.encode() + b"# \xe9\n", "utf-8"),
    "utf_16": (READS.encode("utf-16"), None),
    "utf_32": (READS.encode("utf-32"), None),
    "lying_cookie": (b"# coding: ascii\n" + READS.encode() + "# é\n".encode(), "ascii"),
    "unknown_cookie": (b"# coding: klingon\n" + READS.encode(), "klingon"),
    "cookie_that_is_no_text": (b"# coding: base64\n" + READS.encode(), "no Python"),
    "mark_and_other_cookie": (b"\xef\xbb\xbf# coding: latin-1\n" + READS.encode(), "no Python"),
    "null_bytes": (READS.encode() + b"\0\n", "null"),
    "binary": (b"\x7fELF\x02\x01\x01\0mpu\0parallel_state" + bytes(range(256)), ""),
    "deep_parentheses": (READS.encode() + b"X = " + b"(" * 500 + b")" * 500 + b"\n", ""),
    "deep_operators": (READS.encode() + b"X = " + b"-" * 200_000 + b"1\n", "deep"),
    "deep_attributes": (READS.encode() + b"X = a" + b".b" * 100_000 + b"\n", "deep"),
    "deep_additions": (READS.encode() + b"X = " + b"1+" * 60_000 + b"1\n", "deep"),
}


def test_left_alone(tree: Path) -> None:
    for name, (data, _) in LEFT_ALONE.items():
        (tree / "pkg" / f"{name}.py").write_bytes(data)
    before = contents(tree)
    ended(1, ".", at=tree)
    assert contents(tree) == before
    run = migrate(".", "--write", at=tree)
    output = output_of(run)
    after = contents(tree)
    assert {name for name in before if after[name] != before[name]} == {"pkg/plain.py"}
    for name, (_, why) in LEFT_ALONE.items():
        lines = [line for line in output.splitlines() if f"{name}.py" in line]
        assert why is None or any(why.lower() in line.lower() for line in lines), (name, lines)


def test_deep_but_not_too_deep(tree: Path) -> None:
    """What Python itself can parse is rewritten, or said to be too deep; it does not crash."""
    deep = {
        "nested_functions": "".join(f"{' ' * i}def f{i}():\n" for i in range(80))
        + " " * 80
        + f"return mpu.{RANK}()\n",
        "nested_calls": f"X = {'f(' * 90}mpu.{RANK}(){')' * 90}\n",
        "many_additions": f"X = {'1 + ' * 900}mpu.{RANK}()\n",
        "many_elifs": "if a: pass\n" + f"elif mpu.{RANK}(): pass\n" * 300,
        "long_chain": f"X = mpu.{RANK}(){'.real' * 900}\n",
        "many_strings": "X = (" + f"f'{{mpu.{RANK}()}}'\n" * 500 + ")\n",
    }
    for name, text in deep.items():
        (tree / "pkg" / f"{name}.py").write_text("from megatron.core import mpu\n" + text)
    run = migrate(".", "--write", at=tree)
    output = said(run)
    for name in deep:
        file = tree / "pkg" / f"{name}.py"
        compile(file.read_bytes(), str(file), "exec")
        assert RANK not in file.read_text() or f"{name}.py" in output, name


# --- what is no plain file ------------------------------------------------------------------------


def test_links_pipes_and_directories(tree: Path) -> None:
    pkg = tree / "pkg"
    (pkg / "loop").symlink_to(pkg)
    (pkg / "sub").mkdir()
    (pkg / "sub" / "up").symlink_to("..")
    (pkg / "itself.py").symlink_to("itself.py")
    (pkg / "one.py").symlink_to("two.py")
    (pkg / "two.py").symlink_to("one.py")
    (pkg / "nowhere.py").symlink_to("gone.py")
    (pkg / "again.py").symlink_to("plain.py")
    (pkg / "folder.py").mkdir()
    (pkg / "folder.py" / "inside.py").write_text(READS)
    os.mkfifo(pkg / "pipe.py")
    links = {path: os.readlink(path) for path in pkg.rglob("*") if path.is_symlink()}
    ended(1, "pkg", at=tree)
    run = migrate("pkg", "--write", at=tree)
    output = said(run)
    for name in ("itself.py", "one.py", "two.py", "nowhere.py", "pipe.py"):
        assert name in output, name
    assert {path: os.readlink(path) for path in pkg.rglob("*") if path.is_symlink()} == links
    for file in (pkg / "plain.py", pkg / "folder.py" / "inside.py"):
        text = file.read_text()
        assert RANK not in text
        assert text.count("megapg.") == text.count("megapg.resolve(") >= 1  # rewritten once
        assert not file.is_symlink()


@pytest.mark.parametrize("options", [(), ("--write",)])
def test_a_pipe_by_name(tree: Path, options: tuple[str, ...]) -> None:
    os.mkfifo(tree / "y.py")
    run = migrate("y.py", *options, at=tree)
    assert "y.py" in said(run)


def test_linked_from_outside(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "real.py"
    elsewhere.write_text(READS)
    (tree / "pkg" / "linked.py").symlink_to(elsewhere)
    run = migrate("pkg", "--write", at=tree)
    output = said(run)
    assert (tree / "pkg" / "linked.py").is_symlink()
    assert RANK not in elsewhere.read_text() or "linked.py" in output


def test_devices_and_missing_paths(tree: Path) -> None:
    before = contents(tree)
    for path in ("missing", "missing.py", "pkg/nothing/x.py"):
        run = ended(2, path, "--write", at=tree)
        assert Path(path).name in said(run)
    assert contents(tree) == before


# --- permissions ----------------------------------------------------------------------------------


def test_read_only_directory(tree: Path) -> None:
    folder = tree / "pkg" / "locked"
    folder.mkdir()
    (folder / "x.py").write_text(READS)
    folder.chmod(0o555)
    try:
        run = ended(2, "pkg", "--write", at=tree, without_privileges=True)
        assert "locked/x.py" in said(run)
        assert [path.name for path in folder.iterdir()] == ["x.py"]
        assert (folder / "x.py").read_text() == READS
        assert RANK not in (tree / "pkg" / "plain.py").read_text()
    finally:
        folder.chmod(0o755)


def test_unreadable(tree: Path) -> None:
    folder, file = tree / "pkg" / "secret", tree / "pkg" / "hidden.py"
    folder.mkdir()
    (folder / "x.py").write_text(READS)
    file.write_text(READS)
    folder.chmod(0)
    file.chmod(0)
    try:
        if os.access(folder, os.R_OK) and os.geteuid() != 0:
            pytest.skip("permission bits mean nothing here")
        run = migrate("pkg", "--write", at=tree, without_privileges=True)
        output = said(run)
        assert "secret" in output
        assert "hidden.py" in output
        assert RANK not in (tree / "pkg" / "plain.py").read_text()
    finally:
        folder.chmod(0o755)
        file.chmod(0o644)
    assert (folder / "x.py").read_text() == file.read_text() == READS


def test_modes_are_kept(tree: Path) -> None:
    file = tree / "pkg" / "plain.py"
    file.chmod(0o750)
    ended(0, "pkg", "--write", at=tree)
    assert file.stat().st_mode & 0o777 == 0o750


# --- large ----------------------------------------------------------------------------------------


def test_a_very_long_line(tree: Path) -> None:
    file = tree / "pkg" / "line.py"
    numbers = ", ".join(map(str, range(20_000)))
    file.write_text(
        "from megatron.core import mpu\n"
        f"X = [mpu.{RANK}(), {numbers}, mpu.{RANK}(), 'é', {numbers}, mpu.{RANK}()]\n"
    )
    assert file.stat().st_size > 200_000
    ended(0, "pkg", "--write", at=tree)
    text = file.read_text()
    assert RANK not in text
    assert text.count(numbers) == 2


def test_many_reads_in_one_line(tree: Path) -> None:
    file = tree / "pkg" / "line.py"
    file.write_text("from megatron.core import mpu\nX = [" + f"mpu.{RANK}(), " * 1000 + "]\n")
    ended(0, "pkg", "--write", at=tree)
    assert RANK not in file.read_text()


LONG_SHAPES = {
    "functions that call each other": (
        "def f{i}(x):\n    y = x + mpu.{g}()\n    return y + f{j}(x)\n\n\n",
        "",
    ),
    "methods of one class": (
        "    def m{i}(self, x):\n        y = x + mpu.{g}()\n        return self.m{j}(y)\n\n",
        "class Methods:\n    def __init__(self, model):\n        self.model = model\n\n",
    ),
    "one function": (
        "    y{i} = x + mpu.{g}()\n    x += 1\n    print(x)\n    x -= 2\n",
        "def whole(x):\n",
    ),
    "one method, in branches": (
        "        if self.x{i}:\n            y = x + mpu.{g}()\n        else:\n            y = 0\n",
        "class Branches:\n    def method(self, x):\n",
    ),
    "constructors": (
        "class C{i}(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.y = mpu.{g}()\n\n\n",
        "",
    ),
}


def long_file(many: int) -> str:
    getters = (RANK, "get_data_parallel_rank", "get_pipeline_model_parallel_rank")
    text = "import torch\nfrom megatron.core import mpu\n\n\n"
    for each, before in LONG_SHAPES.values():
        text += before + "".join(
            each.format(i=i, j=max(i - 1, 0), g=getters[i % 3]) for i in range(many)
        )
    assert text.count("mpu.") == 5 * many
    return text


def test_a_long_file(tree: Path) -> None:
    file = tree / "pkg" / "long.py"
    file.write_text(long_file(100))
    run = ended(0, "pkg/long.py", "--write", at=tree)
    assert "500 uses: 500 rewritten" in said(run)
    assert "mpu." not in file.read_text()


@pytest.mark.slow
def test_a_file_of_fifty_thousand_lines_ends_in_a_minute(tree: Path) -> None:
    """A minute of the processor's time."""
    file = tree / "pkg" / "long.py"
    file.write_text(long_file(2_500))
    assert file.read_text().count("\n") > 50_000
    run = subprocess.run(
        [sys.executable, "-m", "megapg", "migrate", "pkg/long.py", "--write"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60)),
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "12,500 uses: 12,500 rewritten" in re.sub(r"\s+", " ", run.stdout + run.stderr)
    assert "mpu." not in file.read_text()


def test_a_long_chain_of_branches(tree: Path) -> None:
    """Which is nested as deeply as it is long; where that is deeper than Python compares, the file
    stays, with a line that says so.
    """
    file = tree / "pkg" / "chain.py"
    for many, written in ((600, True), (1_200, False)):
        branches = "".join(
            f"    elif x == {i}:\n        return mpu.{RANK}()\n" for i in range(many)
        )
        start = "from megatron.core import mpu\n\n\ndef f(x):\n    if not x:\n        return 0\n"
        text = start + branches
        file.write_text(text)
        run = migrate("pkg/chain.py", "--write", at=tree)
        assert run.returncode == (0 if written else 1), said(run)
        assert ("chain.py: is left as it is" in said(run)) is not written
        assert (file.read_text() == text) is not written


# --- all of it together ---------------------------------------------------------------------------


def test_everything_at_once(tree: Path) -> None:
    for name, data in REWRITTEN.items():
        (tree / "pkg" / f"{name}.py").write_bytes(data)
    for name, (data, _) in LEFT_ALONE.items():
        (tree / "pkg" / f"{name}.py").write_bytes(data)
    locked = tree / "pkg" / "locked.py"
    locked.write_text(READS)
    locked.chmod(0o444)
    before = contents(tree)
    run = ended(2, "pkg", "--write", at=tree, without_privileges=True)
    assert "locked.py" in said(run)
    after = contents(tree)
    changed = {name for name in before if after[name] != before[name]}
    expected = {f"pkg/{name}.py" for name in (*REWRITTEN, "plain")}
    assert changed == expected
    assert locked.stat().st_mode & 0o777 == 0o444
    assert set(after) == set(before)  # nothing is left behind
