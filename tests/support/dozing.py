"""A torch backend that can be suspended without a GPU: gloo with NCCL's suspend and resume.

As with NCCL, suspend and resume are collective. The backend counts its memory: part of it can be
given back, and part cannot.
"""

import torch.distributed as dist

from megapg.communicators import backends

GIVEN_BACK, KEPT = 1000, 24
_alive = []  # without a reference here, torch returns a plain ProcessGroupGloo


class Dozing(dist.ProcessGroupGloo):
    def __init__(self, store, rank, size, timeout):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        super().__init__(store, rank, size, options)
        self.asleep = False
        self.log = []
        _alive.append(self)

    def suspend(self):
        self._turn("suspend", asleep=True)

    def resume(self):
        self._turn("resume", asleep=False)

    def _turn(self, what, asleep):
        self.log.append(what)
        assert self.asleep is not asleep, f"{what} twice"
        if self.size() > 1:
            self.barrier(dist.BarrierOptions()).wait()
        if what in getattr(self, "failing", ()):
            raise RuntimeError(f"cuMemUnmap failed in {what}")
        self.asleep = asleep

    def memory_stats(self):
        return {
            "suspend": GIVEN_BACK,
            "suspended": int(self.asleep),
            "persist": KEPT,
            "total": GIVEN_BACK + KEPT,
        }


def _no_options(where, options):
    return None


def install(cannot_suspend=""):
    """Register the backend ``"dozing"`` with torch and megapg, in this process."""
    if not hasattr(dist.Backend, "DOZING"):
        dist.Backend.register_backend("dozing", Dozing, devices=["cpu"])
    row = backends.Backend(
        "dozing", _no_options, holds_memory=True, cannot_suspend=lambda: cannot_suspend
    )
    others = {name: row for name, row in backends.BACKENDS.items() if name != "dozing"}
    backends.BACKENDS.clear()
    backends.BACKENDS.update({"dozing": row, **others})


def of(group):
    """Return the backend of a group."""
    return group._get_backend(group._device_types[-1])


def forget():
    _alive.clear()
