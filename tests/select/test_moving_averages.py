"""Which updates of a variable count as a moving average, for each client that asks."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.select.networks.moving_averages import (
    MovingStatistics,
    NoAverage,
    moving_average,
    moving_averages,
)
from geutil.select.networks.provenance import Origins


def assigned(v, s):
    return v.assign(v * 0.9 + s * 0.1)


def subtracted(v, s):
    return v.assign_sub((v - s) * 0.1)


def divided(v, s):
    return v.assign_sub((v - s) / 10.0)


def chosen(v, s):
    return v.assign(tf.where(v > 0.0, v * 0.9 + s * 0.1, v))


def squared(v, s):
    return v.assign(tf.square(s))


def replaced(v, s):
    return v.assign(s)


# By update: whether it counts for folds for inference, folds in training, stripping.
ACCEPTED = {
    assigned: (True, True, True),
    subtracted: (True, True, True),
    divided: (True, True, False),
    chosen: (True, False, True),
    squared: (True, False, False),
    replaced: (True, False, False),
}


@pytest.mark.parametrize("update", ACCEPTED, ids=lambda update: update.__name__)
def test_what_each_client_accepts(update):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [8, 3])
        v = tf.compat.v1.Variable(np.float32([1, 2, 3]), use_resource=True)
        statistic = tf.reduce_mean(x, [0])
        update(v, statistic)
    origins = Origins(graph)
    followed = MovingStatistics(graph, origins).of([statistic], None)
    of_one = moving_average(statistic, "mean", (), origins)
    in_graph = moving_averages(graph)
    found = (followed, not isinstance(of_one, NoAverage), in_graph)
    assert tuple(map(bool, found)) == ACCEPTED[update]
    for average in (*(followed or ()), *in_graph):
        assert average.statistic is statistic
        assert average.variable is v.handle
