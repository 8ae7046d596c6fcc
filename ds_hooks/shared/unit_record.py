"""The record of one unit, or of a burst of short ones, as the side task writes it and a report reads it."""

import struct
from pathlib import Path
from typing import NamedTuple


class Unit(NamedTuple):
    """One record; the strings under its fields are its rows in docs/protocol.md."""

    start_ns: int
    """when it began"""
    wall_ns: int
    """how long it took"""
    cpu_ns: int
    """CPU time that it took; on CUDA, time of the device"""
    unit: int
    """an index into its group's names; -1: host work between layers"""
    group: int
    """the group whose names these are"""


UNIT_FIELDS = Unit._fields
UNIT_FORMATS = ("q", "I", "I", "i", "I")
UNIT_RECORD = struct.Struct("<" + "".join(UNIT_FORMATS))


def unit_names_path(units: Path) -> Path:
    """The file that names the units of the records in `units`."""
    return units.with_suffix(".jsonl")
