"""A client of `benchmarks.gpu_mps_faults` without a device. What would spin says nothing, as if the driver held it.

The file HANGS then exists, and has the number of scenarios that are on disk in the file RESULTS.
"""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    results = Path(os.environ["RESULTS"])
    if sys.argv[3] == "spins":
        on_disk = len(json.loads(results.read_text())["runs"])
        Path(os.environ["HANGS"]).write_text(f"{os.getpid()} {on_disk}\n")
    else:
        print("ready", flush=True)
    time.sleep(1000)
