from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil import model
from tests.model import small_models
from tests.model.refusal_tables import not_refused
from tests.model.training.helpers import (
    at_inference,
    by_name,
    is_deterministic,
    kinds,
    opened_in_training,
    randomize,
    types_of,
)
from tests.rewrite.rules import test_dropout
from tests.select.layer_norms import fused_layer_norm
from tests.thorough import examples

layers = tf.keras.layers
IMAGES = tf.TensorSpec([None, 8, 8, 3], name="x")


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


CASES = {
    "dropout": lambda: [layers.Dropout(0.3)],
    "dropout with noise shape": lambda: [layers.Dropout(0.3, (None, 1, 1, 3))],
    "spatial dropout": lambda: [layers.SpatialDropout2D(0.4)],
    "gaussian noise": lambda: [layers.GaussianNoise(0.2)],
    "gaussian dropout": lambda: [layers.GaussianDropout(0.2)],
    "alpha dropout": lambda: [layers.AlphaDropout(0.2)],
    "batch norm": lambda: [layers.BatchNormalization()],
    "batch norm, axis 1": lambda: [layers.BatchNormalization(axis=1)],
    "batch norm, no gamma": lambda: [
        layers.BatchNormalization(scale=False, center=False)
    ],
    "two batch norms": lambda: [
        layers.BatchNormalization(),
        layers.Conv2D(2, 1),
        layers.BatchNormalization(),
    ],
    "half precision": lambda: [
        layers.BatchNormalization(dtype="mixed_float16"),
        layers.Dropout(0.3, dtype="mixed_float16"),
    ],
    "layer and group norm stay": lambda: [
        layers.LayerNormalization(),
        layers.GroupNormalization(3),
        layers.Dropout(0.1),
    ],
}


def test_layers_are_what_keras_does_at_inference(tmp_path):
    inputs = tf.keras.Input([8, 8, 3])
    outputs = {}
    for name, stack in CASES.items():
        x = inputs
        for layer in stack():
            x = layer(x)
        outputs[name] = x
    keras_model = tf.keras.Model(inputs, outputs)
    randomize(keras_model)
    train, infer = (
        tf.function(
            lambda x, training=training: keras_model(x, training=training),
            [IMAGES],
            autograph=False,
        )
        for training in (True, False)
    )
    m = model.open(train)
    assert not is_deterministic(m)
    stripped = m.strip_training()
    x = np.random.default_rng(1).normal(size=[4, 8, 8, 3]).astype(np.float32)
    found, expected = stripped.run(x=x), infer(tf.constant(x))
    for name in CASES:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert is_deterministic(stripped)
    assert stripped.strip_report and not stripped.strip_report.kept
    loaded = tf.saved_model.load(str(stripped.save(tmp_path / "m")))
    saved = loaded.signatures["serving_default"](x=tf.constant(x))
    for name in CASES:
        np.testing.assert_array_equal(saved[name], expected[name], err_msg=name)
    assert len(loaded.variables) == len(stripped.variables)
    types = {op.type for op in model.open(tmp_path / "m").graph.get_operations()}
    assert not [t for t in types if "Random" in t or "Assign" in t]


@pytest.mark.parametrize(
    ("make", "spec", "draw"),
    [
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
    ids=["transformer", "LSTM", "masked batch norm"],
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
    unchanged = m.program().graph_def.SerializeToString(deterministic=True)
    values = {name: v.numpy() for name, v in m.variables.items()}
    stripped = m.strip_training()
    assert not stripped.strip_training().strip_report.entries
    assert m.program().graph_def.SerializeToString(deterministic=True) == unchanged
    np.testing.assert_equal({n: v.numpy() for n, v in m.variables.items()}, values)
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


def test_nothing_to_strip():
    function, *_ = small_models.affine()
    m = model.open(function)
    stripped = m.strip_training()
    report = stripped.strip_report
    assert not report and not report.entries and not report.dropped_ops
    assert str(report) == "nothing to strip"
    assert types_of(stripped) == types_of(m)
    assert list(stripped.variables.values()) == list(m.variables.values())
    x = np.ones([2, 2], np.float32)
    np.testing.assert_array_equal(stripped.run(x=x)["y"], function(x)["y"])


def test_dropout_of_version_1_graphs():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 8], name="x")
        for i, drop in enumerate(test_dropout.BUILDERS.values()):
            tf.negative(drop(x), name=f"y{i}")
    stripped = model.open(graph).strip_training()
    found = stripped.run(x=test_dropout.X)
    for i, name in enumerate(test_dropout.BUILDERS):
        np.testing.assert_array_equal(found[f"y{i}"], -test_dropout.X, err_msg=name)
    assert is_deterministic(stripped)
    removed = [entry.kind for entry in stripped.strip_report.removed]
    assert removed == ["dropout"] * len(test_dropout.BUILDERS)


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


