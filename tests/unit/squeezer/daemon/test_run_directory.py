"""squeezer/daemon/run_directory.py: what a killed daemon has left goes, and what another one uses stays."""

import os
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path, socket_of
from ds_hooks.shared.page.layout import Role
from ds_hooks.shared.processes.identity import own_namespaces
from squeezer.daemon import run_directory
from squeezer.daemon.run_directory import claim_directory, remove_dead_directory, remove_left


def test_only_what_no_daemon_uses_is_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    page = Page.open(page_path(tmp_path, 0))
    page.claim(Role.DAEMON)
    socket = socket_of(page.path)
    socket.touch()
    assert not remove_left(tmp_path, 0)
    assert socket.exists() and page.path.exists()
    page.words[Role.DAEMON] = 0  # as if it had been killed: the main job still has the page
    assert remove_left(tmp_path, 0)
    assert not socket.exists() and page.path.exists()
    page.close()
    assert remove_left(tmp_path, 0), "there is nothing"


def test_one_of_another_pid_namespace_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that shares the folder: its processes cannot be seen from here."""
    here, made = own_namespaces(), tmp_path / "run-1"
    made.mkdir()
    with monkeypatch.context() as elsewhere:
        there = here._replace(pid_namespace=here.pid_namespace + 1)
        elsewhere.setattr(run_directory, "own_namespaces", lambda: there)
        os.close(claim_directory(made))
    assert not remove_dead_directory(made) and made.exists()
    os.close(claim_directory(made))
    assert remove_dead_directory(made) and not made.exists()
