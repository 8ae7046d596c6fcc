"""Measurements of the project, and the ghost pipeline that they run on.

Nothing here is part of the installed package. Raw runs lie in `benchmarks/results/`.
"""
