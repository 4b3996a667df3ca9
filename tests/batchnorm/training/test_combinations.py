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
from tests.thorough import chosen

v1 = tf.compat.v1


FUSED = {"unfused": False, "fused": True}
OPTIONS = list(itertools.product((False, True), repeat=2))


class Trial:
    """Nets in three forms in one graph: folded, as they were, and deployed.

    Each layer has a norm of either kind; whether the norm has a gamma and the layer a
    bias comes in turn.
    """

    def __init__(self, layers, delay, statistics, resource=True, turn=0):
        self.graph, self.delay = tf.Graph(), delay
        self.feeds, self.folded, self.unfolded, self.deployed = {}, [], [], []
        self.moving, self.moving_unfolded = [], []
        with self.graph.as_default():
            kinds = itertools.product(layers, FUSED.values())
            for seed, (layer, fused) in enumerate(kinds):
                place = seed + seed // len(OPTIONS) + turn
                options = OPTIONS[place % len(OPTIONS)]
                self._build(Net(layer, fused, *options, seed, resource))
            self.report = fold_scope(self.graph, delay, statistics)
            self.names = [f"{net.layer}, fused: {net.fused}" for net, *_ in self.folded]
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


def _check_close(trial, session, *forms):
    """Run a step of two forms, and check that each net's values are close."""
    wrong = {}
    (actual, _), (expected, _) = trial.run(session, *forms)
    for name, values, others in zip(trial.names, actual, expected, strict=True):
        try:
            close(values, others)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, wrong


def _check_steps_in_training(trial, session):
    for step in range(2):
        if trial.report.step is not None:
            assert session.run(trial.report.step) == step
        _check_close(trial, session, trial.values, trial.expected)
        close(*session.run([trial.moving, trial.moving_unfolded]))


@pytest.mark.parametrize("statistics", chosen(STATISTICS, "exact"))
@pytest.mark.parametrize("turn", chosen(range(4), 0))
def test_without_a_freeze(statistics, turn):
    trial = Trial(LAYERS, None, statistics, turn=turn)
    assert len(trial.report.folded) == len(trial.names)
    assert not trial.report.refused or _all_outside(trial.report)
    assert trial.report.step is None
    # Nothing counts, and nothing chooses.
    assert not ops_by_type(trial.graph, "AssignAddVariableOp")
    assert not ops_by_type(trial.graph, "GreaterEqual")
    with _session(trial.graph) as session:
        _check_steps_in_training(trial, session)


@pytest.mark.parametrize("statistics", chosen(STATISTICS, "one_pass"))
@pytest.mark.parametrize("turn", chosen(range(4), 0))
def test_with_a_freeze(statistics, turn):
    trial = Trial(LAYERS, 3, statistics, turn=turn)
    assert len(trial.report.folded) == len(trial.names)
    # Nets share one counter.
    assert len(ops_by_type(trial.graph, "AssignAddVariableOp")) == 1
    with _session(trial.graph) as session:
        _check_steps_in_training(trial, session)
        moving = session.run(trial.moving)
        for step in range(2, 4):
            _check_close(trial, session, trial.values, trial.frozen)
            assert session.run(trial.report.step) == step + 1
            for one, other in zip(session.run(trial.moving), moving, strict=True):
                assert (one == other).all()


@pytest.mark.parametrize("statistics", STATISTICS)
def test_ref_variables(statistics):
    trial = Trial(["conv"], 3, statistics, resource=False)
    assert ops_by_type(trial.graph, "VariableV2")
    with _session(trial.graph) as session:
        _check_steps_in_training(trial, session)
        _check_close(trial, session, trial.values, trial.frozen)
        close(*session.run([trial.moving, trial.moving_unfolded]))


@pytest.mark.parametrize("statistics", STATISTICS)
def test_ref_variables_are_read_before_they_are_updated(statistics):
    """Who reads a ref variable late may see what was assigned to it."""
    trial = Trial(["conv"], None, statistics, resource=False)
    waiting = [
        op
        for op in ops_by_type(trial.graph, "Assign")
        if any(c.type == "Rsqrt" for c in op.control_inputs)
    ]
    unfused = [name for name in trial.names if "False" in name]
    assert len(waiting) >= len(unfused)


def _all_outside(report):
    return all("outside of scope" in entry.reason for entry in report.refused)
