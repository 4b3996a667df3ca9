from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.model.training.helpers import (
    at_inference,
    by_name,
    is_deterministic,
    kinds,
    opened_in_training,
    randomize,
    types_of,
)
from tests.select.layer_norms import fused_layer_norm

layers = tf.keras.layers
IMAGES = tf.TensorSpec([None, 8, 8, 3], name="x")


def affine():
    """Return y = x * w + b, and its variables."""
    w = tf.Variable([2.0, 3.0], name="w")
    b = tf.Variable([1.0, -1.0], name="b", trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def function(x):
        return {"y": x * w + b}

    return function, w, b


def layered(*stack, shape=(8, 8, 3), dtype=None):
    x = inputs = tf.keras.Input(shape, dtype=dtype)
    for layer in stack:
        x = layer(x)
    return tf.keras.Model(inputs, x)


def transformer_block():
    x = inputs = tf.keras.Input([6, 8])
    attended = layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.3)(attended))
    hidden = layers.Dropout(0.1)(layers.Dense(16, "gelu")(x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(hidden))
    return tf.keras.Model(inputs, x)


def mobile_net():
    return tf.keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, weights=None, classes=5
    )


CASES = {
    "dropout": lambda: layered(layers.Dropout(0.3)),
    "dropout with noise shape": lambda: layered(layers.Dropout(0.3, (None, 1, 1, 3))),
    "spatial dropout": lambda: layered(layers.SpatialDropout2D(0.4)),
    "gaussian noise": lambda: layered(layers.GaussianNoise(0.2)),
    "gaussian dropout": lambda: layered(layers.GaussianDropout(0.2)),
    "alpha dropout": lambda: layered(layers.AlphaDropout(0.2)),
    "batch norm": lambda: layered(layers.BatchNormalization()),
    "batch norm, axis 1": lambda: layered(layers.BatchNormalization(axis=1)),
    "batch norm, no gamma": lambda: layered(
        layers.BatchNormalization(scale=False, center=False)
    ),
    "two batch norms": lambda: layered(
        layers.BatchNormalization(), layers.Conv2D(2, 1), layers.BatchNormalization()
    ),
    "half precision": lambda: layered(
        layers.BatchNormalization(dtype="mixed_float16"),
        layers.Dropout(0.3, dtype="mixed_float16"),
    ),
    "layer and group norm stay": lambda: layered(
        layers.LayerNormalization(), layers.GroupNormalization(3), layers.Dropout(0.1)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_what_keras_does_at_inference(name):
    keras_model = CASES[name]()
    randomize(keras_model)
    m = opened_in_training(keras_model, IMAGES)
    assert not is_deterministic(m)
    stripped = m.strip_training()
    x = np.random.default_rng(1).normal(size=[4, 8, 8, 3]).astype(np.float32)
    np.testing.assert_array_equal(
        stripped.run(x=x)["y"], at_inference(keras_model, IMAGES, x)
    )
    assert is_deterministic(stripped)
    assert stripped.strip_report and not stripped.strip_report.kept


@pytest.mark.parametrize(
    ("make", "spec", "draw"),
    [
        (
            mobile_net,
            tf.TensorSpec([None, 32, 32, 3], name="x"),
            lambda rng: rng.normal(size=[2, 32, 32, 3]),
        ),
        (
            transformer_block,
            tf.TensorSpec([None, 6, 8], name="x"),
            lambda rng: rng.normal(size=[2, 6, 8]),
        ),
        (
            lambda: layered(
                layers.LSTM(4, dropout=0.2, recurrent_dropout=0.1), shape=(5, 3)
            ),
            tf.TensorSpec([None, 5, 3], name="x"),
            lambda rng: rng.normal(size=[2, 5, 3]),
        ),
        (
            lambda: layered(
                layers.Embedding(10, 4, mask_zero=True),
                layers.BatchNormalization(),
                shape=(5,),
                dtype="int32",
            ),
            tf.TensorSpec([None, 5], tf.int32, name="x"),
            lambda rng: rng.integers(0, 10, size=[3, 5]),
        ),
    ],
    ids=["MobileNetV2", "transformer", "LSTM", "masked batch norm"],
)
def test_models_are_what_keras_does_at_inference(make, spec, draw):
    keras_model = make()
    randomize(keras_model)
    stripped = opened_in_training(keras_model, spec).strip_training()
    x = draw(np.random.default_rng(1)).astype(spec.dtype.as_numpy_dtype)
    np.testing.assert_array_equal(
        stripped.run(x=x)["y"], at_inference(keras_model, spec, x)
    )
    assert is_deterministic(stripped)


def test_the_report_of_batch_norm_and_dropout():
    keras_model = layered(layers.BatchNormalization(name="bn"), layers.Dropout(0.3))
    m = opened_in_training(keras_model, IMAGES)
    stripped = m.strip_training()
    report = stripped.strip_report
    (turned,) = report.turned
    assert turned.kind == "batch norm" and "bn" in turned.name
    assert "bn/moving_mean" in turned.reason and "bn/moving_variance" in turned.reason
    assert kinds(report.removed) == ["dropout", "side effect", "variable"]
    assert len(report.removed) == 1 + 3 + 1
    assert m.strip_report is None
    gone = set(m.variables) - set(stripped.variables)
    assert gone == {e.name for e in report.removed if e.kind == "variable"}
    before = {op.name for op in m.graph.get_operations()}
    assert set(report.dropped_ops) <= before
    assert str(report).startswith("5 removed, 1 turned, 0 kept; ")


def test_the_model_itself_is_not_changed():
    m = opened_in_training(layered(layers.BatchNormalization()), IMAGES)
    before = m.program().graph_def.SerializeToString(deterministic=True)
    moving = [v.numpy() for v in m.variables.values()]
    m.strip_training()
    assert m.program().graph_def.SerializeToString(deterministic=True) == before
    for v, value in zip(m.variables.values(), moving, strict=True):
        np.testing.assert_array_equal(v, value)


def test_saved_without_training_ops(tmp_path):
    keras_model = layered(layers.BatchNormalization(), layers.Dropout(0.3))
    randomize(keras_model)
    stripped = opened_in_training(keras_model, IMAGES).strip_training()
    loaded = tf.saved_model.load(str(stripped.save(tmp_path / "m")))
    function = loaded.signatures["serving_default"]
    types = {op.type for op in model.open(tmp_path / "m").graph.get_operations()}
    assert not [t for t in types if "Random" in t or "Assign" in t]
    x = np.ones([2, 8, 8, 3], np.float32)
    np.testing.assert_array_equal(
        function(x=tf.constant(x))["y"], at_inference(keras_model, IMAGES, x)
    )
    assert len(loaded.variables) == 4


def test_nothing_to_strip():
    function, *_ = affine()
    m = model.open(function)
    stripped = m.strip_training()
    report = stripped.strip_report
    assert not report and not report.entries and not report.dropped_ops
    assert str(report) == "nothing to strip"
    assert types_of(stripped) == types_of(m)
    assert list(stripped.variables.values()) == list(m.variables.values())
    x = np.ones([2, 2], np.float32)
    np.testing.assert_array_equal(stripped.run(x=x)["y"], function(x)["y"])


def test_stripping_twice_changes_nothing_more():
    m = opened_in_training(layered(layers.BatchNormalization()), IMAGES)
    once = m.strip_training()
    assert not once.strip_training().strip_report.entries


def uniform_like(x):
    return tf.random.uniform(tf.shape(x))


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: tf.nn.dropout(x, rate=0.4),
        lambda x: tf.nn.dropout(x, rate=tf.constant(0.4) * 1.0),
        lambda x: tf.nn.dropout(x, rate=0.4, noise_shape=[1, 3]),
        lambda x: tf.compat.v1.nn.dropout(x, keep_prob=0.6),
        lambda x: tf.nn.experimental.stateless_dropout(x, rate=0.4, seed=[1, 2]),
        # What version 1 itself built.
        lambda x: x / (p := tf.constant(0.6)) * tf.floor(p + uniform_like(x)),
        lambda x: x / 0.6 * tf.cast(uniform_like(x) >= 0.4, x.dtype),
    ],
)
def test_dropout_of_version_1_graphs(drop):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        tf.negative(drop(x), name="y")
    stripped = model.open(graph).strip_training()
    value = np.random.default_rng(0).normal(size=[4, 3]).astype(np.float32)
    np.testing.assert_array_equal(stripped.run(x=value)["y"], -value)
    assert is_deterministic(stripped)
    assert kinds(stripped.strip_report.removed) == ["dropout"]


