"""Checkpointed Keras layers and models train as plain ones do."""

from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from geutil.errors import ArgumentTypeError
from geutil.gradients import Budget, by_type, checkpointed, last_report
from tests.gradients.wrapped.comparing import assert_same
from tests.thorough import chosen, crossed, thorough

X = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 4, 16)


@pytest.fixture(autouse=True)
def policy():
    yield
    keras.config.set_dtype_policy("float32")


def functional(activation="relu"):
    """Return a residual network with batch norm and dropout."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input([8, 8, 3])
    x = keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(inputs)
    # A bias ahead of a batch norm has no gradient but rounding.
    y = keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    y = keras.layers.BatchNormalization()(y)
    y = keras.layers.Dropout(0.3)(keras.layers.Activation(activation)(y))
    x = keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


@keras.saving.register_keras_serializable("geutil_tests")
class Block(keras.layers.Layer):
    """Makes its weights in its first call, adds a loss, takes further arguments."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(8, "tanh", activity_regularizer="l2")
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs, scale=1.0, training=False, mask=None):
        x = self.dropout(self.dense(inputs["x"]), training=training)
        self.add_loss(0.1 * tf.reduce_sum(tf.sin(x)))
        if mask is not None and mask["x"] is not None:
            x = x * tf.cast(mask["x"], x.dtype)[..., None]
        return {"y": scale * tf.sin(x), "training": training}


@keras.saving.register_keras_serializable("geutil_tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block()
        self.head = keras.layers.Dense(4)

    def call(self, inputs, training=None):
        x = keras.ops.reshape(inputs, [-1, 8 * 8 * 3])
        return self.head(self.block({"x": x}, scale=2.0, training=training)["y"])


def no(model):
    pass


def whole(model):
    assert checkpointed(model, "inputs") is model


def by_policy(model):
    checkpointed(model, by_type("AddV2", "Tanh"))


def by_budget(model):
    checkpointed(model, Budget(0.8))


def each_layer(model):
    for layer in model.layers:
        if not isinstance(layer, keras.layers.InputLayer):
            checkpointed(layer)


def both(model):
    each_layer(model)
    whole(model)


def train(make, wrap, **options):
    """Return the weights and losses after some steps."""
    keras.utils.set_random_seed(3)
    model = make()
    wrap(model)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{"jit_compile": False, **options},
    )
    history = model.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history["loss"]


@cache
def plain(make):
    return train(make, no)


@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        *crossed(
            [whole, by_policy, each_layer, both], [functional, Subclassed], together=1
        ),
        (by_budget, functional),
    ],
)
def test_fit(make, wrap):
    expected = plain(make)
    assert_same(train(make, wrap), expected)
    if wrap is by_budget:
        assert last_report().mode == "budget of 80 % of plain gradients"


@pytest.mark.parametrize("wrap", chosen([whole, each_layer], whole))
def test_loss_scaling(wrap):
    keras.config.set_dtype_policy("mixed_float16")
    assert_same(train(functional, wrap), train(functional, no))


def gradients_of(wrap, activation="relu", **options):
    """Compute by `tf.gradients`: a tape sums in another order, and rounds more."""
    model = functional(activation)
    wrap(model)

    @tf.function(**options)
    def step(x):
        loss = tf.reduce_sum(tf.sin(model(x, training=True)))
        return tf.gradients(loss, [v.value for v in model.trainable_variables])

    return step(tf.constant(X))


@pytest.mark.parametrize("wrap", chosen([whole, each_layer], each_layer))
def test_mixed_precision(wrap):
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert_same(gradients_of(wrap), gradients_of(no))


@thorough
def test_under_xla():
    found, expected = (
        gradients_of(wrap, "tanh", jit_compile=True) for wrap in (both, no)
    )
    found, expected = (
        np.concatenate([np.ravel(g) for g in slopes]) for slopes in (found, expected)
    )
    # XLA rounds what is recomputed in another way, after which a ReLU may be another.
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_fit_eagerly():
    expected = train(functional, no)
    # Op by op, other kernels are fused than in a graph.
    assert_same(train(functional, whole, run_eagerly=True), expected, 1e-5)


