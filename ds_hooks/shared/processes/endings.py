"""How processes end."""

USER_ERROR_STATUS = 2
"""Exit status for what a restart cannot mend, such as a study that does not import."""


def true_status(status: int, *, has_said_so: bool) -> int:
    """What the exit status of a side task means. One that has not said that it ends was ended by the study's code.

    Args:
        status: the process's.
        has_said_so: whether it has sent the status `Left`.
    """
    return 1 if status in (0, USER_ERROR_STATUS) and not has_said_so else status
