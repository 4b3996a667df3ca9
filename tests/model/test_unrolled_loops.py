"""Loops replaced by copies of their bodies, against the models that have them."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.errors import ModelError
from geutil.gradients import gradients
from tests.settings import control_flow

layers = tf.keras.layers


def network(*stack, shape=(4, 3), batch=None):
    """Return a network that calls layers one after the other."""
    return networks({"y": stack}, shape, batch)


def networks(stacks, shape=(4, 3), batch=None):
    """Return a network of several outputs, each of layers called in order."""
    tf.keras.utils.set_random_seed(3)
    x = tf.keras.Input(shape, batch_size=batch, name="x")
    outputs = {}
    for name, stack in stacks.items():
        y = x
        for layer in stack:
            y = layer(y)
        outputs[name] = y
    return tf.keras.Model(x, outputs)


@functools.cache
def lstm():
    """Return a network and the model of it; nobody changes them."""
    net = network(layers.LSTM(4), layers.Dense(2))
    return net, model.open(net)


@functools.cache
def both_ways():
    """Return a network, the model of it, and that with its loops unrolled."""
    sequences = layers.LSTM(4, return_sequences=True)
    net = network(layers.Bidirectional(sequences), layers.GRU(3))
    opened = model.open(net)
    return net, opened, opened.unroll()


def loops(graph):
    return [op.name for op in graph.get_operations() if op.type.endswith("While")]


def lists(graph):
    return [op.name for op in graph.get_operations() if "TensorList" in op.type]


def data_of(net, rows=4):
    shape = [rows, *net.inputs[0].shape[1:]]
    return np.random.RandomState(1).normal(size=shape).astype(np.float32)


def test_the_results_are_those_of_keras():
    series = networks(
        {
            "LSTM": [layers.LSTM(4), layers.Dense(2)],
            "GRU": [layers.GRU(4, return_sequences=True, activation="swish")],
            "masked": [layers.Masking(), layers.LSTM(4)],
            "backwards": [layers.SimpleRNN(4, go_backwards=True)],
        }
    )
    images = network(layers.ConvLSTM2D(2, 3), shape=(2, 5, 5, 2))
    models = [(net, model.open(net)) for net in (series, images)]
    for net, opened, unrolled in (both_ways(), *((*m, m[1].unroll()) for m in models)):
        assert loops(opened.graph)
        assert loops(unrolled.graph) == lists(unrolled.graph) == []
        x = data_of(net)
        expected = net(x)
        for rows in (1, 4):
            found = unrolled.run(x=x[:rows])
            assert found.keys() == expected.keys()
            for name, y in found.items():
                whole = expected[name][:rows]
                np.testing.assert_allclose(y, whole, 1e-5, 1e-6, err_msg=name)


def test_steps_are_as_many_as_keras_unrolls():
    cells = {"kernel_initializer": "ones", "recurrent_initializer": "ones"}
    rolled = network(layers.GRU(4, **cells))
    unrolled = network(layers.GRU(4, unroll=True, **cells))
    ours = model.open(rolled).unroll().graph.get_operations()
    theirs = model.open(unrolled).graph.get_operations()
    for kind in ("MatMul", "Tanh", "Sigmoid"):
        count = sum(op.type == kind for op in theirs)
        assert sum(op.type == kind for op in ours) == count > 0


def test_gradients_are_the_same():
    net, _, unrolled = both_ways()
    x = data_of(net)

    @tf.function(autograph=False)
    def step(x):
        loss = tf.reduce_sum(tf.square(unrolled(x=x)["y"]))
        weights = [v for v in unrolled.variables.values() if v.trainable]
        return gradients(loss, weights, checkpoints=None)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(net(x)["y"]))
    expected = tape.gradient(loss, [v.value for v in net.trainable_variables])
    by_size = sorted(np.sum(np.square(e)) for e in expected)
    found = sorted(np.sum(np.square(s)) for s in step(x))
    np.testing.assert_allclose(found, by_size, rtol=1e-4)


def test_states_are_written_as_before():
    # Each has states of its own.
    plain, other = (network(layers.LSTM(4, stateful=True), batch=2) for _ in range(2))
    other.set_weights(plain.get_weights())
    unrolled = model.open(other).unroll()
    x = data_of(plain, 2)
    results = [plain(x)["y"].numpy() for _ in range(3)]
    assert np.abs(results[1] - results[0]).max() > 1e-3
    for expected in results:
        np.testing.assert_allclose(unrolled.run(x=x)["y"], expected, 1e-5, 1e-6)


def test_from_files_and_to_files(tmp_path):
    net, _ = lstm()
    net.save(tmp_path / "net.keras")
    net.export(tmp_path / "net", verbose=False)
    x = data_of(net)
    for source in (tmp_path / "net.keras", tmp_path / "net"):
        opened = model.open(source)
        unrolled = opened.unroll()
        assert loops(unrolled.graph) == []
        unrolled.save(tmp_path / "unrolled", overwrite=True)
        again = model.open(tmp_path / "unrolled")
        (result,) = again.run(x=x).values()
        np.testing.assert_allclose(result, net(x)["y"], 1e-5, 1e-6)
        shapes = sorted(v.shape.as_list() for v in opened.variables.values())
        assert sorted(v.shape.as_list() for v in again.variables.values()) == shapes


def test_names_say_the_step():
    unrolled = lstm()[1].unroll()
    products = [
        op.name for op in unrolled.graph.get_operations() if op.type == "MatMul"
    ]
    steps = [name for name in products if "/while/step_" in name]
    assert len(steps) == 2 * 4
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


def test_loops_without_lists():
    for times, nested in ((0, False), (1, True), (5, False), (5, True)):
        unrolled = counted(times, nested=nested).unroll()
        assert loops(unrolled.graph) == []
        expected = np.array([1.0, 2.0])
        for i in range(times):
            expected = expected * (1.5**2 if nested else 1) + i
        np.testing.assert_allclose(unrolled.run(x=[1.0, 2.0])["y"], expected, rtol=1e-6)


def test_some_of_the_loops():
    net, opened, _ = both_ways()
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


def test_refusals_that_name_the_loops():
    assert "has no loop to unroll" in refused(model.open(network(layers.Dense(2))))
    _, opened = lstm()
    assert "over 100 ops" in refused(opened, max_ops=100)
    said = refused(opened, "dense")
    assert "selects none of the loops" in said
    assert "/while" in said


def test_a_loop_of_version_1_is_refused():
    with control_flow(1), tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), [0, x])
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
