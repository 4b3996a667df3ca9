"""Bit for bit the gradients of `tf.gradients`, on networks with deterministic ops."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.networks import NETWORKS
from geutil.gradients import bitwise_determinism, gradients, last_report
from tests.gradients.apart import is_child
from tests.gradients.networks import SMALL
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(
    not is_child("determinism"), reason="determinism holds for a whole process"
)
if is_child("determinism"):
    tf.keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()

# With fewer activations, "memory" would predict nothing to be saved.
LARGER = {
    "chain": {"rows": 64, "width": 64},
    "encoder": {"length": 64, "width": 64, "depth": 4},
}
QUICK = [
    ("chain", "memory", True),
    ("chain", "speed", True),
    ("U-Net", "speed", True),
    ("encoder", "memory", False),
]
OTHERS = ["MobileNetV2", "U-Net", "ResNet50", "DenseNet121", "EfficientNetB0"]
OTHERS = [*((name, "memory", True) for name in (*OTHERS, "encoder"))]
OTHERS += [("encoder", "speed", True)]
CASES = [*QUICK, *(pytest.param(*case, marks=thorough) for case in OTHERS)]


@pytest.fixture
def grappler(request):
    """Whether Grappler rewrites graphs; the steps of some networks differently.

    Of the plain step of an encoder it joins and reorders sums, and products with
    constants, that it leaves as they are where something waits in between.
    """
    options = tf.config.optimizer.get_experimental_options()
    off = {"disable_meta_optimizer": not request.param}
    tf.config.optimizer.set_experimental_options(options | off)
    yield request.param
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": False} | options
    )


def values(step, take):
    """Return the gradients of a step from its first state, slices as they are."""

    @tf.function
    def traced(*batch):
        return take(step.loss(*batch), step.variables)

    before = [v.numpy() for v in step.state]
    result = traced(*step.tensors())
    after = [v.numpy() for v in step.state]
    for variable, value in zip(step.state, before, strict=True):
        variable.assign(value)
    return tf.nest.flatten(result, expand_composites=True), after


@pytest.fixture(scope="session")
def plain():
    """What plain gradients yield, by network and whether Grappler is on."""
    known = {}

    def look_up(name, grappler):
        if (name, grappler) not in known:
            step = NETWORKS[name](**SMALL[name] | LARGER.get(name, {}))
            known[name, grappler] = step, *values(step, tf.gradients)
        return known[name, grappler]

    return look_up


@pytest.mark.parametrize(("name", "mode", "grappler"), CASES, indirect=["grappler"])
def test_networks(name, mode, grappler, plain):
    step, expected, moved = plain(name, grappler)
    actual, moved_too = values(
        step,
        lambda y, xs: gradients(y, xs, checkpoints=mode, min_checkpoint_size=64),
    )
    # One activation between two products: "speed" would keep as much as plain ones.
    saves = (name, mode) != ("chain", "speed")
    assert bool(last_report().recomputed) == saves
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)
    # Moving averages and seeds moved once.
    for a, e in zip(moved_too, moved, strict=True):
        np.testing.assert_array_equal(a, e)


def bits_of_products(take):
    """Return the gradients of a network in which Grappler may join products."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=(64, 64)), tf.float32)
    # One for each layer: the order of a sum's terms may be another as well (see below).
    weights = tf.constant(generator.normal(size=(4, 64, 64)) / 8.0, tf.float32)

    @tf.function(autograph=False)
    def traced(x, weights):
        kept = []
        for w in weights:
            h = tf.matmul(x, w)
            # The gradient reads the first product, which keeps it apart.
            x = h * w[0] * tf.sigmoid(tf.sin(h))
            kept.append(x)
        return take(tf.reduce_sum(x**2), weights, kept)

    return [g.numpy() for g in traced(x, tf.unstack(weights))]


def test_what_grappler_does_not_join_with_plain_gradients(monkeypatch):
    expected = bits_of_products(lambda y, xs, kept: tf.gradients(y, xs))

    def recomputed():
        return bits_of_products(
            lambda y, xs, kept: gradients(y, xs, checkpoints=kept[:-1])
        )

    np.testing.assert_array_equal(recomputed(), expected)
    monkeypatch.setattr(bitwise_determinism, "keep_apart", lambda *args: None)
    assert np.any(np.not_equal(recomputed(), expected))


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("activation", [tf.identity, tf.nn.relu])
def test_gradients_of_pools_that_run_again(activation, readers):
    """Of windows that overlap, oneDNN adds in another order than the other kernel."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=(4, 24, 24, 8)), tf.float32)
    weights = tf.constant(generator.normal(size=(3, 3, 3, 8, 8)) / 8.0, tf.float32)

    def bits(take):
        @tf.function(autograph=False)
        def traced(x, weights):
            kept, xs = [], tf.unstack(weights)
            for w in xs:
                x = activation(tf.nn.conv2d(x, w, 1, "SAME"))
                pools = [tf.nn.max_pool2d(x, 3, 1, "SAME") for _ in range(readers)]
                x = tf.add_n([tf.nn.avg_pool2d(pool, 2, 1, "SAME") for pool in pools])
                kept.append(x)
            return take(tf.reduce_sum(x**2), xs, kept)

        return [g.numpy() for g in traced(x, weights)]

    expected = bits(lambda y, xs, kept: tf.gradients(y, xs))
    recomputed = bits(
        lambda y, xs, kept: gradients(
            y, xs, checkpoints=kept[:-1], min_checkpoint_size=0
        )
    )
    assert last_report().recomputed
    for a, e in zip(recomputed, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def test_tensorflow_adds_first_what_nothing_else_holds():
    # So a network in which the first two of three gradients are held elsewhere has
    # other bits whenever its ops run in another order, with plain gradients too.
    @tf.function(autograph=False)
    def add(x, held):
        terms = [tf.sin(x * number) for number in (1.0, 2.0, 3.0)]
        total = tf.add_n(terms)
        with tf.control_dependencies([total]):
            return total, [tf.cos(term) for term in terms[:held]]

    x = tf.constant(np.linspace(0.0, 7.0, 1000), tf.float32)
    a, b, c = (tf.sin(x * number) for number in (1.0, 2.0, 3.0))
    in_order, last_first = (a + b) + c, (c + b) + a
    assert np.any(in_order != last_first)
    for held, expected in enumerate((in_order, in_order, last_first)):
        np.testing.assert_array_equal(add(x, held)[0], expected)
