"""A job on a terminal: what its user does there reaches the main job, and ours follows."""

import json
import os
import time
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import Sandbox, is_alive, stat, wait_for
from tests.support.terminal import new_terminal, rank_command

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_a_closed_terminal_does_not_reach_a_disowned_job_whose_side_task_is_stopped(sandbox: Sandbox) -> None:
    orders, said = sandbox.files / "orders", sandbox.files / "said"
    os.mkfifo(orders)
    steps = lambda: said.read_text().count("step ")  # noqa: E731
    with new_terminal(sandbox) as terminal:
        command = rank_command(sandbox, sandbox.config("stubborn.py"), "--compute-ms", "40")
        terminal.type(f"{command} < {orders} > {said} 2>&1 & disown\n")
        with orders.open("w") as orders_file:
            wait_for(lambda: sandbox.side("ready"), "the side task")
            sandbox.works()
            main, daemon = sandbox.word(Field.MAIN_PID), sandbox.word(Field.DAEMON_PID)
            side = sandbox.word(Field.SIDE_PROCESS)
            print(json.dumps({"stall_ms": 3000}), file=orders_file, flush=True)
            wait_for(lambda: stays_stopped(side), "a stopped side task")
            terminal.type("exit\n")
            wait_for(terminal.shell_ended, "the shell's end")
            print(json.dumps({"stall_ms": 0}), file=orders_file, flush=True)
            before = steps()
            wait_for(lambda: steps() >= before + 5 or not is_alive(main), "steps")
            assert all(map(is_alive, (main, daemon, side))), said.read_text()
            sandbox.works()
        wait_for(lambda: not sandbox.living(), "the end")
    assert "[ds_hooks] rank" not in said.read_text()
    assert sandbox.events("fault") == []


def stays_stopped(side: int) -> bool:
    """Whether the process is stopped for half a second."""
    deadline_s = time.monotonic() + 0.5
    while stat(side)[:1] == ["T"]:
        if time.monotonic() > deadline_s:
            return True
        time.sleep(0.01)
    return False


def test_ctrl_c_ends_all_and_what_we_print_stops_nothing_on_a_terminal_for_the_foreground_alone(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with new_terminal(sandbox) as terminal:
        terminal.type("stty tostop\n")
        terminal.type(rank_command(sandbox, sandbox.config("crashes.py", max_restarts=0)) + "\n")
        wait_for(lambda: "is given up" in terminal.said(), "what the daemon prints")
        daemon = sandbox.word(Field.DAEMON_PID)
        main = sandbox.word(Field.MAIN_PID)
        assert os.getpgid(daemon) != os.getpgid(main), "what is stopped there is hung up with it"
        assert os.getsid(daemon) == os.getsid(main), "the kernel would share the core between sessions"
        wait_for(lambda: terminal.said().count("step ") > 10, "steps")
        assert is_alive(daemon) and stat(daemon)[0] != "T"
        terminal.type("\x03")
        wait_for(lambda: not sandbox.living(), "the end of all")
        assert len(sandbox.events("end")) == 1
