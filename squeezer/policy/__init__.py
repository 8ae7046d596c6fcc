"""What the daemon decides: pure state, forecasts and guard. No socket, file, clock or torch in here.

The daemon feeds `events` to the machine in `state`, and carries out the `actions` that it answers with.
"""
