"""`squeezer daemon`, eager: records are on disk after each message, and it waits less where tests would wait along.

    python -m tests.support.eager_daemon daemon --config …

`$PATIENCE_S`: how long a silent job is borne.
"""

import os

from squeezer.cli import main
from squeezer.daemon import daemon_keeper, loop, main_job
from squeezer.policy import state

if __name__ == "__main__":
    main_job.RECORDS_AT_ONCE = 1
    daemon_keeper.RESTART_AFTER_S, daemon_keeper.LOOK_EVERY_S = 0.1, 0.2
    loop.RANK_ENDS_WITHIN_S = 0.5
    if "PATIENCE_S" in os.environ:
        state.PATIENCE_NS = int(float(os.environ["PATIENCE_S"]) * 1e9)
    raise SystemExit(main())
