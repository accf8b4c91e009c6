"""The jobs of a chain: a small Megatron-core GPT that trains, on one layout after the other.

A :class:`Chain` names the model, the optimizer and the layouts. A :class:`Job` is
one rank's part of it on one layout: model, optimizer, scheduler and Megatron-core's schedule.
"""

import contextlib
import functools
import hashlib
import random
import sys
from dataclasses import dataclass, replace

import torch
from fused_adam import fused, offloading
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import megapg
from megapg.megatron import core_version, schedule_collection
from megapg.testing import megatron_on_cpu
from megapg.tools.demo import gpt

VOCABULARY, SEQ_LENGTH, HIDDEN, HEADS = 64, 8, 16, 4
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STEP = ("step", "default_config")


@dataclass(frozen=True)
class Layout:
    """The sizes of a layout, on the first ``world`` ranks."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    expt_tp: int | None = None

    @property
    def sizes(self):
        """Return the arguments of ``megapg.session``."""
        names = ("tp", "pp", "vpp", "cp", "ep")
        return {"expt_tp": self.expt_tp or self.tp} | {name: getattr(self, name) for name in names}

    def __repr__(self):
        plain = Layout()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return f"Layout({', '.join(words)})"


@dataclass(frozen=True)
class Chain:
    """A training, and its layouts: A, then B, then C, then A again.

    Attributes:
        model: "dense", "gqa", "moe", "moe some" (experts in every other layer) or "mtp".
        trains: the parameters that train, a name of :data:`TRAINS`.
        optimizer: a name of :data:`OPTIMIZERS`.
        form: "plain" is no distributed optimizer; the others are forms of its state.
        explicit: save and load with the collection alone; Megatron's globals are not set.
        decoupled: the embeddings have another learning rate.
        keep: how many checkpoints a save keeps.
    """

    layouts: tuple[Layout, ...]
    model: str = "dense"
    layers: int = 2
    tied: bool = False
    trains: str = "all"
    optimizer: str = "adamw"
    dtype: str = "fp32"
    form: str = "fully_reshardable"
    explicit: bool = False
    decoupled: bool = False
    keep: int | None = None

    @property
    def distributed(self):
        return self.form != "plain"

    def __repr__(self):
        plain = Chain(())
        changed = [(k, v) for k, v in vars(self).items() if v != getattr(plain, k)]
        return f"Chain({', '.join(f'{k}={v!r}' for k, v in changed)})"


# -- the model -------------------------------------------------------------------------------------


def transformer_config(chain, layout):
    half = _HALF.get(chain.dtype, torch.float32)
    more = {}
    if chain.model == "gqa":
        more["num_query_groups"] = 2
    if chain.model.startswith("moe"):
        more |= {
            "num_moe_experts": 4,
            "add_bias_linear": False,  # Megatron-core refuses it with tensor-parallel experts
            "sequence_parallel": layout.tp > 1,  # and demands this there
            "moe_token_dispatcher_type": "alltoall",
            # A module global would keep the balancing losses, and so the groups.
            "moe_router_load_balancing_type": "none",
        }
    if chain.model == "moe some":
        more["moe_layer_freq"] = [layer % 2 for layer in range(chain.layers)]
    if chain.model == "mtp":
        more["mtp_num_layers"] = 1
    if chain.layers % 2 and layout.pp == 2:
        more["num_layers_in_first_pipeline_stage"] = 1
    return TransformerConfig(
        num_layers=chain.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.sizes["expt_tp"],
        pipeline_dtype=half,
        params_dtype=half,
        bf16=chain.dtype == "bf16",
        fp16=chain.dtype == "fp16",
        masked_softmax_fusion=False,
        # With two interleaved stages, batched p2p pairs messages wrongly on gloo.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        **more,
    )


def build_model(chain, layout, config, pg, stage):
    """Return one chunk of this rank's stage; frozen parameters are marked."""
    place = {"vp_stage": stage if layout.vpp else None, "pp_rank": pg.rank("pp")}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **place)
    mtp = None
    if chain.model == "mtp":
        layer = spec.layer_specs[-1] if spec.layer_specs else spec
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, **place)
    first, last = pg.rank("pp") == 0, pg.rank("pp") == layout.pp - 1
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LENGTH,
        pre_process=first and stage == 0,
        post_process=last and stage == (layout.vpp or 1) - 1,
        share_embeddings_and_output_weights=chain.tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        pg_collection=pg,
        vp_stage=place["vp_stage"],
    )
    if "adapters" in chain.trains:
        add_adapters(model, chain)
    freeze(model, chain)
    return model


