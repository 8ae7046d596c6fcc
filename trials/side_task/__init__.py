"""The side task's process: what is trained when, and on which device."""
