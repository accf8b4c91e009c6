"""Pipelines of several modules with a layout each, and Megatron-core's collection of them."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, process_groups_config
from megatron.core.hyper_comm_grid import HyperCommGrid
from tensor_parallel_mlp import linears

import megapg
from megapg import torch_private
from megapg.errors import LayoutError, StaleGroupError, UnsupportedVersionError
from megapg.layout import ParallelLayout
from megapg.megatron import from_modules, to_grid, to_modules
from megapg.testing import fake_collection, megatron_on_cpu, run_distributed

THERE = hasattr(process_groups_config, "MultiModuleProcessGroupCollection")
pytestmark = pytest.mark.contract
needs_modules = pytest.mark.skipif(not THERE, reason="this core has no pipelines of modules")


@pytest.mark.skipif(THERE, reason="this core has pipelines of modules")
def test_a_core_without_them_is_refused():
    with fake_collection() as pg, pytest.raises(UnsupportedVersionError, match=r"0\.17\.0 is the"):
        to_modules({"llm": pg}, "llm")


@contextlib.contextmanager
def opened(layouts):
    """Open each module's groups in the same order on all ranks; None on ranks outside."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(megapg.session(layout, name=name)).groups
            if dist.get_rank() in layout.ranks
            else None
            for name, layout in layouts.items()
        }


# --- ranks ----------------------------------------------------------------------------------------

LAYOUTS = {
    "vision": ParallelLayout(world_size=2, tp=2, ranks=range(2)),
    "audio": ParallelLayout(world_size=2, ranks=range(2)),  # vision uses these ranks as well
    "llm": ParallelLayout(world_size=4, tp=2, pp=2, ranks=range(2, 6)),
}
FIELDS = {
    "tp": ["tp"],
    "cp": ["cp"],
    "dp": ["dp"],
    "pp": ["pp"],
    "mp": ["tp", "pp"],
    "tp_cp": ["tp", "cp"],
    "dp_cp": ["cp", "dp"],
}


def made_by_megatron():
    """Make the grids, groups and collections as Megatron's training scripts do."""
    own = {}
    for name, layout in LAYOUTS.items():
        sizes = [layout.tp, layout.cp, layout.dp, layout.pp]
        grid = HyperCommGrid(
            sizes, ["tp", "cp", "dp", "pp"], rank_offset=layout.ranks[0], backend="gloo"
        )
        groups = {field: grid.create_pg(dims) for field, dims in FIELDS.items()}
        if dist.get_rank() in layout.ranks:
            own[name] = process_groups_config.ProcessGroupCollection(**groups)
    return process_groups_config.MultiModuleProcessGroupCollection(
        own, "llm" if "llm" in own else None
    )


def rank_for_rank():
    dist.init_process_group("gloo")
    with opened(LAYOUTS) as groups:
        many = len(torch_private.known_groups())
        modules = to_modules(groups, language_model="llm")
        ours = from_modules(modules)
        assert [*ours] == [name for name, pg in groups.items() if pg is not None]
        assert all(pg is groups[name] for name, pg in ours.items())
        for name, layout in LAYOUTS.items():
            for grid in to_grid(groups[name] or layout):
                held = grid._pgs.values()
                assert bool(held) is (name in ours)
                assert (grid.rank_offset, grid.size) == (layout.ranks[0], layout.world_size)
        assert len(torch_private.known_groups()) == many
        with pytest.raises(LayoutError, match=r"'lm' is not among the modules \(vision, audio, l"):
            to_modules(groups, language_model="lm")
        with pytest.raises(LayoutError, match=r"this rank is in no module \(vision\)"):
            to_modules({"vision": None})

        megatrons = made_by_megatron()
        assert isinstance(modules, type(megatrons))
        assert repr(modules) == repr(megatrons)
        assert [*modules.keys()] == [*megatrons.keys()]
        if megatrons.has_language_model():
            sizes = [each.get_language_model_cp_size() for each in (modules, megatrons)]
            assert sizes == [1, 1]
        many = len(torch_private.known_groups())
        for name, theirs in from_modules(megatrons).items():
            assert {*theirs.present()} == {*FIELDS}
            for field in FIELDS:
                assert theirs.ranks(field) == ours[name].ranks(field), (name, field)
                assert getattr(theirs, field) is getattr(megatrons[name], field), (name, field)
        assert len(torch_private.known_groups()) == many
    with pytest.raises(StaleGroupError):
        to_modules(groups)
    total = torch.ones(1)  # the session does not end groups that it borrowed from Megatron
    dist.all_reduce(total, group=next(iter(megatrons)).mp)
    assert total == megatrons[next(iter(modules.keys()))].mp.size()
    dist.destroy_process_group()
    return True


