"""The parts of `benchmarks.bubble_utilization`: scenarios and figures."""
