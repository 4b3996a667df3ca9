"""Shapes and types of the tensors that ops make, by the kind of the op.

The rules are those of TFLite's kernels (their `Prepare`). Sizes that depend on data, or
on a free size, are None; shapes of ops without a rule, such as custom ops, are unknown.

Where a size is free, a converter leaves ops such as `tf.shape(x)[0] * 4` in a file.
Arrays of such sizes hold Python's numbers, and None for those that are not known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite.kinds import KINDS, OTHER
from geutil.tflite.parts import Array, LiteOp, LiteTensor
from geutil.tflite.schema import type_names

Size = int | None
Shape = tuple[Size, ...] | None
Known = tuple[Size, ...]


class Unknown(Exception):  # noqa: N818
    """A shape is not known; not an error."""


class _MismatchError(Exception):
    """Inputs do not fit an op."""


class Case:
    """The inputs of an op, as rules read them."""

    def __init__(
        self, op: LiteOp, shapes: Sequence[Shape], values: Sequence[Array | None]
    ) -> None:
        self.op, self.shapes, self.values = op, shapes, values

    def shape(self, place: int) -> Known:
        """Return the shape of an input."""
        shape = self.shapes[place] if place < len(self.shapes) else None
        if shape is None:
            raise Unknown
        return shape

    def maybe(self, place: int) -> Array | None:
        """Return the array of an input, None if it is not known."""
        return self.values[place] if place < len(self.values) else None

    def entries(self, place: int) -> Array:
        """Return the array of an input, with None for entries that are not known."""
        value = self.maybe(place)
        if value is None:
            raise Unknown
        return value

    def value(self, place: int) -> Array:
        """Return the array of an input, whose entries are all known."""
        value = self.entries(place)
        if value.dtype == object and None in value.reshape(-1):
            raise Unknown
        return value

    def sizes(self, place: int) -> Known:
        """Return the sizes that an input lists, None for those that are not known."""
        value = self.maybe(place)
        if value is None:
            (rank,) = self.shape(place) or (1,)
            if rank is None:
                raise Unknown
            return (None,) * rank
        return tuple(None if v is None else int(v) for v in value.reshape(-1))

    def option(self, name: str, default: Any = 0) -> Any:
        """Return an option."""
        return self.op.options.get(name, default)


Rule = Callable[[Case], list[Shape]]


def volume(shape: Sequence[Size]) -> Size:
    """Return the number of values in a shape."""
    return None if None in shape else math.prod(size or 0 for size in shape)


def _sum(sizes: Sequence[Size]) -> Size:
    return None if None in sizes else sum(size or 0 for size in sizes)


def _if_known(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return a function of numbers; None if one of them is not known."""
    return None if None in numbers else function(*numbers)


def broadcast(*shapes: Known) -> Known:
    """Return the shape that shapes broadcast to.

    Example:
        >>> from geutil.tflite.shapes import broadcast
        >>> broadcast((None, 1, 3), (4, 1))
        (None, 4, 3)
    """
    rank = max(len(shape) for shape in shapes)
    made: list[Size] = []
    for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        wide = {size for size in sizes if size not in (1, None)}
        if len(wide) > 1:
            raise _MismatchError(
                f"shapes {' and '.join(map(_text, shapes))} do not broadcast"
            )
        made.append(next(iter(wide)) if wide else None if None in sizes else 1)
    return tuple(made)


def _text(shape: Known) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _axis(axis: Any, rank: int) -> int:
    """Return an axis counted from the front."""
    place = int(np.asarray(axis).reshape(-1)[0])
    if not -rank <= place < max(rank, 1):
        raise _MismatchError(f"axis {place} of a tensor of rank {rank}")
    return place % max(rank, 1)


def _axes(value: Array, rank: int) -> list[int]:
    return [_axis(axis, rank) for axis in value.reshape(-1)]


def _one(rule: Callable[[Case], Known]) -> Rule:
    """Return the rule of ops that make one tensor."""
    return lambda case: [rule(case)]


