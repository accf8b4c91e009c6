"""Making the use of a closed group an error in tests, which torch on CPU lets pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megapg.communicators.create import is_registered
from megapg.errors import StaleGroupError


@contextlib.contextmanager
def refuse_closed_groups() -> Iterator[None]:
    """While the block runs, a torch.distributed collective on a destroyed group raises.

    A destroyed gloo group goes on answering while anyone holds it, so a test on CPU would pass
    where the same code hangs on a GPU.

    Raises:
        StaleGroupError: at the collective, naming the group's ranks as far as they are known.
    """
    # Every collective of torch asks this one question about its group first.
    ask = c10d._rank_not_in_group

    def ask_and_check(group: dist.ProcessGroup | None) -> bool:
        if isinstance(group, dist.ProcessGroup) and not is_registered(group):
            raise StaleGroupError(
                f"a collective on a destroyed process group ({group.group_desc or 'no name'}, "
                f"{group.size()} ranks). Use the groups inside their session."
            )
        return ask(group)

    c10d._rank_not_in_group = ask_and_check
    try:
        yield
    finally:
        c10d._rank_not_in_group = ask
