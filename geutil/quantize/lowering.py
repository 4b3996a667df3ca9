"""Activations in a form that TFLite has int8 kernels for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from geutil.graph import replicas, types
from geutil.graph.edits import InputEdit, apply_edits, results_of, set_results
from geutil.graph.image_layouts import inlined
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning.forms import Form
from geutil.quantize.planning.fused_ops import Prelu, parted_bias
from geutil.rewrite.applying import replace_each
from geutil.rewrite.liveness import Liveness
from geutil.transform.op_templates import Stencils


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


def lower_forms(
    graph: Graph, forms: Mapping[Operation, Form]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let other ops compute what ops do that TFLite has no kernel for.

    Args:
        graph: the graph.
        forms: by ops in it what computes in their place.

    Returns:
        For each what was done, in words; and by the new results what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in the ops and their readers.
    """
    results = _replace(graph, list(forms.items()))
    lines = (f"'{op.name}' ({op.type}) {form.words}" for op, form in forms.items())
    return tuple(lines), results


def lower_calls(
    graph: Graph, ops: Sequence[Operation]
) -> tuple[tuple[str, ...], dict[Operation, Operation]]:
    """Let convolutions stand in the place of calls that are nothing else.

    Args:
        graph: the graph.
        ops: calls in it of one convolution.

    Returns:
        For each what was done, in words; and by the new results what they stand in for.

    Raises:
        StaleGraphError, FinalizedGraphError: the edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges.
    """
    if not ops:
        return (), {}
    # Results of a function survive replacements; here they are replaced, too.
    results = results_of(graph)
    set_results(graph, [])
    done = replace_each(graph, ops, inlined, name="inlined")
    outputs = replicas.outputs_meant(graph)
    outputs[:] = map(done.current, outputs)
    set_results(graph, list(map(done.current, results)))
    lines = (f"'{op.name}' ({op.type}) is the convolution that it calls" for op in ops)
    return tuple(lines), {done.current(op.outputs[0]).op: op for op in ops}


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
            words = f"is added by '{parted.data.op.name}', before a Reshape"
            key = ("bias", *dtypes)
            lowerings.append((op, Form(words, "early", key, _biased, list(parted))))
            lines.append(f"'{op.name}' ({op.type}) {words}")
    by_result = _replace(graph, lowerings)
    by_sum = {new.inputs[0].op: old for new, old in by_result.items()}
    return tuple(lines), by_result | by_sum


def _replace(
    graph: Graph, lowerings: Sequence[tuple[Operation, Form]]
) -> dict[Operation, Operation]:
    """Let others be read in the place of ops.

    Args:
        graph: the graph.
        lowerings: the ops, and what computes in their place.

    Returns:
        By the ops of the new results those that they stand in for.
    """
    if not lowerings:
        return {}
    stencils = Stencils(graph)
    base_names = [f"{op.name}/{form.scope}" for op, form in lowerings]
    names = types.absolute_unique_names(graph, base_names)
    results = [
        stencils.add(form.key, form.function, name, list(form.inputs), op.device)
        for (op, form), name in zip(lowerings, names, strict=True)
    ]
    tensor_of = stencils.make()
    by_tensor: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (op.outputs[0], tensor_of[result])
        for (op, _), (result,) in zip(lowerings, results, strict=True)
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
    Liveness(graph).retire([op for op, _ in lowerings], lambda op: False)
    return {new.op: old.op for old, new in by_tensor.items()}


def _biased(x: tf.Tensor, bias: tf.Tensor, shape: tf.Tensor) -> list[tf.Tensor]:
    total = tf.nn.bias_add(x, tf.reshape(bias, [-1]), name="sum")
    return [tf.reshape(total, shape, name="parted")]


def _minimum(x: tf.Tensor) -> list[tf.Tensor]:
    zero = tf.constant(0.0, tf.float32, name="zero")
    return [tf.minimum(x, zero, name="minimum")]
