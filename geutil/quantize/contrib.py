"""The functions of tf.contrib.quantize: rewriters of graphs, quantizers of tensors.

The rewriters fold the batch norms of a graph, then simulate its quantization. The
quantizers are called as a graph is built, or insert one FakeQuant op behind an op.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.batchnorm import FoldReport, fold_batch_norms
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph import types
from geutil.graph.edits import undone_on_error
from geutil.graph.resource_variables import step_counter_of
from geutil.graph.types import Graph, Operation, Tensor, require_graph, require_op
from geutil.quantize import fake_quants, simulation, spec
from geutil.quantize.planning import network
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS
from geutil.quantize.report import QuantizeReport, Skipped
from geutil.quantize.spec import Format, QuantizeChoices, checked_delay, checked_ends
from geutil.select import selections
from geutil.select.networks.batch_norms import fused_norm


@dataclass(frozen=True, eq=False)
class RewriteReport:
    """The report of a rewriter.

    Attributes:
        folds: every batch norm, folded or refused with the reason.
        quantization: every op that computes with data, quantized or not.
    """

    folds: FoldReport
    quantization: QuantizeReport

    def __str__(self) -> str:
        return f"{self.folds}\n{self.quantization}"

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the ranges by name: `<range>/min`, `/max` and `/learnt`."""
        return self.quantization.variables

    @property
    def step(self) -> Any:
        """The variable that counts the training steps, where one does."""
        step = self.quantization.step
        return self.folds.step if step is None else step

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor to fetch, or to return, instead of another one.

        This is its quantized version; for a folded fused batch norm, that of the folded
        layer.
        """
        return self.quantization.tensor(self._folded(tensor))

    def _folded(self, tensor: Tensor) -> Tensor:
        op = tensor.op
        if fused_norm(op) is None or tensor is not op.outputs[0]:
            return tensor
        into = [fold.into for fold in self.folds.folded if fold.norm == op.name]
        return op.graph.get_operation_by_name(into[0]).outputs[0] if into else tensor


@tf.autograph.experimental.do_not_convert
def create_training_graph(
    input_graph: Graph | None = None,
    quant_delay: int = 0,
    *,
    statistics: str = "exact",
) -> RewriteReport:
    """Rewrite a graph for training with simulated quantization, in place.

    Batch norms are folded as `geutil.batchnorm.fold_batch_norms` does in training, and
    never switch to their moving statistics; then FakeQuant ops are inserted as by
    `geutil.quantize.quantize`, whose ranges are learnt in every step. Call it when the
    graph is complete and has no gradients yet. A second call changes nothing.

    Args:
        input_graph: the graph; None is the default one, which may be the FuncGraph of
            a function that is being traced.
        quant_delay: the training step, counted from 1, from which on values are
            rounded. Let a network that is trained from scratch converge first.
        statistics: the source of the batch's statistics: "exact" runs each layer
            twice, "one_pass" once; see `geutil.batchnorm.fold_batch_norms`.

    Returns:
        The folded and quantized ops, and the others with the reason.

    Raises:
        ArgumentTypeError: an argument is of another type.
        QuantizeError: the delay is negative, or the graph holds gradients or optimizer
            ops; nothing is changed.
        FoldError: there are no such statistics.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import create_training_graph
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8], "x")
        ...     weights = tf.compat.v1.get_variable("weights", [8, 2])
        ...     y = tf.nn.relu(tf.matmul(x, weights, name="dense"), name="relu")
        >>> report = create_training_graph(graph, quant_delay=1000)
        >>> report.tensor(y).name, report.quantization.coverage
        ('dense/act_quant/SelectV2:0', 1.0)
    """
    return _training_graph(
        input_graph, QuantizeChoices(), quant_delay, None, statistics
    )


@tf.autograph.experimental.do_not_convert
def create_eval_graph(input_graph: Graph | None = None) -> RewriteReport:
    """Rewrite a graph for evaluation with simulated quantization, in place.

    Batch norms at inference are folded, and FakeQuant ops are inserted that read their
    ranges from variables. These have the same names as in the training graph built by
    the same code, so its checkpoint restores them. A second call changes nothing.

    Args:
        input_graph: the graph; None is the default one.

    Returns:
        The folded and quantized ops, and the others with the reason.

    Raises:
        ArgumentTypeError: `input_graph` is not a graph.
        QuantizeError: the graph holds gradients or optimizer ops; nothing is changed.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import create_eval_graph
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8], "x")
        ...     weights = tf.compat.v1.get_variable("weights", [8, 2])
        ...     y = tf.nn.relu(tf.matmul(x, weights, name="dense"), name="relu")
        >>> report = create_eval_graph(graph)
        >>> list(report.variables)[:2]
        ['dense/weights_quant/min', 'dense/weights_quant/max']
    """
    return _eval_graph(input_graph, QuantizeChoices())


@tf.autograph.experimental.do_not_convert
def experimental_create_training_graph(
    input_graph: Graph | None = None,
    weight_bits: int = 8,
    activation_bits: int = 8,
    symmetric: bool = True,
    quant_delay: int = 0,
    freeze_bn_delay: int | None = None,
    scope: str | None = None,
    *,
    statistics: str = "exact",
) -> RewriteReport:
    """Rewrite a graph like `create_training_graph`, with more options.

    Args:
        input_graph: the graph; None is the default one.
        weight_bits: bits of weights, 2 to 16.
        activation_bits: bits of activations, 2 to 16.
        symmetric: whether ranges of weights are symmetric and narrow, as TFLite
            requires: it converts others, but refuses to allocate tensors. This is why
            it is the default, unlike in tf.contrib.quantize. Ranges of activations are
            always asymmetric.
        quant_delay: the training step, counted from 1, from which on values are
            rounded.
        freeze_bn_delay: the training step, counted from 1, from which on batch norms
            use their moving statistics, as in the eval graph. None never does; a number
            fits one network and batch size only. A good choice is some time before the
            end of training, when the averages have converged.
        scope: the name scope in which to fold and quantize; None is the whole graph.
        statistics: the source of the batch's statistics: "exact" runs each layer
            twice, "one_pass" once; see `geutil.batchnorm.fold_batch_norms`.

    Returns:
        The folded and quantized ops, and the others with the reason.

    Raises:
        ArgumentTypeError: an argument is of another type.
        QuantizeError: a number is out of range, or the graph holds gradients or
            optimizer ops; nothing is changed.
        FoldError: `freeze_bn_delay` is negative, or there are no such statistics.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import experimental_create_training_graph
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8], "x")
        ...     weights = tf.compat.v1.get_variable("weights", [8, 2])
        ...     y = tf.nn.relu(tf.matmul(x, weights, name="dense"), name="relu")
        >>> report = experimental_create_training_graph(graph, weight_bits=4)
        >>> print(report.quantization.quantized[1].weights)
        4 bits, symmetric, per channel
    """
    scopes = (scope,) if scope else None
    choices = QuantizeChoices(weight_bits, activation_bits, symmetric, scope=scopes)
    return _training_graph(
        input_graph, choices, quant_delay, freeze_bn_delay, statistics
    )


@tf.autograph.experimental.do_not_convert
def experimental_create_eval_graph(
    input_graph: Graph | None = None,
    weight_bits: int = 8,
    activation_bits: int = 8,
    symmetric: bool = True,
    quant_delay: int | None = None,
    scope: str | None = None,
) -> RewriteReport:
    """Rewrite a graph like `create_eval_graph`, with more options.

    Args:
        input_graph: the graph; None is the default one.
        weight_bits: bits of weights, 2 to 16.
        activation_bits: bits of activations, 2 to 16.
        symmetric: whether weight ranges are symmetric and narrow, as TFLite requires.
        quant_delay: None or 0: an eval graph counts no steps, and always quantizes.
        scope: the name scope in which to fold and quantize; None is the whole graph.

    Returns:
        The folded and quantized ops, and the others with the reason.

    Raises:
        ArgumentTypeError: an argument is of another type.
        QuantizeError: a number is out of range, there is a delay, or the graph holds
            gradients or optimizer ops; nothing is changed.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import experimental_create_eval_graph
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8], "x")
        ...     y = tf.nn.relu(tf.matmul(x, tf.ones([8, 2]), name="dense"))
        >>> report = experimental_create_eval_graph(graph, activation_bits=16)
        >>> print(report.quantization.quantized[1].result)
        16 bits, symmetric
    """
    checked_delay(quant_delay, is_training=False)
    scopes = (scope,) if scope else None
    choices = QuantizeChoices(weight_bits, activation_bits, symmetric, scope=scopes)
    return _eval_graph(input_graph, choices)


def _training_graph(
    graph: Any, choices: QuantizeChoices, delay: Any, freeze: Any, statistics: str
) -> RewriteReport:
    delay = checked_delay(delay, is_training=True)
    graph = _graph_or_default(graph)
    with undone_on_error(graph):
        folds = fold_batch_norms(
            graph,
            is_training=True,
            freeze_batch_norm_delay=freeze,
            statistics=statistics,
            scope=_scope(choices),
        )
        return RewriteReport(folds, _quantized(graph, choices, delay, is_training=True))


def _eval_graph(graph: Any, choices: QuantizeChoices) -> RewriteReport:
    graph = _graph_or_default(graph)
    with undone_on_error(graph):
        folds = fold_batch_norms(graph, scope=_scope(choices))
        return RewriteReport(folds, _quantized(graph, choices, 0, is_training=False))


def _quantized(
    graph: Graph, choices: QuantizeChoices, delay: int, *, is_training: bool
) -> QuantizeReport:
    # The old rewriters put FakeQuant ops on products wherever they are.
    scopes = selections.scopes_meant([graph], _scope(choices))
    choices = replace(choices, scope=scopes, products_at_end=True)
    mode = spec.Mode(is_training, delay, None)
    return simulation.quantize_by(graph, choices, mode)


def _scope(choices: QuantizeChoices) -> str | None:
    return None if choices.scope is None else choices.scope[0]


def _graph_or_default(graph: Any) -> Graph:
    """Return the graph to rewrite, which has no gradients yet."""
    if graph is None:
        graph = tf.compat.v1.get_default_graph()
    require_graph(graph)
    network.refuse_training_ops(graph)
    return graph


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
            ends = fake_quants.assign(handles, fake_quants.ends_of([inputs], form))
        else:
            ends = fake_quants.read(handles)
        return fake_quants.fake_quant(inputs, ends, form)


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
    the new range; see `geutil.quantize.fake_quants` for the formula. The initial
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
    spec.check_decay(ema_decay)
    form = _format(inputs, per_channel, num_bits, symmetric, narrow_range)
    initial = checked_ends(init_min, init_max)
    with _range(
        inputs, name_prefix, form, initial, vars_collection, variables, is_training
    ) as (handles, learnt):
        if is_training:
            batch = fake_quants.ends_of([inputs], form)
            _, ends = fake_quants.moving_average(batch, handles, learnt, ema_decay)
        else:
            ends = fake_quants.read(handles)
        return fake_quants.fake_quant(inputs, ends, form)


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
        return fake_quants.fixed_fake_quant(inputs, ends, form)


@contextmanager
def _range(
    inputs: Tensor,
    prefix: str,
    form: Format,
    initial: tuple[float, float],
    collection: str | None,
    variables: Variables,
    averages: bool = False,
) -> Iterator[tuple[fake_quants.Pair, Any]]:
    """Make the variables of a range; ops of the block get its name scope."""
    # Yields the handles of its ends, and that of the count of a moving average.
    graph: Graph = inputs.graph
    scope = types.scope_finalize(graph.get_name_scope())
    name = types.absolute_unique_name(graph, f"{scope}{prefix}")
    variable_by_name = {} if variables is None else variables
    ranges = fake_quants.RangeVariables(graph, variable_by_name, collection)
    shape = tuple(inputs.shape.as_list()[axis] for axis in form.axes)
    ranges.check(name, shape)
    device = str(inputs.op.device)
    ranges.make(
        [fake_quants.NewRange(name, shape, spec.Range(*initial), averages, device)]
    )
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
    spec.check_bits(bits, "num_bits")
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
    mode = spec.Mode(is_training, checked_delay(quant_delay, is_training))
    graph: Graph = producer.graph
    network.refuse_training_ops(graph)
    network.refuse_mesh(graph)
    quantized_tensor = network.quantized_value(producer.outputs[0])
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
        point = fake_quants.Point(
            producer.outputs[0],
            group.name,
            group,
            simulation.edges_to(producer.outputs[0], readers_in_scope),
        )
        group.points.append(point)
        ranges = fake_quants.RangeVariables(graph, {}, vars_collection)
        quantized_by_tensor = simulation.insert(graph, [group], mode, ranges)
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
) -> fake_quants.RangeGroup:
    spec.check_bits(form.bits)
    spec.check_decay(decay)
    initial = checked_ends(low, high)
    return fake_quants.RangeGroup("", form, not moving_avg, decay, initial)


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
