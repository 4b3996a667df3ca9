"""The memory of one step, predicted from its graph alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, PredictionError
from geutil.graph import fetched_subgraph, runtime, shape_inference, types
from geutil.graph.placement import checked_default, places_of
from geutil.graph.types import GivenShapes, IdentitySet, Operation, Tensor
from geutil.memory.executor import simulate, typical
from geutil.memory.function_memory import uncounted_loops
from geutil.memory.program import Program
from geutil.memory.read import Shapes, calls_in, equal_constants, read_ops
from geutil.memory.sizes import tensor_bytes
from geutil.memory.timeline import Timeline
from geutil.select.conversions import graph_of_all

_logger = logging.getLogger("geutil")
_SHOWN = 4
"""How many loops a message names."""
_LOWERED = "_lower_using_switch_merge"


def predict(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    order: Iterable[Operation] | None = None,
    shapes: GivenShapes | None = None,
    grappler: bool = True,
    onednn: bool | None = None,
) -> Timeline:
    """Predict what one step holds in memory, op by op, without running it.

    The step is optimized as a Session would do it, and then simulated as a Session with
    one inter-op thread runs it on a CPU: each buffer is held until its last
    reader has run; ops pass their input's buffer on, or write into it. Where an op has
    more than eight edges, TensorFlow's order depends on addresses and changes from
    Session to Session, and the peak may with it; of several such orders the one with
    the median peak is returned.

    What the caller feeds is not counted. Variables and constants are counted apart,
    except that a variable which is changed before all have read it has two buffers, of
    which one counts until the old one has been read. An op that runs functions (`If`,
    `While`, a call) counts as one: what its function holds comes on top while it runs,
    the larger branch of a conditional and two iterations of a loop, for one begins
    before the last one has ended. What a loop adds to lists each time, for its gradient
    or as a result, counts once for each time, if constants and shapes tell how often it
    runs; else it does not, and a warning says so. Of loops of version 1 it is left out,
    and so is what XLA holds besides the results of a call that it compiles: Keras has
    convolutions by groups compiled on CPU, and the gradient of one of 768 channels,
    7 x 7, takes 231 MB.
    Ops of all devices are counted together, and the timeline says so;
    `predict_by_device` tells them apart.

    Args:
        ys_or_fetches: what the step is asked for: tensors, ops, or nested structures of
            them; `None` (a gradient that does not exist) is left out.
        feeds: the tensors that are given besides placeholders, so that nothing behind
            them runs.
        order: the order of execution, instead of TensorFlow's: ops of the graph, among
            them all that the step needs. The graph is then taken as it is.
        shapes: shapes for tensors whose static shapes leave dimensions open: a mapping,
            or pairs. A key is a tensor, its `ref()` or its name.
        grappler: optimize the graph first.
        onednn: whether oneDNN is used, which merges convolutions with what is around
            them and makes them run later; None is what this process does.

    Returns:
        The bytes held while each op runs, and the buffers held at the peak.

    Raises:
        ArgumentTypeError: a fetch is no op and no tensor of a graph.
        SelectionError: the fetches belong to different graphs.
        PredictionError: nothing is asked for; sizes depend on dimensions that are not
            known; `order` leaves out an op, names one twice or comes too early with
            one.

    Cost: linear in the ops and edges behind the fetches; some 0.5 ms for each op, most
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
        step = _read(ys_or_fetches, feeds, shapes, None)
        place = {node.name: i for i, node in enumerate(step.program.nodes)}
        numbers = [place[op.name] for op in order if op.name in place]
        return step.noted(simulate(step.program, numbers).timeline())
    onednn = fetched_subgraph.uses_onednn() if onednn is None else onednn
    step = executed_step(ys_or_fetches, feeds, shapes, grappler, onednn)
    return step.noted(typical(step.program, onednn).timeline())


@dataclass(frozen=True)
class Step:
    """What runs for some fetches, on its devices.

    Attributes:
        program: the step as numbers.
        ops: the ops of its nodes, in a graph of geutil's own.
        devices: the device of each node by its full name.
        home: the device where feeds come in and fetches go out.
        size_of: the bytes of a tensor of `ops`.
        check: raises PredictionError if `size_of` did not know one.
    """

    program: Program
    ops: Sequence[Operation]
    devices: Sequence[str]
    home: str
    size_of: Callable[[Tensor], int]
    check: Callable[[], None]
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
        if (count := len(set(self.devices))) < 2:
            return timeline
        note = (
            f"the sum over {count} devices, which no single one holds; "
            "geutil.memory.predict_by_device tells each"
        )
        return replace(timeline, note=note)


def executed_step(
    ys_or_fetches: Any,
    feeds: Iterable[Tensor] | None,
    shapes: GivenShapes | None,
    grappler: bool,
    onednn: bool,
    default: str | None = None,
) -> Step:
    """Return what TensorFlow runs for some fetches, but for what oneDNN merges.

    The arguments and errors are those of `predict`; `default` is the device of ops that
    name none, None the first task's. Cost: some 0.5 ms for each op.
    """
    optimize = runtime.optimized if grappler else None
    step = _read(ys_or_fetches, feeds, shapes, optimize, onednn, default)
    return step if grappler else step.merged()


