"""Loops that take the rows of a batch one by one, and those that do not.

The reference is the same function, run eagerly on a batch of the new size.
"""

import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.errors import ModelError
from tests.model.refusal_tables import not_refused
from tests.settings import control_flow
from tests.thorough import crossed

W = np.random.default_rng(0).normal(size=(3, 3)).astype("f")


def size(x):
    return x.shape[0]


def counted(step, state, start=0, until=lambda i, n: i < n, by=1, steps=None):
    """Return a loop with a counter, which may fill an array."""

    def run(x):
        n = steps or size(x)
        first = start(n) if callable(start) else start
        loop = tf.while_loop(
            lambda i, _: until(i, n),
            lambda i, s: (i + by, step(x, i, s)),
            (first, state(x)),
        )
        return loop[1].stack() if isinstance(loop[1], tf.TensorArray) else loop[1]

    return run


def array(x, **options):
    return tf.TensorArray(tf.float32, size(x), element_shape=[3], **options)


def grown(x, i, rows):
    return tf.concat([rows, tf.nn.relu(x[i : i + 1])], 0)


def joined(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None, 3])
    n, start = size(x), (0, tf.zeros([0, 3]))
    step = lambda i, rows: (i + 1, grown(x, i, rows))  # noqa: E731
    return tf.while_loop(lambda i, _: i < n, step, start, shape_invariants=shapes)[1]


def concatenated(x):
    n, parts = size(x), tf.TensorArray(tf.float32, size(x), element_shape=[1, 3])
    step = lambda i, a: (i + 1, a.write(i, x[i : i + 1] * 2.0))  # noqa: E731
    return tf.while_loop(lambda i, _: i < n, step, (0, parts))[1].concat()


def detected(x):
    def boxes_of(row):
        boxes = tf.reshape(tf.concat([row, row, row, row + 1], 0), [3, 4])
        kept, _ = tf.image.non_max_suppression_padded(
            boxes, row, 3, pad_to_max_output_size=True
        )
        return tf.gather(row, kept)

    return tf.map_fn(boxes_of, x)


def mapped(f, *others):
    """Return a map over the rows and those of other tensors."""

    def run(x):
        elems = (x, *(other(x) for other in others))
        return tf.map_fn(lambda e: f(*e), elems, fn_output_signature=tf.float32)

    return run


def at_number(x):
    return tf.map_fn(
        lambda i: x[i] * 2.0, tf.range(size(x)), fn_output_signature=tf.float32
    )


product = lambda a, b: a * b  # noqa: E731
FORMS = {
    "map": mapped(lambda r: tf.nn.relu(tf.linalg.matvec(W, r)) + tf.reduce_sum(r)),
    "map in turn": lambda x: tf.map_fn(tf.nn.relu, x, parallel_iterations=1),
    "map of maps": lambda x: tf.map_fn(lambda r: tf.map_fn(tf.square, r), x),
    "map of two": mapped(product, tf.nn.relu),
    "map of ones": mapped(product, tf.ones_like),
    "map of equal rows": mapped(product, lambda x: tf.ones([size(x), 3]) * 2.0),
    "map of numbers": at_number,
    "row in a row": lambda x: tf.map_fn(lambda r: tf.expand_dims(r, 0) * 2.0, x),
    "boxes": detected,
    "indexed": counted(lambda x, i, a: a.write(i, tf.nn.relu(x[i])), array),
    "gathered": counted(lambda x, i, a: a.write(i, tf.gather(x, i)), array),
    "greater": counted(
        lambda x, i, a: a.write(i, x[i]), array, until=lambda i, n: n > i
    ),
    "growing list": counted(
        lambda x, i, a: a.write(i, x[i]), lambda x: array(x, dynamic_size=True)
    ),
    "concatenated": concatenated,
    "joined": joined,
    "two of three axes": lambda x: tf.map_fn(tf.square, x[:, :2]),
    # These run as often as they did.
    "over the other axis": lambda x: tf.transpose(
        tf.map_fn(tf.square, tf.transpose(x, [1, 0])), [1, 0]
    ),
    "column": counted(lambda x, i, s: s + x[:, i, None], tf.zeros_like, steps=3),
    "slice of columns": counted(
        lambda x, i, s: s * tf.slice(x, [0, i], [-1, 1]), tf.ones_like, steps=3
    ),
    "gathered column": counted(
        lambda x, i, s: s * tf.gather(x, [i], axis=1), tf.ones_like, steps=3
    ),
    "from the end": counted(lambda x, i, s: s + x[..., i, None], tf.ones_like, steps=3),
    "fixed number": counted(lambda x, i, s: s * 0.5 + x, tf.zeros_like, steps=3),
}
PAIRS = {"one to five": (1, 5), "five to any": (5, None), "three to one": (3, 1)}


