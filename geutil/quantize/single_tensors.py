"""Simulated quantization of single tensors: as a graph is built, and behind an op."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph import types
from geutil.graph.edits import undone_on_error
from geutil.graph.resource_variables import step_counter_of
from geutil.graph.types import Graph, Operation, Tensor, require_op
from geutil.quantize import insertion, range_variables
from geutil.quantize.insertion import Mode
from geutil.quantize.planning.draft_points import Point, RangeGroup
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS
from geutil.quantize.planning.network import quantized_value
from geutil.quantize.range_variables import NewRange, Pair, RangeVariables
from geutil.quantize.report import Skipped
from geutil.quantize.spec import Format, Range, check_bits, check_decay, checked_ends

Variables = MutableMapping[str, Any] | None


@tf.autograph.experimental.do_not_convert
def last_value_quantize(
    inputs: Tensor,
    per_channel: bool = False,
    init_min: float = -6.0,
    init_max: float = 6.0,
    vars_collection: str | None = None,
    name_prefix: str = "LastValueQuant",
    *,
    is_training: bool = True,
    num_bits: int = 8,
    narrow_range: bool = False,
    symmetric: bool = False,
    variables: Variables = None,
) -> Tensor:
    """Quantize a tensor in the range of its current values, as for weights.

    In training each step sets the range to that of the tensor, widened to include zero.
    Otherwise the stored range is used.

    Args:
        inputs: a float32 tensor of the default graph: a v1 graph, or the FuncGraph of
            a function that is being traced.
        per_channel: whether each element of the last axis has its own range.
        init_min: the initial low end.
        init_max: the initial high end.
        vars_collection: a collection of a v1 graph to add the variables to, besides
            `GLOBAL_VARIABLES`.
        name_prefix: the name of the range, below the current name scope; its variables
            are `<range>/min` and `<range>/max`.
        is_training: whether to set the range.
        num_bits: the number of bits, 2 to 16.
        narrow_range: whether to leave out the lowest integer.
        symmetric: whether to widen the range until it is symmetric about zero.
        variables: variables by name. Existing ones are used, so that traces of a
            function share a range; new ones are added.

    Returns:
        The quantized tensor. Gradients pass where values are in the range, and are zero
        elsewhere.

    Raises:
        ArgumentTypeError: `inputs` is not a float32 tensor of a graph.
        QuantizeError: a number is out of range, or the number of channels is unknown.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import last_value_quantize
        >>> with tf.Graph().as_default() as graph:
        ...     y = last_value_quantize(tf.constant([-1.0, 0.3, 2.0]), num_bits=2)
        ...     start = tf.compat.v1.global_variables_initializer()
        >>> with tf.compat.v1.Session(graph=graph) as session:
        ...     session.run(start)
        ...     session.run(y).tolist()
        [-1.0, 0.0, 2.0]
    """
    form = _format(inputs, per_channel, num_bits, symmetric, narrow_range)
    initial = checked_ends(init_min, init_max)
    with _range(inputs, name_prefix, form, initial, vars_collection, variables) as (
        handles,
        _,
    ):
        if is_training:
            ends = range_variables.last_value([inputs], handles, form)
        else:
            ends = range_variables.read(handles)
        return range_variables.fake_quant(inputs, ends, form)


@tf.autograph.experimental.do_not_convert
def moving_avg_quantize(
    inputs: Tensor,
    per_channel: bool = False,
    init_min: float = -6.0,
    init_max: float = 6.0,
    ema_decay: float = 0.999,
    vars_collection: str | None = tf.compat.v1.GraphKeys.MOVING_AVERAGE_VARIABLES,
    name_prefix: str = "MovingAvgQuantize",
    *,
    is_training: bool = True,
    num_bits: int = 8,
    narrow_range: bool = False,
    symmetric: bool = False,
    variables: Variables = None,
) -> Tensor:
    """Quantize a tensor in a moving average of its ranges, as for activations.

    In training each step moves the range towards that of the tensor, and quantizes in
    the new range; see `geutil.quantize.range_variables` for the formula. The initial
    range does not matter: the first step uses that of its tensor. Otherwise the stored
    range is used.

    Args:
        inputs: a float32 tensor of the default graph: a v1 graph, or the FuncGraph of
            a function that is being traced.
        per_channel: whether each element of the last axis has its own range.
        init_min: the initial low end.
        init_max: the initial high end.
        ema_decay: the decay of the range in a step.
        vars_collection: a collection of a v1 graph to add both ends to, besides
            `GLOBAL_VARIABLES`; None is no other.
        name_prefix: the name of the range, below the current name scope; its variables
            are `<range>/min` and `<range>/max`, and `<range>/learnt` in training.
        is_training: whether to update the range.
        num_bits: the number of bits, 2 to 16.
        narrow_range: whether to leave out the lowest integer.
        symmetric: whether to widen each batch's range until it is symmetric about zero.
        variables: variables by name. Existing ones are used, so that traces of a
            function share a range; new ones are added. Ends that are given without
            `learnt` count as learnt.

    Returns:
        The quantized tensor. Gradients pass where values are in the range, and are zero
        elsewhere.

    Raises:
        ArgumentTypeError: `inputs` is not a float32 tensor of a graph.
        QuantizeError: a number is out of range, or the number of channels is unknown.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import moving_avg_quantize
        >>> ranges = {}
        >>> @tf.function
        ... def step(x):
        ...     return moving_avg_quantize(x, ema_decay=0.5, variables=ranges)
        >>> _ = step(tf.constant([-2.0, 8.0]))
        >>> {name: float(variable) for name, variable in ranges.items()}
        {'MovingAvgQuantize/min': -2.0, 'MovingAvgQuantize/max': 8.0, \
'MovingAvgQuantize/learnt': 0.5}
    """
    check_decay(ema_decay)
    form = _format(inputs, per_channel, num_bits, symmetric, narrow_range)
    initial = checked_ends(init_min, init_max)
    with _range(
        inputs, name_prefix, form, initial, vars_collection, variables, is_training
    ) as (handles, learnt):
        if is_training:
            _, ends = range_variables.moving_average(
                [inputs], handles, learnt, form, ema_decay
            )
        else:
            ends = range_variables.read(handles)
        return range_variables.fake_quant(inputs, ends, form)


@tf.autograph.experimental.do_not_convert
def fixed_quantize(
    inputs: Tensor,
    init_min: float = -6.0,
    init_max: float = 6.0,
    scope: str | None = None,
    num_bits: int = 8,
    narrow_range: bool = False,
) -> Tensor:
    """Quantize a tensor in a given, fixed range.

    Args:
        inputs: a float32 tensor of the default graph: a v1 graph, or the FuncGraph of
            a function that is being traced.
        init_min: the low end of the range.
        init_max: the high end.
        scope: the name scope of the new ops; None is `FixedQuantize`.
        num_bits: the number of bits, 2 to 16.
        narrow_range: whether to leave out the lowest integer.

    Returns:
        The quantized tensor. Gradients pass where values are in the range, and are zero
        elsewhere.

    Raises:
        ArgumentTypeError: `inputs` is not a float32 tensor of a graph.
        QuantizeError: a number is out of range.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import fixed_quantize
        >>> with tf.Graph().as_default() as graph:
        ...     y = fixed_quantize(tf.constant([-0.4, 0.6, 9.0]), 0.0, 3.0, num_bits=2)
        >>> tf.compat.v1.Session(graph=graph).run(y).tolist()
        [0.0, 1.0, 3.0]
    """
    form = _format(inputs, False, num_bits, False, narrow_range)
    ends = checked_ends(init_min, init_max, stays=True)
    with tf.name_scope(scope or "FixedQuantize"):
        return range_variables.fixed_fake_quant(inputs, ends, form)


@contextmanager
def _range(
    inputs: Tensor,
    prefix: str,
    form: Format,
    initial: tuple[float, float],
    collection: str | None,
    variables: Variables,
    averages: bool = False,
) -> Iterator[tuple[Pair, Any]]:
    """Make the variables of a range; ops of the block get its name scope."""
    # Yields the handles of its ends, and that of the count of a moving average.
    graph: Graph = inputs.graph
    scope = types.scope_finalize(graph.get_name_scope())
    name = types.absolute_unique_name(graph, f"{scope}{prefix}")
    variable_by_name = {} if variables is None else variables
    ranges = RangeVariables(graph, variable_by_name, collection)
    shape = tuple(inputs.shape.as_list()[axis] for axis in form.axes)
    ranges.check(name, shape)
    device = str(inputs.op.device)
    ranges.make([NewRange(name, shape, Range(*initial), averages, device)])
    handles, learnt = ranges.handles(name), ranges.learnt(name) if averages else None
    variable_by_name.update(ranges.by_name)
    # The variables have ops of this scope, too: one that ends in a slash is not made
    # unique again.
    with tf.name_scope(f"{name}/"):
        yield handles, learnt


def _format(
    inputs: Any, per_channel: bool, bits: int, symmetric: bool, narrow_range: bool
) -> Format:
    """Return the format of FakeQuant ops, once tensor and bits are checked."""
    types.require_tensor(inputs)
    if inputs.dtype.base_dtype != tf.float32:
        raise ArgumentTypeError(
            f"FakeQuant ops take float32, and '{inputs.name}' is of type "
            f"{inputs.dtype.base_dtype.name}; cast it first"
        )
    if inputs.graph is not tf.compat.v1.get_default_graph():
        raise ArgumentTypeError(
            f"'{inputs.name}' is of another graph than the default one; call this in "
            "`with tensor.graph.as_default():`"
        )
    check_bits(bits, "num_bits")
    return Format(
        bits, symmetric, narrow_range, _channels(inputs) if per_channel else ()
    )


def _channels(inputs: Tensor) -> tuple[int, ...]:
    rank = inputs.shape.rank
    if not rank or inputs.shape.as_list()[-1] is None:
        raise QuantizeError(
            f"'{inputs.name}' of shape {inputs.shape} has no last axis of known size "
            "for a range for each channel; set its shape, or pass per_channel=False"
        )
    return (rank - 1,)


_logger = logging.getLogger("geutil")


@dataclass(frozen=True, eq=False)
class InsertReport:
    """The report of an insertion.

    Attributes:
        tensor: the quantized tensor, new or existing; None if there is none.
        range: the name of its range, as in `<range>/min`; "" if nothing was inserted.
        consumers: the ops that read the new tensor, by name.
        skipped: the ops that were skipped, and why.
        variables: the variables of the range by name.
        step: the variable that counts the training steps, where one does.
    """

    tensor: Tensor | None
    range: str = ""
    consumers: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    step: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.range and self.tensor is not None:
            readers = ", ".join(f"'{name}'" for name in self.consumers)
            yield f"'{self.tensor.name}' ({self.range}) is read by {readers}"
        else:
            yield "nothing was inserted"
        yield from (f"  {e.op} ({e.op_type}): {e.reason}" for e in self.skipped)


@tf.autograph.experimental.do_not_convert
def insert_quant_op(
    context: str | None,
    name: str,
    producer: Operation,
    consumers: Iterable[Operation],
    *,
    is_training: bool,
    moving_avg: bool = True,
    init_min: float = -6.0,
    init_max: float = 6.0,
    bits: int = 8,
    ema_decay: float = 0.999,
    quant_delay: int | None = None,
    vars_collection: str | None = None,
    narrow_range: bool = False,
    producer_scope: str | None = None,
    consumer_scope: str | None = None,
) -> InsertReport:
    """Insert a FakeQuant op between an op and some of those that read it.

    Use it for tensors that `geutil.quantize.quantize` does not handle, or should handle
    differently; a later call of that function treats the tensor as quantized.

    Args:
        context: the scope of the range, such as the name of a block; "" or None is the
            root.
        name: the name of the range there. Its variables are `<context>/<name>/min` and
            `/max`, with a number if that is taken.
        producer: an op; its first result is quantized.
        consumers: the ops that read the quantized tensor. Others still read the
            original.
        is_training: whether to learn the range in every step, before gradients are
            built; else it is read.
        moving_avg: whether to learn a moving average, as for activations; else the
            range of the last value, as for weights.
        init_min: the initial low end of the range.
        init_max: the initial high end.
        bits: the number of bits, 2 to 16.
        ema_decay: the decay of the moving average in a training step.
        quant_delay: the training step, counted from 1, from which on values are
            rounded; None or 0 starts at once.
        vars_collection: a collection of a v1 graph to add the variables to, besides
            `GLOBAL_VARIABLES`.
        narrow_range: whether to leave out the lowest integer.
        producer_scope: insert nothing unless the producer is in this name scope.
        consumer_scope: skip consumers that are not in this name scope.

    Returns:
        The new tensor, its range, and the skipped readers with reasons: a producer or
        consumer outside the scopes, or a producer that is already quantized.

    Raises:
        ArgumentTypeError: an argument is of another type.
        QuantizeError: a number is out of range, a consumer does not read the producer,
            or the graph holds gradients or optimizer ops; nothing is changed.
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops of the graph.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import insert_quant_op
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.identity(tf.ones([2]), name="block/x")
        ...     y, z = tf.square(x, name="y"), tf.exp(x, name="z")
        >>> report = insert_quant_op(
        ...     "block", "x_quant", x.op, [y.op], is_training=False
        ... )
        >>> print(report)
        'block/x_quant/FakeQuantWithMinMaxVars:0' (block/x_quant) is read by 'y'
        >>> list(report.variables)
        ['block/x_quant/min', 'block/x_quant/max']
    """
    readers = _checked_ends(producer, consumers)
    group = _group(
        init_min, init_max, moving_avg, ema_decay, Format(bits, False, narrow_range)
    )
    mode = Mode(is_training, insertion.checked_delay(quant_delay, is_training))
    graph: Graph = producer.graph
    insertion.refuse_training_ops(graph)
    insertion.refuse_mesh(graph)
    quantized_tensor = quantized_value(producer.outputs[0])
    reason = _reason(producer, quantized_tensor, producer_scope)
    if reason:
        return InsertReport(quantized_tensor, skipped=(_skipped(producer, reason),))
    readers_in_scope = [
        op for op in readers if types.is_in_scope(op.name, consumer_scope)
    ]
    skipped = tuple(
        _skipped(op, f"reads '{producer.name}' from outside the scope {consumer_scope}")
        for op in readers
        if not types.is_in_scope(op.name, consumer_scope)
    )
    if not readers_in_scope:
        return InsertReport(None, skipped=skipped)
    with undone_on_error(graph):
        group.name = types.unused_name(
            graph, f"{types.scope_finalize(context or '')}{name}"
        )
        point = Point(
            producer.outputs[0],
            group.name,
            group,
            insertion.edges_to(producer.outputs[0], readers_in_scope),
        )
        group.points.append(point)
        ranges = RangeVariables(graph, {}, vars_collection)
        quantized_by_tensor = insertion.insert(graph, [group], mode, ranges)
    counter = step_counter_of(graph)
    return InsertReport(
        quantized_by_tensor[point.tensor],
        group.name,
        tuple(op.name for op in readers_in_scope),
        skipped,
        ranges.by_name,
        None if counter is None else counter.variable,
    )


def _checked_ends(
    producer: Operation, consumers: Iterable[Operation]
) -> list[Operation]:
    """Return the consumers; raise unless each reads the quantized tensor."""
    require_op(producer)
    if not producer.outputs or producer.outputs[0].dtype.base_dtype != tf.float32:
        raise QuantizeError(
            f"'{producer.name}' ({producer.type}) makes no float32 tensor, and "
            "FakeQuant ops take no other"
        )
    readers = types.as_list(consumers)
    tensor = producer.outputs[0]
    for reader in readers:
        require_op(reader)
        if not any(t is tensor for t in reader.inputs):
            actual = sorted(op.name for op in tensor.consumers())
            raise QuantizeError(
                f"'{reader.name}' ({reader.type}) does not read '{tensor.name}'; its "
                f"consumers are {', '.join(actual) or 'none'}"
            )
    if not readers:
        raise QuantizeError(
            f"there is no consumer to read what '{producer.name}' is quantized to; "
            "pass those that shall"
        )
    return list(dict.fromkeys(readers))


def _group(
    low: float, high: float, moving_avg: bool, decay: float, form: Format
) -> RangeGroup:
    check_bits(form.bits)
    check_decay(decay)
    initial = checked_ends(low, high)
    return RangeGroup("", form, not moving_avg, decay, initial)


def _reason(producer: Operation, there: Tensor | None, scope: str | None) -> str:
    """Return why nothing is inserted behind an op; "" if something is."""
    if not types.is_in_scope(producer.name, scope):
        return f"is outside the scope '{scope}'"
    if producer.type in FAKE_QUANT:
        return "quantizes itself"
    if there is not None:
        return f"is quantized already, to '{there.name}'"
    return ""


def _skipped(op: Operation, reason: str) -> Skipped:
    _logger.info("insert_quant_op: '%s' (%s) %s", op.name, op.type, reason)
    return Skipped(op.name, op.type, reason, op.type in KERNELS)
