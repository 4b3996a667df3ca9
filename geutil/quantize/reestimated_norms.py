"""Batch norms at inference, found by their variables, and the report on them.

A norm multiplies by the root of a variance and a small constant. Where it was folded,
that root is in the weights of a layer, `weights * scale`, and its bias. So norms are
found from their roots on, and not along the data (see
`geutil.select.networks.batch_norms` for other searches of norms).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.graph.types import IdentitySet, Operation, Tensor, scope_dirname
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import Network, delayed_input
from geutil.select.networks import batch_norms
from geutil.select.networks.batch_norms import SHAPING, FusedNorm
from geutil.select.networks.layers import Layer
from geutil.select.networks.provenance import Origin

# Through StopGradient neither variables nor weights are looked for.
_HANDED_ON = SHAPING - {"StopGradient"}


@dataclass(frozen=True, eq=False)
class InferenceNorm:
    """A batch norm whose statistics are variables."""

    name: str  # its name scope, or the name of its op
    mean: Any  # the handle of the variable of its mean
    variance: Any
    # The tensor whose statistics they are; of a folded norm that tensor times `scale`.
    source: Tensor
    axis: int  # the axis of the channels of the source, counted from the end
    marks: tuple[Operation, ...]  # the ops that change with its statistics first
    # The factor of the weights of a folded norm; None for others.
    scale: Tensor | None = None


@dataclass(frozen=True)
class Missed:
    """A batch norm that is left as it is.

    Attributes:
        norm: its name.
        reason: why.
    """

    norm: str
    reason: str


def find_norms(
    network: Network, handles: Mapping[Any, Any]
) -> list[InferenceNorm | Missed]:
    """Return the batch norms of a network, in topological order."""
    # `handles`: for each tensor that stands for a variable's handle in the graph the
    # handle itself, by identity.
    finder = _NormFinder(network, handles)
    norm_by_root: dict[Operation, InferenceNorm | Missed] = {}
    for op in network.ops:
        fused = batch_norms.fused_norm(op)
        if fused is not None:
            norm_by_root[op] = finder.fused(fused)
        for t in op.inputs:
            for root in sorted(network.origins.spreads(t), key=lambda r: r.name):
                if root not in norm_by_root:
                    norm_by_root[root] = finder.norm(root)
    return list(norm_by_root.values())


class _NormFinder:
    def __init__(self, network: Network, handles: Mapping[Any, Any]) -> None:
        self._network = network
        self._handles = handles

    def fused(self, norm: FusedNorm) -> InferenceNorm | Missed:
        """Return the norm that is a single op."""
        op = norm.op
        if norm.trains:
            return Missed(op.name, "normalizes by the statistics of the batch")
        mean, variance = (self._variable(t) for t in norm.given)
        if mean is None or variance is None:
            return Missed(op.name, "has constants for statistics, which are frozen")
        return InferenceNorm(op.name, mean, variance, op.inputs[0], norm.axis, (op,))

    def norm(self, root: Operation) -> InferenceNorm | Missed:
        """Return the norm that takes a root of a variance."""
        name = scope_dirname(root.name).rstrip("/") or root.name
        if self._network.origins.of(root.outputs[0]) is Origin.BATCH:
            return Missed(name, "normalizes by the statistics of the batch")
        below = batch_norms.variance_below(root)
        variance = None if below is None else self._variable(below)
        if variance is None:
            return Missed(name, "has a constant for its variance, which is frozen")
        scaled = list(self._scaled(root))
        mean = self._mean(scaled)
        if mean is None:
            return Missed(name, "has no variable for its mean that could be found")
        uses = [use for use in self._uses(scaled) if use is not None]
        if len(uses) != 1:
            return Missed(
                name,
                f"scales {len(uses)} tensors or layers, and not one: it was folded "
                "into the layer behind it, or is shared",
            )
        source, axis, scale = uses[0]
        return InferenceNorm(name, mean, variance, source, axis, (root,), scale)

    def _variable(self, tensor: Tensor) -> Any:
        """Return the handle of the variable that a tensor has the value of."""
        tensor = batch_norms.behind_shaping(tensor, _HANDED_ON)
        if tensor.op.type != "ReadVariableOp":
            return None
        return self._handles.get(tensor.op.inputs[0])

    def _scaled(self, root: Operation) -> Iterator[tuple[Operation, int]]:
        """Yield the ops that multiply or divide by a root, with the slot."""
        # And go on from those that make parameters.
        seen = IdentitySet(root.outputs)
        waiting = list(root.outputs)
        for tensor in waiting:
            for op in tensor.consumers():
                for slot, t in enumerate(op.inputs):
                    if t is tensor and not self._network.live.is_retired(op):
                        yield op, slot
                output = op.outputs[0] if op.outputs else None
                if output is None or output in seen or op.type in FAKE_QUANT:
                    continue
                if self._network.origins.is_parameter(output):
                    seen.add(output)
                    waiting.append(output)

    def _mean(self, scaled: list[tuple[Operation, int]]) -> Any:
        """Return the tensor that is scaled and subtracted, or subtracted from data."""
        for op, slot in scaled:
            if op.type != "Mul":
                continue
            other = op.inputs[1 - slot]
            handle = self._variable(other)
            if handle is not None and _is_subtracted(op.outputs[0]):
                return handle
            if other.op.type == "Sub" and self._network.is_data(other):
                return self._variable(other.op.inputs[1])
        return None

    def _uses(
        self, scaled: list[tuple[Operation, int]]
    ) -> Iterator[tuple[Tensor, int, Tensor | None] | None]:
        """Yield the data that is scaled, or the results of layers whose weights are."""
        for op, slot in scaled:
            if op.type not in ("Mul", "RealDiv") or (op.type == "RealDiv" and not slot):
                continue
            scale, other = op.inputs[slot], op.inputs[1 - slot]
            if self._network.is_data(other) and op in self._network.place:
                if other.op.type == "Sub":
                    other = other.op.inputs[0]
                yield other, _last_axis(scale), None
                continue
            if op.type == "Mul":
                for layer in self._network.layers.values():
                    if _weights(layer) is op.outputs[0]:
                        yield _folded(layer, scale)


def _weights(layer: Layer) -> Tensor:
    """Return the weights of a layer before they are quantized."""
    tensor = layer.kernel
    while True:
        op = tensor.op
        delayed = delayed_input(op)
        if delayed is not None:
            tensor = delayed
        elif op.type in FAKE_QUANT or op.type in _HANDED_ON:
            tensor = op.inputs[0]
        else:
            return tensor


def _folded(layer: Layer, scale: Tensor) -> tuple[Tensor, int, Tensor] | None:
    """Return the result of a layer; None if its inputs are scaled, and not that."""
    rank, shape = layer.kernel.shape.rank, scale.shape.as_list()
    axes = [rank - len(shape) + i for i, size in enumerate(shape) if size != 1]
    if not set(axes) <= set(layer.outputs):
        return None
    return layer.result, layer.axis, scale


def _last_axis(scale: Tensor) -> int:
    """Return the axis of channels that a scale is for, counted from the end."""
    shape = scale.shape.as_list()
    axes = [i - len(shape) for i, size in enumerate(shape) if size != 1]
    return axes[0] if axes else -1


def _is_subtracted(tensor: Tensor) -> bool:
    waiting = [tensor]
    for t in waiting:
        for op in t.consumers():
            if op.type == "Neg" or (op.type == "Sub" and op.inputs[1] is t):
                return True
            if op.type in _HANDED_ON:
                waiting.append(op.outputs[0])
    return False


Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Reestimated:
    """A batch norm with new statistics.

    Attributes:
        norm: its name.
        mean: the new mean of each channel.
        variance: the new variance of each channel.
        folded: whether it is folded into a layer.
        kept: how many channels kept their statistics, since a folded norm multiplies
            them by zero.
    """

    norm: str
    mean: Array
    variance: Array
    folded: bool
    kept: int = 0


@dataclass(frozen=True)
class ReestimateReport:
    """Every batch norm of a model: with new statistics, or not and why.

    Attributes:
        reestimated: the batch norms with new statistics, in topological order.
        missed: those that were left as they are.
        batches: how many batches there were.
    """

    reestimated: tuple[Reestimated, ...]
    missed: tuple[Missed, ...]
    batches: int

    def __str__(self) -> str:
        done, missed = len(self.reestimated), len(self.missed)
        total = f"{done} of {done + missed} batch norm(s)"
        lines = [f"{total} re-estimated from {self.batches} batch(es)"]
        for entry in self.reestimated:
            where = "folded" if entry.folded else "not folded"
            kept_note = f", {entry.kept} kept" if entry.kept else ""
            lines.append(
                f"  {entry.norm}: {entry.mean.size} channels, {where}{kept_note}"
            )
        lines += [f"  {entry.norm}: left, {entry.reason}" for entry in self.missed]
        return "\n".join(lines)
