"""Models with unusual inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model as geutil_model
from geutil.model import ModelError
from tests.model.round_trips import assert_round_trip, assert_same

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


def test_an_output_that_is_an_input(tmp_path):
    f = tf.function(lambda x: {"same": x, "twice": x * 2}, [FLOATS])
    m = geutil_model.open(f)
    x = np.float32([1, 2])
    assert m.outputs["same"] is m.inputs["x"]
    assert_round_trip(m, tmp_path, {"x": x}, {"same": x, "twice": x * 2})
    assert_same(m.cut(outputs=["same"]).run(x=x), {"same": x})


def test_an_output_that_is_the_only_op(tmp_path):
    m = geutil_model.open(tf.function(lambda x: {"y": x}, [FLOATS]))
    assert_round_trip(m, tmp_path, {"x": [1.0]}, {"y": np.float32([1])})


def test_an_output_that_is_a_constant(tmp_path):
    f = tf.function(lambda x: {"y": x, "c": tf.constant([b"a", b"b"])}, [FLOATS])
    expected = {"y": np.float32([1]), "c": np.array([b"a", b"b"], object)}
    assert_round_trip(geutil_model.open(f), tmp_path, {"x": [1.0]}, expected)


def test_an_output_that_is_a_variable(tmp_path):
    module = tf.Module()
    module.v = tf.Variable([3.0], name="v")
    f = tf.function(lambda x: {"y": x + 1, "v": module.v.read_value()}, [FLOATS])
    expected = {"y": np.float32([2]), "v": np.float32([3])}
    assert_round_trip(geutil_model.open(f), tmp_path, {"x": [1.0]}, expected)


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


@pytest.mark.parametrize(
    "name", ["a/b", "predictions:0", "with space", "Ünïcode", "^x", "-", "_", "x", "0"]
)
def test_odd_names_of_outputs(name, tmp_path):
    f = tf.function(lambda x: {name: x + 1}, [FLOATS])
    m = geutil_model.open(f)
    assert list(m.outputs) == [name]
    assert_round_trip(m, tmp_path, {"x": [1.0]}, {name: np.float32([2])})
    assert_same(m.cut(outputs=[name]).run(x=[1.0]), {name: np.float32([2])})


@pytest.mark.parametrize(
    "name", ["a/b", "x:0", "a space", "Ünïcode", "_x", "1x", "x.y", "x-y", "geütil"]
)
def test_inputs_that_a_signature_cannot_name(name, tmp_path):
    m = geutil_model.open(tf.function(lambda x: {"y": x + 1}, [FLOATS]))
    renamed = m.rename(inputs={"x": name})
    assert list(renamed.inputs) == [name]
    assert_same(renamed.run(**{name: [1.0]}), {"y": np.float32([2])})
    # TensorFlow would change the name, or fail on it.
    with pytest.raises(ModelError, match=r"save model.rename\(inputs="):
        renamed.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["self", "y", "x", "X_1", "lambda", "model", "name"])
def test_inputs_that_are_renamed(name, tmp_path):
    m = geutil_model.open(tf.function(lambda x: {"y": x + 1}, [FLOATS]))
    m = m.rename(inputs={"x": name})
    assert_same(m.run(**{name: [1.0]}), {"y": np.float32([2])})
    assert_same(m.to_function()(**{name: [1.0]}), {"y": np.float32([2])})
    m.save(tmp_path / "saved")
    again = geutil_model.open(tmp_path / "saved")
    assert list(again.inputs) == [name]
    assert_same(again.run(**{name: [1.0]}), {"y": np.float32([2])})


def test_an_input_that_nothing_reads(tmp_path):
    second = tf.TensorSpec([None], name="unused")
    f = tf.function(lambda x, unused: {"y": x + 1}, [FLOATS, second])
    m = geutil_model.open(f)
    assert list(m.inputs) == ["x", "unused"]
    inputs = {"x": [1.0], "unused": [5.0]}
    assert_round_trip(m, tmp_path, inputs, {"y": np.float32([2])})


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


def test_arguments_without_names():
    f = tf.function(lambda a, b: a - b)
    function = f.get_concrete_function(tf.TensorSpec([2]), tf.TensorSpec([2]))
    m = geutil_model.open(function)
    assert list(m.inputs) == ["a", "b"]
    assert_same(m.run(a=[3.0, 3.0], b=[1.0, 2.0]), {"output_0": np.float32([2, 1])})


def test_two_arguments_of_the_same_name():
    f = tf.function(lambda a, b: {"y": a - b})
    function = f.get_concrete_function(
        tf.TensorSpec([], name="same"), tf.TensorSpec([], name="same")
    )
    m = geutil_model.open(function)
    assert len(m.inputs) == 2
    first, second = m.inputs
    assert_same(m.run(**{first: 3.0, second: 1.0}), {"y": np.float32(2)})


@pytest.mark.parametrize("order", [["b", "a"], ["a", "b"]])
def test_arguments_keep_their_order_by_position(order):
    specs = [tf.TensorSpec([], name=name) for name in order]
    f = tf.function(lambda p, q: {"y": p - q}, specs)
    m = geutil_model.open(f)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, tmp_path):
    value = DTYPES[dtype]
    spec = tf.TensorSpec([2], tf.as_dtype(dtype), "x")
    f = tf.function(lambda x: {"y": tf.reverse(x, [0])}, [spec])
    m = geutil_model.open(f)
    assert_round_trip(m, tmp_path, {"x": value}, {"y": value[::-1]})
    other = geutil_model.open(f)
    assert_same(m.append(other).run(x=value), {"y": value})


def test_a_ragged_argument_is_refused_or_works():
    spec = tf.RaggedTensorSpec([None, None], tf.float32)
    f = tf.function(lambda x: {"y": tf.reduce_sum(x, 1)}, [spec])
    m = geutil_model.open(f)
    values, splits = m.inputs
    outputs = m.run(**{values: [1.0, 2.0, 3.0], splits: [0, 2, 3]})
    assert_same(outputs, {"y": np.float32([3, 3])})


def test_a_sparse_argument_is_refused_or_works():
    spec = tf.SparseTensorSpec([None, None], tf.float32)
    f = tf.function(lambda x: {"y": tf.sparse.reduce_sum(x, 1)}, [spec])
    m = geutil_model.open(f)
    indices, values, shape = m.inputs
    outputs = m.run(**{indices: [[0, 1], [1, 0]], values: [1.0, 2.0], shape: [2, 2]})
    assert_same(outputs, {"y": np.float32([1, 2])})


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
    assert_same(m.run(x=np.zeros([2, 1, 3])), {"y": np.ones([2, 1, 3], "f")})


def test_an_empty_batch():
    m = geutil_model.open(tf.function(lambda x: {"y": x + 1}, [FLOATS]))
    assert m.run(x=np.zeros([0]))["y"].shape == (0,)


def test_a_keras_model_of_nested_inputs():
    a, b, c = (tf.keras.Input([2], name=name) for name in "abc")
    total = layers.Add(name="total")([a, layers.Subtract()([b, c])])
    model = tf.keras.Model([a, {"b": b, "c": c}], [total, layers.ReLU(name="r")(total)])
    m = geutil_model.open(model)
    assert sorted(m.inputs) == ["a", "b", "c"]
    assert list(m.outputs) == ["total", "r"]
    one = np.ones([1, 2], np.float32)
    assert_same(m.run(a=one, b=one * 2, c=one * 5), {"total": one * -2, "r": one * 0})


def test_a_layer_that_is_called_twice(tmp_path):
    x = tf.keras.Input([3], name="x")
    dense = layers.Dense(3, name="dense")
    model = tf.keras.Model(x, dense(dense(x)))
    m = geutil_model.open(model)
    assert list(m.variables) == [v.path for v in model.variables]
    value = np.ones([2, 3], np.float32)
    expected = tf.function(model)(value)
    assert_round_trip(m, tmp_path, {"x": value}, {m_output(m): expected})


def m_output(m):
    (name,) = m.outputs
    return name


def test_an_unbuilt_sequential_is_refused():
    model = tf.keras.Sequential([layers.Dense(2)])
    with pytest.raises(ModelError, match="does not say what inputs it takes"):
        geutil_model.open(model)


def test_a_built_sequential():
    model = tf.keras.Sequential([layers.Dense(2), layers.ReLU()])
    x = np.ones([3, 4], np.float32)
    expected = model(x)
    m = geutil_model.open(model)
    (name,), (output,) = m.inputs, m.outputs
    assert_same(m.run(**{name: x}), {output: tf.function(model)(x)})
    np.testing.assert_allclose(m.run(**{name: x})[output], expected, rtol=1e-6)


def test_a_sequential_of_integers():
    model = tf.keras.Sequential(
        [tf.keras.Input([3], dtype="int32"), layers.Embedding(4, 2)]
    )
    m = geutil_model.open(model)
    (name,), (output,) = m.inputs, m.outputs
    assert m.inputs[name].dtype == tf.int32
    assert m.run(**{name: [[0, 1, 3]]})[output].shape == (1, 3, 2)


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs, training=False):
        return self.dense(inputs)


def test_a_subclass_that_was_not_built_is_refused():
    with pytest.raises(ModelError, match="get_concrete_function"):
        geutil_model.open(Subclassed())


def test_a_subclass_that_was_called():
    model = Subclassed()
    x = np.ones([3, 4], np.float32)
    model(x)
    m = geutil_model.open(model)
    (name,), (output,) = m.inputs, m.outputs
    assert_same(m.run(**{name: x}), {output: tf.function(model)(x)})
    assert len(m.variables) == 2


def test_a_function_without_a_signature_is_refused():
    with pytest.raises(ModelError, match="no input signature"):
        geutil_model.open(tf.function(lambda x: x))


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


def test_a_graph_without_outputs_is_refused():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(tf.float32, [2], "x")
    with pytest.raises(ModelError, match="output"):
        geutil_model.open(graph)


def test_a_graph_is_fed_in_its_middle():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], "in/x")
        y = tf.nn.relu(x, name="mid/y")
        tf.add(y, 1.0, name="out/z")
    m = geutil_model.open(graph, inputs={"y": "mid/y:0"}, outputs={"z": "out/z:0"})
    assert (list(m.inputs), list(m.outputs)) == (["y"], ["z"])
    assert_same(m.run(y=[-1.0, 1.0]), {"z": np.float32([0, 2])})
    ge.verify(m.graph)
