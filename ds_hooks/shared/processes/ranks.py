"""Which rank a process is, by the environment that its launcher gave it.

The hooks, `rank.py` and the daemon all ask here, so that they agree on page, socket and records. The first name that is
set counts: a job inside a Slurm allocation also has Slurm's variables, which are those of the batch script.
"""

from collections.abc import Mapping, Sequence

RANK = (
    "RANK",  # DeepSpeed's launcher, torchrun
    "OMPI_COMM_WORLD_RANK",  # Open MPI
    "MV2_COMM_WORLD_RANK",  # MVAPICH 2
    "MVP_COMM_WORLD_RANK",  # MVAPICH 3 and later
    "PMI_RANK",  # MPICH and Intel MPI (Hydra)
    "PALS_RANKID",  # HPE Cray
    "FLUX_TASK_RANK",  # Flux
    "SLURM_PROCID",  # Slurm's srun
)
"""Names of the rank in the job."""
LOCAL_RANK = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MVP_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
"""Names of the rank among those of its machine."""
LOCAL_SIZE = (
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MVP_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)
"""Names of the number of ranks on the machine."""

MASTER_PORT = ("MASTER_PORT",)
"""Names of the port at which the ranks of a job meet, so all of them have the same."""


def first_number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The first of `names` that is set to a whole number; None: none is."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)
