"""Layers that are linear in their weights, and ops of training."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from geutil.graph import replicas
from geutil.graph.op_types import MATRIX_PRODUCTS
from geutil.graph.types import Graph, Operation, Tensor
from geutil.select.networks.provenance import Origins

_UPDATES = re.compile(r"^(Resource)?(Sparse)?Apply[A-Z]|^ResourceSparseApply")
_GRADIENTS = re.compile(
    r"^(Conv2DBackpropFilter|Conv3DBackpropFilterV2|.*Grad(V\d|WithArgmax)?|"
    r"DepthwiseConv2dNativeBackprop\w+)$"
)
# The gradient of nothing: it is asked for in the forward graph.
_FORWARD = frozenset(("StopGradient", "PreventGradient"))


def training_ops(
    graph: Graph, ops: Sequence[Operation] | None = None
) -> list[Operation]:
    """Return the ops that compute gradients, or apply them to variables."""
    # Gradients whose ops are of types of their own are found, as those of convolutions,
    # Relus and biases are.
    ops = replicas.own_operations(graph) if ops is None else ops
    kinds = {op.type for op in ops} - _FORWARD
    updates = {kind for kind in kinds if _UPDATES.search(kind)}
    gradients = {kind for kind in kinds if _GRADIENTS.search(kind)}
    return [op for op in ops if op.type in updates] + [
        op for op in ops if op.type in gradients
    ]


_CONVOLUTIONS = {"Conv2D": 4, "Conv3D": 5}
_TRANSPOSED = {
    "Conv2DBackpropInput": 4,
    "Conv3DBackpropInputV2": 5,
}


@dataclass(frozen=True, eq=False)
class Layer:
    """An op that multiplies data by weights.

    Attributes:
        op: the op.
        data: which of its inputs is the data.
        weights: which of its inputs is the weights.
        outputs: the axes of the weights that together count the channels of the result,
            outer first.
        inputs: those that count the channels of the data.
        axis: the axis of the channels in data and result, counted from the end.
        pads: whether the op may add zeros to the data, so that its response to a shift
            of the data differs from position to position.
        mixes: the weights have axes besides, over which the op does not sum.
        spreads: the result has axes besides that come from the weights: heads, say.
    """

    op: Operation
    data: int
    weights: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    axis: int
    pads: bool
    mixes: bool = False
    spreads: bool = False

    @property
    def transposed(self) -> bool:
        """True if it is the gradient of a convolution."""
        return self.op.type in _TRANSPOSED

    @property
    def result(self) -> Tensor:
        """The result of the layer."""
        return self.op.outputs[0]

    @property
    def kernel(self) -> Tensor:
        """The weights."""
        return self.op.inputs[self.weights]

    def sizes(self, axes: tuple[int, ...]) -> list[int] | None:
        """Return the sizes of axes of the weights; None if one is not known."""
        shape = self.kernel.shape
        if shape.rank is None:
            return None
        sizes = [shape.as_list()[axis] for axis in axes]
        return None if None in sizes else sizes


def data_format(op: Operation) -> str:
    """Return the data format of an op, "NHWC" for example."""
    return str(op.get_attr("data_format").decode())


def is_by_groups(op: Operation) -> bool:
    """Tell whether an op is a convolution of which no filter reads all channels."""
    if op.type != "Conv2D":
        return op.type == "DepthwiseConv2dNative"
    data, kernel = op.inputs
    if data.shape.rank is None or kernel.shape.rank is None:
        return False
    channels = data.shape[-1 if data_format(op) == "NHWC" else 1]
    return channels is not None and bool(kernel.shape[2] != channels)


def layer_of(op: Operation, origins: Origins) -> Layer | None:
    """Return an op as a layer, or None: its weights have to be parameters."""
    read = _READERS.get(op.type)
    layer = None if read is None else read(op, origins)
    if layer is None or not origins.is_parameter(layer.kernel):
        return None
    return layer


def _channels(op: Operation, rank: int) -> int:
    return 1 - rank if data_format(op).startswith("NC") else -1


def _convolution(op: Operation, origins: Origins) -> Layer:
    del origins
    rank = _CONVOLUTIONS[op.type]
    return Layer(
        op, 0, 1, (rank - 1,), (rank - 2,), _channels(op, rank), _pads(op, rank)
    )


def _depthwise(op: Operation, origins: Origins) -> Layer:
    del origins
    return Layer(op, 0, 1, (2, 3), (2,), _channels(op, 4), _pads(op, 4))


def _transposed(op: Operation, origins: Origins) -> Layer:
    del origins
    rank = _TRANSPOSED[op.type]
    axis = _channels(op, rank)
    # At the edges, and where strides leave gaps, less of the window meets the data.
    window = op.inputs[1].shape
    single = window.rank is not None and window.as_list()[:-2] == [1] * (rank - 2)
    even = single and all(size == 1 for size in op.get_attr("strides"))
    return Layer(op, 2, 1, (rank - 2,), (rank - 1,), axis, not even)


def _product(op: Operation, origins: Origins) -> Layer | None:
    left, right = (origins.of(t) for t in op.inputs)
    rank = op.inputs[1].shape.rank
    # Of weights on the left the channels are rows of the result.
    if left is not None or right is None or rank is None:
        return None
    turned = bool(op.get_attr("transpose_b" if op.type == "MatMul" else "adj_y"))
    columns, rows = rank - 1, rank - 2
    outputs, inputs = (rows, columns) if turned else (columns, rows)
    flipped = bool(op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x"))
    if flipped:
        return None
    return Layer(op, 0, 1, (outputs,), (inputs,), -1, False, mixes=rank > 2)


def _einsum(op: Operation, origins: Origins) -> Layer | None:
    """The channels are the last axis of the result, and one axis of the weights."""
    if len(op.inputs) != 2:
        return None
    equation = op.get_attr("equation").decode().replace(" ", "")
    operands, _, result = equation.partition("->")
    labels = operands.split(",")
    # An ellipsis, or a result that is not written, hides some of the axes.
    if "." in equation or not result or len(labels) != 2:
        return None
    weights = 1 if origins.of(op.inputs[0]) is None else 0
    data = 1 - weights
    channel, feature = result[-1], labels[data][-1]
    of_weights, of_data = labels[weights], labels[data]
    # A label of both operands and the result is a batch axis, no channel of weights.
    if channel not in of_weights or channel in of_data or feature not in of_weights:
        return None
    # A feature that is not summed makes no matrix product; a label that an operand has
    # twice reads a diagonal.
    if feature in result or any(len(set(label)) < len(label) for label in labels):
        return None
    return Layer(
        op,
        data,
        weights,
        (of_weights.index(channel),),
        (of_weights.index(feature),),
        -1,
        False,
        mixes=len(of_weights) > 2,
        spreads=any(label not in of_data for label in result[:-1]),
    )


def _pads(op: Operation, rank: int) -> bool:
    """Tell whether zeros may be read at the edges: not with 1x1 windows, or VALID."""
    padding = op.get_attr("padding").decode()
    if padding == "VALID":
        return False
    shape = op.inputs[1].shape
    window = None if shape.rank is None else shape.as_list()[: rank - 2]
    if padding == "EXPLICIT":
        return any(op.get_attr("explicit_paddings"))
    return window is None or any(size != 1 for size in window)


_READERS: dict[str, Callable[[Operation, Origins], Layer | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_TRANSPOSED, _transposed),
    **dict.fromkeys(MATRIX_PRODUCTS, _product),
    "DepthwiseConv2dNative": _depthwise,
    "Einsum": _einsum,
}
LAYERS = frozenset(_READERS)
