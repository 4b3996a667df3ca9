"""The computing that an op takes, from its type and static shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

from geutil.graph.op_types import SHAPE_READERS
from geutil.graph.types import Operation, Tensor
from geutil.memory.kernels import cpu
from geutil.memory.sizes import UNKNOWN, known_dims, tensor_elements

CONVOLUTIONS = frozenset(
    (
        "Conv",
        "Conv2D",
        "Conv2DBackpropInput",
        "Conv2DBackpropInputV2",
        "Conv3D",
        "Conv3DBackpropInput",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
        "Dilation2D",
        "XlaConv",
        "XlaConvV2",
    )
)
PRODUCTS = frozenset(
    (
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "Einsum",
        "MatMul",
        "SparseMatMul",
        "SparseTensorDenseMatMul",
        "XlaDot",
        "XlaDotV2",
        "XlaEinsum",
    )
)
RECURRENT = frozenset(
    ("BlockLSTM", "BlockLSTMV2", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "GRUBlockCell")
)
DECOMPOSITIONS = frozenset(
    ("Cholesky", "MatrixInverse", "MatrixSolve", "MatrixTriangularSolve", "Qr", "Svd")
)
FILTER_GRADIENTS = frozenset(
    (
        "Conv2DBackpropFilter",
        "Conv2DBackpropFilterV2",
        "Conv3DBackpropFilterV2",
        "DepthwiseConv2dNativeBackpropFilter",
        "DepthwiseConv2dNativeBackpropInput",
    )
)
"""Types of ops of the backward pass alone that take as long as a convolution."""
# Loops, branches and calls: what they hold is unknown here, and often heavy.
BODIES = frozenset(
    ("If", "PartitionedCall", "StatelessIf", "StatelessWhile", "While", "StatelessCase")
)
HEAVY = CONVOLUTIONS | PRODUCTS | RECURRENT | DECOMPOSITIONS | BODIES
"""Types of ops that are worth more to keep than their neighbours."""

_MOVED = 16
"""What moving an element costs, in multiply-adds of a convolution or product."""
_DEPTHWISE = 8
"""What a multiply-add of a depthwise convolution costs, in those of others."""
_FACTORS = {
    **dict.fromkeys(("All", "Any", "Max", "Mean", "Min", "Prod", "Sum"), 2),
    **dict.fromkeys(("Cos", "Elu", "Log", "Selu", "Sin", "Softplus", "Softsign"), 3),
    **dict.fromkeys(("Erf", "Erfc", "Log1p", "Pow", "Sigmoid", "Tanh"), 4),
    "Einsum": 2,
    **dict.fromkeys(("AvgPool", "AvgPool3D"), 2),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), 4),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), 10),
    "SparseSoftmaxCrossEntropyWithLogits": 8,
    "SoftmaxCrossEntropyWithLogits": 8,
}
"""What an element costs in ops that do more than move it, in those that are moved."""

Times = Callable[[Operation], float]
"""Tells how long an op takes, in any unit."""

_BIAS = frozenset(("BiasAdd", "BiasAddV1"))


def is_heavy(tensor: Tensor) -> bool:
    """Tell whether a tensor is what a heavy op computes, its bias included.

    Kernels add the bias in place, so it is the sum that is kept.
    """
    op = tensor.op
    if op.type in _BIAS:
        return op.inputs[0].op.type in HEAVY
    return op.type in HEAVY and not _is_biased(op)


def _is_biased(op: Operation) -> bool:
    readers = [reader for t in op.outputs for reader in t.consumers()]
    return any(reader.type in _BIAS for reader in readers)


def multiply_adds(op: Operation) -> int:
    """Return the multiply-adds of an op, an unknown dimension counted as 32.

    Exact for convolutions and matrix products. Any other op counts one for each
    element that it reads or writes.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory.op_costs import multiply_adds
        >>> with tf.Graph().as_default():
        ...     y = tf.matmul(tf.zeros([8, 16]), tf.zeros([16, 4]))
        >>> multiply_adds(y.op)
        512
    """
    if op.type in CONVOLUTIONS:
        return _convolution(op)
    if op.type in PRODUCTS and len(op.inputs) == 2:
        return _product(op)
    return sum(tensor_elements(t) for t in (*op.inputs, *op.outputs))


def op_time(op: Operation) -> float:
    """Return about how long an op takes, in multiply-adds of a convolution.

    Its multiply-adds, and 16 for each element that it reads or writes: as many as two
    cores with AVX512 do meanwhile, in the mean of the ops of eleven networks. Ops that
    reduce, pool or compute a transcendental function take more for an element. What
    shows the buffer of another tensor, or that of a variable, or the shape of either,
    takes nothing.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory.op_costs import op_time
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([8, 16])
        ...     y = tf.matmul(x, tf.zeros([16, 4]))
        ...     z = tf.reshape(x, [128])
        >>> op_time(y.op) == 8 * 16 * 4 + 16 * (128 + 64 + 32), op_time(z.op)
        (True, 0.0)
    """
    if op.type in cpu.HELD or op.type in SHAPE_READERS or _is_view(op):
        return 0.0
    elements = sum(tensor_elements(t) for t in (*op.inputs, *op.outputs))
    moved = _MOVED * _FACTORS.get(op.type, 1) * elements
    if op.type in FILTER_GRADIENTS:
        amount = _filter_gradient(op)
    else:
        amount = multiply_adds(op) if op.type in HEAVY else 0
    depthwise = op.type.startswith("DepthwiseConv")
    return float(moved + (_DEPTHWISE if depthwise else 1) * amount)


def _is_view(op: Operation) -> bool:
    """Tell whether all that an op makes is there already."""
    return 0 < len(op.outputs) == len(cpu.aliases(op))


def _convolution(op: Operation) -> int:
    """Each output element takes one multiply-add for each weight that it sees."""
    transposed = "BackpropInput" in op.type
    # The transposed convolution reads what the plain one would write.
    spread = op.inputs[2] if transposed else op.outputs[0]
    weights = _dimensions(op.inputs[1])
    if op.type in ("DepthwiseConv2dNative", "Dilation2D"):
        return tensor_elements(spread) * math.prod(weights[:2])
    # Weights are [*window, channels in, channels out]; each output channel has its own.
    return tensor_elements(spread) * math.prod(weights[:-1])


def _filter_gradient(op: Operation) -> int:
    """Count each weight that each element of the layer's output saw, as forwards."""
    shown = op.inputs[1] if op.type.endswith("BackpropInput") else op.outputs[0]
    weights = _dimensions(shown)
    depthwise = op.type.startswith("Depthwise")
    each = weights[:2] if depthwise else weights[:-1]
    return tensor_elements(op.inputs[2]) * math.prod(each)


