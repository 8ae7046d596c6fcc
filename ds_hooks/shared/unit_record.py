"""The record of one unit, or of a row of short ones, as the side task writes it and a report reads it."""

import struct

UNIT_FIELDS = ("start_ns", "wall_ns", "cpu_ns", "unit", "group")
"""`unit` is -1 for host work between layers."""
UNIT_FORMATS = ("q", "I", "I", "i", "I")
UNIT_RECORD = struct.Struct("<" + "".join(UNIT_FORMATS))
