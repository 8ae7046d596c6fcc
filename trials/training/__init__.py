"""Trains K trials as one: the group, its phases, its data."""
