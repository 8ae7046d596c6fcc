"""A ghost pipeline: one process runs one true stage, and the other stages are simulated."""
