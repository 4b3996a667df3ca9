"""Another batch size: what bakes the old one in is found, replaced or listed.

The reference is TensorFlow itself, eagerly, on the same function written for any batch.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil import model
from tests.model.refusal_tables import not_refused
from tests.settings import control_flow
from tests.thorough import crossed, examples, some

W = np.random.default_rng(1).normal(size=[6, 6]).astype(np.float32)
KERNEL = np.random.default_rng(2).normal(size=[3, 3, 5, 2]).astype(np.float32)
R = tf.raw_ops


@dataclass
class Case:
    """A function with a batch size baked in, and the same for any batch."""

    fixed: Any
    free: Any
    shape: tuple[int, ...] = (6,)
    old: int = 1


def rows(x):
    return tf.shape(x)[0]


def looped(zeros):
    """A small recurrent network that starts at `zeros`."""

    def call(x):
        return tf.while_loop(
            lambda i, h: i < 3,
            lambda i, h: (i + 1, tf.tanh(tf.matmul(h, W) + x)),
            (0, zeros(x)),
        )[1]

    return call


def collected(batch):
    """A loop that collects its states in a TensorArray."""

    def call(x):
        arrays = tf.TensorArray(tf.float32, 3, element_shape=[batch, 6])
        start = tf.zeros([rows(x) if batch is None else batch, 6])

        def step(i, h, a):
            h = tf.tanh(tf.matmul(h, W) + x)
            return i + 1, h, a.write(i, h)

        return tf.while_loop(lambda i, h, a: i < 3, step, (0, start, arrays))[2].stack()

    return call


def joining(zeros):
    """A loop that reads its state and the input side by side."""

    def call(x):
        wide = np.concatenate([W, W])

        def step(i, h):
            return i + 1, tf.tanh(tf.matmul(tf.concat([x, h], 1), wide))

        return tf.while_loop(lambda i, h: i < 3, step, (0, zeros(x)))[1]

    return call


def reset(zeros):
    """A loop that starts at the input and takes ones up on the way."""

    def call(x):
        def step(i, h):
            return i + 1, tf.cond(i > 5, lambda: h, lambda: zeros(h) + 1.0)

        return tf.while_loop(lambda i, h: i < 2, step, (0, x * 2.0))[1] * x

    return call


def conditional(zeros):
    """A conditional whose branch that is taken does not look at the input."""

    def call(x):
        large = tf.reduce_sum(tf.constant(W)) > 1e9
        return tf.cond(large, lambda: x, lambda: zeros(x) + 0.5) * x

    return call


CASES = {
    "reshape [1, -1]": Case(
        lambda x: tf.reshape(x, [1, -1]), lambda x: tf.reshape(x, [rows(x), -1]), (2, 3)
    ),
    "reshape -1 at the batch": Case(
        lambda x: tf.reshape(x, [-1, 6]), lambda x: tf.reshape(x, [-1, 6]), (2, 3)
    ),
    "merge and part of 4": Case(
        lambda x: tf.reshape(tf.matmul(tf.reshape(x, [8, 6]), W), [4, 2, 6]),
        lambda x: tf.reshape(tf.matmul(tf.reshape(x, [-1, 6]), W), [-1, 2, 6]),
        (2, 6),
        4,
    ),
    "pack": Case(
        lambda x: tf.reshape(x, [1, 3, tf.shape(x)[1]]),
        lambda x: tf.reshape(x, [-1, 3, 8]),
        (None, 3),
    ),
    "-1 beside an unknown dimension": Case(
        lambda x: tf.reshape(x, [1, -1]) * 2.0,
        lambda x: tf.reshape(x, [-1, 24]) * 2.0,
        (None, 3),
    ),
    "broadcast_to": Case(
        lambda x: tf.broadcast_to(x, [1, 6]) + 1.0, lambda x: x + tf.ones([6]), (1,)
    ),
    "broadcast_to of 3": Case(
        lambda x: tf.broadcast_to(x, [3, 6]), lambda x: x + tf.zeros([6]), (1,), 3
    ),
    "zeros that broadcast": Case(lambda x: x + tf.zeros([1, 6]), lambda x: x, old=1),
    "zeros of 4": Case(lambda x: x + tf.ones([4, 6]), lambda x: x + 1.0, old=4),
    "tiled weight of 4": Case(
        lambda x: x + tf.tile(W[:1], [4, 1]), lambda x: x + W[:1], old=4
    ),
    "class token": Case(
        lambda x: tf.concat([tf.broadcast_to(W[:1], [1, 1, 6]), x], 1),
        lambda x: tf.concat([tf.broadcast_to(W[:1], [rows(x), 1, 6]), x], 1),
        (2, 6),
    ),
    "stack": Case(
        lambda x: tf.stack([x, tf.ones([1, 6])], 1),
        lambda x: tf.stack([x, tf.ones_like(x)], 1),
    ),
    "whole slice": Case(lambda x: tf.slice(x, [0, 1], [1, 3]), lambda x: x[:, 1:4]),
    "whole strided slice": Case(lambda x: x[0:1, 2:4], lambda x: x[:, 2:4]),
    "strided slice with an ellipsis": Case(
        lambda x: x[0:1, ..., tf.newaxis, 1], lambda x: x[:, ..., tf.newaxis, 1], (2, 6)
    ),
    "transposed convolution": Case(
        lambda x: tf.nn.conv2d_transpose(x, KERNEL, [1, 8, 8, 5], 2),
        lambda x: tf.nn.conv2d_transpose(x, KERNEL, [rows(x), 8, 8, 5], 2),
        (4, 4, 2),
    ),
    "ensure_shape": Case(lambda x: tf.ensure_shape(x, [1, 6]) * 2.0, lambda x: x * 2.0),
    "bias of one row": Case(
        lambda x: tf.nn.bias_add(x, tf.squeeze(x * 2.0)), lambda x: x + x * 2.0
    ),
    "loop from zeros": Case(looped(lambda x: tf.zeros([1, 6])), looped(tf.zeros_like)),
    "collecting loop of 3": Case(collected(3), collected(None), old=3),
    "loop that joins its state": Case(
        joining(lambda x: tf.zeros([1, 6])), joining(tf.zeros_like)
    ),
    "conditional": Case(
        conditional(lambda x: tf.zeros([1, 6])), conditional(tf.zeros_like)
    ),
    "reset in a loop": Case(reset(lambda h: tf.zeros([1, 6])), reset(tf.zeros_like)),
    "nothing baked in": Case(lambda x: tf.nn.relu(x @ W), lambda x: tf.nn.relu(x @ W)),
    "unpacked features": Case(
        lambda x: tf.add_n(tf.unstack(x, axis=1)), lambda x: tf.reduce_sum(x, 1)
    ),
}


def opened(function, shape, batch, dtype=tf.float32, **options):
    spec = tf.TensorSpec([batch, *shape], dtype, name="x")
    traced = tf.function(function, autograph=False).get_concrete_function(spec)
    return model.open(traced, **options)


def sample(batch, shape):
    size = [batch, *(8 if d is None else d for d in shape)]
    return np.random.default_rng(7).normal(size=size).astype(np.float32)


def result(m, x, **more):
    (value,) = m.run(x=x, **more).values()
    return value


@pytest.mark.parametrize(("name", "new"), crossed(CASES, [None, 5, 1], together=1))
def test_baked_in(name, new):
    case = CASES[name]
    m = opened(case.fixed, case.shape, case.old)
    ops = [op.name for op in m.graph.get_operations()]
    changed = m.set_batch_size(new)
    assert changed.inputs["x"].shape.as_list() == [new, *case.shape]
    for batch in [1, 2, 5] if new is None else [new]:
        x = sample(batch, case.shape)
        np.testing.assert_allclose(
            result(changed, x), case.free(tf.constant(x)), rtol=1e-5, atol=1e-5
        )
    assert m.inputs["x"].shape.as_list() == [case.old, *case.shape]
    assert [op.name for op in m.graph.get_operations()] == ops


@pytest.mark.parametrize("name", some(CASES, 4))
def test_the_size_can_be_left_open_in_calls_and_set_again(name):
    case = CASES[name]
    inner = tf.function(case.fixed, autograph=False)
    m = opened(inner, case.shape, case.old, inline=False)
    changed = m.set_batch_size(None)
    x = sample(4, case.shape)
    np.testing.assert_allclose(
        result(changed, x), case.free(tf.constant(x)), rtol=1e-5, atol=1e-5
    )
    x = sample(case.old, case.shape)
    again = changed.set_batch_size(case.old)
    np.testing.assert_array_equal(result(again, x), result(m, x))


def test_shapes_behind_the_input_are_inferred_anew():
    m = opened(lambda x: tf.reshape(x, [tf.shape(x)[0], 6]), (2, 3), None)
    changed = m.set_batch_size(2)
    assert changed.outputs["output_0"].shape.as_list() == [2, 6]
    x = sample(2, (2, 3))
    np.testing.assert_array_equal(result(changed, x), result(m, x))
    m = opened(lambda x: tf.nn.relu(x @ W), (6,), 1)
    assert m.set_batch_size(None).outputs["output_0"].shape.as_list() == [None, 6]


@pytest.mark.parametrize(("old", "collecting"), [(1, True), (3, False)])
def test_version_1_loop(old, collecting):
    """Enter, Merge, NextIteration, and the arrays of that time."""
    free = looped(tf.zeros_like)
    graph = version_1_loop(old, collecting)
    assert "NextIteration" in {op.type for op in graph.get_operations()}
    m = model.open(graph, inputs=["x:0"], outputs=["y:0"])
    for new in (None, 5):
        changed = m.set_batch_size(new)
        x = sample(5, (6,))
        np.testing.assert_allclose(changed.run(x=x)["y"], free(x), rtol=1e-4)
        assert changed.outputs["y"].shape.is_compatible_with([5, 6])


def version_1_loop(batch, collecting):
    with control_flow(1), tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [batch, 6], "x")
        array = tf.TensorArray(tf.float32, 3, element_shape=[batch, 6])

        def step(i, h, a):
            h = tf.tanh(tf.matmul(h, W) + x)
            return i + 1, h, a.write(i, h)

        _, h, array = tf.while_loop(
            lambda i, h, a: i < 3, step, (0, tf.zeros([batch, 6]), array)
        )
        tf.identity(array.stack()[2] if collecting else h, name="y")
    return graph


def test_shared_target_is_changed_only_where_the_batch_is():
    def f(x):
        target = tf.constant([1, 6])
        return tf.reshape(x, target) * tf.reshape(tf.constant(W[0]), target)

    m = opened(f, (2, 3), 1).set_batch_size(None)
    x = sample(3, (2, 3))
    np.testing.assert_allclose(result(m, x), x.reshape(3, 6) * W[0], rtol=1e-6)


def test_inputs_without_a_batch_axis():
    @tf.function(input_signature=[tf.TensorSpec([1, 6]), tf.TensorSpec([6, 6])])
    def f(x, w):
        return tf.matmul(x, w)

    m = model.open(f)
    with pytest.raises(model.ModelError, match="do not agree on the batch size"):
        m.set_batch_size(None)
    changed = m.set_batch_size(None, inputs=["x"])
    assert changed.inputs["w"].shape.as_list() == [6, 6]
    x = sample(4, (6,))
    np.testing.assert_allclose(result(changed, x, w=W), x @ W, rtol=1e-5)


def test_variables_are_shared():
    v = tf.Variable(W)
    m = opened(lambda x: tf.reshape(x @ v, [1, 2, 3]), (6,), 1)
    changed = m.set_batch_size(None)
    v.assign(2 * W)
    x = sample(2, (6,))
    wanted = (x @ (2 * W)).reshape(2, 2, 3)
    np.testing.assert_allclose(result(changed, x), wanted, rtol=1e-5, atol=1e-5)


REFUSED = {
    "unpacked rows": (
        lambda x: tf.concat([r * 2.0 for r in tf.unstack(x, num=4)], 0),
        4,
        "(Unpack)",
    ),
    "taken row": (lambda x: x[0] * 2.0, 1, "it takes row 0 of the batch"),
    "squeezed": (lambda x: tf.squeeze(x) * 2.0, 1, "squeezes the axis of the batch"),
    "squeezed by name": (lambda x: tf.squeeze(x, [0]), 1, "squeezes the axis"),
    "rows of their own": (lambda x: x + W[:4], 4, "rows of its own for a batch of 4"),
    "split over rows": (
        lambda x: tf.reshape(x, [2, 12]) * 2.0,
        4,
        "spreads a row of the batch over several",
    ),
    "gathered row": (
        lambda x: tf.gather(x, [0]) * 2.0,
        1,
        "it takes row [0] of the batch",
    ),
    "coupled rows": (
        lambda x: tf.nn.softmax(x, 0),
        3,
        "rows of the batch depend on each other",
    ),
    "summed rows": (lambda x: tf.reduce_sum(x, 0), 3, "does not tell which row"),
    "random": (lambda x: x + tf.random.normal([6]), 1, "something else each time"),
    "constant result": (lambda x: tf.argmax(x * 0.0, 1), 1, "come out the same"),
}


def test_refused():
    wrong = {}
    for name, (function, old, message) in REFUSED.items():
        m = opened(function, (6,), old)
        case = name, partial(m.set_batch_size, None), re.escape(message)
        wrong |= not_refused(model.ModelError, [case], unchanged=m)
        assert list(m.signatures.values()) == [m]
    assert wrong == {}


def test_all_that_holds_on_is_listed_with_its_constants():
    def f(x):
        a = tf.reshape(x, [2, 12], name="first")
        return {"a": a, "b": tf.add(x, W[:4], name="second")}

    with pytest.raises(model.ModelError) as caught:
        opened(f, (6,), 4).set_batch_size(None)
    text = str(caught.value)
    assert "'first' (Reshape)" in text
    assert "= [2, 12]" in text
    assert "'second' (AddV2)" in text


def test_effects_are_not_run_and_coupled_rows_need_no_proof():
    v = tf.Variable(0.0)

    def f(x):
        v.assign_add(1.0)
        return tf.nn.softmax(x, 0) * v

    m = opened(f, (6,), 2)
    with pytest.raises(model.ModelError, match="a run has effects"):
        m.set_batch_size(None)
    assert v.numpy() == 0.0
    changed = m.set_batch_size(5, verify=False)
    x = sample(5, (6,))
    np.testing.assert_allclose(result(changed, x), tf.nn.softmax(x, 0), rtol=1e-6)


def test_a_saturated_output_is_proved_by_what_is_behind_it():
    m = opened(lambda x: tf.nn.softmax(tf.reshape(x, [1, 6]) * 1e-12), (2, 3), 1)
    changed = m.set_batch_size(None)
    assert changed.outputs["output_0"].shape.as_list() == [None, 6]


def dying(layer):
    """Return 15 layers behind a baked-in batch, which leave nothing of their input."""

    def f(x):
        x = tf.reshape(x, [1, 6])
        for _ in range(15):
            x = layer(x)
        return x @ W

    return f


SILENT = {
    "saturated": dying(lambda x: tf.sigmoid(x @ W * 0.01)),
    "dead": dying(lambda x: tf.nn.relu(x @ W - 9.0)),
    "multiplied by zeros": dying(lambda x: (x + W[0]) * tf.zeros([6])),
    "far threshold": lambda x: tf.reshape(tf.maximum(x, 500.0), [1, 6]),
    "band": lambda x: tf.reshape(tf.cast((x > 4.0) & (x < 9.0), tf.int32), [1, 6]),
}


def test_untrained_networks_whose_rows_all_come_out_the_same():
    for function in SILENT.values():
        m = opened(function, (2, 3), 1)
        changed = m.set_batch_size(None)
        x = sample(4, (2, 3)) * 1000.0
        expected = np.concatenate([result(m, row[None]) for row in x])
        np.testing.assert_allclose(result(changed, x), expected, rtol=1e-5)
    # What shows far from zero alone is refused as anything else.
    mixed = opened(lambda x: tf.nn.relu(x - tf.reduce_mean(x, 0) - 500.0), (6,), 2)
    with pytest.raises(model.ModelError, match="rows of the batch depend"):
        mixed.set_batch_size(None)


def test_models_that_random_inputs_do_not_show():
    m = opened(lambda x: tf.maximum(x, 500) - 500, (), 1, tf.int32)
    with pytest.raises(model.ModelError, match="pass samples"):
        m.set_batch_size(None)
    changed = m.set_batch_size(None, samples={"x": [501, 700, 900]})
    np.testing.assert_array_equal(result(changed, [600, 800]), [100, 300])
    # This one fails on them.
    m = opened(lambda x: tf.io.decode_raw(x, tf.float64, False), (), 1, tf.string)
    with pytest.raises(model.ModelError, match="pass samples"):
        m.set_batch_size(None)
    # Big-endian, the bytes of these end in zeros.
    numbers = [np.array(n, ">f8").tobytes() for n in (1, 2, 3)]
    changed = m.set_batch_size(None, samples={"x": numbers})
    np.testing.assert_array_equal(result(changed, numbers), [[1.0], [2.0], [3.0]])


def test_what_is_no_size_or_no_name():
    change = opened(lambda x: x * 2.0, (6,), 1).set_batch_size
    cases = [
        (size, partial(change, size), "positive number or None")
        for size in (0, -1, True, 1.0, "2")
    ]
    for options, message in (
        ({"inputs": ["y"]}, "there is no input 'y'"),
        ({"samples": {"y": [1.0]}}, r"samples name no inputs: \['y'\]"),
        ({"inputs": []}, "no input with a batch axis"),
    ):
        cases.append((options, partial(change, None, **options), message))
    assert not_refused(model.ModelError, cases) == {}


def test_inputs_without_rank():
    def of_shape(shape):
        spec = tf.TensorSpec(shape, name="x")
        return model.open(tf.function(lambda x: x * 2.0).get_concrete_function(spec))

    with pytest.raises(model.ModelError, match="unknown rank"):
        of_shape(None).set_batch_size(None)
    with pytest.raises(model.ModelError, match="no input with a batch axis"):
        of_shape([]).set_batch_size(None)
    with pytest.raises(model.ModelError, match="has no batch axis"):
        of_shape([]).set_batch_size(None, inputs=["x"])


# -- targets that are computed, with a -1 in them --------------------------------------

ROWS = [(4, 6), (24,), (2, 12), (2, 2, 6), (2, 3, 4), (8, 3)]


@st.composite
def computed_targets(draw):
    """Return what makes the target of a reshape of [n, 4, 6] from its shape."""
    row = draw(st.sampled_from(ROWS))
    merged = len(row) > 1 and draw(st.booleans())
    # 0 stands for the batch, perhaps merged with the first axis.
    dims = [0, *row[1:]] if merged else [0, *row]
    factor = row[0] if merged else 1
    free = draw(st.integers(-1, len(dims) - 1))
    dynamic = [draw(st.booleans()) for _ in dims]
    joined = draw(st.booleans())

    def target(x):
        s = tf.shape(x)
        known = {4: s[1], 6: s[2]}
        parts = []
        for i, (dim, is_dynamic) in enumerate(zip(dims, dynamic, strict=True)):
            whole = known.get(dim, dim) if is_dynamic else dim
            part = whole if dim else s[0] * factor
            parts.append(-1 if i == free else part)
        if joined:
            return tf.concat([[part] for part in parts], 0)
        return tf.stack(parts)

    return target


@examples(15)
@given(
    st.lists(computed_targets(), min_size=1, max_size=3),
    st.sampled_from([(4, 6), (None, 6), (4, None), (None, None)]),
    st.sampled_from([None, 4]),
)
def test_computed_targets_of_a_model_whose_batch_is_fixed(targets, shape, new):
    def function(x):
        for target in targets:
            y = tf.reshape(x, target(x))
            y = tf.nn.softmax(y, -1) + tf.cast(tf.shape(y)[-1], tf.float32)
            x = x + tf.reshape(y, tf.concat([tf.shape(x)[:-1], [-1]], 0))
        return x

    fixed = opened(function, shape, None).set_batch_size(3, verify=False)
    samples = {"x": sample(4, (4, 6))}
    changed = fixed.set_batch_size(new, samples=samples)
    for batch in [1, 4] if new is None else [new]:
        x = sample(batch, (4, 6))
        np.testing.assert_allclose(
            result(changed, x), function(tf.constant(x)), rtol=1e-5, atol=1e-5
        )


def test_tables_of_different_lengths_and_a_mask():
    """As BERT: two rows for the segments, many for the words."""
    words, segments = (tf.constant(W[:n]) for n in (6, 2))

    def embedded(word, segment, mask):
        rows = tf.gather(words, word) + tf.gather(segments, segment)
        return rows * tf.cast(mask, tf.float32)[:, :, None]

    names = ("word", "segment", "mask")
    specs = [tf.TensorSpec([None, 5], tf.int32, name) for name in names]
    m = model.open(tf.function(embedded, specs, autograph=False))
    changed = m.set_batch_size(3).set_batch_size(None)
    assert changed.inputs["segment"].shape.as_list() == [None, 5]


# -- networks of Keras, against Keras itself -------------------------------------------

layers, keras = tf.keras.layers, tf.keras


def transformer():
    x = keras.Input((6, 8))
    h = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    h = layers.LayerNormalization()(h + layers.Dense(8)(layers.Dense(16, "gelu")(h)))
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(h)))


def recurrent(layer, **options):
    def build():
        x = keras.Input((5, 3))
        return keras.Model(x, layer(4, **options)(x))

    return build


def decoder():
    x = keras.Input((4, 4, 3))
    h = layers.Conv2DTranspose(5, 3, strides=2, padding="same")(x)
    h = layers.UpSampling2D()(layers.Reshape((8, 4, 10))(h))
    return keras.Model(x, layers.Permute((2, 1, 3))(h))


NETWORKS = {
    "transformer": transformer,
    "GRU": recurrent(layers.GRU, return_sequences=True),
    "LSTM both ways": recurrent(
        lambda units: layers.Bidirectional(layers.LSTM(units, return_sequences=True))
    ),
    "decoder": decoder,
}


def traced(network, batch):
    call = lambda x: network(x, training=False)  # noqa: E731
    return opened(call, network.input_shape[1:], batch)


def check(m, network, batch):
    """Compare with Keras: to five digits of the largest number."""
    x = sample(batch, network.input_shape[1:])
    wanted, found = network(x, training=False).numpy(), result(m, x)
    assert found.shape == wanted.shape
    largest = np.abs(wanted).max()
    assert np.abs(wanted[0] - wanted[1:]).max(initial=0) > 1e-3 * largest or batch == 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_to_others_and_four_to_any(name):
    network = NETWORKS[name]()
    free = traced(network, 1).set_batch_size(None)
    assert free.inputs["x"].shape[0] is None
    for batch in (1, 3):
        check(free, network, batch)
    fixed = free.set_batch_size(2)
    assert fixed.inputs["x"].shape[0] == 2
    check(fixed, network, 2)
    check(traced(network, 4).set_batch_size(None), network, 3)
