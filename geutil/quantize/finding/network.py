"""The part of a graph that runs at inference, and who reads what in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import tensorflow as tf

from geutil.graph.function_calls import called_function, reason_to_stay
from geutil.graph.identity import IdentitySet
from geutil.graph.kinds import Graph, Operation, Tensor, is_reference
from geutil.graph.op_types import CALLS, PLACEHOLDERS
from geutil.graph.order import topological_sort
from geutil.graph.plain_gradients import in_version_1_control_flow
from geutil.quantize.finding.dilations import find_moved
from geutil.quantize.finding.kernels import (
    FAKE_QUANT,
    FLOAT_LAYERS,
    KERNELS,
    SHAPES,
    Treatment,
)
from geutil.select.networks.constant_inputs import DATA_SLOTS
from geutil.select.networks.layers import Layer, layer_of
from geutil.select.networks.origins import Origin, Origins
from geutil.transform.rewrite.liveness import Liveness

_FLOW = frozenset(
    ("Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While")
)
BODIES = CALLS | _FLOW
"""Types of ops that compute in the body of a function."""


class Edge(NamedTuple):
    """Input `slot` of `op`."""

    op: Operation
    slot: int


class Network:
    """The ops of a graph that compute with data.

    What only makes statistics for batch norms in training does not count, and neither
    do ops that rewrites retired.

    Args:
        graph: the graph.
        results: its results, as far as they are known; without them every op without
            readers may be one.

    Attributes:
        ops: the ops, in topological order.
        layers: those of them that multiply data by weights, and have int8 kernels.
        gathered: the last ops of dilated convolutions that are written as three.
        unfed: ops that could, and read constants and variables only.

    Cost: linear in ops and edges.
    """

    def __init__(self, graph: Graph, results: Iterable[Tensor]) -> None:
        self.origins = Origins(graph)
        self.live = Liveness(graph)
        self.results: IdentitySet = IdentitySet(results)
        everything = topological_sort(graph.get_operations())
        needed = self._needed(everything)
        self.ops = [op for op in everything if op in needed]
        self.place = {op: index for index, op in enumerate(self.ops)}
        found = ((op, layer_of(op, self.origins)) for op in self.ops)
        layers = {op: layer for op, layer in found if layer is not None}
        self.layers: dict[Operation, Layer] = {
            op: layer for op, layer in layers.items() if op.type not in FLOAT_LAYERS
        }
        self.gathered = frozenset(m.gathered for m in find_moved(self.ops, self.live))
        self.unfed = [
            op
            for op in everything
            if op.type in DATA_SLOTS and all(map(self.is_parameter, op.inputs))
        ]
        self._region = None if self.results else self._before(layers)
        self._losses: set[Operation] | None = None

    def is_input(self, op: Operation) -> bool:
        """Tell whether an op is an input, or a constant that stands in for one."""
        return op.type in PLACEHOLDERS or op in self.origins.inputs

    def is_data(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is data, no parameter and no statistic."""
        return self.origins.of(tensor) is None and tensor.dtype.is_floating

    def is_parameter(self, tensor: Tensor) -> bool:
        """Tell whether a tensor depends on constants and variables only."""
        return tensor.dtype.is_floating and self.origins.is_parameter(tensor)

    def is_statistic(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is made of statistics of the batch."""
        return self.origins.of(tensor) is Origin.BATCH

    def readers(self, tensor: Tensor) -> list[Edge]:
        """Return who reads the values of a tensor, statistics left out."""
        readers = {op for op in tensor.consumers() if op in self.place}
        return [
            Edge(op, index)
            for op in sorted(readers, key=self.place.__getitem__)
            for index, t in enumerate(op.inputs)
            if t is tensor and op.type not in SHAPES
        ]

    def quantized(self, tensor: Tensor) -> Tensor | None:
        """Return the result of a FakeQuant op that reads a tensor, or is the tensor."""
        if tensor.op.type in FAKE_QUANT:
            return tensor
        for op in tensor.consumers():
            if op.type in FAKE_QUANT and not self.live.is_retired(op):
                return op.outputs[0]
        return None

    def is_quantized_behind(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is quantized by all that its values are handed on to.

        A Reshape may stand between it and the FakeQuant op, for example.

        Cost: linear in the ops that hand it on.
        """
        waiting = [tensor]
        for passed in waiting:
            edges = self.readers(passed)
            if passed in self.results or not edges:
                return False
            for op, index in edges:
                kernel = KERNELS.get(op.type)
                if kernel is None or kernel.treatment is not Treatment.PASSES:
                    return False
                if index not in kernel.data_inputs(op):
                    return False
                if self.quantized(op.outputs[index]) is None:
                    waiting.append(op.outputs[index])
        return True

    def is_behind_layers(self, op: Operation) -> bool:
        """Tell whether an op may be part of a loss.

        Of graphs whose results are not known that is what no layer depends on.
        """
        return self._region is not None and op not in self._region

    def leads_to_loss(self, op: Operation) -> bool:
        """Tell whether an op behind the last layer looks like part of a loss.

        That is, if what depends on it ends in a single number, or meets data that no
        layer sees: the labels.
        """
        if self._losses is None:
            self._losses = self._before_losses()
        return op in self._losses

    def obstacle(self, op: Operation) -> str:
        """Return why FakeQuant ops cannot stand behind an op; "" if they can."""
        if in_version_1_control_flow(op):
            return "is in a loop or conditional of version 1, where ranges are not kept"
        if called_function(op):
            reason = reason_to_stay(op)
            if reason:
                return (
                    "calls a function, whose body is not looked into, and which "
                    f"geutil.model.open leaves a call: {reason}; open a model that was "
                    "traced without that"
                )
            return (
                "calls a function, whose body is not looked into; geutil.model.open "
                "inlines it"
            )
        if op.type in _FLOW:
            return (
                "runs bodies that are not looked into; unroll it, or choose a branch, "
                "before the model is opened with geutil.model.open"
            )
        kinds = {t.dtype for t in op.outputs if t.dtype.is_floating}
        if kinds - {tf.float32}:
            names = sorted(kind.name for kind in kinds)
            return f"computes in {names[0]}, and FakeQuant ops take float32 only"
        return ""

    def _needed(self, ordered: list[Operation]) -> set[Operation]:
        needed: set[Operation] = set()
        ends = {t.op for t in self.results}
        for op in reversed(ordered):
            if op in ends or self._is_needed(op, needed, bool(ends)):
                needed.add(op)
        return needed

    def _is_needed(
        self, op: Operation, needed: set[Operation], ends_known: bool
    ) -> bool:
        if self.live.is_retired(op) or not op.outputs:
            return False
        if all(self.origins.of(t) is not None for t in op.outputs):
            return False
        readers = self.live.readers(op)
        if not readers and not ends_known:
            return any(self._may_be_result(t) for t in op.outputs)
        return any(r in needed and _reads_values(r, op) for r in readers)

    def _may_be_result(self, tensor: Tensor) -> bool:
        """Tell whether a tensor that nothing reads may be one: numbers, or choices."""
        op = tensor.op
        # What assigns to a version 1 variable returns it.
        if is_reference(tensor) or self.origins.of(tensor) is not None:
            return False
        chosen = (tensor.dtype.is_integer or tensor.dtype.is_bool) and op.inputs
        return tensor.dtype.is_floating or (bool(chosen) and op.type not in SHAPES)

    def _before(self, layers: Mapping[Operation, Layer]) -> set[Operation]:
        region: set[Operation] = set()
        for op in reversed(self.ops):
            if op in layers or any(r in region for r in self.live.readers(op)):
                region.add(op)
        return region

    def _before_losses(self) -> set[Operation]:
        region = self._region or set()
        behind = [op for op in self.ops if op not in region]
        known = set(region)
        found: set[Operation] = set()
        for op in behind:
            data = {t.op for t in op.inputs if self.origins.of(t) is None}
            if known.isdisjoint(data):
                continue
            known.add(op)
            numbers = (t for t in op.outputs if t.dtype.is_floating)
            if not known.issuperset(data) or any(t.shape.rank == 0 for t in numbers):
                found.add(op)
        for op in reversed(behind):
            readers = (r for r in self.live.readers(op) if r.type not in SHAPES)
            if not found.isdisjoint(readers):
                found.add(op)
        return found


def _reads_values(reader: Operation, op: Operation) -> bool:
    """Tell whether an op reads another's values, and not just the range of them."""
    return reader.type not in FAKE_QUANT or reader.inputs[0].op is op
