"""The memory of one step, predicted from its graph alone; the largest batch by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import tensorflow as tf

from geutil.errors import ArgumentTypeError, PredictionError
from geutil.graph import adjacency, creation, runtime, shape_inference, types
from geutil.graph.protos import all_nodes
from geutil.graph.runtime import checked_default, kind_of, places_of, planned_for
from geutil.graph.types import GivenShapes, IdentitySet, Operation, Tensor
from geutil.memory.costs import Shapes, Times, op_times
from geutil.memory.executor import simulate, typical
from geutil.memory.program import Program
from geutil.memory.read import (
    calls_in,
    device_of,
    equal_constants,
    read_ops,
    uncounted_loops,
)
from geutil.memory.timeline import Timeline
from geutil.select.selections import graph_of_all
from geutil.sizes import byte_count, size_text

_logger = logging.getLogger("geutil")
_LOWERED = "_lower_using_switch_merge"
MOST = 1 << 20
"""The largest batch size that is of interest."""
FIRST = 32
"""The batch size that is tried first."""
_SLOW = 3
"""After so many tries that do not halve the range, it is halved."""


@tf.autograph.experimental.do_not_convert
def predict(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    order: Iterable[Operation] | None = None,
    shapes: GivenShapes | None = None,
    grappler: bool = True,
    onednn: bool | None = None,
    device: str | None = None,
) -> Timeline:
    """Predict the memory of one step, op by op, without running it.

    The step is optimized as by a Session, and then simulated as a Session with one
    inter-op thread runs it: each buffer is held until its last reader has run; ops
    forward their input's buffer, or write into it. Where an op has more than eight
    edges, TensorFlow's order depends on addresses and changes from Session to Session,
    and so may the peak; of several such orders the one with the median peak is
    returned.

    Feeds are not counted. Variables and constants are counted separately, except that a
    variable that is changed before all its readers have run has two buffers, of which
    one counts until the old one has been read. An op that runs functions (`If`,
    `While`, a call) counts as one op: the memory of its function is added while it
    runs, that of the larger branch of a conditional, and of two iterations of a loop,
    since one begins before the last has ended. Elements that a loop pushes onto lists,
    for its gradient or as a result, count for each iteration if constants and shapes
    determine their number; otherwise they are not counted, and a warning says so. Lists
    of version 1 loops are left out, and so are the bytes that XLA holds besides the
    results of a call that it compiles: Keras compiles grouped convolutions on CPU, and
    the gradient of one of 768 channels, 7 x 7, takes 231 MB. Ops of all devices are
    counted together, and the timeline says so; `predict_by_device` separates them.

    Args:
        ys_or_fetches: the fetches of the step: tensors, ops, or nested structures of
            them; `None` (a gradient that does not exist) is left out.
        feeds: the tensors that are fed besides placeholders, so that the ops that
            compute them do not run.
        order: the order of execution, instead of TensorFlow's: ops of the graph, with
            all that the step needs. The graph is then used as it is.
        shapes: shapes for tensors whose static shapes leave dimensions open: a mapping,
            or pairs. A key is a tensor, its `ref()` or its name.
        grappler: whether Grappler optimizes the graph first.
        onednn: whether oneDNN is used, which merges convolutions with the ops around
            them and makes them run later; None: as in this process.
        device: the device of ops that name none, such as "GPU:0", which need not exist;
            None: the one that their gradients were planned for, or on which this
            process runs them. For a step on a GPU the bytes are the GPU's: tensors in
            host memory do not count. `resident` is then the bytes that the GPU's
            allocator hands out, and `extent` those that the GPU must have free.
            Workspaces of cuDNN are left out.

    Returns:
        The bytes held while each op runs, and the buffers held at the peak.

    Raises:
        ArgumentTypeError: a fetch is neither an op nor a tensor of a graph.
        SelectionError: the fetches belong to different graphs, or feeds, ops of `order`
            or keys of `shapes` to another one than they.
        PredictionError: there are no fetches; sizes depend on unknown dimensions;
            `order` lacks an op, repeats one, or has one before its inputs.

    Cost: linear in the ops and edges behind the fetches; about 0.5 ms for each op, most
    of it Grappler's.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import predict
        >>> with tf.Graph().as_default():
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 1000], name="x")
        ...     y = tf.nn.relu(tf.matmul(x, tf.ones([1000, 1000])))
        >>> timeline = predict(y, shapes={"x": [500, 1000]})
        >>> timeline.peak
        2000000
    """
    if order is not None:
        # The order names the ops of the graph, of which Grappler would remove some.
        order = list(order)
        graph_of_all((*fetches_of(ys_or_fetches), *order))
        step = executed_step(
            ys_or_fetches, feeds, shapes, False, device=device, merges=False
        )
        place = {node.name: i for i, node in enumerate(step.program.nodes)}
        numbers = [place[op.name] for op in order if op.name in place]
        return step.noted(simulate(step.program, numbers).timeline())
    step = executed_step(ys_or_fetches, feeds, shapes, grappler, onednn, device)
    return step.noted(typical(step.program).timeline())


@dataclass(frozen=True)
class Step:
    """The step that runs for some fetches, on its devices."""

    program: Program
    # The op of each node, in a graph of geutil's own.
    ops: Sequence[Operation]
    # The device of each node by its full name.
    devices: Sequence[str]
    # Where feeds come in and fetches go out.
    home: str
    size_of: Callable[[Tensor], int]
    # Raises PredictionError if `size_of` did not know a tensor.
    check: Callable[[], None]
    # The time of an op, estimated.
    time_of: Times
    fetched: Sequence[Tensor] = ()

    def merged(self) -> Step:
        """Return the step with one node for all constants of a value."""
        instead = equal_constants(self.ops, self.fetched)
        place = {op: i for i, op in enumerate(self.ops)}
        same = {place[op]: place[first] for op, first in instead.items()}
        left = [i for i in range(len(self.ops)) if i not in same]
        ops, devices = ([of[i] for i in left] for of in (self.ops, self.devices))
        program = self.program.merged(same)
        return replace(self, program=program, ops=ops, devices=devices)

    def noted(self, timeline: Timeline) -> Timeline:
        """Return a timeline of the whole step; it says so if that has devices."""
        timeline = self.timed(timeline)
        counted = set(self.devices)
        if kind_of(self.home) != "CPU":
            # The host of a GPU does not count: the sum is the GPU's.
            counted = {device for device in counted if kind_of(device) != "CPU"}
        if (count := len(counted)) < 2:
            return timeline
        note = (
            f"the sum over {count} devices, which no single one holds; "
            "geutil.memory.predict_by_device tells each"
        )
        return replace(timeline, note=note)

    def timed(self, timeline: Timeline) -> Timeline:
        """Return a timeline of the step with the estimated time of each op."""
        times = {op.name: self.time_of(op) for op in self.ops}
        moments = (replace(m, time=times.get(m.op, 0.0)) for m in timeline.moments)
        return replace(timeline, moments=tuple(moments))


@tf.autograph.experimental.do_not_convert
def step_program(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    shapes: GivenShapes | None = None,
    grappler: bool = False,
) -> Program:
    """Return the ops that run for some fetches, as a program.

    Args:
        ys_or_fetches: as in `predict`.
        feeds: as in `predict`.
        shapes: as in `predict`.
        grappler: as in `predict`; without it the nodes are the ops of the graph.

    Raises:
        ArgumentTypeError, SelectionError, PredictionError: as `predict` does.

    Cost: that of `predict`.
    """
    step = executed_step(ys_or_fetches, feeds, shapes, grappler, merges=False)
    return step.program


def executed_step(
    ys_or_fetches: Any,
    feeds: Iterable[Tensor] | None,
    shapes: GivenShapes | None,
    grappler: bool,
    onednn: bool | None = None,
    device: str | None = None,
    rules: str | None = None,
    *,
    merges: bool = True,
) -> Step:
    """Return the step that TensorFlow runs for some fetches, before oneDNN."""
    # It is read from a copy of its graph. `rules` is a device whose rules hold for all
    # ops, wherever they run; unless it `merges`, each constant is a node of its own.
    fetches = fetches_of(ys_or_fetches)
    feed_tensors = IdentitySet(feeds or ())
    graph = graph_of_all((*fetches, *feed_tensors))
    graph_shapes = Shapes(graph, shapes)
    needed = [f if types.is_op(f) else f.op for f in fetches if f not in feed_tensors]
    ops = adjacency.step_ops(needed, feed_tensors)
    fed = [*feed_tensors, *(op.outputs[0] for op in ops if op.type == "Placeholder")]
    graph_def = creation.step_graph_def(graph, ops, feed_tensors)
    names = [f.name for f in fetches if f not in feed_tensors]
    device = planned_for(graph) if device is None else device
    home = checked_default(device, (op.device for op in ops))
    on = device_of(rules or home, onednn)
    places = places_of(ops, [t.op for t in fed if t.dtype.name != "resource"], home)
    for node in graph_def.node:
        # By full names, as a Session writes them before Grappler.
        node.device = places.get(node.name, home)
    _keep_loops(graph_def)
    if grappler:
        graph_def = runtime.optimized(graph_def, names)
    scratch = shape_inference.inferred_graph(graph_shapes.told_to(graph_def))
    fetched = [scratch.get_tensor_by_name(name) for name in names if ":" in name]
    size_of = graph_shapes.bytes_of
    calls = calls_in(scratch, size_of, device=on)
    scratch_ops = scratch.get_operations()
    program = read_ops(scratch_ops, fetched, size_of, calls, on).program
    graph_shapes.check(fed)
    uncounted = uncounted_loops(calls)
    if uncounted:
        shown = ", ".join(f"'{name}'" for name in uncounted[:4])
        _logger.warning(
            "how often %s runs does not follow from constants and shapes: what it adds "
            "to lists each time, for its gradient or as a result, is not in the "
            "predicted peak; a fixed number of steps would tell",
            shown,
        )
    devices = [op.device or home for op in scratch_ops]
    check = partial(graph_shapes.check, fed)
    time_of = op_times(scratch_ops, {op: called.time for op, called in calls.items()})
    step = Step(program, scratch_ops, devices, home, size_of, check, time_of, fetched)
    return step if grappler or not merges else step.merged()


def _keep_loops(graph_def: Any) -> None:
    """Keep Grappler from taking loops and conditionals apart."""
    # It knows no shapes in their parts, and the memory is the same.
    for node in all_nodes(graph_def):
        if _LOWERED in node.attr:
            node.attr[_LOWERED].b = False


def fetches_of(ys_or_fetches: Any) -> Sequence[Any]:
    """Return the ops and tensors that are asked for, or raise if nothing is."""
    fetches: list[Any] = []
    leaves = map(types.components, types.flatten(ys_or_fetches))
    for leaf in chain.from_iterable(leaves):
        if types.is_op(leaf) or types.is_tensor(leaf):
            fetches.append(leaf)
        elif leaf is not None:
            raise ArgumentTypeError(
                f"expected ops or tensors of a graph, got {types.type_name(leaf)}"
            )
    if not fetches:
        raise PredictionError("nothing is asked for: pass the tensors of the step")
    return fetches


@dataclass(frozen=True)
class BatchFit:
    """The largest batch whose step fits.

    Attributes:
        batch: the batch size; 0 if not even one row fits.
        bytes: the peak of that step, variables and constants included.
        memory: the limit in bytes.
        tried: the batch sizes that were tried, in order, with their predicted bytes.
    """

    batch: int
    bytes: int
    memory: int
    tried: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        of = size_text(self.memory)
        if self.batch:
            return f"batch size {self.batch}: {size_text(self.bytes)} of {of}"
        if not self.tried:
            return f"no batch fits into {of}: there is no such step"
        rows, size = min(self.tried)
        take = "one row takes" if rows == 1 else f"{rows} rows take"
        return f"no batch fits: {take} {size_text(size)} of {of}"


def largest_batch(
    step: Callable[[int], Any],
    memory: int | str,
    *,
    most: int = MOST,
    resident: bool = False,
    device: str | None = None,
) -> BatchFit:
    """Return the largest batch size with which a step fits into memory.

    The step is built for several batch sizes, and its peaks are predicted; nothing
    runs. Peaks are assumed to grow with the batch, and to continue as between tried
    sizes where these leave room for less than a row.

    Args:
        step: builds the step for a batch size, in a graph of its own, and returns the
            fetches for `predict`, or a ConcreteFunction; None where no step fits, for
            example because it would take too long.
        memory: in bytes, or a text such as "8GB"; includes variables and constants. A
            step without an enforced order may take more under another schedule
            (`worst_case`). The prediction does not include TensorFlow's own memory, a
            fragmented heap and slots that an optimizer makes later.
        most: the largest batch size to consider.
        resident: also count the bytes that CPU kernels take outside TensorFlow's
            allocator (`Timeline.resident`), as the limit of a container does.
        device: as in `predict`. For a GPU, `memory` is the bytes that TensorFlow may
            use, and the step needs `Timeline.extent`: fragmentation counts.

    Raises:
        ArgumentTypeError: `memory` is not a number of bytes, `most` is below 1, or
            `device` is not a device.
        PredictionError: the step's sizes are unknown.

    Cost: that of building and predicting the step, two to five times where bytes grow
        in proportion to the batch.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import largest_batch
        >>> def step(batch):
        ...     with tf.Graph().as_default():
        ...         x = tf.compat.v1.placeholder(tf.float32, [batch, 1000])
        ...         return tf.tanh(x @ tf.ones([1000, 1000]))
        >>> print(largest_batch(step, "10MB"))
        batch size 1500: 10.0 MB of 10.0 MB
    """
    limit = checked_limit(memory)
    if most < 1:
        raise ArgumentTypeError(f"most is a number from 1 up, got {most!r}")
    return fit_batch(
        lambda batch: _held(step(batch), resident, device), limit, most=most
    )


def checked_limit(memory: int | str) -> int:
    """Return a limit in bytes; raise ArgumentTypeError if it is none."""
    limit = byte_count(memory)
    if limit is None:
        raise ArgumentTypeError(
            f"memory is a number of bytes or a text such as '8GB', got {memory!r} "
            f"({types.type_name(memory)})"
        )
    return limit


class Held(NamedTuple):
    """The bytes of a step at its peak, and those that do not depend on the batch."""

    peak: int
    fixed: int


def held_by(timeline: Timeline, *, resident: bool = False) -> Held:
    """Return the bytes of a step, variables and constants included."""
    fixed = timeline.variable_bytes + timeline.constant_bytes
    if timeline.extent is not None:
        return Held(timeline.extent + timeline.constant_bytes, fixed)
    peak = max(timeline.peak, (timeline.resident or 0) if resident else 0)
    return Held(peak + fixed, fixed)


def fit_batch(
    held: Callable[[int], Held | None],
    limit: int,
    *,
    first: int = FIRST,
    most: int = MOST,
) -> BatchFit:
    """Return the largest batch size within a limit; `held` returns the bytes of one."""
    # It is called two to five times where bytes grow in proportion.
    search = _BatchSearch(limit, most)
    batch = min(first, most)
    while not search.is_settled():
        search.add(batch, held(batch))
        batch = search.next_batch()
    fits, tried = search.fits, search.tried
    return BatchFit(fits, tried.get(fits, 0), limit, tuple(tried.items()))


class _BatchSearch:
    """A search by secants that bisects where these are slow."""

    def __init__(self, limit: int, most: int) -> None:
        self._limit, self._most = limit, most
        self.fits, self.too_large = 0, most + 1
        self.tried: dict[int, int] = {}
        self._points: dict[int, int] = {}
        self._widths: list[int] = []

    def add(self, batch: int, held: Held | None) -> None:
        if held is not None:
            self.tried[batch] = held.peak
            # No rows, the first end of a line.
            self._points.setdefault(0, held.fixed)
            self._points[batch] = held.peak
        if held is not None and held.peak <= self._limit:
            self.fits = batch
        else:
            self.too_large = batch

    def is_settled(self) -> bool:
        """Return whether no larger batch fits, by all lines that are known."""
        fits, points = self.fits, self._points
        if self.too_large - fits <= 1:
            return True
        others = [batch for batch in points if batch != fits]
        if not fits or len(others) < 2:
            return False
        lines = [self._meets_limit([batch, fits]) for batch in others]
        return all(line is not None and line < fits + 1 for line in lines)

    def next_batch(self) -> int:
        """Return the next batch size to try."""
        fits, too_large = self.fits, self.too_large
        is_open = too_large > self._most
        if not is_open:
            self._widths.append(too_large - fits)
            if len(self._widths) > _SLOW and 2 * self._widths[-1] > self._widths[0]:
                self._widths.clear()
                return (fits + too_large) // 2
            del self._widths[:-_SLOW]
        limit, points = self._limit, self._points
        nearest = sorted(points, key=lambda batch: abs(points[batch] - limit))[:2]
        for ends in (nearest, [fits, too_large]):
            # Where the bytes bend, a line may meet the limit outside of the range.
            line = self._meets_limit(ends)
            if line is not None and (line >= fits or not fits) and line < too_large:
                return min(max(int(line), fits + 1), too_large - 1)
        # Nothing was too large so far: the largest size may settle it.
        return too_large - 1 if is_open else (fits + too_large) // 2

    def _meets_limit(self, ends: list[int]) -> float | None:
        """Return where the line through two batch sizes meets the limit."""
        known = [(b, self._points[b]) for b in ends if b in self._points]
        if len(known) < 2 or known[0][1] == known[1][1]:
            return None
        (b0, h0), (b1, h1) = known
        return b0 + (self._limit - h0) * (b1 - b0) / (h1 - h0)


def _held(step: Any, resident: bool, device: str | None) -> Held | None:
    if step is None:
        return None
    graph = getattr(step, "graph", None)
    if hasattr(step, "structured_outputs") and graph is not None:
        step = [*graph.outputs, *graph.control_outputs]
    return held_by(predict(step, device=device), resident=resident)
