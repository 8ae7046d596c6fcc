"""Benchmarks, and the ghost pipeline that they run on.

Not part of the installed package. Raw runs are in `benchmarks/results/`; `docs/benchmarks.md` explains each figure.
"""
