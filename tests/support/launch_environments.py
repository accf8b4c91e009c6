"""Environment variables of launchers, recorded from real ones, without unused variables.

SLURM 22.05.8 with the nodes n1 and n2, Open MPI 4.1.4, torchrun of torch 2.13.
"""


def _variables(text):
    return dict(word.split("=", 1) for word in text.split())


def _ranks(common, *each):
    return [{**common, **own} for own in each]


def _recorded(text):
    """Return the variables of each rank: the common ones, and its own after ``rank:``."""
    return _ranks(*map(_variables, text.split("rank:")))


# `torchrun --standalone --nproc-per-node=2`.
TORCHRUN = _recorded(
    """
    LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=46457 TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=4adf8804-a5ff-4299-8244-43cf25771e2e TORCHELASTIC_USE_AGENT_STORE=True
    WORLD_SIZE=2
    rank: LOCAL_RANK=0 RANK=0
    rank: LOCAL_RANK=1 RANK=1
    """
)

# `srun -N2 -n4`.
SRUN = _recorded(
    """
    SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=3,1
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_PROCID=1
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=2 SLURM_NODEID=0 SLURM_PROCID=2
    rank: SLURMD_NODENAME=n2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=3
    """
)

# `srun -N2 -n4 --distribution=cyclic`.
SRUN_CYCLIC = _recorded(
    """
    SLURM_DISTRIBUTION=cyclic SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=3,1
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0
    rank: SLURMD_NODENAME=n2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=1
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_PROCID=2
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=2 SLURM_NODEID=0 SLURM_PROCID=3
    """
)

# `srun` in a script for `sbatch -N2 -n4`.
SRUN_IN_SBATCH = [{**each, "SLURM_DISTRIBUTION": "block", "SLURM_JOB_ID": "3"} for each in SRUN]

# `srun -n1 ... : -n2 ...`.
HETEROGENEOUS = _recorded(
    """
    SLURM_DISTRIBUTION=block SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=3 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
    SLURM_STEP_TASKS_PER_NODE=1,2
    rank: SLURMD_NODENAME=n1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0
    rank: SLURMD_NODENAME=n2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=1
    rank: SLURMD_NODENAME=n2 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=2
    """
)

# `mpirun -n 2`.
MPIRUN = _recorded(
    """
    OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_SIZE=2
    OMPI_MCA_orte_hnp_uri=1648492544.0;tcp://192.0.2.2:56007;tcp6://[fd00::2]:39497
    OMPI_MCA_orte_local_daemon_uri=1648492544.0;tcp://192.0.2.2:56007;tcp6://[fd00::2]:39497
    PMIX_NAMESPACE=1648492545
    rank: OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0
    rank: OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1
    """
)

# `mpirun -n 4` in a script for `sbatch -N2 -n4`: its daemons are SLURM tasks.
MPIRUN_IN_SBATCH = _recorded(
    """
    OMPI_COMM_WORLD_SIZE=4
    OMPI_MCA_orte_hnp_uri=1964376064.0;tcp://192.0.2.2:55459;tcp6://[fd00::2]:35489
    PMIX_NAMESPACE=1964376065 SLURM_DISTRIBUTION=cyclic SLURM_JOB_ID=3 SLURM_JOB_NUM_NODES=2
    SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_STEP_ID=1
    SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=1(x2)
    rank: OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_RANK=0
      OMPI_MCA_orte_local_daemon_uri=1964376064.1;tcp://192.0.2.2:55139;tcp6://[fd00::2]:44645
      PMIX_RANK=0 SLURMD_NODENAME=n1 SLURM_NODEID=0 SLURM_PROCID=0
    rank: OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_RANK=1
      OMPI_MCA_orte_local_daemon_uri=1964376064.1;tcp://192.0.2.2:55139;tcp6://[fd00::2]:44645
      PMIX_RANK=1 SLURMD_NODENAME=n1 SLURM_NODEID=0 SLURM_PROCID=0
    rank: OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_RANK=2
      OMPI_MCA_orte_local_daemon_uri=1964376064.1;tcp://192.0.2.2:55139;tcp6://[fd00::2]:44645
      PMIX_RANK=2 SLURMD_NODENAME=n1 SLURM_NODEID=0 SLURM_PROCID=0
    rank: OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_RANK=3
      OMPI_MCA_orte_local_daemon_uri=1964376064.2;tcp://192.0.2.2:46229;tcp6://[fd00::2]:51101
      PMIX_RANK=3 SLURMD_NODENAME=n2 SLURM_NODEID=1 SLURM_PROCID=1
    """
)

