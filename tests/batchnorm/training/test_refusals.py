"""What is not folded for training: the reason, the op, and a graph as it was."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.errors import FoldError
from tests.batchnorm.training.nets import EPSILON, update, variable
from tests.select import tables
from tests.settings import edges

v1 = tf.compat.v1
CHANNELS = 4


def _conv(x):
    return tf.nn.conv2d(x, variable(np.ones((1, 1, 3, CHANNELS))), 1, "SAME")


def _moments(y):
    mean, variance = tf.nn.moments(y, [0, 1, 2])
    return tf.identity(mean, "mean"), tf.identity(variance, "variance")


def _norm(y, mean, variance, name="norm"):
    ones = tf.ones([CHANNELS])
    return tf.nn.batch_normalization(
        y, mean, variance, ones, ones * 2, EPSILON, name=name
    )


def _moving():
    return variable(np.ones(CHANNELS), trainable=False)


def _nothing_is_kept(x):
    y = _conv(x)
    return _norm(y, *_moments(y))


def _in_training(y, name="norm"):
    mean, variance = _moments(y)
    update(_moving(), variance, True)
    return _norm(y, mean, variance, name)


def _no_moving_mean(x):
    return _in_training(_conv(x))


def _last_batch_alone(x):
    y = _conv(x)
    mean, variance = _moments(y)
    v1.assign(_moving(), variance)
    update(_moving(), mean, True)
    return _norm(y, mean, variance)


def _two_variables(x):
    y = _conv(x)
    mean, variance = _moments(y)
    for _ in range(2):
        update(_moving(), variance, True)
    return _norm(y, mean, variance)


def _no_layer(x):
    return _in_training(tf.abs(_conv(x)))


def _read_within(x):
    y = _conv(x)
    mean, variance = _moments(y)
    for statistic in (mean, variance):
        update(_moving(), statistic, True)
    z = _norm(y, mean, variance)
    scaled = next(t for t in z.op.inputs if t.shape.rank == 4)
    return z + tf.abs(scaled, name="reader")


def _two_means(x):
    y = _conv(x)
    mean, variance = _moments(y)
    update(_moving(), variance, True)
    return _norm(y, mean + tf.reduce_mean(tf.abs(y), [0, 1, 2]), variance)


CASES = {
    "nothing is kept": (_nothing_is_kept, "no moving variance is kept", None),
    "no moving mean": (_no_moving_mean, "no moving mean is kept", 2),
    "last batch": (_last_batch_alone, "no moving average", None),
    "two variables": (_two_variables, "several variables: 'Variable", None),
    "no layer": (_no_layer, "(Abs) stands between the norm and any layer", None),
    "read within": (_read_within, "reads what is computed within", None),
    "two means": (_two_means, "shifts by 2 means", None),
}


def _graph(build):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, None, None, 3])
        tf.nn.relu(build(x), name="result")
    return graph


def test_norms_are_refused():
    wrong = {}
    for case, (build, reason, delay) in CASES.items():
        graph = _graph(build)
        before = edges(graph)
        options = {"is_training": True, "freeze_batch_norm_delay": delay}
        report = fold_batch_norms(graph, **options)
        assert report.folded == ()
        (entry,) = report.refused
        if reason not in entry.reason:
            wrong[case] = entry
        assert graph.get_operation_by_name(entry.op)
        assert entry.norm == "norm"
        assert report.step is None
        with pytest.raises(FoldError, match="nothing was changed"):
            fold_batch_norms(graph, **options, strict=True)
        assert edges(graph) == before, case
    assert wrong == {}


def test_without_a_freeze_no_moving_mean_is_needed():
    graph = _graph(_no_moving_mean)
    assert len(fold_batch_norms(graph, is_training=True).folded) == 1


def test_scopes():
    for scope in ("elsewhere", "nor", "norm/inner"):
        graph = _graph(_no_moving_mean)
        before = edges(graph)
        report = fold_batch_norms(graph, is_training=True, scope=scope)
        assert f"is outside of scope '{scope}'" in report.refused[0].reason
        assert edges(graph) == before
        # Nobody asked for it.
        fold_batch_norms(graph, is_training=True, scope=scope, strict=True)
    for scope in ("norm", "norm/", ""):
        graph = _graph(_no_moving_mean)
        report = fold_batch_norms(graph, is_training=True, scope=scope)
        assert [entry.norm for entry in report.folded] == ["norm"]


def _fused_in_training(y, name):
    ones = tf.ones([CHANNELS])
    z, _, variance = v1.nn.fused_batch_norm(y, ones, ones, is_training=True, name=name)
    update(_moving(), variance, True)
    return z


def _fixed(y, name):
    ones = tf.ones([CHANNELS])
    return _norm(y, ones, ones, name)


@pytest.mark.parametrize("second", [_in_training, _fused_in_training, _fixed])
@pytest.mark.parametrize("first", [_in_training, _fused_in_training])
def test_a_norm_behind_a_norm_in_training(first, second):
    """The first one depends on the batch, so nothing goes through it."""
    graph = _graph(lambda x: second(first(_conv(x), "one"), "two"))
    report = fold_batch_norms(graph, is_training=True)
    assert [entry.norm for entry in report.folded] == ["one"]
    assert [entry.norm for entry in report.refused] == ["two"]
    assert "depends on the batch" in report.refused[0].reason


def test_at_inference():
    graph = _graph(_no_moving_mean)
    before = edges(graph)
    report = fold_batch_norms(graph)
    assert "assume_inference=True" in report.refused[0].reason
    assert edges(graph) == before
    # A training fold leaves no norm.
    fold_batch_norms(graph, is_training=True)
    before = edges(graph)
    report = fold_batch_norms(graph)
    assert (report.folded, report.refused) == ((), ())
    assert edges(graph) == before
    fused = lambda x: _fused_in_training(_conv(x), "norm")  # noqa: E731
    for build in (_nothing_is_kept, _no_moving_mean, _two_variables, fused):
        graph = _graph(build)
        before = edges(graph)
        (entry,) = fold_batch_norms(graph, assume_inference=True).refused
        assert "no moving statistics are known" in entry.reason, entry
        assert edges(graph) == before


ARGUMENTS = """
fold(freeze_batch_norm_delay=2) => FoldError: pass is_training=True
train(freeze_batch_norm_delay=-1) => FoldError: is -1; pass 0 or more
train(freeze_batch_norm_delay=2.0)
    => ArgumentTypeError: a number of steps or None, not; float
train(freeze_batch_norm_delay=True) => ArgumentTypeError: a number of steps
train(step=3) => FoldError: pass freeze_batch_norm_delay= as well
train(freeze_batch_norm_delay=2, step=3) => ArgumentTypeError: resource variable; int
train(freeze_batch_norm_delay=2, step=v) => ArgumentTypeError: is of type int32
train(assume_inference=True) => FoldError: exclude each other
train(statistics='float') => FoldError: pass 'exact' or 'one_pass'
train(statistics=None)
    => ArgumentTypeError: 'exact' or 'one_pass', not builtins.NoneType
fold(statistics='one_pass') => FoldError: statistics is for training
"""


def test_arguments():
    graph = _graph(_no_moving_mean)
    tables.check_refusals(
        ARGUMENTS,
        SimpleNamespace(graph=graph, v=tf.Variable(0)),
        fold=partial(fold_batch_norms, graph),
        train=partial(fold_batch_norms, graph, is_training=True),
    )
