"""The process that talks to Optuna, and the training process's line to it."""
