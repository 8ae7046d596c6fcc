"""The parts of `benchmarks.gpu_suite`, and the fake driver that replaces a GPU in tests."""
