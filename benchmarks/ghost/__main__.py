"""python -m benchmarks.ghost: run one ghost stage and print its waits."""

from benchmarks.ghost.stage import main

main()
