"""Which uses of the globals are found: by what names stand for, in every way there is to write."""

from __future__ import annotations

import ast
import codecs
import io
import os
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from old_core import OLD_CORE, core_folders
from trees import write

from megapg.migrate.config import Config
from megapg.migrate.find.index import Findings, find_sites
from megapg.migrate.find.sites import Kind, Site
from megapg.migrate.python.locate import locate
from megapg.migrate.python.scopes import Parents
from megapg.migrate.python.source import Source, parse
from megapg.upstream.signatures import SIGNATURES


def look(root: Path, *, wrappers: tuple[str, ...] = ()) -> Findings:
    found = find_sites([root], Config(root, wrappers=wrappers, versions=(16,)))
    for site in found.sites:
        agrees_with_its_file(root / site.file, site)
    return found


def agrees_with_its_file(path: Path, site: Site) -> None:
    """The bytes of a site's span are its text, and parse to the kind of thing that it says."""
    data = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    assert data[site.span.start : site.span.stop].decode(encoding) == site.text
    if site.exact:
        node = ast.parse(f"({site.text}\n)", mode="eval").body
        assert isinstance(node, ast.Call) == (site.kind in (Kind.CALL, Kind.PATCHED, Kind.DYNAMIC))


def said(root: Path, files: dict[str, str], **options: tuple[str, ...]) -> list[str]:
    """``line kind name`` of every site; of several files with the file in front."""
    sites = look(write(root, files), **options).sites
    several = len(files) > 1
    return [
        f"{site.file + ':' if several else ''}{site.span.line} {site.kind} {site.name}".strip()
        for site in sites
    ]


RANK = "get_tensor_model_parallel_rank"


# --- import styles --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        f"from megatron.core import parallel_state\nparallel_state.{RANK}()",
        f"from megatron.core import parallel_state as ps\nps.{RANK}()",
        f"from megatron.core import mpu\nmpu.{RANK}()",
        f"from megatron import mpu\nmpu.{RANK}()",
        f"from megatron import mpu\nmpu.initialize.{RANK}()",
        f"from megatron import core\ncore.parallel_state.{RANK}()",
        f"import megatron.core.parallel_state\nmegatron.core.parallel_state.{RANK}()",
        f"import megatron.core.parallel_state as ps\nps.{RANK}()",
        f"import megatron.core as mc\nmc.mpu.{RANK}()",
        f"from megatron.core.parallel_state import {RANK}\n{RANK}()",
        f"from megatron.core.parallel_state import {RANK} as r\nr()",
        f"from megatron.core.parallel_state import *\n{RANK}()",
        f"from megatron.training.training import mpu\nmpu.{RANK}()",
        f"from megatron.core.tensor_parallel.layers import {RANK}\n{RANK}()",
        f"import importlib\nimportlib.import_module('megatron.core.parallel_state').{RANK}()",
        f"import sys\nsys.modules['megatron.core.parallel_state'].{RANK}()",
        f"import importlib; ps = importlib.import_module('megatron.core.mpu')\nps.{RANK}()",
        f"from megatron.core import mpu; a = b = mpu\nb.{RANK}()",
        f"from megatron.core import mpu; a, b = 1, mpu\nb.{RANK}()",
        f"from megatron.core import mpu\n(m := mpu).{RANK}()",
        f"from megatron.core import mpu; m = mpu if mpu else None\nm.{RANK}()",
    ],
)
def test_every_way_to_import(tmp_path: Path, source: str) -> None:
    assert said(tmp_path, {"a.py": source}) == [f"2 call {RANK}"]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (f"def f():\n    from megatron.core import mpu\n    return mpu.{RANK}()", 3),
        (
            "try:\n    from megatron.core import mpu\nexcept ImportError:\n    mpu = None\n"
            f"mpu.{RANK}()",
            5,
        ),
        (f"if 1:\n    from megatron.core import mpu\ndef f():\n    mpu.{RANK}()", 4),
        (
            "def g():\n    global mpu\n    from megatron.core import mpu\n"
            f"def f():\n    mpu.{RANK}()",
            5,
        ),
        (
            "def g():\n    mpu = None\n    def h():\n        nonlocal mpu\n"
            f"        from megatron.core import mpu\n    mpu.{RANK}()",
            6,
        ),
        (
            "from megatron.core import mpu\nclass A:\n    def __init__(self):\n"
            f"        self.m = mpu\n    def f(self):\n        return self.m.{RANK}()",
            6,
        ),
        (f"from megatron.core import mpu\nclass A:\n    m = mpu\n    x = m.{RANK}()", 4),
        (f"from megatron.core import mpu\nx = [mpu.{RANK}() for _ in 'ab']", 2),
        (f"from megatron.core import mpu\nx = [y for mpu in f(mpu.{RANK}())]", 2),
        (
            "from megatron.core import mpu\nclass A:\n    mpu = Fake()\n"
            f"    def f(self):\n        mpu.{RANK}()",
            5,
        ),
        (f"from megatron.core import mpu\ndef f(x=mpu.{RANK}()): pass", 2),
        (f"from megatron.core import mpu\nf = lambda: mpu.{RANK}()", 2),
        (
            f"from megatron.core import mpu\nclass A(B):\n    @d(mpu.{RANK}())\n"
            "    def f(self): pass",
            3,
        ),
    ],
)
def test_every_scope(tmp_path: Path, source: str, line: int) -> None:
    assert said(tmp_path, {"a.py": source}) == [f"{line} call {RANK}"]


