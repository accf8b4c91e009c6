"""STAND-INS of the fused optimizers of Transformer Engine and Apex, in plain torch on a CPU.

Nothing here is the real part. The real classes take CUDA tensors only, and Megatron-core prefers
them wherever they are installed. A stand-in has the parts of the real class that a checkpoint
meets: base class, constructor, states with their types, the step in the parameter group, and
methods for scaled states. A result that was found with a stand-in says so.

Megatron-core can make these optimizers. On a machine without a GPU they need:

================================  ==============  ==============================================
optimizer                         core            needs
================================  ==============  ==============================================
AdamW, Adam, SGD of torch         0.16, 0.19      nothing
fused Adam, SGD of TE             0.16, 0.19      ``fused("te")`` or ``fused("te-main")``
fused Adam, SGD of Apex           0.16, 0.19      ``fused("apex")``
precision-aware                   0.16, 0.19      ``fused("te")``: the settings ask for TE's class
CPU offload (hybrid)              0.16, 0.19      :func:`offloading`
layer-wise Muon                   0.16            ``emerging_optimizers`` 0.1, not on PyPI
Muon, AdaptiveMuon, SOAP, Lion    0.19            ``emerging-optimizers`` of PyPI (Python 3.12)
================================  ==============  ==============================================

* Megatron-core's distributed optimizer refuses SGD; only it takes the precision-aware optimizer.
* CPU offload with a distributed optimizer needs a model in bfloat16 throughout, and without one it
  needs float32. The other two pairs fail in Megatron-core.
* CPU offload with the precision-aware optimizer has TE's setting and torch's AdamW. 0.19 makes it
  without TE as well.
"""

import contextlib
import importlib
import importlib.machinery
import itertools
import sys
import types
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["ApexFusedAdam", "FusedSGD", "TEFusedAdam", "TEFusedAdamOfMain", "fused", "offloading"]

_STATES = ("exp_avg", "exp_avg_sq", "master_param")
_HALVES = (torch.float16, torch.bfloat16)


def _adam(group, decoupled, grad, param, exp_avg, exp_avg_sq):
    """Update float32 tensors in place, in the order of the fused kernels."""
    beta1, beta2 = group["betas"]
    correct = group["bias_correction"]
    correction1 = 1 - beta1 ** group["step"] if correct else 1.0
    correction2 = 1 - beta2 ** group["step"] if correct else 1.0
    if not decoupled:
        grad = grad + group["weight_decay"] * param
    exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * grad)
    exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * grad * grad)
    update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + group["eps"])
    if decoupled:
        update = update + group["weight_decay"] * param
    param.sub_(group["lr"] * update)


