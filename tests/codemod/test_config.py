"""Test how the settings and the Megatron-core versions of a project are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import write

from megapg.errors import UnsupportedOptionError
from megapg.migrate.config import load_config, parse_versions


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
def test_wrong_settings(tmp_path: Path, settings: str, message: str) -> None:
    write(tmp_path, {"pyproject.toml": settings})
    with pytest.raises(UnsupportedOptionError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"requirements.txt": "megatron-core==0.16.1"}, (16,)),
        ({"requirements-dev.txt": "megatron_core[dev] >= 0.12, < 0.15"}, (12, 13, 14)),
        ({"requirements-dev.txt": "megatron_core>=0.14,<0.15.1,!=0.14.3"}, (14, 15)),
        ({"setup.py": "install_requires=['megatron-core~=0.15.0']"}, (15,)),
        ({"pyproject.toml": '[project]\ndependencies = ["megatron-core>=0.18"]'}, (18, 19)),
        ({"requirements.txt": "megatron-core"}, tuple(range(12, 20))),
        ({"requirements.txt": "torch==0.16"}, tuple(range(12, 20))),
        ({"pyproject.toml": 'megatron = {git = "https://x/y.git", tag = "core_v0.15.2"}'}, (15,)),
        ({"requirements/a/b.sh": "git clone -b core_r0.13.0 x"}, (13,)),
        ({"docker/1/Dockerfile": "RUN x@core_v0.12.1", "Dockerfile": "core_r0.16.0"}, (12, 16)),
        (
            {"a/b/megatron/core/package_info.py": "MINOR = 2", "requirements.txt": "core_r0.16.0"},
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


def test_versions() -> None:
    assert [parse_versions(text) for text in ("0.16", "v0.16.1")] == [(16,), (16,)]
    assert parse_versions("0.12-0.14") == (12, 13, 14)
    for text in ("", "16", "1.0", "0.99", "0.16-", "0.16-0.12", "newest"):
        with pytest.raises(UnsupportedOptionError, match=r"0\.5 to 0\.19"):
            parse_versions(text)


@pytest.mark.parametrize(
    ("setting", "option", "expected"),
    [
        ("", None, ""),
        ("megapg", None, ""),
        ("vendored", None, "process_groups"),
        ("vendored:groups", None, "groups"),
        ("vendored:a.b.groups", None, "a.b.groups"),
        ("vendored", "megapg", ""),
        ("megapg", "vendored", "process_groups"),
    ],
)
def test_the_setting(tmp_path: Path, setting: str, option: str | None, expected: str) -> None:
    text = f'[tool.megapg]\nruntime = "{setting}"\n' if setting else ""
    write(tmp_path, {"pyproject.toml": text})
    assert load_config(tmp_path, runtime=option).vendored == expected


@pytest.mark.parametrize("setting", ['"none"', "3", '"vendored:a."', '"vendored:"'])
def test_another_setting_is_an_error(tmp_path: Path, setting: str) -> None:
    write(tmp_path, {"pyproject.toml": f"[tool.megapg]\nruntime = {setting}\n"})
    with pytest.raises(UnsupportedOptionError, match=r"no runtime .*: use megapg"):
        load_config(tmp_path)
