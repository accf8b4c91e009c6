"""What rewritten code imports: megapg, or a module that its own package gets in place of it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recording import initialised_megatron, recorded_megatron
from trees import contents, write
from typer.testing import CliRunner

from megapg.cli.migrate import app
from megapg.errors import UnsupportedOptionError
from megapg.megatron.vendored import more_getters, process_groups
from megapg.megatron.vendored.process_groups import MissingGroupError, groups_of, resolve
from megapg.migrate.config import load_config
from megapg.migrate.edit.vendored import read, text_of
from megapg.testing import megatron_on_cpu, run_distributed

SUPPORT = Path(__file__).parents[1] / "support"
NAME = "process_groups.py"
WORK = """\
import torch
import torch.distributed as dist
from megatron.core import mpu


def total(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return tensor.item() / mpu.get_data_parallel_world_size()


def step():
    return total(mpu.get_tensor_model_parallel_rank() + 1) * 2


def place(flag=True):
    return [
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_tensor_model_parallel_src_rank(),
        mpu.get_data_parallel_rank(with_context_parallel=flag),
        mpu.get_pipeline_model_parallel_next_rank(),
        mpu.is_pipeline_first_stage(),
        mpu.is_pipeline_last_stage(ignore_virtual=True),
        mpu.is_rank_in_embedding_group(),
        list(dist.get_process_group_ranks(mpu.get_context_parallel_group())),
    ]


def gathered():
    found = [None] * mpu.get_tensor_model_parallel_world_size()
    dist.all_gather_object(found, dist.get_rank(), group=mpu.get_tensor_model_parallel_group())
    return found


def norm(model):
    value = torch.ones(1)
    dist.all_reduce(value, group=mpu.get_model_parallel_group())
    return value.item() + mpu.get_tensor_model_parallel_rank()
"""
TREE = {
    "trainer/__init__.py": "",
    "trainer/work.py": WORK,
    "trainer/deep/__init__.py": "",
    "trainer/deep/main.py": (
        "from megatron.core import mpu\n\nfrom trainer.work import total\n\n\n"
        "def main():\n    return total(mpu.get_tensor_model_parallel_rank())\n"
    ),
    "pyproject.toml": '[tool.megapg]\nfrom-core = "0.16-0.17"\nruntime = "vendored"\n',
}
READS = "from megatron.core import mpu\n\n\ndef f():\n    return mpu.get_data_parallel_rank()\n"


def ended(code: int, *arguments: object) -> str:
    """What a command said that ended so."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def migrated(root: Path, files: dict[str, str], *arguments: str) -> dict[str, str]:
    """The files afterwards."""
    write(root, files)
    ended(0, "migrate", root, "--write", *arguments)
    return {name: data.decode() for name, data in contents(root).items()}


# -- on real ranks ---------------------------------------------------------------------------------


@pytest.mark.contract
def test_the_same_on_real_ranks_with_and_without_megapg(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("before", "megapg", "vendored")]
    for folder in folders:
        write(folder, TREE)
    for folder in folders[1:]:
        ended(0, "migrate", folder, "--write", "--runtime", folder.name)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SUPPORT / "runtime_ranks.py", *folders],
        env={**os.environ, "MEGAPG_GLOBALS": "silent", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    before, ours, vendored = (
        [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
        for folder in folders
    )
    assert [rank.pop("uses megapg") for rank in (*before, *ours, *vendored)] == [
        *[False] * 4,
        *[True] * 4,
        *[False] * 4,
    ]
    assert len({json.dumps(rank) for rank in before}) == 4
    assert {rank["before"] for rank in before} == {"no such group"}
    assert ours == before
    assert vendored == before


# -- what is written -------------------------------------------------------------------------------


def test_no_import_of_megapg_is_left(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)
    assert after["trainer/deep/main.py"].startswith("from trainer import process_groups\n")
    assert "from trainer import process_groups\n" in after["trainer/work.py"]
    module = after[f"trainer/{NAME}"]
    assert not any("import megapg" in text or "from megapg" in text for text in after.values())
    there = read(module)
    assert there is not None
    assert not there.edited
    assert {"tensor_src_rank", "is_pipeline_last_stage", "groups_of"} <= there.names
    assert "model_src_rank" not in there.names
    for name, text in after.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


@pytest.mark.parametrize("module", ["process_groups", "pg"])
def test_no_variable_is_called_like_the_module(tmp_path: Path, module: str) -> None:
    reads = "from megatron.core import mpu\ndef train(model, groups, {}):\n    {}\n".format(
        "pg" if module == "process_groups" else "process_groups",
        "return mpu.get_tensor_model_parallel_rank() + mpu.get_data_parallel_rank()",
    )
    write(tmp_path, {"trainer/__init__.py": "", "trainer/train.py": reads})
    ended(0, "migrate", tmp_path, "--write", "--runtime", f"vendored:{module}")
    after = (tmp_path / "trainer/train.py").read_text()
    assert f"    pg_ = {module}.groups_of(model" in after


def test_a_second_run_writes_the_same(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)
    assert "0 uses: 0 can be rewritten in 0 files" in ended(0, "migrate", tmp_path)
    assert migrated(tmp_path, {}) == after
    assert ended(0, "check", tmp_path).startswith("5 files, 0 uses left; 1 kept.")


def test_a_later_run_adds_what_it_needs(tmp_path: Path) -> None:
    first = read(migrated(tmp_path, TREE)[f"trainer/{NAME}"])
    more = READS.replace("get_data_parallel_rank()", "get_model_parallel_src_rank()")
    after = migrated(tmp_path, {"trainer/more.py": more})[f"trainer/{NAME}"]
    then = read(after)
    assert first is not None
    assert then is not None
    assert then.names - first.names == {"model_src_rank"}
    assert not then.edited
    assert "put back" in ended(0, "migrate", tmp_path, "--undo")
    assert "model_src_rank" not in (tmp_path / "trainer" / NAME).read_text()


def test_the_diff_makes_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", TREE)
    after = migrated(tmp_path / "b", TREE)
    done = subprocess.run(
        [sys.executable, "-m", "megapg", "migrate", tmp_path / "a"], capture_output=True, text=True
    )
    assert f"--- /dev/null\n+++ b/trainer/{NAME}\n@@ -0,0 +1," in done.stdout
    assert f"trainer/{NAME} to be written" in done.stderr
    for command in (["git", "apply", "-"], ["patch", "-p1", "-R"], ["patch", "-p1"]):
        subprocess.run(command, input=done.stdout, cwd=tmp_path / "a", text=True, check=True)
    assert {name: data.decode() for name, data in contents(tmp_path / "a").items()} == after


def test_programs_hear_of_the_new_file(tmp_path: Path) -> None:
    write(tmp_path, TREE)
    said = json.loads(ended(1, "migrate", tmp_path, "--json"))
    changes = {each["file"]: each for each in said["changes"]}
    assert changes[f"trainer/{NAME}"]["new"] is True
    (edit,) = changes[f"trainer/{NAME}"]["edits"]
    assert (edit["line"], edit["column"], edit["end_line"], edit["end_column"]) == (1, 1, 1, 1)
    assert changes["trainer/work.py"]["new"] is False
    log = json.loads(ended(1, "migrate", tmp_path, "--sarif", "-"))
    fixes = [fix for each in log["runs"][0]["results"] for fix in each.get("fixes", ())]
    changed = [
        {change["artifactLocation"]["uri"] for change in fix["artifactChanges"]} for fix in fixes
    ]
    assert changed == [{"trainer/deep/main.py", "trainer/work.py", f"trainer/{NAME}"}]


def test_undo_takes_the_new_file_away(tmp_path: Path) -> None:
    before = contents(write(tmp_path, TREE))
    migrated(tmp_path, {})
    assert "3 files put back" in ended(0, "migrate", tmp_path, "--undo")
    assert contents(tmp_path) == before


def test_undo_leaves_it_while_a_file_may_import_it(tmp_path: Path) -> None:
    migrated(tmp_path, TREE)
    work = tmp_path / "trainer" / "work.py"
    work.write_text(work.read_text() + "# mine\n")
    assert "is left, for not all files are as they were" in ended(2, "migrate", tmp_path, "--undo")
    assert (tmp_path / "trainer" / NAME).exists()
    assert (tmp_path / "trainer/deep/main.py").read_text() == TREE["trainer/deep/main.py"]


def test_nothing_is_written_where_one_file_could_not_be(tmp_path: Path) -> None:
    before = contents(write(tmp_path, TREE))
    (tmp_path / "trainer/work.py").chmod(0o444)
    ended(2, "migrate", tmp_path, "--write")
    assert contents(tmp_path) == before


def test_it_may_be_read_as_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, TREE)
    (tmp_path / "trainer").chmod(0o755)
    ended(0, "migrate", tmp_path, "--write")
    assert (tmp_path / "trainer" / NAME).stat().st_mode & 0o777 == 0o644


# -- where it goes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"a/__init__.py": "", "a/b/__init__.py": "", "a/b/c.py": READS, "a/d.py": READS},
            {
                "a/process_groups.py": "",
                "a/b/c.py": "from .. import process_groups",
                "a/d.py": "from . import process_groups",
            },
            id="a package without absolute imports",
        ),
        pytest.param(
            {"a/__init__.py": "", "a/b.py": READS, "a/c.py": "from a.b import f\n"},
            {"a/process_groups.py": "", "a/b.py": "from a import process_groups"},
            id="one with",
        ),
        pytest.param(
            {"src/a/__init__.py": READS, "src/a/b.py": "import a.c\n", "src/a/c.py": ""},
            {"src/a/process_groups.py": "", "src/a/__init__.py": "from a import process_groups"},
            id="below src",
        ),
        pytest.param(
            {"a/b.py": READS, "a/c.py": "from a.b import f\n"},
            {"a/process_groups.py": "", "a/b.py": "from a import process_groups"},
            id="a namespace",
        ),
        pytest.param(
            {"a/b.py": READS, "a/c/d.py": "import a.c.e\n", "a/c/e.py": ""},
            {"a/process_groups.py": "", "a/b.py": "import process_groups"},
            id="a script in what is a namespace to others",
        ),
        pytest.param(
            {"a/b/__init__.py": "", "a/b/c.py": READS, "a/b/d.py": "import a.b.c\n"},
            {"a/b/process_groups.py": "", "a/b/c.py": "from a.b import process_groups"},
            id="a package in a namespace",
        ),
        pytest.param(
            {"__init__.py": "", "a/__init__.py": "", "a/b.py": READS, "a/c.py": "import a.b\n"},
            {"a/process_groups.py": "", "a/b.py": "from a import process_groups"},
            id="the root is a package by mistake",
        ),
        pytest.param(
            {"__init__.py": "", "a/__init__.py": "", "a/b.py": READS},
            {"a/process_groups.py": "", "a/b.py": "from . import process_groups"},
            id="the root is a package, and nothing tells",
        ),
        pytest.param(
            {
                "a/__init__.py": "",
                "a/b.py": READS,
                "a/c.py": "import a.b\n",
                "tools/__init__.py": "",
                "tools/run.py": READS.replace("\n\n\n", "\nimport a.b\n\n\n", 1),
                "tools/other.py": "import tools.run\n",
            },
            {
                "a/process_groups.py": "",
                "a/b.py": "from a import process_groups",
                "tools/run.py": "from a import process_groups",
            },
            id="a script in a package beside it",
        ),
        pytest.param(
            {"run.py": READS},
            {"process_groups.py": "", "run.py": "import process_groups"},
            id="a script",
        ),
        pytest.param(
            {
                "a/__init__.py": "",
                "a/b.py": READS,
                "a/c.py": "from a.b import f\n",
                "run.py": READS.replace("\n\n\n", "\nfrom a.b import f as g\n\n\n", 1),
            },
            {
                "a/process_groups.py": "",
                "a/b.py": "from a import process_groups",
                "run.py": "from a import process_groups",
            },
            id="a script of a package",
        ),
        pytest.param(
            {"a/__init__.py": "", "a/x.py": READS, "b/__init__.py": "", "b/x.py": READS},
            {
                "a/process_groups.py": "",
                "a/x.py": "from . import process_groups",
                "b/process_groups.py": "",
                "b/x.py": "from . import process_groups",
            },
            id="two packages",
        ),
        pytest.param(
            {
                "a/__init__.py": "",
                "a/b.py": READS.replace("def f", "process_groups = 1\n\n\ndef f"),
            },
            {
                "a/process_groups.py": "",
                "a/b.py": "from . import process_groups as _process_groups",
            },
            id="its name is taken in the file",
        ),
    ],
)
def test_each_top_package_gets_one(
    tmp_path: Path, files: dict[str, str], expected: dict[str, str]
) -> None:
    settings = {"pyproject.toml": TREE["pyproject.toml"]}
    after = migrated(tmp_path, {**settings, **files})
    changed = {name for name, text in after.items() if {**settings, **files}.get(name) != text}
    assert changed == set(expected)
    for name, statement in expected.items():
        assert statement in after[name].split("\n") or not statement
    assert migrated(tmp_path, {}) == after


