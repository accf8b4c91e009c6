"""A SLURM cluster of two nodes on this host, with its own configuration, keys and ports.

The system's SLURM and munge, if installed, are not used, and nothing needs root: the daemons run as
the user who runs the tests.
"""

import contextlib
import ctypes
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import warnings
from pathlib import Path

from ports import free_port
from processes import captured

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol", "sinfo")
# Variables of a launcher around the tests, which a job of the tests must not get.
OF_LAUNCHERS = re.compile("RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI")
_PR_SET_PDEATHSIG = 1
# Folders with daemons, which may not be on the user's path.
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
FirstJobId={first_job}
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


class BrokenClusterError(Exception):
    """SLURM itself failed: a daemon ended, or a node takes no more work after a job."""


def missing_programs():
    """Return the programs of SLURM and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class Slurm:
    """A cluster. Use it as a context manager; start jobs with :meth:`run` and :meth:`start`.

    Args:
        folder: an empty folder for the configuration, the state and the logs.

    Attributes:
        nodes: ``n1`` and ``n2``, names that no resolver knows.
        environment: of a shell on this cluster, without variables of a job around the tests.
    """

    nodes = ("n1", "n2")

    def __init__(self, folder):
        self._folder = Path(folder)
        self._stack = contextlib.ExitStack()
        self._daemons = []
        self.environment = {
            name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)
        }
        self._place = {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": _PATH}
        self.environment |= self._place

    def __enter__(self):
        with self._stack:
            self._folder.chmod(0o711)  # the folder of munge's socket must be open to all users
            (self._folder / "state").mkdir()
            (self._folder / "munge.key").write_bytes(os.urandom(128))
            (self._folder / "munge.key").chmod(0o400)
            (self._folder / "slurm.conf").write_text(
                _CONFIGURATION.format(
                    host=socket.gethostname().partition(".")[0],
                    user=getpass.getuser(),
                    folder=self._folder,
                    ports=[free_port() for _ in range(3)],
                    # Jobs derive ports from their number, and other clusters may run on this host.
                    first_job=random.randrange(1, 60_000_000),
                )
            )
            munge = [
                f"--{name}={self._folder}/munge.{name.partition('-')[0]}" for name in _OF_MUNGE
            ]
            self._daemon("munged", "--force", "--foreground", *munge)
            self._until(lambda: (self._folder / "munge.socket").exists(), "munged did not start")
            self._daemon("slurmctld", "-D", "-i")
            for node in self.nodes:
                self._daemon("slurmd", "-D", "-N", node)
            self._until(self._both_idle, "SLURM did not start")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, *command, env=None, **options):
        """Start a program of SLURM, such as ``start("srun", "-n4", "hostname")``."""
        return subprocess.Popen(
            list(command),
            env={**self.environment, **(env or {}), **self._place},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *command, timeout, env=None):
        """Run a program to its end, and terminate it after ``timeout`` seconds.

        Raises:
            BrokenClusterError: the cluster cannot run another program.
            AssertionError: the program took too long.
        """
        try:
            return self._run(command, timeout, env)
        finally:
            self._until(self._both_idle, f"after {command} SLURM is broken", BrokenClusterError)

    def _run(self, command, timeout, env):
        with self.start(*command, env=env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # srun then ends its tasks
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
        self._daemons.append(process)
        self._stack.callback(_end, process)

    def _both_idle(self):
        return self._each_node("%T").split() == ["idle", "idle"]

    def _each_node(self, what):
        command = ["sinfo", "--noheader", "--Node", f"--format={what}"]
        try:
            return captured(
                command,
                env=self.environment,
                timeout=20,
            ).stdout
        except subprocess.TimeoutExpired:
            return "unknown: slurmctld says nothing"

    def _until(self, done, what, error=AssertionError):
        deadline = time.monotonic() + 60
        while not done():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = [*self._folder.glob("*.log"), *self._folder.glob("*.out")]
                said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
                nodes = self._each_node("%N %T %E")
                raise error(f"{what}; ended: {ended}; nodes: {nodes}\n{said}")
            time.sleep(0.1)


class Clusters:
    """Runs commands on a cluster, and again on a new cluster if SLURM itself failed.

    SLURM has failed this way: a node stayed down after a job, and later jobs waited forever.

    Args:
        folder: makes an empty folder.

    Attributes:
        folder: of the cluster that ran the last command.
    """

    def __init__(self, folder):
        self._another = folder
        self._stack = contextlib.ExitStack()
        self._cluster = None
        self.folder = None

    def __enter__(self):
        self._begin()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def run(self, *command, timeout, env=None):
        """As :meth:`Slurm.run`; a failure of the first cluster is a warning."""
        try:
            return self._cluster.run(*command, timeout=timeout, env=env)
        except BrokenClusterError as broken:
            self._stack.close()
            self._begin()
            warnings.warn(str(broken), stacklevel=2)
            return self._cluster.run(*command, timeout=timeout, env=env)

    def _begin(self):
        self.folder = self._another()
        self._cluster = self._stack.enter_context(Slurm(self.folder))


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
