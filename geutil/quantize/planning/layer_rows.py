"""Layers as products of rows of data with a matrix of weights, whatever their type.

A convolution multiplies each window of the data, as a row, by its weights as a matrix
[window, outputs]; one in groups has several such matrices, a depthwise one a matrix
[window, multiplier] for each channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.quantize.planning.int8_kernels import PRODUCTS
from geutil.select.networks.layers import Layer, data_format

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class RowsOfLayer:
    """A layer as products of rows with matrices."""

    layer: Layer
    shape: tuple[int, ...]
    sizes: tuple[int, int, int]  # how many groups, inputs and outputs there are
    split: tuple[int, ...]  # the shape of the weights with outputs divided by groups
    # The axes of that: those of groups, of inputs, and of outputs.
    order: tuple[int, ...]
    counts: tuple[int, int]  # how many of them count groups, and how many inputs

    def matrices(self, weights: Array) -> Array:
        """Return weights as matrices: [groups, inputs, outputs]."""
        divided = weights.reshape(self.split).transpose(self.order)
        return divided.reshape(self.sizes)

    def weights(self, matrices: Array) -> Array:
        """Return matrices in the shape of the weights."""
        divided = matrices.reshape([self.split[axis] for axis in self.order])
        return divided.transpose(np.argsort(self.order)).reshape(self.shape)

    def rows(self, data: Any) -> Any:
        """Return the rows of a batch of data: a tensor [groups, rows, inputs]."""
        _, rows = _KINDS[self.layer.op.type]
        return rows(self, data)


def rows_of(layer: Layer) -> RowsOfLayer | str:
    """Return a layer as products of rows, or why it is none."""
    shape = layer.kernel.shape
    if not shape.is_fully_defined():
        return "has weights of unknown shape"
    kind = _KINDS.get(layer.op.type)
    if kind is None:
        return f"({layer.op.type}) is no product of rows with a matrix"
    split = kind[0](layer, tuple(shape.as_list()))
    if isinstance(split, str):
        return split
    parts, order, counts = split
    sizes = [1, 1, 1]
    for axis, size in enumerate(parts[axis] for axis in order):
        place = 0 if axis < counts[0] else 1 if axis < counts[0] + counts[1] else 2
        sizes[place] *= size
    groups, inputs, outputs = sizes
    return RowsOfLayer(
        layer, tuple(shape.as_list()), (groups, inputs, outputs), parts, order, counts
    )


def reads_in_order(layer: Layer) -> bool:
    """Return whether data and weights of a product count inputs in the same order."""
    if layer.op.type != "Einsum":
        return True
    of_data, of_weights, _ = _labels(layer)
    both = [
        [n for n in labels if n in of_data and n in of_weights]
        for labels in (of_data, of_weights)
    ]
    return both[0] == both[1]


Split = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]
"""`split` and `order` of a layer, and how many axes count groups and inputs."""


def _split_convolution(layer: Layer, shape: tuple[int, ...]) -> Split | str:
    *window, inputs, outputs = shape
    channels = layer.op.inputs[layer.data].shape
    rank = len(shape)
    if channels.rank is None or channels[rank + layer.axis] is None:
        return "reads data with an unknown number of channels"
    groups = channels[rank + layer.axis] // inputs
    count = len(window)
    parts = (*window, inputs, groups, outputs // groups)
    order = (count + 1, *range(count + 1), count + 2)
    return parts, order, (1, count + 1)


def _split_depthwise(layer: Layer, shape: tuple[int, ...]) -> Split | str:
    del layer
    return shape, (2, 0, 1, 3), (1, 2)


def _split_product(layer: Layer, shape: tuple[int, ...]) -> Split | str:
    rank = len(shape)
    data = layer.op.inputs[layer.data].shape
    batch = shape[:-2]
    alike = data.rank == rank and tuple(data.as_list()[:-2]) == batch
    if any(size != 1 for size in batch) and not alike:
        return "multiplies several matrices by the same data"
    order = (*range(rank - 2), *layer.inputs, *layer.outputs)
    return shape, order, (rank - 2, 1)


def _split_einsum(layer: Layer, shape: tuple[int, ...]) -> Split | str:
    of_data, of_weights, result = _labels(layer)
    if any(label in of_data and label in result for label in of_weights):
        return "(Einsum) multiplies several matrices"
    inputs = [axis for axis, label in enumerate(of_weights) if label in of_data]
    others = [axis for axis in range(len(shape)) if axis not in inputs]
    return shape, (*inputs, *others), (0, len(inputs))


def _labels(layer: Layer) -> tuple[str, str, str]:
    """Return the labels of data, weights and result."""
    equation = layer.op.get_attr("equation").decode().replace(" ", "")
    operands, _, result = equation.partition("->")
    labels = operands.split(",")
    return labels[layer.data], labels[layer.weights], result


def _windows(rows: RowsOfLayer, data: Any) -> Any:
    """Return the windows of images: [images, height, width, window, channels]."""
    op = rows.layer.op
    strides, rates = (list(op.get_attr(n)) for n in ("strides", "dilations"))
    padding = op.get_attr("padding").decode()
    pads = _pairs(op.get_attr("explicit_paddings")) if padding == "EXPLICIT" else None
    # The channels of `extract_patches` are the last axis.
    if data_format(op) == "NCHW":
        data = tf.transpose(data, [0, 2, 3, 1])
        strides, rates = _channels_last(strides), _channels_last(rates)
        pads = _channels_last(pads) if pads else None
    if pads:
        data = tf.pad(data, pads)
    height, width = rows.shape[:2]
    patches = tf.image.extract_patches(
        data,
        [1, height, width, 1],
        strides,
        rates,
        "VALID" if padding == "EXPLICIT" else padding,
    )
    sizes = tf.shape(patches)
    channels = data.shape[-1]
    return tf.reshape(
        patches, [sizes[0] * sizes[1] * sizes[2], height * width, channels]
    )


def _pairs(flat: Sequence[int]) -> list[list[int]]:
    return [list(flat[i : i + 2]) for i in range(0, len(flat), 2)]


def _channels_last(values: Sequence[Any]) -> list[Any]:
    first, channels, *others = values
    return [first, *others, channels]


def _convolution_rows(rows: RowsOfLayer, data: Any) -> Any:
    """Return windows [rows, window, channels] by groups of channels."""
    windows = _windows(rows, data)
    groups, inputs, _ = rows.sizes
    count, window = tf.shape(windows)[0], windows.shape[1]
    parts = tf.reshape(windows, [count, window, groups, inputs // window])
    return tf.reshape(tf.transpose(parts, [2, 0, 1, 3]), [groups, count, inputs])


def _product_rows(rows: RowsOfLayer, data: Any) -> Any:
    groups, inputs, _ = rows.sizes
    return tf.reshape(data, [groups, -1, inputs])


def _einsum_rows(rows: RowsOfLayer, data: Any) -> Any:
    of_data, of_weights, _ = _labels(rows.layer)
    contracted = [label for label in of_weights if label in of_data]
    others = [label for label in of_data if label not in contracted]
    moved = tf.transpose(data, [of_data.index(n) for n in (*others, *contracted)])
    return tf.reshape(moved, [1, -1, rows.sizes[1]])


_KINDS = {
    "Conv2D": (_split_convolution, _convolution_rows),
    "DepthwiseConv2dNative": (_split_depthwise, _convolution_rows),
    "Einsum": (_split_einsum, _einsum_rows),
} | dict.fromkeys(PRODUCTS - {"Einsum"}, (_split_product, _product_rows))
"""By types of layers the functions that split weights, and that take rows of data."""
