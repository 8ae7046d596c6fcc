"""The user's loss and score, computed for K trials at once."""
