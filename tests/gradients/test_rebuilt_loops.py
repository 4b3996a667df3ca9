"""Which values of a loop run again, and how that is chosen."""

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from geutil.errors import PlanError
from geutil.gradients.apply import applied
from geutil.gradients.choices import best_of
from geutil.gradients.loops import ALL, LIGHT, LoopChoices, find_loops
from geutil.gradients.prediction import StepProgram
from geutil.gradients.step import build_step
from tests.gradients.checking import assert_same
from tests.gradients.loop_networks import (
    SEQUENCES,
    batch,
    by_one,
    check_gradients,
    repeated,
    traced,
)

layers = keras.layers
RECURRENT = {
    "both_ways": (
        [8, 10, 16],
        lambda: layers.Bidirectional(
            layers.SimpleRNN(16, "swish", recurrent_dropout=0.2, seed=1)
        ),
    ),
    # Biases are of another type than what its lists hold.
    "mixed": (
        SEQUENCES,
        lambda: layers.LSTM(32, return_sequences=True, dtype="mixed_bfloat16"),
    ),
    "cells": (
        [8, 10, 16],
        lambda: layers.RNN(
            [layers.LSTMCell(16), layers.GRUCell(32, activation="silu")]
        ),
    ),
    "convolutions": ([2, 5, 12, 12, 3], lambda: layers.ConvLSTM2D(8, 3)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_are_those_of_tensorflow(name):
    shape, make = RECURRENT[name]
    plain = traced(tf.gradients, make, shape)
    peaks = []

    def rebuilt(loss, xs):
        step = build_step(loss, xs)
        loops = find_loops(step)
        # Of two loops the second one is given less.
        levels = [
            max(n for n in loop.cuts if n <= level)
            for loop, level in zip(loops, (ALL, LIGHT), strict=False)
        ]
        assert len(levels) == len(loops) == 1 + (name == "both_ways")
        planned = LoopChoices(step, loops).rebuilt(tuple(levels))
        peaks.append([StepProgram(s).peak() for s in (step, planned)])
        built = applied(planned)
        peaks.append(StepProgram(built).peak())
        return list(built.gradients)

    ours = traced(rebuilt, make, shape)
    (before, planned), built = peaks
    assert planned < before
    # Shapes of lists are the only ops that a plan does not know.
    assert planned <= built < planned + 256
    check_gradients(ours, plain, shape)


def test_a_loop_is_as_before_until_a_choice_is_made():
    seen = []

    def planned(loss, xs):
        step = build_step(loss, xs)
        before = step.graph.as_graph_def()
        choices = LoopChoices(step, find_loops(step))
        rebuilt = choices.rebuilt((ALL,))
        seen.extend(StepProgram(s).peak() for s in (rebuilt, step))
        assert choices.longer((ALL,)) > 1
        assert step.graph.as_graph_def() == before
        return list(step.gradients)

    function = traced(planned)
    assert seen[0] < seen[1]
    assert_same(function(batch()), traced(tf.gradients)(batch()))


def drawing(state):
    return tf.tanh(state * tf.random.uniform(tf.shape(state))) * tf.exp(state)


def test_what_may_run_again():
    found = {}

    @tf.function(autograph=False)
    def train(x):
        for body in (drawing, by_one, tf.square):
            step = build_step(tf.reduce_sum(repeated(body, x)), x)
            (found[body],) = find_loops(step)

    train.get_concrete_function(tf.TensorSpec([16, 16]))
    # Random numbers are never drawn again.
    cuts = found[drawing].cuts
    assert cuts
    assert not any("random" in n.lower() for c in cuts.values() for n in c.ops)
    # Products run again only where all may.
    cuts = found[by_one].cuts
    assert not any("MatMul" in name for name in cuts[LIGHT].ops)
    assert cuts[ALL].saved > cuts[LIGHT].saved
    assert cuts[ALL].time > cuts[LIGHT].time
    # A loop that keeps only its state.
    kept = found[tf.square]
    assert kept.cuts == {}
    assert "no list of its own holds values that follow from others" in kept.reason


def test_choices_are_tried_until_the_least_that_can_be_met():
    choices = [(n,) for n in range(9)]
    tried = []

    def attempt(levels):
        tried.append(levels[0])
        if levels[0] < 5:
            return PlanError("no")
        return SimpleNamespace(levels=levels, cost=levels[0])

    assert best_of(choices, attempt).levels == (5,)
    assert len(tried) <= 6
    with pytest.raises(PlanError, match="no"):
        best_of(choices[:4], attempt)
