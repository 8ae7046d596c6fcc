"""The environment of a side task: that of the main job's rank, without what says which rank, job or run that is.

Otherwise a study that looks there would join the main job's process group, write to its tracked run, or wait for its
peers. How the main job uses its device is left out, too: it was chosen for that job, and may not suit a side task. What
only says where things are, such as PATH or a proxy, stays.
"""

from collections.abc import Mapping
from pathlib import Path

_NAMES = frozenset(
    {
        # torch's and DeepSpeed's launchers
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "NNODES",
        "NPROC_PER_NODE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "INIT_METHOD",
        # MPI, NCCL, clouds
        "CROSS_RANK",
        "CROSS_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "DLTS_JOB_ID",
        "DEEPSPEED_TIMEOUT",
        "SM_TRAINING_ENV",
        # how the main job uses its device
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_SCALE_LAUNCH_QUEUES",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        # and its cores: threads that spin while they have nothing to do would do so outside bubbles, too
        "GOMP_SPINCOUNT",
        "KMP_BLOCKTIME",
        "KMP_LIBRARY",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
        "KMP_HW_SUBSET",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        # the main job's run in a tracker
        "WANDB_RUN_ID",
        "WANDB_RESUME",
        "MLFLOW_RUN_ID",
        "COMET_EXPERIMENT_KEY",
        "CLEARML_TASK_ID",
    }
)
_PREFIXES = (
    *("SLURM", "SRUN_", "SBATCH_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "ORTE_", "MV2_", "MVP_", "I_MPI_", "HYDRA_"),
    *("PALS_", "FLUX_", "JSM_"),
    *("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DIST", "NCCL_", "DS_AUTOTUNING", "AZUREML_"),
    "PYTORCH_TUNABLEOP_",  # it would measure in bubbles, and write to the rank's file
    "CUDA_MPS_",  # the device names anew what holds for the side task
)
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "NUMBA_CACHE_DIR": "numba",
}
"""Builders lock these. A rank must never wait there for a side task that is stopped."""


def side_environment(environment: Mapping[str, str], caches: Path | None = None) -> dict[str, str]:
    """The environment of what a daemon or a launcher starts beside the main job.

    Args:
        environment: of the rank.
        caches: where the side task's builders keep their results; None: as the rank's.
    """
    kept = {name: value for name, value in environment.items() if not _is_the_jobs(name)}
    return kept if caches is None else {**kept, **{name: str(caches / folder) for name, folder in _CACHES.items()}}


def _is_the_jobs(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)
