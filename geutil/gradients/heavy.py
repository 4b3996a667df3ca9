"""The ops that take most of a network's time, by type."""

from __future__ import annotations

from geutil.graph.kinds import Operation, Tensor

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
# Loops, branches and calls: what they hold is unknown here, and often heavy.
BODIES = frozenset(
    ("If", "PartitionedCall", "StatelessIf", "StatelessWhile", "While", "StatelessCase")
)
HEAVY = CONVOLUTIONS | PRODUCTS | RECURRENT | DECOMPOSITIONS | BODIES
"""Types of ops that are worth more to keep than their neighbours."""

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
