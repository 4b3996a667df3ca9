"""What Grappler may join, sums left to chance, and the bits of plain gradients.

That bits of whole networks are the same is tested in a process with deterministic ops
(`apart/test_determinism.py`).
"""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.gradients.checking import assert_same, run, unlike
from tests.thorough import crossed


def chain_of_sines():
    """Return the gates of a chain of sines that is recomputed in three segments."""
    with tf.Graph().as_default() as graph:
        x = h = tf.random.stateless_uniform([8], [1, 2])
        made = []
        for _ in range(9):
            h = tf.sin(h)
            made.append(h)
        gradients(h, x, checkpoints=[made[2], made[5]])
    return [op for op in graph.get_operations() if "/gate" in op.name]


def test_products_that_may_be_joined_are_not_awaited(request):
    """Grappler joins a product with its only reader, unless something waits for it."""

    def joined(gate):
        return [
            op
            for op in gate.control_inputs
            if op.type == "Mul" and len(op.outputs[0].consumers()) == 1
        ]

    assert any(map(joined, chain_of_sines()))
    request.getfixturevalue("deterministic")
    gates = chain_of_sines()
    assert gates and all(gate.control_inputs for gate in gates)
    assert not any(map(joined, gates))


@pytest.mark.usefixtures("deterministic")
def test_what_reads_a_shape_keeps_nothing_apart(graph):
    image = tf.random.stateless_uniform([1, 8, 8, 2], [1, 2])
    weights = tf.random.stateless_uniform([3, 3, 2, 2], [3, 4])
    padded = tf.pad(tf.sin(image), [[0, 0], [1, 1], [1, 1], [0, 0]])
    y = tf.nn.conv2d(padded, weights, 1, "VALID")
    kept = tf.sin(y)
    gradients(tf.sin(tf.sin(kept)), [weights], checkpoints=[y, kept])
    readers = [op for op in graph.get_operations() if op in padded.consumers()]
    # The gradient asks for the shapes of what the convolution reads.
    kinds = [op.type for op in readers if "apart" not in op.name]
    assert sorted(kinds) == ["Conv2D", "ShapeN"]
    assert "recomputed/apart" in {op.name for op in readers}


def readers_of_values(graph):
    """Return how many ops read each tensor of a graph, its shape apart."""
    return {
        t.name: sum("Shape" not in op.type for op in t.consumers())
        for op in graph.get_operations()
        for t in op.outputs
    }


@pytest.mark.usefixtures("deterministic")
def test_only_what_had_several_readers_is_parted():
    def built(take):
        with tf.Graph().as_default() as graph:
            x = tf.random.stateless_uniform([16, 16], [1, 2])
            weights = tf.unstack(tf.random.stateless_uniform([4, 16, 16], [3, 4]))
            y, parts = products(x, weights)
            forward = [op.name for op in graph.get_operations()]
            take(y, weights, parts)
        return graph, forward

    plain, forward = built(lambda y, xs, _: tf.gradients(y, xs))
    parted, _ = built(lambda y, xs, parts: gradients(y, xs, checkpoints=parts[:-1]))
    several = {name for name, count in readers_of_values(plain).items() if count > 1}
    apart = [op for op in parted.get_operations() if "/apart" in op.name]
    read = {op.inputs[0].name.removeprefix("recomputed/") for op in apart}
    assert read and read <= several
    # Both originals and copies, of which one reader is left.
    copies = {op.inputs[0].name.startswith("recomputed/") for op in apart}
    assert copies == {True, False}
    # The originals' own edges are left alone.
    for name in forward:
        ops = (graph.get_operation_by_name(name) for graph in (plain, parted))
        before, after = ([t.name for t in op.inputs] for op in ops)
        assert before == after, name


SIDE = 32
PARTS = {
    # The gradient of a product does not read what it yields, that of a tanh does.
    "products": tf.matmul,
    "activations": lambda x, w: tf.tanh(tf.matmul(x, w)),
    "one buffer, two tensors": lambda x, w: tf.reshape(
        tf.tanh(tf.matmul(x, w)), [SIDE, SIDE]
    ),
}
ORDERS = [(0, 1, 2), (0, 0, 1), (0, 1, 2, 0)]
# Places among the terms, their sum and what follows.
KEPT = [(3,), (4,), (0, 1), (0, 4), (1, 4), (2, 4), (0, 1, 4), (0, 1, 5)]