@pytest.mark.parametrize(
    "files",
    [
        {"p/__init__.py": "from megatron.core import mpu",
         "p/b.py": f"from p import mpu\nmpu.{RANK}()"},
        {"p/__init__.py": "", "p/a.py": "from megatron.core import mpu as q",
         "p/b.py": f"from .a import q as z\nz.{RANK}()"},
        {"p/__init__.py": "from .a import *", "p/a.py": "from megatron.core import mpu",
         "b.py": f"import p\np.mpu.{RANK}()"},
        {"src/p/__init__.py": "", "src/p/a.py": "from megatron.core import mpu",
         "tests/b.py": f"from p import a\na.mpu.{RANK}()"},
        {"p/a.py": "from megatron.core import mpu",
         "p/q/b.py": f"from ..a import mpu\nmpu.{RANK}()"},
        {"p/a.py": "from megatron.core import mpu", "b.py": f"from p import a\na.mpu.{RANK}()"},
        {"a.py": "from megatron.core import mpu", "b.py": f"import a\na.mpu.{RANK}()"},
        # A circle.
        {"p/__init__.py": "", "p/a.py": "from .b import x\nfrom megatron.core import mpu",
         "p/b.py": f"from .a import mpu\nfrom .a import x\nmpu.{RANK}()"},
        # Half of a circle, seen first, must not be what is remembered.
        {"p/__init__.py": "", "p/a.py": "from .b import x",
         "p/b.py": "try:\n    from .a import x\nexcept ImportError:\n"
         "    from megatron.core import mpu as x",
         "first.py": "from p.b import x\nx  # mpu", "second.py": f"from p.a import x\nx.{RANK}()"},
    ],
)  # fmt: skip
def test_re_exports_are_followed(tmp_path: Path, files: dict[str, str]) -> None:
    found = said(tmp_path, files)
    assert [each.rpartition(":")[2].partition(" ")[2] for each in found] == [f"call {RANK}"]


def test_a_name_that_says_nothing_is_followed_into_files_that_say_nothing(tmp_path: Path) -> None:
    files = {
        "p/__init__.py": "",
        "p/a.py": f"from megatron.core.parallel_state import {RANK} as my_rank",
        "p/b.py": "from p.a import my_rank as mine",
        "p/c.py": "from p.b import mine\nmine()",
    }
    assert said(tmp_path, files) == [f"p/c.py:2 call {RANK}"]


