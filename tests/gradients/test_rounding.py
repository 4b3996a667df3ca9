"""What Grappler may join, and what segments wait for instead.

That the bits are those of plain gradients is tested in a process with deterministic
ops (`apart/test_determinism.py`).
"""

import tensorflow as tf

from geutil.gradients.bitwise_determinism import keep_apart, readers_of, without_joined
from geutil.gradients.step import build_step
from geutil.graph.creation import set_new_input


def build(depth):
    """Return the step of a chain of sines, and the products of its backward pass."""
    x = h = tf.random.stateless_uniform([8], [1, 2])
    for _ in range(depth):
        h = tf.sin(h)
    step = build_step(h, [x])
    return step, [op for op in step.backward if op.type == "Mul"]


def test_readers_are_those_that_the_step_needs():
    with tf.Graph().as_default():
        x = tf.random.stateless_uniform([8], [1, 2])
        y = tf.sin(x)
        tf.exp(x, name="not_needed")
        step = build_step(y, [x])
        types = [op.type for op, _ in readers_of(step)[x]]
        assert sorted(types) == ["Cos", "Sin"]


def test_what_reads_a_shape_keeps_nothing_apart():
    with tf.Graph().as_default() as graph:
        image = tf.random.stateless_uniform([1, 8, 8, 2], [1, 2])
        weights = tf.random.stateless_uniform([3, 3, 2, 2], [3, 4])
        edges = [[0, 0], [1, 1], [1, 1], [0, 0]]
        padded = tf.pad(image, edges)
        y = tf.nn.conv2d(padded, weights, 1, "VALID")
        step = build_step(y, [weights])
        # The gradient asks for the shapes of what the convolution reads.
        assert "ShapeN" in [op.type for op in padded.consumers()]
        before = readers_of(step)
        types = [op.type for op, _ in before[padded]]
        assert sorted(types) == ["Conv2D", "Conv2DBackpropFilter"]
        copied, again = tf.pad(image, edges), tf.no_op()
        (filter_gradient,) = (op for op, _ in before[padded] if op is not y.op)
        set_new_input(filter_gradient, 0, copied)
        keep_apart(step, before, [(padded.op, copied.op, again)])
        names = {op.name for op in graph.get_operations() if op in padded.consumers()}
        assert "recomputed/apart" in names


def test_products_that_may_be_joined_are_not_awaited():
    with tf.Graph().as_default():
        step, products = build(3)
        last = products[-1]
        # A product that is a result has no reader.
        assert without_joined(step, [last]) == (last,)
        # The first product reads a seed, which is no product.
        awaited = without_joined(step, [products[1]])
        assert awaited
        assert all(op.type != "Mul" for op in awaited)
        assert all(op in step.backward for op in awaited)


def test_ops_that_are_not_joined_are_awaited_as_they_are():
    with tf.Graph().as_default():
        step, _ = build(3)
        cosines = [op for op in step.backward if op.type == "Cos"]
        assert without_joined(step, cosines) == tuple(cosines)


def test_only_what_had_several_readers_is_parted():
    with tf.Graph().as_default() as graph:
        x = tf.random.stateless_uniform([8], [1, 2])
        read_twice = tf.multiply(x, 2.0, name="read_twice")
        read_once = tf.multiply(tf.reverse(read_twice, [0]), 3.0, name="read_once")
        y = tf.cumsum(read_once)
        z = tf.cumsum(x)
        step = build_step([y, z], [x])
        before = readers_of(step)
        before[read_twice].append((y.op, 0))
        gate = tf.raw_ops.NoOp(name="gate")
        copies = [
            (t.op, tf.multiply(x, x, name="copy").op, gate)
            for t in (read_twice, read_once)
        ]
        copied = copies[0][1].outputs[0]
        z.op._update_input(0, copied)
        keep_apart(step, before, copies)
        of_copy, of_original = z.op.inputs[0].op, gate.control_inputs[0]
        apart = [op for op in graph.get_operations() if "apart" in op.name]
        assert len(apart) == 2
        assert of_copy.inputs[0] is copied
        assert of_original.inputs[0] is read_twice
        # The originals' own edges are left alone.
        assert read_once.op.inputs[0].op.inputs[0] is read_twice
