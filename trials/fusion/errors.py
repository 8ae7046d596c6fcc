"""The errors of fusion."""


class FuseError(Exception):
    """Trials, or one of their layers, cannot be fused. The message names the module or setting, and what is allowed."""


class RefusedError(FuseError):
    """No way to fuse helps: the forward does something that K trials at once cannot do separately."""
