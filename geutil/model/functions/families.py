"""Functions that have their arguments in common.

The functions of a loop have the same arguments, and so have the branches of a
conditional. They change together: a *family*. In a loop an argument is a variable of
the loop, so the body also returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

from geutil.graph.function_calls import Caller
from geutil.model.errors import ModelError
from geutil.model.functions.library import Entry, Library


@dataclass(frozen=True)
class Family:
    """Functions that have their arguments in common, and the ops that call them.

    Attributes:
        entries: the functions.
        callers: the ops.
    """

    entries: list[Entry]
    callers: list[Caller]

    def loops_around(self, entry: Entry) -> list[Caller]:
        """Return the loops whose body the function is."""
        return [c for c in self.callers if c.is_loop and body_of(c) == entry.name]

    def returns_argument(self, caller: Caller) -> bool:
        """Tell whether a caller returns a variable of a loop for each argument."""
        names = {e.name for e in self.entries if self.loops_around(e)}
        return caller.is_loop or not names.isdisjoint(caller.names)


def body_of(loop: Caller) -> str:
    """Return the name of the body of a loop."""
    return next(c.name for c in loop.callees if c.attribute == "body")


def family(library: Library, entry: Entry) -> Family:
    """Return the functions whose arguments change when those of one do.

    Raises:
        ModelError: an op of another kind calls one of them.
    """
    entries = [entry]
    while True:
        callers = library.callers_of(entries)
        names = dict.fromkeys(e.name for e in entries)
        for caller in callers:
            if caller.is_loop or caller.is_branching:
                names |= dict.fromkeys(caller.names)
            elif not caller.is_call:
                raise ModelError(
                    f"'{caller.op.name}' ({caller.op.type}) calls '{entry.key}', and "
                    "geutil does not know how its arguments go with its inputs; "
                    "replace that op first"
                )
        if len(names) == len(entries):
            return Family(entries, callers)
        entries = [library.entry(name) for name in names]


def check_loops(found: Family) -> None:
    """Refuse the body of a loop that is something else as well, with other results."""
    for entry in found.entries:
        if not found.loops_around(entry):
            continue
        for caller in found.callers:
            cond = caller.is_loop and body_of(caller) != entry.name
            if entry.name in caller.names and (caller.is_branching or cond):
                raise ModelError(
                    f"function '{entry.key}' is the body of a loop, and "
                    f"'{caller.op.name}' ({caller.op.type}) calls it too; such a "
                    "function keeps its arguments"
                )
