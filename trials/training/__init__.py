"""Trains K trials as one: the group, its phases and its data."""