@needs_modules
def test_the_groups_of_each_module_are_those_that_megatron_makes():
    assert all(run_distributed(rank_for_rank, 6, deadline=120))


# --- trained --------------------------------------------------------------------------------------

STEPS, MICROBATCHES, LENGTH, SAMPLES, WIDTH, LAYERS = 3, 4, 2, 4, 8, 2
NAMES = ("vision", "llm")


class Layer(torch.nn.Module):
    """A layer with weights that depend only on its place in the module."""

    def __init__(self, seed, config, pg):
        super().__init__()
        self.up, self.down = linears(pg, config, WIDTH, 2 * WIDTH)
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        whole_ones = [draw(2 * WIDTH, WIDTH), draw(2 * WIDTH), draw(WIDTH, 2 * WIDTH), draw(WIDTH)]
        with torch.no_grad():
            for mine, whole in zip(self.parameters(), whole_ones, strict=True):
                mine.copy_(part_of(whole, mine.shape, pg) / 4)

    def forward(self, values):
        hidden, _ = self.up(values)
        return values + self.down(torch.nn.functional.gelu(hidden))[0]


def part_of(whole, shape, pg):
    """Return this rank's shard of a weight of that shape, as Megatron shards it over tp."""
    for dim, (large, small) in enumerate(zip(whole.shape, shape, strict=True)):
        if large != small:
            return whole.chunk(pg.size("tp"), dim)[pg.rank("tp")]
    return whole


class Module(torch.nn.Module):
    """This rank's part of a module: the layers of its pipeline stage."""

    def __init__(self, name, config, pg):
        super().__init__()
        self.name, self.config, self.pg = name, config, pg
        self.ends = pg.rank("pp") == pg.size("pp") - 1
        each = LAYERS // pg.size("pp")
        seeds = [100 * NAMES.index(name) + layer for layer in range(LAYERS)]
        self.first = each * pg.rank("pp")
        mine = seeds[self.first :][:each]
        self.layers = torch.nn.Sequential(*(Layer(seed, config, pg) for seed in mine))
        self.received = None

    def set_input_tensor(self, received):
        (self.received,) = received

    def forward(self, batch):
        values = batch
        if self.received:
            (values,) = self.received.values()  # from vision, or from the previous stage
        return self.layers(values[0] if isinstance(values, list) else values)

    def step(self):
        for parameter in self.parameters():
            if self.pg.size("dp") > 1:
                dist.all_reduce(parameter.grad, group=self.pg.dp)
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
            parameter.grad = None


def batches(step):
    torch.manual_seed(1000 + step)
    return torch.randn(MICROBATCHES, LENGTH, SAMPLES, WIDTH, dtype=torch.float64)


def loss_of(output):
    """Return the loss over all samples of dp, as the gradients are summed over dp."""
    return output.square().sum() / (LENGTH * SAMPLES * WIDTH)


def configured(tp=1):
    return ModelParallelConfig(
        tensor_model_parallel_size=tp,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        variable_seq_lengths=True,
        perform_initialization=False,
    )


