"""Writes activations in a form that TFLite has int8 kernels for."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.function_results import results_of, set_results
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.names import absolute_unique_names
from geutil.quantize.finding.prelus import Prelu
from geutil.transform.rewrite.liveness import Liveness
from geutil.transform.stencils import Stencils


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
    if not prelus:
        return ()
    stencils = Stencils(graph)
    wanted = [f"{prelu.product.name}/negative" for prelu in prelus]
    names = absolute_unique_names(graph, wanted)
    minima = [
        stencils.add("minimum", _minimum, name, [prelu.source], prelu.end.device)
        for prelu, name in zip(prelus, names, strict=True)
    ]
    made = stencils.make()
    edits = [
        edit
        for prelu, (minimum,) in zip(prelus, minima, strict=True)
        for edit in (
            InputEdit(prelu.product, prelu.slot, made[minimum]),
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
    if not ops:
        return (), {}
    stencils = Stencils(graph)
    names = absolute_unique_names(graph, [f"{op.name}/product" for op in ops])
    products = [
        stencils.add("product", _product, name, [op.inputs[0]], op.device)
        for op, name in zip(ops, names, strict=True)
    ]
    made = stencils.make()
    by_tensor: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (op.outputs[0], made[product])
        for op, (product,) in zip(ops, products, strict=True)
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
    Liveness(graph).retire(ops, lambda op: False)
    lines = tuple(f"'{op.name}' (Neg) computes x * -1" for op in ops)
    return lines, {new.op: old.op for old, new in by_tensor.items()}


def _minimum(x: tf.Tensor) -> list[tf.Tensor]:
    zero = tf.constant(0.0, tf.float32, name="zero")
    return [tf.minimum(x, zero, name="minimum")]


def _product(x: tf.Tensor) -> list[tf.Tensor]:
    factor = tf.constant(-1.0, tf.float32, name="factor")
    return [tf.multiply(x, factor, name="product")]
