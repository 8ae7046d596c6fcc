"""`benchmarks.toggle` with each rank on its own core, as `ds_squeeze` binds it."""

import os

from benchmarks.toggle import main
from launch.rank import core_share

if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, core_share(cores, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_SIZE"])))
    main()
