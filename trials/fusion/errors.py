"""The errors of fusion."""


class FuseError(Exception):
    """Trials, or a layer of theirs, cannot be fused; the text names the place and what is allowed."""


class RefusedError(FuseError):
    """No way to fuse can help: the forward does what K trials at once cannot do each for itself."""
