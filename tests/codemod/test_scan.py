"""Test which uses are found, and in which files."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrate_cases import VERSIONS, with_names
from trees import write

from megapg.migrate.config import Config
from megapg.migrate.engine import check, migrate
from megapg.migrate.migration import Found
from megapg.migrate.project import Project
from megapg.migrate.uses import Kind
from megapg.upstream.mapping import Refusal


def found(root: Path, files: dict[str, str], *wrappers: str) -> Found:
    write(root, {name: with_names(text) for name, text in files.items()})
    return check([root], Config(root, wrappers=wrappers, versions=VERSIONS)).found


KINDS = """\
from megatron.core import mpu

mpu.TP_RANK()
x = mpu.TP_RANK
mpu._TENSOR_MODEL_PARALLEL_GROUP
f(mpu)
mpu.TP_RANK = 3
del mpu.TP_SIZE
patch("megatron.core.parallel_state.TP_RANK")
y = "parallel_state.TP_RANK", b"megatron.core.mpu.TP_RANK"
mpu.TP_RANK.__name__
"""


def test_kinds(tmp_path: Path) -> None:
    uses = found(tmp_path, {"a.py": KINDS}).uses
    assert [(each.span.line, each.kind, bool(each.name)) for each in uses] == [
        (3, Kind.CALL, True),
        (4, Kind.VALUE, True),
        (5, Kind.PRIVATE, True),
        (6, Kind.MODULE, False),
        (7, Kind.ASSIGNED, True),
        (8, Kind.ASSIGNED, True),
        (9, Kind.STRING, True),
        (11, Kind.VALUE, True),
    ]


INSIDE_CORE = """\
from megatron.core import utils
from megatron.core.inference.communication_utils import is_pipeline_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection as PG
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate as own
from megatron.core.utils import get_tensor_model_parallel_group_if_none as tp


def f(group, p, pg_collection=None):
    if pg_collection is None:
        PG.use_mpu_process_groups()
    PG.use_mpu_process_groups(["tp"])
    utils.get_tensor_model_parallel_group_if_none(None)
    tp(tp_group=None, is_expert=True)
    tp(group)
    own(p)
    own(p, group)
    own(p, None)
    own(p, tp_group=group)
    own(*p)
    is_pipeline_last_stage(None)
    is_pipeline_last_stage(group)
    is_pipeline_last_stage(pp_group=None)
