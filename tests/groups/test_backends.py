"""The table of backends: features that gloo refuses, and backends that take options."""

from dataclasses import fields

import pytest
import torch.distributed as dist

from megapg import CommunicatorOptions
from megapg.communicators.backends import BACKENDS, backend_for, rows_of
from megapg.errors import UnsupportedOptionError

pytestmark = pytest.mark.torch

GIVEN = CommunicatorOptions(
    is_high_priority_stream=True, cga_cluster_size=2, min_ctas=4, max_ctas=8, net_name="Socket"
)
HINTS = {
    "is_high_priority_stream": {"is_high_priority_stream": "true"},
    "cga_cluster_size": {"cga_cluster_size": "2"},
    "min_ctas": {"min_ctas": "4"},
    "max_ctas": {"max_ctas": "8"},
    "net_name": {"netName": "Socket"},
}  # as torchcomms 2026-08 reads them; it drops unknown names


@pytest.mark.parametrize("name", [field.name for field in fields(CommunicatorOptions)])
def test_options_are_taken_or_refused_by_name(name):
    options = CommunicatorOptions(**{name: getattr(GIVEN, name)})
    for row in BACKENDS.values():
        assert row.options("dp", CommunicatorOptions()) is None
        if row.name in ("nccl", "nccl2") and dist.is_nccl_available():
            made = row.options("dp", options)
            where = made if name == "is_high_priority_stream" else made.config
            assert getattr(where, name) == getattr(GIVEN, name)
            assert row.options("dp", options) is not made  # each field gets a new object
        elif row.name == "torchcomms":
            assert row.options("dp", options) == HINTS[name]
        else:
            named = "without NCCL" if row.name in ("nccl", "nccl2") else f"{name}="
            with pytest.raises(UnsupportedOptionError, match=f"^dp: .*{named}"):
                row.options("dp", options)


def test_options_that_nccl_does_not_have_are_refused():
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    with pytest.raises(UnsupportedOptionError, match="NCCL has 'IB' and 'Socket'"):
        BACKENDS["nccl"].options("dp", CommunicatorOptions(net_name="carrier pigeon"))


def test_a_device_map_goes_by_its_first_row():
    assert backend_for("cpu:gloo,cuda:nccl") is BACKENDS["nccl"]
    assert [row.name for row in rows_of("cpu:gloo,cuda:nccl2")] == ["nccl2", "gloo"]
    assert rows_of("mpi") == []
    with pytest.raises(UnsupportedOptionError, match="backend='torchcomms' is not one of nccl, "):
        backend_for("torchcomms")