# --- what is left alone ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        f"from vllm.distributed import parallel_state\nparallel_state.{RANK}()",
        f"from apex.transformer import parallel_state\nparallel_state.{RANK}()",
        f"from fairscale.nn.model_parallel.initialize import {RANK}\n{RANK}()",
        f"from deepspeed.utils import groups as mpu\nmpu.{RANK}()",
        f"import megatron.bridge.training.utils as mpu\nmpu.{RANK}()",
        f"def f(mpu):\n    return mpu.{RANK}()",
        f"from megatron.core import mpu\ndef f(mpu):\n    return mpu.{RANK}()",
        f"from megatron.core import mpu\nx = [mpu.{RANK}() for mpu in y]",
        f"from megatron.core import mpu\nfor i in mock:\n    i.mpu.{RANK}()",
        f"class A:\n    def {RANK}(self): pass\n    def f(self): self.{RANK}()",
        f"def {RANK}(): pass\n{RANK}()",
        f"self.engine.{RANK}()",
        "import torch.distributed as dist\ndist.is_initialized()",
        "from megatron.core import mpu\nif mpu is None: pass\nassert mpu\nmpu.__name__",
        "from megatron.core.transformer.moe.moe_utils import "
        "get_moe_layer_wise_logging_tracker\nget_moe_layer_wise_logging_tracker()",
        "from megatron.core.pipeline_parallel.utils import is_pp_first_stage as f\nf(pp)",
        f'"""patch("megatron.core.parallel_state.{RANK}")"""',
        f'patch("vllm.distributed.parallel_state.{RANK}")',
    ],
)
def test_false_friends_are_left_alone(tmp_path: Path, source: str) -> None:
    assert said(tmp_path, {"a.py": source}) == []


def test_a_file_called_like_the_package_is_not_it(tmp_path: Path) -> None:
    files = {
        "p/__init__.py": "",
        "p/megatron.py": f"from megatron.core import parallel_state\nparallel_state.{RANK}()",
        "p/b.py": f"import megatron.core\nmegatron.core.mpu.{RANK}()",
    }
    assert said(tmp_path, files) == [f"p/b.py:2 call {RANK}", f"p/megatron.py:2 call {RANK}"]


def test_own_wrappers_count_only_if_they_are_named(tmp_path: Path) -> None:
    files = {
        "own/__init__.py": "",
        "own/parallel.py": f"def {RANK}():\n    return 0",
        "use.py": f"from own import parallel\nparallel.{RANK}()",
    }
    assert said(tmp_path, files) == []
    files["own/b.py"] = f"from . import parallel\nparallel.{RANK}()"
    files["c.py"] = f"import own.parallel\nown.parallel.{RANK}()"
    assert said(tmp_path, files, wrappers=("own.parallel",)) == [
        f"c.py:2 call {RANK}",
        f"own/b.py:2 call {RANK}",
        f"use.py:2 call {RANK}",
    ]


def test_a_project_may_have_a_part_of_the_package(tmp_path: Path) -> None:
    files = {
        "megatron/__init__.py": "",
        "megatron/core/__init__.py": "",
        "a.py": f"from megatron.core import parallel_state\nparallel_state.{RANK}()",
    }
    assert said(tmp_path, files) == [f"a.py:2 call {RANK}"]


def test_the_module_itself_is_not_a_user_of_itself(tmp_path: Path) -> None:
    files = {
        "megatron/core/parallel_state.py": f"def {RANK}(): pass\n{RANK}()",
        "megatron/core/a.py": f"from . import parallel_state\nparallel_state.{RANK}()",
        "megatron/core/b.py": f"from .parallel_state import {RANK}\n{RANK}()",
    }
    assert said(tmp_path, files) == [
        f"megatron/core/a.py:2 call {RANK}",
        f"megatron/core/b.py:2 call {RANK}",
    ]


# --- other kinds of use ---------------------------------------------------------------------------

