"""Training and eval graphs: batch norms folded, then quantization simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from geutil.batchnorm import FoldReport, fold_batch_norms
from geutil.graph.edits import undone_on_error
from geutil.graph.types import Graph, Tensor, require_graph
from geutil.quantize import insertion, simulation
from geutil.quantize.report import QuantizeReport
from geutil.quantize.spec import QuantizeChoices
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
    insertion.checked_delay(quant_delay, is_training=False)
    scopes = (scope,) if scope else None
    choices = QuantizeChoices(weight_bits, activation_bits, symmetric, scope=scopes)
    return _eval_graph(input_graph, choices)


def _training_graph(
    graph: Any, choices: QuantizeChoices, delay: Any, freeze: Any, statistics: str
) -> RewriteReport:
    delay = insertion.checked_delay(delay, is_training=True)
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
    mode = insertion.Mode(is_training, delay, None)
    return simulation.quantize_by(graph, choices, mode)


def _scope(choices: QuantizeChoices) -> str | None:
    return None if choices.scope is None else choices.scope[0]


def _graph_or_default(graph: Any) -> Graph:
    """Return the graph to rewrite, which has no gradients yet."""
    if graph is None:
        graph = tf.compat.v1.get_default_graph()
    require_graph(graph)
    insertion.refuse_training_ops(graph)
    return graph
