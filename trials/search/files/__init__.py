"""Checkpoints and the best weights as files: on this host, and in a store that hosts share."""