class TEFusedAdam(torch.optim.Optimizer):
    """Stand-in of ``transformer_engine.pytorch.optimizers.FusedAdam``, releases 2.1 to 2.9.

    A state of another type than float32 has a scale in ``_scales``. The main parameters can lie
    here, too: whole, or as the 16 bits that a bfloat16 parameter lacks (``int16``).
    """

    counts_empty_groups = False

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        if amsgrad or capturable:
            raise RuntimeError("the stand-in of FusedAdam has neither amsgrad nor capturable")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        for dtype in (exp_avg_dtype, exp_avg_sq_dtype):
            if dtype not in (torch.float32, *_HALVES, torch.uint8):
                raise RuntimeError("FusedAdam only supports fp32/fp16/bf16/fp8 states.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        dtypes = (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype)
        self.name_to_dtype_map = dict(zip(_STATES, dtypes, strict=True))
        self._scales = {}
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none=None):
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        drop = set_to_none is None or set_to_none
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for param in _params(self.param_groups):
            if drop:
                setattr(param, name, None)
            elif getattr(param, name) is not None:
                getattr(param, name).zero_()

    def get_unscaled_state(self, param, state_name, skip_unscale=False):
        """Return a state as float32; the 16 bits of a main parameter as they are."""
        state = self.state[param][state_name]
        dtype = self.name_to_dtype_map[state_name]
        if dtype == torch.float32:
            expected = torch.int16 if self._is_remainder(param, state_name) else torch.float32
            assert state.dtype == expected
            return state
        if dtype == torch.bfloat16:
            return state if skip_unscale else state.float()
        if dtype == torch.uint8:
            return state.float()
        assert state.dtype == dtype
        return state.float().mul_(self._scales[param][state_name])

    def set_scaled_state(self, param, state_name, unscaled_state):
        """Set a state from float32; the 16 bits of a main parameter from int16."""
        remainder = self._is_remainder(param, state_name)
        assert unscaled_state.dtype == (torch.int16 if remainder else torch.float32)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False, remainder)
        state = self.state[param][state_name]
        if self.name_to_dtype_map[state_name] == torch.float32:
            state.copy_(unscaled_state)
        else:
            self._apply_scale(state, unscaled_state, self._scales[param][state_name])

    def initialize_state(self, param, store_param_remainders):
        self._initialize_state(param, "exp_avg", True)
        self._initialize_state(param, "exp_avg_sq", True)
        if self.master_weights:
            self._initialize_state(param, "master_param", False, store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def state_dict(self):
        """Return torch's, with every state unscaled."""
        packed = super().state_dict()
        for number, param in self._numbered(packed["param_groups"]):
            if number in packed["state"]:
                packed["state"][number] = {
                    name: self.get_unscaled_state(param, name) for name in packed["state"][number]
                }
        return packed

    def load_state_dict(self, state_dict):
        """Load as torch does, and then set every state anew, since torch changes the type."""
        super().load_state_dict(state_dict)
        for number, param in self._numbered(state_dict["param_groups"]):
            if number not in state_dict["state"]:
                continue
            self.state[param] = {}
            for name, value in state_dict["state"][number].items():
                if value is not None:
                    whole = self._is_remainder(param, name)
                    self.set_scaled_state(param, name, value if whole else value.float())

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["params"] or self.counts_empty_groups:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._step_of(group, param)
        return loss

    def _step_of(self, group, param):
        remainders = self.store_param_remainders and param.dtype == torch.bfloat16
        state = self.state[param]
        if len(state) == 0:
            self.initialize_state(param, remainders)
            state = self.state[param]
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        grad = getattr(param, name, None)
        if grad is None:
            return
        first, second = (self.get_unscaled_state(param, name) for name in _STATES[:2])
        if "master_param" not in state or param.dtype == torch.float32:
            main = param.detach().float()
        elif remainders:
            main = _join(param.detach(), state["master_param"])
        else:
            main = self.get_unscaled_state(param, "master_param")
        _adam(group, self.adam_w_mode, grad.float(), main, first, second)
        if remainders and "master_param" in state:
            _split(main, param, state["master_param"])
        else:
            param.copy_(main)
        kept = {"exp_avg": first, "exp_avg_sq": second, "master_param": main}
        for name in state:
            if self.name_to_dtype_map[name] != torch.float32:
                self._apply_scale(state[name], kept[name], self._scales[param][name])

    def _initialize_state(self, param, state_name, zero_buffer, store_param_remainders=False):
        dtype = self.name_to_dtype_map[state_name]
        if store_param_remainders:
            state = torch.zeros_like(param, dtype=torch.int16)
        elif dtype == torch.uint8:
            state = Float8State(param.shape)
        else:
            state = torch.empty_like(param, dtype=dtype)
        state = state.detach()
        if zero_buffer:
            state.zero_()
        self.state[param][state_name] = state
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[state_name] = torch.ones(1)

    @staticmethod
    def _apply_scale(state, unscaled, scale):
        """Write a float32 state into one of another type, with the scale that its range needs."""
        if state.dtype == torch.bfloat16:
            state.copy_(unscaled)
            return
        most = 448.0 if isinstance(state, Float8State) else torch.finfo(state.dtype).max / 2.0
        largest = unscaled.abs().max() if unscaled.numel() else torch.zeros(())
        scale.copy_(largest / most)
        if isinstance(state, Float8State):
            state.quantize_(unscaled, scale)
        else:
            state.copy_(unscaled * torch.where(scale > 0, scale.reciprocal(), 0.0))

    def _is_remainder(self, param, name):
        return (
            self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16
        )

    def _numbered(self, packed_groups):
        numbers = itertools.chain.from_iterable(group["params"] for group in packed_groups)
        return zip(numbers, _params(self.param_groups), strict=True)


class TEFusedAdamOfMain(TEFusedAdam):
    """The same on TE's main branch, which counts the steps of an empty group as well."""

    counts_empty_groups = True


class Float8State:
    """A state as eight bits with one scale: in the place of ``Float8Tensor`` (E4M3).

    It is no tensor, while the real class is a subclass of one.
    """

    dtype = torch.float32  # as the real one says

    def __init__(self, shape):
        self.shape = shape
        self.bits = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        self.scale = torch.ones(1)

    def detach(self):
        return self

    def zero_(self):
        self.bits.zero_()
        return self

    def numel(self):
        return self.bits.numel()

    def quantize_(self, unscaled, scale):
        self.scale = scale.clone()
        self.bits.copy_(unscaled * torch.where(scale > 0, scale.reciprocal(), 0.0))

    def float(self):
        return self.bits.float() * self.scale


class ApexFusedAdam(torch.optim.Optimizer):
    """Stand-in of ``apex.optimizers.FusedAdam``: float32 states for every type of parameter."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        if amsgrad or capturable or master_weights:
            raise RuntimeError("the stand-in of FusedAdam has none of Apex's capturable settings")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable, self.master_weights = capturable, master_weights
        self.param_groups_master = [
            {"params": [None for _ in group["params"]]} for group in self.param_groups
        ]

    def zero_grad(self):
        for param in _params(self.param_groups):
            if self.set_grad_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self, closure=None, **deprecated):
        loss = None if closure is None else closure()
        # As in Apex: groups without a partner here, and parameters, are left out.
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=False):
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param, _ in zip(group["params"], masters["params"], strict=False):
                if param.grad is not None:
                    self._step_of(group, param)
        return loss

    def _step_of(self, group, param):
        state = self.state[param]
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(param.detach()).float()
            state["exp_avg_sq"] = torch.zeros_like(param.detach()).float()
        main = param.detach().float()
        moments = (state["exp_avg"], state["exp_avg_sq"])
        _adam(group, self.adam_w_mode, param.grad.float(), main, *moments)
        param.copy_(main)


class FusedSGD(torch.optim.Optimizer):
    """Stand-in of ``FusedSGD`` of TE and Apex: every parameter has a buffer, also at momentum 0."""

    def __init__(
        self, params, lr=None, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dtype in (torch.float32, torch.float16):
                    self._step_of(group, param)
        return loss

    def _step_of(self, group, param):
        state, momentum = self.state[param], group["momentum"]
        first = "momentum_buffer" not in state
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(param.detach()))
        grad = param.grad + group["weight_decay"] * param.detach()
        if momentum:
            kept = 0.0 if first else momentum
            taken = 1.0 if first else 1 - group["dampening"]
            buffer.copy_(kept * buffer + taken * grad)
            grad = grad + momentum * buffer if group["nesterov"] else buffer
        param.sub_(group["lr"] * grad)


def _params(groups):
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _join(high, low):
    """Return float32 from a bfloat16 tensor, rounded to nearest, and the 16 bits below it."""
    bits = high.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((bits << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _split(whole, high, low):
    """Write float32 as a bfloat16 tensor and the 16 bits below it."""
    bits = whole.contiguous().view(torch.int32)
    rest = (bits & 0xFFFF).to(torch.int32)
    low.copy_(torch.where(rest >= 0x8000, rest - 0x10000, rest))
    top = (bits >> 16) + (low < 0).to(torch.int32)
    top = torch.where(top >= 0x8000, top - 0x10000, top)
    high.copy_(top.to(torch.int16).view(torch.bfloat16))


# -- in the place of the real classes --------------------------------------------------------------

_CLASSES = {"te": TEFusedAdam, "te-main": TEFusedAdamOfMain, "apex": ApexFusedAdam}
_TE_VERSION = "2.9.0"


@contextlib.contextmanager
def fused(kind):
    """Let Megatron-core make the stand-ins inside the block, as with TE or Apex installed.

    ``kind`` is "te", "te-main" or "apex". Build, train, save and load inside: Megatron-core asks
    its modules for the class at each of these. With "te", ``OptimizerConfig`` finds the class that
    ``use_precision_aware_optimizer`` needs.
    """
    adam = _CLASSES[kind]
    with contextlib.ExitStack() as undo:
        _core_without_te()
        optimizer = importlib.import_module("megatron.core.optimizer")
        distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
        for name, value in (("Adam", adam), ("SGD", FusedSGD), ("USING_PYTORCH_OPTIMIZER", False)):
            undo.enter_context(mock.patch.object(optimizer, name, value))
        flags = {
            "Adam": adam,
            "HAVE_APEX_OR_TE": True,
            "USING_TE_OPTIMIZER": kind != "apex",
            "USING_APEX_OPTIMIZER": kind == "apex",
        }
        for name, value in flags.items():
            undo.enter_context(mock.patch.object(distributed, name, value))
        if kind != "apex":
            undo.enter_context(_importable(adam))
        yield


def _core_without_te():
    """Import the parts of Megatron-core that look for TE when they are imported."""
    for name in ("models.gpt.gpt_layer_specs", "models.gpt", "dist_checkpointing", "distributed"):
        importlib.import_module(f"megatron.core.{name}")


@contextlib.contextmanager
def _importable(adam):
    """Make ``transformer_engine.pytorch.optimizers`` importable, with its version."""
    from packaging.version import Version

    utils = importlib.import_module("megatron.core.utils")
    names = ["transformer_engine"]
    names += [f"{names[0]}.pytorch", f"{names[0]}.pytorch.optimizers"]
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules[names[0]].__version__ = _TE_VERSION
    modules[names[-1]].FusedAdam, modules[names[-1]].FusedSGD = adam, FusedSGD
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(utils, "_te_version", Version(_TE_VERSION)),
    ):
        yield


# -- CPU offload without a GPU ---------------------------------------------------------------------

_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
_COPIES = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)


class _LooksLikeAGpu(TorchFunctionMode):
    """Let the hybrid optimizer take a tensor for one of a GPU until it calls ``cpu()``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _caller() != _HYBRID:
            return func(*args, **kwargs)
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "on_the_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = func(*args, **kwargs)
        kept = func in _COPIES and getattr(args[0], "on_the_host", False)
        if kept or func is torch.Tensor.cpu:
            result.on_the_host = True
        return result


def _caller():
    """Return the module that called torch, below the mode of ``megatron_on_cpu()``."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "megapg.testing.cpu":
        frame = frame.f_back
    return frame.f_globals.get("__name__")


@contextlib.contextmanager
def offloading():
    """Let ``HybridDeviceOptimizer`` move states inside the block as it does on a GPU.

    Enter ``megatron_on_cpu()`` inside this block. Parameters count as tensors of a GPU, and their
    copies on the CPU do not.
    """
    importlib.import_module(_HYBRID)
    with _LooksLikeAGpu():
        yield
