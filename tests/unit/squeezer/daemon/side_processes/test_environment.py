"""What a side task learns of the job beside which it runs."""

import importlib.util
import re
from pathlib import Path

import pytest

from ds_hooks.shared.processes.ranks import LOCAL_RANK, LOCAL_SIZE, MASTER_PORT, RANK
from squeezer.daemon.side_processes.environment import side_environment

KEPT = {
    "PATH": "/bin",
    "HOME": "/root",
    "HF_HOME": "/hf",
    "http_proxy": "x",
    "SQUEEZER_DIR": "/d",
    "DS_ACCELERATOR": "cpu",
}


@pytest.mark.parametrize(
    "name",
    [
        *(
            *RANK,
            *LOCAL_RANK,
            *LOCAL_SIZE,
            *MASTER_PORT,
            "WORLD_SIZE",
            "MASTER_ADDR",
            "CROSS_RANK",
            "JSM_NAMESPACE_RANK",
        ),
        "PMIX_RANK",
        *("TORCHELASTIC_RUN_ID", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "WANDB_RUN_ID"),
        *("NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"),
        *("CUDA_SCALE_LAUNCH_QUEUES", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_TUNABLEOP_ENABLED"),
        *("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_PROC_BIND", "OMP_PLACES"),
        *("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET"),
        *("PYTORCH_ALLOC_CONF", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
    ],
)
def test_what_says_which_rank_or_run_it_is_stays_behind(name: str) -> None:
    assert side_environment({**KEPT, name: "1"}) == KEPT


@pytest.mark.parametrize(
    ("module", "sets"),
    [
        ("torch.distributed.elastic.agent.server.local_elastic_agent", r'^ +"([A-Z_]+)": '),
        ("deepspeed.launcher.launch", r'^ +current_env\["?([A-Z_]+)"?\] = '),
    ],
)
def test_all_that_a_launcher_tells_a_rank_stays_behind(module: str, sets: str) -> None:
    """By the launcher's own code, so that what a later release sets is found."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    told = set(re.findall(sets, source, re.MULTILINE)) - {"OMP_NUM_THREADS"}  # the device sets that anew
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= told
    assert side_environment({**KEPT, **dict.fromkeys(told, "1")}) == KEPT


def test_builders_lock_directories_of_its_own() -> None:
    made = side_environment({**KEPT, "TRITON_CACHE_DIR": "/ranks"}, Path("/run/caches/rank1"))
    assert made["TRITON_CACHE_DIR"] == "/run/caches/rank1/triton"
    assert made.keys() - KEPT.keys() == {
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "NUMBA_CACHE_DIR")
    }
