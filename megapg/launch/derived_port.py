"""The port of a job whose launcher names none, derived from the job's name."""

import zlib

# Below the ephemeral ports (Linux: from 32768), above the ports of most services.
_FIRST_PORT, _PORTS = 20_000, 12_000


def port_for(job: str, step: int = 0) -> int:
    """Derive a port from the job's name, equal on all ranks. Steps of a job get different ports.

    The name must differ between jobs that may run at once: they would meet in one store. If a
    launcher gives no such name, it should ask for MASTER_PORT, as Open MPI without a job does.
    """
    return _FIRST_PORT + (zlib.crc32(job.encode()) + step) % _PORTS
