"""Sizes where dimensions are not known, against the same network with all of them."""

from functools import cache

import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients import checkpointed, explain, gradients, last_report
from geutil.memory import predict
from tests.gradients.checking import deep
from tests.thorough import thorough

v1 = tf.compat.v1
SHAPE = [8, 32, 32, 16]
OPEN = [[None, None, None, 16], pytest.param([None, 32, 32, 16], marks=thorough)]


def windowed(x, blocks=2):
    """Return a loss that looks at windows of 4 by 4, whose number is computed."""
    weights = []
    for block in range(blocks):
        w = v1.get_variable(f"w{block}", [16, 16], use_resource=True)
        weights.append(w)
        n = tf.shape(x)
        across, along = n[1] // 4, n[2] // 4
        h = tf.reshape(x, tf.stack([n[0], across, 4, along, 4, 16]))
        h = tf.reshape(tf.transpose(h, [0, 1, 3, 2, 4, 5]), [-1, 16, 16])
        h = tf.tanh(tf.einsum("bij,jk->bik", tf.nn.softmax(h), w))
        h = tf.reshape(h, tf.stack([n[0], across, along, 4, 4, 16]))
        h = tf.transpose(h, [0, 1, 3, 2, 4, 5])
        x = tf.reshape(h, tf.stack([n[0], n[1], n[2], 16]))
    return tf.reduce_mean(x), weights


def reports(shape, **options):
    """Return what is told before gradients are built, and after."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, shape, name="x")
        loss, weights = windowed(x)
        before = explain(loss, weights, checkpoints="memory", **options)
        gradients(loss, weights, checkpoints="memory", **options)
        return before, last_report()


@cache
def exact(batch):
    return reports([batch, *SHAPE[1:]])


@cache
def plain_peak(shape, batch):
    """Return what plain gradients hold with a batch; open shapes have ops besides."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, shape, name="x")
        loss, weights = windowed(x)
        fetches = [loss, *tf.gradients(loss, weights)]
        shapes = {"x": [batch, *SHAPE[1:]]}
        return predict(fetches, shapes=shapes, grappler=False).peak


def near(report, other, shape, batch):
    assert report.peak == pytest.approx(other.peak, rel=0.01)
    plain = plain_peak(tuple(shape), batch)
    assert report.plain_peak == pytest.approx(plain, rel=0.005)


@pytest.mark.parametrize("shape", OPEN)
def test_sizes_are_those_of_a_network_with_given_or_assumed_shapes(shape):
    for told, known in zip(reports(shape, shapes={"x": SHAPE}), exact(8), strict=True):
        near(told, known, shape, 8)
        assert told.assumed == told.warnings == ()
        assert "sizes are those with" not in str(told)
    for guessed, known in zip(reports(shape), exact(32), strict=True):
        near(guessed, known, shape, 32)
        assert guessed.assumed == (("x:0", (32, 32, 32, 16)),)
        assert "sizes are those with: 'x:0' [32, 32, 32, 16]; pass" in str(guessed)
        assert guessed.warnings == ()


def test_keys_of_shapes(graph):
    x = v1.placeholder(tf.float32, [None, 8], name="x")
    h = deep(deep(x))
    for key in (x, x.ref(), "x", "x:0"):
        report = explain(deep(h), x, checkpoints=[h], shapes=[(key, [100, 8])])
        assert {t.bytes for t in report.kept} == {3200}


def test_tensors_in_the_middle(graph):
    """How many rows a mask leaves follows from no shape."""
    x = v1.placeholder(tf.float32, [64, 8], name="x")
    left = tf.boolean_mask(deep(x), x[:, 0] > 0)
    kept = deep(left)
    gradients(deep(kept), x, checkpoints=[kept])
    assert [dims for _, dims in last_report().assumed] == [(32, 1)]
    rows = last_report().assumed[0][0]
    gradients(deep(kept), x, checkpoints=[kept], shapes={rows: [50, 1]})
    assert last_report().assumed == ()
    assert {t.name: t.bytes for t in last_report().kept}[kept.name] == 50 * 8 * 4


def test_assumptions_that_do_not_fit_are_told(graph):
    x, z = (v1.placeholder(tf.float32, [None, 8], name=name) for name in "xz")
    h = deep(deep(tf.concat([x, x], 0)) * z)
    ours = gradients(deep(h), x, checkpoints=[h])
    (warning,) = last_report().warnings
    assert "TensorFlow refuses the assumed 'x:0' [32, 8], 'z:0' [32, 8]" in warning
    assert "Pass shapes=" in warning
    assert ours[0] is not None
    gradients(deep(h), x, checkpoints=[h], shapes={"x": [100, 8], "z": [200, 8]})
    assert last_report().warnings == ()
    assert {t.bytes for t in last_report().kept} >= {3200, 6400}


