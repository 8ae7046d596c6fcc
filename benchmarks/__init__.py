"""Benchmarks, and the ghost pipeline that they run on.

Not part of the installed package. Raw runs are in `benchmarks/results/`; `docs/benchmarks.md` explains each figure.
"""

from ds_hooks.shared.renamed_commands import refuse_moved_module

refuse_moved_module()