def plain():
    """Train both modules in this process; return the losses and the final weights."""
    me = dist.get_rank()
    with megapg.session(ranks=(me,), name=f"alone on {me}") as session:
        modules = [Module(name, configured(), session.groups) for name in NAMES]
        losses = []
        for step in range(STEPS):
            for batch in batches(step):
                values = batch
                for module in modules:
                    values = module(values)
                loss = loss_of(values)
                (loss / MICROBATCHES).backward()
                losses.append(loss.item())
            for module in modules:
                module.step()
        weights = {
            module.name: [
                [parameter.detach() for parameter in layer.parameters()] for layer in module.layers
            ]
            for module in modules
        }
    return losses, weights


def forward_step(iterator, module):
    batch = next(iterator)
    pg = module.pg
    if module.name == "vision":
        batch = batch.chunk(pg.size("dp"), dim=1)[pg.rank("dp")]
    output = module(batch)
    if module.name == "llm" and module.ends:
        return output, lambda values: ((loss := loss_of(values)), loss.item())
    return {module.name: output}, None


def in_stages(layouts, expected, weights, same):
    """Train with Megatron's schedule for several modules; return the number of losses seen."""
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
    from megatron.core.pipeline_parallel.multimodule_communicator import (
        MultiModulePipelineCommunicator,
    )
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving as schedule,
    )

    with opened(layouts) as groups:
        collection = to_modules(groups, language_model="llm")
        ((name, pg),) = from_modules(collection).items()
        module = Module(name, configured(pg.size("tp")), pg)
        many = len(torch_private.known_groups())
        communicator = MultiModulePipelineCommunicator(
            {name: to_grid(groups[name] or layout)[0] for name, layout in layouts.items()},
            {"vision": ["llm"], "llm": []},
            module.config,
            dim_mapping={"s": 0, "b": 1, "h": 2},
        )
        losses = []
        for step in range(STEPS):
            losses += schedule(
                forward_step_func=forward_step,
                data_iterator=iter(batches(step)),
                model=module,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=SAMPLES,
                p2p_communicator=communicator,
                pg_collection=collection,
            )
            module.step()
        if losses:
            total = torch.tensor(losses, dtype=torch.float64)
            dist.all_reduce(total, group=pg.dp)
            same(total, torch.tensor(expected, dtype=torch.float64))
        mine = weights[name][module.first :][: len(module.layers)]
        for layer, whole in zip(module.layers, mine, strict=True):
            for got, want in zip(layer.parameters(), whole, strict=True):
                same(got.detach(), part_of(want, got.shape, pg))
        # Megatron keeps its groups between the modules for the next user.
        BridgeCommunicator.destroy_broadcast_pgs()
        getattr(BridgeCommunicator, "destroy_bridge_pgs", lambda: None)()  # only in 0.19
        assert len(torch_private.known_groups()) == many
        pg.require()
    return len(losses)


TRAINED = {
    # Two stages each: all numbers are computed as in one process, so all bits are equal.
    "pp to pp": ({"pp": 2}, {"pp": 2}, 0),
    # Other layouts split sums, so that float64 rounds differently, by about 1e-16.
    "dp to tp": ({}, {"tp": 2}, 1e-12),
    "tp to dp": ({"tp": 2}, {}, 1e-12),
}


def trained():
    dist.init_process_group("gloo")
    seen = []
    with megatron_on_cpu():
        expected, weights = plain()
        assert len({*expected}) == STEPS * MICROBATCHES
        for case, (vision, llm, tolerance) in TRAINED.items():
            layouts = {
                "vision": ParallelLayout(world_size=2, ranks=range(2), **vision),
                "llm": ParallelLayout(world_size=2, ranks=range(2, 4), **llm),
            }

            def told(text, case=case):
                return f"{case}: {text}"

            same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, msg=told)
            seen.append(in_stages(layouts, expected, weights, same))
    dist.destroy_process_group()
    return seen


@needs_modules
def test_two_modules_on_different_ranks_train_as_in_one_process():
    all_of_them = STEPS * MICROBATCHES
    last, both = [0, 0, 0, all_of_them], [0, 0, all_of_them, all_of_them]
    seen = run_distributed(trained, 4, deadline=240)
    assert [*zip(*seen, strict=True)] == [*map(tuple, (last, both, both))]
