"""Which axes of a model's tensors must have equal sizes, found by running its forward once.

`trace` follows it while `run` runs it. `elementwise`, `shapes` and `products` say what calls of PyTorch mean for axes.
An `axis` belongs to a class of equal size; `sizes` are integers that know whose size they are. `origin` tells which
parameters a weight is made of.
"""
