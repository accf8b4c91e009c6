"""No result mixes carriers, whatever was planned: what the check of the new texts names falls
back.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from migrate_cases import cases
from migrate_mixtures import make_mixture
from test_migrate_engine import Case, run
from trees import write
from typer.testing import CliRunner

from megapg.cli.migrate import app
from megapg.migrate.config import Config
from megapg.migrate.decide import rules
from megapg.migrate.edit.mixing import mixed, new_in
from megapg.migrate.migration import Migration
from megapg.migrate.report.as_json import document
from megapg.migrate.report.outcome import of_migration

FEW, MANY = range(40), range(40, 400)


def _mixed_in(files: dict[str, str], found: Migration) -> list[str]:
    """What is mixed after a migration, and was not before."""
    before = {name: ast.parse(text) for name, text in files.items()}
    after = before | {file.file: ast.parse(file.after) for file in found.files}
    new = new_in(mixed(after, (16,)), lambda: mixed(before, (16,)))
    return [f"{file}: {each}" for file, each in new]


def _migrated(root: Path, seed: int) -> tuple[dict[str, str], Migration]:
    files = make_mixture(seed)
    write(root, files)
    return files, run(root)


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_generated_module_is_mixed(tmp_path: Path, seeds: range) -> None:
    served = 0
    for seed in seeds:
        files, found = _migrated(tmp_path / str(seed), seed)
        assert _mixed_in(files, found) == [], seed
        served += sum(each.how != "resolved" for each in found.served)
    assert served > len(seeds)  # it is not that the globals serve everything


def _without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "have_answered_alike", lambda *arguments: False)


def test_nor_is_any_where_no_rule_looks_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_the_rule(monkeypatch)
    fell_back = 0
    for seed in FEW:
        files, found = _migrated(tmp_path / str(seed), seed)
        assert _mixed_in(files, found) == [], seed
        fell_back += sum(bool(each.detail) for each in found.served)
    assert fell_back > len(FEW) / 2


@pytest.mark.parametrize("name", cases("alike"))
def test_nor_is_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _without_the_rule(monkeypatch)
    case = Case(cases("alike")[name])
    write(tmp_path, case.before)
    assert _mixed_in(case.before, run(tmp_path, **case.settings)) == []


def test_a_method_that_may_not_hand_on_what_it_asks_falls_back_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_the_rule(monkeypatch)
    (text,) = (text for name, text in cases("alike").items() if "has them asked" in name)
    write(tmp_path, Case(text).before)
    found = run(tmp_path)
    (detail,) = {each.detail for each in found.served if each.site.function == "Net.load"}
    assert detail.startswith("the globals serve: ")
    assert not found.callees


def test_the_report_says_which_uses_fell_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_the_rule(monkeypatch)
    text = "from megatron.core import mpu\n\n\ndef f(model, flag):\n"
    text += "    if mpu.get_data_parallel_rank(*flag) == 0:\n"
    text += "        return mpu.get_data_parallel_group()\n"
    write(tmp_path, {"pyproject.toml": '[tool.megapg]\nfrom-core = "0.16"', "a.py": text})
    found = run(tmp_path)
    config = Config(tmp_path, versions=(16,))
    report = of_migration(found, config)
    said = document(report, ())["sites"]
    assert isinstance(said, list)
    assert [each["detail"] for each in said][1] == (
        "the globals serve: f would ask the globals (get_data_parallel_rank) and model (dp) about "
        "one kind of groups (dp)"
    )
    explained = CliRunner().invoke(app, ["explain", f"{tmp_path / 'a.py'}:6"])
    assert "f would ask the globals (get_data_parallel_rank)" in " ".join(explained.output.split())


EXPERTS = """\
import torch
from megatron.core import mpu


class Experts(torch.nn.Module):
    def __init__(self, config, **kwargs):
        super().__init__()
        self.share = config.size // mpu.get_expert_model_parallel_world_size()

    def place(self):
        return mpu.get_expert_model_parallel_rank(), mpu.get_data_modulo_expert_parallel_rank()

    def replica(self):
        return mpu.get_data_parallel_rank()

    def stage(self):
        return mpu.get_pipeline_model_parallel_rank()


def split(model):
    if model.extended:
        return mpu.get_tensor_and_expert_parallel_world_size()
    return mpu.get_tensor_model_parallel_world_size()
"""


def test_a_group_of_an_older_core_counts_with_all_that_it_names(tmp_path: Path) -> None:
    """Its ranks are told together with those of what it spans: in a checkpoint, or as a size."""
    write(tmp_path, {"experts.py": EXPERTS})
    (file,) = run(tmp_path).files
    after = file.after.decode()
    for one in ('.size("ep")', '.rank("ep")', '.rank("dp")', '.size("tp")'):
        assert f"megapg.resolve(None){one}" in after
    assert 'megapg.groups_of(self, "pp").rank("pp")' in after
