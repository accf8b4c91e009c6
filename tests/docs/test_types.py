"""Check that type checkers report each typo below in a user's code, and nothing else."""

import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from processes import captured

ROOT = Path(__file__).parents[2]

WELL_TYPED = """
    from collections.abc import Mapping
    from datetime import timedelta
    from functools import partial
    from typing import cast

    import torch
    import torch.distributed as dist
    from megatron.core.process_groups_config import (  # type: ignore[import-untyped]
        ProcessGroupCollection as CoresOwn,
    )

    import megapg
    from megapg.layout import Field, GroupName, ParallelLayout
    from megapg.megatron import (
        forbid_global_reads,
        globals_policy,
        initialize_model_parallel,
        resolves,
        session_arguments,
    )
    from megapg.testing import fake_collection, parity, run_distributed
    from megapg.tools.parity.parity_report import ParityReport


    @resolves(needs=("tp", "pp"))
    def build(size: int, *, pg_collection: megapg.ProcessGroupCollection) -> torch.nn.Linear:
        return torch.nn.Linear(size // pg_collection.size("tp"), size)


    def mean_loss(
        model: torch.nn.Module,
        batch: Mapping[str, torch.Tensor],
        pg: megapg.ProcessGroupCollection,
    ) -> torch.Tensor:
        return cast(torch.Tensor, model(batch["tokens"]))


    def compared() -> ParityReport:
        report = parity(build, ["tp=2", {"pp": 2, "wide": True}], step=mean_loss, progress=print)
        report.check()
        print(report.loss, [cell.parameter for cell in report.layouts[0].wrong])
        return parity("gpt", ("tp=2",), precision="float32", global_sizes={"tp": 1})


    def total(model: torch.nn.Module, group: dist.ProcessGroup) -> int:
        with megapg.session(
            tp=2,
            order="tp-cp-ep-dp-pp",
            gloo=("dp_cp",),
            dedicated=["pp"],
            options={"tp": megapg.CommunicatorOptions(max_ctas=8)},
            collective_timeout={"pp": timedelta(minutes=5), "hcp.0": timedelta(minutes=1)},
        ) as session:
            pg = session.groups
            dist.all_reduce(torch.zeros(1), group=pg.tp)
            fields: tuple[Field, ...] = ("tp", "dp_cp")
            sizes = [pg.size(field) for field in (*fields, *pg.present())]
            levels = [pg.rank(cast(GroupName, f"hcp.{level}")) for level in range(2)]
            session.suspend("recreate")
            session.resume()
        layout = ParallelLayout(world_size=4, tp=2)
        ranks = [layout.members(family, 0) for family in layout.families]
        mine = megapg.ProcessGroupCollection.from_groups(tp=group, embd=None, hcp=[group])
        arguments = session_arguments(tensor_model_parallel_size=2, context_parallel_size=1)
        with megapg.session(**arguments), globals_policy("error"):
            build(8, pg_collection=mine.require("tp"))
        with fake_collection(tp=2, gloo=("dp",)) as fake:
            levels.append(fake.rank("gloo.dp"))
        assert run_distributed(partial(len, [1]), 2)
        found = megapg.groups_of(model, "tp", "hybrid.2")
        megapg.from_mesh(pg.mesh("dp_cp", "tp"), tp="tp", dp="dp_cp")
        theirs = CoresOwn()
        megapg.resolve(theirs), megapg.resolve(None), megapg.resolve(megapg.from_megatron(theirs))
        megapg.seed_all(1, theirs)
        megapg.save_checkpoint("here", 1, model=model, pg_collection=theirs)
        megapg.from_megatron(megapg.to_megatron(pg))
        with forbid_global_reads(["trainer"]), forbid_global_reads(("trainer",)):
            pass
        opened = initialize_model_parallel(2, 1, None, order="tp-cp-ep-dp-pp", use_sharp=False)
        megapg.suspend(opened)
        return sum(sizes) + sum(levels) + len(ranks) + len(found.ranks("hcp.1"))
"""

