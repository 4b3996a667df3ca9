"""Differences of two graphs and their functions.

Ops in common, and ops that read otherwise. Two TFLite files need no TensorFlow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geutil.report.page import Page, payload_of
from geutil.report.tflite_nodes import (
    NO_OPS,
    FileNode,
    FileSubject,
    altered_options,
    file_subject,
    is_file,
    listed_lines,
)

if TYPE_CHECKING:
    from geutil.graph.types import Operation
    from geutil.report.graphs import Subject
    from geutil.report.tflite_differences import FileDifference

    Op = Operation | FileNode
    Drawn = Subject | FileSubject

_NUMBERS = re.compile(r"(_\d+)+$")
"""Numbers that TensorFlow appends to the name of a function each time it is made."""


def pairs_of(before: Drawn, after: Drawn) -> list[tuple[Drawn, Drawn]]:
    """Return two subjects, and the pairs of functions that they call.

    Functions belong together that have one name; failing that, one name but for the
    numbers at its end, in their order. One without a counterpart is beside an empty
    graph.
    """
    ours: dict[str, Drawn] = {body.label: body for body in before.bodies}
    theirs: dict[str, Drawn] = {body.label: body for body in after.bodies}
    left = _by_stem([body for name, body in ours.items() if name not in theirs])
    pairs = [(before, after)]
    for name, body in theirs.items():
        if name in ours:
            pairs.append((ours[name], body))
            continue
        waiting = left[_stem(name)]
        pairs.append((waiting.pop(0) if waiting else body.empty(), body))
    lonely = [body for waiting in left.values() for body in waiting]
    return pairs + [(body, body.empty()) for body in lonely]


def _stem(name: str) -> str:
    return _NUMBERS.sub("", name)


def _by_stem(bodies: Sequence[Drawn]) -> defaultdict[str, list[Drawn]]:
    bodies_by_stem: defaultdict[str, list[Drawn]] = defaultdict(list)
    for body in bodies:
        bodies_by_stem[_stem(body.label)].append(body)
    return bodies_by_stem


def graph_and_file(
    before: Drawn, after: Drawn
) -> tuple[Subject | None, FileSubject | None]:
    """Return which of two subjects is a graph, and which a TFLite file."""
    sides = (before, after)
    graphs = [side for side in sides if not isinstance(side, FileSubject)]
    files = [side for side in sides if isinstance(side, FileSubject)]
    return next(iter(graphs), None), next(iter(files), None)


SAME, ADDED, REMOVED, REWIRED, ALTERED = range(5)
"""The fate of an op, as the viewer numbers it."""


@dataclass(frozen=True)
class Rewired:
    """An op of both graphs with other inputs or another type.

    Attributes:
        op: its name.
        op_type: its type, in the second graph.
        before: its inputs in the first graph.
        after: its inputs in the second.
    """

    op: str
    op_type: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Altered:
    """An op of both graphs with the same inputs and other attributes.

    Attributes:
        op: its name.
        op_type: its type.
        attributes: the names of the attributes that differ; "value" for a constant.
    """

    op: str
    op_type: str
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class GraphDifference:
    """The differences of two graphs; ops are identified by their names.

    Attributes:
        added: the ops that only the second graph has, with their types.
        removed: those that only the first graph has.
        rewired: those with other inputs, or of another type.
        common: the number of equal ops, as `inspect` counts them in TFLite files.
        altered: those with the same inputs and other attributes, including constants
            with other values.
        common_ends: the number of equal inputs and constants of TFLite files, which are
            not ops there.
    """

    added: tuple[tuple[str, str], ...]
    removed: tuple[tuple[str, str], ...]
    rewired: tuple[Rewired, ...]
    common: int
    altered: tuple[Altered, ...] = ()
    common_ends: int = 0

    @property
    def is_empty(self) -> bool:
        """True if the graphs are the same."""
        return not (self.added or self.removed or self.rewired or self.altered)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the text; of each kind of change only the first few."""
        kinds_by_change = {
            "added": [kind for _, kind in self.added],
            "removed": [kind for _, kind in self.removed],
            "rewired": [entry.op_type for entry in self.rewired],
            "altered": [entry.op_type for entry in self.altered],
        }
        if not self.altered:
            del kinds_by_change["altered"]
        counts = [f"{self.common} op(s) the same{_besides(self.common_ends)}"]
        for change, kinds in kinds_by_change.items():
            ends = sum(kind in NO_OPS for kind in kinds)
            counts.append(f"{len(kinds) - ends} {change}{_besides(ends)}")
        yield ", ".join(counts)
        added = [f"+ {name} ({kind})" for name, kind in self.added]
        removed = [f"- {name} ({kind})" for name, kind in self.removed]
        rewired = [
            f"~ {entry.op} ({entry.op_type}): {', '.join(entry.before)} -> "
            f"{', '.join(entry.after)}"
            for entry in self.rewired
        ]
        others = [
            f"! {entry.op} ({entry.op_type}): {', '.join(entry.attributes)}"
            for entry in self.altered
        ]
        yield from listed_lines(added, removed, rewired, others)


def _besides(ends: int) -> str:
    return f" (besides {ends} input(s) and constant(s))" if ends else ""


