"""Operators without content give the same results, whether they are repeated or run."""

import pytest
import torch
from torch.utils._pytree import tree_map

from megapg.torch_private import meta_results
from megapg.torch_private.meta_results import run_on_meta

ops = torch.ops.aten


def meta(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype, device="meta")


CALLS = {
    "new": (ops.mul.Tensor, lambda: (meta(4, 6), meta(6, dtype=torch.float32)), {}),
    "whole": (ops.mul.Scalar, lambda: (meta(3, dtype=torch.int64), 2), {}),
    "fraction": (ops.mul.Scalar, lambda: (meta(3, dtype=torch.int64), 2.0), {}),
    "part": (ops.relu.default, lambda: (meta(4, 6)[1:, ::2],), {}),
    "transposed": (ops.clone.default, lambda: (meta(4, 6).t(),), {}),
    "several": (ops.topk.default, lambda: (meta(4, 6), 2), {}),
    "list": (ops.cat.default, lambda: ([meta(4, 6), meta(2, 6)],), {}),
    "default type": (ops.zeros.default, lambda: ([2, 3],), {"device": torch.device("meta")}),
    "memory of an argument": (ops._unsafe_view.default, lambda: (meta(4, 6), [24]), {}),
    "view": (ops.view.default, lambda: (meta(4, 6), [24]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_result_is_that_of_the_operator(name):
    operator, given, named = CALLS[name]

    def described(tensor):
        storage = tensor.untyped_storage()
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), len(storage)

    expected = tree_map(described, tuple(_each(operator(*given(), **named))))
    for _ in range(3):
        args = given()
        results = list(_each(run_on_meta(operator, args, named)))
        assert tuple(map(described, results)) == expected
        shares = [each._is_view() or _number(each) in map(_number, _each(args)) for each in results]
        assert any(shares) == (name in ("memory of an argument", "view"))


def _each(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _each(part)


def _number(tensor):
    return tensor.untyped_storage()._cdata


def test_an_operator_that_writes_returns_its_argument():
    for _ in range(3):
        tensor = meta(4)
        assert run_on_meta(ops.add_.Tensor, (tensor, meta(4)), {}) is tensor
        assert run_on_meta(ops.resize_.default, (tensor, [9]), {}) is tensor
        assert tensor.shape == (9,)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            run_on_meta(ops.add_.Tensor, (meta(4), meta(3)), {})


def test_the_default_type_decides():
    given = ([2, 3],), {"device": torch.device("meta")}
    before = torch.get_default_dtype()
    for kind in (torch.float32, torch.float64):
        torch.set_default_dtype(kind)
        try:
            assert run_on_meta(ops.zeros.default, *given).dtype == kind
        finally:
            torch.set_default_dtype(before)


def test_most_operators_of_a_layer_are_run_once():
    def runs():
        return meta_results._made.cache_info().misses

    args = (meta(5, 7), meta(7, dtype=torch.float64))
    before = runs()
    for _ in range(3):
        run_on_meta(ops.mul.Tensor, args, {})
    assert runs() == before + 1
