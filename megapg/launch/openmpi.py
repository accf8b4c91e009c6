"""Open MPI's ``mpirun``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from typing_extensions import override

from megapg.errors import LaunchError
from megapg.launch.derived_port import port_for
from megapg.launch.launcher import Launcher, Place
from megapg.launch.process import Launch

# Addresses of mpirun, and of the daemon on this rank's host, which is mpirun on its own host.
_HEAD, _LOCAL_DAEMON = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"


@dataclass(frozen=True)
class OpenMpi(Launcher):
    """Open MPI's ``mpirun`` (4 and 5).

    Open MPI does not say where rank 0 is. If there are several hosts, the ranks meet on the host of
    ``mpirun``, whose address Open MPI 4 gives to all ranks. Rank 0 raises if it runs on another
    host.
    """

    name = "Open MPI"
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")

    @override
    def launch(self, place: Place) -> Launch:
        namespace = self.variables.text("PMIX_NAMESPACE", "")
        if not namespace and place.port is None:
            raise LaunchError(
                "Open MPI gives this job no PMIX_NAMESPACE to derive a port from. Choose one for "
                "all ranks: mpirun -x MASTER_PORT=29500 ..."
            )
        job = f"mpi {namespace}"
        local_world_size = self.variables.maybe("OMPI_COMM_WORLD_LOCAL_SIZE")
        together = local_world_size == self.world_size
        address = place.address or ("127.0.0.1" if together else self._address())
        if self.world_size == 1:
            address = ""  # a single rank needs no port, which another job on this host could take
        host = "the only host" if together else f"mpirun's host ({_HEAD})"
        return Launch(
            launcher=self.name,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=local_world_size,
            address=address,
            port=port_for(job) if place.port is None else place.port,
            job=job,
            origin=place.origin(host, "port from PMIX_NAMESPACE"),
        )

    def _address(self) -> str:
        head, own = (_addresses(self.variables.text(name, "")) for name in (_HEAD, _LOCAL_DAEMON))
        advice = "Tell all of them: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 ..."
        if not head:
            raise LaunchError(
                f"Open MPI does not tell the ranks of several hosts where to meet. {advice}"
            )
        if self.rank == 0 and not set(head) & set(own):
            raise LaunchError(
                f"rank 0 does not run on mpirun's host ({', '.join(head)}), the only one that "
                f"Open MPI tells the other ranks of. {advice}"
            )
        return head[0]


def _addresses(uri: str) -> list[str]:
    """Parse addresses: ``1648492544.0;tcp://192.0.2.2,10.0.0.1:56007;tcp6://[fd00::2]:39497``."""
    found = []
    for addresses in re.findall(r"\btcp6?://([^;]+):\d+", uri):
        found += addresses.strip("[]").split(",")
    return found