def test_an_import_that_is_there_serves(tmp_path: Path) -> None:
    files = {"a/__init__.py": "", "a/b.py": READS, "pyproject.toml": TREE["pyproject.toml"]}
    text = migrated(tmp_path, files)["a/b.py"]
    more = f"\n\ndef g():\n    {READS.splitlines()[0]}\n\n    return mpu.get_data_parallel_rank()\n"
    after = migrated(tmp_path, {"a/b.py": text + more})["a/b.py"]
    assert after.count("import process_groups") == 1
    assert "mpu" not in after


# -- what is there already -------------------------------------------------------------------------


def test_an_edited_one_is_left_and_told(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)[f"trainer/{NAME}"]
    edited = after.replace("def size(", "def length(")
    write(tmp_path, {f"trainer/{NAME}": edited, "trainer/more.py": READS})
    said = ended(0, "migrate", tmp_path, "--write")
    assert f"trainer/{NAME}: was edited since megapg wrote it, and is left as it is" in said
    assert (tmp_path / "trainer" / NAME).read_text() == edited
    assert "process_groups.resolve" in (tmp_path / "trainer/more.py").read_text()


def test_an_edited_one_that_lacks_something_is_an_error(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)[f"trainer/{NAME}"]
    more = READS.replace("get_data_parallel_rank()", "get_model_parallel_src_rank()")
    write(tmp_path, {f"trainer/{NAME}": f"{after}MINE = 1\n", "trainer/more.py": more})
    said = " ".join(ended(2, "migrate", tmp_path, "--write").split())
    assert "was edited, and lacks model_src_rank, which the rewritten files need" in said
    assert (tmp_path / "trainer/more.py").read_text() == more