class Adapter(torch.nn.Module):
    """Two small matrices next to an MLP, equal on all tensor-parallel ranks."""

    def __init__(self, layer):
        super().__init__()
        draw = torch.Generator().manual_seed(layer)
        self.down = torch.nn.Parameter(torch.randn(2, HIDDEN, generator=draw) / 4)
        self.up = torch.nn.Parameter(torch.randn(HIDDEN, 2, generator=draw) / 4)

    def forward(self, hidden):
        return hidden @ self.down.T @ self.up.T


def add_adapters(model, chain):
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        if chain.trains == "adapters in some layers" and number % 2:
            continue
        layer.adapter = Adapter(number)
        for parameter in layer.adapter.parameters():  # so that their gradients are summed over tp
            parameter.sequence_parallel = model.config.sequence_parallel
        layer.mlp.register_forward_hook(functools.partial(_adapted, layer.adapter))


def _adapted(adapter, _module, args, result):
    output, bias = result
    return output + adapter(args[0]), bias


def freeze(model, chain):
    """Mark the parameters that train, by the layer's number in the whole model."""
    trains = TRAINS[chain.trains]
    numbers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        part = name.split(".")
        layer = numbers[int(part[2])] if name.startswith("decoder.layers.") else None
        parameter.requires_grad_(bool(trains(name, layer, chain)))


def _head(name, layer, chain):
    return (
        "final_layernorm" in name
        or "output_layer" in name
        or (chain.tied and "word_embeddings" in name)
    )


TRAINS = {
    "all": lambda name, layer, chain: True,
    "head": _head,
    "first half": lambda name, layer, chain: (
        "word_embeddings" in name and not chain.tied if layer is None else layer < chain.layers // 2
    ),
    "one layer": lambda name, layer, chain: layer == chain.layers - 1,
    "norms": lambda name, layer, chain: "layernorm" in name,
    "experts": lambda name, layer, chain: ".experts." in name,
    "adapters in all layers": lambda name, layer, chain: ".adapter." in name,
    "adapters in some layers": lambda name, layer, chain: ".adapter." in name,
}


# -- the optimizer ---------------------------------------------------------------------------------