def test_a_rate_that_is_an_input_goes_with_the_dropout():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        rate = tf.compat.v1.placeholder(tf.float32, [], name="rate")
        tf.negative(tf.nn.dropout(x, rate=rate), name="y")
    stripped = model.open(graph).strip_training()
    assert list(stripped.inputs) == ["x"]
    assert by_name(stripped)["rate"].kind == "input"
    np.testing.assert_array_equal(
        stripped.run(x=np.ones([1, 3]))["y"], -np.ones([1, 3])
    )


def test_random_ops_of_no_known_layer_stay_and_are_named():
    keras_model = layered(layers.RandomFlip())
    stripped = opened_in_training(keras_model, IMAGES).strip_training()
    report = stripped.strip_report
    assert not report
    assert kinds(report.kept) == ["random", "side effect"]
    assert not is_deterministic(stripped)


def test_dropout_whose_constants_do_not_fit_stays():
    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def f(x):
        kept = tf.random.uniform(tf.shape(x)) >= 0.5
        return {"y": tf.where(kept, x * 3.0, 0.0, name="odd")}

    report = model.open(f).strip_training().strip_report
    assert not report
    assert [e.kind for e in report.kept] == ["dropout", "random"]
    assert "scaled by 3" in report.kept[0].reason


def test_noise_around_another_mean_stays():
    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def f(x):
        return {"y": x + tf.random.normal(tf.shape(x), mean=2.0)}

    report = model.open(f).strip_training().strip_report
    assert [e.kind for e in report.kept] == ["noise", "random"]