def test_what_is_random_is_what_the_caller_says():
    @tf.function(input_signature=[tf.TensorSpec([None, 6, 4], name="x")])
    def spec_augment(x):
        """Mask two places of each row, as Wav2Vec2 does, and scale the rest."""
        drawn = tf.random.uniform(tf.shape(x)[:2], name="drawn")
        places = tf.one_hot(tf.math.top_k(drawn, 2)[1], 6)
        mask = tf.cast(tf.reduce_max(places, 1), tf.bool, name="mask")
        masked = tf.where(mask[..., None], 7.0, x)
        factor = tf.exp(tf.random.normal(tf.shape(x)))
        return {"y": tf.multiply(masked, factor, name="scaled") * 2.0}

    m, x = model.open(spec_augment), np.ones([3, 6, 4], np.float32)
    kept = m.strip_training().strip_report.kept
    assert len(kept) == 2
    assert all("pass neutral={name: value}" in entry.reason for entry in kept)
    neutral = {"mask": False, "scaled": None}
    for more in ({}, {"drawn/RandomUniform": 0.5}):
        stripped = m.strip_training(neutral=neutral | more)
        np.testing.assert_array_equal(stripped.run(x=x)["y"], 2.0 * x)
        turned = {e.name: e.reason for e in stripped.strip_report.turned}
        assert set(turned) == {*neutral, *more}
        assert "for its shape" in turned["mask"]
        # What makes the mask has its shape.
        assert is_deterministic(stripped) == bool(more)


def test_dropout_and_noise_whose_constants_do_not_fit_stay():
    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def dropout(x):
        kept = tf.random.uniform(tf.shape(x)) >= 0.5
        return {"y": tf.where(kept, x * 3.0, 0.0, name="odd")}

    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def noise(x):
        return {"y": x + tf.random.normal(tf.shape(x), mean=2.0)}

    for f, kind, reason in ((dropout, "dropout", "scaled by 3"), (noise, "noise", "")):
        report = model.open(f).strip_training().strip_report
        assert not report
        assert [e.kind for e in report.kept] == [kind, "random"]
        assert reason in report.kept[0].reason


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


def test_refusals():
    m = model.open(small_models.affine()[0])
    table = (
        ({"keep": ["nothing"]}, "no op, name scope, or layer with ops, 'nothing'"),
        ({"switches": {"nothing": False}}, "no input or placeholder 'nothing'"),
        ({"switches": {"x": "text"}}, "switch 'x' is float32"),
        ({"switches": {"x": [1.0, 2.0, 3.0]}}, "switch 'x' has shape"),
        ({"neutral": {"nothing": 1.0}}, "neutral: .* no op 'nothing'"),
        ({"neutral": {"x": 1.0}}, "'x' is an input; pass it in switches"),
        ({"neutral": {"hidden": "text"}}, "cannot be 'text': its result is float32"),
        (
            {"neutral": {"hidden/ReadVariableOp": None}},
            "no input has the type and the shape",
        ),
        ({"statistics": {"bn": ("w", "other")}}, "no variable 'other'"),
        ({"statistics": {"bn": ("w", "b")}}, "'bn' is no batch norm"),
    )
    cases = [(said, partial(m.strip_training, **given), said) for given, said in table]
    assert not_refused(model.ModelError, cases, unchanged=m) == {}


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


# -- what holds for every model --------------------------------------------------------

SPEC = tf.TensorSpec([None, 4], name="x")
X = np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)
# Small whole numbers: sums are exact in whatever order TensorFlow adds them up.
WHOLE = np.arange(12, dtype=np.float32).reshape(3, 4)

LAYERS = {
    "dropout": lambda: layers.Dropout(0.3),
    "gaussian dropout": lambda: layers.GaussianDropout(0.3),
    "gaussian noise": lambda: layers.GaussianNoise(0.3),
    "alpha dropout": lambda: layers.AlphaDropout(0.3),
    "batch norm": layers.BatchNormalization,
    "layer norm": layers.LayerNormalization,
    "dense": lambda: layers.Dense(4, "tanh"),
}


@examples(20)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_layers_in_any_order(stack):
    x = inputs = tf.keras.Input([4])
    for name, is_residual in stack:
        y = LAYERS[name]()(x)
        x = layers.Add()([x, y]) if is_residual else y
    keras_model = tf.keras.Model(inputs, x)
    randomize(keras_model)
    stripped = opened_in_training(keras_model, SPEC).strip_training()
    assert is_deterministic(stripped)
    np.testing.assert_array_equal(
        stripped.run(x=X)["y"], at_inference(keras_model, SPEC, X)
    )


STEPS = st.one_of(
    st.tuples(st.sampled_from(["read", "count"]), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("assign"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.sampled_from(["assert", "print", "guard"]), st.just(0), st.just(0)),
)


@examples(40)
@given(st.lists(STEPS, max_size=8))
def test_states_that_outputs_depend_on_evolve_as_before(steps):
    states = [tf.Variable(float(i), name=f"s{i}") for i in range(3)]

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        y = x
        for step, i, j in steps:
            if step == "read":
                y = y + states[i]
            elif step == "count":
                states[i].assign_add(1.0)
            elif step == "assign":
                largest = tf.reduce_max(y)
                states[i].assign(tf.math.floormod(states[j] + largest, 97.0))
            elif step == "assert":
                tf.debugging.assert_greater(tf.reduce_sum(states[i]), -1e9)
            elif step == "guard":
                tf.debugging.assert_equal(tf.size(y) * 0, tf.size(x) * 0)
            else:
                tf.print(y, output_stream="file:///dev/null")
        return {"y": y}

    m = model.open(f)
    stripped = m.strip_training()
    results = []
    for each in (m, stripped):
        for i, state in enumerate(states):
            state.assign(float(i))
        results.append([each.run(x=WHOLE)["y"].copy() for _ in range(3)])
    np.testing.assert_array_equal(*results)
    types = {op.type for op in stripped.graph.get_operations()}
    assert not types & {"Assert", "If", "PrintV2"}
