"""The names of what we write to Optuna's trials, as user attributes."""

WORKER = "squeezer_worker"
"""Who has it, or had it last."""

PARAMS = "squeezer_params"
"""What `Study.suggest` returned, as JSON. A trial has it once it has begun."""

REASON = "squeezer_reason"
"""Why it failed."""

HISTORY = "squeezer_history"
"""Its losses, scores and metrics so far."""

MILESTONE = "squeezer_milestone"
"""Under promotion, the epoch up to which it may train. It waits there for the next one."""

CHECKPOINTS = "squeezer_checkpoints"
"""The names of its last checkpoints in the study's artifact store; see `trials.search.files.shared_store`."""

SOURCE = "squeezer_source"
"""Of a trial that trains a study's target: whose hyperparameters it has."""
