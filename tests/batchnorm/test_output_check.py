"""What `check` says of two models, and what it refuses to compare."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import CheckError, check, fold_batch_norms
from geutil.errors import ArgumentTypeError, GeutilError
from tests.batchnorm.calibrated import with_calibrated_norms
from tests.settings import needs_eager

pytestmark = needs_eager

X = np.random.default_rng(0).normal(size=(3, 6, 6, 3)).astype(np.float32)


def network():
    layers = tf.keras.layers
    x = tf.keras.Input((6, 6, 3), name="x")
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3)(x)))
    z = layers.BatchNormalization()(layers.Dense(5)(layers.Flatten()(y)))
    return with_calibrated_norms(tf.keras.Model(x, {"y": y, "z": z}), X)


def test_it_measures_what_numpy_measures():
    before = {"y": np.array([[1.0, -3.0], [5.0, 0.0]]), "z": np.array([2.0, 2.0])}
    after = {"y": np.array([[1.0, -3.5], [5.0, 0.25]]), "z": np.array([2.0, 2.0])}
    result = check(lambda x: before, lambda x: after, {"x": 0})
    y, z = result.outputs
    assert (y.output, y.largest, y.span, y.relative) == ("y", 0.5, 8.0, 0.0625)
    assert (y.index, y.sample) == ((0, 1), 0)
    assert (z.output, z.largest, z.span, z.relative) == ("z", 0.0, 0.0, 0.0)
    assert (result.relative, result.samples) == (0.0625, 1)
    text = str(result)
    assert "0.062 of an output's range, 1 sample(s)" in text
    assert "y  0.062 of range 8: 0.5 at [0, 1] of sample 0" in text


def test_range_and_difference_are_taken_over_all_samples():
    samples = [{"x": np.array([v])} for v in (1.0, 9.0, -1.0)]
    shifted = lambda x: x + (x > 5) * 0.5  # noqa: E731
    (entry,) = check(lambda x: x, shifted, samples).outputs
    assert (entry.output, entry.span, entry.largest) == ("output_0", 10.0, 0.5)
    assert entry.sample == 1
    # Of an output that never varies it is infinite.
    result = check(lambda x: np.ones(2), lambda x: np.ones(2) + x, {"x": 1.0})
    assert result.relative == float("inf")
    half = lambda x: [tf.cast(x, tf.bfloat16), x]  # noqa: E731
    result = check(half, lambda x: (*half(x),), {"x": tf.constant([1.0, 2.0])})
    assert (result.relative, result.outputs[0].span) == (0.0, 1.0)
    assert [entry.output for entry in result.outputs] == ["output_0", "output_1"]


def test_models_of_all_kinds():
    keras_model = network()
    opened = model.open(keras_model)
    kinds = {
        "function": opened.to_function(),
        "model": model.open(keras_model),
        "concrete": tf.function(
            lambda x: keras_model(x, training=False),
            input_signature=[tf.TensorSpec([None, 6, 6, 3], name="x")],
        ).get_concrete_function(),
        "session": run_in_session(opened),
    }
    assert len(fold_batch_norms(opened, strict=True).folded) == 2
    for kind, plain in kinds.items():
        result = check(plain, opened, [{"x": X}, {"x": 2 * X[:1]}])
        assert [entry.output for entry in result.outputs] == ["y", "z"], kind
        assert 0 < result.relative <= 1e-5, kind
        assert result.samples == 2


def run_in_session(opened):
    """Return a function that runs the frozen model in a Session of version 1."""
    frozen = opened.freeze()
    program = frozen.program()
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(program.graph_def, name="")
    ends = {name: graph.get_tensor_by_name(t) for name, t in program.outputs.items()}
    x = graph.get_tensor_by_name(program.inputs["x"])
    session = tf.compat.v1.Session(graph=graph)
    return lambda **given: session.run(ends, {x: given["x"]})


def test_a_wrong_fold_shows():
    keras_model = network()
    opened = model.open(keras_model)
    before = opened.to_function()
    fold_batch_norms(opened, strict=True)
    keras_model.layers[2].gamma.assign_add([0.0, 0.0, 0.1, 0.0])
    after = opened.freeze()
    keras_model.layers[2].gamma.assign_sub([0.0, 0.0, 0.1, 0.0])
    assert check(before, after, {"x": X}).relative > 1e-3


def constant(value):
    return lambda x: {"y": np.asarray(value)}


REFUSED = [
    (constant([1.0]), lambda x: {"z": np.ones(1)}, r"\['y'\] before and \['z'\]"),
    (constant([1.0]), constant([1.0, 2.0]), r"'y' is float64 \[1\].*\[2\] after"),
    (constant([1.0]), constant(np.float32([1.0])), "'y' is float64.*float32"),
    (constant([1.0]), constant([np.nan]), "'y' has NaN.*after folding, in sample 0"),
    (constant([np.inf]), constant([1.0]), "'y' has NaN or infinite.*before folding"),
    (lambda x: {}, lambda x: {}, "no outputs"),
]


@pytest.mark.parametrize(("before", "after", "message"), REFUSED)
def test_what_cannot_be_compared(before, after, message):
    with pytest.raises(CheckError, match=message) as error:
        check(before, after, {"x": 1.0})
    assert isinstance(error.value, GeutilError)
    assert isinstance(error.value, ValueError)


def test_samples_and_models_of_other_types():
    with pytest.raises(CheckError, match="samples holds nothing"):
        check(constant(1.0), constant(1.0), [])
    with pytest.raises(ArgumentTypeError, match=r"output 'y'.*numbers"):
        check(constant(["a"]), constant(["a"]), {"x": 1.0})
    for samples in (3, "x", [np.ones(3)]):
        with pytest.raises(ArgumentTypeError, match=r"sample.*mapping"):
            check(constant(1.0), constant(1.0), samples)
    with tf.Graph().as_default() as graph:
        others = graph, tf.compat.v1.Session(), 3
    for given in others:
        with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
            check(constant(1.0), given, {"x": 1.0})