HEAD = "from megatron.core import mpu\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"x = mpu.{RANK}\nx()", [f"2 value {RANK}", f"3 call {RANK}"]),
        (f"f(mpu.{RANK})", [f"2 value {RANK}"]),
        ("mpu._TENSOR_MODEL_PARALLEL_GROUP", ["2 private _TENSOR_MODEL_PARALLEL_GROUP"]),
        (f"mpu.{RANK} = lambda: 3", [f"2 assigned {RANK}"]),
        ("mpu._DATA_PARALLEL_GROUP = None", ["2 assigned _DATA_PARALLEL_GROUP"]),
        (f"getattr(mpu, '{RANK}')()", [f"2 dynamic {RANK}"]),
        ("getattr(mpu, name)", ["2 dynamic"]),
        (f"hasattr(mpu, '{RANK}')", [f"2 dynamic {RANK}"]),
        (f"setattr(mpu, '{RANK}', f)", [f"2 patched {RANK}"]),
        (f"monkeypatch.setattr(mpu, '{RANK}', f)", [f"2 patched {RANK}"]),
        ("monkeypatch.setattr(mpu, name, f)", ["2 patched"]),
        (f"mock.patch.object(mpu, '{RANK}')", [f"2 patched {RANK}"]),
        (f"patch('megatron.core.parallel_state.{RANK}')", [f"2 string {RANK}"]),
        (f"monkeypatch.setattr('other.mod.mpu.{RANK}', f)", [f"2 string {RANK}"]),
        ("patch('megatron.core.parallel_state')", ["2 string"]),
        (f"@patch('megatron.core.mpu.{RANK}')\ndef f(): pass", [f"2 string {RANK}"]),
        ("deepspeed.zero.Init(mpu=mpu)", ["2 module"]),
        ("def f(x=mpu): pass", ["2 module"]),
        ("def f():\n    return mpu", ["3 module"]),
        ("other.mpu = mpu", []),
        ("d['mpu'] = mpu", ["2 module"]),
    ],
)
def test_other_uses(tmp_path: Path, source: str, expected: list[str]) -> None:
    assert said(tmp_path, {"a.py": HEAD + source}) == expected


def test_patches_through_a_consumer(tmp_path: Path) -> None:
    files = {
        "p/__init__.py": "",
        "p/a.py": f"from megatron.core.parallel_state import {RANK}\nfrom megatron.core import mpu",
        "t.py": f"import p.a\npatch('p.a.{RANK}')\npatch('p.a.mpu.{RANK}')\n"
        f"monkeypatch.setattr(p.a, '{RANK}', f)\npatch.object(p.a, 'mpu')",
    }
    assert said(tmp_path, files) == [
        f"t.py:2 string {RANK}",
        f"t.py:3 string {RANK}",
        f"t.py:4 patched {RANK}",
        "t.py:5 patched",
    ]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f"try:\n    from megatron.core import mpu\nexcept ImportError:\n    from apex import mpu\n"
         f"mpu.{RANK}()", "ambiguous"),
        (f"def f(mpu=None):\n    if mpu is None:\n        from megatron.core import mpu\n"
         f"    mpu.{RANK}()", "ambiguous"),
        (f"{HEAD}mpu.{RANK}(*a)", "arguments"),
        (f"{HEAD}mpu.no_such_thing()", "unknown-name"),
        (f"{HEAD}mpu.destroy_model_parallel()", "lifecycle"),
    ],
)  # fmt: skip
def test_reasons(tmp_path: Path, source: str, reason: str) -> None:
    (site,) = look(write(tmp_path, {"a.py": source})).sites
    assert site.reason == reason
    assert not site.replacement


# --- what is known about a site -------------------------------------------------------------------


