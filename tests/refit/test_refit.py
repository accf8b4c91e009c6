"""Move the weights of real Megatron-core models into other layouts, over gloo."""

import contextlib
import io
import os
import runpy
import shutil
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from ports import free_port

import megapg
from megapg import Part
from megapg.errors import RankFailedError, RefitError
from megapg.layout import ParallelLayout
from megapg.testing import megatron_on_cpu, run_distributed
from megapg.tools.parity.built_in import gpt

pytestmark = pytest.mark.contract

LAYERS, HIDDEN, HEADS, GROUPS, CHANNELS, FFN, VOCABULARY = 2, 32, 4, 2, 8, 48, 64
BUCKET = 4096  # bytes: every matrix is cut, and most rounds have several boxes
PRELOAD = ("torch", "torch.distributed", "megatron.core.models.gpt", "megapg.testing.cpu")


def build(pg, experts=None, groups=GROUPS):
    """Return a model like Llama: SwiGLU, grouped queries, rotary positions, nothing tied."""
    stage, stages = pg.rank("pp"), pg.size("pp")
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=CHANNELS,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        num_moe_experts=experts,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=pg.size("tp"),
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=pg.size("ep"),
        expert_tensor_parallel_size=pg.size("expt_tp"),
    )
    megapg.seed_all(1, pg)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"),
        VOCABULARY,
        16,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=pg,
    )


def fill(model, pg, mark):
    """Fill every shard with values of its own; replicas get the same values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_expert = ".experts." in name
            shard = [name, mark, pg.rank("pp")]
            if getattr(parameter, "tensor_model_parallel", False):
                shard.append(pg.rank("expt_tp" if of_expert else "tp"))
            if of_expert:
                shard.append(pg.rank("ep"))
            seed = zlib.crc32(repr(shard).encode())
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(values)


def session(name, ranks, **sizes):
    return megapg.session(ParallelLayout(world_size=len(ranks), ranks=ranks, **sizes), name=name)


def differing(source, target, folder):
    """Return the parameters of the target that differ from a checkpoint of the source."""
    if source is not None:
        model, pg = source
        megapg.save_checkpoint(folder, 1, model=model, pg_collection=pg)
    dist.barrier()
    different = []
    if target is not None:
        model, pg, reference = target
        megapg.load_checkpoint(folder, model=reference, pg_collection=pg, weights_only=True)
        pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
        different = [name for (name, mine), (_, other) in pairs if not torch.equal(mine, other)]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return different


def refitted(folder, trains, source, serves, target, **kind):
    """Refit twice between two sessions, which may share ranks."""
    rank = dist.get_rank()
    gives = takes = trained = served = None
    if rank in trains:
        pg = source.groups
        trained = build(pg, **kind), pg
        gives = megapg.slices_of(trained[0], pg_collection=pg)
        assert megapg.Slices.from_json(gives.to_json()) == gives
    if rank in serves:
        pg = target.groups
        served = build(pg, **kind), pg, build(pg, **kind)
        takes = megapg.slices_of([served[0]], pg_collection=pg)
    refit = megapg.Refit(dist.group.WORLD, gives=gives, takes=takes, bucket_bytes=BUCKET)
    for mark in (1, 2):
        if trained:
            fill(*trained, mark)
        if served:
            fill(*served[:2], "other")
        report = refit.run()
        assert report.buffer <= BUCKET
        assert differing(trained, served, folder) == []
    own = takes.described if takes else ()
    everything = sum(each.itemsize * torch.Size(each.extent).numel() for each in own)
    assert report.received + report.copied == everything
    return report


def layouts(folder):
    dist.init_process_group("gloo")
    rank, first, last, everyone = dist.get_rank(), range(2), range(2, 4), range(4)
    with megatron_on_cpu():
        for sizes, others, kind in (
            ({"tp": 2}, {"pp": 2}, {}),
            ({"ep": 2}, {"tp": 2}, {"experts": 4}),
        ):
            with (
                session("train", first, **sizes)
                if rank < 2
                else session("serve", last, **others) as it
            ):
                report = refitted(folder, first, it, last, it, **kind)
                assert report.copied == 0
        with (
            session("serve", everyone, tp=4) as target,
            session("train", first) if rank < 2 else session("idle", last) as source,
        ):
            report = refitted(folder, first, source, everyone, target, groups=HEADS)
            assert rank >= 2 or report.received == 0
    dist.destroy_process_group()


def test_weights_reach_another_layout(tmp_path):
    run_distributed(partial(layouts, tmp_path / "saved"), 4, preload=PRELOAD)


# --- other models ---------------------------------------------------------------------------------


def tied(folder):
    """Two chunks on each of two stages, whose ends share the embedding, to tensor parallelism."""
    dist.init_process_group("gloo")
    trains = dist.get_rank() < 2
    sizes = {"pp": 2, "vpp": 2} if trains else {"tp": 2}
    with (
        megatron_on_cpu(),
        session("one", range(2) if trains else range(2, 4), **sizes) as it,
        megapg.published(it.groups),  # Megatron-core logs ranks of the globals
    ):
        pg = it.groups
        megapg.seed_all(1 + trains, pg)
        model = [gpt(pg, stage) for stage in range(2)] if trains else gpt(pg)
        slices = megapg.slices_of(model, pg_collection=pg)
        megapg.Refit(dist.group.WORLD, **{"gives" if trains else "takes": slices}).run()
        source, target = ((model, pg), None) if trains else (None, (model, pg, gpt(pg)))
        assert differing(source, target, folder) == []
    dist.destroy_process_group()


def test_tied_embeddings_and_several_chunks(tmp_path):
    run_distributed(partial(tied, tmp_path / "saved"), 4, preload=PRELOAD)


def late():
    """The trainer's ranks gather their weights in the next forward pass, or in the refit."""
    dist.init_process_group("gloo")
    with megatron_on_cpu(), session("one", range(2)) as it:
        pg = it.groups
        model, target = build(pg), build(pg)
        takes = megapg.slices_of(target, pg_collection=pg)
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
        wrapped = DistributedDataParallel(model.config, options, model, pg_collection=pg)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=0.1, use_distributed_optimizer=True, overlap_param_gather=True),
            [wrapped],
            use_gloo_process_groups=False,
            pg_collection=pg,
        )
        for parameter in model.parameters():
            parameter.main_grad.fill_(1)
        gives = megapg.slices_of([wrapped], pg_collection=pg)
        refit = megapg.Refit(dist.group.WORLD, gives=gives, takes=takes)
        optimizer.step()
        mixed = [each.detach().clone() for each in model.parameters()]
        refit.run()
        found = [each.detach().clone() for each in target.parameters()]
        assert not all(map(torch.equal, mixed, found))
        assert all(map(torch.equal, model.parameters(), found))
    dist.destroy_process_group()
    return found


