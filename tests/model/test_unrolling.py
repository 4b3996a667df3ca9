"""Loops replaced by copies of their bodies, against the models that have them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.errors import ModelError
from geutil.gradients import gradients
from tests.thorough import thorough

layers = tf.keras.layers


def network(*stack, shape=(7, 3), batch=None, dtype=None):
    tf.keras.utils.set_random_seed(3)
    x = tf.keras.Input(shape, batch_size=batch, dtype=dtype, name="x")
    y = x
    for layer in stack:
        y = layer(y)
    return tf.keras.Model(x, {"y": y})


NETWORKS = {
    "LSTM": lambda: network(layers.LSTM(4), layers.Dense(2)),
    "GRU": lambda: network(layers.GRU(4, return_sequences=True, activation="swish")),
    "both ways": lambda: network(
        layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.GRU(3)
    ),
    "masked": lambda: network(layers.Masking(), layers.LSTM(4)),
    "images": lambda: network(layers.ConvLSTM2D(2, 3), shape=(3, 5, 5, 2)),
    "backwards": lambda: network(layers.SimpleRNN(4, go_backwards=True)),
}


def loops(graph):
    return [op.name for op in graph.get_operations() if op.type.endswith("While")]


def lists(graph):
    return [op.name for op in graph.get_operations() if "TensorList" in op.type]


def data_of(net, rows=4):
    shape = [rows, *net.inputs[0].shape[1:]]
    return np.random.RandomState(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_results_are_those_of_keras(name):
    net = NETWORKS[name]()
    opened = model.open(net)
    unrolled = opened.unroll()
    assert loops(opened.graph)
    assert loops(unrolled.graph) == lists(unrolled.graph) == []
    for rows in (1, 4):
        x = data_of(net, rows)
        expected = net(x)["y"].numpy()
        np.testing.assert_allclose(unrolled.run(x=x)["y"], expected, 1e-5, 1e-6)


def test_steps_are_as_many_as_keras_unrolls():
    cells = {"kernel_initializer": "ones", "recurrent_initializer": "ones"}
    rolled = network(layers.GRU(4, **cells))
    unrolled = network(layers.GRU(4, unroll=True, **cells))
    ours = model.open(rolled).unroll().graph.get_operations()
    theirs = model.open(unrolled).graph.get_operations()
    for kind in ("MatMul", "Tanh", "Sigmoid"):
        count = sum(op.type == kind for op in theirs)
        assert sum(op.type == kind for op in ours) == count > 0


@pytest.mark.parametrize("name", ["LSTM", "both ways"])
def test_gradients_are_the_same(name):
    net = NETWORKS[name]()
    x = data_of(net)

    def slopes(opened):
        @tf.function(autograph=False)
        def step(x):
            loss = tf.reduce_sum(tf.square(opened(x=x)["y"]))
            weights = [v for v in opened.variables.values() if v.trainable]
            return gradients(loss, weights, checkpoints=None)

        return step(x)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(net(x)["y"]))
    expected = tape.gradient(loss, [v.value for v in net.trainable_variables])
    by_size = sorted(np.sum(np.square(e)) for e in expected)
    found = sorted(np.sum(np.square(s)) for s in slopes(model.open(net).unroll()))
    np.testing.assert_allclose(found, by_size, rtol=1e-4)


def test_states_are_written_as_before():
    plain = network(layers.LSTM(4, stateful=True), batch=2)
    unrolled = model.open(network(layers.LSTM(4, stateful=True), batch=2)).unroll()
    x = data_of(plain, 2)
    results = [plain(x)["y"].numpy() for _ in range(3)]
    assert np.abs(results[1] - results[0]).max() > 1e-3
    for expected in results:
        np.testing.assert_allclose(unrolled.run(x=x)["y"], expected, 1e-5, 1e-6)


@pytest.mark.parametrize("form", ["SavedModel", "Keras"])
def test_from_files_and_to_files(form, tmp_path):
    net = NETWORKS["LSTM"]()
    source = tmp_path / ("net.keras" if form == "Keras" else "net")
    if form == "Keras":
        net.save(source)
    else:
        net.export(source, verbose=False)
    opened = model.open(source)
    unrolled = opened.unroll()
    assert loops(unrolled.graph) == []
    unrolled.save(tmp_path / "unrolled")
    again = model.open(tmp_path / "unrolled")
    x = data_of(net)
    (result,) = again.run(x=x).values()
    np.testing.assert_allclose(result, net(x)["y"], 1e-5, 1e-6)
    shapes = sorted(v.shape.as_list() for v in opened.variables.values())
    assert sorted(v.shape.as_list() for v in again.variables.values()) == shapes


def test_names_say_the_step():
    unrolled = model.open(NETWORKS["LSTM"]()).unroll()
    products = [
        op.name for op in unrolled.graph.get_operations() if op.type == "MatMul"
    ]
    steps = [name for name in products if "/while/step_" in name]
    assert len(steps) == 2 * 7
    assert all(name.count("/while/") == 1 for name in steps)


def counted(times, *, nested=False):
    """Return a model of a loop of version 2 that runs so often."""

    @tf.function(input_signature=[tf.TensorSpec([None], name="x")], autograph=False)
    def f(x):
        def body(i, y):
            if nested:
                inner = lambda j, z: (j + 1, z * 1.5)  # noqa: E731
                _, y = tf.while_loop(lambda j, _: j < 2, inner, [0, y])
            return i + 1, y + tf.cast(i, tf.float32)

        return {"y": tf.while_loop(lambda i, _: i < times, body, [0, x])[1]}

    return model.open(f)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("times", [0, 1, 5])
def test_loops_without_lists(times, nested):
    opened = counted(times, nested=nested)
    unrolled = opened.unroll()
    assert loops(unrolled.graph) == []
    expected = np.array([1.0, 2.0])
    for i in range(times):
        expected = expected * (1.5**2 if nested else 1) + i
    np.testing.assert_allclose(unrolled.run(x=[1.0, 2.0])["y"], expected, rtol=1e-6)


def test_some_of_the_loops():
    net = NETWORKS["both ways"]()
    opened = model.open(net)
    some = opened.unroll("forward_lstm")
    assert len(loops(some.graph)) == len(loops(opened.graph)) - 1
    x = data_of(net)
    np.testing.assert_allclose(some.run(x=x)["y"], net(x)["y"], 1e-5, 1e-6)


def refused(opened, *args, **kwargs):
    before = len(opened.graph.get_operations())
    with pytest.raises(ModelError) as caught:
        opened.unroll(*args, **kwargs)
    assert len(opened.graph.get_operations()) == before
    return str(caught.value)


def test_what_has_no_loop_is_refused():
    assert "has no loop to unroll" in refused(model.open(network(layers.Dense(2))))


def test_a_loop_of_version_1_is_refused():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.compat.v1.disable_control_flow_v2()
        try:
            _, y = tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), [0, x]
            )
        finally:
            tf.compat.v1.enable_control_flow_v2()
        tf.identity(y, "y")
    ends = {"inputs": {"x": "x:0"}, "outputs": {"y": "y:0"}}
    said = refused(model.open(graph.as_graph_def(), **ends))
    assert "version 1" in said


def test_a_loop_in_a_call_that_stays_is_refused():
    @tf.function(autograph=False)
    def inner(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), [0, x])[1]

    @tf.function(input_signature=[tf.TensorSpec([2], name="x")], autograph=False)
    def f(x):
        return {"y": inner(x)}

    said = refused(model.open(f, inline=False))
    assert "open it with their calls inlined" in said
    assert loops(model.open(f).unroll().graph) == []


def test_a_name_that_no_loop_has_is_refused():
    said = refused(model.open(NETWORKS["LSTM"]()), "dense")
    assert "selects none of the loops" in said
    assert "/while" in said


def test_an_open_number_of_steps_is_refused():
    said = refused(model.open(network(layers.LSTM(4), shape=(None, 3))))
    assert "cannot be read off constants and shapes" in said
    assert "keras.Input([12, 6])" in said


def test_a_loop_that_data_may_end_is_refused():
    @tf.function(input_signature=[tf.TensorSpec([2], name="x")], autograph=False)
    def f(x):
        def goes_on(i, y):
            return tf.logical_and(i < 5, tf.reduce_sum(y) < 9.0)

        return {"y": tf.while_loop(goes_on, lambda i, y: (i + 1, 2.0 * y), [0, x])[1]}

    assert "cannot be read off" in refused(model.open(f))


def test_too_many_ops_are_refused():
    said = refused(model.open(NETWORKS["LSTM"]()), max_ops=100)
    assert "over 100 ops" in said


@thorough
def test_a_long_sequence():
    net = network(layers.LSTM(4), shape=(400, 3))
    unrolled = model.open(net).unroll()
    x = data_of(net)
    np.testing.assert_allclose(unrolled.run(x=x)["y"], net(x)["y"], 1e-4, 1e-5)