"""


def test_functions_of_the_core_that_answer_with_the_globals(tmp_path: Path) -> None:
    uses = found(tmp_path, {"a.py": INSIDE_CORE}).uses
    assert [each.span.line for each in uses] == [10, 11, 12, 13, 15, 17, 20, 22]
    assert {each.kind for each in uses} == {Kind.CALL}
    answers = [each.answer for each in uses if isinstance(each.answer, Refusal)]
    assert {each.reason for each in answers} == {"inside-core"}
    assert answers[1].detail == "write pg"
    assert answers[2].detail == "write pg.tp, or pg.expt_tp for is_expert=True"
    assert answers[-1].detail == "write pg.pp as its argument"
    migration = migrate([tmp_path], Config(tmp_path, versions=VERSIONS))
    assert not migration.files
    assert [each.reason for each in migration.left] == ["fallback", *["inside-core"] * 7]


def test_places(tmp_path: Path) -> None:
    text = with_names(
        "from megatron.core import mpu\n\n\nclass A:\n    def f(self):\n        def g():\n"
        "            é = 'ß', mpu.TP_RANK(\n            )\n        return lambda: mpu.TP_SIZE()\n"
    )
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(text)
    uses = check([tmp_path], Config(tmp_path, versions=VERSIONS)).found.uses
    assert [each.function for each in uses] == ["A.f.g", "A.f"]
    assert [each.place for each in uses] == ["pkg/a.py:7:22", "pkg/a.py:9:24"]
    lines = text.split("\n")
    for each in uses:
        span = each.span
        inside = "\n".join(lines[span.line - 1 : span.end_line])
        last = len(lines[span.end_line - 1]) - span.end_column + 1
        assert inside[span.column - 1 : len(inside) - last].split() == each.text.split()


# text -> the number of uses that are found in its last line
MEANINGS = {
    "import megatron.core.parallel_state\nmegatron.core.parallel_state.TP_RANK()": 1,
    "import megatron.core\nmegatron.core.mpu.TP_RANK()": 1,
    "import megatron.core as core\ncore.parallel_state.TP_RANK()": 1,
    "from megatron import core\ncore.mpu.TP_RANK()": 1,
    "if x:\n    from megatron.core import mpu\nmpu.TP_RANK()": 1,
    "try:\n    from megatron.core import mpu\nexcept ImportError: mpu = None\nmpu.TP_RANK()": 1,
    "from megatron.core.mpu import TP_RANK as f\nf()": 1,
    "from megatron.core import mpu\nprint(f'{mpu.TP_RANK()}', [mpu.TP_SIZE() for _ in x])": 2,
    "from megatron.core import mpu\nmatch x:\n    case mpu.TP_RANK: pass": 1,
    "from megatron.core import mpu\nx.mpu.TP_RANK()": 0,
    "from other.core import mpu\nmpu.TP_RANK()": 0,
    "import mpu\nmpu.TP_RANK()": 0,
    "mpu.TP_RANK()": 0,
    "TP_RANK()": 0,
    "from megatron.core import mpu\n(lambda mpu: mpu.TP_RANK())(x)": 0,
    "from megatron.core import mpu\n[mpu.TP_RANK() for mpu in x]": 0,
    "from megatron.core import mpu\n# mpu.TP_RANK()": 0,
    "from megatron.core import mpu as m\nmpu.TP_RANK()": 0,
}


@pytest.mark.parametrize("text", MEANINGS)
def test_what_a_name_stands_for(text: str, tmp_path: Path) -> None:
    uses = found(tmp_path, {"a.py": text + "\n"}).uses
    last = text.count("\n") + 1
    assert len([each for each in uses if each.span.line == last]) == MEANINGS[text]


def test_two_meanings_are_ambiguous(tmp_path: Path) -> None:
    others = (
        "from fake import mpu",
        "mpu = Fake()",
        "class mpu: pass",
        "for mpu in x: pass",
        "def f():\n    global mpu\n    mpu = 3",
    )
    for number, other in enumerate(others):
        text = f"from megatron.core import mpu\nif x: pass\n{other}\nY = mpu.TP_RANK()\n"
        uses = found(tmp_path / str(number), {"a.py": text}).uses
        answers = [each.answer for each in uses if each.kind is Kind.CALL]
        assert [getattr(answer, "reason", "") for answer in answers] in ([], ["assigned"]), other


def test_kept_uses_are_found(tmp_path: Path) -> None:
    text = "from megatron.core import mpu\nx = mpu.TP_RANK()  #megapg:keep\ny = mpu.TP_RANK()\n"
    uses = found(tmp_path, {"a.py": text}).uses
    assert [each.keep for each in uses] == [True, False]


def names(uses: Found) -> list[str]:
    return sorted({each.file for each in uses.uses})


def test_folders_that_are_skipped(tmp_path: Path) -> None:
    text = "from megatron.core import mpu\nmpu.TP_RANK()\n"
    files = ["a.py", "pkg/b.py", "stub.pyi", "build/c.py", ".hidden/d.py", "venv/e.py"]
    files += ["pkg/__pycache__/f.py", "env2/pyvenv.cfg", "env2/g.py", "build2/h.py", "script"]
    files += [
        "pkg/build/__init__.py",
        "pkg/build/i.py",
        "notes.ipynb",
        "megatron/core/parallel_state.py",
    ]
    uses = found(tmp_path, dict.fromkeys(files, text))
    assert names(uses) == ["a.py", "build2/h.py", "pkg/b.py", *_BUILD, "stub.pyi"]
    assert uses.notebooks == 1
    config = Config(tmp_path, exclude=("pkg/*", "*.pyi"), versions=VERSIONS)
    assert names(check([tmp_path], config).found) == ["a.py", "build2/h.py"]
    one = check([tmp_path / "script", tmp_path / "notes.ipynb"], config).found
    assert names(one) == ["script"]
    assert [each.message for each in one.problems] == ["is a notebook, and notebooks are not read"]


_BUILD = ("pkg/build/__init__.py", "pkg/build/i.py")


def test_links_are_followed_once(tmp_path: Path) -> None:
    text = "from megatron.core import mpu\nmpu.get_tensor_model_parallel_rank()\n"
    write(tmp_path, {"pkg/a.py": text})
    (tmp_path / "pkg" / "loop").symlink_to(tmp_path)
    (tmp_path / "pkg" / "again.py").symlink_to("a.py")
    (tmp_path / "pkg" / "nowhere.py").symlink_to("gone.py")
    uses = check([tmp_path], Config(tmp_path, versions=VERSIONS)).found
    assert len(uses.uses) == 1
    assert [each.file for each in uses.problems] == ["pkg/nowhere.py"]


def test_modules_and_relative_names(tmp_path: Path) -> None:
    files = ("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/a.py", "megatron/core/b.py", "c.py")
    write(tmp_path, dict.fromkeys((*files, "megatron/core/__init__.py"), ""))
    project = Project([tmp_path], Config(tmp_path))
    modules = [project.module(tmp_path / name) for name in files]
    assert modules == ["pkg", "pkg.sub", "pkg.sub.a", "megatron.core.b", "c"]
    assert project.absolute("..x", tmp_path / "pkg/sub/a.py") == "pkg.x"
    assert project.absolute(".x", tmp_path / "pkg/sub/__init__.py") == "pkg.sub.x"
    assert project.absolute(".", tmp_path / "pkg/sub/a.py") == "pkg.sub"
    for dotted, name in {"pkg.sub.a": files[2], "pkg": files[0], "c": "c.py"}.items():
        assert project.find(dotted, tmp_path / "c.py") == tmp_path / name
    assert project.find("sub.a", tmp_path / "c.py") is None
