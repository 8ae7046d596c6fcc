"""Where process ids mean the same."""

from pathlib import Path

import pytest

from ds_hooks.shared.processes import identity
from ds_hooks.shared.processes.identity import own_namespaces, why_apart


@pytest.mark.parametrize("changed", [0, -1])
def test_another_machine_or_start_is_told_by_its_boot_id(
    changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = own_namespaces()
    assert why_apart(here) is None
    digits = list(identity._BOOT_ID.read_text().strip())
    digits[changed] = "1" if digits[changed] == "0" else "0"
    (tmp_path / "boot_id").write_text("".join(digits))
    monkeypatch.setattr(identity, "_BOOT_ID", tmp_path / "boot_id")
    assert "made on another machine, or before this one restarted" in str(why_apart(here))
