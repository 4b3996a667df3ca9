"""Divisions by data, which TFLite's int8 kernel does not take.

It refuses divisors that are stored as 0, whatever the zero point is, and that while the
file runs (TensorFlow 2.21: "data[i] != 0 was not true"). The converter chooses it
wherever FakeQuant ops lie around a division. There is none for powers, so that one of
-1 is computed in float.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.graph.identity import MutableIdentityMap
from geutil.graph.importing import set_new_input
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.finding.kernels import DIVISIONS, FAKE_QUANT
from geutil.select.networks.origins import Origins


def without_divisions(graph: Graph, results: Sequence[Tensor]) -> list[Tensor]:
    """Let divisions by data be products with a power, where they would be int8.

    Args:
        graph: the graph, which is changed; the caller is in it.
        results: its results.

    Returns:
        The results as they are now.

    Cost: linear in the ops of the graph.
    """
    found: MutableIdentityMap[Tensor] = MutableIdentityMap()
    origins = Origins(graph)
    for op in graph.get_operations():
        divisor = DIVISIONS.get(op.type)
        if divisor is None or origins.is_parameter(op.inputs[divisor]):
            continue
        readers = op.outputs[0].consumers()
        if not any(reader.type in FAKE_QUANT for reader in readers):
            continue
        found[op.outputs[0]] = quotient = _quotient(op, divisor)
        for reader in readers:
            for index, t in enumerate(reader.inputs):
                if t is op.outputs[0]:
                    set_new_input(reader, index, quotient)
    return [found.get(t, t) for t in results]


def _quotient(op: Operation, divisor: int) -> Tensor:
    inverse = tf.pow(op.inputs[divisor], tf.constant(-1.0), name=f"{op.name}/inverse")
    if not divisor:
        return inverse
    return tf.multiply(op.inputs[0], inverse, name=f"{op.name}/quotient")
