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
from typer.testing import CliRunner, Result

from megapg.errors import UnsupportedOptionError
from megapg.migrate.commands import app
from megapg.migrate.config import load_config, parse_versions

ROOT = Path(__file__).parents[1]
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


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


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
    result = run("check", project, "--from-core", "0.16")
    assert result.exit_code == 1
    lines = result.output.splitlines()
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
    result = run("check", project)
    assert result.exit_code == 0
    assert "0 uses left" in result.output


def test_json_has_what_a_program_needs(project: Path) -> None:
    found = report(project, "--from-core", "0.12-0.13")
    assert [(site["name"], site["reason"], site["replacement"]) for site in found["sites"]] == [
        ("get_tensor_model_parallel_rank", None, 'pg.rank("tp")'),
        ("destroy_model_parallel", "lifecycle", None),
        ("is_pipeline_last_stage", "stage-default", None),
    ]
    first = found["sites"][0]
    data = (project / "p" / "a.py").read_bytes()
    assert data[first["start"] : first["stop"]] == b"mpu.get_tensor_model_parallel_rank()"  # type: ignore[misc]
    assert found["by_package"] == {"p": 3}
    assert found["versions"] == ["0.12", "0.13"]


def test_a_file_that_cannot_be_parsed_has_a_line(project: Path) -> None:
    write(project, {"p/old.py": USES + "print 'two'\n"})
    result = run("check", project)
    assert result.exit_code == 1
    assert "p/old.py:9: not looked into: is no Python 3" in result.output
    assert "1 file not looked into" in result.output


def test_a_kept_line_does_not_count(project: Path) -> None:
    write(
        project, {"p/a.py": "from megatron.core import mpu\nmpu.is_initialized()  # megapg: keep\n"}
    )
    result = run("check", project)
    assert result.exit_code == 0
    assert "1 kept" in result.output


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
    result = run("check", project, "--baseline", baseline)
    assert result.exit_code == 1
    assert "1 more than in" in result.output
    assert "p/a.py:9:5: " in result.output
    assert "p/a.py:4:12" not in result.output

    # Another place is new, too, even if the count is the same.
    write(project, {"p/a.py": USES.replace("def first", "def other")})
    result = run("check", project, "--baseline", baseline)
    assert result.exit_code == 1
    assert "1 fewer than in" in result.output

    write(project, {"p/a.py": "x = 1\n"})
    result = run("check", project, "--baseline", baseline)
    assert result.exit_code == 0
    assert "3 fewer than in" in result.output
    assert [file.name for file in project.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2, "allowed": {}}',
                                     '{"format": 1, "allowed": {"a": "b"}}'])  # fmt: skip
def test_a_broken_baseline_is_refused(project: Path, content: str) -> None:
    write(project, {"baseline.json": content})
    result = run("check", project, "--baseline", project / "baseline.json")
    assert result.exit_code == 2
    assert "baseline" in result.output


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
        ({"requirements.txt": "megatron-core"}, tuple(range(5, 20))),
        ({"requirements.txt": "torch==0.16"}, tuple(range(5, 20))),
        ({"requirements.txt": "megatron-core<=0.6.0"}, (5, 6)),
    ],
)
def test_the_version_is_what_the_project_pins(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, ...]
) -> None:
    write(tmp_path, {"pyproject.toml": "", **files})
    assert load_config(tmp_path).versions == expected
    assert load_config(tmp_path, "0.13").versions == (13,)


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
    result = run("check", project)
    assert result.exit_code == 2
    assert message in result.output


def test_paths_that_are_not_there(project: Path) -> None:
    result = run("check", project / "nowhere")
    assert result.exit_code == 2
    assert "nowhere does not exist" in result.output
    assert run("check", project, "--update-baseline").exit_code == 2
    assert run("check").exit_code == 2


def test_explain() -> None:
    result = run("explain", "stage-default")
    assert result.exit_code == 0
    assert "ignore_virtual" in result.output
    result = run("explain", "stage-defualt")
    assert result.exit_code == 2
    assert "Did you mean stage-default?" in result.output


@pytest.mark.parametrize(
    ("command", "said"), [("check", "3 uses left"), ("migrate", "2 can be rewritten in 1 file")]
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
