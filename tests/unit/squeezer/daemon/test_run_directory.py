"""squeezer/daemon/run_directory.py: what a killed daemon has left goes, and what another one uses stays."""

from pathlib import Path

from ds_hooks.shared.page.file import Page, page_path, socket_of
from ds_hooks.shared.page.layout import Role
from squeezer.daemon.run_directory import remove_left


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
