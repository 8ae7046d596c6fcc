"""The side task's process: which trials train when, and on which device."""
