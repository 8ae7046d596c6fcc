"""The Model Shrinker: a narrow surrogate of a model whose best hyperparameters are the model's own.

`slicing` makes a surrogate by `plan`, which runs the target's forward once (`axes`). `roles` finds how each
parameter's fans have shrunk, `rules` what follows for its rate, decay, eps and clipping, and `scaled_optimizer` applies
it. `initial_values` corrects what a user's own code has drawn.
"""
