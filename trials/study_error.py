"""The error of a study's file, apart from `trials.study`: commands that only read a study need no torch."""

NO_FILE = "no such file; expected a Python file that defines a Study"


class StudyError(Exception):
    """A study's file or class cannot be used. The message names the file and what is missing."""
