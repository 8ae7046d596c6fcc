"""Runs one ghost stage and prints its waits: python -m benchmarks.ghost."""

from benchmarks.ghost.stage import main

main()
