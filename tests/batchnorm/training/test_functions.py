"""Training folds while a tf.function is traced, on Keras models."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import geutil.model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import FoldError
from tests.batchnorm.calibrated import with_random_norms
from tests.batchnorm.checking import needed
from tests.batchnorm.training.nets import STATISTICS, close, ops_by_type


def _model(seed=0, last="tanh"):
    keras.utils.set_random_seed(seed)
    x = keras.Input((None, None, 3))
    y = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(x)
    y = first = layers.ReLU(6.0)(layers.BatchNormalization(scale=False, epsilon=0.1)(y))
    y = layers.DepthwiseConv2D(3, padding="same")(y)
    y = layers.Add()([layers.BatchNormalization(center=False, epsilon=0.1)(y), first])
    y = layers.Dense(5)(layers.GlobalAveragePooling2D()(y))
    y = layers.BatchNormalization(momentum=0.8, epsilon=0.1)(y)
    if last:
        y = layers.Activation(last)(y)
    return with_random_norms(keras.Model(x, y), seed)


def _data(seed=0, size=8):
    return np.float32(np.random.default_rng(seed).normal(size=(size, 9, 9, 3)))


def _captured(graph, variables):
    return [graph.capture(v.value.handle) for v in variables]


def _step(model, *, training=True, fold=False, reports=None, **options):
    """Return a function of data: the result, and gradients of its data and weights."""

    @tf.function(reduce_retracing=False)
    def step(x):
        y = tf.identity(model(x, training=training), name="result")
        loss = tf.reduce_sum(y**2 + y)
        graph = tf.compat.v1.get_default_graph()
        if fold:
            report = fold_batch_norms(graph, is_training=True, **options)
            if reports is not None:
                reports.append(report)
        handles = _captured(graph, model.trainable_variables)
        return y, tf.gradients(loss, [x, *handles])

    return step


def _values(step, x):
    y, gradients = step(tf.constant(x))
    return [y.numpy(), *(gradient.numpy() for gradient in gradients)]


def _close(actual, expected):
    """Check a result, and gradients at 1e-5 of the largest of them.

    That of a bias in front of a norm is zero: the reference is what rounding leaves of
    terms as large as the other gradients, on some processors more than 1e-5.
    """
    close(actual[:1], expected[:1])
    size = max(1.0, *(np.abs(gradient).max() for gradient in expected[1:]))
    for one, other in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("statistics", STATISTICS)
def test_a_model_is_as_it_was_until_the_freeze_and_then_as_deployed(statistics):
    folded, other, reports = _model(), _model(), []
    options = {"freeze_batch_norm_delay": 3, "statistics": statistics, "strict": True}
    step, plain = _step(folded, fold=True, reports=reports, **options), _step(other)
    for seed in range(2):
        _close(_values(step, _data(seed)), _values(plain, _data(seed)))
        close(folded.get_weights(), other.get_weights())
    moving = folded.get_weights()
    deployed = _step(folded, training=False)
    for seed in range(2, 4):
        close(_values(step, _data(seed)), _values(deployed, _data(seed)))
        for one, before in zip(folded.get_weights(), moving, strict=True):
            assert (one == before).all()
    assert len(reports) == 1
    assert len(reports[0].folded) == 3
    # The counter is one variable, which is not trained.
    counter = reports[0].step
    assert counter.numpy() == 4
    assert counter.name == "fake_quantization_step:0"
    assert counter.dtype == tf.int64
    assert not counter.trainable
    concrete = step.get_concrete_function(tf.constant(_data()))
    assert any(v is counter for v in concrete.variables)
    assert len(ops_by_type(concrete.graph, "AssignAddVariableOp")) == 1
    # Names are clean.
    for op in concrete.graph.get_operations():
        parts = op.name.split("/")
        assert "" not in parts
        assert all(a != b for a, b in itertools.pairwise(parts[:-1]))


def test_in_one_pass_each_layer_runs_once():
    counts = {}
    for statistics in (None, *STATISTICS):
        step = _step(_model(), fold=bool(statistics), statistics=statistics)
        graph = step.get_concrete_function(tf.constant(_data())).graph
        live = needed(*graph.outputs, *graph.control_outputs, controls=True)
        kinds = ("Conv2D", "DepthwiseConv2dNative", "MatMul")
        found = [op.type for op in live if op.type.startswith(kinds)]
        counts[statistics] = sorted(found)
    assert counts["one_pass"] == counts[None]
    # Those of the gradients of data and weights among them.
    assert len(counts["one_pass"]) >= 3 * 3
    assert len(counts["exact"]) > len(counts["one_pass"])


def test_traces_share_a_counter_that_is_passed():
    counter = tf.Variable(0, dtype=tf.int64, trainable=False, name="shared")
    model, reports = _model(), []
    step = _step(
        model, fold=True, reports=reports, freeze_batch_norm_delay=5, step=counter
    )
    for size in (8, 4, 8):
        step(tf.constant(_data(0, size)))
    assert len(reports) == 2
    assert all(report.step is counter for report in reports)
    assert counter.numpy() == 3


@pytest.mark.parametrize("statistics", STATISTICS)
def test_mixed_precision(statistics):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        folded, other = _model(), _model()
    finally:
        keras.config.set_dtype_policy("float32")
    options = {"freeze_batch_norm_delay": 2, "statistics": statistics}
    step, plain = _step(folded, fold=True, **options), _step(other)
    values, expected = _values(step, _data()), _values(plain, _data())
    # float16 has ten bits behind the leading one, and layers round in turn.
    np.testing.assert_allclose(values[0], expected[0], atol=5e-3)
    for one, two in zip(folded.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=5e-3)


def test_norms_of_frozen_layers_are_folded_as_at_inference():
    folded, other, reports = _model(), _model(), []
    for model in (folded, other):
        norm = next(n for n in model.layers if isinstance(n, layers.BatchNormalization))
        norm.trainable = False
    step = _step(folded, fold=True, reports=reports, freeze_batch_norm_delay=3)
    # The gradient of the bias ahead of a norm is rounding, which grows with the images.
    data = _data(size=4)
    close(_values(step, data), _values(_step(other), data))
    close(folded.get_weights(), other.get_weights())
    assert len(reports[0].folded) == 3
    assert not reports[0].refused


@pytest.mark.parametrize("training", [True, False])
def test_strict_refuses_before_anything_is_made(training):
    model, norm = _model(), layers.BatchNormalization()
    norm.build((None, None, None, 3))
    sizes = []

    @tf.function
    def step(x):
        y = tf.identity(model(norm(x, training=training), training=True))
        graph = tf.compat.v1.get_default_graph()
        sizes.append(len(graph.get_operations()))
        with pytest.raises(FoldError, match="nothing was changed"):
            fold_batch_norms(
                graph, is_training=True, freeze_batch_norm_delay=2, strict=True
            )
        sizes.append(len(graph.get_operations()))
        return y

    step(tf.constant(_data()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("axis", [-1, 1])
def test_a_result_that_nobody_reads_yet(axis, statistics):
    """The function returns the norm's own result: its op stays, and is folded."""
    reports, options = [], {"freeze_batch_norm_delay": 2, "statistics": statistics}
    keras.utils.set_random_seed(0)
    x = keras.Input((9, 9, 3))
    y = layers.Conv2D(4, 3)(x)
    y = y if axis == -1 else layers.Permute((3, 1, 2))(y)
    y = layers.BatchNormalization(axis=axis, epsilon=0.1)(y)
    model = with_random_norms(keras.Model(x, y))
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())

    @tf.function
    def step(x):
        y = model(x, training=True)
        graph = tf.compat.v1.get_default_graph()
        for _ in range(2):
            reports.append(fold_batch_norms(graph, is_training=True, **options))
        return y

    for seed, training in enumerate((True, False)):
        data = tf.constant(_data(seed))
        close([step(data).numpy()], [plain(data, training=training).numpy()])
        close(model.get_weights(), plain.get_weights())
    assert len(reports[0].folded) == 1
    assert (reports[1].folded, reports[1].refused) == ((), ())