def test_a_formatter_edits_nothing(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)[f"trainer/{NAME}"]
    formatted = after.replace('"', "'").replace("    ", "  ").replace("'''", '"""')
    formatted = formatted.replace("(self, field: str)", "(\n    self,\n    field: str,\n  )")
    write(tmp_path, {f"trainer/{NAME}": formatted})
    assert migrated(tmp_path, {})[f"trainer/{NAME}"] == formatted


@pytest.mark.parametrize("there", [f"trainer/{NAME}", "trainer/process_groups/__init__.py"])
def test_anothers_file_is_an_error_that_says_what_to_set(tmp_path: Path, there: str) -> None:
    before = contents(write(tmp_path, {**TREE, there: "# mine\n"}))
    said = " ".join(ended(2, "migrate", tmp_path, "--write").split())
    assert "is there already, and is not megapg's" in said
    assert 'runtime = "vendored:my_process_groups"' in said
    assert contents(tmp_path) == before
    after = migrated(tmp_path, {}, "--runtime", "vendored:my_process_groups")
    assert after[there] == "# mine\n"
    assert "from trainer import my_process_groups" in after["trainer/work.py"]
    assert "my_process_groups.resolve(" in after["trainer/work.py"]
    assert read(after["trainer/my_process_groups.py"]) is not None
    assert migrated(tmp_path, {}, "--runtime", "vendored:my_process_groups") == after


