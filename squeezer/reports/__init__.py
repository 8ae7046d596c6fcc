"""What a user reads about a run: figures, report, causes, traces and pictures."""
