"""`tf.IndexedSlices` stay what they are."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.gradients.checking import assert_close, flat, forms, run
from tests.settings import needs_eager
from tests.thorough import crossed

v1 = tf.compat.v1
TABLE = np.cos(np.arange(80.0)).reshape(20, 4).astype(np.float32)


def deep(x):
    return tf.sin(tf.exp(tf.sin(x)))


def network(rows):
    """Return kept tensors, and what follows them."""
    first = deep(rows)
    second = deep(first)
    return [first, second], deep(second)


def one_lookup(table):
    return network(tf.gather(table, [3, 1, 3]))


def two_lookups(table):
    return network(tf.concat([tf.gather(table, [3, 1]), tf.gather(table, [1, 0])], 0))


def embedding(table):
    return network(tf.nn.embedding_lookup(table, [[3, 1], [3, 5]]))


def dense_too(table):
    return network(tf.matmul(tf.gather(table, [3, 1]), table, transpose_b=True))


LOOKUPS = {
    "one": (one_lookup, "slices"),
    "two": (two_lookups, "slices"),
    "embedding": (embedding, "slices"),
    "dense too": (dense_too, "tensor"),
}


def both(lookup, table, sources):
    kept, y = lookup(table)
    plain = tf.gradients(y, sources)
    ours = gradients(y, sources, checkpoints=kept, min_checkpoint_size=0)
    assert last_report().recomputed
    return plain, ours


@needs_eager
@pytest.mark.parametrize("name", LOOKUPS)
def test_variables_in_a_function(name):
    lookup, form = LOOKUPS[name]
    table = tf.Variable(TABLE)

    @tf.function
    def take():
        plain, ours = both(lookup, table, [table])
        assert forms(plain) == forms(ours) == [form]
        return flat(plain), flat(ours)

    plain, ours = take()
    assert_close([t.numpy() for t in ours], [t.numpy() for t in plain])


@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(LOOKUPS, ["reference", "resource", "tensor"], together=1),
)
def test_graphs(name, kind):
    lookup, form = LOOKUPS[name]
    with tf.Graph().as_default() as graph:
        table = tf.constant(TABLE)
        if kind != "tensor":
            table = v1.get_variable(
                "table", initializer=TABLE, use_resource=kind == "resource"
            )
        plain, ours = both(lookup, table, [table])
        assert forms(ours) == forms(plain)
        # A resource variable passed through `convert_to_tensor` is read whole.
        assert forms(plain) == [form]
        expected, actual = run(graph, (flat(plain), flat(ours)), optimize=True)
    assert_close(actual, expected)


def test_slices_of_something_recomputed():
    with tf.Graph().as_default() as graph:
        x = tf.constant(TABLE)
        made = deep(x)
        first = deep(tf.gather(made, [3, 1, 3]) * 2.0)
        second = deep(first)
        y = deep(second)
        kept = [made, first, second]
        plain = tf.gradients(y, [x, made])
        ours = gradients(y, [x, made], checkpoints=kept, min_checkpoint_size=0)
        assert forms(ours) == forms(plain)
        expected, actual = run(graph, (flat(plain), flat(ours)))
    assert_close(actual, expected)


def test_slices_as_a_gradient_keep_their_indices():
    with tf.Graph().as_default() as graph:
        x = tf.constant(TABLE)
        kept, y = network(x)
        rows = tf.cast(tf.round(tf.abs(y[:2, 0])), tf.int32)
        seed = tf.IndexedSlices(y[:2], rows, tf.constant([20, 4]))
        plain = tf.gradients(y, x, [seed])
        ours = gradients(y, x, [seed], checkpoints=kept, min_checkpoint_size=0)
        expected, actual = run(graph, (plain, ours))
    assert_close(actual, expected)
