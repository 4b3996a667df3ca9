"""Layers that are linear in their weights, ops of training, and the origins of tensors.

Layers and batch norms differ from other ops by their operands: data with something that
is the same for every example of a batch. So `Origins` tells parameters, statistics of a
batch and data apart, and `layer_of` reads an op by them.

A graph that is fed nothing computes with constants: `x = tf.zeros([1, 224, 224, 3])` is
how networks are built to be looked at, or timed. Layers cannot be distinguished from
products of weights there, unless it is known which tensor is the data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import tensorflow as tf

from geutil.graph import adjacency, op_types, replicas
from geutil.graph.types import Graph, Operation, Tensor, is_reference, is_stateful

DATA_SLOTS = {
    **dict.fromkeys(op_types.MATRIX_PRODUCTS, 0),
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Einsum"), 0),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), 2),
}
"""The data input of a layer, by its type, if all may be."""
_FED = "Placeholder"
_READ = "ReadVariableOp"
_MADE = frozenset(("Fill",))
_RANDOM = ("Random", "Stateless", "Truncated")

IsParameter = Callable[[Tensor], bool]


def constant_inputs(
    ops: Sequence[Operation], is_parameter: IsParameter
) -> frozenset[Operation]:
    """Return the ops whose results stand in for the inputs of a network."""
    # None if anything is fed, numbers or indices, or no layer reads parameters alone.
    # Products that are weights of other layers count for nothing.
    layers = [op for op in ops if op.type in DATA_SLOTS]
    if not layers or any(_is_fed(op, is_parameter) for op in ops):
        return frozenset()
    if any(_makes_numbers(op, is_parameter) for op in _behind_indices(ops)):
        return frozenset()
    weights = _weights_of(ops)
    candidates = [op for op in layers if all(is_parameter(t) for t in op.inputs)]
    behind = _behind(ops, candidates)
    starts = [op for op in candidates if op not in weights]
    return frozenset(_all_reads(_roots(starts, behind), ops))


def _is_fed(op: Operation, is_parameter: IsParameter) -> bool:
    """Return whether an op makes numbers of no numbers; random ones are no input."""
    if not _makes_numbers(op, is_parameter):
        return False
    computed = any(t.dtype.is_floating for t in op.inputs)
    return op.type.startswith(_FED) or not (computed or op.type.startswith(_RANDOM))


def _makes_numbers(op: Operation, is_parameter: IsParameter) -> bool:
    return any(t.dtype.is_floating and not is_parameter(t) for t in op.outputs)


def _behind_indices(ops: Sequence[Operation]) -> list[Operation]:
    """Return the ops that depend on values of integers or strings that are fed."""
    # Tokens that a table is looked up by, for one. A number alone is a count of steps,
    # and shapes are no values.
    dependents: dict[Operation, None] = {}
    for op in ops:
        if op.type in op_types.SHAPE_READERS:
            continue
        fed = op.type.startswith(_FED) and any(map(_is_index, op.outputs))
        if fed or any(t.op in dependents for t in op.inputs):
            dependents[op] = None
    return list(dependents)


def _is_index(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return (kind.is_integer or kind == tf.string) and tensor.shape.rank != 0


def _weights_of(ops: Sequence[Operation]) -> set[Operation]:
    """Return the ancestors of layers by inputs other than their data."""
    weight_ops: set[Operation] = set()
    for op in reversed(ops):
        data = DATA_SLOTS.get(op.type)
        for index, t in enumerate(op.inputs):
            if op in weight_ops or (data is not None and index != data):
                weight_ops.add(t.op)
    return weight_ops


def _behind(ops: Sequence[Operation], layers: Sequence[Operation]) -> set[Operation]:
    reachable = set(layers)
    for op in ops:
        if any(t.op in reachable for t in op.inputs):
            reachable.add(op)
    return reachable


def _roots(starts: Sequence[Operation], behind: set[Operation]) -> list[Operation]:
    """Go back from layers by their data, to where that comes from."""
    seen: set[Operation] = set()
    roots: dict[Operation, None] = {}
    for op in starts:
        while op not in seen:
            seen.add(op)
            before = _data_of(op, behind)
            if before is None:
                roots[op] = None
                break
            op = before
    return list(roots)


def _all_reads(roots: Sequence[Operation], ops: Sequence[Operation]) -> list[Operation]:
    """Return ops, and the other readers of the variables that they read."""
    handles = {op.inputs[0].op for op in roots if op.type == _READ}
    reads = (op for op in ops if op.type == _READ and op.inputs[0].op in handles)
    return list(dict.fromkeys((*roots, *reads)))


def _data_of(op: Operation, behind: set[Operation]) -> Operation | None:
    """Return where the data of an op comes from; None if it is made there."""
    if op.type in _MADE:
        return None
    if op.type in DATA_SLOTS:
        return op.inputs[DATA_SLOTS[op.type]].op
    # The data of a lookup are its indices; the other input is the table.
    if op.type in op_types.LOOKUPS:
        return op.inputs[1].op
    float_inputs = [t for t in op.inputs if t.dtype.is_floating and not is_reference(t)]
    if not float_inputs:
        return None
    later = [t.op for t in float_inputs if t.op in behind]
    return later[0] if later else max(float_inputs, key=_rank).op


def _rank(tensor: Tensor) -> int:
    return -1 if tensor.shape.rank is None else int(tensor.shape.rank)


_CONSTANTS = frozenset(("Const",))
_VARIABLES = frozenset(("ReadVariableOp", "Variable", "VariableV2"))
# They are what the caller feeds, or are made in a loop or a branch of version 1.
_NEVER = frozenset(
    (
        "Placeholder",
        "PlaceholderV2",
        "PlaceholderWithDefault",
        "Merge",
        "Exit",
        "NextIteration",
    )
)
# How a branch or a loop of version 1 gets what does not change inside.
LED_IN = op_types.ENTERS | op_types.SWITCHES
_MEASURES = frozenset(("Mean", "Sum"))
ROOTS = frozenset(("Rsqrt", "Sqrt", "Pow"))
"""Ops that may take the root of a variance."""


class Origin(IntEnum):
    """The sources that a tensor depends on at most, apart from constants."""

    CONSTANT = 0
    VARIABLE = 1
    BATCH = 2
    """Statistics of a batch: means or sums over all of its axes but one."""


class Origins:
    """The origins of the tensors of a graph."""

    def __init__(self, graph: Graph) -> None:
        # Constants and variables that count as data, since nothing is fed.
        self.inputs: frozenset[Operation] = frozenset()
        ops = adjacency.topological_sort(graph.get_operations())
        self._trace(ops)
        inputs = constant_inputs(ops, self.is_parameter)
        if inputs:
            self.inputs = inputs
            self._trace(ops)

    def _trace(self, ops: Sequence[Operation]) -> None:
        self._origins: dict[Operation, Origin] = {}
        self._spreads: dict[Operation, frozenset[Operation]] = {}
        for op in ops:
            origin = self._origin(op)
            if origin is not None:
                self._origins[op] = origin
                self._spreads[op] = self._behind(op)

    def of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of a tensor; None for data."""
        op = tensor.op
        if op.type in op_types.FUSED_NORMS and tensor.value_index in (1, 2):
            return Origin.BATCH if op.get_attr("is_training") else None
        return self._origins.get(op)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on constants and variables only."""
        return self.of(tensor) in (Origin.CONSTANT, Origin.VARIABLE)

    def spreads(self, tensor: Tensor) -> frozenset[Operation]:
        """Return the ops behind a parameter that take the root of a variance."""
        # That is, of a sum with a small constant, as in `rsqrt(variance + epsilon)`.
        return self._spreads.get(tensor.op, frozenset())

    def _origin(self, op: Operation) -> Origin | None:
        kind = op.type
        if op in self.inputs:
            return None
        if kind in _CONSTANTS:
            return Origin.CONSTANT
        if kind in _VARIABLES:
            return Origin.VARIABLE
        if not op.inputs or not op.outputs:
            return None
        if kind in op_types.SHAPE_READERS:
            # That of a statistic is the number of channels.
            told = all(self.of(t) is Origin.BATCH for t in op.inputs)
            return Origin.CONSTANT if told else None
        if kind in _NEVER:
            return None
        if kind in LED_IN:
            varies = kind.endswith("Enter") and not op.get_attr("is_constant")
            return None if varies else self.of(op.inputs[0])
        max_origin = Origin.CONSTANT
        for t in self.sources(op):
            origin = self.of(t)
            if origin is None:
                # The mean of weights is a parameter, that of data a statistic.
                measures = kind in _MEASURES and is_statistic(op)
                return Origin.BATCH if measures else None
            max_origin = max(max_origin, origin)
        if kind in op_types.REDUCTIONS_OVER_REPLICAS:
            return max_origin
        return None if is_stateful(op) else max_origin

    def sources(self, op: Operation) -> Sequence[Tensor]:
        """Return the inputs of an op whose numbers its results are made of."""
        if op.type in op_types.REDUCTIONS_OVER_REPLICAS:
            return op.inputs[:1]
        return op.inputs

    def _behind(self, op: Operation) -> frozenset[Operation]:
        behind = frozenset(
            root for t in op.inputs for root in self._spreads.get(t.op, ())
        )
        return behind | {op} if _is_spread(op) else behind


def _is_spread(op: Operation) -> bool:
    if op.type not in ROOTS or op.inputs[0].op.type not in op_types.ADDITIONS:
        return False
    # A scalar is the scale of an attention, say.
    if op.outputs[0].shape.rank == 0:
        return False
    if op.type == "Pow" and tf.get_static_value(op.inputs[1]) not in (0.5, -0.5):
        return False
    return any(_is_small(t) for t in op.inputs[0].op.inputs)


def _is_small(tensor: Tensor) -> bool:
    value = scalar_value(tensor)
    return value is not None and 0 <= value < 1


MAX_IDENTITIES = 8
"""How many Identity ops `origin_of` looks through."""


def origin_of(tensor: Tensor) -> Operation:
    """Return the op behind a tensor, up to eight Identity ops looked through."""
    op = tensor.op
    for _ in range(MAX_IDENTITIES):
        if op.type != "Identity":
            break
        op = op.inputs[0].op
    return op


def scalar_value(tensor: Tensor) -> float | None:
    """Return the value of a constant of one element, else None."""
    op = adjacency.source_behind(tensor, ("Identity", "Cast")).op
    if op.type != "Const":
        return None
    value = tf.make_ndarray(op.get_attr("value"))
    return float(value.reshape(())) if value.size == 1 else None


def is_statistic(op: Operation) -> bool:
    """Return whether a reduction is over all axes of a batch but one."""
    rank = op.inputs[0].shape.rank
    axes = reduced_axes(op)
    return rank is not None and axes is not None and len(axes) == rank - 1 and 0 in axes


def reduced_axes(op: Operation) -> Sequence[int] | None:
    """Return the axes that a reduction reduces, counted from 0; None if not known."""
    rank = op.inputs[0].shape.rank
    axes = tf.get_static_value(op.inputs[1])
    if rank is None or axes is None:
        return None
    # A scalar has no axes to be counted from the end.
    return sorted({int(axis) % rank for axis in axes.reshape(-1)}) if rank else []


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
    """Return whether an op is a convolution of which no filter reads all channels."""
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
    """Return whether zeros may be read at the edges: not with 1x1 windows, or VALID."""
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
    **dict.fromkeys(op_types.MATRIX_PRODUCTS, _product),
    "DepthwiseConv2dNative": _depthwise,
    "Einsum": _einsum,
}
