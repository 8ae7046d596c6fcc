"""Starts a script's two ranks in DeepSpeed's launcher's way: `two_ranks.py --master_port PORT [--module] SCRIPT …`.

The launcher imports DeepSpeed twice before any rank starts, which takes half of a short job's time.
"""

import os
import subprocess
import sys
from contextlib import suppress

RANKS = 2


def main() -> int:
    """Return the status of the rank that failed first, or 0, and end the other one."""
    _, _, port, *command = sys.argv
    module = command[0] == "--module"
    target, *arguments = command[module:]
    ranks = []
    for rank in range(RANKS):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "MASTER_PORT": port}
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            **{name: str(value) for name, value in numbers.items()},
        }
        python = [sys.executable, "-u", *(["-m"] if module else []), target, f"--local_rank={rank}"]
        ranks.append(subprocess.Popen([*python, *arguments], env=environment))
    failed = 0
    for _ in range(RANKS):
        with suppress(ChildProcessError):  # both have ended, and `terminate` has noticed that
            _, status = os.wait()
            failed = failed or os.waitstatus_to_exitcode(status)
        if failed:
            for each in ranks:  # the other one would wait for it for ever
                each.terminate()
    return failed


if __name__ == "__main__":
    sys.exit(main())
