"""Updates of reference variables of version 1, which are done where others read."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, order_updates
from tests import settings
from tests.thorough import crossed

v1 = tf.compat.v1
WIDTH, ROWS, STEPS = 16, 8, 3
DATA = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")


def chain(x, ws):
    """Layers of which each weight is read twice."""
    for w in [*ws, *ws]:
        x = tf.tanh(tf.matmul(x, w))
    return x


def loop(x, ws):
    def turn(i, x):
        return i + 1, chain(x, ws[1:])

    x = tf.tanh(tf.matmul(x, ws[0]))
    return tf.while_loop(lambda i, x: i < 3, turn, (0, x))[1]


def branch(x, ws):
    x = tf.tanh(tf.matmul(x, ws[0]))
    taken = tf.reduce_sum(tf.abs(x)) > 0.0
    x = tf.cond(taken, lambda: chain(x, ws), lambda: x)
    return tf.tanh(tf.matmul(x, ws[0]))


def lookup(x, ws):
    rows = tf.nn.embedding_lookup(ws[0], [0, 3, 3, 1, 2, 5, 7, 0])
    return chain(x + rows, ws[1:])


def handed_on(x, ws):
    """A loop returns a weight, and two weights have the same gradient."""
    shown = tf.while_loop(
        lambda i, x, w: i < 3,
        lambda i, x, w: (i + 1, tf.tanh(tf.matmul(x, w)), w),
        (0, x, tf.convert_to_tensor(ws[0])),
    )[2]
    both = tf.matmul(tf.tanh(tf.matmul(x, shown)), ws[1] + ws[2])
    return chain(both, [tf.stop_gradient(ws[2]), ws[3]])


def descent(slopes, ws):
    dense = map(tf.convert_to_tensor, slopes)
    return [w.assign_sub(0.5 * g) for g, w in zip(dense, ws, strict=True)]


def applied(optimizer, *options):
    def update(slopes, ws):
        pairs = list(zip(slopes, ws, strict=True))
        return optimizer(0.5, *options).apply_gradients(pairs)

    return update


UPDATES = {
    "descent": descent,
    "sgd": applied(v1.train.GradientDescentOptimizer),
    "momentum": applied(v1.train.MomentumOptimizer, 0.9),
    "adam": applied(v1.train.AdamOptimizer),
    "adagrad": applied(v1.train.AdagradOptimizer),
    "rmsprop": applied(v1.train.RMSPropOptimizer),
    "ftrl": applied(v1.train.FtrlOptimizer),
}


def trained(network, update, take, *, by_reference, ordered=False):
    """Return the weights after some steps."""
    with tf.Graph().as_default() as graph:
        rng = np.random.default_rng(1)
        start = rng.normal(size=(4, WIDTH, WIDTH)).astype("f") / 4
        ws = [
            v1.get_variable(f"w{i}", initializer=w, use_resource=not by_reference)
            for i, w in enumerate(start)
        ]
        x = v1.placeholder(tf.float32, [ROWS, WIDTH])
        loss = tf.reduce_sum(tf.sin(3.0 * network(x, ws)))
        train = UPDATES[update](take(loss, ws), ws)
        if ordered:
            order_updates(train, loss)
        with v1.Session(graph=graph) as session:
            session.run(v1.global_variables_initializer())
            for _ in range(STEPS):
                session.run([train, loss], {x: DATA})
            return session.run(ws)


@pytest.mark.parametrize(
    ("network", "update", "how"),
    crossed(
        [chain, loop, branch, lookup, handed_on],
        [*UPDATES],
        [(1, False, "memory"), (2, False, None), (1, True, "speed")],
        together=1,
    ),
)
def test_they_wait_for_what_reads(network, update, how):
    version, ordered, checkpoints = how
    take = partial(gradients, checkpoints=checkpoints, min_checkpoint_size=1)
    with settings.control_flow(version):
        expected = trained(network, update, tf.gradients, by_reference=False)
        found = trained(network, update, take, by_reference=True, ordered=ordered)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
