"""Writes activations in a form that TFLite has int8 kernels for."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.kinds import Graph, Operation
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


def _minimum(x: tf.Tensor) -> list[tf.Tensor]:
    zero = tf.constant(0.0, tf.float32, name="zero")
    return [tf.minimum(x, zero, name="minimum")]
