"""What Optuna's trials carry of ours: the names of their user attributes."""

WORKER = "squeezer_worker"
PARAMS = "squeezer_params"
REASON = "squeezer_reason"
HISTORY = "squeezer_history"