def test_an_unknown_rank_is_told(graph):
    x = v1.placeholder(tf.float32, None, name="x")
    h = deep(x)
    gradients(deep(h), x, checkpoints=[h])
    (warning,) = last_report().warnings
    assert "'x:0' among them, are guesses" in warning
    gradients(deep(h), x, checkpoints=[h], shapes={"x": [100, 8]})
    assert last_report().warnings == ()
    assert {t.bytes for t in last_report().kept} == {3200}


REFUSALS = [
    ({"y": [1, 8]}, SelectionError, "names 'y', but the graph has no such tensor"),
    ({"x": [4, 9]}, SelectionError, r"of 'x:0' \(None, 8\); pass a shape without"),
    ({"x": [None, 8]}, SelectionError, "pass a shape without open dimensions"),
    ({"x": "four"}, ArgumentTypeError, "shapes= has 'four'"),
    ({"x": [4, 8], "z": [5, 8]}, SelectionError, "shapes= does not fit the graph"),
]


def test_refusals(graph):
    x, z = (v1.placeholder(tf.float32, [None, 8], name=name) for name in "xz")
    h = deep(deep(x) * z)
    y = deep(h)
    before = len(graph.get_operations())
    for shapes, error, words in REFUSALS:
        for function in (explain, gradients):
            with pytest.raises(error, match=words):
                function(y, x, checkpoints=[h], shapes=shapes)
    assert len(graph.get_operations()) == before


def test_calls_of_checkpointed_functions():
    """Each is seen for itself, and none looks at the whole graph again."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(3):
                y = checkpointed(windowed_block, "inputs")(y)
            loss = tf.reduce_mean(y)
        return tape.gradient(loss, x)

    def windowed_block(x):
        n = tf.shape(x)
        h = tf.reshape(x, tf.stack([n[0] * n[1], -1, 16]))
        h = tf.tanh(tf.sin(tf.matmul(tf.nn.softmax(h), tf.eye(16)[None])))
        return tf.reshape(h, tf.stack([n[0], n[1], n[2], 16]))

    found = {}
    for shape in ([None, None, None, 16], [32, 32, 32, 16]):
        step.get_concrete_function(tf.TensorSpec(shape, name="x"))
        found[shape[0]] = last_report()
    assert found[None].peak == pytest.approx(found[32].peak, rel=0.01)
    assert found[None].plain_peak == pytest.approx(found[32].plain_peak, rel=0.01)
    assert found[None].assumed == (("x:0", (32, 32, 32, 16)),)
    assert not found[None].warnings


def test_what_only_gpus_hold_is_no_guess(caplog, graph):
    ones, zeros = tf.ones([8]), tf.zeros([8])
    kernels = [v1.get_variable(f"k{i}", [3, 3, 8, 8]) for i in range(3)]
    x = tf.ones([4, 16, 16, 8])
    for kernel in kernels:
        y = tf.nn.conv2d(x, kernel, 1, "SAME")
        x = tf.nn.relu(v1.nn.fused_batch_norm(y, ones, zeros)[0])
    gradients(tf.reduce_sum(x), kernels, checkpoints="memory")
    assert not [w for w in last_report().warnings if "guess" in w]
    # Nor is anything said of the variables that are copied to explain.
    w = v1.get_variable("w", [8, 8], use_resource=False)
    y = tf.tanh(tf.tanh(tf.ones([4, 8]) @ w) @ w)
    explain(tf.reduce_sum(y), w, checkpoints="memory")
    assert "copied" not in caplog.text


def test_how_many_dimensions_a_variable_has_is_no_guess_to_tell_of(graph):
    """As in the body of a loop of the backward pass, whose handles have no shape."""
    handle = v1.placeholder(tf.resource, [])
    shape = tf.raw_ops.VariableShape(input=handle)
    x = v1.placeholder(tf.float32, [None, 3])
    h = deep(x) * tf.cast(tf.size(shape), tf.float32)
    gradients(deep(h), x, checkpoints=[h])
    assert shape.shape.as_list() == [None]
    assert last_report().assumed == ((x.name, (32, 3)),)