def test_everything_a_rewriter_needs(tmp_path: Path) -> None:
    source = (
        "from megatron.core import mpu\n"
        "class Net(torch.nn.Module):\n"
        "    def f(self):\n"
        "        é = 'ü'; x = mpu.get_data_parallel_group(\n"
        "            with_context_parallel=flags['é'],  # why\n"
        "        )  # megapg: keep\n"
    )
    (site,) = look(write(tmp_path, {"a.py": source})).sites
    assert (site.span.line, site.span.column, site.span.end_line, site.span.end_column) == (
        *(4, 22),
        *(6, 10),
    )
    assert [(each.keyword, each.text) for each in site.arguments] == [
        ("with_context_parallel", "flags['é']")
    ]
    assert (site.function, site.class_name) == ("Net.f", "Net")
    assert site.replacement == "getters.data_group(pg, with_context_parallel=flags['é'])"
    assert site.keep


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(pg_collection=None):\n    {}", "collection pg_collection parameter True"),
        ("def f(*, pg_collection):\n    {}", "collection pg_collection parameter False"),
        ("def f():\n    pg_collection = g()\n    {}", "collection pg_collection local False"),
        ("def f():\n    {}\n    pg_collection = g()", None),
        # Experts are built of the same layers: what is called tp_group may be theirs.
        ("def f(tp_group):\n    {}", None),
        ("def f(tp_group, pg_collection):\n    {}", "collection pg_collection parameter False"),
        ("def f(dp_group):\n    {}", None),
        ("def f(model):\n    {}", "model model parameter False"),
        ("def f(model):\n    def g():\n        {}", "model model parameter False"),
        (
            "class A:\n    def __init__(self, g):\n        self.pg_collection = g\n"
            "    def f(self):\n        {}",
            "collection self.pg_collection attribute False",
        ),
        (
            "class B:\n    def __init__(self, g):\n        self.tp_group = g\n"
            "class A(B):\n    def f(self):\n        {}",
            None,
        ),
        (
            "from torch import nn\nclass B(nn.Module): pass\n"
            "class A(B):\n    def f(self):\n        {}",
            "model self attribute False",
        ),
        ("pg_collection = 1\ndef f():\n    {}", None),
        ("class A:\n    @staticmethod\n    def f(x):\n        {}", None),
    ],
)
def test_carriers_in_scope(tmp_path: Path, source: str, expected: str | None) -> None:
    text = HEAD + source.format(f"mpu.{RANK}()")
    (site,) = look(write(tmp_path, {"a.py": text})).sites
    best = site.carriers[0] if site.carriers else None
    found = best and f"{best.kind} {best.expression} {best.origin} {best.may_be_none}"
    assert found == expected


def test_in_f_strings(tmp_path: Path) -> None:
    source = HEAD + (
        f'x = f"{{mpu.{RANK}()}} of {{mpu.get_tensor_model_parallel_world_size()!r:>{{w}}}}"\n'
        f"y = (f'é {{mpu.{RANK}()}}' 'b'\n     f'''\n{{mpu.{RANK}()}}''')\n"
        'z = f"{mpu.get_data_parallel_rank(with_context_parallel=True)} {mpu.is_initialized( )}"\n'
    )
    sites = look(write(tmp_path, {"a.py": source})).sites
    assert len(sites) == 6
    assert all(site.exact and site.in_fstring for site in sites)
    assert [site.span.line for site in sites] == [2, 2, 3, 5, 6, 6]


def test_a_position_that_is_wrong_is_not_believed(tmp_path: Path) -> None:
    data = f'x = f"{{mpu.{RANK}()}}"\n'.encode()
    source = parse(tmp_path / "a.py", "a.py", data)
    assert isinstance(source, Source)
    (call,) = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    (string,) = (node for node in ast.walk(source.tree) if isinstance(node, ast.JoinedStr))
    parents = Parents(string, Parents(source.tree, None))
    begin, end, exact = locate(source, call, parents)
    assert exact
    assert source.text[begin:end] == f"mpu.{RANK}()"
    call.col_offset += 1
    begin, end, exact = locate(source, call, parents)
    assert not exact
    assert source.text[begin:end] == f'f"{{mpu.{RANK}()}}"'


# --- files as they come ---------------------------------------------------------------------------

USE = f"from megatron.core import mpu\nx = 'é'; mpu.{RANK}()\n"


