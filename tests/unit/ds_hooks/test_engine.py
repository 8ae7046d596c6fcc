"""Which releases of DeepSpeed the hooks serve, and what they say of others."""

import sys
from types import SimpleNamespace

import pytest

from ds_hooks import attach
from ds_hooks.engine import AttachError, check_release
from tests.support.hooked_engine import Daemon, Engine


@pytest.mark.parametrize("release", ["0.16.9", "0.17.6", "0.18.2", "0.19.3", "0.19.8", "0.19.8+cu128", "0.19.8.dev1"])
def test_a_tested_release_is_served_without_a_word(release: str) -> None:
    assert check_release(release) is None


@pytest.mark.parametrize("release", ["0.14.0", "0.16.8", "0.20.0", "0.19.9", "1.0", "unknown", ""])
def test_an_untested_release_is_named(release: str) -> None:
    assert f"DeepSpeed {release} is untested" in str(check_release(release))


@pytest.mark.parametrize("release", ["0.18.3", "0.18.9", "0.19.0", "0.19.2", "0.19.2+abc"])
def test_a_release_whose_pipelines_are_broken_is_refused(release: str) -> None:
    with pytest.raises(AttachError, match=r"hang or scale gradients wrongly; allowed: .* 0\.19\.3"):
        check_release(release)


@pytest.mark.parametrize(("release", "served"), [("0.19.2", False), ("9.9.9", True)])
def test_attaching_says_so_in_one_line_and_the_training_goes_on(
    release: str,
    served: bool,
    engine: Engine,
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=release))
    handle = attach(engine, directory=daemon.page.path.parent, local_rank=0)
    assert handle.enabled is served
    assert engine.train_batch() == 0.5
    handle.detach()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"DeepSpeed {release}" in said
