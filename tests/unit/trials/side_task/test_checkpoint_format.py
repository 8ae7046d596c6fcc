"""A trial on disk."""

import hashlib
import io
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch import nn

from tests.support.fused_and_solo import ToyStudy, members
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.side_task.checkpoint_format import MAGIC, CheckpointError, load, save, save_weights

DIGEST_BYTES = 32


def test_what_a_later_pytorch_has_written_is_as_good_as_damaged(tmp_path: Path) -> None:
    """A trial goes on from an older file then; any other error would fail it."""
    study, path = ToyStudy(lambda n: nn.Linear(2, 1)), tmp_path / "1-1.pt"
    save(TrialGroup(study, members(study, [3]), OpenGate()).export(0), path)
    assert load(path).number == 3
    content = path.read_bytes()[len(MAGIC) + DIGEST_BYTES :]
    with ZipFile(io.BytesIO(content)) as now, ZipFile(written := io.BytesIO(), "w") as later:
        for name in now.namelist():
            later.writestr(name, b"999" if name.endswith("/version") else now.read(name))
    digest = hashlib.blake2b(written.getvalue(), digest_size=DIGEST_BYTES).digest()
    path.write_bytes(MAGIC + digest + written.getvalue())
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    with pytest.raises(CheckpointError, match=r"1-1\.pt: RuntimeError: .* file with version 999"):
        load(path)


def test_a_trial_and_its_weights_are_for_their_user_alone(tmp_path: Path) -> None:
    """A model may remember what it was trained on."""
    study = ToyStudy(lambda n: nn.Linear(2, 1))
    save(TrialGroup(study, members(study, [3]), OpenGate()).export(0), tmp_path / "1-1.pt")
    save_weights(nn.Linear(2, 1).state_dict(), tmp_path / "weights.pt")
    assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0, 0]
