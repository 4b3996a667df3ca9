"""The powers of ops: a table of all that TensorFlow registers.

`ops.tsv` has a line for each op of TensorFlow 2.16 to 2.21: its one power, the
attributes that hold functions it calls, and the evidence: the attribute or input that
names a file or an address, the flag that says that an op has state, or what its kernel
does. What the table lacks is unknown, and told so: no op is harmless by default. Tests
walk TensorFlow's registry, and run those that read or write files in an empty folder.
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
"""What every model does, which is told of none."""
TOLERATED = frozenset((CLOCK, RANDOM))
"""What is told, and is no more than computing."""
POWERS = (
    *(CODE, WRITE, READ, LIST, CONNECT, PROCESS, SHARED, DEVICE, PRINT, UNKNOWN),
    *(RANDOM, CLOCK),
)
"""What else there is, in the order of reports: the gravest first."""
_TABLE = Path(__file__).with_name("ops.tsv")


class OpEntry(NamedTuple):
    """A line of the table.

    Attributes:
        power: what the op can do.
        functions: the attributes that hold functions which it calls.
        evidence: how that is known.
    """

    power: str
    functions: tuple[str, ...]
    evidence: str


@cache
def table() -> dict[str, OpEntry]:
    """Return the entry of each op.

    Cost: linear in the table, the first time.
    """
    entries = {}
    for line in _TABLE.read_text().splitlines()[1:]:
        name, power, functions, evidence = line.split("\t")
        listed = tuple(filter(None, functions.split(",")))
        entries[name] = OpEntry(power, listed, evidence)
    return entries
