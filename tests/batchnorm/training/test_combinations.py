"""Folds for training compute what the graph computed, over all combinations."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf

from tests.batchnorm.training.nets import (
    LAYERS,
    STATISTICS,
    Net,
    close,
    fold_scope,
    ops_by_type,
)
from tests.thorough import crossed

v1 = tf.compat.v1


class Trial:
    """Nets in three forms in one graph: folded, as they were, and deployed."""

    def __init__(self, layer, fused, delay, statistics, resource=True):
        self.graph, self.delay = tf.Graph(), delay
        self.feeds, self.folded, self.unfolded, self.deployed = {}, [], [], []
        self.moving, self.moving_unfolded = [], []
        with self.graph.as_default():
            options = itertools.product((False, True), repeat=2)
            nets = [
                Net(layer, fused, scale, bias, seed, resource)
                for seed, (scale, bias) in enumerate(options)
            ]
            for net in nets:
                self._build(net)
            self.report = fold_scope(self.graph, delay, statistics)
            self.values = [self._values(*parts) for parts in self.folded]
            self.expected = [self._values(*parts) for parts in self.unfolded]
            self.frozen = [self._values(*parts) for parts in self.deployed]

    def _build(self, net):
        values, x = net.input()
        self.feeds[x] = values
        averages, own = net.averages(), net.averages()
        self.moving += [averages.mean, averages.variance]
        self.moving_unfolded += [own.mean, own.variance]
        with tf.name_scope("folded/net"):
            heads, updates = net.trained(x, averages)
            self.folded.append((net, x, heads, updates))
        with tf.name_scope("unfolded/net"):
            heads, updates = net.trained(x, own)
            self.unfolded.append((net, x, heads, updates))
        if self.delay is None:
            return
        with tf.name_scope("deployed/net"):
            self.deployed.append((net, x, net.deployed(x, averages), []))

    def _values(self, net, x, heads, updates):
        gradients = tf.gradients(net.loss(heads), [x, *net.variables])
        return [*heads, *gradients], updates

    def run(self, session, *forms):
        """Run a step, and return the values of each form."""
        return session.run(
            [([v for v, _ in form], [u for _, u in form]) for form in forms],
            self.feeds,
        )


def _session(graph):
    with graph.as_default():
        start = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(start)
    return session


def _all_close(actual, expected):
    for values, others in zip(actual[0], expected[0], strict=True):
        close(values, others)


FUSED = {"unfused": False, "fused": True}


@pytest.mark.parametrize(
    ("layer", "fused", "statistics"), crossed(LAYERS, FUSED, STATISTICS)
)
def test_without_a_freeze(layer, fused, statistics):
    trial = Trial(layer, FUSED[fused], None, statistics)
    assert len(trial.report.folded) == 4
    assert not trial.report.refused or _all_outside(trial.report)
    assert trial.report.step is None
    # Nothing counts, and nothing chooses.
    assert not ops_by_type(trial.graph, "AssignAddVariableOp")
    assert not ops_by_type(trial.graph, "GreaterEqual")
    with _session(trial.graph) as session:
        for _ in range(2):
            actual, expected = trial.run(session, trial.values, trial.expected)
            _all_close(actual, expected)
            close(*session.run([trial.moving, trial.moving_unfolded]))


@pytest.mark.parametrize(
    ("fused", "layer", "statistics"), crossed(FUSED, LAYERS, STATISTICS)
)
def test_with_a_freeze(layer, fused, statistics):
    trial = Trial(layer, FUSED[fused], 3, statistics)
    assert len(trial.report.folded) == 4
    # Nets share one counter.
    assert len(ops_by_type(trial.graph, "AssignAddVariableOp")) == 1
    with _session(trial.graph) as session:
        for step in range(2):
            assert session.run(trial.report.step) == step
            actual, expected = trial.run(session, trial.values, trial.expected)
            _all_close(actual, expected)
            close(*session.run([trial.moving, trial.moving_unfolded]))
        moving = session.run(trial.moving)
        for step in range(2, 4):
            actual, expected = trial.run(session, trial.values, trial.frozen)
            _all_close(actual, expected)
            assert session.run(trial.report.step) == step + 1
            for one, other in zip(session.run(trial.moving), moving, strict=True):
                assert (one == other).all()


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_ref_variables(fused, statistics):
    trial = Trial("conv", fused, 3, statistics, resource=False)
    assert ops_by_type(trial.graph, "VariableV2")
    with _session(trial.graph) as session:
        for _ in range(2):
            actual, expected = trial.run(session, trial.values, trial.expected)
            _all_close(actual, expected)
            close(*session.run([trial.moving, trial.moving_unfolded]))
        actual, expected = trial.run(session, trial.values, trial.frozen)
        _all_close(actual, expected)
        close(*session.run([trial.moving, trial.moving_unfolded]))


@pytest.mark.parametrize("statistics", STATISTICS)
def test_ref_variables_are_read_before_they_are_updated(statistics):
    """Who reads a ref variable late may see what was assigned to it."""
    trial = Trial("conv", False, None, statistics, resource=False)
    waiting = [
        op
        for op in ops_by_type(trial.graph, "Assign")
        if any(c.type == "Rsqrt" for c in op.control_inputs)
    ]
    assert len(waiting) == len(trial.report.folded)


def _all_outside(report):
    return all("outside of scope" in entry.reason for entry in report.refused)
