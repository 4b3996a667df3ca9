"""The capabilities of ops: a table of all that TensorFlow registers.

`ops.tsv` has a line for each op of TensorFlow 2.16 to 2.21: its one power, the
attributes that hold functions it calls, and the evidence: the attribute or input that
names a file or an address, the flag that says that an op has state, or the work of its
kernel. An op that the table lacks is reported as unknown: no op is harmless by default.
Tests walk TensorFlow's registry, and run those that read or write files in an empty
folder.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

COMPUTE = "compute"
KEEP_STATE = "keep state"
READ = "read files"
WRITE = "write files"
LIST = "list folders"
PRINT = "print"
CONNECT = "open connections"
CODE = "run code"
PROCESS = "control the process"
SHARED = "reach shared resources"
DEVICE = "reach devices"
CLOCK = "read the clock"
RANDOM = "draw random numbers"
UNKNOWN = "unknown"

HARMLESS = frozenset((COMPUTE, KEEP_STATE))
"""Kinds that every model has, reported of none."""
TOLERATED = frozenset((CLOCK, RANDOM))
"""Kinds reported as harmless: random numbers, the clock."""
POWERS = (
    *(CODE, WRITE, READ, LIST, CONNECT, PROCESS, SHARED, DEVICE, PRINT, UNKNOWN),
    *(RANDOM, CLOCK),
)
"""The other kinds, in the order of reports: the gravest first."""
_TABLE = Path(__file__).with_name("ops.tsv")


class OpEntry(NamedTuple):
    """A line of the table.

    Attributes:
        functions: the attributes that hold functions which it calls.
    """

    power: str
    functions: tuple[str, ...]
    evidence: str


@cache
def table() -> dict[str, OpEntry]:
    """Return the entry of each op."""
    entries = {}
    for line in _TABLE.read_text().splitlines()[1:]:
        name, power, functions, evidence = line.split("\t")
        listed = tuple(filter(None, functions.split(",")))
        entries[name] = OpEntry(power, listed, evidence)
    return entries
