"""The process that talks to Optuna, and the training process's end of the line to it."""
