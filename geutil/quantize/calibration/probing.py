"""Runs a network as if it were not quantized, and measures what it quantizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import build_function, call_function
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.copying import PartialCopy, Replace
from geutil.quantize.finding.delays import delayed_input
from geutil.quantize.finding.kernels import FAKE_QUANT

Array = np.ndarray[Any, Any]
Measure = Callable[[str, Sequence[Tensor]], Mapping[str, Tensor]]


class Probe:
    """A function that measures tensors of a network that is not quantized.

    Args:
        graph: the FuncGraph of the network.
        inputs: its inputs by name.
        groups: for each name the tensors to measure together.
        measure: makes tensors that say something of a group, given its name.
        replace: tells what stands in for an op; what is quantized for what simulates
            that, if nothing else is said.
        results: tensors to return as they are, under the name "".

    Cost: one copy of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        groups: Mapping[str, Sequence[Tensor]],
        measure: Measure,
        replace: Replace | None = None,
        results: Sequence[Tensor] = (),
    ) -> None:
        copy = PartialCopy(graph, inputs, replace or unquantized)
        wanted = [*results, *(t for group in groups.values() for t in group)]
        given = iter(copy.of(wanted))
        made: dict[str, Tensor] = {}
        with neutral(copy.graph):
            for index in range(len(results)):
                made[f"\n{index}"] = tf.identity(next(given))
            for name, group in groups.items():
                measured = measure(name, [next(given) for _ in group])
                for key, tensor in measured.items():
                    made[f"{name}\n{key}"] = tf.identity(tensor)
        self._function = build_function(copy.graph, copy.inputs, made, [], [])

    def run(self, sample: Mapping[str, Any]) -> dict[str, dict[str, Array]]:
        """Return for each group what was measured on a sample.

        Groups that lie in a branch of version 1 which is not taken are left out.
        """
        found: dict[str, dict[str, Array]] = {}
        for name, value in call_function(self._function, sample).items():
            group, _, key = name.partition("\n")
            found.setdefault(group, {})[key] = value.numpy()
        # TensorFlow returns nothing at all for what did not run.
        return {
            group: values
            for group, values in found.items()
            if not group or all(value.size for value in values.values())
        }


def unquantized(op: Operation) -> Tensor | None:
    """Return what is quantized, for an op that simulates that."""
    if op.type in FAKE_QUANT:
        return op.inputs[0]
    return delayed_input(op)
