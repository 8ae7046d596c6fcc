"""How trials are scored: losses, scores, metrics and their history."""