TYPOS = """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import megapg
    from megapg import sesion  # wrong
    from megapg.layout import ParallelLayout
    from megapg.megatron import compare_with_globals, forbid_global_reads, getters, globals_policy
    from megapg.megatron import initialize_model_parallel, resolves, session_arguments
    from megapg.megatron import sesion_arguments  # wrong
    from megapg.testing import fake_collection, run_distribute  # wrong


    @resolves(needs=("tp",))
    def build(size: int, *, pg_collection: megapg.ProcessGroupCollection) -> int:
        return size


    @resolves(needs=("tpp",))  # wrong
    def built(size: int, *, pg_collection: megapg.ProcessGroupCollection) -> int:
        return size


    def total(
        model: torch.nn.Module, group: dist.ProcessGroup, pg: megapg.ProcessGroupCollection
    ) -> None:
        megapg.sesion(tp=2)  # wrong
        megapg.session(tpp=2)  # wrong
        megapg.session(tp="2")  # wrong
        megapg.session(gloo="dp")  # wrong
        megapg.session(gloo=("dpp",))  # wrong
        megapg.session(dedicated=["ppp"])  # wrong
        megapg.session(options={"tpp": megapg.CommunicatorOptions()})  # wrong
        megapg.session(options={"tp": megapg.CommunicatorOptions(max_cta=8)})  # wrong
        megapg.session(collective_timeout=600)  # wrong
        megapg.session(collective_timeout={"ppp": timedelta(minutes=1)})  # wrong
        pg.rank("tpp")  # wrong
        pg.size("dp-cp")  # wrong
        pg.ranks("gloo.dpp")  # wrong
        pg.require("tp", "ppp")  # wrong
        print(pg.tpp)  # wrong
        pg.tp = group  # wrong
        ParallelLayout(world_size=4, tp=2, pq=2)  # wrong
        ParallelLayout(world_size=4).members("tpp", 0)  # wrong
        megapg.ProcessGroupCollection.from_groups(tpp=group)  # wrong
        megapg.ProcessGroupCollection.from_groups(tp=None)  # wrong
        megapg.from_mesh(pg.mesh("tp"), tpp="tp")  # wrong
        megapg.from_mesh(pg.mesh("tp"), tp=group)  # wrong
        megapg.resolve(pg, needs=("tpp",))  # wrong
        megapg.groups_of(model, "tpp")  # wrong
        session_arguments(tensor_parallel_size=2)  # wrong
        build(8)  # wrong
        globals_policy("errors")  # wrong
        megapg.session().suspend("recreated")  # wrong
        print(megapg.session().group)  # wrong
        fake_collection(tpp=2)  # wrong
        initialize_model_parallel(tensor_parallel_size=2)  # wrong
        initialize_model_parallel("2")  # wrong
        initialize_model_parallel(2, 2, order=3)  # wrong
        forbid_global_reads("megatron")  # wrong


    def not_a_collection(session: megapg.Session, model: torch.nn.Module) -> None:
        megapg.published(session)  # wrong
        megapg.published("tp")  # wrong
        megapg.resolve(session)  # wrong
        megapg.resolve("tp")  # wrong
        megapg.from_megatron(session)  # wrong
        megapg.from_megatron("tp")  # wrong
        megapg.to_megatron(session)  # wrong
        megapg.seed_all(1, session)  # wrong
        megapg.seed_all(1, "tp")  # wrong
        megapg.capture_rng_state(session)  # wrong
        megapg.save_checkpoint("here", 1, model=model, pg_collection=session)  # wrong
        megapg.load_checkpoint("here", model=model, pg_collection=session)  # wrong
        compare_with_globals(session)  # wrong
        getters.memory_buffer("tp")  # wrong
        megapg.suspend(session.groups)  # wrong
"""


def mypy(*files: Path) -> list[set[int]]:
    """Return the lines with errors of mypy --strict, for each of a user's files."""
    # Users have megapg installed next to torch, and none of our settings.
    names = [file.name for file in files]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", *names]
    cache = ROOT / ".mypy_cache" / "users"
    told = captured(
        [*command, f"--cache-dir={cache}"],
        cwd=files[0].parent,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        timeout=280,
    )
    assert not told.stderr, told.stderr
    found = [re.findall(rf"^{name}:(\d+): error", told.stdout, re.M) for name in names]
    return [set(map(int, each)) for each in found]


def pyright(*files: Path) -> list[set[int]]:
    """Return the lines with errors of pyright, for each of a user's files."""
    if importlib.util.find_spec("pyright") is None and "CI" not in os.environ:
        pytest.skip("pyright is not installed: `make setup` installs it")
    names = [file.name for file in files]
    told = captured(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *names],
        cwd=files[0].parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        timeout=280,
    )
    assert told.stdout, told.stderr
    found = [re.findall(rf"\b{name}:(\d+):\d+ - error", told.stdout) for name in names]
    return [set(map(int, each)) for each in found]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_every_typo_is_told_and_nothing_else(checker, tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(textwrap.dedent(WELL_TYPED))
    bad.write_text(textwrap.dedent(TYPOS))
    lines = bad.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 20
    told, told_of_good = checker(bad, good)
    assert [lines[number - 1] for number in sorted(wrong - told)] == []
    assert [lines[number - 1] for number in sorted(told - wrong)] == []
    assert told_of_good == set()