def test_what_is_in_keep_stays():
    x = inputs = tf.keras.Input([8, 8, 3])
    x = layers.Dropout(0.1, name="first")(x)
    keras_model = tf.keras.Model(inputs, layers.Dropout(0.1, name="second")(x))
    m = opened_in_training(keras_model, IMAGES)
    (scope,) = {
        op.name.rpartition("/stateless_dropout/SelectV2")[0]
        for op in m.graph.get_operations()
        if op.type == "SelectV2" and "/second" in op.name
    }
    stripped = m.strip_training(keep=[scope])
    types = [op.type for op in stripped.graph.get_operations()]
    assert types.count("StatelessRandomUniformV2") == 1
    assert types.count("AssignVariableOp") == 1
    assert kinds(stripped.strip_report.removed) == [
        "dropout",
        "side effect",
        "variable",
    ]


def test_bodies_are_reported():
    @tf.function(input_signature=[tf.TensorSpec([3], name="x")])
    def f(x):
        def body(i, x):
            return i + 1, tf.nn.dropout(x, rate=0.5)

        return {"y": tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]}

    report = model.open(f).strip_training().strip_report
    (entry,) = report.kept
    assert entry.kind == "body" and "RandomUniform" in entry.reason


def test_a_signature_besides_is_kept(tmp_path):
    keras_model = layered(layers.Dropout(0.3))
    module = tf.Module()
    module.seeds = [v.value for v in keras_model.variables]
    train = tf.function(lambda x: {"y": keras_model(x, training=True)}, [IMAGES])
    serve = tf.function(lambda x: {"y": keras_model(x, training=False)}, [IMAGES])
    module.train, module.serve = train, serve
    tf.saved_model.save(module, str(tmp_path / "m"), {"train": train, "serve": serve})
    m = model.open(tmp_path / "m", signature="train")
    stripped = m.strip_training()
    assert set(stripped.signatures) == {"train", "serve"}
    assert is_deterministic(stripped)
    serving = model.open(tmp_path / "m", signature="serve").strip_training()
    # The other signature still draws its seeds.
    assert len(serving.variables) == len(m.variables) == 1
    assert not is_deterministic(serving.signatures["train"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ["nothing"]}, "no op, name scope, or layer with ops, 'nothing'"),
        ({"switches": {"nothing": False}}, "no input or placeholder 'nothing'"),
        ({"switches": {"x": "text"}}, "switch 'x' is float32"),
        ({"switches": {"x": [1.0, 2.0, 3.0]}}, "switch 'x' has shape"),
        ({"statistics": {"bn": ("w", "other")}}, "no variable 'other'"),
        ({"statistics": {"bn": ("w", "b")}}, "'bn' is no batch norm"),
    ],
)
def test_refusals(options, message):
    m = model.open(affine()[0])
    before = m.program().graph_def.SerializeToString(deterministic=True)
    with pytest.raises(model.ModelError, match=message):
        m.strip_training(**options)
    assert m.program().graph_def.SerializeToString(deterministic=True) == before


def test_a_layer_norm_that_is_written_as_a_batch_norm_stays():
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)

    def train(x):
        return {"y": tf.nn.dropout(fused_layer_norm(x)[0], 0.4)}

    spec = tf.TensorSpec([None, 5, 8], name="x")
    stripped = model.open(tf.function(train, [spec])).strip_training()
    expected = tf.keras.layers.LayerNormalization(epsilon=1e-3)(x)
    np.testing.assert_allclose(stripped.run(x=x)["y"], expected, rtol=1e-4, atol=1e-5)
    assert kinds(stripped.strip_report.entries) == ["dropout"]
    assert {e.action for e in stripped.strip_report.entries} == {"removed"}
