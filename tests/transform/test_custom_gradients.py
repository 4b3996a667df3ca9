"""Copies of `tf.custom_gradient` ops: gradients of their own, whatever they read."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph.edits import InputEdit, apply_edits
from tests.settings import default_graph, edges, evaluate

v1 = tf.compat.v1


@tf.custom_gradient
def square_with_odd_gradient(x):
    """x squared, with the gradient 10 x: one that differentiation would not find."""

    def gradient(dy):
        return dy * 10.0 * x

    return x * x, gradient


@pytest.fixture
def model():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [], name="x")
        y = square_with_odd_gradient(x) + 0.0
    return x, y


def gradient(y, x):
    with x.graph.as_default():
        return tf.gradients(y, x)[0]


def test_a_copy_in_another_graph_and_a_copy_of_that(model):
    x, y = model
    for point in (4.0, 5.0, 6.0):
        _, info = ge.copy(x.graph, tf.Graph(), dst_scope="c")
        x, y = info.transformed([x, y])
        count = len(x.graph.get_operations())
        with x.graph.as_default(), tf.name_scope("backward"):
            dy = gradient(y, x)
        made = x.graph.get_operations()[count:]
        assert made
        assert all(op.name.startswith("backward/") for op in made)
        assert evaluate(x.graph, [y, dy], {x: point}) == [point**2, 10.0 * point]
        ge.verify(x.graph)
    # The destination can die although the registry lives.
    graph = weakref.ref(x.graph)
    del info, _, x, y, dy, made
    gc.collect()
    assert graph() is None


def test_variables_of_a_custom_gradient():
    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", initializer=2.0, use_resource=True)

        @tf.custom_gradient
        def scaled(x):
            def gradient_function(dy, variables):
                return dy * 5.0 * w, [dy * 7.0 * x for _ in variables]

            return x * w.read_value(), gradient_function

        x = v1.placeholder(tf.float32, [])
        y = scaled(x)
        expected = tf.gradients(y, [x, w])
    reference = evaluate(graph, expected, {x: 3.0})
    copied = tf.Graph()
    _, info = ge.copy(graph, copied)
    x_, y_ = info.transformed([x, y])
    with copied.as_default():
        (w_,) = v1.trainable_variables()
        gradients = tf.gradients(y_, [x_, w_])
    assert evaluate(copied, gradients, {x_: 3.0}) == reference == [10.0, 21.0]


def test_a_gradient_that_reads_what_was_not_copied_is_refused():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [], name="x")
        hidden = tf.square(x, name="hidden")

        @tf.custom_gradient
        def odd(a):
            return a + 1.0, lambda dy: dy * hidden

        y = odd(x)
    _, info = ge.copy(y.op, tf.Graph(), dst_scope="c")
    y_ = info.transformed(y)
    with pytest.raises(ge.TransformError, match="'hidden:0', which was not copied"):
        gradient(y_, y_.op.inputs[0])


# -- ops that are rewired in place -----------------------------------------------------


def test_the_gradient_is_that_of_what_the_op_reads_now(setting):
    def body():
        x, z = tf.constant(2.0), tf.constant(3.0)
        y = square_with_odd_gradient(x) + 0.0
        y_ = ge.graph_replace(y, [(x, z)])
        found = [y_, *tf.gradients(y_, z), *tf.gradients(y, x)]
        graph = default_graph()
        before = edges(graph)
        with pytest.raises(KeyError), ge.transaction(graph):
            ge.reroute_ts(z, x)
            raise KeyError
        assert edges(graph) == before
        # An undone rerouting leaves the gradient as it was.
        found += tf.gradients(y, x)
        w = square_with_odd_gradient(x) + 0.0
        ge.reroute_ts(z, x, can_modify=ge.get_backward_walk_ops(w))
        return [*found, w, *tf.gradients(w, z)]

    assert setting.run(body) == [9.0, 30.0, 20.0, 20.0, 9.0, 30.0]


def test_a_copy_of_what_was_rewired_and_rewired_again(model):
    x, y = model
    with x.graph.as_default():
        z = tf.constant(3.0, name="z")
    ge.reroute_ts(z, x)
    _, info = ge.copy(x.graph, tf.Graph())
    y_, z_ = info.transformed([y, z])
    assert evaluate(y_.graph, [y_, gradient(y_, z_)]) == [9.0, 30.0]
    with y_.graph.as_default():
        u_ = tf.constant(4.0)
    ge.reroute_ts(u_, z_)
    assert evaluate(y_.graph, [y_, gradient(y_, u_)]) == [16.0, 40.0]


def test_one_input_in_the_place_of_which_two_are_read(graph):
    x, z = tf.constant(2.0, name="x"), tf.constant(3.0, name="z")

    @tf.custom_gradient
    def product(a, b):
        return a * b, lambda dy: (dy * b, dy * a)

    y = product(x, x)
    (op,) = ge.filter_ops(graph, ge.op_type("IdentityN"))
    apply_edits(graph, [InputEdit(op, 1, z)])
    with pytest.raises(ge.TransformError, match=r"'IdentityN' reads .* two others"):
        tf.gradients(y, z)


def test_sparse_gradients_stay_sparse_and_results_that_are_read_follow():
    @tf.custom_gradient
    def odd(table, indices):
        rows = tf.gather(table, indices)

        def gradient_function(dy):
            return tf.IndexedSlices(dy * rows, indices, tf.shape(table)), None

        return rows, gradient_function

    with tf.Graph().as_default():
        table = v1.placeholder(tf.float32, [4, 2])
        old, new = tf.constant([1, 3, 1]), tf.constant([0, 2, 0])
        loss = tf.reduce_sum(odd(table, old))
    _, info = ge.copy(table.graph, tf.Graph())
    copied = info.transformed([table, loss])
    with table.graph.as_default():
        ge.reroute_ts(new, old)
    values = np.arange(8.0).reshape(4, 2)
    cases = [table, loss, [[2], [0], [1], [0]]], [*copied, [[0], [2], [0], [1]]]
    for table_, loss_, times in cases:
        slices = gradient(loss_, table_)
        assert isinstance(slices, tf.IndexedSlices)
        with table_.graph.as_default():
            dense = tf.convert_to_tensor(slices)
        (value,) = evaluate(table_.graph, [dense], {table_: values})
        np.testing.assert_array_equal(value, values * times)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_gradient_waits_for_what_comes_in_as_the_original_does(elsewhere):
    """Without, `silu` computes its sigmoid anew in the forward pass, and holds it."""

    def awaited(y, x):
        dy = tf.ones_like(y, name="incoming")
        tf.gradients(y, x, dy)
        return {
            (op.type, waits.type)
            for op in y.graph.get_operations()
            for waits in op.control_inputs
        }

    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [3], name="x")
        y = tf.nn.silu(x)
    destination = tf.Graph() if elsewhere else graph
    _, info = ge.copy(list(graph.get_operations()), destination)
    with destination.as_default():
        ours = awaited(info.transformed(y), info.transformed(x))
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [3])
        plain = awaited(tf.nn.silu(x), x)
    assert plain and ours == plain


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", ["loop", "branch", "outside"])
def test_gradients_in_bodies_read_the_bodies_of_the_copy(
    kind, elsewhere, control_flow_v2
):
    def in_loop(layer, x):
        turn = lambda i, a: (i + 1, layer(a))  # noqa: E731
        return tf.while_loop(lambda i, a: i < 3, turn, [0, x], maximum_iterations=3)[1]

    networks = {
        "loop": lambda x: in_loop(lambda a: tf.nn.silu(2 * a), x),
        "branch": lambda x: tf.cond(x > 0, lambda: tf.nn.silu(3 * x), lambda: x),
        "outside": lambda x: in_loop(lambda a: tf.nn.silu(a, beta=tf.exp(x)), x),
    }
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], name="x")
        y = networks[kind](x)
    _, info = ge.copy(graph, tf.Graph() if elsewhere else graph, dst_scope="c")
    x_, y_ = info.transformed([x, y])
    values = [
        evaluate(a.graph, [gradient(b, a)], {a: 0.5}) for a, b in ((x_, y_), (x, y))
    ]
    assert values[0] == values[1] != [0]
