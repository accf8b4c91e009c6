"""Move the weights of real Megatron-core models into other layouts, over gloo."""

import shutil
import zlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import megapg
from megapg.layout import ParallelLayout
from megapg.testing import megatron_on_cpu, run_distributed

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


def to_hugging_face(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with megatron_on_cpu():
        if rank < 2:
            with session("train", range(2), tp=2) as source:
                model = build(source.groups)
                fill(model, source.groups, 1)
                gives = megapg.slices_of(model, pg_collection=source.groups)
                megapg.Refit(dist.group.WORLD, gives=gives, bucket_bytes=BUCKET).run()
                megapg.save_checkpoint(folder, 1, model=model, pg_collection=source.groups)
                dist.barrier()
        else:
            with session("serve", [2]) as target:
                pg = target.groups
                rollout = {name: torch.zeros_like(t) for name, t in hugging_face(build(pg)).items()}
                takes = megapg.slices_of(rollout)
                refit = megapg.Refit(
                    dist.group.WORLD, takes=takes, names=NAMES(), bucket_bytes=BUCKET
                )
                report = refit.run()
                assert report.received == sum(tensor.nbytes for tensor in rollout.values())
                dist.barrier()
                reference = build(pg)
                megapg.load_checkpoint(folder, model=reference, pg_collection=pg, weights_only=True)
                expected = hugging_face(reference)
                assert len(expected) == 3 + 9 * LAYERS
                assert [n for n, t in rollout.items() if not torch.equal(t, expected[n])] == []
    dist.destroy_process_group()


def test_one_rank_with_the_names_of_hugging_face(tmp_path):
    run_distributed(partial(to_hugging_face, tmp_path / "saved"), 3, preload=PRELOAD)
