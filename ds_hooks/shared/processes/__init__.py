"""Processes: which one a number means, their ranks, lives and signals, and the CPU time of a side task."""
