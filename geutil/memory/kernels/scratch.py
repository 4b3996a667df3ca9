"""Memory that TensorFlow's CPU kernels allocate for themselves while they run.

Read off the allocation records of traced Sessions (TensorFlow 2.21). Kernels of oneDNN
take next to nothing: 12 KB for each convolution, in a batched product at most some
hundred KB, 1.3 MB if both operands are read transposed; these are left out, and so are
some KB of depthwise convolutions.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from geutil.graph.fetched_subgraph import uses_onednn
from geutil.graph.types import Operation, Tensor, dims_of
from geutil.memory.sizes import bytes_of_shape, dtype_bytes

DimsOf = Callable[[Tensor], Sequence[int | None] | None]

_PROCESSORS = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset(("avx512f", "avx_ne_convert"))

_CACHE = 30 << 20
"""The last cache that TensorFlow takes the processor to have, in bytes."""
_CORE_CACHE = 256 << 10
"""The cache of each core."""


def temporary_bytes(
    op: Operation, onednn: bool | None = None, dims: DimsOf = dims_of
) -> int:
    """Return the bytes that the kernel of an op allocates for itself.

    Args:
        op: the op; what depends on dimensions that are not known counts nothing.
        onednn: whether TensorFlow uses oneDNN; None for what this process does.
        dims: tells the shape of a tensor.

    Cost: that of reading some shapes.
    """
    if op.type == "Einsum":
        return _einsum_bytes(op, dims)
    if op.type == "MirrorPadGrad":
        return bytes_of_shape(op.inputs[0].dtype, dims(op.inputs[0])) or 0
    if op.type not in _WITHOUT_ONEDNN or runs_in_onednn(op, onednn):
        return 0
    return _WITHOUT_ONEDNN[op.type](op, dims)


def runs_in_onednn(op: Operation, onednn: bool | None = None) -> bool:
    """Tell whether a convolution, a pool or its gradient is one of oneDNN's kernels.

    These take no explicit padding in gradients. Processors of which they take float16
    are rare, so that it is taken to be none of theirs.

    Args:
        op: the op.
        onednn: as in `temporary_bytes`.
    """
    onednn = uses_onednn() if onednn is None else onednn
    dtype = op.outputs[0].dtype
    takes = dtype == tf.float32 or (dtype == tf.bfloat16 and _takes_bfloat16())
    return onednn and takes and op.get_attr("padding") != b"EXPLICIT"


@cache
def _takes_bfloat16() -> bool:
    """Tell whether oneDNN has kernels of bfloat16 for this processor.

    TensorFlow asks for AVX-512, or AVX-NE-CONVERT. Where the processor's flags are not
    told they are taken to be there.
    """
    try:
        told = _PROCESSORS.read_text(encoding="utf-8")
    except OSError:
        return True
    flags = re.search(r"^flags\s*:(.*)$", told, re.MULTILINE)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def threads_of_ops() -> int:
    """Return how many threads one op of this process may use; a Session may differ."""
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    if threads:
        return int(threads)
    # As TensorFlow counts; macOS and Windows do not tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Columns(NamedTuple):
    """The matrices of a convolution's gradient, for one image.

    Attributes:
        elements: those of the patches of the image, as the columns of a matrix.
        work: those together with the elements of the filter and of the gradient.
        each: the bytes of an element.
        images: how many there are; None if that is not known.
    """

    elements: int
    work: int
    each: int
    images: int | None

    @property
    def bytes_in_cache(self) -> int:
        """The bytes of patches, for as many images as fill the last cache.

        However few there are.
        """
        return -(-(_CACHE // self.each) // self.work) * self.elements * self.each


def _columns(filters: Tensor, gradient: Tensor, dims: DimsOf) -> _Columns | None:
    """Return the matrices; None if they are not known."""
    kernel, image = dims(filters), dims(gradient)
    if not kernel or not image or None in (*image[1:], *kernel):
        return None
    # On a CPU, channels come last.
    pixels = math.prod(dim or 0 for dim in image[1:3])
    patch, depth = math.prod(dim or 0 for dim in kernel[:3]), kernel[3] or 0
    work = pixels * patch + pixels * depth + patch * depth
    return _Columns(pixels * patch, work, dtype_bytes(filters.dtype), image[0])


def _filter_gradient_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropFilter: patches of many images."""
    columns = _columns(op.outputs[0], op.inputs[2], dims)
    return columns.bytes_in_cache if columns and columns.work else 0


def _image_gradient_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of a Conv2DBackpropInput: patches of one image or of many.

    Of one where that is work enough for all threads, or there are no more.
    """
    columns = _columns(op.inputs[1], op.inputs[2], dims)
    if not columns or not columns.work:
        return 0
    share = columns.work // threads_of_ops()
    if columns.images == 1 or share >= _CORE_CACHE // columns.each:
        return columns.elements * columns.each
    return columns.bytes_in_cache


def _depthwise_filter_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the gradients of each image, which are added up then."""
    images = (dims(op.inputs[2]) or (None,))[0]
    size = bytes_of_shape(op.outputs[0].dtype, dims(op.outputs[0]))
    return ((images or 0) + 1) * (size or 0)


def _maxima_bytes(op: Operation, dims: DimsOf) -> int:
    """Return the bytes of the places of maxima, which are looked for anew."""
    return 8 * math.prod(dim or 0 for dim in dims(op.inputs[1]) or (0,))


_WITHOUT_ONEDNN = {
    "Conv2DBackpropFilter": _filter_gradient_bytes,
    "Conv2DBackpropInput": _image_gradient_bytes,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_filter_bytes,
    "MaxPoolGrad": _maxima_bytes,
}


def _einsum_bytes(op: Operation, dims: DimsOf) -> int:
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
        extent.update(zip(labels, _sizes(tensor, dims), strict=False))
    each = dtype_bytes(op.outputs[0].dtype)
    total = 0
    for labels in operands:
        straight = sorted(labels, key=lambda x: (kinds[x], number[x]))
        turned = sorted(labels, key=lambda x: (_TURNED[kinds[x]], number[x]))
        if list(labels) not in (straight, turned):
            total += each * _product(labels, extent)
    product_labels = [
        *sorted((x for x in result if kinds[x] == _BATCH), key=number.__getitem__),
        *(x for labels in operands for x in _free(labels, kinds, number)),
    ]
    if list(result) != product_labels:
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


def _sizes(tensor: Tensor, dims: DimsOf) -> list[int]:
    return [dim or 0 for dim in dims(tensor) or ()]


def _product(labels: str, extent: dict[str, int]) -> int:
    return math.prod(extent.get(label, 0) for label in labels)
