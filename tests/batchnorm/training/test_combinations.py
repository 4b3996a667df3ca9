"""Folds for training compute what the graph computed, over all combinations."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from tests.batchnorm.training.nets import LAYERS, STATISTICS, Net, Trial, ops_by_type
from tests.thorough import chosen

OPTIONS = list(itertools.product((False, True), repeat=2))


def _makes(turn):
    """Return functions that make a net of each layer, and one of ref variables.

    The kind of the norm, whether it has a gamma and whether the layer has a bias come
    in turn: four turns have all.
    """
    fused = itertools.cycle((False, True) if turn % 2 else (True, False))
    for place, layer in enumerate([*LAYERS, LAYERS[0]]):
        options = OPTIONS[(place + place // len(OPTIONS) + turn // 2) % len(OPTIONS)]
        yield partial(Net, layer, next(fused), *options, place, place < len(LAYERS))


# Turns that differ by one have the other kind of norm for each layer.
@pytest.mark.parametrize("statistics", chosen(STATISTICS, "exact"))
@pytest.mark.parametrize("turn", chosen(range(8), 0))
def test_without_a_freeze(statistics, turn):
    trial = Trial(_makes(turn), None, statistics)
    assert len(trial.report.folded) == len(trial.nets)
    assert all("outside of scope" in entry.reason for entry in trial.report.refused)
    assert trial.report.step is None
    # Nothing counts, and nothing chooses.
    assert not ops_by_type(trial.graph, "AssignAddVariableOp")
    assert not ops_by_type(trial.graph, "GreaterEqual")
    trial.check()


@pytest.mark.parametrize("statistics", chosen(STATISTICS, "one_pass"))
@pytest.mark.parametrize("turn", chosen(range(8), 1))
def test_with_a_freeze(statistics, turn):
    trial = Trial(_makes(turn), 3, statistics)
    assert len(trial.report.folded) == len(trial.nets)
    # Nets share one counter.
    assert len(ops_by_type(trial.graph, "AssignAddVariableOp")) == 1
    trial.check()


@pytest.mark.parametrize("statistics", STATISTICS)
def test_ref_variables_are_read_before_they_are_updated(statistics):
    """Who reads a ref variable late may see what was assigned to it."""
    trial = Trial([partial(Net, "conv", False, resource=False)], None, statistics)
    assert [
        op
        for op in ops_by_type(trial.graph, "Assign")
        if any(c.type == "Rsqrt" for c in op.control_inputs)
    ]
