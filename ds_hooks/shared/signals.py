"""The signals that a side task takes. It blocks both before its first thread starts, and waits for them in the gate."""

import signal

WAKE_SIGNAL = signal.SIGUSR1
"""The main job opens a bubble; sent only to a side task that sleeps, since an unblocked one would end."""
END_SIGNAL = signal.SIGTERM
"""The daemon asks it to end."""
