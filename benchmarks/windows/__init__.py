"""Runs whose steps alternate between ways of squeezing, in windows that all processes know."""
