"""Runs of a network layer by layer, exact and simulated side by side.

A decision on a layer changes the data of later ones. So the graph is cut into
stages, one for each layer: an op belongs to the last layer that it depends on. Each
stage is run once for all batches, from the results that earlier ones keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import adjacency, creation, functions, op_types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure
from geutil.quantize.calibration.ranges import unquantized
from geutil.quantize.partial_copy import PartialCopy, Replace
from geutil.select.networks.layers import Layer

_NEAREST = Words("rounding='nearest'", "nearest")
_NOT_KEPT = (tf.resource, tf.variant)


class Data(NamedTuple):
    """The data of a layer, batch by batch."""

    exact: list[Any]  # if nothing were quantized
    simulated: list[Any]  # with what was decided on earlier layers


class Stages:
    """The stages of a FuncGraph."""

    # `samples`: batches of data by the names of the inputs; they are held in memory,
    # and so is what they become between two stages.
    # `simulated`: what stands in for ops in the simulation; it is asked anew for each
    # stage.

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        layers: Sequence[Layer],
        samples: Sequence[Mapping[str, Any]],
        simulated: Replace,
    ) -> None:
        ops = graph.get_operations()
        check_flow(graph)
        _check_branches(graph, layers)
        self._graph = graph
        self._replace = (unquantized, simulated)
        self._layers = layers
        self._stage = _stages(adjacency.topological_sort(ops), inputs, layers)
        self._wanted = self._plan()
        self._kept: dict[str, tuple[list[Any], list[Any]]] = {}
        # Each value as it is, and as simulated: of inputs these are the same.
        for name, t in inputs.items():
            values = [sample[name] for sample in samples]
            self._kept[t.name] = values, values
        self._count = len(samples)

    def data_of(self, index: int) -> Data:
        """Return the data of a layer; to be asked for one layer after the other."""
        self._run(index)
        layer = self._layers[index]
        exact, simulated = self._kept[layer.op.inputs[layer.data].name]
        return Data(exact, simulated)

    def _plan(self) -> list[dict[str, Tensor]]:
        """Return the tensors that each stage has to keep, by name."""
        wanted: list[dict[str, Tensor]] = [{} for _ in range(len(self._layers) + 1)]
        self._last_use: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            data = layer.op.inputs[layer.data]
            wanted[self._stage.get(data.op, 0)][data.name] = data
            self._last_use[data.name] = index
        for stage in reversed(range(len(wanted))):
            for t in self._read(list(wanted[stage].values()), stage):
                wanted[self._stage[t.op]][t.name] = t
                self._last_use.setdefault(t.name, stage)
                self._last_use[t.name] = max(self._last_use[t.name], stage)
        return wanted

    def _read(self, targets: Sequence[Tensor], stage: int) -> list[Tensor]:
        """Return the tensors of earlier stages that a stage reads."""
        found: dict[str, Tensor] = {}

        def before(op: Operation) -> list[Operation]:
            """Return the producers in this stage; note tensors of earlier ones."""
            if op.type in op_types.PLACEHOLDERS:
                found[op.outputs[0].name] = op.outputs[0]
                return []
            producers = list(op.control_inputs)
            for t in op.inputs:
                earlier = self._stage.get(t.op, stage) < stage
                # Lists and resources cannot outlive a run, so their ops run again.
                if earlier and len(t.op.outputs) == 1 and t.dtype not in _NOT_KEPT:
                    found[t.name] = t
                else:
                    producers.append(t.op)
            return [op for op in producers if op in self._stage]

        closure((t.op for t in targets), before)
        return list(found.values())

    def _run(self, stage: int) -> None:
        """Run a stage, keep its results, and forget those that have no reader left."""
        targets = [t for t in self._wanted[stage].values() if t.name not in self._kept]
        if targets:
            sources = {f"s{i}": t for i, t in enumerate(self._read(targets, stage))}
            exact, simulated = (
                self._values(targets, sources, which) for which in range(2)
            )
            for t in targets:
                self._kept[t.name] = exact[t.name], simulated[t.name]
        for name in list(self._kept):
            if self._last_use.get(name, -1) < stage:
                del self._kept[name]

    def _values(
        self, targets: Sequence[Tensor], sources: Mapping[str, Tensor], which: int
    ) -> dict[str, list[Any]]:
        copy = PartialCopy(self._graph, sources, self._replace[which])
        copies = copy.of(targets)
        with creation.neutral(copy.graph):
            results = {f"r{i}": tf.identity(t) for i, t in enumerate(copies)}
        function = functions.build_function(copy.graph, copy.inputs, results, [], [])
        values: dict[str, list[Any]] = {t.name: [] for t in targets}
        for batch in range(self._count):
            feed = {n: self._kept[t.name][which][batch] for n, t in sources.items()}
            made = functions.call_function(function, feed)
            for i, t in enumerate(targets):
                values[t.name].append(made[f"r{i}"])
        return values


def check_flow(graph: Graph) -> None:
    """Raise QuantizeError for a graph that has no topological order."""
    for op in graph.get_operations():
        if op.type in op_types.ENTERS:
            raise QuantizeError(
                f"'{op.name}' ({op.type}) begins a loop of version 1, and layers in it "
                "cannot be run one by one",
                remedy=f"calibrate with {_NEAREST}",
            )


def _check_branches(graph: Graph, layers: Sequence[Layer]) -> None:
    """Refuse layers in branches of version 1: they lack data if others are taken."""
    switched = [op for op in graph.get_operations() if op.type in op_types.SWITCHES]

    def inside(op: Operation) -> list[Operation]:
        readers = (reader for t in op.outputs for reader in adjacency.consumers(t))
        return [reader for reader in readers if reader.type not in op_types.MERGES]

    in_branches = closure(switched, inside)
    for layer in layers:
        if layer.op in in_branches:
            raise QuantizeError(
                f"'{layer.op.name}' ({layer.op.type}) is in a branch of a conditional "
                "of version 1, and has no data where another branch is taken",
                remedy=f"calibrate with {_NEAREST}",
            )


def _stages(
    ordered: Sequence[Operation], inputs: Mapping[str, Tensor], layers: Sequence[Layer]
) -> dict[Operation, int]:
    """Return the stage of each op that depends on the inputs."""
    begins = {layer.op: index + 1 for index, layer in enumerate(layers)}
    stage_of = {t.op: 0 for t in inputs.values()}
    for op in ordered:
        before = [
            stage_of[producer]
            for producer in (*(t.op for t in op.inputs), *op.control_inputs)
            if producer in stage_of
        ]
        if before:
            stage_of[op] = max(begins.get(op, 0), *before)
    return stage_of
