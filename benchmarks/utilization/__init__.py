"""The parts of `benchmarks.bubble_utilization`: windows, baselines, scenarios and figures."""
