"""The networks that gradients are tested and measured on are what they claim to be."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.networks import NETWORKS
from tests.gradients.networks import SMALL, small_step, trace_forward
from tests.thorough import chosen


def largest(gradient):
    return tf.reduce_max(tf.abs(tf.convert_to_tensor(gradient)))


def op_types(graph):
    return [op.type for op in graph.get_operations()]


def test_every_network_has_a_small_size():
    assert list(SMALL) == list(NETWORKS)


@pytest.mark.parametrize(
    "step", chosen(SMALL, "chain", "U-Net", "encoder"), indirect=True
)
def test_every_variable_has_a_finite_gradient(step):
    @tf.function
    def sizes(*batch):
        return [largest(g) for g in tf.gradients(step.loss(*batch), step.variables)]

    values = np.array([size.numpy() for size in sizes(*step.tensors())])
    assert len(values) == len(step.variables) > 0
    assert np.isfinite(values).all()
    assert values.max() > 0


def test_the_forward_part_can_be_differentiated(forward):
    assert forward.loss.shape == []
    assert [t.shape for t in forward.batch] == [x.shape for x in forward.step.batch]
    with forward.graph.as_default():
        gradients = tf.gradients(forward.loss, forward.xs)
    assert not any(g is None for g in gradients)


def test_each_trace_is_a_graph_of_its_own():
    first, second = (trace_forward(small_step("U-Net")) for _ in range(2))
    assert first.graph is not second.graph
    assert first.loss.graph is first.graph


@pytest.mark.parametrize("name", ["chain", "MobileNetV2", "U-Net", "encoder"])
def test_the_state_is_what_a_step_moves(name):
    step = small_step(name)
    before = [v.numpy() for v in (*step.state, *step.variables)]
    tf.function(step.loss)(*step.tensors())
    after = [v.numpy() for v in (*step.state, *step.variables)]
    moved = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    count = len(step.state)
    assert all(moved[:count])
    assert not any(moved[count:])


@pytest.mark.parametrize("name", ["chain", "U-Net", "encoder"])
def test_blocks_can_be_wrapped(name):
    wrapped = []

    def wrap(block):
        def call(*args):
            wrapped.append(block)
            return block(*args)

        return call

    step = NETWORKS[name](**SMALL[name], wrap=wrap)
    trace_forward(step)
    assert len(wrapped) == {"chain": 3, "U-Net": 9, "encoder": 3}[name]


def test_the_encoder_has_what_real_ones_have():
    forward = trace_forward(small_step("encoder"))
    with forward.graph.as_default():
        gradients = tf.gradients(forward.loss, forward.xs)
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    assert len(sparse) == 2  # The embeddings of tokens and places.
    types = op_types(forward.graph)
    assert types.count("StatelessRandomUniformV2") == 1 + 3 * 3
    tokens = forward.step.batch[0]
    assert (tokens == 0).any()
    assert (tokens[:, 0] != 0).all()
