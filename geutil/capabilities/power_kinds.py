"""Kinds of capabilities: the table of ops, and reports.

`ops.tsv` has a line for each op of TensorFlow 2.16 to 2.21: its one power, the
attributes that hold functions it calls, and the evidence: the attribute or input that
names a file or an address, the flag that says that an op has state, or the work of its
kernel. An op that the table lacks is reported as unknown: no op is harmless by default.
Tests walk TensorFlow's registry, and run those that read or write files in an empty
folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from geutil.lazy import Shown

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


LOADED, RUN = "loaded", "run"
# Lines of a printed report; the rest is counted.
_SHOWN = 20


@dataclass(frozen=True)
class Power:
    """One op or layer of a model that does more than compute.

    Attributes:
        kind: the capability, such as "write files"; "unknown" for an op that geutil
            does not know, such as one of a custom library or a newer TensorFlow.
        name: the op, or the layer, by name.
        type: the type of the op, or the class of the layer.
        place: its location: "the graph", the name of a function, or a file.
        when: "loaded" if it happens while the model is loaded, else "run".
        by: its triggers: signatures, and functions of the saved object. Empty if
            nothing in the file runs it.
        detail: the path, address, stream or code that decides its effect, if the file
            contains it.
    """

    kind: str
    name: str
    type: str
    place: str
    when: str = RUN
    by: tuple[str, ...] = ()
    detail: str = ""

    @property
    def is_tolerated(self) -> bool:
        """True if it is reported but harmless: random numbers, the clock."""
        return self.kind in TOLERATED

    def __str__(self) -> str:
        what = f" {self.detail}" if self.detail else ""
        where = "" if self.place == MAIN else f" in {self.place}"
        by = f" by {', '.join(self.by)}" if self.by else ""
        when = "when loaded" if self.when == LOADED else "when run"
        never = "" if self.by or self.when == LOADED else ", which nothing runs"
        return f"{self.kind}{what}: {self.type} '{self.name}'{where}, {when}{by}{never}"


MAIN = "the graph"


@dataclass(frozen=True)
class Powers(Shown):
    """The capabilities of a model beyond computing and keeping its own state.

    Attributes:
        path: the model.
        entries: the capabilities, most severe first. Reading the model's own variables
            and assets, as every loader does, is left out.
        ops: the number of ops examined, including those of functions.

    Example:
        >>> from geutil.model import powers
        >>> print(powers("testdata/two_signatures"))
        it computes and keeps its own state, and no more (54 ops)
    """

    path: Path
    entries: tuple[Power, ...]
    ops: int

    @property
    def dangers(self) -> tuple[Power, ...]:
        """The entries other than random numbers and the clock, which are harmless."""
        return tuple(entry for entry in self.entries if not entry.is_tolerated)

    @property
    def computes_only(self) -> bool:
        """True if it only computes and keeps its own state."""
        return not self.dangers

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of capabilities, each once, most severe first."""
        found = {entry.kind for entry in self.entries}
        return tuple(kind for kind in POWERS if kind in found)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.computes_only:
            yield f"it computes and keeps its own state, and no more ({self.ops} ops)"
        else:
            counts = Counter(entry.kind for entry in self.dangers)
            listed = ", ".join(f"{k} ({counts[k]})" for k in self.kinds if k in counts)
            yield f"it can do more than compute: {listed}"
        shown = self.entries[:_SHOWN]
        yield from (f"  {entry}" for entry in shown)
        if len(self.entries) > len(shown):
            yield f"  and {len(self.entries) - len(shown)} more"
