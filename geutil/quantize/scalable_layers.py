"""Layers whose channels can be scaled, and scaled back by those behind them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.graph.op_types import FUSED_NORMS, SHIFTS
from geutil.graph.types import IdentitySet, Operation, Tensor
from geutil.quantize.planning.network import Edge, Network
from geutil.quantize.schemes import FOLD
from geutil.select.networks.layers import Layer
from geutil.select.networks.provenance import reduced_axes

# f(s * x) = s * f(x) for s > 0, channel by channel.
_HOMOGENEOUS = frozenset(
    (
        "AddN",
        "AvgPool",
        "BatchToSpaceND",
        "Identity",
        "LeakyRelu",
        "MaxPool",
        "MaxPoolV2",
        "Neg",
        "Pad",
        "Relu",
        "SpaceToBatchND",
        "StopGradient",
    )
)


@dataclass(frozen=True)
class ScalingObstacle:
    """What keeps the channels of a layer from being scaled.

    Attributes:
        op: the op that stands in the way, by name.
        reason: why.
    """

    op: str
    reason: str


@dataclass(frozen=True, eq=False)
class ScalableLayer:
    """A layer, and the layers that read what it makes.

    Attributes:
        first: the layer.
        seconds: those behind it.
        channels: how many channels lie between them.
        biases: the inputs of ops between them that are added to the channels.
        clips: the Relu6 ops between them.
    """

    first: Layer
    seconds: tuple[Layer, ...]
    channels: int
    biases: tuple[Edge, ...]
    clips: tuple[Operation, ...]


def find_links(
    network: Network, replace_relu6: bool
) -> Iterator[ScalableLayer | ScalingObstacle]:
    """Yield for each layer in topological order its link, or why it has none.

    Args:
        network: the network.
        replace_relu6: whether Relu6 may be replaced with Relu.

    Cost: linear in ops and edges.
    """
    for layer in network.layers.values():
        yield _Region(layer, network, replace_relu6).link()


class _Region:
    """The ops between a layer and those that read what it makes."""

    def __init__(self, layer: Layer, network: Network, replace_relu6: bool) -> None:
        self._layer = layer
        self._network = network
        self._replace_relu6 = replace_relu6
        self._inside: IdentitySet = IdentitySet()
        self._waiting: list[tuple[int, Operation]] = []
        self._channels = int(np.prod(layer.sizes(layer.outputs) or [0]))
        self._biases: list[Edge] = []
        self._clips: list[Operation] = []
        self._seconds: dict[Operation, Layer] = {}

    def link(self) -> ScalableLayer | ScalingObstacle:
        """Return the link of the layer, or why it has none."""
        layer = self._layer
        if not self._channels:
            return ScalingObstacle(layer.op.name, "has weights of unknown shape")
        reason, op = self._enter(layer.result), layer.op
        # In topological order: what an op reads was decided on before it.
        while self._waiting and not reason:
            _, op = heapq.heappop(self._waiting)
            reason = self._take(op)
        if reason:
            return ScalingObstacle(op.name, reason)
        if not self._seconds:
            return ScalingObstacle(layer.op.name, "has no layer behind it")
        return ScalableLayer(
            layer,
            tuple(self._seconds.values()),
            self._channels,
            tuple(self._biases),
            tuple(self._clips),
        )

    def _enter(self, tensor: Tensor) -> str:
        if tensor in self._network.results:
            return "makes an output of the model"
        if tensor.dtype != tf.float32:
            return f"computes in {tensor.dtype.name}, not in float32"
        self._inside.add(tensor)
        for edge in self._network.readers(tensor):
            entry = (self._network.place[edge.op], edge.op)
            if entry not in self._waiting:
                heapq.heappush(self._waiting, entry)
        return ""

    def _take(self, op: Operation) -> str:
        """Take a reader in; return why that cannot be, or nothing."""
        second = self._network.layers.get(op)
        if second is not None:
            return self._end(second)
        data = [t for t in op.inputs if self._network.is_data(t)]
        if any(t not in self._inside for t in data):
            return f"({op.type}) reads data that comes from elsewhere, too"
        reason = self._refusal(op, data)
        return reason or self._enter(op.outputs[0])

    def _end(self, second: Layer) -> str:
        kind, sizes = second.op.type, second.sizes(second.inputs)
        if sizes is None:
            return f"({kind}) has weights of unknown shape"
        count = int(np.prod(sizes))
        if count != self._channels:
            return (
                f"({kind}) has {count} input channels in its weights, and there are "
                f"{self._channels}: it is grouped"
            )
        self._seconds[second.op] = second
        return ""

    def _refusal(self, op: Operation, data: list[Tensor]) -> str:
        kind = op.type
        if kind in FUSED_NORMS:
            return f"is a batch norm; fold it first, with {FOLD}"
        if kind == "Relu6":
            return self._clip(op)
        if kind == "Mean":
            return self._averaged(op)
        if kind in SHIFTS:
            return self._summed(op, data)
        if kind in _HOMOGENEOUS or (kind == "Mul" and len(data) == 1):
            return ""
        return f"({kind}) does not keep the scale of channels"

    def _clip(self, op: Operation) -> str:
        if self._replace_relu6:
            self._clips.append(op)
            return ""
        return (
            "(Relu6) clips at 6, whatever the scale; pass replace_relu6=True to use "
            "Relu instead, which changes what the model computes"
        )

    def _averaged(self, op: Operation) -> str:
        axes, rank = reduced_axes(op), op.inputs[0].shape.rank
        if axes is None or rank is None or self._layer.axis != -1 or rank - 1 in axes:
            return "(Mean) may average over channels"
        return ""

    def _summed(self, op: Operation, data: list[Tensor]) -> str:
        if len(data) == len(op.inputs):
            return ""
        ((slot, bias),) = (
            (i, t) for i, t in enumerate(op.inputs) if not self._network.is_data(t)
        )
        sizes = bias.shape.as_list() if bias.shape.rank is not None else [None]
        axis = -1 if op.type == "BiasAdd" else self._layer.axis
        of_channels = len(sizes) >= -axis and sizes[axis] == self._channels
        if bias.shape.num_elements() != (self._channels if of_channels else 1):
            return f"({op.type}) adds something else than a bias"
        self._biases.append(Edge(op, slot))
        return ""
