"""The error of a study's file, apart from `trials.study`: commands that only read a study need no torch."""


class StudyError(Exception):
    """A study's file or class cannot be used. The message names the file and what is missing."""