@pytest.mark.parametrize(
    "data",
    [
        USE.replace("\n", "\r\n").encode(),
        USE.replace("\n", "\r").encode(),
        codecs.BOM_UTF8 + USE.encode(),
        ("# coding: latin-1\n" + USE).encode("latin-1"),
        ("#!/usr/bin/python\n# -*- coding: cp1252 -*-\n" + USE).encode("cp1252"),
        ("if 1:\n\tpass\n\x0c\n" + USE).encode(),
        ("x = '\u2028\x0b'\n" + USE).encode(),
        ("\n" * 20_000 + USE).encode(),
        ("x = " + "1 + " * 3000 + "1\n" + USE).encode(),
    ],
    ids=["windows", "mac", "bom", "latin-1", "cookie", "form feed", "separators", "long", "deep"],
)
def test_files_of_all_kinds(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.py").write_bytes(data)
    found = look(tmp_path)
    if not found.problems:  # how deep Python parses differs
        (site,) = found.sites
        assert data[site.span.start : site.span.stop].decode() == f"mpu.{RANK}()"
    else:
        assert "nested too deeply" in found.problems[0].message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (USE.encode() + b"print 'two'\n", "is no Python 3"),
        (USE.encode() + b"def f(:\n", "is no Python 3"),
        (USE.encode() + b"x = '\xff'\n", "is not utf-8: byte 0xff"),
        (b"# coding: no-such-codec\n" + USE.encode(), "is no Python 3"),
        (USE.encode() + b"x = '\x00'\n", "is no Python 3"),
        (USE.encode() + b"(" * 5000, "Python 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_and_passed_over(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "a.py").write_bytes(data)
    (tmp_path / "b.py").write_text(USE, encoding="utf-8")
    found = look(tmp_path)
    assert [problem.file for problem in found.problems] == ["a.py"]
    assert message in found.problems[0].message or "nested too deeply" in found.problems[0].message
    assert "\n" not in found.problems[0].message
    assert [site.file for site in found.sites] == ["b.py"]


def test_a_chain_of_names_too_long_to_follow(tmp_path: Path) -> None:
    chain = "\n".join(f"x{i} = x{i - 1}" for i in range(2000, 0, -1))
    write(tmp_path, {"a.py": f"{chain}\nfrom megatron.core import mpu as x0\nx20.{RANK}()\n"})
    found = look(tmp_path)
    assert not found.problems
    assert [site.name for site in found.sites] == [RANK]


def test_links_pipes_and_hidden_places(tmp_path: Path) -> None:
    write(tmp_path, {"p/a.py": USE, ".venv/b.py": USE, "p/__pycache__/c.py": USE})
    (tmp_path / "p" / "back").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "p" / "again.py").symlink_to(tmp_path / "p" / "a.py")
    (tmp_path / "p" / "nothing.py").symlink_to(tmp_path / "nowhere.py")
    os.mkfifo(tmp_path / "p" / "pipe.py")
    (tmp_path / "p" / "folder.py").mkdir()
    found = look(tmp_path)
    assert len(found.sites) == 1
    assert [(problem.file, problem.message) for problem in found.problems] == [
        ("p/nothing.py", "is a link to nothing"),
        ("p/pipe.py", "is no regular file"),
    ]


# --- real trees -----------------------------------------------------------------------------------


def called_by_name(file: Path) -> Counter[str]:
    """Every ``getter(`` that the tokenizer sees, definitions apart, whosever it is."""
    found: Counter[str] = Counter()
    if SIGNATURES.keys().isdisjoint(re.findall(r"\w+", file.read_text())):
        return found  # as most, and the tokenizer is slow
    with file.open("rb") as stream:
        tokens = list(tokenize.tokenize(stream.readline))
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.string in SIGNATURES and after.string == "(" and before.string != "def":
            found[token.string] += 1
    return found


# Others' functions of the same names: torch.distributed.is_initialized(), the stage tests of
# inference that take a group, the tracker that moved.
NAMESAKES = {
    *("is_initialized", "is_pipeline_first_stage", "is_pipeline_last_stage"),
    "get_moe_layer_wise_logging_tracker",
}


@pytest.mark.contract
@pytest.mark.parametrize(
    "core",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == OLD_CORE)) for each in core_folders()],
    ids=lambda core: str(core)[-40:],
)
def test_as_many_calls_as_a_scan_of_the_tokens_finds(core: Path) -> None:
    found = find_sites([core], Config(core, versions=(16,)))
    assert found.problems == ()
    for site in found.sites:
        agrees_with_its_file(core / site.file, site)
    ours = Counter((site.file, site.name) for site in found.sites if site.kind == Kind.CALL)
    scanned: Counter[tuple[str, str]] = Counter()
    for file in sorted(core.rglob("*.py")):
        name = file.relative_to(core).as_posix()
        if name == "parallel_state.py":
            continue
        scanned.update({(name, getter): n for getter, n in called_by_name(file).items()})
    differences = {key: n - ours[key] for key, n in scanned.items() if n != ours[key]}
    # Names that no version has, or private ones, which the scan does not look for.
    assert not {getter for _, getter in set(ours) - set(scanned)} & set(SIGNATURES)
    assert min(differences.values()) > 0
    unexplained = {
        (file, getter): n
        for (file, getter), n in differences.items()
        if getter not in NAMESAKES
        and not (getter == "get_global_memory_buffer" and "/megatron_fsdp/" in file)  # its own
    }
    assert unexplained == {}
    assert sum(n for (_, getter), n in ours.items() if getter not in NAMESAKES) > 150


