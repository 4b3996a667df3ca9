"""Which ops two graphs have in common, and which they read differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geutil.graph.kinds import Operation
from geutil.report.pairs import pairs_of
from geutil.report.subjects import Subject, subject_of

_SHOWN = 20

SAME, ADDED, REMOVED, REWIRED = range(4)
"""What became of an op, as the viewer numbers it."""


@dataclass(frozen=True)
class Rewired:
    """An op of both graphs that reads something else.

    Attributes:
        op: its name.
        op_type: its type, in the second graph.
        before: what it reads in the first graph.
        after: what it reads in the second.
    """

    op: str
    op_type: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class GraphDifference:
    """What two graphs differ in; ops are told by their names.

    Attributes:
        added: the ops that the second graph alone has, with their types.
        removed: those that the first alone has.
        rewired: those that read something else, or are of another type.
        common: how many ops are the same.
    """

    added: tuple[tuple[str, str], ...]
    removed: tuple[tuple[str, str], ...]
    rewired: tuple[Rewired, ...]
    common: int

    @property
    def is_empty(self) -> bool:
        """Whether the graphs are the same."""
        return not (self.added or self.removed or self.rewired)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.common} op(s) the same, {len(self.added)} added, "
            f"{len(self.removed)} removed, {len(self.rewired)} rewired"
        )
        added = [f"+ {name} ({kind})" for name, kind in self.added]
        removed = [f"- {name} ({kind})" for name, kind in self.removed]
        rewired = [
            f"~ {entry.op} ({entry.op_type}): {', '.join(entry.before)} -> "
            f"{', '.join(entry.after)}"
            for entry in self.rewired
        ]
        for lines in (added, removed, rewired):
            yield from lines[:_SHOWN]
            if len(lines) > _SHOWN:
                yield f"  and {len(lines) - _SHOWN} more (all of them with --json)"


def difference(before: Any, after: Any) -> GraphDifference:
    """Return what two graphs differ in, or two models with the functions they call.

    Ops are told by their names. What a model does not run is left out, and names of
    what is in the body of a function begin with the function's, and a slash.

    Args:
        before: a `Model`, a `tf.Graph`, a `SubGraphView` or a `ConcreteFunction`.
        after: likewise.

    Raises:
        ArgumentTypeError: one of the two is nothing that has a graph.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import report
        >>> with tf.Graph().as_default() as before:
        ...     x = tf.ones([2], name="x")
        >>> with tf.Graph().as_default() as after:
        ...     y = tf.tanh(tf.ones([2], name="x"), name="y")
        >>> print(report.difference(before, after))
        1 op(s) the same, 1 added, 0 removed, 0 rewired
        + y (Tanh)
    """
    (main, *functions) = pairs_of(subject_of(before), subject_of(after))
    parts = [_difference(*main, "")]
    parts += [_difference(a, b, f"{b.label}/") for a, b in functions]
    return GraphDifference(
        tuple(entry for part in parts for entry in part.added),
        tuple(entry for part in parts for entry in part.removed),
        tuple(entry for part in parts for entry in part.rewired),
        sum(part.common for part in parts),
    )


def _difference(before: Subject, after: Subject, scope: str) -> GraphDifference:
    ours = {op.name: op for op in before.drawn_ops()}
    theirs = {op.name: op for op in after.drawn_ops()}
    both = [name for name in ours if name in theirs]
    changed = [
        Rewired(
            f"{scope}{name}",
            theirs[name].type,
            _reads(ours[name]),
            _reads(theirs[name]),
        )
        for name in both
        if _differ(ours[name], theirs[name])
    ]
    return GraphDifference(
        tuple((f"{scope}{n}", op.type) for n, op in theirs.items() if n not in ours),
        tuple((f"{scope}{n}", op.type) for n, op in ours.items() if n not in theirs),
        tuple(changed),
        len(both) - len(changed),
    )


def statuses(
    ops: Sequence[Operation], others: Sequence[Operation]
) -> tuple[list[int], list[int]]:
    """Return for each op of either side what became of it.

    Returns:
        For each op of the first, and for each of the second: `SAME`, `ADDED`,
        `REMOVED` or `REWIRED`.

    Cost: linear in ops and edges.
    """
    ours = {op.name: op for op in ops}
    theirs = {op.name: op for op in others}

    def status(op: Operation, elsewhere: dict[str, Operation], alone: int) -> int:
        other = elsewhere.get(op.name)
        if other is None:
            return alone
        return REWIRED if _differ(op, other) else SAME

    return (
        [status(op, theirs, REMOVED) for op in ops],
        [status(op, ours, ADDED) for op in others],
    )


def _differ(op: Operation, other: Operation) -> bool:
    return op.type != other.type or _reads(op) != _reads(other)


def _reads(op: Operation) -> tuple[str, ...]:
    """Return the names of what an op reads and waits for."""
    waits = sorted(f"^{c.name}" for c in op.control_inputs)
    return (*(t.name for t in op.inputs), *waits)