def opened(f, rows):
    signature = [tf.TensorSpec([rows, 3], name="x")]
    traced = tf.function(lambda x: {"y": f(x)}, signature, autograph=False)
    return model.open(traced)


def batch(rows):
    return np.random.default_rng(rows).normal(size=(rows, 3)).astype("f")


REFUSED = {
    "scan": (
        lambda x: tf.scan(lambda a, r: a + r, x, tf.zeros(3)),
        "rows of the batch depend",
    ),
    "fold": (
        lambda x: tf.foldl(lambda a, r: a + r, x),
        "the shape does not tell which row",
    ),
    "backwards": (
        counted(
            lambda x, i, a: a.write(i, x[i]),
            array,
            start=lambda n: n - 1,
            until=lambda i, n: i >= 0,
            by=-1,
        ),
        "'while' (StatelessWhile)",
    ),
    "two of three": (
        counted(lambda x, i, a: a.write(i, x[i]), array, steps=2),
        "does not compare their number with 3",
    ),
    "rows of their own": (
        mapped(product, lambda x: tf.constant(W[: size(x)])),
        "has rows of its own for a batch of 3",
    ),
    "own tensor": (
        mapped(lambda r, i: r * tf.constant(W)[i], lambda x: tf.range(size(x))),
        "takes a row of a constant for each row of the batch",
    ),
    "unstacked": (lambda x: tf.stack(tf.unstack(x)), "'unstack' (Unpack)"),
}


def test_other_loops_over_rows_are_refused_by_name():
    wrong = {}
    for name, (form, message) in REFUSED.items():
        m = opened(form, 3)
        wrong |= not_refused(
            ModelError, [(name, partial(m.set_batch_size, 5), re.escape(message))], m
        )
    one = opened(lambda x: tf.vectorized_map(tf.nn.relu, x), 1)
    case = "vectorized", partial(one.set_batch_size, 5, verify=False), "it takes row 0"
    assert wrong | not_refused(ModelError, [case], unchanged=one) == {}


@pytest.mark.parametrize(("name", "pair"), crossed(FORMS, PAIRS, together=1))
def test_a_loop_over_rows_runs_for_each(name, pair):
    form, (old, new) = FORMS[name], PAIRS[pair]
    m = opened(form, old)
    for verify in (True, False):
        changed = m.set_batch_size(new, verify=verify)
        for rows in (1, 4) if new is None else (new,):
            x = batch(rows)
            expected = form(tf.constant(x))
            np.testing.assert_allclose(changed.run(x=x)["y"], expected, rtol=1e-6)


def version_1(form, rows):
    with control_flow(1), tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [rows, 3], "x")
        tf.identity(form(x), name="y")
    return model.open(graph, inputs=["x:0"], outputs=["y:0"])


REFUSED_IN_VERSION_1 = {
    "map of ones": "is filled with constants, for each row",
    "map of equal rows": "is filled with constants, for each row",
    "map of numbers": "the loop 'map/while/while_context' takes rows",
}


def test_other_loops_of_version_1_are_refused_by_name():
    wrong = {}
    for name in ("backwards", "two of three", "rows of their own", "own tensor"):
        m = version_1(REFUSED[name][0], 3)
        change = partial(m.set_batch_size, 5, verify=False)
        case = name, change, "the loop '(map/)?while/while_context' takes"
        wrong |= not_refused(ModelError, [case], unchanged=m)
    assert wrong == {}


@pytest.mark.parametrize("pair", PAIRS)
def test_loops_of_version_1(pair):
    old, new = PAIRS[pair]
    wrong = {}
    for name, form in FORMS.items():
        m = version_1(form, old)
        if name in REFUSED_IN_VERSION_1:
            change = partial(m.set_batch_size, new, verify=False)
            case = name, change, REFUSED_IN_VERSION_1[name]
            wrong |= not_refused(ModelError, [case], unchanged=m)
            continue
        x = batch(new or 4)
        found = m.set_batch_size(new, verify=False).run(x=x)["y"]
        expected = form(tf.constant(x)).numpy()
        if found.shape != expected.shape or not np.allclose(found, expected):
            wrong[name] = found, expected
    assert wrong == {}
