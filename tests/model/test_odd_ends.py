"""Models with unusual inputs and outputs."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model as geutil_model
from geutil.model import ModelError
from tests.model.round_trips import assert_round_trip, assert_same
from tests.model.test_layers_of_keras import Subclassed

FLOATS = tf.TensorSpec([None], name="x")
layers = tf.keras.layers


def test_no_inputs(tmp_path):
    module = tf.Module()
    module.v = tf.Variable([1.0, 2.0], name="v")
    f = tf.function(lambda: {"y": module.v * 2}, input_signature=[])
    m = geutil_model.open(f)
    assert not m.inputs
    assert_round_trip(m, tmp_path, {}, {"y": np.float32([2, 4])})
    assert_same(m.to_function()(), {"y": np.float32([2, 4])})


def test_outputs_that_are_inputs_constants_and_variables(tmp_path):
    module = tf.Module()
    module.v = tf.Variable([3.0], name="v")

    def f(x, unread):
        constant = tf.constant([b"a", b"b"])
        return {"same": x, "c": constant, "v": module.v.read_value()}

    m = geutil_model.open(
        tf.function(f, [FLOATS, tf.TensorSpec([None], name="unread")])
    )
    assert m.outputs["same"] is m.inputs["x"]
    x = np.float32([1, 2])
    expected = {"same": x, "c": np.array([b"a", b"b"], object), "v": np.float32([3])}
    assert_round_trip(m, tmp_path, {"x": x, "unread": [5.0]}, expected)
    assert_same(m.cut(outputs=["same"]).run(x=x), {"same": x})


def test_one_tensor_as_two_outputs(tmp_path):
    def f(x):
        y = tf.nn.relu(x)
        return {"first": y, "second": y}

    m = geutil_model.open(tf.function(f, [FLOATS]))
    y = np.float32([0, 2])
    x = np.float32([-1, 2])
    assert m.outputs["first"] is m.outputs["second"]
    assert_round_trip(m, tmp_path, {"x": x}, {"first": y, "second": y})
    with m.graph.as_default():
        m.outputs["first"] = m.outputs["first"] + 1
    assert_same(m.run(x=x), {"first": y + 1, "second": y})


def test_odd_names_of_outputs(tmp_path):
    names = ["a/b", "predictions:0", "with space", "Ünïcode", "^x", "-", "_", "x", "0"]
    f = tf.function(lambda x: {n: x + i for i, n in enumerate(names)}, [FLOATS])
    m = geutil_model.open(f)
    assert list(m.outputs) == names
    expected = {name: np.float32([1 + i]) for i, name in enumerate(names)}
    assert_round_trip(m, tmp_path, {"x": [1.0]}, expected)
    for name in names:
        assert_same(m.cut(outputs=[name]).run(x=[1.0]), {name: expected[name]})


def test_inputs_that_a_signature_cannot_name(tmp_path):
    m = geutil_model.open(tf.function(lambda x: {"y": x + 1}, [FLOATS]))
    names = "a/b", "x:0", "a space", "Ünïcode", "_x", "1x", "x.y", "x-y", "self", "in"
    for name in names:
        renamed = m.rename(inputs={"x": name})
        assert list(renamed.inputs) == [name]
        assert_same(renamed.run(**{name: [1.0]}), {"y": np.float32([2])})
        # TensorFlow would change the name, or fail on it.
        with pytest.raises(ModelError, match=r"save model.rename\(inputs="):
            renamed.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_inputs_that_are_renamed(tmp_path):
    names = ["y", "x", "X_1", "model", "name", "inputs", "args"]
    specs = [tf.TensorSpec([None], name=f"in_{i}") for i in range(len(names))]
    f = tf.function(lambda *x: {f"out_{i}": t + i for i, t in enumerate(x)}, specs)
    m = geutil_model.open(f)
    m = m.rename(inputs=dict(zip(m.inputs, names, strict=True)))
    inputs = {name: np.float32([10 * i]) for i, name in enumerate(names)}
    expected = {f"out_{i}": np.float32([11 * i]) for i in range(len(names))}
    assert_same(m.run(**inputs), expected)
    assert_same(m.to_function()(**inputs), expected)
    m.save(tmp_path / "saved")
    again = geutil_model.open(tmp_path / "saved")
    assert sorted(again.inputs) == sorted(names)
    assert_same(again.run(**inputs), expected)


def test_nested_arguments(tmp_path):
    spec = {
        "a": [tf.TensorSpec([2], name="first"), tf.TensorSpec([2], name="second")],
        "b": (tf.TensorSpec([], tf.int32, name="count"),),
    }

    @tf.function(input_signature=[spec])
    def f(nested):
        first, second = nested["a"]
        (count,) = nested["b"]
        return {"y": first - second * tf.cast(count, tf.float32)}

    m = geutil_model.open(f)
    assert sorted(m.inputs) == ["count", "first", "second"]
    inputs = {"first": [5.0, 7.0], "second": [1.0, 2.0], "count": 2}
    assert_round_trip(m, tmp_path, inputs, {"y": np.float32([3, 3])})


def test_nested_results(tmp_path):
    f = tf.function(lambda x: {"a": [x + 1, x + 2], "b": {"c": x + 3}}, [FLOATS])
    m = geutil_model.open(f)
    values = sorted(float(v[0]) for v in m.run(x=[0.0]).values())
    assert values == [1, 2, 3]
    m.save(tmp_path / "saved")
    again = geutil_model.open(tmp_path / "saved")
    assert_same(again.run(x=[0.0]), m.run(x=[0.0]))


def test_keywords_and_defaults():
    @tf.function
    def f(x, scale=2.0, *, shift, name="n"):
        return x * scale + shift

    spec = tf.TensorSpec([None], name="x")
    function = f.get_concrete_function(spec, shift=tf.TensorSpec([], name="shift"))
    m = geutil_model.open(function)
    assert list(m.inputs) == ["x", "shift"]
    assert_same(m.run(x=[1.0], shift=3.0), {"output_0": np.float32([5])})


def test_two_arguments_of_the_same_name():
    f = tf.function(lambda a, b: {"y": a - b})
    function = f.get_concrete_function(
        tf.TensorSpec([], name="same"), tf.TensorSpec([], name="same")
    )
    m = geutil_model.open(function)
    assert len(m.inputs) == 2
    first, second = m.inputs
    assert_same(m.run(**{first: 3.0, second: 1.0}), {"y": np.float32(2)})


def test_arguments_keep_their_order_by_position():
    for order in (["b", "a"], ["a", "b"]):
        specs = [tf.TensorSpec([], name=name) for name in order]
        m = geutil_model.open(tf.function(lambda p, q: {"y": p - q}, specs))
        assert list(m.inputs) == order
        assert_same(m.to_function()(5.0, 3.0), {"y": np.float32(2)})


DTYPES = {
    "uint8": np.uint8([1, 200]),
    "int64": np.int64([-(2**60), 3]),
    "bool": np.array([True, False]),
    "float16": np.float16([0.5, 3]),
    "bfloat16": np.array([0.5, 3], tf.bfloat16.as_numpy_dtype),
    "complex64": np.complex64([1 + 2j, 3]),
    "float64": np.float64([0.1, 3]),
    "uint64": np.uint64([2**63, 1]),
    "string": np.array([b"\xff\x00a", b""], object),
}


def test_dtypes(tmp_path):
    specs = [tf.TensorSpec([2], tf.as_dtype(name), name) for name in DTYPES]

    def f(*values):
        pairs = zip(DTYPES, values, strict=True)
        return {name: tf.reverse(value, [0]) for name, value in pairs}

    m = geutil_model.open(tf.function(f, specs))
    expected = {name: value[::-1] for name, value in DTYPES.items()}
    assert_round_trip(m, tmp_path, DTYPES, expected)
    assert_same(
        m.append(geutil_model.open(tf.function(f, specs))).run(**DTYPES), DTYPES
    )


def test_ragged_and_sparse_arguments_are_passed_by_their_parts():
    specs = [
        tf.RaggedTensorSpec([None, None], tf.float32),
        tf.SparseTensorSpec([None, None], tf.float32),
    ]
    sums = tf.function(
        lambda r, s: {"r": tf.reduce_sum(r, 1), "s": tf.sparse.reduce_sum(s, 1)}, specs
    )
    m = geutil_model.open(sums)
    floats = [1.0, 2.0, 3.0]
    values = [floats, [0, 2, 3], [[0, 1], [1, 0]], floats[:2], [2, 2]]
    outputs = m.run(**dict(zip(m.inputs, values, strict=True)))
    assert_same(outputs, {"r": np.float32([3, 3]), "s": np.float32([1, 2])})


def test_ragged_and_sparse_results_have_their_parts(tmp_path):
    def f(x):
        return {"ragged": tf.RaggedTensor.from_row_lengths(x, [1, 2]), "y": x}

    m = geutil_model.open(tf.function(f, [tf.TensorSpec([3], name="x")]))
    outputs = m.run(x=[1.0, 2.0, 3.0])
    assert len(outputs) == 3
    m.save(tmp_path / "saved")


def test_scalars_and_unknown_ranks(tmp_path):
    spec = tf.TensorSpec(None, name="x")
    m = geutil_model.open(tf.function(lambda x: {"y": x + 1}, [spec]))
    assert_round_trip(m, tmp_path, {"x": 1.0}, {"y": np.float32(2)})
    for shape in ([2, 1, 3], [0]):
        assert_same(m.run(x=np.zeros(shape)), {"y": np.ones(shape, "f")})


def test_a_keras_model_is_opened_once_it_is_built():
    sequential = tf.keras.Sequential([layers.Dense(2), layers.ReLU()])
    for model in (sequential, Subclassed()):
        with pytest.raises(ModelError, match="does not say what inputs it takes"):
            geutil_model.open(model)
        x = np.ones([3, 4], np.float32)
        expected = model(x)
        m = geutil_model.open(model)
        (name,), (output,) = m.inputs, m.outputs
        assert_same(m.run(**{name: x}), {output: tf.function(model)(x)})
        np.testing.assert_allclose(m.run(**{name: x})[output], expected, rtol=1e-6)


def test_a_function_that_is_never_traced_right_is_refused():
    def f(x):
        raise KeyError("mine")

    # The user's own error is the user's own.
    with pytest.raises((KeyError, ModelError), match="mine"):
        geutil_model.open(tf.function(f, [FLOATS]))


def test_a_function_whose_variables_are_gone_is_refused():
    def make():
        v = tf.Variable(1.0)
        return tf.function(lambda x: {"y": x * v}, [FLOATS]).get_concrete_function()

    with pytest.raises(ModelError, match="variable"):
        geutil_model.open(make())


def test_a_graph_is_fed_where_its_inputs_say(tmp_path):
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        rate = tf1.placeholder_with_default(0.5, [], "rate")
        first, second = tf.split(tf1.placeholder(tf.float32, [4], "x"), 2, name="split")
        y = tf.add(first * rate, second, name="mid/y")
        tf.nn.relu(y, name="z")
    m = geutil_model.open(
        graph.as_graph_def(),
        inputs={"rate": "rate:0", "low": "split:0", "high": "split:1"},
        outputs=["mid/y"],
    )
    inputs = {"rate": 2.0, "low": [1.0, 2.0], "high": [10.0, 20.0]}
    assert_round_trip(m, tmp_path, inputs, {"mid/y": np.float32([12, 24])})
    # A default that is not fed.
    m = geutil_model.open(graph, inputs=["x"], outputs=["mid/y"])
    assert_same(m.run(x=[1.0, 2.0, 3.0, 4.0]), {"mid/y": np.float32([3.5, 5])})
    # An input that is an output.
    m = geutil_model.open(graph, inputs={"y": "mid/y:0"}, outputs=["mid/y", "z"])
    x = np.float32([-1, 2])
    assert_same(m.run(y=x), {"mid/y": x, "z": np.maximum(x, 0)})
    ge.verify(m.graph)
