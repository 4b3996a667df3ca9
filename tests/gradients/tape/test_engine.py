"""`gradients(engine="tape")` on networks, with and without checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import explain, gradients, last_report
from geutil.gradients.tape import TapeEngine
from tests.gradients.checking import EAGER_SUMS, assert_close, run
from tests.gradients.networks import SMALL, small_step
from tests.thorough import chosen

v1 = tf.compat.v1

CASES = chosen(
    [
        *((name, None) for name in SMALL),
        ("DenseNet121", "memory"),
        ("U-Net", "speed"),
        ("U-Net", "memory"),
        ("encoder", "memory"),
    ],
    ("U-Net", "speed"),
)


def values(step, take, **options):
    """Return the gradients of a small step in a `tf.function`."""

    @tf.function(autograph=False, **options)
    def traced(*batch):
        found = take(step.loss(*batch), step.variables)
        return [tf.convert_to_tensor(g) for g in found]

    for variable in step.state:
        # Dropout is to draw the same numbers each time.
        if variable.dtype.is_integer:
            variable.assign(tf.ones_like(variable))
    return [g.numpy() for g in traced(*step.tensors())]


def take_by_tape(checkpoints, engine="tape"):
    def take(loss, variables):
        return gradients(loss, variables, checkpoints=checkpoints, engine=engine)

    return take


# Grappler reorders sums and products in each graph its own way.
@pytest.mark.parametrize("grappler", [False], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_networks(case, grappler):
    name, way = case
    step = small_step(name)
    actual = values(step, take_by_tape(way, EAGER_SUMS if way else "tape"))
    assert bool(last_report().recomputed) == bool(way)
    assert_near(actual, values(step, tf.gradients))


@pytest.mark.parametrize("name", chosen(["chain", "encoder"], "chain"))
def test_networks_under_xla(name):
    step = small_step(name)
    expected = values(step, tf.gradients, jit_compile=True)
    for way in (None, "speed", "memory"):
        take = take_by_tape(way, EAGER_SUMS)
        assert_near(values(step, take, jit_compile=True), expected)


def assert_near(actual, expected):
    """Check that gradients agree to 1e-6 of the largest of all."""
    largest = max(np.max(np.abs(e), initial=0.0) for e in expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-6 * largest)


def dense_block():
    """Return a block whose layers each read all that was made before, and its end."""
    x = tf.reshape(tf.cos(tf.range(64.0)), [8, 8])
    made, weights = [x], []
    for i in range(6):
        w = tf.sin(tf.reshape(tf.range(i, i + 64.0 * len(made)), [8 * len(made), 8]))
        weights.append(w)
        made.append(tf.tanh(tf.matmul(tf.concat(made, 1), w)))
    return [x, *weights], made, tf.reduce_sum(tf.concat(made, 1) ** 2)


def test_sums_in_the_same_order_are_the_same_bits(graph):
    x = h = tf.reshape(tf.cos(tf.range(64.0)), [8, 8])
    for i in range(8):  # Residual blocks: sums of two.
        w = tf.sin(tf.reshape(tf.range(i, i + 64.0), [8, 8]))
        h = h + tf.nn.relu(tf.matmul(h, w)) * 0.1
    y = tf.reduce_sum(h * h)
    both = tf.gradients(y, x), gradients(y, x, checkpoints=None, engine="tape")
    for optimize in (False, True):
        (expected,), (actual,) = run(graph, both, optimize=optimize)
        np.testing.assert_array_equal(actual, expected)


# -- what is built ---------------------------------------------------------------------


def fan(count, engine):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [16, 16])
        hub = tf.tanh(x)
        ends = [tf.reduce_sum(tf.square(hub * float(i))) for i in range(count)]
        y = tf.add_n(ends)
        plain = tf.gradients(y, x)
        before = len(graph.get_operations())
        ours = gradients(y, x, checkpoints=None, engine=engine)
    return graph, x, plain, ours, graph.get_operations()[before:]


def test_no_sum_ahead_of_time_by_default():
    _, _, _, _, made = fan(8, "tape")
    assert not any(op.name.startswith("tape/") for op in made)
    (total,) = (op for op in made if op.type == "AddN")
    assert len(total.inputs) == 8


def test_what_comes_after_a_sum_waits_for_it():
    count = 4
    graph, x, plain, ours, made = fan(20, TapeEngine(count, 0))
    sums = [op for op in made if op.type == "AddN"]
    assert all(len(op.inputs) == 2 for op in sums)
    late = [op for op in made if op.name.startswith("tape/late")]
    # Each branch but the first ones has something that waits.
    assert len(late) >= 20 - count - 1
    waited = {op.control_inputs[0] for op in late}
    assert len(waited) == (20 - 1) // (count - 1)
    assert waited <= set(sums)
    expected, actual = run(graph, [plain, ours], {x: np.ones((16, 16)) / 3})
    assert_close(actual, expected)


# -- nothing recomputed ----------------------------------------------------------------


@pytest.mark.parametrize("engine", ["tensorflow", "tape"])
def test_nothing_is_recomputed_and_nothing_is_said(engine, caplog, graph):
    xs, _, y = dense_block()
    plain = tf.gradients(y, xs)
    options = {"checkpoints": None, "engine": engine, "order": False}
    expected = explain(y, xs, **options)
    ours = gradients(y, xs, **options)
    report = last_report()
    assert caplog.messages == []
    assert report.mode == expected.mode == "none"
    assert report.warnings == expected.warnings == ()
    assert report.recomputed == ()
    assert report.segments == 0
    assert report.peak == report.plain_peak == expected.peak
    assert {t.reason for t in report.kept} == {"nothing is recomputed"}
    assert str(report).startswith("checkpoints: none\n")
    a, b = run(graph, [plain, ours])
    assert_close(b, a)


def test_explaining_a_tape_builds_with_a_tape(graph):
    weights = tf.cos(tf.range(64.0))
    x = tf.sin(weights)
    y = tf.add_n([tf.reduce_sum(tf.sin(tf.sin(x * float(i)))) for i in range(40)])
    before = len(graph.get_operations())
    with pytest.raises(TypeError, match="gate_gradients"):
        explain(y, x, engine="tape", gate_gradients=True)
    few = explain(y, x, checkpoints=None, engine=EAGER_SUMS)
    assert len(graph.get_operations()) == before
    gradients(y, x, checkpoints=None, engine=EAGER_SUMS)
    assert last_report() == few