_AWARE = {"use_precision_aware_optimizer": True}
_16 = torch.float16
OPTIMIZERS = {
    # name: which stand-in there is, and the settings
    "adamw": (None, {}),
    "adam": (None, {"decoupled_weight_decay": False}),
    "sgd": (None, {"optimizer": "sgd"}),
    "layer wise": (None, {}),  # as Muon has it, around AdamW
    "te": ("te", {}),
    "te main": ("te-main", {}),
    "apex": ("apex", {}),
    "te sgd": ("te", {"optimizer": "sgd"}),
    "aware": ("te", _AWARE),
    "aware whole": ("te", {**_AWARE, "store_param_remainders": False}),
    "aware bf16": (
        "te",
        {**_AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    ),
    "aware fp16": (
        "te",
        {**_AWARE, "exp_avg_dtype": _16, "exp_avg_sq_dtype": _16, "main_params_dtype": _16},
    ),
    "aware fp8": (
        "te",
        {**_AWARE, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ),
    "offload": ("te", {**_AWARE, "optimizer_cpu_offload": True}),
    "offload all": (
        "te",
        {**_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
    ),
    "offload half": (
        "te",
        {**_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
}


@contextlib.contextmanager
def parts_in_place(chain):
    """Let Megatron-core run on the CPU, with the stand-ins of this chain."""
    kind, settings = OPTIMIZERS[chain.optimizer]
    with contextlib.ExitStack() as stack:
        if settings.get("optimizer_cpu_offload"):
            stack.enter_context(offloading())
        stack.enter_context(megatron_on_cpu())
        if kind:
            stack.enter_context(fused(kind))
        yield


def optimizer_config(chain):
    _, settings = OPTIMIZERS[chain.optimizer]
    return OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 0.02,
            "min_lr": 0.002,
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "decoupled_lr": 0.04 if chain.decoupled else None,
            "bf16": chain.dtype == "bf16",
            "fp16": chain.dtype == "fp16",
            "initial_loss_scale": 2.0**8,
            "params_dtype": _HALF.get(chain.dtype, torch.float32),
            "use_distributed_optimizer": chain.distributed,
            **settings,
        }
    )


# -- one rank's part -------------------------------------------------------------------------------


class Job:
    """One rank's model, optimizer, scheduler and schedule; ``seed`` chooses the weights."""

    def __init__(self, chain, layout, pg, seed):
        self.chain, self.layout, self.pg = chain, layout, pg
        gpt._seed(seed + 100 * pg.rank("pp"), pg)
        config = transformer_config(chain, layout)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=chain.distributed, grad_reduce_in_fp32=chain.dtype != "fp32"
        )
        self.chunks = []
        for stage in range(layout.vpp or 1):
            model = build_model(chain, layout, config, pg, stage)
            if chain.dtype != "fp32":
                model = Float16Module(config, model)
            self.chunks.append(
                DistributedDataParallel(
                    config, ddp_config, model, disable_bucketing=stage > 0, pg_collection=pg
                )
            )
        config.no_sync_func = (
            [each.no_sync for each in self.chunks] if layout.vpp else self.chunks[0].no_sync
        )
        config.finalize_model_grads_func = finalize_model_grads
        settings = optimizer_config(chain)
        self.optimizer = get_megatron_optimizer(
            settings, self.chunks, use_gloo_process_groups=False, pg_collection=pg
        )
        if chain.optimizer == "layer wise":
            parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
            self.optimizer = LayerWiseDistributedOptimizer(parts, settings, pg)
        config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.002,
            max_lr=0.02,
            min_lr=0.002,
            lr_warmup_steps=3,
            lr_decay_steps=50,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.02,
            wd_incr_steps=50,
            wd_incr_style="linear",
        )
        self.forward_backward = functools.partial(
            get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp),
            forward_step_func=gpt._forward_step,
            model=self.chunks,
            num_microbatches=layout.pp,
            seq_length=SEQ_LENGTH,
            micro_batch_size=1,
            pg_collection=schedule_collection(pg),
            p2p_communicator=P2PCommunicator(pg.pp, config),
        )

    def step(self, number):
        """Train a step; return the mean loss and the norm of the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [self._batches(number) for _ in self.chunks]
        reported = self.forward_backward(data_iterator=batches if self.layout.vpp else batches[0])
        success, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return gpt.mean_over_job(reported, self.pg.pp, self.pg.dp), success, norm

    def _batches(self, number):
        positions = torch.arange(SEQ_LENGTH)[None]
        for batch in range(self.layout.pp):
            draw = random.Random(f"{number}/{batch}/{self.pg.rank('dp')}")
            tokens = [draw.randrange(VOCABULARY) for _ in range(SEQ_LENGTH + 1)]
            whole = torch.tensor([tokens])
            yield whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), positions

    def save(self, directory, iteration):
        return megapg.save_checkpoint(
            directory,
            iteration,
            model=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            pg_collection=self.pg,
            optimizer_sharding="fully_reshardable"
            if not self.chain.distributed
            else self.chain.form,
            keep=self.chain.keep,
            timeout=30,
        )

    def load(self, directory):
        return megapg.load_checkpoint(
            directory,
            model=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            pg_collection=self.pg,
            timeout=30,
        )

    def weights(self):
        """Return name -> digest of this rank's weights and buffers."""
        return {
            f"{number}.{name}": digest(tensor)
            for number, chunk in enumerate(self.chunks)
            for name, tensor in chunk.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def state(self):
        """Return name -> value of what this rank has, tensors as digests."""
        return {**self.weights(), **self._optimizer_state(), **self._scheduler_state()}

    def traits(self):
        """Return the traits of each parameter group, without the values that training changes."""
        left = ("params", "lr", "weight_decay", *_STEP)
        return [
            {k: v for k, v in group.items() if k not in left and not _is_class(v)}
            for inner in self._inner()
            for group in inner.param_groups
        ]

    def _inner(self):
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        found = (getattr(part, "optimizer", None) for part in parts)
        return [inner for inner in found if inner is not None]

    def _optimizer_state(self):
        state = {}
        for index, inner in enumerate(self._inner()):
            fused_one = hasattr(inner, "get_unscaled_state")
            counts = hasattr(inner, "adam_w_mode")  # a fused Adam has its step in the group
            for number, group in enumerate(inner.param_groups):
                place = f"optimizer{index}.group{number}"
                left = ("params", *(_STEP[1:] if counts and group["params"] else _STEP))
                state |= {
                    f"{place}.{k}": v
                    for k, v in group.items()
                    if k not in left and not _is_class(v)
                }
                for order, parameter in enumerate(group["params"]):
                    spot = f"{place}.{order}"
                    state[f"{spot}.main"] = digest(parameter)
                    for name in inner.state.get(parameter, {}):
                        value = inner.state[parameter][name]
                        if fused_one:
                            value = inner.get_unscaled_state(parameter, name)
                        state[f"{spot}.{name}"] = digest(value)
        for index, part in enumerate(
            getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        ):
            if scaler := getattr(part, "grad_scaler", None):
                state |= {f"scaler{index}.{k}": digest(v) for k, v in scaler.state_dict().items()}
        return state

    def _scheduler_state(self):
        return {f"scheduler.{k}": v for k, v in self.scheduler.state_dict().items()}

    def let_go(self):
        gpt.let_go(self.chunks)


def _is_class(value):
    return isinstance(value, type)


def digest(value):
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().contiguous().reshape(-1)
    content = plain.view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


# -- drawing ---------------------------------------------------------------------------------------

MODELS = ("dense", "gqa", "moe", "moe some", "mtp")
DTYPES = ("fp32", "bf16", "fp16")
FORMS = ("fully_reshardable", "plain", "dp_reshardable")

_DENSE = (
    Layout(),
    Layout(2),
    Layout(2, tp=2),
    Layout(2, pp=2),
    Layout(2, cp=2),
    Layout(2, pp=2, vpp=2),
    Layout(3),
    Layout(4),
    Layout(4, tp=2),
    Layout(4, pp=2),
    Layout(4, tp=2, pp=2),
    Layout(4, tp=2, cp=2),
    Layout(4, pp=2, vpp=2),
    Layout(4, tp=4),
    Layout(4, pp=4),
)
_EXPERTS = (
    Layout(2, ep=2),
    Layout(4, ep=2),
    Layout(4, ep=4),
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, ep=2, expt_tp=1),
    Layout(4, tp=2, ep=4, expt_tp=1),
    Layout(4, pp=2, ep=2),
    Layout(2, tp=2, expt_tp=1),
)


