"""Times of ops, measured one by one: the constants of `geutil.memory.costs`.

`python -m benchmarks.op_times [--network NAME]`: training steps of eleven networks,
best on an idle machine. The first line is the time of one multiply-add of convolutions
and products, the unit of the table; a row is the time of an element that ops of a type
read or write, beside the estimate, and of a depthwise convolution that of a
multiply-add.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.networks.networks import ALL_NETWORKS
from benchmarks.networks.step import Step
from geutil.memory.costs import (
    HEAVY,
    measured_times,
    multiply_adds,
    op_time,
    tensor_elements,
)

_MOST = 1 << 16
"""Elements below which the call takes longer than the work."""

Sample = tuple[Any, float]


def samples(names: Iterable[str]) -> Iterator[Sample]:
    """Yield each measured op of the training steps, with its seconds."""
    for name in names:
        ops = _step_ops(ALL_NETWORKS[name]())
        seconds = measured_times(ops)
        yield from ((op, seconds[op.name]) for op in ops if op.name in seconds)


def _step_ops(step: Step) -> Sequence[Any]:
    @tf.function(autograph=False)
    def trace(*batch: tf.Tensor) -> Any:
        return tf.gradients(step.loss(*batch), step.variables)

    graph = trace.get_concrete_function(*step.specs).graph
    return graph.get_operations()


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.op_times")
    parser.add_argument("--network", action="append", choices=sorted(ALL_NETWORKS))
    names = parser.parse_args().network or [n for n in ALL_NETWORKS if n != "chain"]
    found: dict[str, list[tuple[int, int, float, float]]] = defaultdict(list)
    for op, seconds in samples(names):
        elements = sum(tensor_elements(t) for t in (*op.inputs, *op.outputs))
        if elements >= _MOST:
            work = multiply_adds(op)
            found[op.type].append((elements, work, op_time(op), seconds))
    full = [
        sample
        for kind, of_kind in found.items()
        if kind in HEAVY and not kind.startswith("Depthwise")
        for sample in of_kind
    ]
    # Where the arithmetic is most of it: 500 multiply-adds for each element.
    dense = [sample for sample in full if sample[1] > 500 * sample[0]]
    unit = sum(s[3] for s in dense) / sum(s[1] for s in dense)
    print(f"one multiply-add: {1e12 * unit:.2f} ps, {len(dense)} ops")
    print(f"{'type':44}{'ops':>6}{'ms':>9}{'per':>14}{'estimate':>10}{'measured':>10}")
    for kind, of_kind in sorted(found.items()):
        elements, work, estimate, seconds = map(sum, zip(*of_kind, strict=True))
        by_work = kind.startswith("Depthwise") or work != elements
        amount, per = (work, "multiply-add") if by_work else (elements, "element")
        print(
            f"{kind:44}{len(of_kind):6}{1e3 * seconds:9.1f}{per:>14}"
            f"{estimate / amount:10.1f}{seconds / unit / amount:10.1f}"
        )


if __name__ == "__main__":
    main()
