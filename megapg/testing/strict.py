"""Makes the use of a closed group an error in tests; torch on CPU does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from megapg import torch_private
from megapg.errors import StaleGroupError


@contextlib.contextmanager
def refuse_closed_groups() -> Iterator[None]:
    """Make a torch.distributed collective on a destroyed group raise inside the block.

    A destroyed gloo group works while any object holds it. So a test on CPU would pass, while the
    same code hangs on a GPU.

    Raises:
        StaleGroupError: at the collective, with the group's ranks as far as they are known.
    """

    def check(group: object) -> None:
        if isinstance(group, dist.ProcessGroup) and not torch_private.knows(group):
            raise StaleGroupError(
                f"a collective on a destroyed process group ({group.group_desc or 'no name'}, "
                f"{group.size()} ranks). Use the groups inside their session."
            )

    with torch_private.asked_before_collectives(check):
        yield
