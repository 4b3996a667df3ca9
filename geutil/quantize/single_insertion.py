"""One FakeQuant op between an op and some of those that read it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import types
from geutil.graph.types import Graph, Operation, Tensor, require_op
from geutil.quantize import insertion
from geutil.quantize.insertion import Mode
from geutil.quantize.planning.draft_points import Point, RangeGroup
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS
from geutil.quantize.planning.network import quantized_value
from geutil.quantize.range_variables import RangeVariables
from geutil.quantize.report import Skipped
from geutil.quantize.spec import Format, check_bits, check_decay, checked_ends
from geutil.rewrite.applying import undone_on_error
from geutil.transform.step_counter import counter_of

_logger = logging.getLogger("geutil")


@dataclass(frozen=True, eq=False)
class InsertReport:
    """The report of an insertion.

    Attributes:
        tensor: the quantized tensor, new or there already; None if there is none.
        range: the name of its range, as in `<range>/min`; "" if nothing was inserted.
        consumers: the ops that read the new tensor, by name.
        skipped: the ops that were left alone, and why.
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

    Use it for tensors that `geutil.quantize.quantize` does not know, or should treat
    otherwise; a later call of that function treats the tensor as quantized.

    Args:
        context: the scope of the range, the name of a block for example; "" or None is
            the root.
        name: the name of the range there. Its variables are `<context>/<name>/min` and
            `/max`, with a number where that is taken.
        producer: an op; its first result is quantized.
        consumers: the ops that shall read it quantized. Others go on reading it as it
            is.
        is_training: learn the range with every step, before gradients are built; else
            read it.
        moving_avg: learn a moving average, as for activations; else take the range of
            the last value, as for weights.
        init_min: the low end of the range to start with.
        init_max: the high end.
        bits: the number of bits, 2 to 16.
        ema_decay: how much of a moving average a training step keeps.
        quant_delay: the training step, counted from 1, from which on values are
            rounded; None or 0 starts at once.
        vars_collection: a collection of a v1 graph to put the variables in, besides
            `GLOBAL_VARIABLES`.
        narrow_range: leave the lowest integer out.
        producer_scope: insert nothing unless the producer is in this name scope.
        consumer_scope: leave out consumers that are not in this name scope.

    Returns:
        The new tensor, its range, and the skipped readers with reasons: a producer or
        consumers outside the scopes, or a producer that is quantized already.

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
    group = _range(
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
    counter = counter_of(graph)
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


def _range(
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
