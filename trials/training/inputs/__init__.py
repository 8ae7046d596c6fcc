"""What a study gives a trial: batches, models, schedulers; and refusals of what would be shared or lost."""
