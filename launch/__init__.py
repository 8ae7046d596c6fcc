"""The launcher `ds_squeeze`, the program that prepares each rank, and examples of service files.

No process that runs user code imports this package.
"""