def _put(x: Known, axis: int, sizes: Sequence[Size], gone: int = 1) -> Known:
    """Return a shape with other sizes in the place of some dimensions."""
    return (*x[:axis], *sizes, *x[axis + gone :])


def _image(case: Case, kernel: Sequence[Size], made: Size) -> list[Shape]:
    """[batch, height, width, channels] by a window of height and width."""
    n, h, w, _ = case.shape(0)
    kh, kw = kernel
    return [(n, _window(h, case, kh, "h"), _window(w, case, kw, "w"), made)]


def _conv(case: Case) -> list[Shape]:
    """[batch, height, width, channels] by [channels made, height, width, ...]."""
    (_, _, _, depth), (made, kh, kw, per_group) = case.shape(0), case.shape(1)
    if _if_known(operator.mod, depth, per_group):
        raise _MismatchError(f"its weights take {per_group} channels, not {depth}")
    return _image(case, (kh, kw), made)


def _depthwise(case: Case) -> list[Shape]:
    (_, _, _, depth), (_, kh, kw, made) = case.shape(0), case.shape(1)
    if _if_known(operator.mod, made, depth):
        raise _MismatchError(f"its weights make {made} channels of {depth}")
    return _image(case, (kh, kw), made)


def _pool(case: Case) -> list[Shape]:
    kernel = case.option("filter_height"), case.option("filter_width")
    return _image(case, kernel, case.shape(0)[-1])


def _mapped(rule: Callable[[Known, Array], Known]) -> Rule:
    """Return the rule of ops that keep a rank, whose input 1 says how sizes change."""

    def shapes(case: Case) -> list[Shape]:
        x = case.shape(0)
        return [(None,) * len(x) if case.maybe(1) is None else rule(x, case.value(1))]

    return shapes


def _padded(x: Known, pads: Array) -> Known:
    sums = zip(x, pads.reshape(-1, 2).sum(1).tolist(), strict=True)
    return tuple(_if_known(operator.add, size, more) for size, more in sums)


def _pack(case: Case) -> list[Shape]:
    x, count = case.shape(0), len(case.shapes)
    axis = _axis(case.option("axis"), len(x) + 1)
    others = map(case.shape, range(count))
    if any(None not in (*x, *other) and other != x for other in others):
        raise _MismatchError("its inputs differ in shape")
    return [_put(x, axis, [count], 0)]


def _unpack(case: Case) -> list[Shape]:
    x, count = case.shape(0), len(case.op.outputs)
    axis = _axis(case.option("axis"), len(x))
    if x[axis] not in (None, count):
        raise _MismatchError(f"it makes {count} tensors of {x[axis]}")
    return [_put(x, axis, [])] * count


def _split(case: Case) -> list[Shape]:
    x, count = case.shape(1), len(case.op.outputs)
    axis = _axis(case.value(0), len(x))
    size = x[axis]
    if _if_known(operator.mod, size, count):
        raise _MismatchError(f"{size} cannot be split into {count}")
    return [_put(x, axis, [_if_known(operator.floordiv, size, count)])] * count


def _gather(case: Case) -> list[Shape]:
    x, indices = case.shape(0), case.shape(1)
    axis = _axis(case.option("axis"), len(x))
    return [_put(x, axis, indices[case.option("batch_dims") :])]


def _one_hot(case: Case) -> list[Shape]:
    x, axis = case.shape(0), case.option("axis", -1)
    return [_put(x, len(x) if axis == -1 else axis, [case.sizes(1)[0]], 0)]


