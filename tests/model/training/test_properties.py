"""What holds for every model: stripped, it is what it was at inference."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil import model
from tests.model.training.helpers import (
    at_inference,
    is_deterministic,
    opened_in_training,
    randomize,
)
from tests.thorough import examples

layers = tf.keras.layers
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