def fits(layout, chain, trains=True):
    """True if the model can be built on this layout, and trained if asked."""
    if trains and layout.cp > 1:
        return False  # the attention of Megatron-core needs TE then
    if layout.ep > 1 and not chain.model.startswith("moe"):
        return False
    if chain.model == "gqa" and layout.tp > 2:
        return False
    if chain.model == "mtp" and chain.tied and layout.pp > 1:
        return False  # Megatron-core's own sharded_state_dict fails
    stages = layout.pp * (layout.vpp or 1)
    if chain.layers % 2:
        return stages <= 2 and layout.vpp is None
    return chain.layers % stages == 0


def trains_copies_apart(chain):
    """Say why Megatron-core trains copies of a parameter apart on the first layout; "" if not."""
    layout = chain.layouts[0]
    expt_tp = layout.sizes["expt_tp"]
    copied = layout.ep == 1 and expt_tp != layout.tp
    if chain.model.startswith("moe") and copied and core_version() < (0, 19):
        return (
            "gradients of experts are reduced over dp and not over expt_dp (see Megatron-LM #5916)"
        )
    if chain.optimizer == "offload half" and chain.tied and layout.pp > 1:
        return "one copy of the embedding is updated on the GPU and the other on the CPU"
    return ""


def draw_chain(choose):
    """Return a chain, drawn with ``choose(options)``; the first option is the simplest."""
    model = choose(MODELS)
    chain = Chain((), model=model, layers=choose((2, 4, 3)), tied=choose((False, True)))
    trains = [name for name in TRAINS if name != "experts" or model.startswith("moe")]
    # Half of the jobs train everything.
    chain = replace(chain, trains=choose(["all"] * len(trains) + trains))
    form = choose(FORMS)
    names = [name for name in OPTIMIZERS if _can_have(name, form)]
    optimizer = choose(names)
    dtype = choose(_dtypes(optimizer))
    chain = replace(chain, form=form, optimizer=optimizer, dtype=dtype)
    chain = replace(chain, explicit=choose((False, True)), decoupled=choose((False, True)))
    if model == "mtp":  # Megatron-core gives a copy of the embedding the other learning rate
        chain = replace(chain, decoupled=False)
    chain = replace(chain, keep=choose((None, 1)))
    layouts = (*_DENSE, *_EXPERTS) if model.startswith("moe") else _DENSE
    if choose((True, False)):
        layouts = [each for each in layouts if each.world < 3]
    first = choose([each for each in layouts if fits(each, chain)])
    others = [each for each in layouts if fits(each, chain, trains=False)]
    if form == "dp_reshardable" and choose((True, True, True, False)):
        # Only the data parallel size may change.
        key = replace(first, world=0, cp=1)
        others = [each for each in others if replace(each, world=0, cp=1) == key]
    return replace(chain, layouts=(first, choose(others), choose(others)))


