"""Ranges found in graphs, and parts of graphs copied without what quantizes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from geutil.quantize import calibrate, quantize
from geutil.quantize.calibration.ranges import find_sites, unquantized
from geutil.quantize.partial_copy import PartialCopy, values_of
from geutil.quantize.planning.network import delayed_input
from tests.quantize.small_networks import (
    branch_inputs,
    branch_weights,
    opened,
    spec,
    two_branches,
)
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec([None, 8, 8, 3], "x")


def test_delays_are_told_from_other_choices():
    m = opened(lambda x: two_branches(x, branch_weights()), IMAGE)
    quantize(m, quant_delay=2)
    chosen = [
        op for op in m.graph.get_operations() if op.type in ("Select", "SelectV2")
    ]
    assert len(chosen) == 9
    sources = [delayed_input(op) for op in chosen]
    assert all(s is op.inputs[2] for s, op in zip(sources, chosen, strict=True))
    with m.graph.as_default():
        fake = chosen[0].inputs[1]
        other = tf.where(chosen[0].inputs[0], fake, tf.zeros_like(fake))
        again = tf.identity(other)
    assert delayed_input(other.op) is None
    assert delayed_input(again.op) is None


def test_copies_with_values_in_places():
    @tf.function(input_signature=[spec([None], "x")])
    def f(x):
        return tf.exp(tf.negative(x, name="a") * 2.0, name="b")

    graph = f.get_concrete_function().graph
    a, b = (graph.get_operation_by_name(name) for name in "ab")
    (x,) = graph.inputs

    def copied(replace):
        copy = PartialCopy(graph, {"x": x}, replace)
        (made,) = copy.of([b.outputs[0]])
        return copy, made

    copy, made = copied(lambda op: None)
    assert [op.type for op in copy.graph.get_operations()].count("Neg") == 1
    assert made.op.type == "Exp"
    copy, _ = copied(lambda op: x if op is a else None)
    assert "Neg" not in [op.type for op in copy.graph.get_operations()]
    constant = np.array([1.0, 2.0], np.float32)
    (found,) = values_of([b.outputs[0]], lambda op: constant if op is a else None)
    np.testing.assert_allclose(found, np.exp(2 * constant), rtol=1e-6)


def test_values_of_parameters():
    weights = {n: tf.Variable(w) for n, w in branch_weights().items()}
    m = opened(lambda x: two_branches(x, weights), IMAGE)
    quantize(m, is_training=False)
    calibrate(m, {"x": branch_inputs(1)[0]})
    sites = [s for s in find_sites(m.graph, m.variables) if s.is_weights]
    found = values_of([s.ops[0].outputs[0] for s in sites], unquantized)
    assert len(found) == 3
    by_size = {w.numpy().size: w.numpy() for w in weights.values()}
    for value in found:
        np.testing.assert_array_equal(value.ravel(), by_size[value.size].ravel())
    assert values_of([]) == []