# A shell of `salloc -N2 -n4`.
SALLOC_SHELL = _variables("SLURM_JOB_ID=2 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4")

# The script of `sbatch -N2 -n4`.
SBATCH_SHELL = _variables(
    """
    SLURMD_NODENAME=n1 SLURM_JOB_ID=3 SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NODEID=0
    SLURM_NTASKS=4 SLURM_PROCID=0
    """
)

# The script of `sbatch`.
SBATCH_SHELL_OF_ONE = _variables(
    """
    SLURMD_NODENAME=n1 SLURM_JOB_ID=4 SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0 SLURM_NODEID=0
    SLURM_PROCID=0
    """
)

# The following variables come from the platforms' documents and sources, for jobs that start a
# script without torchrun. Each entry: the platform's name, the environments of the ranks, and the
# environment of a job with one rank.


def _job(ranks, alone=""):
    return _recorded(ranks), _variables(alone) or None


_SKYPILOT = {
    "SKYPILOT_CLUSTER_INFO": '{"cluster_name": "train", "cloud": "AWS", "region": "us-east-1"}',
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    "SKYPILOT_TASK_ID": "sky-2026-11-02-12-10-28-124334_train_1",
}
_EACH_OF_SKYPILOT = ({"SKYPILOT_NODE_RANK": "0"}, {"SKYPILOT_NODE_RANK": "1"})
_SAGEMAKER = "SM_NETWORK_INTERFACE_NAME=eth0 SM_NUM_GPUS=8 SM_USER_ENTRY_POINT=train.py"
_BATCH = "AWS_BATCH_JOB_ID=4f2ad0f2 AWS_BATCH_JOB_MAIN_NODE_INDEX=0"
_POD = "KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_PORT=tcp://10.96.0.1:443"
_TRAINER = f"{_POD} PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500 PET_NPROC_PER_NODE=auto"
_VOLCANO = f"{_POD} VC_PS_NUM=1 VC_PS_HOSTS=job-ps-0.job"

