"""Test unusual files: encodings, line ends, layouts, and files that are no Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from migrate_cases import VERSIONS, migrated

from megapg.migrate.config import Config
from megapg.migrate.engine import migrate

RANK = "get_tensor_model_parallel_rank"
READS = f"from megatron.core import mpu\n\n\ndef f():\n    return mpu.{RANK}()\n"
OTHER = "OTHER = 'é'  # and this\n"
_LATIN = "# -*- coding: latin-1 -*-\n" + READS + OTHER

REWRITTEN = {
    "crlf": (READS + OTHER).replace("\n", "\r\n").encode(),
    "tabs": (READS + OTHER).replace("    ", "\t").encode(),
    "form feed": READS.replace("def", "\fdef").encode() + b"\f\n" + OTHER.encode(),
    "byte order mark": b"\xef\xbb\xbf" + (READS + OTHER).encode(),
    "byte order mark and crlf": b"\xef\xbb\xbf" + READS.replace("\n", "\r\n").encode(),
    "latin-1": _LATIN.encode("latin-1"),
    "cookie in the second line": ("#!/usr/bin/python\n" + _LATIN).encode("latin-1"),
    "cp1252": _LATIN.replace("latin-1", "cp1252").replace("é", "\u2019").encode("cp1252"),
    "shift_jis": ("# coding: shift_jis\n" + READS + "# 日本\n").encode("shift_jis"),
    "no newline at the end": READS.rstrip("\n").encode(),
    "blanks at the end": READS.replace("()\n", "()   \t\n").encode() + b"   \n\n\n",
    "two spaces": (READS + OTHER).replace("    ", "  ").encode(),
    "docstring and future": b'"""Doc."""\nfrom __future__ import annotations\n' + READS.encode(),
    "one line": f"from megatron.core import mpu; X = mpu.{RANK}()".encode(),
    "continued lines": (
        f"from megatron.core import \\\r\n  mpu\r\nX = 1 + \\\r\n  mpu.{RANK}()\r\n"
    ).encode(),
    "unicode names": f"from megatron.core import mpu as ünï\nß = ünï.{RANK}(); é = 1\n".encode(),
    "escapes": READS.encode() + rb"X = '\0\x1a'" + b"\n",
    "a comment alone": READS.encode() + b"# the end",
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str, tmp_path: Path) -> None:
    file, before = tmp_path / "a.py", REWRITTEN[name]
    file.write_bytes(before)
    assert not migrated(tmp_path).problems
    after = file.read_bytes()
    assert RANK.encode() not in after
    assert b"import megapg" in after
    # Lines without uses and imports stay, byte for byte. New lines have the line ends of the file.
    lines = after.splitlines(keepends=True)
    for line in before.splitlines(keepends=True):
        assert line in lines or re.search(rb"mpu|megatron|\xc3\xbcn|def f", line), line
    ends = set(re.findall(rb"\r\n|\r|\n", before)) or {b"\n"}
    assert set(re.findall(rb"\r\n|\r|\n", after)) <= ends
    assert after.startswith(b"\xef\xbb\xbf") == before.startswith(b"\xef\xbb\xbf")
    assert after.endswith(b"\n") == before.endswith(b"\n")


UNREADABLE = {
    "syntax error": (READS.encode() + b"def broken(:\n", "no valid Python"),
    "half a file": (READS.encode() + b"X = (1,\n", "no valid Python"),
    "merge conflict": (READS.encode() + b"<<<<<<< HEAD\nX = 1\n=======\n", "no valid Python"),
    "Python 2": (READS.encode() + b"print 'x' % mpu.get_x()\n", "no valid Python"),
    "not UTF-8": (READS.encode() + b"# \xe9\n", "can't be read"),
    "wrong cookie": (b"# coding: ascii\n" + READS.encode() + "# é\n".encode(), "can't be read"),
    "unknown cookie": (b"# coding: klingon\n" + READS.encode(), "can't be read"),
    "binary": (b"\x7fELF\0mpu\0parallel_state" + bytes(range(256)), ""),
    "deep": (READS.encode() + b"X = " + b"(" * 500 + b")" * 500 + b"\n", "not valid"),
    "long": (READS.encode() + b"X = a" + b".b" * 1200 + b"\n", "recursion"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_left_alone(name: str, tmp_path: Path) -> None:
    data, why = UNREADABLE[name]
    (tmp_path / "odd.py").write_bytes(data)
    (tmp_path / "plain.py").write_text(READS)
    migration = migrate([tmp_path], Config(tmp_path, versions=VERSIONS))
    assert [each.file for each in migration.files] == ["plain.py"]
    assert [each.file for each in migration.problems] == ["odd.py"]
    assert why in migration.problems[0].message


def test_nothing_to_do(tmp_path: Path) -> None:
    nothing = {
        "empty": b"",
        "mark": b"\xef\xbb\xbf",
        "comments": f"# from megatron.core import mpu\n# mpu.{RANK}()\n".encode(),
        "string": f'"""from megatron.core import mpu\nmpu.{RANK}()\n"""'.encode(),
        "newlines": b"\r\n\n\r\f\n",
        "utf_16": READS.encode("utf-16"),
    }
    for name, data in nothing.items():
        (tmp_path / f"{name}.py").write_bytes(data)
    (tmp_path / "folder.py").mkdir()
    migration = migrate([tmp_path], Config(tmp_path, versions=VERSIONS))
    assert not migration.files
    assert not migration.found.uses
    assert {each.file for each in migration.problems} <= {"newlines.py", "utf_16.py"}


def test_a_stub(tmp_path: Path) -> None:
    (tmp_path / "a.pyi").write_text(f"from megatron.core import mpu\nX: int = mpu.{RANK}()\n")
    assert len(migrated(tmp_path).served) == 1


def test_long_and_deep_files(tmp_path: Path) -> None:
    texts = {
        "calls": f"X = {'f(' * 60}mpu.{RANK}(){')' * 60}\n",
        "additions": f"X = {'1 + ' * 150}mpu.{RANK}()\n",
        "branches": "if a: pass\n" + f"elif mpu.{RANK}(): pass\n" * 60,
        "strings": "X = (" + f"f'{{mpu.{RANK}()}}'\n" * 100 + ")\n",
        "a line": f"X = [mpu.{RANK}(), {', '.join(map(str, range(2000)))}, mpu.{RANK}()]\n",
        "functions": "".join(
            f"def f{i}(x):\n    return f{max(i - 1, 0)}(x) + mpu.{RANK}()\n\n\n" for i in range(60)
        ),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text("from megatron.core import mpu\n" + text)
    migration = migrated(tmp_path)
    assert not migration.left
    assert [each.file for each in migration.problems] == []
