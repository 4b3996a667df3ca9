"""Models stay whole: they run, are saved, opened, trained and refused as before."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ArgumentTypeError
from tests.batchnorm.calibrated import with_calibrated_norms
from tests.batchnorm.checking import needed
from tests.interpreter import new_interpreter
from tests.model.frozen_samples import optimizer_off
from tests.settings import needs_eager

pytestmark = needs_eager

X = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
NAMES = {"saved_model": "model", "graph_def": "model.pb", "pbtxt": "model.pbtxt"}
layers = tf.keras.layers


def network(last="dense"):
    x = tf.keras.Input((8, 8, 3), name="x")
    y = layers.Conv2D(4, 3, use_bias=False, name="conv")(x)
    y = layers.ReLU()(layers.BatchNormalization(name="norm")(y))
    y = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(y)
    y = layers.ReLU(6.0)(layers.BatchNormalization(name="norm_1")(y))
    y = layers.Dense(5, name=last)(layers.Flatten()(y))
    y = layers.BatchNormalization(name="norm_2")(y)
    return with_calibrated_norms(tf.keras.Model(x, {"y": y}), X)


class Case:
    """A network, what Keras makes of it, and the folded model."""

    def __init__(self, form="variables"):
        self.network = network()
        self.expected = self.network(X, training=False)["y"].numpy()
        opened = model.open(self.network)
        self.model = opened.freeze() if form == "frozen" else opened
        self.report = fold_batch_norms(self.model, strict=True)

    def check(self, value):
        np.testing.assert_allclose(value, self.expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=["variables", "frozen"])
def case(request):
    return Case(request.param)


def test_it_runs(case):
    assert len(case.report.folded) == 3
    text = str(case.report)
    assert "serving_default" not in text
    assert text.startswith("3 of 3 batch norm(s) folded, 0 refused")
    case.check(case.model.run(x=X)["y"])
    before = case.model.graph.as_graph_def()
    again = fold_batch_norms(case.model)
    assert (again.folded, again.refused) == ((), ())
    assert case.model.graph.as_graph_def() == before
    function = case.model.to_function()
    case.check(function(X)["y"])
    case.check(tf.function(lambda x: function(x)["y"])(X))


@pytest.mark.parametrize("format", NAMES)
def test_saved_and_opened_again(case, format, tmp_path):
    again = model.open(case.model.save(tmp_path / NAMES[format], format))
    case.check(again.run(x=X)["y"])
    report = fold_batch_norms(again)
    assert (report.folded, report.refused) == ((), ())
    if format == "saved_model":
        assert len(again.variables) == len(case.model.variables)
        return
    # Saved graphs hold no old ops and no old weights.
    ops = again.graph.get_operations()
    types = [op.type for op in ops]
    for kind, count in {
        "Conv2D": 1,
        "DepthwiseConv2dNative": 1,
        "MatMul": 1,
        "BiasAdd": 3,
    }.items():
        assert types.count(kind) == count, kind
    assert not {"Rsqrt", "Mul", "Sub", "AddV2"} & set(types)
    # Three weights, three biases and the shape for Flatten.
    consts = [op for op in ops if op.type == "Const"]
    weights = [op for op in consts if op.get_attr("dtype") == tf.float32]
    limits = [op for op in weights if not op.outputs[0].shape.rank]
    assert len(weights) - len(limits) == 6


LAYERS = {
    "Conv1D": lambda: [layers.Reshape((64, 3)), layers.Conv1D(4, 3)],
    "Conv2D": lambda: [layers.Conv2D(4, 3, dilation_rate=2)],
    "groups": lambda: [layers.Conv2D(6, 3, groups=3)],
    "Conv2DTranspose": lambda: [layers.Conv2DTranspose(4, 3, strides=2)],
    "Conv3D": lambda: [layers.Reshape((8, 8, 3, 1)), layers.Conv3D(4, 3)],
    "DepthwiseConv2D": lambda: [layers.DepthwiseConv2D(3, depth_multiplier=2)],
    "SeparableConv2D": lambda: [layers.SeparableConv2D(4, 3)],
    "Dense": lambda: [layers.Dense(4)],
    "mixed_float16": lambda: [layers.Dense(4, dtype="mixed_float16")],
}
"""Layers that take in the norm behind them; `before` is behind its norm."""


def computed(m):
    """Return the ops behind each output that follow from constants alone."""
    found, constant = [], {}
    for op in m.graph.get_operations():
        above = all(constant[t.op] for t in op.inputs) and not op.control_inputs
        constant[op] = op.type == "Const" or (bool(op.inputs) and above)
    for name, end in m.outputs.items():
        ops = [op for op in ge.select.get_backward_walk_ops(end) if constant[op]]
        found += [(name, op) for op in ops if op.type not in ("Const", "Identity")]
    return found


def test_what_a_fold_computes_from_variables_is_a_value_once_they_are(tmp_path):
    x = tf.keras.Input((8, 8, 3), name="x")
    ends = {}
    for name, made in LAYERS.items():
        dtype = name if name == "mixed_float16" else None
        ends[name] = x
        for layer in (*made(), layers.BatchNormalization(dtype=dtype)):
            ends[name] = layer(ends[name])
    ends["before"] = layers.Conv2D(4, 3)(layers.BatchNormalization()(x))
    shared = layers.Conv2D(16, 8, use_bias=False)
    both = [layers.BatchNormalization()(shared(y)) for y in (x, layers.ReLU()(x))]
    ends["shared"] = layers.Add()(both)
    net = with_calibrated_norms(tf.keras.Model(x, ends), X)
    m = model.open(net)
    plain = m.freeze()
    # What Keras computes from constants, nothing has to do with folds.
    own = {op.name for _, op in computed(plain)}
    fold_batch_norms(m, strict=True)
    with optimizer_off():
        expected = m.run(x=X)
        paths = [m.save(tmp_path / "variables.pb", "graph_def")]
        frozen = m.freeze()
        paths.append(frozen.save(tmp_path / "frozen.pb", "graph_def"))
        # A weight that two norms change is there once, as it was.
        wrong = [
            (name, op.type)
            for name, op in computed(frozen)
            if name != "shared" and op.name not in own
        ]
        for path in paths:
            again = model.open(path).run(x=X)
            wrong += [
                (path.name, n) for n in ends if not (again[n] == expected[n]).all()
            ]
    assert wrong == []
    left = [op.type for name, op in computed(frozen) if name == "shared"]
    assert left == ["Mul", "Mul"]
    size = plain.save(tmp_path / "plain.pb", "graph_def").stat().st_size
    assert all(path.stat().st_size < size for path in paths)
    assert "Rsqrt" in [op.type for _, op in computed(plain)]


def test_a_tensorflow_lite_file(case, tmp_path):
    path = case.model.save(tmp_path / "model.tflite", "tflite")
    interpreter = new_interpreter(path.read_bytes(), delegates=True)
    (entry,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(entry["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(entry["index"], X)
    interpreter.invoke()
    (result,) = interpreter.get_output_details()
    case.check(interpreter.get_tensor(result["index"]))


def test_variables_stay_and_can_be_trained():
    case = Case()
    function = case.model.to_function()
    trainable = {id(v) for v in function.trainable_variables}
    assert len(trainable) == len(case.network.trainable_variables)
    plain_function = model.open(case.network).to_function()
    gradients = []
    for f in (function, plain_function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(f(X)["y"] ** 2)
        gradients.append(tape.gradient(loss, f.trainable_variables))
    names = [v.name for v in function.trainable_variables]
    assert names == [v.name for v in plain_function.trainable_variables]
    for name, a, b in zip(names, *gradients, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * max(np.abs(b).max(), 1e-2), name


def test_layers_over_time_and_of_branches():
    def over_time(layer):
        return layers.TimeDistributed(layer)(x)

    x = given = tf.keras.Input((3, 8, 8, 3), name="x")
    x = over_time(layers.Conv2D(4, 3, padding="same"))
    x = over_time(layers.BatchNormalization())
    x = over_time(layers.ReLU())
    x = layers.BatchNormalization()(over_time(layers.Conv2D(4, 3)))
    x = layers.Reshape((18, 6, 4))(x)
    halves = [layers.Conv2D(4, 3, padding="same")(x) for _ in range(4)]
    x = layers.Concatenate()([layers.Add()(halves[:3]), halves[3]])
    x = layers.BatchNormalization()(layers.AveragePooling2D(2)(x))
    keras_model = tf.keras.Model(given, {"y": x})
    images = np.random.default_rng(1).normal(size=(4, 3, 8, 8, 3)).astype(np.float32)
    with_calibrated_norms(keras_model, images)
    expected = keras_model(images, training=False)["y"].numpy()
    for opened in (model.open(keras_model), model.open(keras_model).freeze()):
        report = fold_batch_norms(opened, strict=True)
        # Three steps of time, then the norm of three steps, then four branches.
        assert len(report.folded) == 3 + 3 + 4, report
        assert str(report).startswith("5 of 5 batch norm(s) folded")
        y = opened.run(x=images)["y"]
        assert np.abs(y - expected).max() <= 1e-5 * np.ptp(expected)
        kinds = [op.type for op in needed(*opened.outputs.values())]
        assert "Rsqrt" in kinds if opened.variables else "Rsqrt" not in kinds


class Signatures(tf.Module):
    """Two signatures that share a layer, and one without norms."""

    def __init__(self):
        self.network = network()
        spec = [tf.TensorSpec([None, 8, 8, 3], name="x")]
        run = lambda x: self.network(x, training=False)["y"]  # noqa: E731
        self.main = tf.function(lambda x: {"y": run(x)}, spec)
        self.score = tf.function(lambda x: {"score": tf.sigmoid(run(x))}, spec)
        self.plain = tf.function(lambda x: {"size": tf.shape(x)}, spec)


def test_all_signatures_are_folded_and_told(tmp_path):
    module = Signatures()
    names = {"serving_default": "main", "score": "score", "plain": "plain"}
    signatures = {name: getattr(module, own) for name, own in names.items()}
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=signatures)
    opened = model.open(tmp_path / "model")
    report = fold_batch_norms(opened, strict=True)
    counts = dict.fromkeys(opened.signatures, 0)
    for entry in report.folded:
        counts[entry.signature] += 1
    assert counts == {"serving_default": 3, "score": 3, "plain": 0}
    assert "score: " in str(report)
    path = opened.save(tmp_path / "folded")
    loaded = tf.saved_model.load(str(path)).signatures
    x = tf.constant(X)
    for name, plain in (("serving_default", module.main), ("score", module.score)):
        for key, value in plain(x).items():
            np.testing.assert_allclose(
                loaded[name](x=x)[key], value, rtol=1e-5, atol=1e-5
            )
    graph = model.open(path).signatures["score"].graph
    convolutions = [op for op in graph.get_operations() if op.type == "Conv2D"]
    assert len(convolutions) == 1
    (bias,) = convolutions[0].outputs[0].consumers()
    assert bias.type == "BiasAdd"


def test_what_is_no_graph_and_no_model():
    case = network()
    opened = model.open(case)
    y = opened.outputs["y"]
    view = ge.make_view(opened.graph.get_operations()[0])
    before = opened.graph.as_graph_def()
    for given in (case, opened.to_function(), y.op, y, None, 3, "graph", view):
        with pytest.raises(ArgumentTypeError, match=r"geutil\.model"):
            fold_batch_norms(given)
    assert opened.graph.as_graph_def() == before
