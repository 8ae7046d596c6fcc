"""The daemon of one device, and the command line.

Decisions are in `state`, sockets and the clock in `loop`, the side task's process in `supervisor`, figures in `report`.
"""