def _product(op: Operation) -> int:
    """Count each kind of dimension once.

    In |left| x |right| x |out| each counts twice, only that one of a batch which all
    three have counts three times.
    """
    left, right = (tensor_elements(t) for t in op.inputs)
    out = tensor_elements(op.outputs[0])
    shared = _shared_by_einsum(op) if op.type == "Einsum" else _shared_batch(op)
    return math.isqrt(left * right * out // shared) if shared else 0


def _shared_batch(op: Operation) -> int:
    """Return the product of the batch dimensions that are not broadcast."""
    left, right = (reversed(_dimensions(t)[:-2]) for t in op.inputs)
    return math.prod(a for a, b in zip(left, right, strict=False) if a == b)


def _shared_by_einsum(op: Operation) -> int:
    """Return the product of the dimensions that all three terms of an einsum have."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "." in equation or "->" not in equation:
        return 1
    terms, result = equation.split("->")
    left, right = terms.split(",")
    sizes = dict(zip(left, _dimensions(op.inputs[0]), strict=True))
    shared = set(left) & set(right) & set(result)
    return math.prod(sizes[label] for label in sorted(shared))


def _dimensions(tensor: Tensor) -> list[int]:
    return [UNKNOWN if d is None else d for d in known_dims(tensor) or ()]
