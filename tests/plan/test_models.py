"""The models of plans: published numbers of parameters, divisions of layers, and errors."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megapg
from megapg.errors import PlanError
from megapg.megatron import published
from megapg.testing import fake_collection, megatron_on_cpu, run_distributed
from megapg.tools.plan.fused import FlashLikeAttention, FusedLikeRMSNorm
from megapg.tools.plan.models import Model, find_model, model_names
from megapg.tools.plan.training import Job

pytestmark = pytest.mark.contract

# Parameters of the published weights, with the sizes to build a part of them.
PUBLISHED = {
    "llama3-8b": (8_030_261_248, {}),
    "llama3-70b": (70_553_706_496, {}),
    "llama3-405b": (405_853_388_800, {}),
    "mixtral-8x7b": (46_702_792_704, {}),
    "qwen3-235b-a22b": (235_093_634_560, {"ep": 64}),
    # The published weights count the biases of the router, which are buffers here.
    "deepseek-v3": (671_026_419_200 - 58 * 256, {"ep": 64}),
}


def job_of(model: Model, recompute: str = "none", seq_length: int = 0) -> Job:
    return Job(model=model.name, seq_length=seq_length or model.seq_length, recompute=recompute)


def built(name: str, vp_stage: int | None = None, **sizes) -> torch.nn.Module:
    model = find_model(name)
    with megatron_on_cpu(), fake_collection(**sizes) as pg, torch.device("meta"):
        return model.build(pg, vp_stage, job=job_of(model))


def weights(chunk: torch.nn.Module, ep: int = 1) -> int:
    """Number of parameters over all ranks of ep."""
    return sum(
        each.numel() * (1 if getattr(each, "allreduce", True) else ep)
        for each in chunk.parameters()
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name: str) -> None:
    expected, sizes = PUBLISHED[name]
    chunk = built(name, **sizes)
    assert weights(chunk, **sizes) == expected
    assert {each.dtype for each in chunk.parameters()} == {torch.bfloat16}


def test_gpt3_has_175b_parameters_with_a_padded_vocabulary() -> None:
    layers = 96 * (12 * 12288**2 + 13 * 12288)
    rest = (50304 + 2048 + 2) * 12288
    assert weights(built("gpt3-175b")) == layers + rest
    assert layers + rest == pytest.approx(174.6e9, rel=0.001)
    # 50,257 words need 99 x 512 for tp=4.
    assert built("gpt3-175b", tp=4).embedding.word_embeddings.weight.shape[0] == 99 * 128


@pytest.mark.parametrize("name", model_names())
def test_the_chunks_of_all_stages_are_the_model(name: str) -> None:
    layers = tomllib.loads(
        Path(f"megapg/tools/plan/architectures/{name}.toml").read_text(encoding="utf-8")
    )["config"]["num_layers"]
    vpp = 2 if name == "deepseek-v3" else None
    ep = 8 if name in ("deepseek-v3", "qwen3-235b-a22b") else 1
    chunks = [
        built(name, stage, pp=2, vpp=vpp, ep=ep, rank=rank)
        for rank in (0, ep)
        for stage in (range(vpp) if vpp else [None])
    ]
    assert sum(len(chunk.decoder.layers) for chunk in chunks) == layers
    assert [chunk.pre_process for chunk in chunks].count(True) == 1
    assert [chunk.post_process for chunk in chunks].count(True) == 1


@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [
        ("llama3-405b", {"pp": 16}, [7, *[8] * 14, 7]),
        ("llama3-405b", {"pp": 3}, [42, 42, 42]),
        ("deepseek-v3", {"pp": 16, "ep": 64}, [*[4] * 15, 1]),
        ("deepseek-v3", {"pp": 8, "ep": 64}, [*[8] * 7, 5]),
    ],
)
def test_uneven_stages_as_published(name: str, sizes: dict[str, int], layers: list[int]) -> None:
    model = find_model(name)
    found = []
    world = sizes["pp"] * sizes.get("ep", 1)
    for stage in range(sizes["pp"]):
        rank = stage * world // sizes["pp"]
        meta = torch.device("meta")
        with megatron_on_cpu(), fake_collection(rank, world, **sizes) as pg, meta:
            found.append(len(model.build(pg, job=job_of(model)).decoder.layers))
    assert found == layers


def test_uneven_chunks_as_published() -> None:
    chunks = [
        built("deepseek-v3", n, pp=8, vpp=4, ep=8, rank=8 * stage).decoder.layers
        for n in range(4)
        for stage in range(8)
    ]
    assert [len(each) for each in chunks] == [1, *[2] * 30, 0]


def test_layers_that_do_not_divide() -> None:
    with pytest.raises(PlanError, match=r"80 layers .* pp=3 x vpp=1 = 3 .*1, 2, 4, 5, 8, 10"):
        built("llama3-70b", pp=3)


def test_tokens_that_do_not_divide() -> None:
    with pytest.raises(
        PlanError, match="2048 tokens cannot be divided into 6 pieces, for tp=6 and"
    ):
        built("gpt3-175b", tp=6, cp=1)
    with pytest.raises(PlanError, match=r"8192 tokens .* into 24 pieces, for tp=4 and cp=3"):
        built("llama3-8b", tp=4, cp=3)


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(PlanError, match="8 experts cannot be divided among ep=32"):
        built("mixtral-8x7b", ep=32)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(
        PlanError, match=r"llama3-8b: ValueError: num_attention_heads \(32\) must be a mult"
    ):
        built("llama3-8b", tp=3)


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_small_copy_trains(name: str, recompute: str, tmp_path: Path) -> None:
    model = find_model(str(shrunk(name, tmp_path)))
    eager = torch.compiler.set_stance("force_eager")
    with megatron_on_cpu(), fake_collection() as pg, published(pg), eager:
        chunk = model.build(pg, job=job_of(model, recompute))
        for each in chunk.parameters():
            torch.nn.init.normal_(each, std=0.02)
        tokens = torch.randint(256, (1, 32))
        model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
        loss = chunk(tokens, torch.arange(32)[None], None, labels=tokens.roll(-1)).mean()
        loss.backward()
    assert loss.item() == pytest.approx(5.55, abs=0.3)  # log(256), of random weights
    assert all(torch.isfinite(each.grad).all() for each in chunk.parameters())
    core = chunk.decoder.layers[0].self_attention
    assert core.checkpoint_core_attention == (recompute == "selective")
    assert chunk.config.recompute_granularity == (None if recompute == "none" else recompute)


def shrunk(name: str, folder: Path) -> Path:
    """Write the model's file with small sizes."""
    text = Path(f"megapg/tools/plan/architectures/{name}.toml").read_text(encoding="utf-8")
    small = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 8}
    small |= {"num_query_groups": 2, "kv_channels": 8, "num_moe_experts": 16, "v_head_dim": 8}
    small |= {"moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}
    small |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
    small |= {"vocab_size": 256, "seq_length": 32}
    lines = []
    for line in text.splitlines():
        key = line.partition(" =")[0]
        lines.append(f"{key} = {small[key]}" if key in small else line)
    file = folder / f"{name}.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def attend_in_parts() -> list[torch.Tensor]:
    """Attend with this rank's two pieces of the sequence, and return output and gradients."""
    with megatron_on_cpu(), megapg.session(cp=2) as session:
        pg = session.groups
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
        rank = pg.rank("cp")
        whole = sequences()
        parts = [
            torch.cat((each.chunk(4)[rank], each.chunk(4)[3 - rank])).requires_grad_()
            for each in whole
        ]
        found = FlashLikeAttention(config, pg_collection=pg)(*parts, None)
        (found * weighting(found)).sum().backward()
        return [found.detach(), *(each.grad for each in parts)]


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((16, 2, 4, 8), (16, 2, 2, 8), (16, 2, 2, 8))
    return [torch.randn(*each, generator=generator, dtype=torch.float64) for each in shapes]


def weighting(found: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, found.shape[-1], dtype=torch.float64)


def test_attention_with_context_parallelism_equals_that_of_one_rank() -> None:
    query, key, value = (each.requires_grad_() for each in sequences())
    wide_key, wide_value = (each.repeat_interleave(2, dim=2) for each in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, wide_key) / 8**0.5
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    found = torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), wide_value).flatten(2)
    (found * weighting(found)).sum().backward()
    wanted = [found.detach(), query.grad, key.grad, value.grad]
    ranks = run_distributed(attend_in_parts, 2)
    for number, tensor in enumerate(wanted):
        one, other = ranks[0][number], ranks[1][number]
        pieces = (one[:4], other[:4], other[4:], one[4:])
        torch.testing.assert_close(torch.cat(pieces), tensor)


