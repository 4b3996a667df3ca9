"""Folds for training compute what the graph computed, over all combinations."""

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


CASES = list(itertools.product((None, 3), STATISTICS, range(8)))
# Turns that differ by one have the other kind of norm for each layer.
QUICK = (None, "exact", 0), (3, "one_pass", 1)


@pytest.mark.parametrize("case", chosen(CASES, *QUICK), ids=str)
def test_norms_in_training_and_frozen(case):
    delay, statistics, turn = case
    trial = Trial(_makes(turn), delay, statistics)
    assert len(trial.report.folded) == len(trial.nets)
    assert all("outside of scope" in entry.reason for entry in trial.report.refused)
    # Nets share one counter; without a freeze nothing counts, and nothing chooses.
    freezes = delay is not None
    assert (trial.report.step is not None) == freezes
    assert len(ops_by_type(trial.graph, "AssignAddVariableOp")) == freezes
    assert bool(ops_by_type(trial.graph, "GreaterEqual")) == freezes
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