def _in_blocks(case: Case) -> list[Shape]:
    """SPACE_TO_BATCH_ND, and BATCH_TO_SPACE_ND, by blocks and paddings or crops."""
    n, *sizes = case.shape(0)
    blocks, ends = case.value(1).reshape(-1), case.value(2).reshape(-1, 2)
    gathers = case.op.kind == "BATCH_TO_SPACE_ND"
    for i, (step, more) in enumerate(zip(blocks, ends.sum(1), strict=True)):
        size, block = sizes[i], int(step)
        n = _if_known(operator.floordiv if gathers else operator.mul, n, block)
        if size is not None and gathers:
            sizes[i] = size * block - int(more)
        elif size is not None:
            sizes[i], left = divmod(size + int(more), block)
            if left:
                raise _MismatchError(f"{size} and its paddings are no blocks of {step}")
    return [(n, *sizes)]


def _svdf(case: Case) -> list[Shape]:
    filters, rank = case.shape(1)[0], case.option("rank") or 1
    return [(case.shape(0)[0], filters and filters // rank)]


def _segments(case: Case) -> list[Shape]:
    ids = case.maybe(1)
    count = None if ids is None or not ids.size else int(ids.reshape(-1)[-1]) + 1
    return [(count, *case.shape(0)[1:])]


def _fourier(case: Case) -> list[Shape]:
    high, wide = case.sizes(1)
    return [(*case.shape(0)[:-2], high, _if_known(lambda w: w // 2 + 1, wide))]


def _window(size: Size, case: Case, kernel: Size, letter: str) -> Size:
    """Return how many places a kernel has along a dimension."""
    if size is None or kernel is None:
        return None
    name = {"h": "height", "w": "width", "d": "depth"}[letter]
    # The schema's default of strides is 0, which kernels divide by.
    stride = case.option(f"stride_{letter}")
    dilation = case.option(f"dilation_{letter}_factor", 1)
    if min(stride, dilation) < 1:
        raise _MismatchError(f"its stride_{letter} and dilation are at least 1")
    if case.option("padding") == "SAME":
        return -(-size // stride)
    places = -(-(size - (kernel - 1) * dilation) // stride)
    if places < 1:
        raise _MismatchError(
            f"its window of {name} {(kernel - 1) * dilation + 1} is larger than {size}"
        )
    return places


def _conv_3d(case: Case) -> list[Shape]:
    (n, *sizes, _), (*kernel, _, made) = case.shape(0), case.shape(1)
    places = (
        _window(size, case, k, letter)
        for size, k, letter in zip(sizes, kernel, "dhw", strict=True)
    )
    return [(n, *places, made)]


def _fully_connected(case: Case) -> list[Shape]:
    x, (units, depth) = case.shape(0), case.shape(1)
    if case.option("keep_num_dims"):
        if _if_known(operator.ne, x[-1], depth):
            raise _MismatchError(f"its weights take {depth} values, not {x[-1]}")
        return [(*x[:-1], units)]
    total = volume(x)
    if total is None or depth is None:
        return [(x[0] if len(x) == 2 else None, units)]
    if total % depth:
        raise _MismatchError(f"its weights take {depth} values, and {total} are given")
    return [(total // depth, units)]


def _batch_matmul(case: Case) -> list[Shape]:
    x, y = case.shape(0), case.shape(1)
    rows, inner = (x[-1], x[-2]) if case.option("adj_x") else (x[-2], x[-1])
    own, columns = (y[-1], y[-2]) if case.option("adj_y") else (y[-2], y[-1])
    if _if_known(operator.ne, inner, own):
        raise _MismatchError(f"{_text(x)} and {_text(y)} do not fit a product")
    return [(*broadcast(x[:-2], y[:-2]), rows, columns)]


def _reshape(case: Case) -> list[Shape]:
    if len(case.shapes) > 1 and case.op.inputs[1] is not None:
        target = case.sizes(1)
    else:
        target = tuple(int(v) for v in case.option("new_shape", ()))
        # Old files mean a scalar by it.
        target = () if target == (0,) else target
    return [reshaped(case.shapes[0], target)]


def reshaped(shape: Shape, target: Known) -> Known:
    """Return the shape of a tensor of a shape when it is reshaped to a target."""
    total = None if shape is None else volume(shape)
    rest = volume([size for size in target if size != -1])
    free: Size = None
    misfits = False
    if -1 not in target:
        misfits = _if_known(operator.ne, total, rest)
    # Beside a size of 0 any number fits, so that -1 stays open.
    elif total is not None and rest:
        free, misfits = total // rest, total % rest > 0
    if misfits:
        raise _MismatchError(
            f"{total} values do not fit the shape {_text(target)} that it makes"
        )
    return tuple(free if size == -1 else size for size in target)


def _squeeze(case: Case) -> list[Shape]:
    x = case.shape(0)
    axes = _axes(np.asarray(case.option("squeeze_dims", ()), np.int64), len(x))
    if any(x[axis] not in (1, None) for axis in axes):
        raise _MismatchError(f"dimensions {axes} of {_text(x)} are not all 1")
    gone = axes or [i for i, size in enumerate(x) if size == 1]
    return [tuple(size for i, size in enumerate(x) if i not in gone)]


def _slice(case: Case) -> list[Shape]:
    x, made = case.shape(0), []
    begins, sizes = case.sizes(1), case.sizes(2)
    for size, begin, wanted in zip(x, begins, sizes, strict=True):
        left = _if_known(operator.sub, size, begin)
        if wanted != -1 and _if_known(operator.gt, wanted, left):
            raise _MismatchError(f"{begin} + {wanted} ends behind the size {size}")
        made.append(left if wanted == -1 else wanted)
    return [tuple(made)]


def places_of_slice(case: Case) -> list[tuple[str, int, slice]] | None:
    """Return the effect of a strided slice on each dimension, made or taken."""
    if any(case.maybe(i) is None for i in (1, 2, 3)):
        return None
    rank = len(case.shape(0))
    begin, end, step = (case.entries(i).reshape(-1) for i in (1, 2, 3))
    masks = {
        name: case.option(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    # An entry for a new axis takes no dimension of the input.
    added = sum(masks["new_axis"] >> i & 1 for i in range(len(begin)))
    rest = rank - (len(begin) - added - (1 if masks["ellipsis"] else 0))
    found: list[tuple[str, int, slice]] = []
    axis = 0
    for i in range(len(begin)):
        if masks["ellipsis"] >> i & 1:
            found += [("keep", axis + k, slice(None)) for k in range(rest)]
            axis += rest
        elif masks["new_axis"] >> i & 1:
            found.append(("new", axis, slice(None)))
        else:
            word = "shrink" if masks["shrink_axis"] >> i & 1 else "keep"
            first, last = begin[i], end[i]
            if None in (first, last, step[i]):
                return None
            if case.option("offset"):
                last = first + last
            bounds = slice(
                None if masks["begin"] >> i & 1 else int(first),
                None if masks["end"] >> i & 1 else int(last),
                int(step[i]),
            )
            found.append((word, axis, bounds))
            axis += 1
    return found + [("keep", k, slice(None)) for k in range(axis, rank)]


def _strided_slice(case: Case) -> list[Shape]:
    """Return the shape of STRIDED_SLICE; sizes that its masks leave open are free."""
    x = case.shape(0)
    places = places_of_slice(case)
    if places is None:
        # Without the bounds, nothing says how many dimensions an ellipsis covers.
        if case.option("ellipsis_mask") or case.option("new_axis_mask"):
            raise Unknown
        mask = case.option("shrink_axis_mask")
        return [tuple(None for i in range(len(x)) if not mask >> i & 1)]
    made: list[Size] = []
    for word, axis, taken in places:
        if word == "new":
            made.append(1)
        elif word == "keep":
            size = x[axis]
            whole = taken == slice(None)
            made.append(size if whole or size is None else len(range(size)[taken]))
    return [tuple(made)]


def _concatenation(case: Case) -> list[Shape]:
    shapes = [case.shape(i) for i in range(len(case.shapes))]
    axis = _axis(case.option("axis"), len(shapes[0]))
    made: list[Size] = []
    for i, sizes in enumerate(zip(*shapes, strict=True)):
        if i == axis:
            made.append(_sum(sizes))
            continue
        known = {size for size in sizes if size is not None}
        if len(known) > 1:
            raise _MismatchError(
                f"shapes {' and '.join(map(_text, shapes))} differ in dimension {i}"
            )
        made.append(next(iter(known), None))
    return [tuple(made)]


def _split_v(case: Case) -> list[Shape]:
    x = case.shape(0)
    axis, sizes = _axis(case.value(2), len(x)), list(case.sizes(1))
    if -1 in sizes:
        rest = _sum([s for s in sizes if s != -1])
        sizes[sizes.index(-1)] = _if_known(operator.sub, x[axis], rest)
    if _if_known(operator.ne, _sum(sizes), x[axis]):
        raise _MismatchError(f"sizes {sizes} are not those of {x[axis]}")
    return [_put(x, axis, [size]) for size in sizes]


def _gather_nd(case: Case) -> list[Shape]:
    x, indices = case.shape(0), case.shape(1)
    if indices[-1] is None:
        raise Unknown
    return [(*indices[:-1], *x[indices[-1] :])]


def _reduce(case: Case) -> list[Shape]:
    x = case.shape(0)
    axes = _axes(case.value(1), len(x))
    if case.option("keep_dims"):
        return [tuple(1 if i in axes else size for i, size in enumerate(x))]
    return [tuple(size for i, size in enumerate(x) if i not in axes)]


def _resize(case: Case) -> list[Shape]:
    n, _, _, channels = case.shape(0)
    return [(n, *case.sizes(1), channels)]


def _depth_to_space(case: Case) -> list[Shape]:
    n, h, w, c = case.shape(0)
    b = case.option("block_size")
    sizes = (_if_known(operator.mul, size, b) for size in (h, w))
    return [(n, *sizes, _if_known(operator.floordiv, c, b * b))]


def _space_to_depth(case: Case) -> list[Shape]:
    n, h, w, c = case.shape(0)
    b = case.option("block_size")
    if any(_if_known(operator.mod, size, b) for size in (h, w)):
        raise _MismatchError(f"{_text((h, w))} are no blocks of {b}")
    sizes = (_if_known(operator.floordiv, size, b) for size in (h, w))
    return [(n, *sizes, _if_known(operator.mul, c, b * b))]


def _range(case: Case) -> list[Shape]:
    ends = [case.maybe(i) for i in range(3)]
    if any(end is None or None in end.reshape(-1) for end in ends):
        return [(None,)]
    first, last, step = (end.reshape(-1)[0] for end in ends if end is not None)
    return [(max(0, math.ceil((last - first) / step)),)]


def _tiled(case: Case) -> Known:
    pairs = zip(case.shape(0), case.sizes(1), strict=True)
    return tuple(_if_known(operator.mul, *pair) for pair in pairs)


def _both_ways(place: int, behind: int, axis: int) -> Rule:
    """Return the rule of ops that read a sequence in both directions."""

    def rule(case: Case) -> list[Shape]:
        x = case.shape(0)
        sizes = case.shape(place)[axis], case.shape(behind)[axis]
        if case.option("merge_outputs"):
            return [(*x[:-1], _sum(sizes))]
        return [(*x[:-1], size) for size in sizes]

    return rule


def _called(case: Case) -> list[Shape]:
    """Return the shapes of a subgraph's outputs, None where subgraphs differ."""
    graphs = case.op.subgraphs
    graphs = graphs[1:] if case.op.kind in ("WHILE", "STABLEHLO_WHILE") else graphs
    ends = [[t.shape for t in graph.outputs] for graph in graphs]
    return [merged(shapes) for shapes in zip(*ends, strict=True)]


def merged(shapes: Sequence[Shape]) -> Shape:
    """Return a shape that all of these fit, None where their sizes differ."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) != 1:
        return None
    columns = zip(*known, strict=True)
    return tuple(s[0] if len(set(s)) == 1 else None for s in columns)


def _kinds(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    **_kinds(
        "ABS BITCAST BUCKETIZE CAST CEIL COMPLEX_ABS COS CUMSUM DENSIFY DEQUANTIZE "
        "DYNAMIC_UPDATE_SLICE ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH IMAG "
        "L2_NORMALIZATION LEAKY_RELU LOCAL_RESPONSE_NORMALIZATION LOG LOGICAL_NOT "
        "LOGISTIC LOG_SOFTMAX MATRIX_SET_DIAG NEG PRELU QUANTIZE REAL RELU RELU6 "
        "RELU_0_TO_1 RELU_N1_TO_1 REVERSE_SEQUENCE REVERSE_V2 ROUND RSQRT SIGN SIN "
        "SOFTMAX SQRT SQUARE TANH ZEROS_LIKE",
        _one(lambda case: case.shape(0)),
    ),
    **_kinds(
        "ADD ADD_N ATAN2 BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER "
        "GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR MAXIMUM MINIMUM MUL "
        "NOT_EQUAL POW RIGHT_SHIFT SELECT_V2 SQUARED_DIFFERENCE SUB",
        _one(lambda case: broadcast(*map(case.shape, range(len(case.shapes))))),
    ),
    **_kinds("AVERAGE_POOL_2D L2_POOL_2D MAX_POOL_2D", _pool),
    **_kinds(
        "MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM", _reduce
    ),
    **_kinds(
        "ARG_MAX ARG_MIN",
        _one(lambda c: _put(c.shape(0), _axis(c.value(1), len(c.shape(0))), [])),
    ),
    **_kinds("PAD PADV2 MIRROR_PAD", _mapped(_padded)),
    **_kinds("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", _resize),
    # They are given the shape that they make.
    **_kinds(
        "CONV_3D_TRANSPOSE FILL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM TRANSPOSE_CONV",
        _one(lambda case: case.sizes(0)),
    ),
    **_kinds("BROADCAST_TO SPARSE_TO_DENSE", _one(lambda case: case.sizes(1))),
    "SCATTER_ND": _one(lambda case: case.sizes(2)),
    **_kinds("IF WHILE", _called),
    # The file states the shapes of variables.
    "READ_VARIABLE": lambda case: [t.shape for t in case.op.outputs],
    **_kinds("ASSIGN_VARIABLE CALL_ONCE", lambda case: []),
    **_kinds("RANK VAR_HANDLE", lambda case: [()] * len(case.op.outputs)),
    # The projection, else the recurrent weights, say how many values the cell gives.
    **_kinds(
        "LSTM UNIDIRECTIONAL_SEQUENCE_LSTM",
        lambda c: [(*c.shape(0)[:-1], c.shape(8)[1])] * len(c.op.outputs),
    ),
    **_kinds(
        "RNN UNIDIRECTIONAL_SEQUENCE_RNN",
        _one(lambda case: (*case.shape(0)[:-1], case.shape(1)[0])),
    ),
    **_kinds(
        "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD "
        "UNSORTED_SEGMENT_SUM",
        _one(lambda c: (c.sizes(2)[0], *c.shape(0)[len(c.shape(1)) :])),
    ),
    "BATCH_MATMUL": _batch_matmul,
    "BATCH_TO_SPACE_ND": _in_blocks,
    "BIDIRECTIONAL_SEQUENCE_LSTM": _both_ways(8, 25, 1),
    "BIDIRECTIONAL_SEQUENCE_RNN": _both_ways(1, 5, 0),
    "CONCATENATION": _concatenation,
    "CONV_2D": _conv,
    "CONV_3D": _conv_3d,
    "DEPTHWISE_CONV_2D": _depthwise,
    "DEPTH_TO_SPACE": _depth_to_space,
    "EMBEDDING_LOOKUP": _one(lambda case: (*case.shape(0), *case.shape(1)[1:])),
    "EXPAND_DIMS": _one(
        lambda c: _put(c.shape(0), _axis(c.value(1), len(c.shape(0)) + 1), [1], 0)
    ),
    "FULLY_CONNECTED": _fully_connected,
    "GATHER": _gather,
    "GATHER_ND": _gather_nd,
    "ONE_HOT": _one_hot,
    "PACK": _pack,
    "RANGE": _range,
    "RESHAPE": _reshape,
    "RFFT2D": _fourier,
    "SEGMENT_SUM": _segments,
    "SELECT": _one(lambda case: case.shape(1)),
    "SHAPE": _one(lambda case: (len(case.shape(0)),)),
    "SLICE": _slice,
    "SPACE_TO_BATCH_ND": _in_blocks,
    "SPACE_TO_DEPTH": _space_to_depth,
    "SPLIT": _split,
    "SPLIT_V": _split_v,
    "SQUEEZE": _squeeze,
    "STRIDED_SLICE": _strided_slice,
    "SVDF": _svdf,
    "TILE": _one(_tiled),
    "TOPK_V2": lambda case: [(*case.shape(0)[:-1], case.sizes(1)[0])] * 2,
    "TRANSPOSE": _mapped(lambda x, order: tuple(x[i] for i in _axes(order, len(x)))),
    "UNPACK": _unpack,
    "WHERE": _one(lambda case: (None, len(case.shape(0)))),
}
"""The rules by the kind of the op."""


def output_shapes(
    op: LiteOp,
    shapes: Sequence[Shape] | None = None,
    values: Sequence[Array | None] | None = None,
) -> tuple[Shape, ...]:
    """Return the shapes of the tensors that an op makes."""
    if shapes is None:
        shapes = [None if t is None else t.shape for t in op.inputs]
    if values is None:
        values = [None if t is None else constant(t) for t in op.inputs]
    rule = None if op.is_custom else RULES.get(op.kind)
    made: list[Shape] = []
    try:
        made = rule(Case(op, shapes, values)) if rule else []
    except Unknown:
        pass
    except _MismatchError as error:
        raise TFLiteError(f"{op!r} cannot take its inputs: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Ranks and counts that the kernel would refuse, too.
        ranks = ", ".join("?" if s is None else _text(s) for s in shapes)
        raise TFLiteError(f"{op!r} cannot take inputs of the shapes {ranks}") from error
    # Outputs that the rule does not list are states, such as those of LSTMs.
    return (*made, *(None,) * len(op.outputs))[: len(op.outputs)]


def constant(tensor: LiteTensor) -> Array | None:
    """Return the array of a constant; None of others, and of variables."""
    return None if tensor.is_variable else tensor.value


def output_types(op: LiteOp) -> tuple[str | None, ...]:
    """Return the types of the tensors that an op makes; None where it may be any."""
    count = len(op.outputs)
    kind = KINDS.get(op.kind, OTHER)
    found: str | None = kind.makes
    if op.is_custom or found == "-":
        return (None,) * count
    if found in ("out_type", "output_type"):
        word = op.options.get(found)
        found = word.lower() if isinstance(word, str) else type_names().get(word or 0)
    elif found == "data":
        source = op.inputs[kind.data] if kind.data < len(op.inputs) else None
        found = None if source is None else source.dtype
    if op.kind == "TOPK_V2":
        return (found, None)[:count]
    return (found,) * count


_MOST = 256
"""Arrays of more numbers list no sizes: a shape has at most eight."""

Fold = Callable[[Case, Shape], Array]


def _each(function: Callable[..., Any]) -> Fold:
    """Return the fold of a function of numbers."""
    known = partial(_if_known, function)

    def fold(case: Case, shape: Shape) -> Array:
        numbers = [case.entries(i) for i in range(len(case.shapes))]
        return np.asarray(np.frompyfunc(known, len(numbers), 1)(*numbers), object)

    return fold


def _reshaped(case: Case, shape: Shape) -> Array:
    if shape is None or None in shape:
        raise Unknown
    return case.entries(0).reshape(shape)


def _fold_strided_slice(case: Case, shape: Shape) -> Array:
    value, places = case.entries(0), places_of_slice(case)
    if places is None:
        raise Unknown
    taken = tuple(
        {"new": None, "shrink": bounds.start or 0, "keep": bounds}[word]
        for word, _, bounds in places
    )
    return np.asarray(value[taken], object)


def _fold_slice(case: Case, shape: Shape) -> Array:
    if shape is None or None in shape or None in case.sizes(1):
        raise Unknown
    begins = (b or 0 for b in case.sizes(1))
    taken = (slice(b, b + (n or 0)) for b, n in zip(begins, shape, strict=True))
    return case.entries(0)[tuple(taken)]


def _fold_gather(case: Case, shape: Shape) -> Array:
    if case.option("batch_dims"):
        raise Unknown
    indices = case.value(1).astype(np.int64)
    return np.asarray(np.take(case.entries(0), indices, case.option("axis")), object)


def _filled(case: Case, shape: Shape) -> Array:
    count = None if shape is None else volume(shape)
    if count is None or count > _MOST:
        raise Unknown
    filled = [case.entries(1).reshape(-1)[0]] * count
    return np.asarray(filled, object).reshape(shape or ())


def _fold_range(case: Case, shape: Shape) -> Array:
    first, last, step = (case.value(i).reshape(-1)[0] for i in range(3))
    if abs((last - first) / step) > _MOST:
        raise Unknown
    return np.arange(first, last, step).astype(object)


def _joined(function: Callable[..., Any]) -> Fold:
    """Return the fold of a function that joins all inputs along an axis."""
    return lambda case, shape: function(
        [case.entries(i) for i in range(len(case.shapes))], case.option("axis")
    )


def _product(case: Case, shape: Shape) -> Array:
    axes = tuple(case.value(1).reshape(-1).astype(int).tolist())
    made = np.prod(case.value(0), axis=axes, keepdims=bool(case.option("keep_dims")))
    return np.asarray(made, object)


def _cast(case: Case, shape: Shape) -> Array:
    is_float = case.op.outputs[0].dtype.startswith("float")
    return _each(float if is_float else int)(case, shape)


_FOLDS: Mapping[str, Fold] = {
    "ADD": _each(operator.add),
    "CAST": _cast,
    "CONCATENATION": _joined(np.concatenate),
    "DIV": _each(lambda a, b: int(a / b) if isinstance(a, int) else a / b),
    "EXPAND_DIMS": _reshaped,
    "FILL": _filled,
    "FLOOR": _each(lambda a: float(a // 1)),
    "FLOOR_DIV": _each(operator.floordiv),
    "FLOOR_MOD": _each(operator.mod),
    "GATHER": _fold_gather,
    "MAXIMUM": _each(max),
    "MINIMUM": _each(min),
    "MUL": _each(operator.mul),
    "NEG": _each(operator.neg),
    "PACK": _joined(np.stack),
    "RANGE": _fold_range,
    "RANK": lambda case, shape: np.asarray(len(case.shape(0)), object),
    "REDUCE_PROD": _product,
    "RESHAPE": _reshaped,
    "SHAPE": lambda case, shape: np.asarray(case.shape(0), object),
    "SLICE": _fold_slice,
    "SQUEEZE": _reshaped,
    "STRIDED_SLICE": _fold_strided_slice,
    "SUB": _each(operator.sub),
}
"""Kinds of ops that compute sizes, and the arrays that they make."""


def computed(case: Case, shape: Shape) -> Array | None:
    """Return the sizes that an op computes; None if it computes something else."""
    fold = _FOLDS.get(case.op.kind)
    if fold is None or case.op.is_custom or len(case.op.outputs) != 1:
        return None
    try:
        made = fold(case, shape)
    except (Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return made if made.size <= _MOST else None


def listed(value: Array | None) -> Array | None:
    """Return a constant as an array of numbers; None of one that lists no sizes."""
    if value is None or value.size > _MOST or value.dtype.kind not in "if":
        return None
    return value.astype(object)
