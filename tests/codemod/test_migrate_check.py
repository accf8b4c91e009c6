"""``megapg check`` and ``megapg explain``: reports, exit codes, the ratchet, the settings."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from trees import write
from typer.testing import CliRunner, Result

from megapg.cli.migrate import app
from megapg.errors import UnsupportedOptionError
from megapg.migrate.config import load_config, parse_versions

ROOT = Path(__file__).parents[2]
USES = """\
from megatron.core import mpu

def first():
    return mpu.get_tensor_model_parallel_rank()

def second():
    mpu.destroy_model_parallel()
    return mpu.is_pipeline_last_stage()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(tmp_path, {"pyproject.toml": "", "p/__init__.py": "", "p/a.py": USES})
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def ended(code: int, *arguments: object) -> str:
    """What a command said that ended so."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return result.output


def flat(output: str) -> str:
    """Without the frame and the line breaks of an error."""
    return " ".join(output.replace("│", " ").split())


def report(*arguments: object) -> dict[str, list[dict[str, object]]]:
    result = run("check", *arguments, "--json")
    assert result.output.count("\n") == 1
    found: dict[str, list[dict[str, object]]] = json.loads(result.output)
    return found


# --- reports --------------------------------------------------------------------------------------


def test_the_collector_is_left_as_it_was(project: Path) -> None:
    before = gc.isenabled(), gc.get_freeze_count()
    run("check", project, "--from-core", "0.16")
    run("migrate", project, "--from-core", "0.16")
    assert (gc.isenabled(), gc.get_freeze_count()) == before


def test_a_line_for_every_use(project: Path) -> None:
    output = ended(1, "check", project, "--from-core", "0.16")
    lines = output.splitlines()
    assert lines[:3] == [
        'p/a.py:4:12: mpu.get_tensor_model_parallel_rank() -> pg.rank("tp")',
        "p/a.py:7:5: mpu.destroy_model_parallel() [lifecycle]",
        "p/a.py:8:12: mpu.is_pipeline_last_stage() -> getters.is_pipeline_last_stage(pg)",
    ]
    assert "2 files, 3 uses left. Read as Megatron-core 0.16 (--from-core)." in lines[-1]
    (row,) = (line.split() for line in lines if line.startswith("│"))
    assert [cell.strip("│") for cell in row if cell != "│"] == ["p", "3", "2", "1"]


def test_nothing_left(project: Path) -> None:
    write(project, {"p/a.py": "x = 1\n"})
    assert "0 uses left" in ended(0, "check", project)


def test_json_has_what_a_program_needs(project: Path) -> None:
    found = report(project, "--from-core", "0.12-0.13")
    assert [(site["name"], site["reason"], site["replacement"]) for site in found["sites"]] == [
        ("get_tensor_model_parallel_rank", None, 'pg.rank("tp")'),
        ("destroy_model_parallel", "lifecycle", None),
        ("is_pipeline_last_stage", None, "getters.is_pipeline_last_stage(pg)"),
    ]
    first = found["sites"][0]
    data = (project / "p" / "a.py").read_bytes()
    assert data[first["start"] : first["stop"]] == b"mpu.get_tensor_model_parallel_rank()"  # type: ignore[misc]
    assert found["by_package"] == {"p": 3}
    assert found["versions"] == ["0.12", "0.13"]


def test_a_file_that_cannot_be_parsed_has_a_line(project: Path) -> None:
    write(project, {"p/old.py": USES + "print 'two'\n"})
    output = ended(1, "check", project)
    assert "p/old.py:9: not looked into: is no Python 3" in output
    assert "1 file not looked into" in output


def test_a_kept_line_does_not_count(project: Path) -> None:
    write(
        project, {"p/a.py": "from megatron.core import mpu\nmpu.is_initialized()  # megapg: keep\n"}
    )
    assert "1 kept" in ended(0, "check", project)


def test_brackets_in_code_are_printed_as_they_are(project: Path) -> None:
    write(
        project, {"p/a.py": "from megatron.core import mpu\nmpu.is_pipeline_last_stage(a['red'])\n"}
    )
    assert "(a['red'])" in run("check", project, "--from-core", "0.16").output


# --- the ratchet ----------------------------------------------------------------------------------


def test_the_ratchet(project: Path) -> None:
    baseline = project / "baseline.json"
    assert run("check", project, "--baseline", baseline, "--update-baseline").exit_code == 0
    assert run("check", project, "--baseline", baseline).exit_code == 0

    # Code may move.
    write(project, {"p/a.py": "\n\n" + USES})
    assert run("check", project, "--baseline", baseline).exit_code == 0

    # A second use of the same getter in the same function is one more.
    write(project, {"p/a.py": USES + "    mpu.destroy_model_parallel()\n"})
    output = ended(1, "check", project, "--baseline", baseline)
    assert "1 more than in" in output
    assert "p/a.py:9:5: " in output
    assert "p/a.py:4:12" not in output

    # Another place is new, too, even if the count is the same.
    write(project, {"p/a.py": USES.replace("def first", "def other")})
    assert "1 fewer than in" in ended(1, "check", project, "--baseline", baseline)

    write(project, {"p/a.py": "x = 1\n"})
    assert "3 fewer than in" in ended(0, "check", project, "--baseline", baseline)
    assert [file.name for file in project.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2, "allowed": {}}',
                                     '{"format": 1, "allowed": {"a": "b"}}'])  # fmt: skip
def test_a_broken_baseline_is_refused(project: Path, content: str) -> None:
    write(project, {"baseline.json": content})
    assert "baseline" in ended(2, "check", project, "--baseline", project / "baseline.json")


# --- settings and refusals ------------------------------------------------------------------------


def test_settings_in_pyproject(project: Path) -> None:
    settings = (
        '[tool.megapg]\nexclude = ["third_party/*"]\nwrappers = ["p.own"]\nfrom-core = "0.18"\n'
    )
    write(
        project,
        {
            "pyproject.toml": settings,
            "third_party/a.py": USES,
            "p/a.py": "from p.own import get_data_parallel_group\nget_data_parallel_group()\n",
            "p/own.py": "def get_data_parallel_group(): pass\n",
        },
    )
    found = report(project)
    assert [(site["file"], site["replacement"]) for site in found["sites"]] == [("p/a.py", "pg.dp")]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"requirements.txt": "megatron-core==0.16.1"}, (16,)),
        ({"requirements-dev.txt": "megatron_core[dev] >= 0.12, < 0.15"}, (12, 13, 14)),
        ({"setup.py": "install_requires=['megatron-core~=0.15.0']"}, (15,)),
        ({"pyproject.toml": '[project]\ndependencies = ["megatron-core>=0.18"]'}, (18, 19)),
        ({"requirements.txt": "megatron-core"}, tuple(range(12, 20))),
        ({"requirements.txt": "torch==0.16"}, tuple(range(12, 20))),
        ({"pyproject.toml": 'megatron = {git = "https://x/y.git", tag = "core_v0.15.2"}'}, (15,)),
        ({"requirements/cuda/install.sh": "git clone -b core_r0.13.0 https://x/y.git"}, (13,)),
        (
            {
                "docker/12/Dockerfile": "RUN pip install git+https://x/y.git@core_v0.12.1",
                "Dockerfile": "core_r0.16.0",
            },
            (12, 16),
        ),
        ({"megatron/core/package_info.py": "MAJOR = 0\nMINOR = 14\n"}, (14,)),
        (
            {
                "third_party/LM/megatron/core/package_info.py": "MINOR = 2",
                "requirements.txt": "megatron-core==0.16.1",
            },
            (5,),
        ),
        ({"requirements.txt": "megatron-core<=0.6.0"}, (5, 6)),
    ],
)
def test_the_version_is_what_the_project_pins(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, ...]
) -> None:
    write(tmp_path, {"pyproject.toml": "", **files})
    assert load_config(tmp_path).versions == expected
    assert load_config(tmp_path, "0.13").versions == (13,)


@pytest.mark.parametrize(("minor", "is_old"), [(2, True), (11, True), (12, False)])
def test_a_core_in_the_tree_beside_which_nothing_runs_is_named(
    tmp_path: Path, minor: int, is_old: bool
) -> None:
    info, code = f"MINOR = {minor}\n", "from megatron.core import mpu\n\nmpu.get_tp()\n"
    write(tmp_path, {"pyproject.toml": "", "megatron/core/package_info.py": info, "a.py": code})
    for command in (["check"], ["migrate"], ["migrate", "--from-core", "0.16"]):
        said = CliRunner().invoke(app, [*command, str(tmp_path / "a.py")]).output
        assert ("bring that copy up to 0.12 first" in said) is is_old
        assert not is_old or "megatron/core/package_info.py" in said
    said = CliRunner().invoke(app, ["migrate", str(tmp_path / "a.py"), "--json"]).stdout
    assert bool(json.loads(said)["old_core"]) is is_old


@pytest.mark.parametrize(
    ("text", "expected"), [("0.16", (16,)), ("0.16.1", (16,)), ("0.12-0.14", (12, 13, 14))]
)
def test_versions(text: str, expected: tuple[int, ...]) -> None:
    assert parse_versions(text) == expected


@pytest.mark.parametrize("text", ["", "16", "1.0", "0.99", "0.16-", "0.16-0.12", "newest"])
def test_no_versions(text: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"0\.5 to 0\.19"):
        parse_versions(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[tool.megapg]\nexcludes = []", "excludes"),
        ("[tool.megapg]\nexclude = 'a'", "list of strings"),
        ("[tool.megapg]\nfrom-core = 16", "from-core is a string"),
        ("[tool.megapg]\nfrom-core = '3'", "no Megatron-core version '3'"),
        ("[tool.megapg", "can't be read"),
    ],
)
def test_settings_that_are_no_good(project: Path, settings: str, message: str) -> None:
    write(project, {"pyproject.toml": settings})
    assert message in ended(2, "check", project)


def test_paths_that_are_not_there(project: Path) -> None:
    assert "nowhere does not exist" in ended(2, "check", project / "nowhere")
    assert run("check", project, "--update-baseline").exit_code == 2
    assert run("check").exit_code == 2


def test_explain() -> None:
    assert "ignore_virtual" in ended(0, "explain", "vp-stage")
    assert "Did you mean vp-stage?" in ended(2, "explain", "vp-stgae")


# A line of code, what becomes of the use in it, what the rule that decides says, and why it ends at
# the globals where it may.
RULED = """\
from megatron.core import mpu
RANK = mpu.get_data_parallel_rank()  # [at-import] | it is called at import, and gives 0 there
def f():
    return mpu.get_data_parallel_rank()  # resolve(pg_collection) | its function can take
