"""What kernels hold only while they run."""

from __future__ import annotations

import math

from geutil.graph.kinds import Operation, Tensor
from geutil.memory.sizes import dims_of, dtype_bytes


def temporary_bytes(op: Operation) -> int:
    """Return the bytes that the kernel of an op allocates for itself.

    Matrix products and convolutions of oneDNN take scratch memory besides, which
    depends on the processor: 12 KB for each convolution, in a batched product at most
    some hundred KB. These are left out.
    """
    return einsum_bytes(op) if op.type == "Einsum" else 0


def einsum_bytes(op: Operation) -> int:
    """Return the bytes of the transposed copies that an Einsum works on.

    It multiplies matrices, so the labels of each operand have to be in the order batch,
    free, contracted; contracted before free will do, since a product can read a matrix
    transposed. An operand in another order is copied, and so is a product whose labels
    are in another order than asked for.
    """
    equation = op.get_attr("equation").decode().replace(" ", "")
    left, _, result = equation.partition("->")
    operands = left.split(",")
    if len(operands) != 2 or "." in equation:
        return 0
    number = {
        label: i for i, label in enumerate(dict.fromkeys("".join(operands) + result))
    }
    kinds = {label: _kind(label, operands, result) for label in number}
    extent: dict[str, int] = {}
    for labels, tensor in zip(operands, op.inputs, strict=True):
        extent.update(zip(labels, _sizes(tensor), strict=False))
    each = dtype_bytes(op.outputs[0].dtype)
    total = 0
    for labels in operands:
        straight = sorted(labels, key=lambda x: (kinds[x], number[x]))
        turned = sorted(labels, key=lambda x: (_TURNED[kinds[x]], number[x]))
        if list(labels) not in (straight, turned):
            total += each * _product(labels, extent)
    made = [
        *sorted((x for x in result if kinds[x] == _BATCH), key=number.__getitem__),
        *(x for labels in operands for x in _free(labels, kinds, number)),
    ]
    if list(result) != made:
        total += each * _product(result, extent)
    return total


_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)
_TURNED = (_BATCH, _CONTRACTED, _FREE, _REDUCED)


def _kind(label: str, operands: list[str], result: str) -> int:
    everywhere = all(label in labels for labels in operands)
    if label in result:
        return _BATCH if everywhere else _FREE
    return _CONTRACTED if everywhere else _REDUCED


def _free(labels: str, kinds: dict[str, int], number: dict[str, int]) -> list[str]:
    return sorted((x for x in labels if kinds[x] == _FREE), key=number.__getitem__)


def _sizes(tensor: Tensor) -> list[int]:
    return [dim or 0 for dim in dims_of(tensor) or ()]


def _product(labels: str, extent: dict[str, int]) -> int:
    return math.prod(extent.get(label, 0) for label in labels)