def network(parts, order):
    """Return what is differentiated, by what, and what may be kept."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=[SIDE, SIDE]), tf.float32)
    weights = tf.constant(generator.normal(size=[3, SIDE, SIDE]) / 6.0, tf.float32)
    x = tf.sin(x)
    terms = [PARTS[parts](x, w) for w in tf.unstack(weights)]
    total = tf.add_n([terms[place] for place in order])
    first = tf.sin(total)
    second = tf.sin(first)
    y = tf.sin(tf.sin(second))
    return y, x, [*terms, total, first, second]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("parts", "order"), crossed(PARTS, ORDERS, together=1))
def test_sums_begin_with_the_term_they_begin_with_otherwise(parts, order):
    def values(take):
        with tf.Graph().as_default() as graph:
            y, x, tensors = network(parts, order)
            slopes = take(y, x, tensors)
            return [v for o in (False, True) for v in run(graph, slopes, optimize=o)]

    expected, recomputed, wrong = values(lambda y, x, _: tf.gradients(y, x)), [], {}
    for kept in KEPT:
        actual = values(
            lambda y, x, tensors, kept=kept: gradients(
                y, x, checkpoints=[tensors[i] for i in kept]
            )
        )
        recomputed += last_report().recomputed
        wrong |= unlike({str(kept): actual}, {str(kept): expected}, assert_same)
    assert wrong == {}
    assert recomputed


def recomputed_sums(count):
    with tf.Graph().as_default():
        x = tf.random.stateless_uniform([8], [1, 2])
        start = tf.sin(x)
        total = tf.add_n([tf.sin(start) for _ in range(count)])
        end = tf.sin(total)
        gradients(tf.sin(tf.sin(end)), x, checkpoints=[start, end])
    return [op.name for op in last_report().recomputed if op.op_type == "AddN"]


def test_all_sums_run_again_where_bits_do_not_count_else_those_of_two(request):
    assert recomputed_sums(2)
    assert recomputed_sums(3)
    request.getfixturevalue("deterministic")
    assert recomputed_sums(2)
    assert not recomputed_sums(3)
    (reason,) = (k.reason for k in last_report().kept if k.op_type == "AddN")
    assert "left to chance" in reason


def products(x, weights):
    """Return the end and parts of a network in which Grappler may join products."""
    parts = []
    for w in weights:
        h = tf.matmul(x, w)
        # The gradient reads the first product, which keeps it apart.
        x = h * w[0] * tf.sigmoid(tf.sin(h))
        parts.append(x)
    return tf.reduce_sum(x**2), parts


def pools(activation, readers, x, weights):
    """Return the end and parts of convolutions whose windows overlap in pools."""
    parts = []
    for w in weights:
        x = activation(tf.nn.conv2d(x, w, 1, "SAME"))
        pooled = [tf.nn.max_pool2d(x, 3, 1, "SAME") for _ in range(readers)]
        x = tf.add_n([tf.nn.avg_pool2d(pool, 2, 1, "SAME") for pool in pooled])
        parts.append(x)
    return tf.reduce_sum(x**2), parts


def bits(network, shape, weight_shape, *, plain=False):
    """Return the gradients of a network, whose parts but the last are kept."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=shape), tf.float32)
    weights = tf.constant(generator.normal(size=weight_shape) / 8.0, tf.float32)

    # Weights one by one: the order of a sum's terms may be another as well (see below).
    @tf.function(autograph=False)
    def traced(x, *weights):
        y, parts = network(x, weights)
        if plain:
            return tf.gradients(y, weights)
        kept = {"checkpoints": parts[:-1], "min_checkpoint_size": 0}
        return gradients(y, weights, **kept)

    return [g.numpy() for g in traced(x, *tf.unstack(weights))]


@pytest.mark.usefixtures("deterministic")
def test_what_grappler_does_not_join_with_plain_gradients(monkeypatch):
    given = products, (64, 64), (4, 64, 64)
    expected = bits(*given, plain=True)
    assert_same(bits(*given), expected)
    monkeypatch.setattr("geutil.gradients.construction.keep_apart", lambda *args: None)
    assert np.any(np.not_equal(bits(*given), expected))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("activation", [tf.identity, tf.nn.relu])
def test_gradients_of_pools_that_run_again(activation, readers):
    """Of windows that overlap, oneDNN adds in another order than the other kernel."""
    network = partial(pools, activation, readers)
    given = network, (4, 24, 24, 8), (3, 3, 3, 8, 8)
    expected = bits(*given, plain=True)
    assert_same(bits(*given), expected)
    assert last_report().recomputed


@pytest.mark.usefixtures("deterministic")
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