def g(model):
    return mpu.get_data_parallel_rank()  # groups_of(model, "dp") | a collection or a model is
def both(model):
    return f() + g(model)
def h():
    mpu.set_data_parallel_rank(1)  # [setter] | it has no replacement
    return mpu.get_tensor_model_parallel_rank()  # resolve(None) | its function fakes | fakes ranks
def ready():
    return mpu.is_initialized()  # [lifecycle] | it asks whether there are groups
def maybe():
    return mpu.get_embedding_group(False)  # [may-be-none] | the replacement may behave differently
class Kept:
    def __init__(self):
        self.size = 1
    def f(self):
        return mpu.get_data_parallel_rank()  # (self.pg_collection) | the constructor | nobody
def shown():
    return f"{mpu.get_data_parallel_rank()=}"  # [in-a-string] | it is in an f-string
"""


def test_every_code_of_a_report_says_what_it_means(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": '[tool.megapg]\nfrom-core = "0.16"', "a.py": RULED})
    said = run("migrate", tmp_path).output
    for meaning in ("the answer is None on some ranks", "asked when the module is imported"):
        assert meaning in said


def test_explain_says_which_rules_were_asked_about_each_use_in_a_line(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": '[tool.megapg]\nfrom-core = "0.16"', "a.py": RULED})
    for number, line in enumerate(RULED.splitlines(), 1):
        code, _, expected = line.partition("  # ")
        result = run("explain", f"{tmp_path / 'a.py'}:{number}")
        if not expected:
            assert result.exit_code == 2, code
            assert "no use of the globals is there" in flat(result.output), code
            continue
        use, *asked = result.output.splitlines()
        outcome, ruling, *why = expected.split(" | ")
        assert outcome in use, result.output
        ends = [each for each in asked if each.startswith("  where its callers end: ")]
        assert len(ends) == len(why), result.output
        assert all(each in asked.pop() for each in why), result.output
        assert ruling in asked[-1], result.output
        assert all(each.startswith("  no   ") for each in asked[:-1])
        assert asked[-1].startswith("  yes  ") or len(asked) == 1


# A file, what its second line is, and what is said of the use there; of which module, if another.
PLACES = {
    "build/a.py": ("mpu.get_data_parallel_rank()", "resolve(None)"),
    "left_out.py": ("mpu.get_data_parallel_rank()", "resolve(None)"),
    "kept.py": ("mpu.get_data_parallel_rank()  # megapg: keep", "is kept"),
    "broken.py": ("print(", "was never closed"),
    "wrapped.py": ("groups.get_data_parallel_rank()", "resolve(None)"),
}


def test_explain_looks_into_the_file_that_it_is_given(tmp_path: Path) -> None:
    settings = '[tool.megapg]\nfrom-core = "0.16"\nexclude = ["left_out.py"]'
    write(tmp_path, {"pyproject.toml": settings, "own/groups.py": ""})
    for name, (line, said) in PLACES.items():
        imported = "from own import groups" if "groups" in line else "from megatron.core import mpu"
        write(tmp_path, {name: f"{imported}\nf = lambda: {line}\n"})
        # As check prints it, with the column.
        result = run("explain", f"{tmp_path / name}:2:11", "--wrapper", "own.groups")
        assert said in flat(result.output), name
        assert result.exit_code == (0 if said == "resolve(None)" else 2)


@pytest.mark.parametrize(
    ("command", "said"), [("check", "3 uses left"), ("migrate", "1 can be rewritten in 1 file")]
)
def test_it_runs_where_torch_is_not_installed(project: Path, command: str, said: str) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, megatron=None, numpy=None)\n"
        "from megapg.cli import app; app(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(project), "--from-core", "0.16"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert said in done.stdout + done.stderr


# --- what is not Megatron-core's, or no Python ----------------------------------------------------

OWN = "def get_data_parallel_rank():\n    return 0\n"
OLD = {
    "pyproject.toml": "",
    "megatron/__init__.py": "",
    "megatron/mpu/__init__.py": "from .initialize import *\n",
    "megatron/mpu/initialize.py": OWN,
    "tasks/eval.py": "from megatron import mpu\n\n\n"
    "def f():\n    return mpu.get_data_parallel_rank()\n",
    "tests/test_it.py": "def test(mocker):\n"
    "    mocker.patch('megatron.mpu.get_data_parallel_rank', return_value=0)\n",
}
ITS_OWN = "the project's own megatron.mpu, and nothing here imports megatron.core"


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_a_package_of_the_projects_own_is_left_alone(tmp_path: Path, command: str) -> None:
    write(tmp_path, OLD)
    for looked_at in (tmp_path, tmp_path / "tasks", tmp_path / "tests"):  # it may lie beside
        output = ended(0, command, looked_at)
        assert "0 uses" in output
        (line,) = (each for each in output.splitlines() if ITS_OWN in each)
        assert line.startswith(f"{Path('megatron', 'mpu')}: ")
        assert "--wrapper megatron.mpu" in line
    assert json.loads(run(command, tmp_path, "--json").output)["namesakes"] == ["megatron.mpu"]


def test_a_package_of_the_projects_own_can_stand_for_the_globals(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    by_option = run("check", tmp_path, "--wrapper", "megatron.mpu")
    write(tmp_path, {"pyproject.toml": '[tool.megapg]\nwrappers = ["megatron.mpu"]\n'})
    by_setting = run("check", tmp_path)
    for result in (by_option, by_setting):
        assert result.exit_code == 1
        assert "tasks/eval.py:5:12: mpu.get_data_parallel_rank()" in result.output
        assert "tests/test_it.py:2" in result.output
        assert ITS_OWN not in result.output


@pytest.mark.parametrize(
    "core",
    [
        {"tasks/new.py": "from megatron.core import parallel_state\n"},
        {"tasks/new.py": "if True:\n    import megatron.core.utils as utils\n"},
        {"tasks/new.py": "from megatron import mpu, core\n"},
        {"tasks/new.py": "from megatron import (\n    mpu,\n    core,\n)\n"},
        {"megatron/core/__init__.py": ""},
    ],
)
def test_where_there_is_a_core_an_old_name_means_it(
    tmp_path: Path, core: Mapping[str, str]
) -> None:
    write(tmp_path, {**OLD, **core})
    output = ended(1, "check", tmp_path)
    assert "tasks/eval.py:5:12: mpu.get_data_parallel_rank()" in output
    assert ITS_OWN not in output


@pytest.mark.parametrize(
    "core",
    [
        {"megatron/mpu/more.py": "from megatron.core.parallel_state import *\n"},
        {"other/new.py": "from megatron.core import parallel_state\n"},
    ],
)
def test_a_part_of_the_project_hears_of_a_core_in_the_rest(
    tmp_path: Path, core: Mapping[str, str]
) -> None:
    """Or a ratchet over a part of a tree would go green."""
    write(tmp_path, {"pyproject.toml": "", **OLD, **core})
    for looked_at in (tmp_path / "tasks", tmp_path / "tasks" / "eval.py"):
        assert ITS_OWN not in ended(1, "check", looked_at)


def test_a_word_about_the_core_is_no_core(tmp_path: Path) -> None:
    write(
        tmp_path, {**OLD, "tasks/new.py": "# from megatron.core import mpu\nX = 'megatron.core'\n"}
    )
    assert ITS_OWN in run("check", tmp_path).output


def test_what_is_only_called_so_needs_no_word(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "mpu.py": "def protect():\n    pass\n"})
    assert "own" not in run("check", tmp_path).output
    write(tmp_path, {"mpu.py": OWN, "a.py": "import mpu\nmpu.get_data_parallel_rank()\n"})
    assert "mpu.py: the project's own mpu" in ended(0, "check", tmp_path)
    assert run("check", tmp_path, "--wrapper", "mpu").exit_code == 1


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_a_notebook_by_name_is_refused(project: Path, command: str) -> None:
    notebook = project / "p" / "x.ipynb"
    cell = {"cell_type": "code", "source": USES.splitlines(keepends=True)}
    notebook.write_text(json.dumps({"cells": [cell], "nbformat": 4}))
    output = ended(2, command, notebook)
    assert "notebooks are not read" in output
    assert "nbconvert" in output
    together = run(command, notebook, project / "p" / "a.py")
    assert together.exit_code == 1
    assert "is a notebook, and notebooks are not read" in together.output
    assert "3 uses" in together.output
    write(project, {"clean.py": "x = 1\n"})
    together = run(command, project / "clean.py", notebook)
    assert together.exit_code == 2  # nothing found is not nothing there
    assert "0 uses" in together.output


@pytest.mark.parametrize("command", ["check", "migrate"])
@pytest.mark.parametrize("text", ["print mpu.x()\n", "x = '\0'\n"])
def test_a_file_by_name_that_cannot_be_read_is_no_clean_one(
    project: Path, command: str, text: str
) -> None:
    text = f"from megatron.core import mpu\n{text}"
    write(project, {"q/old.py": text, "q/clean.py": "x = 1\n"})
    alone = run(command, project / "q" / "old.py")
    assert alone.exit_code == 2
    assert "q/old.py" in alone.output
    assert "is no Python" in alone.output
    assert run(command, project / "q" / "clean.py", project / "q" / "old.py").exit_code == 2
    assert run(command, project / "q" / "clean.py").exit_code == 0
    assert run(command, project / "q").exit_code == 0  # among many it is one line of the report


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_notebooks_in_a_directory_are_counted(project: Path, command: str) -> None:
    write(
        project, {"p/x.ipynb": "{}", "p/y.IPYNB": "{}", ".hidden/z.ipynb": "{}", "q/z.ipynb": "{}"}
    )
    assert "3 notebooks not read" in run(command, project).output.splitlines()[-1]
    assert json.loads(run(command, project, "--json").output)["notebooks"] == 3
    write(project, {"pyproject.toml": '[tool.megapg]\nexclude = ["p/*.ipynb", "p/*.IPYNB"]\n'})
    assert "1 notebook not read" in run(command, project).output.splitlines()[-1]
    (project / "q" / "z.ipynb").unlink()
    assert "notebook" not in run(command, project).output
