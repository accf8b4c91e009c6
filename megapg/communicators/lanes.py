"""The fields that must not share an NCCL communicator. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from megapg.layout.fields import TABLE

# Fields whose collectives can run at the same time must not share an NCCL communicator, even if
# their ranks are equal. A communicator runs its collectives in sequence, and a different order on
# two ranks would deadlock. Fields without a lane are on the common one.
NCCL_LANES: Mapping[str, str] = {
    **{field: row.lane for field, row in TABLE.items() if row.lane},
    "hybrid": "hybrid context",
}
