"""`squeezer`, whose side tasks run on a device that threads play."""

import sys

import squeezer.daemon.spawner
from squeezer.cli import main

if __name__ == "__main__":
    squeezer.daemon.spawner.SIDE_TASK = "tests.support.cuda_side_task"
    sys.exit(main())