def test_attention_keeps_what_flash_attention_keeps() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    inputs = [each.requires_grad_() for each in sequences()]
    with fake_collection() as pg, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        found = FlashLikeAttention(config, pg_collection=pg)(*inputs, None)
        (found * 2).sum().backward()
    # What it computes again in the backward pass is not seen either.
    shapes = [tuple(each.shape) for each in (*inputs, found)]
    assert [tuple(each.shape) for each in kept] == [*shapes, (16, 2, 4)]


def test_norm_equals_that_of_torch_and_keeps_its_input() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=4)
    made, wanted = FusedLikeRMSNorm(config, 8).double(), torch.nn.RMSNorm(8, eps=1e-5).double()
    one, other = (sequences()[0].requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = made(one)
    (found * weighting(found)).sum().backward()
    (wanted(other) * weighting(found)).sum().backward()
    torch.testing.assert_close(found, wanted(other))
    torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(made.weight.grad, wanted.weight.grad)
    assert [tuple(each.shape) for each in kept] == [(16, 2, 4, 8), (8,), (16, 2, 4)]


@pytest.mark.parametrize("name", model_names())
def test_no_norm_is_left_that_keeps_more_than_fused_ones(name: str) -> None:
    ep = 64 if "deep" in name or "qwen" in name else 1
    kinds = {type(each) for each in built(name, ep=ep).modules() if "Norm" in type(each).__name__}
    assert kinds == {torch.nn.LayerNorm if name == "gpt3-175b" else FusedLikeRMSNorm}


USER = """
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

def build(pg, vp_stage=None, recompute="none", seq_length=128):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        recompute_granularity=None if recompute == "none" else recompute,
    )
    return GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=64,
        pg_collection=pg, vp_stage=vp_stage,
    )

def plain(pg):
    return build(pg)

def options(pg, **config):
    return build(pg, **config)

def several(pg):
    return [build(pg), build(pg)]

def nothing(pg):
    return None

def wrong(pg):
    raise RuntimeError("no such tokenizer")

print("loading")

def talks(pg):
    print("building")
    return build(pg)

def layer(pg):
    import torch
    return torch.nn.Linear(2, 2)

def leaves(pg):
    raise SystemExit(3)

def refuses(pg):
    assert pg is None
"""


@pytest.fixture
def user_file(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"of_user_{abs(hash(request.node.name))}.py"
    file.write_text(USER, encoding="utf-8")
    return file


def of_user(file: Path, function: str, recompute: str = "none", seq: int = 64, stage=None):
    model = find_model(f"{file}:{function}")
    with megatron_on_cpu(), fake_collection() as pg:
        return model.build(pg, stage, job=job_of(model, recompute, seq))


def test_a_function_of_a_file(user_file: Path) -> None:
    assert find_model(f"{user_file}:build").seq_length == 128
    assert of_user(user_file, "build", "selective").config.recompute_granularity == "selective"
    assert len(of_user(user_file, "plain").decoder.layers) == 2
    assert len(of_user(user_file, "options").decoder.layers) == 2
    assert len(of_user(user_file, "several", stage=1).decoder.layers) == 2


def test_a_function_that_ignores_virtual_stages(user_file: Path) -> None:
    with pytest.raises(PlanError, match=r"no parameter vp_stage\. Add one"):
        of_user(user_file, "plain", stage=1)


def test_a_function_prints_into_the_standard_error(user_file: Path, capsys) -> None:
    of_user(user_file, "talks")
    assert capsys.readouterr() == ("", "loading\nbuilding\n")


def test_a_function_of_a_module(user_file: Path) -> None:
    assert find_model(f"{user_file.stem}:build").seq_length == 128


@pytest.mark.parametrize(
    ("function", "recompute", "seq", "message"),
    [
        ("plain", "full", 64, "no parameter recompute.*Add recompute='none'.*--recompute none"),
        ("nothing", "none", 64, "returned NoneType. Return a model of Megatron-core"),
        ("wrong", "none", 64, r"RuntimeError at line 29 of .*: no such tokenizer"),
        ("build", "none", 128, "128 tokens, and the model takes 64. Plan with --seq-length 64"),
        ("absent", "none", 64, "no function 'absent'. It has build, plain, options"),
        ("layer", "none", 64, "returned Linear. Return a model of Megatron-core"),
        ("leaves", "none", 64, r"SystemExit at line 42 of .*: 3"),
        ("refuses", "none", 64, r"AssertionError at line 45 of \S*py$"),
    ],
)
def test_errors_of_functions(
    function: str, recompute: str, seq: int, message: str, user_file: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        of_user(user_file, function, recompute, seq)


@pytest.mark.parametrize("absent", ["torch", "megatron"])
def test_models_are_named_without_torch(absent: str, user_file: Path) -> None:
    code = f"""
import sys
sys.modules[{absent!r}] = None
from megapg.errors import PlanError
from megapg.tools.plan.models import find_model
from megapg.tools.plan.training import Job
model = find_model("llama3-8b")
print(model.seq_length)
for attempt in (
    lambda: model.build(None, job=Job(model="", seq_length=8)),
    lambda: find_model({str(user_file) + ":build"!r}),
):
    try:
        attempt()
    except PlanError as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("8192\n")
    assert ran.stdout.count("pip install 'megapg[torch,megatron]'") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "llama4",
            "no such model. Did you mean llama3-405b",
        ),
        ("absent.py:build", "absent.py: no such file"),
        ("absent.toml", "No such file"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("train.py:", "names no function"),
    ],
)
def test_errors_of_names(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_model(name)


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "breaks_at_import.py"
    file.write_text("x = 1\ny = x / 0\n", encoding="utf-8")
    with pytest.raises(PlanError, match=r"ZeroDivisionError at line 2 of .*: division by zero"):
        find_model(f"{file}:build")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seq_length = 32", 'seq_length = "a"', r"seq_length is 'a'. Write a number of tokens"),
        ("num_attention_heads = 8", "num_attention_heads = 0", "ZeroDivisionError: integer div"),
        ('"silu"', '"swish"', "AttributeError: .* no attribute 'swish'"),
    ],
)
def test_files_with_wrong_values(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = shrunk("llama3-8b", tmp_path)
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        built(str(file))


def test_another_activation_of_torch(tmp_path: Path) -> None:
    file = shrunk("gpt3-175b", tmp_path)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"gelu"', '"relu"'), encoding="utf-8")
    assert built(str(file)).config.activation_func is torch.nn.functional.relu


def test_files_with_wrong_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seq_length = 8\nlayers = 3\n[model]\n", encoding="utf-8")
    with pytest.raises(PlanError, match="config, layers missing or unknown; the keys are config"):
        find_model(str(file))
    file.write_text("seq_length = 8\n[model]\nvocab_size = 8\n[config]\nlayers = 2\n")
    with pytest.raises(PlanError, match=r"mine\.toml: 'num_layers' is missing or unknown"):
        built(str(file))
    file.write_text(file.read_text() + "num_layers = 2\n", encoding="utf-8")
    with pytest.raises(PlanError, match="unexpected keyword argument 'layers'"):
        built(str(file))
