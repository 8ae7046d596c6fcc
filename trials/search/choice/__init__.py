"""Which trials a worker gets next, and with which hyperparameters."""
