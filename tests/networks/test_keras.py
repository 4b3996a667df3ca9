"""The editor on a network of Keras, against the function that it never touched."""

import numpy as np
import tensorflow as tf

import geutil as ge
from tests.settings import evaluate


def test_a_copy_computes_what_keras_does_and_has_its_gradient(mobilenet):
    ge.verify(mobilenet.graph)
    images = tf.constant(mobilenet.images)
    with tf.GradientTape() as tape:
        tape.watch(images)
        (output,) = mobilenet.function(images)
        loss = tf.reduce_sum(tf.square(output))
    expected = tape.gradient(loss, images).numpy()
    _, info = ge.copy(mobilenet.graph, tf.Graph())
    image, copied = info.transformed([mobilenet.image, mobilenet.output])
    with image.graph.as_default():
        gradient = tf.gradients(tf.reduce_sum(tf.square(copied)), image)[0]
    value, slope = evaluate(image.graph, [copied, gradient], {image: mobilenet.images})
    np.testing.assert_allclose(value, output, rtol=1e-4, atol=1e-6)
    scale = np.abs(expected).max()
    assert scale > 0
    np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-4 * scale)


def test_every_relu6_is_rerouted(mobilenet):
    _, info = ge.copy(mobilenet.graph, tf.Graph())
    image, output = info.transformed([mobilenet.image, mobilenet.output])
    relu6 = ge.filter_ops(image.graph, ge.op_type("Relu6"))
    assert len(relu6) == 10
    with image.graph.as_default():
        for op in relu6:
            # The same function by other means: the output must not move.
            clipped = tf.clip_by_value(op.inputs[0], 0.0, 6.0)
            assert ge.reroute_ts(clipped, op.outputs[0]) > 0
    ge.verify(image.graph)
    used = ge.get_backward_walk_ops(output)
    assert not ge.filter_ops(used, ge.op_type("Relu6"))
    (value,) = evaluate(image.graph, [output], {image: mobilenet.images})
    np.testing.assert_allclose(value, mobilenet.keras_output(), rtol=1e-4, atol=1e-6)


def test_a_block_is_cut_out(mobilenet):
    graph = mobilenet.graph
    start, end = (
        ge.select_ops(rf"/{block}_add(_\d+)?/", graph=graph)[-1].outputs[0]
        for block in ("block_2", "block_4")
    )
    part, info = ge.copy(ge.get_backward_walk_ops(end, stop_at_ts=[start]), tf.Graph())
    assert len(part.inputs) == 1
    at_start, at_end = evaluate(
        graph, [start, end], {mobilenet.image: mobilenet.images}
    )
    (value,) = evaluate(
        part.graph, [info.transformed(end)], {info.transformed(start): at_start}
    )
    np.testing.assert_allclose(value, at_end, rtol=1e-5, atol=1e-6)


def test_a_whole_traced_function_is_copied_with_its_captures(mobilenet):
    graph = tf.Graph()
    _, info = ge.copy(mobilenet.function.graph, graph)
    ge.verify(graph)
    source = mobilenet.function.graph.get_operations()
    assert {op.name for op in graph.get_operations()} == {op.name for op in source}
    for op in source:
        found, wanted = (
            [t.shape.as_list() for t in outputs if t.shape.rank is not None]
            for outputs in (info.transformed(op).outputs, op.outputs)
        )
        assert found == wanted