# -- the setting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "option", "expected"),
    [
        ("", None, ""),
        ("megapg", None, ""),
        ("vendored", None, "process_groups"),
        ("vendored:groups", None, "groups"),
        ("vendored", "megapg", ""),
        ("megapg", "vendored", "process_groups"),
    ],
)
def test_the_setting(tmp_path: Path, said: str, option: str | None, expected: str) -> None:
    text = f'[tool.megapg]\nruntime = "{said}"\n' if said else ""
    write(tmp_path, {"pyproject.toml": text})
    assert load_config(tmp_path, runtime=option).vendored == expected


@pytest.mark.parametrize("said", ['"none"', "3", '"vendored:a.b"', '"vendored:"'])
def test_another_setting_is_an_error(tmp_path: Path, said: str) -> None:
    write(tmp_path, {"pyproject.toml": f"[tool.megapg]\nruntime = {said}\n"})
    with pytest.raises(UnsupportedOptionError, match=r"no runtime .*: say megapg"):
        load_config(tmp_path)


# -- the module ------------------------------------------------------------------------------------

EVERYTHING = [name for name in vars(more_getters) if not name.startswith("_")]


@pytest.mark.parametrize("names", [[], EVERYTHING], ids=["least", "most"])
def test_it_is_typed_and_formatted(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / NAME).write_text(text_of([*names, "groups_of"] if names else names))
    settings = Path(__file__).parents[2] / "pyproject.toml"
    for command in (
        ["mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache"],
        ["ruff", "check", "--config", settings],
        ["ruff", "format", "--check", "--config", settings],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command, tmp_path / NAME], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_imports_neither_torch_nor_megatron(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text_of([*EVERYTHING, "groups_of"]))
    code = (
        "import process_groups as p, sys; print(sorted({n.partition('.')[0] for n in sys.modules}"
        " & {'torch', 'megatron', 'megapg'}), p.is_initialized(None), p.resolve().passed)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[] False None\n"


class Core:
    """Groups as Megatron-core's own collection has them."""

    def __init__(self, **groups: object) -> None:
        vars(self).update(groups)


Core.__name__ = Core.__qualname__ = "ProcessGroupCollection"


class Group:
    """Of two ranks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def test_what_is_passed_is_asked_and_nothing_else() -> None:
    group = Group()
    pg = resolve(Core(tp=group, embd=None))
    assert resolve(pg) is pg
    assert (pg.tp, pg.size("tp"), pg.rank("tp"), pg.embd) == (group, 2, 1, None)
    for read_it in (lambda: pg.dp, lambda: pg.size("dp"), lambda: pg.pos_embd):
        with pytest.raises(MissingGroupError, match="the ProcessGroupCollection passed as pg_coll"):
            read_it()
    assert not hasattr(pg, "pos_embd")
    with pytest.raises(MissingGroupError, match="has no group embd"):
        pg.size("embd")
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        pg.tensor  # noqa: B018


@pytest.mark.contract
def test_where_nothing_is_initialised_the_error_is_an_assertion_as_megatrons() -> None:
    with recorded_megatron(0, 2):
        pg = resolve(None)
        for read_it in (lambda: pg.tp, lambda: pg.size("tp"), lambda: pg.ranks("mp")):
            with pytest.raises(AssertionError):
                read_it()
        assert getattr(pg, "tp", None) is None
        assert not more_getters.is_initialized(None)


class Wrapper:
    def __init__(self, module: object) -> None:
        self.module = module


class Failing:
    """What a property would do is not to be found out."""

    @property
    def model(self) -> object:
        raise RuntimeError("loads from disk")


def test_a_model_is_searched_from_the_outside_in() -> None:
    tp, dp = Group(), Group()
    inner, outer = torch.nn.Linear(1, 1), torch.nn.Sequential()
    vars(inner)["pg_collection"] = Core(tp=tp, dp=dp)
    outer.append(inner)
    vars(outer)["pg_collection"] = Core(tp=tp)
    wrapped: Any = [Wrapper(Wrapper(outer))]
    assert groups_of(wrapped, "tp").passed is vars(outer)["pg_collection"]
    assert groups_of(wrapped, "dp").passed is vars(inner)["pg_collection"]
    assert groups_of(wrapped, "ep").passed is None
    assert groups_of(Core(tp=tp), "dp").passed is not None
    for nothing in (None, Failing(), 3, resolve(None)):
        assert groups_of(nothing, "tp").passed is None
    both, other = torch.nn.ModuleList([outer, torch.nn.Linear(1, 1)]), Group()
    vars(both[1])["pg_collection"] = Core(tp=other, dp=dp)
    for needs in (("tp",), ()):  # they have different ones
        assert groups_of(both, *needs).passed is None
    assert groups_of(both, "dp").passed is vars(inner)["pg_collection"]
    assert groups_of([*both], "tp").passed is vars(outer)["pg_collection"]  # two chunks
    holding = Wrapper(outer)
    vars(holding)["pg_collection"] = resolve(None)  # kept before there was a model
    assert groups_of(holding, "tp").passed is vars(outer)["pg_collection"]


def test_a_part_of_another_layout_is_not_completed_by_the_globals() -> None:
    holder = SimpleNamespace()
    with initialised_megatron(3, 8, 2):
        tp = dist.new_group([0, 1, 2, 3])
        holder.pg_collection = Core(tp=tp)
        view = groups_of(holder, "tp", "dp")  # nothing is read yet
        for ask in (lambda: view.dp, lambda: view.rank("tp"), lambda: view.size("dp")):
            with pytest.raises(RuntimeError, match="their tp has other ranks"):
                ask()
        inside = SimpleNamespace(pg_collection=Core(tp=dist.new_group([2, 3]), dp=tp))
        holder.module = inside  # of another layout, too
        with pytest.raises(RuntimeError, match="their tp has other ranks"):
            _ = groups_of(holder, "dp").dp
        for same in (tp, dist.new_group([0, 1, 2, 3])):
            inside.pg_collection = Core(tp=same, dp=tp)
            assert groups_of(holder, "dp").passed is inside.pg_collection
        del holder.module
        holder.pg_collection = Core(tp=dist.new_group([2, 3]))  # the ranks of the globals
        assert groups_of(holder, "dp").ranks("dp") == (1, 3, 5, 7)
        dist.new_group([1, 2])  # for torch NON_GROUP_MEMBER has the ranks of this one
        for nothing in (None, dist.GroupMember.NON_GROUP_MEMBER, tp):
            if nothing is tp:
                dist.destroy_process_group(tp)
            holder.pg_collection = Core(tp=nothing)
            assert groups_of(holder, "dp").ranks("dp") == (1, 3, 5, 7)


GATHERS = """\
import torch
import torch.distributed as dist
from megatron.core import mpu


def gathered(value):
    shape = [value.size(0) * mpu.get_tensor_model_parallel_world_size(), value.size(1)]
    found = mpu.get_global_memory_buffer().get_tensor(shape, value.dtype, "mpu")
    dist.all_gather_into_tensor(found, value, group=mpu.get_tensor_model_parallel_group())
    return found
"""


def generate_then_train(root: Path) -> list[float]:
    """What a layer with sequence parallelism does, in both modes on one buffer."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    sys.path.insert(0, str(root))
    work = importlib.import_module("trainer.work")
    dist.init_process_group("gloo")
    pg = ProcessGroupCollection()
    pg.tp = dist.group.WORLD
    part = torch.full((1, 2), float(dist.get_rank() + 1))
    weight = torch.ones(2, requires_grad=True)
    with megatron_on_cpu():
        with torch.inference_mode():
            work.gathered(part, pg_collection=pg)
        (work.gathered(part, pg_collection=pg) @ weight).sum().backward()
    dist.destroy_process_group()
    assert weight.grad is not None
    return list(weight.grad.tolist())


@pytest.mark.contract
def test_who_generates_trains_on_in_the_same_buffer(tmp_path: Path) -> None:
    files = {name: TREE[name] for name in ("pyproject.toml", "trainer/__init__.py")}
    migrated(tmp_path, {**files, "trainer/work.py": GATHERS})
    found = run_distributed(functools.partial(generate_then_train, tmp_path), 2)
    assert found == [[3.0, 3.0]] * 2


@pytest.mark.contract
def test_every_getter_that_is_written_is_there() -> None:
    from megapg.megatron import getters

    own = {"MemoryBuffer", "MissingHybridGroupError", "owners_buffer", "shares_globals_buffer"}
    assert {name for name in getters.__all__ if name not in own} <= set(EVERYTHING)
    assert importlib.util.find_spec("megatron.core") is not None
    assert process_groups.__doc__
