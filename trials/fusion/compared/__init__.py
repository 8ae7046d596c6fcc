"""What must be equal for trials to be fused, and what they share: found, described and compared."""