@pytest.mark.parametrize("statistics", STATISTICS)
def test_an_opened_model_that_ends_in_a_norm(statistics):
    model, plain = _model(last=None), _model(last=None)

    @tf.function(input_signature=[tf.TensorSpec([None, 9, 9, 3])])
    def result(x):
        return tf.identity(model(x, training=True))

    opened = geutil.model.open(result)
    report = fold_batch_norms(
        opened, is_training=True, freeze_batch_norm_delay=2, statistics=statistics
    )
    assert len(report.folded) == 3
    folded = opened.to_function()
    for seed, training in enumerate((True, False)):
        data = tf.constant(_data(seed))
        (value,) = folded(data).values()
        close([value.numpy()], [plain(data, training=training).numpy()])
    assert report.step.numpy() == 2
    # The opened model works on the variables of the first.
    close(model.get_weights(), plain.get_weights())


@pytest.mark.parametrize("statistics", STATISTICS)
def test_gradients_of_what_a_layer_reads_weights_through(statistics):
    """Gradients are asked for at an Identity between a variable and its layer."""
    rng = np.random.default_rng(0)
    values = [(3, 3, 3, 4), (4,), (4,)]
    kernel, scale, offset = (
        tf.Variable(np.float32(rng.normal(size=s))) for s in values
    )
    mean, variance = tf.Variable(tf.zeros(4)), tf.Variable(tf.ones(4))

    def step(x, *, fold):
        weights = [tf.identity(v) for v in (kernel, scale, offset)]
        y = tf.nn.conv2d(x, weights[0], 1, "SAME")
        moments = tf.nn.moments(y, [0, 1, 2])
        for average, moment in zip((mean, variance), moments, strict=True):
            average.assign(0.9 * average + 0.1 * moment)
        y = tf.nn.relu(tf.nn.batch_normalization(y, *moments, *weights[:0:-1], 0.1))
        if fold:
            graph = tf.compat.v1.get_default_graph()
            report = fold_batch_norms(graph, is_training=True, statistics=statistics)
            assert len(report.folded) == 1
        loss = tf.reduce_mean(tf.sin(y))
        return [loss, *tf.gradients(loss, weights)]

    x = tf.constant(_data())
    mean.assign(rng.normal(size=4))
    variance.assign(rng.uniform(0.5, 1.5, size=4))
    plain = tf.function(lambda x: step(x, fold=False))(x)
    close(tf.function(lambda x: step(x, fold=True))(x), plain)
