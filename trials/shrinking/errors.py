"""The errors and warnings of shrinking."""


class ShrinkError(Exception):
    """A model cannot be shrunk, or what is found would not transfer. The message names the cause and a way out."""


class ShrinkWarning(UserWarning):
    """A surrogate can be used, but shows less about its target than it could."""
