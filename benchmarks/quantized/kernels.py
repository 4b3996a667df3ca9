"""Kernels of TFLite by scheme: what computes in float, and what runs slowly.

`python -m benchmarks.quantized.kernels [--only NAME ...] [--json PATH]`. One op a file,
with the data of a middle layer, on one thread with XNNPACK, as in an app. The sides
take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.timing import Side, compare
from geutil import model
from geutil.errors import QuantizeError
from geutil.quantize import calibrate, quantize, to_tflite
from geutil.quantize.spec import SCHEMES
from geutil.quantize.tflite.deployment import float_ops
from geutil.tflite.interpreter import new_interpreter

_RUNS = 5
"""Of one file in a turn."""
_CASTS = ("QUANTIZE", "DEQUANTIZE")
_LAYER_SCHEMES = tuple(SCHEMES)
_DATA_SCHEMES = ("int8", "int16x8")
_IMAGE = (1, 56, 56, 32)
_ROWS = (1, 196, 192)


def _normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """An op.

    Attributes:
        function: what it computes.
        shape: of its data.
        schemes: which it is stored in.
    """

    function: Callable[[Any], Any]
    shape: tuple[int, ...] = _IMAGE
    schemes: tuple[str, ...] = _DATA_SCHEMES


def _layer(function: Callable[[Any], Any], shape: tuple[int, ...] = _IMAGE) -> Case:
    return Case(function, shape, _LAYER_SCHEMES)


_SQUARE = _normal(3, 3, 32, 32)
_POINT = _normal(1, 1, 32, 96)
_DEPTHWISE = _normal(3, 3, 32, 1)
_GROUPED = _normal(3, 3, 8, 32)
_MATRIX = _normal(192, 768)
_BIAS = _normal(32)

CASES = {
    "Conv2D 3x3": _layer(
        lambda x: tf.nn.bias_add(tf.nn.conv2d(x, _SQUARE, 1, "SAME"), _BIAS)
    ),
    "Conv2D 1x1": _layer(lambda x: tf.nn.conv2d(x, _POINT, 1, "SAME")),
    "Conv2D grouped": _layer(lambda x: tf.nn.conv2d(x, _GROUPED, 1, "SAME")),
    "Conv2D dilated": _layer(
        lambda x: tf.nn.conv2d(x, _SQUARE, 1, "SAME", dilations=2)
    ),
    "DepthwiseConv2dNative": _layer(
        lambda x: tf.nn.depthwise_conv2d(x, _DEPTHWISE, [1, 1, 1, 1], "SAME")
    ),
    "Conv2DBackpropInput": _layer(
        lambda x: tf.nn.conv2d_transpose(x, _SQUARE, [1, 112, 112, 32], 2)
    ),
    "MatMul": _layer(lambda x: tf.matmul(x, _MATRIX), (1, 192)),
    "MatMul, batch": _layer(
        lambda x: tf.reshape(
            tf.matmul(tf.reshape(x, [-1, 192]), _MATRIX), [1, 196, -1]
        ),
        _ROWS,
    ),
    "BatchMatMulV2": Case(lambda x: tf.matmul(x, x, transpose_b=True), _ROWS),
    "AddV2": Case(lambda x: x + x[:, ::-1]),
    "Mul": Case(lambda x: x * x[:, ::-1]),
    "Sub": Case(lambda x: x - x[:, ::-1]),
    "AvgPool": Case(lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME")),
    "MaxPool": Case(lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME")),
    "Mean": Case(lambda x: tf.reduce_mean(x, [1, 2])),
    "Sum": Case(lambda x: tf.reduce_sum(x, [3])),
    "Max": Case(lambda x: tf.reduce_max(x, [1, 2])),
    "Relu": Case(tf.nn.relu),
    "Relu6": Case(tf.nn.relu6),
    "LeakyRelu": Case(lambda x: tf.nn.leaky_relu(x, 0.1)),
    "Sigmoid": Case(tf.sigmoid),
    "Tanh": Case(tf.tanh),
    "Softmax": Case(tf.nn.softmax, _ROWS),
    "LogSoftmax": Case(tf.nn.log_softmax, _ROWS),
    "Gelu": Case(lambda x: tf.nn.gelu(x, approximate=True), _ROWS),
    "HardSwish": Case(lambda x: x * tf.nn.relu6(x + 3) * (1 / 6)),
    "Exp": Case(lambda x: tf.exp(tf.minimum(x, 0.0))),
    "Rsqrt": Case(lambda x: tf.math.rsqrt(tf.abs(x) + 1.0)),
    "SquaredDifference": Case(lambda x: tf.math.squared_difference(x, x[:, ::-1])),
    "Maximum": Case(lambda x: tf.maximum(x, x[:, ::-1])),
    "ConcatV2": Case(lambda x: tf.concat([x, x[:, ::-1]], 3)),
    "Pad": Case(lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])),
    "Transpose": Case(lambda x: tf.transpose(x, [0, 3, 1, 2])),
    "StridedSlice": Case(lambda x: x[:, 1:-1, 1:-1]),
    "Tile": Case(lambda x: tf.tile(x, [1, 2, 1, 1])),
    "GatherV2": Case(lambda x: tf.gather(x, np.arange(0, 32, 2), axis=3)),
    "ResizeBilinear": Case(lambda x: tf.image.resize(x, [112, 112])),
    "ResizeNearestNeighbor": Case(lambda x: tf.image.resize(x, [112, 112], "nearest")),
    "SpaceToDepth": Case(lambda x: tf.nn.space_to_depth(x, 2)),
    "DepthToSpace": Case(lambda x: tf.nn.depth_to_space(x, 2)),
}
"""By the name of the op."""


@dataclass(frozen=True)
class KernelRow:
    """An op in a scheme.

    Attributes:
        op: its name.
        scheme: the scheme; "float" is the file without any.
        milliseconds: the median time of a run.
        ratio: that to the time in float.
        in_float: the kinds of ops of the file that compute in float.
        failed: why there is no file; "" where there is one.
    """

    op: str
    scheme: str
    milliseconds: float
    ratio: float
    in_float: tuple[str, ...]
    failed: str


def rows(names: list[str]) -> Iterator[KernelRow]:
    """Measure ops, and yield a row for each scheme."""
    for name in names:
        yield from _rows(name, CASES[name])


def _rows(name: str, case: Case) -> Iterator[KernelRow]:
    data = np.random.default_rng(1).normal(size=case.shape).astype(np.float32)
    blobs: dict[str, bytes] = {}
    failed: dict[str, str] = {}
    for scheme in ("float", *case.schemes):
        try:
            blobs[scheme] = _file(case, data, scheme)
        except QuantizeError as error:
            failed[scheme] = str(error)
    seconds = dict(
        zip(blobs, compare([_side(blob) for blob in blobs.values()]), strict=True)
    )
    for scheme in ("float", *case.schemes):
        if scheme in failed:
            yield KernelRow(name, scheme, np.nan, np.nan, (), failed[scheme])
            continue
        kinds = dict.fromkeys(op.kind for op in float_ops(blobs[scheme]))
        in_float = tuple(kind for kind in kinds if kind not in _CASTS)
        took = 1e3 * seconds[scheme] / _RUNS
        ratio = seconds[scheme] / seconds["float"]
        yield KernelRow(name, scheme, took, ratio, in_float, "")


def _side(blob: bytes) -> Side:
    """Return the runs of a file. Zeros take as long as other data."""
    interpreter = new_interpreter(blob, delegates=True)
    interpreter.allocate_tensors()

    def run(prepared: None) -> None:
        for _ in range(_RUNS):
            interpreter.invoke()

    return Side(run)


def _file(case: Case, data: Any, scheme: str) -> bytes:
    spec = tf.TensorSpec(case.shape, name="x")
    function = tf.function(lambda x: {"y": case.function(x)}, input_signature=[spec])
    if scheme == "float":
        convert = tf.lite.TFLiteConverter.from_concrete_functions
        return bytes(convert([function.get_concrete_function()], function).convert())
    m = model.open(function)
    if SCHEMES[scheme].weights_only:
        return to_tflite(m, scheme=scheme)
    quantize(m, scheme=scheme, is_training=False)
    calibrate(m, [{"x": data}], "min_max", progress=False)
    return to_tflite(m, scheme=scheme)


def show(found: Iterator[KernelRow]) -> None:
    """Print a line for each op: the time in float, and that of each scheme to it."""
    print(f"| op | float, ms | {' | '.join(SCHEMES)} |")
    print("|---" * (len(SCHEMES) + 2) + "|")
    cells: dict[str, dict[str, str]] = {}
    for row in found:
        if row.scheme == "float":
            cells[row.op] = {"float": f"{row.milliseconds:.3f}"}
            continue
        told = f"{row.ratio:.2f}{' in float' if row.in_float else ''}"
        cells[row.op][row.scheme] = "refused" if row.failed else told
    for name, by_scheme in cells.items():
        line = " | ".join(by_scheme.get(s, "") for s in ("float", *SCHEMES))
        print(f"| {name} | {line} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.quantized.kernels")
    parser.add_argument("--only", action="append", choices=sorted(CASES), default=[])
    parser.add_argument("--json", type=Path, help="write the rows, not rounded")
    options = parser.parse_args()
    logging.getLogger("geutil").setLevel(logging.ERROR)
    found = list(rows(options.only or list(CASES)))
    show(iter(found))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
