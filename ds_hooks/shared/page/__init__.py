"""The shared page: its layout, its file, and the plan in it."""
