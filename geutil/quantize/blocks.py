"""Blocks of weights: a range for every few inputs of each channel of a matrix.

Where the rows of a matrix [inputs, outputs] differ in size, one range for a whole
column wastes the levels of 4 bits on the largest of them. In blocks of B inputs each
column has inputs / B ranges (Dettmers and Zettlemoyer 2023, arXiv 2212.09720).
FakeQuant ops know channels along the last axis alone, so the matrix is brought to
[B, inputs / B * outputs] before them, and back behind them.

LiteRT has one kernel for that: FULLY_CONNECTED, on floats and weights of 4 bits. It
accepts only scales in float16 (LiteRT 2.1 to 2.3), so only these are simulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation
from geutil.graph.types import Operation
from geutil.quantize.planning.int8_kernels import PRODUCTS
from geutil.quantize.rounding.layer_rows import reads_in_order, rows_of
from geutil.quantize.spec import BLOCK_BITS, Format, Range, Spec
from geutil.select.networks.layers import Layer

MARK = "_geutil_blocks"
"""The mark of FakeQuant ops whose columns are blocks."""
MOVES = ("Reshape", "Transpose", "Reshape")
"""The ops that bring weights to FakeQuant ops of blocks, and those behind these."""
_LARGEST = float(np.finfo(np.float16).max)


def block_format(layer: Layer, spec: Spec, block: int) -> Format | str:
    """Return how the weights of a layer are stored in blocks, or why they are not."""
    if layer.op.type not in PRODUCTS:
        return ""
    if (spec.weight_bits or BLOCK_BITS) > BLOCK_BITS:
        return f"TFLite has no kernel for blocks of {spec.weight_bits} bits"
    if not (spec.per_channel and spec.symmetric_weights):
        return "blocks are symmetric, and parts of channels"
    if layer.weights == 0:
        return "it reads its weights before the data"
    rows = rows_of(layer)
    if isinstance(rows, str):
        return f"it {rows}"
    groups, inputs, _ = rows.sizes
    if groups > 1 or rows.counts[0]:
        return "it multiplies several matrices"
    if inputs % block:
        return f"its {inputs} inputs are no multiple of {block}"
    axes = rows.order[rows.counts[1] :]
    together = list(range(axes[0], axes[0] + len(axes)))
    at_an_end = axes[0] == 0 or axes[-1] == len(rows.shape) - 1
    if list(axes) != together or not at_an_end or not reads_in_order(layer):
        return "it reads inputs that do not lie in a row in its weights"
    return Format(spec.weight_bits or BLOCK_BITS, True, True, axes, block)


def in_blocks(x: Any, form: Format, of: Any = tf) -> Any:
    """Return weights with their blocks as columns: [block, blocks * outputs]."""
    split, order = _split(form, _shape(x))
    return of.reshape(of.transpose(of.reshape(x, split), order), [form.block, -1])


def from_blocks(x: Any, form: Format, shape: list[int], of: Any = tf) -> Any:
    """Return weights in their own shape again; see `in_blocks`."""
    split, order = _split(form, shape)
    # Both orders are their own inverses.
    return of.reshape(
        of.transpose(of.reshape(x, [split[axis] for axis in order]), order), shape
    )


def block_count(form: Format, shape: list[int]) -> int:
    """Return how many blocks weights have in all."""
    return int(np.prod(shape)) // (form.block or 1)


def with_stored_steps(ends: Range, form: Format) -> Range:
    """Return symmetric ranges with the nearest steps that a file can store.

    Example:
        >>> import numpy as np
        >>> from geutil.quantize.blocks import with_stored_steps
        >>> from geutil.quantize.spec import Format, Range
        >>> form = Format(4, True, True, (1,), block=32)
        >>> ends = Range(np.float32([-0.7]), np.float32([0.7]))
        >>> low, high = with_stored_steps(ends, form)
        >>> float(high[0] / 7) == float(np.float16(0.1))
        True
    """
    # Those of blocks are float16, of 11 bits: the largest weight may lie 0.003 steps
    # outside; what lies beyond levels of 65504, the largest of them, is cut off. Other
    # ranges are returned as they are.
    if form.block is None:
        return ends
    most = np.float32(2 ** (form.bits - 1) - 1)
    if tf.is_tensor(ends.high):
        step = tf.minimum(ends.high / most, _LARGEST)
        size = tf.cast(tf.cast(step, tf.float16), tf.float32) * most
    else:
        step = np.minimum(np.asarray(ends.high, np.float32) / most, _LARGEST)
        size = step.astype(np.float16).astype(np.float32) * most
    return Range(-size, size)


def block_of(simulation: Operation) -> int | None:
    """Return how many inputs a range of a FakeQuant op is for; None without blocks."""
    is_marked = creation.has_mark(simulation, MARK)
    return int(simulation.inputs[0].shape[0]) if is_marked else None


def _split(form: Format, shape: list[int]) -> tuple[list[int], list[int]]:
    """Return the shape of weights with blocks apart, and the order that joins them."""
    block = form.block or 1
    outputs = int(np.prod([shape[axis] for axis in form.axes]))
    blocks = block_count(form, shape) // outputs
    if form.axes[0] == 0:
        return [outputs, blocks, block], [2, 1, 0]
    return [blocks, block, outputs], [1, 0, 2]


def _shape(x: Any) -> list[int]:
    return list(x.shape)