def difference(before: Any, after: Any) -> GraphDifference | FileDifference:
    """Return the differences of two graphs, or of two models and their functions.

    Ops are identified by their names. Ops that a model does not run are left out, and
    names in the body of a function begin with the function's name and a slash. Values
    of variables are not compared.

    A graph and the TFLite file that it was converted to are matched by the inputs of
    each op, and by the names of graph ops that the file's tensors keep; the result has
    the graph ops of each op of the file, and the missing and float ones. Two files are
    compared like two graphs; their inputs and constants, which are not ops, are counted
    separately.

    Args:
        before: a `Model`, a `tf.Graph`, a `SubGraphView`, a `ConcreteFunction`, or the
            path or bytes of a TFLite file.
        after: likewise.

    Returns:
        A `FileDifference` if exactly one is a TFLite file, else a `GraphDifference`.

    Raises:
        ArgumentTypeError: one of the two has no graph.
        ModelError: one is a TFLite file that cannot be read or is damaged.

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
    if is_file(before) and is_file(after):
        return difference_by_names(file_subject(before), file_subject(after))
    from geutil.report.graphs import sides_of

    sides = sides_of(before, after)
    graph, file = graph_and_file(*sides)
    if graph is not None and file is not None:
        from geutil.report.tflite_differences import difference_of_file

        return difference_of_file(graph, file)
    return difference_by_names(*sides)


def difference_by_names(before: Drawn, after: Drawn) -> GraphDifference:
    """Return the difference of two graphs, or of two files, by names of ops."""
    (main, *functions) = pairs_of(before, after)
    parts = [_difference(*main, "")]
    parts += [_difference(a, b, f"{b.label}/") for a, b in functions]
    return GraphDifference(
        tuple(entry for part in parts for entry in part.added),
        tuple(entry for part in parts for entry in part.removed),
        tuple(entry for part in parts for entry in part.rewired),
        sum(part.common for part in parts),
        tuple(entry for part in parts for entry in part.altered),
        sum(part.common_ends for part in parts),
    )


def _difference(before: Drawn, after: Drawn, scope: str) -> GraphDifference:
    """Return the difference between two graphs, their ops matched by name."""
    ours = {op.name: op for op in before.drawn_ops()}
    theirs = {op.name: op for op in after.drawn_ops()}
    both = [(op, theirs[name]) for name, op in ours.items() if name in theirs]
    rewired: list[Rewired] = []
    altered: list[Altered] = []
    same: list[str] = []
    for op, other in both:
        name, kind = f"{scope}{other.name}", other.type
        if _is_rewired(op, other):
            rewired.append(Rewired(name, kind, _reads(op), _reads(other)))
        elif attributes := _altered(op, other):
            altered.append(Altered(name, kind, attributes))
        else:
            same.append(kind)
    return GraphDifference(
        tuple((f"{scope}{n}", op.type) for n, op in theirs.items() if n not in ours),
        tuple((f"{scope}{n}", op.type) for n, op in ours.items() if n not in theirs),
        tuple(rewired),
        sum(kind not in NO_OPS for kind in same),
        tuple(altered),
        sum(kind in NO_OPS for kind in same),
    )


def statuses(ops: Sequence[Op], others: Sequence[Op]) -> tuple[list[int], list[int]]:
    """Return the fate of each op of either side."""
    ours = {op.name: op for op in ops}
    theirs = {op.name: op for op in others}

    def status(op: Op, elsewhere: dict[str, Op], alone: int) -> int:
        other = elsewhere.get(op.name)
        if other is None:
            return alone
        if _is_rewired(op, other):
            return REWIRED
        return ALTERED if _altered(op, other) else SAME

    return (
        [status(op, theirs, REMOVED) for op in ops],
        [status(op, ours, ADDED) for op in others],
    )


def compared(before: Drawn, after: Drawn) -> list[dict[str, Any]]:
    """Return graphs in pairs as the viewer takes them, with the fate of each op."""
    graphs = []
    for pair in pairs_of(before, after):
        both = statuses(pair[0].drawn_ops(), pair[1].drawn_ops())
        for side, status in zip(pair, both, strict=True):
            graphs.append({**side.data()[0], "status": status})
    return graphs


def diff_files(before: Any, after: Any, labels: tuple[str, str]) -> Page:
    """Draw two TFLite files side by side; see `geutil.report.diff`."""
    sides = (file_subject(*side) for side in zip((before, after), labels, strict=True))
    title = f"{labels[0]} and {labels[1]}"
    return Page(title, payload_of("diff", title, compared(*sides), None))


def _altered(op: Op, other: Op) -> tuple[str, ...]:
    if isinstance(op, FileNode) or isinstance(other, FileNode):
        return altered_options(op, other)
    from geutil.report.graphs import altered_attributes

    return altered_attributes(op, other)


def _is_rewired(op: Op, other: Op) -> bool:
    return op.type != other.type or _reads(op) != _reads(other)


def _reads(op: Op) -> tuple[str, ...]:
    """Return the names of the inputs and control inputs of an op."""
    waits = sorted(f"^{c.name}" for c in op.control_inputs)
    return (*(t.name for t in op.inputs), *waits)
