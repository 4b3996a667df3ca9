"""`tf.IndexedSlices` stay what they are."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, last_report
from tests.gradients.checking import TAPES, assert_close, deep, flat, forms, run, unlike
from tests.settings import needs_eager

v1 = tf.compat.v1
TABLE = np.cos(np.arange(80.0)).reshape(20, 4).astype(np.float32)


def network(rows):
    """Return kept tensors, and what follows them."""
    first = deep(rows)
    second = deep(first)
    return [first, second], deep(second)


def one_lookup(table):
    return network(tf.gather(table, [3, 1, 3]))


def four_lookups(table):
    rows = [tf.tanh(tf.gather(table, [i, i + 1, 2 * i])) for i in range(4)]
    return network(tf.concat(rows, 0))


def two_widths(table):
    """Look up by indices of two widths."""
    rows = tf.gather(table, tf.constant([3, 1], tf.int64))
    return network(rows + tf.gather(table, [1, 0]))


def embedding(table):
    return network(tf.nn.embedding_lookup(table, [[3, 1], [3, 5]]))


def dense_too(table):
    return network(tf.matmul(tf.gather(table, [3, 1]), table, transpose_b=True))


LOOKUPS = {
    "one": (one_lookup, "slices"),
    "four": (four_lookups, "slices"),
    "of two widths": (two_widths, "slices"),
    "embedding": (embedding, "slices"),
    "dense too": (dense_too, "tensor"),
}


def each_way(tables):
    """Return plain gradients, ours and those by tapes, by tables for lookups."""
    kept, ys = [], []
    for (lookup, _), table in zip(LOOKUPS.values(), tables, strict=True):
        with tf.name_scope(lookup.__name__):
            tensors, y = lookup(table)
        kept += tensors
        ys.append(y)
    found = [
        tf.gradients(ys, tables),
        gradients(ys, tables, checkpoints=kept, min_checkpoint_size=0),
    ]
    report = last_report()
    found += [gradients(ys, tables, checkpoints=None, engine=tape) for tape in TAPES]
    again = {op.name.partition("/")[0] for op in report.recomputed}
    assert {lookup.__name__ for lookup, _ in LOOKUPS.values()} <= again
    for taken in found:
        assert forms(taken) == [form for _, form in LOOKUPS.values()]
    # A tape has the rows in another order.
    dense = [[*map(tf.convert_to_tensor, taken)] for taken in (found[0], *found[2:])]
    return [
        {kind: flat([g]) for kind, g in zip(LOOKUPS, taken, strict=True)}
        for taken in (*found[:2], *dense)
    ]


def assert_alike(plain, ours, dense, *taped):
    assert unlike(ours, plain) == {}
    assert [unlike(slopes, dense) for slopes in taped] == [{}, {}]


@needs_eager
def test_variables_in_a_function():
    tables = [tf.Variable(TABLE) for _ in LOOKUPS]
    assert_alike(*tf.function(lambda: each_way(tables), autograph=False)())


@pytest.mark.parametrize("kind", ["reference", "resource", "tensor"])
def test_graphs(kind, graph):
    if kind == "tensor":
        tables = [tf.constant(TABLE) for _ in LOOKUPS]
    else:
        # A resource variable passed through `convert_to_tensor` is read whole.
        tables = [
            v1.get_variable(
                f"table{i}", initializer=TABLE, use_resource=kind == "resource"
            )
            for i in range(len(LOOKUPS))
        ]
    assert_alike(*run(graph, each_way(tables), optimize=True))


@pytest.mark.parametrize("kind", ["values", "a gradient"])
def test_slices_of_something_recomputed(kind, graph):
    x = tf.constant(TABLE)
    if kind == "values":
        made = deep(x)
        kept, y = network(tf.gather(made, [3, 1, 3]) * 2.0)
        arguments, kept = (y, [x, made]), [made, *kept]
    else:
        kept, y = network(x)
        rows = tf.cast(tf.round(tf.abs(y[:2, 0])), tf.int32)
        seed = tf.IndexedSlices(y[:2], rows, tf.constant([20, 4]))
        arguments = y, x, [seed]
    plain = tf.gradients(*arguments)
    ours = gradients(*arguments, checkpoints=kept, min_checkpoint_size=0)
    assert forms(ours) == forms(plain)
    expected, actual = run(graph, (flat(plain), flat(ours)))
    assert_close(actual, expected)
