"""How processes end, and what they give as the reason."""

USER_ERROR_STATUS = 2
"""Exit status for what a restart cannot mend, such as a study that does not import."""
JOB_ENDED_FIRST = "the main job or its daemon ended before the trial did"
"""The reason of trials that the end of the main job or its daemon has cut short."""