def function_of_a_layer(model):
    block = model.block

    def function(x, **options):
        return block(x, **options)

    model.block = checkpointed(function)


@pytest.mark.parametrize("wrap", (each_layer, function_of_a_layer))
def test_losses_that_layers_add_get_out_eagerly(wrap):
    assert_same(train(Subclassed, wrap, run_eagerly=True), plain(Subclassed), 1e-5)


@pytest.mark.parametrize("module", (keras, tf_keras))
def test_a_layer_in_a_checkpointed_function_forgets_the_losses_of_the_call_before(
    module,
):
    layer = module.layers.Dense(3, activity_regularizer="l2")
    x = tf.ones([2, 4])

    def twice(x):
        return 2.0 * layer(x)

    for function in (twice, checkpointed(twice)):
        for step in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x)) + tf.add_n(layer.losses)
            assert len(layer.losses) == 1, step
            gradient = tape.gradient(loss, layer.kernel)
        if function is twice:
            expected = gradient
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_moving_averages_move_once_and_the_dropout_mask_is_one():
    keras.utils.set_random_seed(3)
    norm = keras.layers.BatchNormalization(momentum=0.5)
    dropout = keras.layers.Dropout(0.5, seed=5)
    layer = checkpointed(keras.Sequential([norm, dropout]), "inputs")
    layer.build([None, 3])
    x = tf.constant(X.reshape(-1, 3))
    for traced in (False, True):
        norm.moving_mean.assign(tf.zeros([3]))
        seed = dropout.seed_generator.state.numpy()

        def step():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
            return y, tape.gradient(y, norm.beta)

        y, gradient = (tf.function(step) if traced else step)()
        np.testing.assert_allclose(norm.moving_mean, 0.5 * x.numpy().mean(0), 1e-4)
        moved = dropout.seed_generator.state.numpy() - seed
        assert sorted(moved.tolist()) == [0, 1]
        # The gradient of beta is what the mask lets through.
        np.testing.assert_allclose(gradient, 2.0 * (y.numpy() != 0).sum(0))


def test_it_stays_what_it_was(tmp_path):
    model = functional()
    plain = model(X).numpy()
    names = [w.path for w in model.weights]
    checkpointed(model, "inputs")
    assert type(model) is type(functional())
    assert [w.path for w in model.weights] == names
    assert "call" in vars(model)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert "call" not in vars(loaded)
    np.testing.assert_array_equal(loaded(X), plain)
    np.testing.assert_array_equal(model(X), plain)
    np.testing.assert_allclose(model.predict(X, verbose=0), plain, 1e-5, 1e-6)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone(X), plain)
    del model.call
    assert "call" not in vars(model)
    np.testing.assert_array_equal(model(X), plain)


def test_layers_in_a_new_model():
    def make(wrap):
        keras.utils.set_random_seed(3)
        inputs = keras.Input([5], dtype="int32")
        x = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
        x = wrap(keras.layers.LSTM(6, return_sequences=True))(x)
        x = wrap(keras.layers.MultiHeadAttention(2, 3))(x, x)
        x = keras.layers.GlobalAveragePooling1D()(x)
        model = keras.Model(inputs, wrap(keras.layers.Dense(4))(x))
        tokens = np.random.default_rng(0).integers(0, 7, [16, 5])
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        losses = [model.train_on_batch(tokens, Y) for _ in range(2)]
        return model.get_weights(), losses

    expected = make(lambda layer: layer)
    assert_same(make(lambda layer: checkpointed(layer, "inputs")), expected)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    layer = keras.layers.Dense(2)
    with pytest.raises(ArgumentTypeError, match="jax"):
        checkpointed(layer)
    assert "call" not in vars(layer)
