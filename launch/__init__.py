"""The launcher `ds_squeeze`, the bootstrap of each rank, and examples of service files.

No process that runs user code imports this package.
"""
