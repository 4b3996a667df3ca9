"""Quantizers: simulated quantization of one tensor, while its graph is being built."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph import types
from geutil.graph.types import Graph, Tensor
from geutil.quantize import range_variables
from geutil.quantize.range_variables import NewRange, Pair, RangeVariables
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
    """Quantize a tensor in the range of its own values, as weights are.

    In training each step sets the range to that of the tensor, widened to hold zero.
    Otherwise the range is the one that is kept.

    Args:
        inputs: a float32 tensor of the default graph: a v1 graph, or the FuncGraph of
            a function that is being traced.
        per_channel: give each element of the last axis a range of its own.
        init_min: the low end to start with.
        init_max: the high end to start with.
        vars_collection: a collection of a v1 graph to put the variables in, besides
            `GLOBAL_VARIABLES`.
        name_prefix: the name of the range, below the current name scope; its variables
            are `<range>/min` and `<range>/max`.
        is_training: set the range.
        num_bits: the number of bits, 2 to 16.
        narrow_range: leave the lowest integer out.
        symmetric: widen the range until it is symmetric about zero.
        variables: variables by name. Those that are there are used: that is how traces
            of a function share a range. Those that are made are put in.

    Returns:
        The quantized tensor. Gradients pass where values are in the range, else they
        are zero.

    Raises:
        ArgumentTypeError: `inputs` is no float32 tensor of a graph.
        QuantizeError: a number is out of range, or the channels are not known.

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
    """Quantize a tensor in a moving average of its ranges, as activations are.

    In training each step moves the range towards that of the tensor, and quantizes in
    the new range; see `geutil.quantize.range_variables` for the formula. The range to
    start
    with has no part in it: the first step takes that of its tensor. Otherwise the range
    is the one that is kept.

    Args:
        inputs: a float32 tensor of the default graph: a v1 graph, or the FuncGraph of
            a function that is being traced.
        per_channel: give each element of the last axis a range of its own.
        init_min: the low end to start with.
        init_max: the high end to start with.
        ema_decay: how much of the range a step keeps.
        vars_collection: a collection of a v1 graph to put both ends in, besides
            `GLOBAL_VARIABLES`; None is no other.
        name_prefix: the name of the range, below the current name scope; its variables
            are `<range>/min` and `<range>/max`, and `<range>/learnt` in training.
        is_training: move the range.
        num_bits: the number of bits, 2 to 16.
        narrow_range: leave the lowest integer out.
        symmetric: widen the range of each batch until it is symmetric about zero.
        variables: variables by name. Those that are there are used: that is how traces
            of a function share a range. Those that are made are put in. Ends that are
            given without `learnt` count as learnt.

    Returns:
        The quantized tensor. Gradients pass where values are in the range, else they
        are zero.

    Raises:
        ArgumentTypeError: `inputs` is no float32 tensor of a graph.
        QuantizeError: a number is out of range, or the channels are not known.

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
    """Quantize a tensor in a range that is given, and stays.

    Args:
        inputs: a float32 tensor of the default graph: a v1 graph, or the FuncGraph of
            a function that is being traced.
        init_min: the low end of the range.
        init_max: the high end.
        scope: the name of the new ops' scope; None is `FixedQuantize`.
        num_bits: the number of bits, 2 to 16.
        narrow_range: leave the lowest integer out.

    Returns:
        The quantized tensor. Gradients pass where values are in the range, else they
        are zero.

    Raises:
        ArgumentTypeError: `inputs` is no float32 tensor of a graph.
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
