"""Ranks by the launcher's variables: hooks, `rank.py` and daemon find the same ones."""

from pathlib import Path

import pytest

from ds_hooks import attach
from ds_hooks.shared.page.file import page_path
from ds_hooks.shared.processes.ranks import LOCAL_RANK, LOCAL_SIZE, RANK, first_number
from launch import rank
from tests.support.hooked_engine import Engine

LAUNCHERS = {
    "deepspeed": {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"},
    "torchrun": {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "mvapich": {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4"},
    "mvapich 3": {"MVP_COMM_WORLD_RANK": "5", "MVP_COMM_WORLD_LOCAL_RANK": "1", "MVP_COMM_WORLD_LOCAL_SIZE": "4"},
    "cray": {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"},
    "impi": {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    "slurm": {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"},
}
IN_AN_ALLOCATION = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, *LOCAL_RANK, *LOCAL_SIZE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launchers_ranks_are_known_inside_an_allocation_too(launcher: str) -> None:
    environment = {**IN_AN_ALLOCATION, **LAUNCHERS[launcher]}
    found = [first_number(environment, names) for names in (RANK, LOCAL_RANK, LOCAL_SIZE)]
    assert found == [5, 1, 4]


def test_flux_does_not_say_how_many_ranks_a_machine_has() -> None:
    environment = {"FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1"}
    assert [first_number(environment, names) for names in (RANK, LOCAL_RANK, LOCAL_SIZE)] == [5, 1, None]


def test_what_is_no_number_does_not_count() -> None:
    assert first_number({"SLURM_NTASKS_PER_NODE": "4(x2)"}, LOCAL_SIZE) is None
    assert first_number({"LOCAL_RANK": "-1", "SLURM_LOCALID": "3"}, LOCAL_RANK) == 3


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_hooks_and_daemon_take_the_same_device_and_records_never_share_a_name(
    launcher: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    handle = attach(engine, directory=tmp_path / "run")
    assert handle.enabled and page_path(tmp_path / "run", 1).exists()
    handle.detach()
    exported = rank.daemon_environment(dict(LAUNCHERS[launcher]), local_rank=1)
    assert (exported["RANK"], exported["LOCAL_RANK"]) == ("5", "1")


def test_without_a_launcher_the_only_process_is_rank_0() -> None:
    assert rank.daemon_environment({}, local_rank=0)["RANK"] == "0"
