"""launch/release.py: what it starts learns neither the job's ranks, nor a password by its arguments."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hooks.shared.secrets import STORAGE_VARIABLE
from launch.release import release_trials
from squeezer.config import load_config

URL = "postgresql://me:s3cr3t@host/studies"
OF_THE_JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"}


def test_it_is_scrubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, dict[str, str]]] = []

    def run(command: Sequence[str], env: Mapping[str, str], **_: Any) -> SimpleNamespace:
        started.append((" ".join(command), dict(env)))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    for name, value in {**OF_THE_JOB, STORAGE_VARIABLE: URL}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "study.py").touch()
    (tmp_path / "s.toml").write_text(f'[side]\nstudy = "study.py"\nstorage = "{URL}"\n')
    config = load_config(str(tmp_path / "s.toml"))
    release_trials(tmp_path / "run", config)
    ((command, environment),) = started
    assert "s3cr3t" not in command and environment[STORAGE_VARIABLE] == URL
    assert not OF_THE_JOB.keys() & environment.keys()