def test_weights_that_are_not_gathered_yet():
    first, second = run_distributed(late, 2, preload=PRELOAD)
    assert all(map(torch.equal, first, second))


# --- a rollout with Hugging Face's names ----------------------------------------------------------

NAMES = partial(
    megapg.llama_names,
    layers=LAYERS,
    hidden=HIDDEN,
    heads=HEADS,
    query_groups=GROUPS,
    head_dim=CHANNELS,
    intermediate=FFN,
    vocabulary=VOCABULARY,
)


def test_the_default_of_head_dim():
    assert NAMES(head_dim=None) == NAMES(head_dim=HIDDEN // HEADS)


def hugging_face(model):
    """Return the weights of a one-rank model as Hugging Face's Llama has them."""
    state = dict(model.named_parameters())
    found = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(LAYERS):
        own, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = state[f"{own}self_attention.linear_qkv.weight"]
        grouped = qkv.view(GROUPS, HEADS // GROUPS + 2, CHANNELS, HIDDEN)
        q, k, v = grouped.split((HEADS // GROUPS, 1, 1), dim=1)
        gate, up = state[f"{own}mlp.linear_fc1.weight"].chunk(2)
        found |= {
            f"{theirs}self_attn.q_proj.weight": q.reshape(-1, HIDDEN),
            f"{theirs}self_attn.k_proj.weight": k.reshape(-1, HIDDEN),
            f"{theirs}self_attn.v_proj.weight": v.reshape(-1, HIDDEN),
            f"{theirs}self_attn.o_proj.weight": state[f"{own}self_attention.linear_proj.weight"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": state[f"{own}mlp.linear_fc2.weight"],
            f"{theirs}input_layernorm.weight": state[f"{own}input_layernorm.weight"],
            f"{theirs}post_attention_layernorm.weight": state[f"{own}pre_mlp_layernorm.weight"],
        }
    return {name: tensor.detach() for name, tensor in found.items()}


def to_hugging_face(folder, address, ports):
    """The rollout is another job, with a WORLD of one rank."""
    rank = int(os.environ["RANK"])
    trains = rank < 2
    launch = megapg.Launch(
        rank=rank % 2, world_size=2 if trains else 1, address="127.0.0.1", port=ports[not trains]
    )
    sizes = {"trainer": 2, "rollout": 1}
    side = "trainer" if trains else "rollout"
    with (
        megatron_on_cpu(),
        megapg.session(tp=2 if trains else 1, launch=launch) as session,
        megapg.joint_group("weights", side=side, sizes=sizes, store=address) as joint,
    ):
        pg = session.groups
        model = build(pg)
        if trains:
            fill(model, pg, 1)
            gives = megapg.slices_of(model, pg_collection=pg)
            report = megapg.Refit(joint.group, gives=gives, bucket_bytes=BUCKET).run()
            megapg.save_checkpoint(folder, 1, model=model, pg_collection=pg)
            joint.check()
            return report.sent
        rollout = {name: torch.zeros_like(each) for name, each in hugging_face(model).items()}
        refit = megapg.Refit(
            joint.group, takes=megapg.slices_of(rollout), names=NAMES(), bucket_bytes=BUCKET
        )
        report = refit.run()
        assert report.received == sum(tensor.nbytes for tensor in rollout.values())
        joint.check()
        megapg.load_checkpoint(folder, model=model, pg_collection=pg, weights_only=True)
        expected = hugging_face(model)
        assert len(expected) == 3 + 9 * LAYERS
        assert [n for n, tensor in rollout.items() if not torch.equal(tensor, expected[n])] == []
        return report.received


def test_one_rank_of_another_job_with_the_names_of_hugging_face(tmp_path):
    with megapg.SharedStore("127.0.0.1") as store:
        ports = free_port(), free_port()
        run = partial(to_hugging_face, tmp_path / "saved", store.address, ports)
        first, second, received = run_distributed(run, 3, preload=PRELOAD)
    assert first + second == received
    assert abs(first - second) < received / 10  # replicas share the work


def example(folder):
    script = folder / "weights.py"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def test_the_example_of_the_guide(tmp_path):
    page = (Path(__file__).parents[2] / "migration_guide/rl-framework.md").read_text()
    section = page.partition("## Weights to the rollout")[2]
    (tmp_path / "weights.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    printed = run_distributed(partial(example, tmp_path), 3, preload=PRELOAD)
    sent = [int(each.split(" sent ")[1].split()[0]) for each in printed]
    assert sent[2] == 0
    assert f"received {sent[0] + sent[1]} bytes" in printed[2]


# --- tensors of every kind ------------------------------------------------------------------------


def every_kind(bucket):
    dist.init_process_group("gloo")
    whole = torch.arange(300.0 * 400).view(300, 400)
    weights = {
        "whole": whole,
        "strided": whole.t(),
        "cut": whole,
        "bfloat16": whole[:5, :7].bfloat16(),
        "int64": torch.arange(9),
        "bool": torch.tensor([True, False, True]),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "of another type": torch.arange(3, dtype=torch.uint8),
    }
    # Two ranks give; the third takes some, into tensors with other strides.
    takes = dist.get_rank() == 2
    targets = {name: torch.full_like(each, 0) for name, each in weights.items()}
    targets["strided"] = torch.zeros(400, 600)[:, ::2]
    targets |= {"columns": torch.zeros(300, 101), "rows": torch.zeros(200, 400)}
    del targets["cut"]
    names = {
        "columns": [Part("cut", (0, 299), (0, 0), (300, 101))],
        "rows": [Part("cut", (100, 0), (0, 0), (200, 400))],
    }
    refit = megapg.Refit(
        dist.group.WORLD,
        gives=None if takes else megapg.slices_of(weights),
        takes=megapg.slices_of(targets) if takes else None,
        names=names if takes else None,
        bucket_bytes=bucket,
    )
    report = refit.run()
    assert report.buffer <= bucket
    if takes:
        expected = {**weights, "columns": whole[:, 299:], "rows": whole[100:]}
        assert [n for n, t in targets.items() if not torch.equal(t, expected[n])] == []
    dist.destroy_process_group()
    return report


@pytest.mark.torch
@pytest.mark.smoke
def test_tensors_of_every_kind():
    """A large box is one message. If it is contiguous, it needs no buffer."""
    for bucket in (1 << 12, 1 << 20):
        reports = run_distributed(partial(every_kind, bucket), 3)
        first, second, last = reports
        assert first.sent + second.sent == last.received
        assert abs(first.sent - second.sent) < last.received / 2
        assert last.buffer < last.received / 2
    assert second.rounds < 10


# --- errors ---------------------------------------------------------------------------------------


def refused(error, **arguments):
    """Expect an error of the constructor on this rank."""
    with pytest.raises(RefitError, match=error):
        megapg.Refit(dist.group.WORLD, **arguments)


def wrong_arguments():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    gives = dist.get_rank() == 0
    side = "gives" if gives else "takes"
    weights = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    slices = megapg.slices_of(weights)
    # Both ranks get the error, also the one whose arguments are right.
    refused(
        "^v: .* no rank gives it",
        **{side: slices if gives else megapg.slices_of({"v": weights["w"]})},
    )
    refused(
        "rank 1 of the group: takes has no tensors",
        **{side: slices if gives else megapg.Slices.from_json(slices.to_json())},
    )
    refused("rank 1 of the group: takes is a dict", **{side: slices if gives else weights})
    refused(
        "rank 0 of the group: bucket_bytes=0", **{side: slices, "bucket_bytes": 0 if gives else 64}
    )
    refused(
        "bucket_bytes is 128 on rank 0 of the group and 64 on rank 1",
        **{side: slices, "bucket_bytes": 128 if gives else 64},
    )
    refused("no rank of the group has takes=", **({"gives": slices} if gives else {}))
    with pytest.raises(RefitError, match="group is None"):
        megapg.Refit(None, gives=slices)
    # One rank runs the old object, and the other makes a new one.
    refit = megapg.Refit(dist.group.WORLD, **{side: slices}, bucket_bytes=64)
    if gives:
        refused("rank 1 of the group does not make a Refit now", gives=slices)
    else:
        with pytest.raises(RefitError, match="rank 0 of the group: it makes a new Refit"):
            refit.run()
    # A tensor that is another one than before.
    if not gives:
        weights["w"].data = torch.zeros(3, 2)
    with pytest.raises(RefitError, match=r"rank 1 .*: w was float32 .*\[2, 3\], and is .*\[3, 2\]"):
        refit.run()
    if not gives:
        weights["w"].data = torch.zeros(2, 3)  # other memory
    report = refit.run()
    assert torch.equal(weights["w"], torch.arange(6.0).view(2, 3))
    assert weights["b"].dtype == torch.bfloat16
    assert (report.sent, report.received) == ((28, 0) if gives else (0, 28))
    # Tensors that no copy can write through.
    with pytest.raises(RefitError, match="w is a meta tensor"):
        megapg.slices_of({"w": torch.empty(1, device="meta")})
    with pytest.raises(RefitError, match="int is no Megatron-core model"):
        megapg.slices_of(1)
    dist.destroy_process_group()


def test_wrong_arguments_of_one_rank_reach_all():
    run_distributed(wrong_arguments, 2)


def absent(phase, done):
    """Rank 1 does not run, or dies in the middle. Rank 0 returns its error and its wait."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    weights = {"w": torch.zeros(1 << 16)}
    side = "takes" if dist.get_rank() else "gives"
    refit = megapg.Refit(dist.group.WORLD, **{side: megapg.slices_of(weights)}, bucket_bytes=4096)
    if dist.get_rank():
        if phase == "dies":
            refit._round = lambda *_: os._exit(0)
            refit.run()
        while not done.exists():
            time.sleep(0.05)
        return None
    started = time.monotonic()
    with pytest.raises(RefitError) as caught:
        refit.run()
    waited = time.monotonic() - started
    with pytest.raises(RefitError, match="failed before"):
        refit.run()
    done.touch()
    return str(caught.value), waited


@pytest.mark.torch
@pytest.mark.parametrize(
    ("phase", "message"),
    [("does not run", "waiting for all ranks"), ("dies", "moving weights")],
)
def test_an_absent_rank_ends_the_refit_within_the_timeout(tmp_path, phase, message):
    run = partial(run_distributed, partial(absent, phase, tmp_path / "done"), 2)
    if phase == "dies":
        with pytest.raises(RankFailedError) as caught:
            run()
        text, waited = caught.value.results[0]
    else:
        text, waited = run()[0]
    assert text.startswith(f"refit on rank 0 of 2: {message}")
    assert waited < 15
