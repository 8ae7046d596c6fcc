"""What several benchmarks use. No module here is a benchmark."""
