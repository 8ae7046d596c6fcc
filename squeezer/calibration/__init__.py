"""Measures, in two processes, what two programs on one CUDA device do to each other, and what that allows.

Needs the standard library and the driver alone: no torch, no package. The figures' names and what each decides:
`figures.py`.
"""
