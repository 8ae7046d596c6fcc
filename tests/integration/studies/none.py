"""Nothing of a study."""
