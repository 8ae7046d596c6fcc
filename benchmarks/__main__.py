"""Runs every benchmark that needs no GPU, one after another: python -m benchmarks.

Raw results go to `benchmarks/results/`. Options, such as `--quick`, are passed to each.
"""

import subprocess
import sys

from benchmarks.shared.paths import RESULTS

NAMES = (
    "hooks_overhead",
    "latency",
    "wake_up",
    "neighbour",
    "pauses",
    "shortest_bubble",
    "real_jobs",
    "bubble_utilization",
    "ghost_twins",
    "fusion",
    "most_fused",
    "adapters",
    "compiled",
    "audit",
    "refill",
    "search_cost",
    "study",
    "guard_power",
    "transfer",
)

for name in NAMES:
    results = RESULTS / f"{name}.json"
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:], "--json", str(results)], check=True)