def _dtypes(optimizer):
    if optimizer == "layer wise":
        return ("fp32",)
    return ("bf16",) if optimizer.startswith("offload") else DTYPES


def _can_have(optimizer, form):
    _, settings = OPTIMIZERS[optimizer]
    if settings.get("optimizer") == "sgd" or optimizer == "layer wise":
        return form == "plain"
    return form != "plain" or not settings.get("use_precision_aware_optimizer")


def can_run(chain):
    """True if :func:`draw_chain` could draw this chain."""
    first, *others = chain.layouts
    return (
        fits(first, chain)
        and all(fits(each, chain, trains=False) for each in others)
        and _can_have(chain.optimizer, chain.form)
        and chain.dtype in _dtypes(chain.optimizer)
        and (chain.trains != "experts" or chain.model.startswith("moe"))
    )


def seeded_chains(seed, count):
    """Return ``count`` chains; the first ones do not depend on the count."""
    return [draw_chain(random.Random(f"{seed}/{number}").choice) for number in range(count)]


def simpler(chain):
    """Yield chains with one thing simpler, the largest simplification first."""
    plain = Chain(chain.layouts)
    for name in ("model", "trains", "optimizer", "form", "dtype", "tied", "decoupled", "explicit"):
        yield replace(chain, **{name: getattr(plain, name)})
    yield replace(chain, keep=None)
    for layers in (2, 4):
        yield replace(chain, layers=layers)
    first, second, _ = chain.layouts
    for layouts in (
        (first, first, first),
        (first, second, first),
        (first, second, second),
        (Layout(), second, second),
        (first, Layout(), Layout()),
        (Layout(2), Layout(2), Layout(2)),
    ):
        yield replace(chain, layouts=layouts)
    for index, layout in enumerate(chain.layouts):
        for less in (Layout(), Layout(2), Layout(2, pp=2), Layout(2, tp=2)):
            if less.world < layout.world:
                yield replace(
                    chain, layouts=(*chain.layouts[:index], less, *chain.layouts[index + 1 :])
                )


if __name__ == "__main__":
    for drawn in seeded_chains(*map(int, sys.argv[1:])):
        print(drawn)
