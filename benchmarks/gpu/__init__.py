"""The parts of `benchmarks.gpu_suite`, and the fake driver that stands for a GPU in tests."""
