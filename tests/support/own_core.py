"""A plugin of pytest that gives each of xdist's workers a core: `pytest -n logical -p tests.support.own_core`.

A main job shares that core with its own side task and daemon, as in use, and with no other test's processes.
"""

import os

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker:  # before torch is imported, which starts a thread for each core that it may use
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})
