"""A SLURM of two nodes on this host: its own configuration, keys and ports, gone when it is closed.

Nothing of a SLURM or munge that the system may have is read or touched, and nothing needs root: the
daemons run as whoever runs the tests.
"""

import contextlib
import ctypes
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol", "sinfo")
# What a launcher around the tests may have set, and a job of theirs must not see.
OF_LAUNCHERS = re.compile("RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI")
_PR_SET_PDEATHSIG = 1
# Where daemons are that are not in everybody's path.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])

_CONFIGURATION = """\
ClusterName=megapg
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
SchedulerParameters=sched_min_interval=1000,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def missing_programs():
    """Those of SLURM's and munge's programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class Slurm:
    """Use it as a context manager; jobs are started with :meth:`run` and :meth:`start`.

    Args:
        folder: an empty one, for the configuration, the state and the logs.

    Attributes:
        nodes: ``n1`` and ``n2``, names that no resolver knows.
        environment: what a shell on this cluster has; nothing of a job around the tests is in it.
    """

    nodes = ("n1", "n2")

    def __init__(self, folder):
        self._folder = Path(folder)
        self._stack = contextlib.ExitStack()
        self.environment = {
            name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)
        }
        self.environment |= {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": _PATH}

    def __enter__(self):
        with self._stack:
            self._folder.chmod(0o711)  # munge wants its socket to be reachable for everybody
            (self._folder / "state").mkdir()
            (self._folder / "munge.key").write_bytes(os.urandom(128))
            (self._folder / "munge.key").chmod(0o400)
            (self._folder / "slurm.conf").write_text(
                _CONFIGURATION.format(
                    host=socket.gethostname().partition(".")[0],
                    user=getpass.getuser(),
                    folder=self._folder,
                    ports=[free_port() for _ in range(3)],
                )
            )
            munge = [
                f"--{name}={self._folder}/munge.{name.partition('-')[0]}" for name in _OF_MUNGE
            ]
            self._daemon("munged", "--force", "--foreground", *munge)
            self._until(lambda: (self._folder / "munge.socket").exists(), "munged")
            self._daemon("slurmctld", "-D", "-i")
            for node in self.nodes:
                self._daemon("slurmd", "-D", "-N", node)
            self._until(self._both_idle, "SLURM")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, *command, env=None, **options):
        """Start a program of SLURM's, such as ``start("srun", "-n4", "hostname")``."""
        return subprocess.Popen(
            list(command),
            env={**self.environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *command, timeout, env=None):
        """Run one to its end; ended after ``timeout`` seconds if it has not by then."""
        with self.start(*command, env=env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # srun ends its tasks
                out, err = process.communicate(timeout=20)
                raise AssertionError(
                    f"{command} took more than {timeout} s\n{out}\n{err}"
                ) from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _daemon(self, *command):
        number = len(list(self._folder.glob("*.out")))
        log = (self._folder / f"{command[0]}.{number}.out").open("w")
        self._stack.enter_context(log)
        process = subprocess.Popen(
            list(command),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
        )
        self._stack.callback(_end, process)

    def _both_idle(self):
        seen = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return seen.stdout.split() == ["idle", "idle"]

    def _until(self, done, what):
        deadline = time.monotonic() + 60
        while not done():
            if time.monotonic() > deadline:
                logs = [*self._folder.glob("*.log"), *self._folder.glob("*.out")]
                said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
                raise AssertionError(f"{what} did not start:\n{said}")
            time.sleep(0.1)


_OF_MUNGE = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def _die_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process):
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