def device_peaks(
    ys_or_fetches: Any, devices: Sequence[str], device_of: Callable[[Operation], str]
) -> tuple[int, ...]:
    """Predict the peak of a step on each of several devices, one thread to each.

    As `predict`, without what Grappler and oneDNN change; variables, constants and what
    is fed do not count. What a device receives is held from the earliest moment at
    which it can arrive. Cost: that of `step_program`, and linear in its nodes for each
    device.
    """
    program = step_program(ys_or_fetches)
    graph: Any = graph_of_all(_fetches(ys_or_fetches))
    here: dict[str, set[int]] = {device: set() for device in devices}
    made: dict[int, Tensor] = {}
    for i, node in enumerate(program.nodes):
        op = graph.get_operation_by_name(node.name)
        here[device_of(op)].add(i)
        # Where a variable or constant is received, it takes what it takes.
        made.update(zip(node.outputs, op.outputs, strict=False))

    def size_of(tensor: int) -> int:
        return program.sizes[tensor] or tensor_bytes(made[tensor])

    own = [program.held_on(here[device], received=size_of) for device in devices]
    return tuple(simulate(part).peak for part in own)


def step_program(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    shapes: GivenShapes | None = None,
    grappler: bool = False,
) -> Program:
    """Return what runs for some fetches as a program.

    Args:
        ys_or_fetches: as in `predict`.
        feeds: as in `predict`.
        shapes: as in `predict`.
        grappler: as in `predict`; without it the nodes are the ops of the graph.

    Raises:
        ArgumentTypeError, SelectionError, PredictionError: as `predict` does.

    Cost: as that of `predict`.
    """
    optimize = runtime.optimized if grappler else None
    return _read(ys_or_fetches, feeds, shapes, optimize).program


def _read(
    ys_or_fetches: Any,
    feeds: Iterable[Tensor] | None,
    shapes: GivenShapes | None,
    optimize: Callable[[Any, Sequence[str]], Any] | None,
    onednn: bool | None = None,
    default: str | None = None,
) -> Step:
    """Return the step of some fetches, read from a copy of its graph."""
    fetches = _fetches(ys_or_fetches)
    feed_tensors = IdentitySet(feeds or ())
    graph = graph_of_all((*fetches, *feed_tensors))
    graph_shapes = Shapes(graph, shapes)
    needed = [f if types.is_op(f) else f.op for f in fetches if f not in feed_tensors]
    ops = fetched_subgraph.step_ops(needed, feed_tensors)
    fed = [*feed_tensors, *(op.outputs[0] for op in ops if op.type == "Placeholder")]
    graph_def = fetched_subgraph.step_graph_def(graph, ops, feed_tensors)
    names = [f.name for f in fetches if f not in feed_tensors]
    home = checked_default(default, (op.device for op in ops))
    places = places_of(ops, [t.op for t in fed if t.dtype != tf.resource], home)
    for node in graph_def.node:
        # By full names, as a Session writes them before Grappler.
        node.device = places.get(node.name, home)
    _keep_loops(graph_def)
    if optimize is not None:
        graph_def = optimize(graph_def, names)
    scratch = shape_inference.inferred_graph(graph_shapes.told_to(graph_def))
    fetched = [scratch.get_tensor_by_name(name) for name in names if ":" in name]
    size_of = graph_shapes.bytes_of
    calls = calls_in(scratch, size_of, onednn=onednn)
    scratch_ops = scratch.get_operations()
    program = read_ops(scratch_ops, fetched, size_of, calls, onednn).program
    graph_shapes.check(fed)
    uncounted = uncounted_loops(calls)
    if uncounted:
        shown = ", ".join(f"'{name}'" for name in uncounted[:_SHOWN])
        _logger.warning(
            "how often %s runs does not follow from constants and shapes: what it adds "
            "to lists each time, for its gradient or as a result, is not in the "
            "predicted peak; a fixed number of steps would tell",
            shown,
        )
    devices = [op.device or home for op in scratch_ops]
    check = partial(graph_shapes.check, fed)
    return Step(program, scratch_ops, devices, home, size_of, check, fetched)


def _keep_loops(graph_def: Any) -> None:
    """Keep Grappler from taking loops and conditionals apart.

    It knows no shapes in what they become, and the memory is the same.
    """
    functions = (function.node_def for function in graph_def.library.function)
    for node in chain(graph_def.node, *functions):
        if _LOWERED in node.attr:
            node.attr[_LOWERED].b = False


def _fetches(ys_or_fetches: Any) -> Sequence[Any]:
    fetches: list[Any] = []
    for leaf in types.flatten(ys_or_fetches):
        if isinstance(leaf, tf.IndexedSlices | tf.SparseTensor):
            fetches += tf.nest.flatten(leaf, expand_composites=True)
        elif types.is_op(leaf) or types.is_tensor(leaf):
            fetches.append(leaf)
        elif leaf is not None:
            raise ArgumentTypeError(
                f"expected ops or tensors of a graph, got {types.type_name(leaf)}"
            )
    if not fetches:
        raise PredictionError("nothing is asked for: pass the tensors of the step")
    return fetches