SEVERAL = {
    "an Indexed Job": _job(
        f"""{_POD}
        rank: JOB_COMPLETION_INDEX=0 HOSTNAME=train-0
        rank: JOB_COMPLETION_INDEX=1 HOSTNAME=train-1""",
        f"{_POD} HOSTNAME=train-8x2kq",
    ),
    "SkyPilot": (
        _ranks(
            _SKYPILOT | {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.1.4\n10.0.1.5"},
            *_EACH_OF_SKYPILOT,
        ),
        _SKYPILOT
        | _variables("SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_IPS=10.0.1.4 SKYPILOT_NODE_RANK=0"),
    ),
    "SkyPilot 0.5": (
        _ranks(_SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.1.4\n10.0.1.5\n"}, *_EACH_OF_SKYPILOT),
        _SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.1.4\n", "SKYPILOT_NODE_RANK": "0"},
    ),
    "PMIx": _job(
        """PMIX_NAMESPACE=prterun-n1-6120@1 PMIX_SERVER_TMPDIR=/tmp/prte.n1
        rank: PMIX_RANK=0
        rank: PMIX_RANK=1"""
    ),
    "Horovod": _job(
        """HOROVOD_SIZE=2 HOROVOD_LOCAL_SIZE=2 HOROVOD_CROSS_SIZE=1
        rank: HOROVOD_RANK=0 HOROVOD_LOCAL_RANK=0 HOROVOD_CROSS_RANK=0
        rank: HOROVOD_RANK=1 HOROVOD_LOCAL_RANK=1 HOROVOD_CROSS_RANK=0""",
        "HOROVOD_SIZE=1 HOROVOD_LOCAL_SIZE=1 HOROVOD_RANK=0 HOROVOD_LOCAL_RANK=0",
    ),
    "SageMaker": _job(
        f"""{_SAGEMAKER} SM_HOSTS=["algo-1","algo-2"]
        rank: SM_CURRENT_HOST=algo-1
        rank: SM_CURRENT_HOST=algo-2""",
        f'{_SAGEMAKER} SM_HOSTS=["algo-1"] SM_CURRENT_HOST=algo-1',
    ),
    "Kubeflow": _job(
        f"""{_TRAINER} PET_NNODES=2
        rank: PET_NODE_RANK=0 JOB_COMPLETION_INDEX=0
        rank: PET_NODE_RANK=1 JOB_COMPLETION_INDEX=1""",
        f"{_TRAINER} PET_NNODES=1 PET_NODE_RANK=0 JOB_COMPLETION_INDEX=0",
    ),
    "Volcano": _job(
        f"""{_VOLCANO} VC_WORKER_NUM=2 VC_WORKER_HOSTS=job-w-0.job,job-w-1.job
        rank: VC_TASK_INDEX=0 VK_TASK_INDEX=0
        rank: VC_TASK_INDEX=1 VK_TASK_INDEX=1""",
        f"{_POD} VC_WORKER_NUM=1 VC_WORKER_HOSTS=job-w-0.job VC_TASK_INDEX=0",
    ),
    "a LeaderWorkerSet": _job(
        f"""{_POD} LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=train-0.train.default
        rank: LWS_WORKER_INDEX=0
        rank: LWS_WORKER_INDEX=1""",
        f"{_POD} LWS_GROUP_SIZE=1 LWS_LEADER_ADDRESS=train-0 LWS_WORKER_INDEX=0",
    ),
    "AWS Batch": _job(
        f"""{_BATCH} AWS_BATCH_JOB_NUM_NODES=2
        rank: AWS_BATCH_JOB_NODE_INDEX=0
        rank: AWS_BATCH_JOB_NODE_INDEX=1 AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.7""",
        f"{_BATCH} AWS_BATCH_JOB_NUM_NODES=1 AWS_BATCH_JOB_NODE_INDEX=0",
    ),
    "dstack": _job(
        """DSTACK_NODES_NUM=2 DSTACK_GPUS_PER_NODE=8
        rank: DSTACK_NODE_RANK=0
        rank: DSTACK_NODE_RANK=1""",
        "DSTACK_NODES_NUM=1 DSTACK_GPUS_PER_NODE=8 DSTACK_NODE_RANK=0",
    ),
    "jsrun": _job(
        """JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_SIZE=1
        rank: JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_LOCAL_RANK=0 PMIX_RANK=0
        rank: JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_LOCAL_RANK=0 PMIX_RANK=1""",
        "JSM_NAMESPACE_SIZE=1 JSM_NAMESPACE_RANK=0 PMIX_RANK=0",
    ),
    "Intel MPI": _job(
        """PMI_SIZE=2 MPI_LOCALNRANKS=2 I_MPI_HYDRA_TOPOLIB=hwloc
        rank: PMI_RANK=0 MPI_LOCALRANKID=0
        rank: PMI_RANK=1 MPI_LOCALRANKID=1""",
        "PMI_SIZE=1 PMI_RANK=0 MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0",
    ),
    "Ray": _job("rank: RAY_LOCAL_WORLD_SIZE=4 RAY_JOB_ID=01000000", "RAY_JOB_ID=01000000"),
}

# A notebook in a pod, on SageMaker and on a workstation, a pod of a StatefulSet, a sweep.
ALONE = {
    name: _variables(text)
    for name, text in {
        "notebook in a pod": f"{_POD} HOSTNAME=jupyter-ann JUPYTERHUB_USER=ann",
        "notebook on SageMaker": "SM_CURRENT_HOST= AWS_REGION=eu-west-1",
        "plain shell": "PATH=/usr/bin SHELL=/bin/bash HOSTNAME=login1",
        "stateful set": f"{_POD} HOSTNAME=web-3",
        "array job": "SGE_TASK_ID=3 AWS_BATCH_JOB_ARRAY_INDEX=3 LSB_JOBINDEX=3",
        "ray task": "RAY_JOB_ID=01000000 RAY_ADDRESS=10.0.0.1:6379",
    }.items()
}
