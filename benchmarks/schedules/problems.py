"""Steps as problems: `python -m benchmarks.schedules.problems NETWORK FILE`.

Tiny nodes that read nothing large are left out, and what they read is read by their
readers, so that files stay small.
"""

from __future__ import annotations

import argparse
from typing import Any

import tensorflow as tf

from benchmarks.networks import ALL_NETWORKS
from benchmarks.schedules.steps import SIZES
from geutil.gradients.budget_search import step_problem
from geutil.gradients.choices import AlwaysKept
from geutil.gradients.planner import Problem
from geutil.gradients.segments import StepProgram
from geutil.gradients.step import build_step
from geutil.memory.costs import settle_shapes

_TINY = 1000
"""Nodes below this part of the largest one are tiny."""


def network_problem(network: str) -> Problem:
    """Return the step of a network, with gradient descent.

    Args:
        network: a name in `SIZES`.
    """
    step = ALL_NETWORKS[network](**SIZES[network])
    found: list[Problem] = []

    @tf.function(autograph=False)
    def trace(*batch: tf.Tensor) -> Any:
        loss = step.loss(*batch)
        plain = build_step(loss, step.variables)
        settle_shapes(plain.ops())
        program = StepProgram(plain, updates="apart")
        found.append(step_problem(plain, AlwaysKept(plain), program).problem)
        return loss

    trace.get_concrete_function(*step.specs)
    return without_tiny(found[0])


def without_tiny(problem: Problem) -> Problem:
    """Return a problem without tiny nodes that read nothing large."""
    tiny = max(problem.sizes, default=0) // _TINY
    # What stands for a node that is left out, and what the others read.
    instead: dict[int, set[int]] = {}
    inputs: dict[int, set[int]] = {}
    for node in problem.first_order:
        read = {s for u in problem.inputs[node] for s in instead.get(u, {u})}
        small = all(problem.sizes[u] <= tiny for u in (node, *read))
        if small and node not in problem.outputs and problem.times[node] < _TINY:
            instead[node] = read
        else:
            inputs[node] = read
    kept = list(inputs)
    number = {node: i for i, node in enumerate(kept)}
    return Problem(
        [int(problem.times[v]) for v in kept],
        [problem.sizes[v] for v in kept],
        [(number[u], number[v]) for v in kept for u in sorted(inputs[v])],
        no_recompute=[number[v] for v in problem.no_recompute if v in number],
        outputs=[number[v] for v in problem.outputs],
    )


def main() -> None:
    """Write the problem of a network to a file."""
    parser = argparse.ArgumentParser("python -m benchmarks.schedules.problems")
    parser.add_argument("network", choices=list(SIZES))
    parser.add_argument("file")
    options = parser.parse_args()
    problem = network_problem(options.network)
    problem.to_json(options.file)
    print(problem)


if __name__ == "__main__":
    main()
