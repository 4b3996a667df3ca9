"""Activations in a form that TFLite has int8 kernels for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import tensorflow as tf

from geutil.graph import replicas, types
from geutil.graph.edits import InputEdit, apply_edits, results_of, set_results
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning.fused_ops import Prelu, parted_bias
from geutil.transform.op_templates import Function, Stencils
from geutil.transform.rewrite.liveness import Liveness


def lower_prelus(graph: Graph, prelus: Sequence[Prelu]) -> tuple[str, ...]:
    """Let PReLUs compute `relu(x) + alpha * min(x, 0)`, which is the same.

    Keras writes `relu(x) + -alpha * relu(-x)`, and TFLite negates in float only.

    Args:
        graph: the graph.
        prelus: the sums in it, whose insides nothing else reads.

    Returns:
        For each what was done, in words.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the PReLUs.
    """
    stencils = Stencils(graph)
    base_names = [f"{prelu.product.name}/negative" for prelu in prelus]
    names = types.absolute_unique_names(graph, base_names)
    minima = [
        stencils.add("minimum", _minimum, name, [prelu.source], prelu.end.device)
        for prelu, name in zip(prelus, names, strict=True)
    ]
    tensor_of = stencils.make()
    edits = [
        edit
        for prelu, (minimum,) in zip(prelus, minima, strict=True)
        for edit in (
            InputEdit(prelu.product, prelu.slot, tensor_of[minimum]),
            InputEdit(prelu.product, 1 - prelu.slot, prelu.alpha),
        )
    ]
    replaced: list[Operation] = [t.op for p in prelus for t in p.product.inputs]
    apply_edits(graph, edits)
    Liveness(graph).retire(replaced, lambda op: False)
    return tuple(
        f"'{prelu.end.name}', a PReLU, computes relu(x) + alpha * min(x, 0)"
        for prelu in prelus
    )


def lower_negations(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let `-x` be computed as `x * -1`, which is the same; TFLite has a kernel for it.

    Args:
        graph: the graph.
        ops: Neg ops in it.

    Returns:
        For each what was done, in words; and by the products what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    products = _replace(
        graph,
        [_Lowering(op, "product", "product", _product, op.inputs[:1]) for op in ops],
    )
    return tuple(f"'{op.name}' (Neg) computes x * -1" for op in ops), products


def lower_layer_norms(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let layer norms of one op be computed in several, each with an int8 kernel.

    The converter would do so, too, but where no FakeQuant can lie between them.

    Args:
        graph: the graph.
        ops: fused batch norms in it that are layer norms.

    Returns:
        For each what was done, in words; and by the new results what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    results = _replace(
        graph,
        [
            _Lowering(op, "norm", ("norm", op), _normalizing(op), op.inputs[:1])
            for op in ops
        ],
    )
    lines = tuple(
        f"'{op.name}' ({op.type}), a layer norm, computes (x - mean) * "
        "rsqrt(variance + epsilon)"
        for op in ops
    )
    return lines, results


def lower_one_hots(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let one-hot vectors of floats choose between two values by a mask.

    TFLite's converter fails where they are to be quantized: it moves that to the
    values, which the kernel does not take in int8.

    Args:
        graph: the graph.
        ops: OneHot ops in it, or casts of what these make.

    Returns:
        For each what was done, in words; and by the new results what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    lowerings = []
    for op in ops:
        one_hot = op.inputs[0].op if op.type == "Cast" else op
        indices, *_, off = one_hot.inputs
        axis = int(one_hot.get_attr("axis"))
        key = ("one-hot", axis, indices.dtype.name, off.dtype.name)
        inputs = one_hot.inputs
        lowerings.append(_Lowering(op, "choice", key, _chooser(axis), inputs))
    results = _replace(graph, lowerings)
    return tuple(f"'{op.name}' ({op.type}) chooses by a mask" for op in ops), results


def lower_divisions(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let `x / sqrt(y)` be computed as `x * rsqrt(y)`; TFLite has kernels for it.

    Its int8 kernel for divisions takes no divisor that is stored as 0, whatever that
    stands for.

    Args:
        graph: the graph.
        ops: divisions in it by a square root.

    Returns:
        For each what was done, in words; and by the new results what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    lowerings = []
    for op in ops:
        *dividend, root = op.inputs
        function = _product_with_root if dividend else _inverse_root
        inputs = [*dividend, root.op.inputs[0]]
        key = ("root", len(dividend))
        lowerings.append(_Lowering(op, "by_root", key, function, inputs))
    results = _replace(graph, lowerings)
    return tuple(f"'{op.name}' ({op.type}) computes by rsqrt" for op in ops), results


def lower_squares(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let squared differences be products of a difference with itself.

    The converter writes those of more than four dimensions as two ops, but where no
    FakeQuant can lie between them.

    Args:
        graph: the graph.
        ops: SquaredDifference ops in it.

    Returns:
        For each what was done, in words; and by the products what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    lowerings = [
        _Lowering(op, "product", "square", _squared_difference, op.inputs) for op in ops
    ]
    results = _replace(graph, lowerings)
    return (
        tuple(f"'{op.name}' ({op.type}) computes (x - y) * (x - y)" for op in ops),
        results,
    )


def lower_biases(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let layers add their biases before a Reshape, which is the same.

    A layer's kernel adds a bias before it rounds; behind a Reshape that parts the
    channels another kernel adds it, and both round.

    Args:
        graph: the graph.
        ops: sums in it that `parted_bias` tells of.

    Returns:
        For each what was done, in words; and by the new sums and what is made of them
        what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    lowerings, lines = [], []
    for op in ops:
        parted = parted_bias(op)
        if parted is not None:
            dtypes = tuple(t.dtype.name for t in parted)
            key = ("bias", *dtypes)
            lowerings.append(_Lowering(op, "early", key, _biased, list(parted)))
            lines.append(
                f"'{op.name}' ({op.type}) is added by '{parted.data.op.name}', before "
                "a Reshape"
            )
    by_result = _replace(graph, lowerings)
    by_sum = {new.inputs[0].op: old for new, old in by_result.items()}
    return tuple(lines), by_result | by_sum


class _Lowering(NamedTuple):
    """An op in whose place others compute.

    Attributes:
        op: the op.
        scope: the last part of the new ops' scope.
        key: tells apart what makes other ops.
        function: what makes them.
        inputs: what they read.
    """

    op: Operation
    scope: str
    key: Hashable
    function: Function
    inputs: Sequence[Tensor]


def _replace(
    graph: Graph, lowerings: Sequence[_Lowering]
) -> dict[Operation, Operation]:
    """Let others be read in the place of ops.

    Args:
        graph: the graph.
        lowerings: the ops, and what computes in their place.

    Returns:
        By the ops of the new results those that they stand in for.
    """
    stencils = Stencils(graph)
    base_names = [f"{low.op.name}/{low.scope}" for low in lowerings]
    names = types.absolute_unique_names(graph, base_names)
    results = [
        stencils.add(low.key, low.function, name, list(low.inputs), low.op.device)
        for low, name in zip(lowerings, names, strict=True)
    ]
    tensor_of = stencils.make()
    by_tensor: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (low.op.outputs[0], tensor_of[result])
        for low, (result,) in zip(lowerings, results, strict=True)
    )
    edits = [
        InputEdit(reader, slot, new)
        for old, new in by_tensor.items()
        for reader in dict.fromkeys(old.consumers())
        for slot, t in enumerate(reader.inputs)
        if t is old
    ]
    apply_edits(graph, edits)
    set_results(graph, [by_tensor.get(t, t) for t in results_of(graph)])
    outputs = replicas.outputs_meant(graph)
    outputs[:] = [by_tensor.get(t, t) for t in outputs]
    Liveness(graph).retire([low.op for low in lowerings], lambda op: False)
    return {new.op: old.op for old, new in by_tensor.items()}


def _normalizing(op: Operation) -> Function:
    """Return what computes a layer norm of examples that are channels."""
    epsilon = float(op.get_attr("epsilon"))

    def normalized(x: tf.Tensor) -> list[tf.Tensor]:
        # The batch of one is none to take a mean over.
        axes = list(range(2, x.shape.rank))
        mean = tf.reduce_mean(x, axes, keepdims=True, name="mean")
        squares = tf.math.squared_difference(x, mean, name="squares")
        variance = tf.reduce_mean(squares, axes, keepdims=True, name="variance")
        factor = tf.math.rsqrt(variance + epsilon, name="factor")
        return [tf.multiply(x - mean, factor, name="normalized")]

    return normalized


def _chooser(axis: int) -> Function:
    def function(
        indices: tf.Tensor, depth: tf.Tensor, on: tf.Tensor, off: tf.Tensor
    ) -> list[tf.Tensor]:
        mask = tf.one_hot(indices, depth, True, False, axis, tf.bool, name="mask")
        on, off = (tf.cast(value, tf.float32) for value in (on, off))
        return [tf.where(mask, on, off, name="choice")]

    return function


def _squared_difference(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    difference = tf.subtract(x, y, name="difference")
    return [tf.multiply(difference, difference, name="square")]


def _biased(x: tf.Tensor, bias: tf.Tensor, shape: tf.Tensor) -> list[tf.Tensor]:
    total = tf.nn.bias_add(x, tf.reshape(bias, [-1]), name="sum")
    return [tf.reshape(total, shape, name="parted")]


def _inverse_root(y: tf.Tensor) -> list[tf.Tensor]:
    return [tf.math.rsqrt(y, name="rsqrt")]


def _product_with_root(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    return [tf.multiply(x, tf.math.rsqrt(y, name="rsqrt"), name="product")]


def _minimum(x: tf.Tensor) -> list[tf.Tensor]:
    zero = tf.constant(0.0, tf.float32, name="zero")
    return [tf.minimum(x, zero, name="minimum")]


def _product(x: tf.Tensor) -> list[tf.Tensor]:
    factor = tf.constant(-1.0, tf.float32, name="factor")
    return [tf.multiply(x, factor, name="product")]
