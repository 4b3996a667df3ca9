"""A file of one op for each kind, made of objects: what it reads, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from geutil import tflite
from geutil.tflite import LiteOp, LiteTensor

_RANDOM = np.random.default_rng(7)


def normal(*shape):
    return _RANDOM.normal(size=shape).astype(np.float32)


def positive(*shape):
    return _RANDOM.uniform(0.1, 2.0, shape).astype(np.float32)


def ints(*values, dtype=np.int32):
    return np.array(values, dtype)


@dataclass
class Case:
    """An op of a kind.

    Attributes:
        kind: the kind.
        given: what it is given when it runs.
        constants: what the file holds, behind that; None is an input left out.
        options: its options.
        made: the types of its results.
        order: the places of inputs, given ones first; None keeps the order.
        version: that of its kernel.
    """

    kind: str
    given: Sequence[Any]
    constants: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    made: Sequence[str] = ("float32",)
    order: Sequence[int] | None = None
    version: int = 1

    def __str__(self):
        words = [str(v) for v in self.options.values()]
        return "-".join([self.kind, *words])

    def file(self):
        """Return the file."""
        lite = tflite.LiteFile()
        graph = tflite.LiteGraph("main")
        lite.graphs.append(graph)
        tensors = []
        for i, value in enumerate((*self.given, *self.constants)):
            if value is None:
                tensors.append(None)
                continue
            tensor = LiteTensor(f"in{i}", value.dtype.name, value.shape)
            if i >= len(self.given):
                tensor.value = value
            tensors.append(tensor)
        graph.inputs = tuple(tensors[: len(self.given)])
        if self.order is not None:
            tensors = [tensors[place] for place in self.order]
        results = [LiteTensor(f"out{i}", d, None) for i, d in enumerate(self.made)]
        graph.outputs = tuple(results)
        graph.add_op(
            LiteOp(self.kind, tensors, results, self.options, version=self.version)
        )
        return lite


_IMAGE = normal(1, 6, 7, 3)
_SAME = {"padding": "SAME", "stride_w": 1, "stride_h": 1}
_VALID = {"padding": "VALID", "stride_w": 2, "stride_h": 2}
_NO_DILATION = {"dilation_w_factor": 1, "dilation_h_factor": 1}
_WINDOW = {"filter_width": 3, "filter_height": 2}
_BOTH = normal(2, 3), normal(2, 3)
_FLAGS = np.array([[True, False, True], [False, False, True]])
_WHOLE = ints(7, -8, 9, 5), ints(2, 3, -4, 5)
_BOXES = np.float32(
    [
        [0, 0, 1, 1],
        [0, 0.1, 1, 1.1],
        [0, -0.1, 1, 0.9],
        [0, 10, 1, 11],
        [0, 10.1, 1, 11.1],
    ]
)
_SCORES = np.float32([0.9, 0.75, 0.6, 0.95, 0.5])
_VOLUME = normal(1, 4, 5, 5, 2)
_VOLUME_STRIDES = {
    "padding": "SAME",
    "stride_d": 1,
    "stride_w": 2,
    "stride_h": 2,
    **{f"dilation_{axis}_factor": 1 for axis in "dwh"},
}


def _same_shape():
    unary = (
        *("ABS", "CEIL", "COS", "ELU", "EXP", "FLOOR", "GELU", "HARD_SWISH"),
        *("LEAKY_RELU", "LOGISTIC", "LOG_SOFTMAX", "NEG", "RELU", "RELU6"),
        *("RELU_0_TO_1", "RELU_N1_TO_1", "ROUND", "SIGN", "SIN", "SQUARE", "TANH"),
        *("ZEROS_LIKE", "L2_NORMALIZATION"),
    )
    options = {"LEAKY_RELU": {"alpha": 0.3}}
    x = 3 * normal(2, 3, 5)
    yield from (Case(kind, [x], options=options.get(kind, {})) for kind in unary)
    yield Case("GELU", [x], options={"approximate": True})
    yield from (Case(kind, [positive(2, 5)]) for kind in ("LOG", "RSQRT", "SQRT"))
    yield from (Case("SOFTMAX", [x], options={"beta": beta}) for beta in (1.0, 0.5))


def _of_two():
    for kind in ("ADD", "SUB", "MUL", "DIV"):
        for word in ("NONE", "RELU", "RELU6", "RELU_N1_TO_1"):
            yield Case(kind, _BOTH, options={"fused_activation_function": word})
    yield Case("ADD", [normal(2, 3)], [normal(3)])
    yield from (Case(k, _BOTH) for k in ("MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"))
    yield from (Case(k, [normal(4), normal(4)]) for k in ("ATAN2",))
    yield Case("POW", [positive(2, 3), normal(2, 3)])
    yield Case("FLOOR_DIV", _BOTH)
    yield from (Case(k, _WHOLE, made=["int32"]) for k in ("DIV", "FLOOR_DIV"))
    yield Case("FLOOR_MOD", _WHOLE, made=["int32"])
    compared = ["EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"]
    yield from (
        Case(k, [ints(1, 2, 3), ints(3, 2, 1)], made=["bool"]) for k in compared
    )
    both = [_FLAGS, _FLAGS[::-1].copy()]
    yield from (Case(k, both, made=["bool"]) for k in ("LOGICAL_AND", "LOGICAL_OR"))
    yield Case("LOGICAL_NOT", [_FLAGS], made=["bool"])
    yield Case("BITWISE_XOR", _WHOLE, made=["int32"])
    yield Case("RIGHT_SHIFT", [ints(64, -64), ints(2, 3)], made=["int32"])
    yield Case("ADD_N", [normal(2, 3) for _ in range(3)])


def _reductions():
    for kind in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"):
        for keep in (False, True):
            yield Case(kind, [normal(2, 3, 4)], [ints(1, 2)], {"keep_dims": keep})
    for kind in ("REDUCE_ANY", "REDUCE_ALL"):
        yield Case(kind, [_FLAGS], [ints(1)], {"keep_dims": False}, ["bool"])
    for kind in ("ARG_MAX", "ARG_MIN"):
        # 2 is the schema's number of int32.
        yield Case(kind, [normal(3, 4)], [ints(1)], {"output_type": "INT32"}, ["int32"])
    for reverse in (False, True):
        options = {"exclusive": reverse, "reverse": reverse}
        yield Case("CUMSUM", [normal(3, 4)], [np.int32(1)], options)


def _layers():
    for strides in (_SAME, _VALID):
        yield Case(
            "CONV_2D",
            [_IMAGE],
            [normal(4, 3, 3, 3), normal(4)],
            {**strides, **_NO_DILATION, "fused_activation_function": "RELU6"},
        )
        options = {**strides, **_NO_DILATION, "depth_multiplier": 2}
        kernels = normal(1, 3, 3, 6)
        yield Case("DEPTHWISE_CONV_2D", [_IMAGE], [kernels, normal(6)], options)
    dilated = {**_SAME, "dilation_w_factor": 2, "dilation_h_factor": 1}
    yield Case("CONV_2D", [_IMAGE], [normal(4, 3, 3, 3), normal(4)], dilated, version=2)
    turned = {**_VALID, "stride_w": 1, "depth_multiplier": 1, **_NO_DILATION}
    yield Case("DEPTHWISE_CONV_2D", [_IMAGE], [normal(1, 2, 3, 3), normal(3)], turned)
    grouped = [normal(1, 5, 5, 4)], [normal(6, 3, 3, 2), normal(6)]
    yield Case("CONV_2D", *grouped, {**_SAME, **_NO_DILATION}, version=6)
    yield Case(
        "TRANSPOSE_CONV",
        [_IMAGE],
        [ints(1, 12, 14, 4), normal(4, 3, 3, 3), normal(4)],
        {"padding": "SAME", "stride_w": 2, "stride_h": 2},
        order=[1, 2, 0, 3],
        version=3,
    )
    yield Case(
        "CONV_3D", [_VOLUME], [normal(2, 3, 3, 2, 4), normal(4)], _VOLUME_STRIDES
    )
    yield Case(
        "CONV_3D_TRANSPOSE",
        [_VOLUME],
        [ints(1, 4, 10, 10, 3), normal(2, 3, 3, 3, 2), normal(3)],
        _VOLUME_STRIDES,
        order=[1, 2, 0, 3],
    )
    matrix = normal(5, 6)
    yield Case("FULLY_CONNECTED", [normal(2, 6)], [matrix, normal(5)])
    yield Case("FULLY_CONNECTED", [normal(4, 2, 3)], [matrix, None])
    kept = {"keep_num_dims": True}
    yield Case(
        "FULLY_CONNECTED", [normal(2, 3, 6)], [matrix, normal(5)], kept, version=5
    )
    for left, right in ((False, False), (False, True), (True, False)):
        x = normal(2, 4, 3) if left else normal(2, 3, 4)
        y = normal(2, 5, 4) if right else normal(2, 4, 5)
        yield Case("BATCH_MATMUL", [x, y], options={"adj_x": left, "adj_y": right})
    yield Case("PRELU", [_IMAGE], [normal(1, 1, 3)])
    for kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"):
        for strides in (_SAME, _VALID):
            yield Case(kind, [_IMAGE], options={**strides, **_WINDOW})
    local = {"radius": 1, "bias": 1.0, "alpha": 0.5, "beta": 0.75}
    yield Case("LOCAL_RESPONSE_NORMALIZATION", [_IMAGE], options=local)
    for kind in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"):
        for corners, half in ((False, False), (True, False), (False, True)):
            options = {"align_corners": corners, "half_pixel_centers": half}
            yield Case(kind, [_IMAGE], [ints(9, 10)], options, version=3)
    units, steps = 5, normal(2, 4, 3)
    weights = [normal(units, 3) for _ in range(4)]
    weights += [0.5 * normal(units, units) for _ in range(4)]
    biases = [normal(units) for _ in range(4)]
    yield Case("EMBEDDING_LOOKUP", [ints(2, 0)], [normal(4, 3)])
    yield Lstm(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        [steps],
        [*weights, None, None, None, *biases, None, None],
        {"fused_activation_function": "TANH", "time_major": False},
    )
    yield Lstm(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        [steps],
        [
            *(None, *weights[1:4], None, *weights[5:], None),
            *(normal(units), normal(units), None, *biases[1:]),
            *(normal(units, units), normal(units)),
        ],
        {
            "fused_activation_function": "TANH",
            "time_major": True,
            "cell_clip": 0.6,
            "proj_clip": 0.7,
        },
    )
    yield Rnn(
        "UNIDIRECTIONAL_SEQUENCE_RNN",
        [steps],
        [weights[0], weights[4], biases[0]],
        {"fused_activation_function": "TANH", "time_major": False},
    )


@dataclass
class Lstm(Case):
    """A recurrent op, whose states are variables of the interpreter."""

    states = 2

    def file(self):
        lite = super().file()
        (graph,) = lite.graphs
        (op,) = graph.ops
        batch = self.given[0].shape[1 if self.options["time_major"] else 0]
        units = [t for t in op.inputs if t is not None][1].sizes[0]
        states = []
        for i in range(self.states):
            state = LiteTensor(f"state{i}", "float32", [batch, units])
            state.is_variable = True
            states.append(state)
        op.inputs = (*op.inputs, *states)
        for state in states:
            graph.add_tensor(state)
        return lite


@dataclass
class Rnn(Lstm):
    """One with a single state."""

    states = 1


def _moves():
    x = normal(2, 3, 4)
    yield Case("RESHAPE", [x], [ints(4, -1)])
    yield Case("RESHAPE", [x], options={"new_shape": [6, 4]})
    yield Case("TRANSPOSE", [x], [ints(2, 0, 1)])
    yield Case("SQUEEZE", [normal(1, 3, 1)], options={"squeeze_dims": [0]})
    yield Case("EXPAND_DIMS", [x], [ints(1)])
    yield Case("CONCATENATION", [x, x], options={"axis": -1})
    yield Case("PACK", [x, x], options={"axis": 1, "values_count": 2})
    yield Case("UNPACK", [x], options={"axis": 1, "num": 3}, made=["float32"] * 3)
    parts = {"num_splits": 2}
    yield Case("SPLIT", [x], [np.int32(2)], parts, ["float32"] * 2, [1, 0])
    sizes = ints(1, 3), np.int32(2)
    yield Case("SPLIT_V", [x], sizes, parts, ["float32"] * 2)
    yield Case("SLICE", [x], [ints(0, 1, 1), ints(2, -1, 2)])
    edges = ints(0, 0, 1), ints(2, 2, 4), ints(1, 1, 2)
    masks = {"begin_mask": 1, "end_mask": 4, "shrink_axis_mask": 2}
    yield Case("STRIDED_SLICE", [x], edges, masks)
    yield Case("GATHER", [x], [ints(2, 0)], {"axis": 1, "batch_dims": 0})
    batches = ints([2, 0], [1, 1])
    yield Case("GATHER", [x], [batches], {"axis": 1, "batch_dims": 1}, version=5)
    yield Case("GATHER_ND", [x], [ints([0, 1], [1, 2])])
    yield Case("TILE", [x], [ints(1, 2, 1)])
    yield Case("BROADCAST_TO", [normal(3, 1)], [ints(2, 3, 4)], version=2)
    edge = ints([0, 0], [1, 2], [0, 1])
    yield Case("PAD", [x], [edge])
    yield Case("PADV2", [x], [edge, np.float32(3)])
    for mode in ("REFLECT", "SYMMETRIC"):
        yield Case("MIRROR_PAD", [x], [edge], {"mode": mode})
    image = normal(1, 4, 4, 4)
    for kind in ("DEPTH_TO_SPACE", "SPACE_TO_DEPTH"):
        yield Case(kind, [image], options={"block_size": 2})
    blocks = ints(2, 2), ints([0, 0], [2, 0])
    yield Case("SPACE_TO_BATCH_ND", [image], blocks)
    yield Case(
        "BATCH_TO_SPACE_ND", [normal(4, 2, 3, 2)], [ints(2, 2), ints([0, 0], [1, 0])]
    )
    yield Case("REVERSE_V2", [x], [ints(1)])
    lengths = {"seq_dim": 1, "batch_dim": 0}
    yield Case("REVERSE_SEQUENCE", [x], [ints(3, 2)], lengths)
    yield Case("TOPK_V2", [x], [np.int32(2)], made=["float32", "int32"])
    choice = [_FLAGS, *_BOTH]
    yield from (Case(kind, choice) for kind in ("SELECT", "SELECT_V2"))
    yield Case("WHERE", [_FLAGS], made=["int64"])
    yield Case("DYNAMIC_UPDATE_SLICE", [x, normal(1, 2, 2), ints(1, 2, 1)])
    yield Case("SCATTER_ND", [ints([4], [1]), normal(2, 3)], [ints(6, 3)])
    dense = ints(4, 5), np.float32(2), np.float32(-1)
    yield Case("SPARSE_TO_DENSE", [ints([0, 1], [3, 2])], dense)
    yield Case("SEGMENT_SUM", [normal(4, 3)], [ints(0, 0, 1, 2)])
    for word in ("SUM", "PROD", "MAX", "MIN"):
        segments = ints(1, 0, 1, 1), np.int32(2)
        yield Case(f"UNSORTED_SEGMENT_{word}", [normal(4, 3)], segments)
    yield Case("MATRIX_DIAG", [normal(2, 3)])
    yield Case("MATRIX_SET_DIAG", [normal(2, 3, 3), normal(2, 3)])
    yield Case("UNIQUE", [ints(3, 1, 3, 2)], [], {}, ["int32", "int32"])


def _others():
    x = normal(2, 3)
    yield Case("SHAPE", [x], [], {"out_type": 2}, ["int32"])
    yield Case("RANK", [x], made=["int32"])
    yield Case("RANGE", [np.int32(1), np.int32(9), np.int32(3)], made=["int32"])
    yield Case("FILL", [ints(2, 3), np.float32(4)])
    lit = np.int32(4), np.float32(2), np.float32(-1)
    yield Case("ONE_HOT", [ints(1, 3)], lit, {"axis": -1})
    yield Case("CAST", [3 * x], made=["int32"])
    yield Case("CAST", [ints(1, 0)], made=["bool"])
    yield Case("BROADCAST_ARGS", [ints(2, 1), ints(3, 1, 4)], made=["int32"])
    yield Case("BUCKETIZE", [x], [], {"boundaries": [-0.5, 0.0, 0.5]}, ["int32"])
    yield Case("BITCAST", [x], made=["int32"])
    numbers = (normal(3) + 1j * normal(3)).astype(np.complex64)
    yield from (Case(kind, [numbers]) for kind in ("REAL", "IMAG", "COMPLEX_ABS"))
    yield Case("RFFT2D", [normal(4, 8)], [ints(4, 8)], made=["complex64"])
    limits = np.int32(3), np.float32(0.5), np.float32(0.0)
    boxes = [_BOXES, _SCORES]
    yield Case("NON_MAX_SUPPRESSION_V4", boxes, limits, made=["int32"] * 2)
    soft = (*limits, np.float32(0.0))
    made = ["int32", "float32", "int32"]
    yield Case("NON_MAX_SUPPRESSION_V5", boxes, soft, made=made)
    half = normal(2, 3).astype(np.float16)
    yield Case("DEQUANTIZE", [half], version=3)
    ends = {"min": -1.0, "max": 2.0, "num_bits": 8, "narrow_range": False}
    yield Case("FAKE_QUANT", [x], options=ends)


CASES = [
    case
    for group in (_same_shape, _of_two, _reductions, _layers, _moves, _others)
    for case in group()
]
