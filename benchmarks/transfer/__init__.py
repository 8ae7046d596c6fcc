"""Whether the best hyperparameters of surrogates are their targets': see `benchmarks/transfer/__main__.py`."""
