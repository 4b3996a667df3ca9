"""Small graphs whose best recomputation can be found by trying everything."""

from collections.abc import Sequence
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.gradients import Report, gradients, last_report
from geutil.gradients.choices import AlwaysKept
from geutil.gradients.construction import build_recomputation
from geutil.gradients.least_peak import (
    ForwardPass,
    Trial,
    Trials,
    crossing_tensors,
    read_forward,
)
from geutil.gradients.segments import StepProgram, plan_recomputation
from geutil.gradients.step import PlainStep, Recomputation, build_step
from geutil.memory import simulate
from geutil.memory.schedule import frugal_order, with_controls
from geutil.reroute import reroute_ts

v1 = tf.compat.v1
MOST_CUTS = 3


def chain_step(widths: Sequence[int], rows: int = 256) -> PlainStep:
    """Return the step of dense layers with a tanh, one for each pair of widths."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [rows, widths[0]])
        weights = []
        for before, after in pairwise(widths):
            weights.append(v1.get_variable(f"w{len(weights)}", [before, after]))
            x = tf.tanh(x @ weights[-1])
        return build_step(tf.reduce_mean(tf.square(x)), weights)


def chain_loss(x: tf.Tensor, weights: Sequence[Any]) -> tf.Tensor:
    """Return the loss of a chain of layers with a tanh."""
    for w in weights:
        x = tf.tanh(x @ w)
    return tf.reduce_mean(x * x)


def chain_weights(layers: int, width: int) -> list[tf.Variable]:
    """Return random weights with which the chain keeps the size of its values."""
    drawn = np.random.default_rng(0).normal(0, width**-0.5, [layers, width, width])
    return [tf.Variable(w.astype("f")) for w in drawn]


def chain_function(
    weights: Sequence[tf.Variable], rows: int, checkpoints: Any, **options: Any
) -> tuple[Any, Report | None]:
    """Return the step of a chain as a function, and what its gradients report.

    Args:
        weights: square ones.
        rows: how many rows go through the chain.
        checkpoints: None for TensorFlow's gradients.
        options: of `tf.function`.
    """

    @tf.function(autograph=False, **options)
    def train(x: tf.Tensor) -> list[tf.Tensor]:
        loss = chain_loss(x, weights)
        if checkpoints is None:
            return tf.gradients(loss, weights)
        return gradients(loss, weights, checkpoints=checkpoints, holds_gradients=True)

    function = train.get_concrete_function(tf.TensorSpec([rows, weights[0].shape[0]]))
    return function, last_report(function.graph)


def rewired_chain_step(
    order: Sequence[int], width: int = 64, rows: int = 256
) -> PlainStep:
    """Return the step of a chain whose layers were made in some order, then joined."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [rows, width])
        ends = {}
        for layer in order:
            w = v1.get_variable(f"w{layer}", [width, width])
            before = v1.placeholder(tf.float32, [rows, width])
            ends[layer] = before, tf.tanh(before @ w), w
        after = x
        for before, result, _ in map(ends.__getitem__, sorted(ends)):
            reroute_ts([after], [before])
            after = result
        weights = [w for _, _, w in map(ends.__getitem__, sorted(ends))]
        return build_step(tf.reduce_mean(tf.square(after)), weights)


def random_step(seed: int, layers: int = 8) -> PlainStep:
    """Return the step of layers that read one or two of those before."""
    random = np.random.default_rng(seed)
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [64, 64])
        made = [tf.sin(x)]
        for _ in range(layers):
            first, second = (
                made[-1 - int(random.integers(min(3, len(made))))],
                made[-1],
            )
            match random.integers(4):
                case 0:
                    made.append(tf.sin(second) * first)
                case 1:
                    made.append(tf.concat([first, second], 0)[: 64 * 2])
                case 2:
                    made.append(tf.exp(-tf.square(second)))
                case _:
                    made.append(tf.nn.softmax(second) @ tf.transpose(second) @ second)
            made[-1] = made[-1][:64]
        return build_step(tf.reduce_mean(tf.add_n(made[-2:])), x)


def plan_of(step: PlainStep, choice: Trial) -> Recomputation:
    """Return the recomputation that follows from a choice of what is kept."""
    always = AlwaysKept(step)
    kept = set(map(id, choice.kept))
    plan = choice.plan
    return plan or plan_recomputation(step, lambda t: id(t) in kept or always(t))


def build_as_predicted(plan: Recomputation) -> PlainStep:
    """Build a recomputation, and check its peak against the predicted one."""
    predicted = StepProgram(plan.step).peak(plan.segments)
    with plan.step.graph.as_default():
        built = build_recomputation(plan)
    # Read from the graph, where the plan is no plan any more.
    reading = StepProgram(built)
    program = reading.program()
    later = reading.later(program)
    order = frugal_order(with_controls(program, later.items()))
    assert predicted == simulate(program, order).resident
    return built


class Everything:
    """All ways to cut the forward pass of a step up to three times, for comparison."""

    def __init__(self, step: PlainStep) -> None:
        self.always = AlwaysKept(step)
        self.trials = Trials(step, self.always)
        self.forward: ForwardPass = read_forward(step, self.always)

    def best(self) -> Trial:
        """Return the trial with the least peak."""
        places = range(len(self.forward.ops) - 1)
        subsets = chain.from_iterable(
            combinations(places, count) for count in range(MOST_CUTS + 1)
        )
        seen = {}
        for subset in subsets:
            kept = crossing_tensors(self.forward.buffers, subset)
            seen.setdefault(tuple(map(id, kept)), kept)
        found = (self.trials.run(kept) for kept in seen.values())
        return min(found, key=lambda trial: trial.peak)