# --- fuzz -----------------------------------------------------------------------------------------

_GETTERS = st.sampled_from([RANK, "get_data_parallel_group", "is_pipeline_last_stage"])
_BASES = st.sampled_from(["mpu", "ps", "self.m", "megatron.core.mpu", "other"])
_CALLS = st.builds(
    lambda base, getter, call: f"{base}.{getter}{call}",
    _BASES,
    _GETTERS,
    st.sampled_from(["()", "( )", "(x, y=2)", "(*a)", "(\n  1)", "", "(é='ü')"]),
)
_EXPRESSIONS = st.recursive(
    _CALLS | st.sampled_from(["1", "mpu", "'ü'", "x", "None"]),
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("[{} for q in {}]".format, inner, inner),
        st.builds("(lambda mpu: {})".format, inner),
        st.builds("f({}, k={})".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds(lambda e: f"f'''é {{({e})}} {{{{ }}}} {{x!r:>{{w}}}}'''", _CALLS),
        st.builds("(w := {})".format, inner),
        st.builds("{{{}: {}}}".format, inner, inner),
    ),
    max_leaves=6,
)
_STATEMENTS = st.recursive(
    st.one_of(
        st.builds("x = {}".format, _EXPRESSIONS),
        st.builds("mpu = {}".format, _EXPRESSIONS),
        st.builds("self.m = {}".format, _EXPRESSIONS),
        st.builds("del x; {}".format, _EXPRESSIONS),
        st.sampled_from(
            [
                "from megatron.core import mpu",
                "import megatron.core.mpu as ps",
                "from megatron.core.parallel_state import *",
                "import megatron.core",
                "from .a import mpu",
                "from . import *",
                "global ps",
                "patch('megatron.core.mpu.is_initialized')",
            ]
        ),
    ),
    lambda inner: st.builds(
        lambda head, body: head + "\n" + "\n".join(f"    {line}" for line in body.split("\n")),
        st.sampled_from(
            [
                "def f(self, pg_collection=None):",
                "class A(B):",
                "if x:",
                "for mpu in y:",
                "try:\n    pass\nexcept E as ps:",
                "with x as mpu:",
                "async def g(mpu=mpu):",
                "match x:\n  case [mpu, *ps]:",
            ]
        ),
        st.lists(inner, min_size=1, max_size=4).map("\n".join),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    statements=st.lists(_STATEMENTS, max_size=5),
    head=st.sampled_from([HEAD, ""]),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_generated_modules(tmp_path: Path, statements: list[str], head: str, newline: str) -> None:
    source = newline.join((head + "\n".join(statements)).split("\n"))
    (tmp_path / "a.py").write_bytes(source.encode())
    found = look(tmp_path)  # compares every span with its bytes, and with what it parses to
    try:
        compile(source, "a.py", "exec", ast.PyCF_ONLY_AST)
    except SyntaxError:
        assert not found.sites
        return
    assert not found.problems
    assert all(site.exact for site in found.sites)
    assert len({(site.span.start, site.kind, site.name) for site in found.sites}) == len(
        found.sites
    )
