"""launch/terminal.py: whom Ctrl-C reaches, on a terminal of this test's own."""

import os
import subprocess
import sys

ASK = "from launch.terminal import is_in_foreground; print(is_in_foreground())"


def test_on_a_terminal_only_the_foreground_is_reached() -> None:
    ask = [sys.executable, "-c", ASK]
    child, terminal = os.forkpty()
    if child == 0:
        subprocess.run(ask, check=True)  # in the foreground's process group
        subprocess.run(ask, check=True, process_group=0)
        os._exit(0)
    said = b""
    try:
        while part := os.read(terminal, 4096):
            said += part
    except OSError:
        pass  # the other end has closed it
    assert os.waitpid(child, 0)[1] == 0
    assert said.split() == [b"True", b"False"]


def test_without_a_terminal_nobody_is_reached() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK], start_new_session=True, capture_output=True, text=True)
    assert asked.stdout == "False\n", asked.stderr
