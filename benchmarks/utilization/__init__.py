"""The parts of `benchmarks.bubble_utilization`: what is measured, and what it shows."""
