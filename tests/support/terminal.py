"""An interactive shell with job control, in a session and on a terminal of its own."""

import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.sandbox import Sandbox, wait_for


class Terminal:
    """The end of the terminal at which the user sits.

    Args:
        environment: of the shell.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._said = b""
        self.shell, self._fd = os.forkpty()
        if self.shell == 0:
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**environment, "PS1": "$ "})

    def type(self, text: str) -> None:
        """Type `text`; a line ends with a newline."""
        os.write(self._fd, text.encode())

    def said(self) -> str:
        """All that the terminal has shown."""
        with suppress(OSError):  # hung up
            while select.select([self._fd], [], [], 0)[0]:
                self._said += os.read(self._fd, 65536)
        return self._said.decode(errors="replace")

    def shell_ended(self) -> bool:
        """Whether the shell has left."""
        self.said()
        return not self.shell or (os.waitpid(self.shell, os.WNOHANG)[0] != 0 and self._reaped())

    def close(self) -> None:
        """Take the terminal away."""
        if self.shell:
            os.kill(self.shell, signal.SIGKILL)
            os.waitpid(self.shell, 0)
        os.close(self._fd)

    def _reaped(self) -> bool:
        self.shell = 0
        return True


@contextmanager
def new_terminal(sandbox: Sandbox) -> Iterator[Terminal]:
    """A terminal whose shell finds our packages."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    terminal = Terminal({**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu"})
    try:
        wait_for(lambda: "$ " in terminal.said(), "the shell")
        yield terminal
    finally:
        terminal.close()


def rank_command(sandbox: Sandbox, config: Path, *options: str) -> str:
    """What DeepSpeed starts once per rank, with a metronome for the training."""
    named = {"SQUEEZER_DIR": sandbox.directory, "SQUEEZER_CONFIG": config, "SQUEEZER_RUN": sandbox.run}
    words = ["env", *(f"{name}={value}" for name, value in named.items()), sys.executable]
    return " ".join([*words, str(ROOT / "launch" / "rank.py"), str(ROOT / "tests/support/metronome.py"), *options])
