"""How processes end."""

USER_ERROR_STATUS = 2
"""Exit status for what a restart cannot mend, such as a study that does not import."""
