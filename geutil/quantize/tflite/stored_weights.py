"""Weights of a file, stored in the integers that FakeQuant ops simulate.

TFLite's converter, if it is asked for no optimization, writes each FakeQuant op as a
QUANTIZE and a DEQUANTIZE op between float kernels. Of weights the first reads a
constant. Here it is run once, and its result is stored; what only moves values behind
the second is run, too: a Transpose of a matrix moves the axis of its channels along,
which the converter does not do.

It knows no blocks (`geutil.quantize.spec`): a product whose weights are moved behind
a FakeQuant op it leaves a BATCH_MATMUL. So it is given a constant with a FakeQuant op
of one range, as other weights are. The constant holds the levels of the blocks, whole
numbers, times a step that tells which matrix it is; the converter rounds constants, and
these stay as they are. In the file the FULLY_CONNECTED ops that read such levels get
the matrix instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation
from geutil.graph.types import Graph, Operation, Tensor
from geutil.quantize import spec
from geutil.quantize.calibration.ranges import (
    format_of_simulation,
    frozen,
    range_values,
    simulated_ends,
    variable_values,
)
from geutil.quantize.partial_copy import values_of
from geutil.quantize.planning.network import live_simulations
from geutil.quantize.spec import BLOCK_MOVES, Range
from geutil.tflite import LiteGraph, LiteOp, LiteTensor, Quantization
from geutil.tflite.interpreter import runtime_name, runtime_version
from geutil.tflite.kinds import version_of
from geutil.tflite.op_names import called, sources_of
from geutil.tflite.parts import Array
from geutil.tflite.schema import knows_blocks


@dataclass(frozen=True)
class LeftInFloat:
    """An op that computes in float."""

    kind: str
    result: str
    reason: str
    is_chosen: bool = False

    def __str__(self) -> str:
        return f"{self.kind} '{self.result}' computes in float: {self.reason}"


_MIDDLES = {"uint4": 8, "uint8": 128, "uint16": 32768, "int4": 0, "int8": 0, "int16": 0}
"""The number that an unsigned type adds to integers that are stored with a sign."""
_MOVING = ("RESHAPE", "TRANSPOSE")
_HYBRID_VERSIONS = {"CONV_2D": 5, "FULLY_CONNECTED": 9}
"""Kinds of ops that round their data while they run, for weights of 8 bits."""
_SLOW_HYBRIDS = ("DEPTHWISE_CONV_2D",)
"""Kinds whose kernels for that take longer than those in float."""
_INT4_VERSIONS = {"CONV_2D": 7, "DEQUANTIZE": 6, "FULLY_CONNECTED": 10}
"""Kinds of ops that read weights of 4 bits, and the versions of their kernels."""
_MOST_IN_4_BITS = 7
"""4 bits hold -7 to 7 without the one that has no counterpart."""
# The rank of filters of two-dimensional convolutions.
_IMAGE_RANK = 4
# The input of kernels that holds the weights.
_WEIGHTS = 1
_WITH_WEIGHTS = (*_HYBRID_VERSIONS, *_SLOW_HYBRIDS, "TRANSPOSE_CONV")


def store_weights(graph: LiteGraph) -> None:
    """Store quantized constants in front of DEQUANTIZE ops."""
    kept = []
    for op in graph.ops:
        value = op.reads[0].value if op.kind == "QUANTIZE" else None
        if value is None:
            kept.append(op)
        else:
            _store(op.outputs[0], value)
    graph.set_ops(kept)
    _move_constants(graph)


def _store(tensor: LiteTensor, value: Array) -> None:
    """Let a tensor hold a value in its steps, with a sign."""
    steps, middle = tensor.in_steps(), _MIDDLES[tensor.dtype]
    scales, zeros = steps.along(value.ndim)
    # As FakeQuant ops round: halves up.
    levels = np.floor(value / scales + np.float32(0.5)) + (zeros - middle)
    dtype = "int16" if middle == 32768 else "int8"
    limits = np.iinfo(dtype)
    # Of a single number NumPy makes a scalar, which is no array.
    tensor.store(np.asarray(np.clip(levels, limits.min, limits.max)), dtype)
    zero = steps.zero_points[0] - middle
    tensor.quantization = Quantization.of(steps.sizes, steps.axis, zero)


def _move_constants(graph: LiteGraph) -> None:
    """Run ops that move the values of constants behind DEQUANTIZE ops."""
    source_of: dict[LiteTensor, LiteTensor] = {}
    ops = []
    for op in graph.ops:
        if op.kind == "DEQUANTIZE" and op.reads[0].stored_bytes:
            source_of[op.outputs[0]] = op.reads[0]
            op.version = version_of(op)
        elif op.kind in _MOVING and op.reads[0] in source_of:
            moved = _moved(op, source_of[op.reads[0]])
            if moved is not None:
                source_of[op.outputs[0]] = moved
                op = LiteOp("DEQUANTIZE", [moved], op.outputs)
                op.version = version_of(op)
        ops.append(op)
    graph.set_ops(ops)


def _moved(op: LiteOp, tensor: LiteTensor) -> LiteTensor | None:
    """Return a tensor with the values of one in the places that an op moves them to."""
    value, steps = tensor.value, tensor.quantization
    if value is None or steps is None:
        return None
    if op.kind == "TRANSPOSE":
        order = op.reads[1].value
        if order is None:
            return None
        places = order.tolist()
        moved, axis = value.transpose(places), places.index(steps.axis)
    else:
        shape = op.outputs[0].sizes
        moved, axis = value.reshape(shape), len(shape) - 1
        keeps = steps.axis == value.ndim - 1 and shape[-1:] == value.shape[-1:]
        # Elsewhere a reshape could split or merge the channels that scales are of.
        if len(steps.scales) > 1 and not keeps:
            return None
    new = tensor.like()
    new.value = moved
    new.quantization = Quantization.of(steps.sizes, axis, steps.zero_points[0])
    return new


def layers_lost(
    graph: LiteGraph, is_quantized: Mapping[str, bool]
) -> Iterator[LeftInFloat]:
    """Yield the layers whose weights are float constants though they are quantized."""
    for op in graph.ops:
        weights = op.inputs[_WEIGHTS] if op.kind in _WITH_WEIGHTS else None
        if weights is None or weights.dtype != "float32" or not weights.stored_bytes:
            continue
        if any(called(source, is_quantized) for source in sources_of(op.result)):
            why = "the converter stores its weights in float"
            yield LeftInFloat(op.kind, op.result, why)


def pack_weights(graph: LiteGraph) -> None:
    """Store constants in 4 bits where they fit, and all that read them can.

    Kernels of depthwise and of grouped convolutions are slow with such: XNNPACK leaves
    the op to a kernel that unpacks the weights each time (MobileNetV2 at 96 px, x86:
    2.1 ms with them, 1.0 ms without; int8 0.4).
    """
    for tensor in graph.tensors:
        value = tensor.value if tensor.dtype == "int8" else None
        # In 8 bits -128 is its own absolute value.
        if value is None or np.abs(value.astype(int)).max(initial=0) > _MOST_IN_4_BITS:
            continue
        readers = tensor.consumers
        if readers and all(_takes_4_bits(op, tensor, value) for op in readers):
            tensor.store(value, "int4")
            for op in readers:
                op.version = max(op.version, _INT4_VERSIONS[op.kind])


def _takes_4_bits(op: LiteOp, tensor: LiteTensor, value: Array) -> bool:
    """Return whether an op reads weights of 4 bits, and loses no time by that."""
    if op.kind == "DEQUANTIZE":
        return True
    if op.kind not in _INT4_VERSIONS or op.inputs[_WEIGHTS] is not tensor:
        return False
    steps = tensor.quantization
    if value.ndim < 2 or (steps is not None and any(steps.zero_points)):
        return False
    is_by_groups = op.reads[0].sizes[-1] != value.shape[-1]
    return not (value.ndim == _IMAGE_RANK and is_by_groups)


def read_weights_stored(graph: LiteGraph) -> list[LeftInFloat]:
    """Let layers read stored weights themselves, where TFLite can round their data."""
    left = []
    for op in graph.ops:
        stored = {
            slot: tensor.producer.reads[0]
            for slot, tensor in enumerate(op.inputs)
            if tensor is not None
            and tensor.producer is not None
            and tensor.producer.kind == "DEQUANTIZE"
            and tensor.producer.reads[0].stored_bytes
        }
        if not stored or op.kind == "DEQUANTIZE":
            continue
        reason = _reason_in_float(op.kind, stored)
        if reason is not None:
            left.append(LeftInFloat(op.kind, op.result, *reason))
            continue
        op.set_input(_WEIGHTS, stored[_WEIGHTS])
        # Symmetric rounding would leave half of the steps unused behind a Relu.
        if op.kind == "FULLY_CONNECTED":
            op.options["asymmetric_quantize_inputs"] = True
        op.version = max(op.version, _HYBRID_VERSIONS[op.kind])
    return left


def _reason_in_float(
    kind: str, stored: Mapping[int, LiteTensor]
) -> tuple[str, bool] | None:
    """Return why a layer's data is not rounded as it runs, and if that is a choice."""
    is_layer = [*stored] == [_WEIGHTS]
    if is_layer and kind in _SLOW_HYBRIDS:
        return "TFLite's kernel that rounds data as it runs takes longer", True
    if not is_layer or kind not in _HYBRID_VERSIONS:
        return f"TFLite has no kernel for {kind} that rounds data as it runs", False
    count = int(np.prod(stored[_WEIGHTS].sizes))
    if count < spec.FEWEST_ROUNDED:
        few = f"with {count} weights"
        return f"{few}, rounding data as it runs takes longer than it saves", True
    return None


_logger = logging.getLogger("geutil")
_RIGHT_SINCE = {"LiteRT": (2, 1), "TensorFlow Lite": (2, 21)}
"""The first runtimes that were found to compute with blocks as they are stored."""
_APART = 2.0**-10
"""Steps that tell matrices apart differ by so much. Derived: with levels of 3 bits
their products are exact in float32 for 2**20 matrices."""
# The largest integer of 8 bits with a narrow range.
_MOST = 127
_ACTIVATIONS = ("RELU", "RELU_N1_TO_1", "RELU6")
"""Activations that products have, and that are ops, too."""
_FREE = 1.0
"""The step of a block of zeros, which has none; XNNPACK wants one above 0."""


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix as it is simulated."""

    range: str
    levels: Array
    steps: Array


def in_blocks(graph: Graph) -> list[Operation]:
    """Return the FakeQuant ops of a graph whose columns are blocks."""
    return [op for op in live_simulations(graph) if spec.block_of(op) is not None]


def block_matrices(graph: Graph) -> list[BlockMatrix]:
    """Return the weights of a FuncGraph that are in blocks."""
    ops = in_blocks(graph)
    if not ops:
        return []
    if not knows_blocks():
        raise QuantizeError(
            f"'{ops[0].name}' rounds weights by blocks, which this TensorFlow's TFLite "
            "does not know; install LiteRT, with `pip install geutil[litert]`"
        )
    ranges = range_values(graph)
    known = frozen(ranges | variable_values(graph))
    arrays = values_of([op.outputs[0] for op in ops], known)
    return [_matrix(op, a, ranges) for op, a in zip(ops, arrays, strict=True)]


def _matrix(
    op: Operation, values: Array, ranges: Mapping[Operation, Array]
) -> BlockMatrix:
    """Return the matrix of a FakeQuant op, which makes [block, blocks * outputs]."""
    form = format_of_simulation(op)
    low, high = (np.asarray(end, np.float32) for end in simulated_ends(op, ranges))
    if not np.array_equal((low, high), spec.with_stored_steps(Range(low, high), form)):
        raise QuantizeError(
            f"the ranges of '{op.name}' have steps that are no float16 numbers, which "
            "a file cannot store; set them with geutil.quantize.calibrate, or round "
            "their ends to whole float16 steps"
        )
    steps = high / np.float32(2 ** (form.bits - 1) - 1)
    # A block of zeros has a step of 0.
    levels = np.round(values / np.where(steps > 0, steps, np.float32(1.0)))
    block, blocks, outputs = _parts(op)
    by_output = levels.reshape(block, blocks, outputs).transpose(2, 1, 0)
    return BlockMatrix(
        op.name.rpartition("/")[0],
        by_output.reshape(outputs, blocks * block).astype(np.int8),
        steps.reshape(blocks, outputs).T,
    )


def _parts(op: Operation) -> tuple[int, int, int]:
    """Return the shape that the op behind a FakeQuant op gives to blocks."""
    block, blocks, outputs = _behind(op, BLOCK_MOVES[0]).outputs[0].shape.as_list()
    return block, blocks, outputs


def levels_of_blocks(graph: Graph) -> dict[Operation, Array]:
    """Return the ops that make simulated weights of blocks, with their levels."""
    ends, levels = [], {}
    for op, matrix in zip(in_blocks(graph), block_matrices(graph), strict=True):
        block, blocks, outputs = _parts(op)
        # As the FakeQuant op makes them.
        parted = matrix.levels.reshape(outputs, blocks, block).transpose(2, 1, 0)
        levels[op] = parted.reshape(block, blocks * outputs).astype(np.float32)
        # The last of the ops that move them makes weights of their own shape again.
        ends.append(functools.reduce(_behind, BLOCK_MOVES, op))
    arrays = values_of([op.outputs[0] for op in ends], frozen(levels))
    return dict(zip(ends, arrays, strict=True))


def _behind(op: Operation, kind: str) -> Operation:
    (behind,) = [o for o in op.outputs[0].consumers() if o.type == kind]
    return behind


def mark_blocks(tensors: Sequence[Tensor]) -> None:
    """Put what tells matrices apart in the place of the levels of blocks.

    Each op that reads one gets a range of its own, since the converter rounds itself
    what several read.
    """
    for place, tensor in enumerate(tensors):
        levels = tf.get_static_value(tensor)
        for index, op in enumerate(dict.fromkeys(tensor.consumers())):
            step = 1.0 + _APART * (place + index * len(tensors))
            weights = tf.constant(levels * np.float32(step), name="w")
            made = tf.quantization.fake_quant_with_min_max_args(
                weights, -_MOST * step, _MOST * step, 8, narrow_range=True, name="q"
            )
            for slot, read in enumerate(op.inputs):
                if read is tensor:
                    creation.set_new_input(op, slot, made)


def store_in_blocks(graph: LiteGraph, matrices: Sequence[BlockMatrix]) -> set[str]:
    """Let the layers of a file read weights in blocks; return the ranges of these."""
    return _Storing(graph, matrices).run() if matrices else set()


class _Storing:
    """The weights of one subgraph in blocks, on their way to where they are read."""

    def __init__(self, graph: LiteGraph, matrices: Sequence[BlockMatrix]) -> None:
        self._graph, self._matrices = graph, matrices
        # By tensors: the matrix, and its levels as they lie there.
        self._known: dict[LiteTensor, tuple[BlockMatrix, Array]] = {}
        self._stored: dict[str, LiteTensor] = {}

    def run(self) -> set[str]:
        """Go through the ops in order."""
        ops = []
        for op in self._graph.ops:
            if not self._moves(op):
                ops += [op, *self._read(op)]
        self._graph.set_ops(ops)
        return set(self._stored)

    def _moves(self, op: LiteOp) -> bool:
        """Return whether an op only marks or moves weights, and follow them."""
        if not op.reads:
            return False
        source, result = op.reads[0], op.outputs[0]
        is_mark = op.kind == "QUANTIZE"
        known = self._marked(source, result) if is_mark else self._known.get(source)
        if known is None:
            return False
        matrix, levels = known
        if op.kind == "TRANSPOSE":
            order = op.reads[1].value
            if order is None:
                return False
            levels = levels.transpose(order.tolist())
        elif op.kind == "RESHAPE":
            levels = levels.reshape(result.sizes)
        elif op.kind not in ("QUANTIZE", "DEQUANTIZE"):
            return False
        self._known[result] = matrix, levels
        return True

    def _marked(
        self, source: LiteTensor, result: LiteTensor
    ) -> tuple[BlockMatrix, Array] | None:
        """Return the matrix whose levels a QUANTIZE op reads, and these levels."""
        value, steps = source.value, result.quantization
        if value is None or steps is None or len(steps.scales) > 1:
            return None
        number = (steps.scales[0] - 1.0) / _APART
        if not number.is_integer() or number < 0:
            return None
        matrix = self._matrices[int(number) % len(self._matrices)]
        levels = value / steps.sizes[0]
        # In any order; where they are read it has to be that of the matrix.
        same = np.array_equal(np.sort(levels, None), np.sort(matrix.levels, None))
        return (matrix, levels) if same else None

    def _read(self, op: LiteOp) -> list[LiteOp]:
        """Let an op read weights in blocks; return ops to run behind it."""
        behind: list[LiteOp] = []
        for slot, tensor in enumerate(op.inputs):
            if tensor is None or tensor not in self._known:
                continue
            matrix, levels = self._known[tensor]
            fits = np.array_equal(levels, matrix.levels)
            if op.kind != "FULLY_CONNECTED" or slot != _WEIGHTS or not fits:
                raise QuantizeError(_refusal(matrix, f"a {op.kind} that reads them"))
            op.set_input(slot, self._in_blocks(matrix, tensor))
            op.options["asymmetric_quantize_inputs"] = True
            op.version = max(op.version, _INT4_VERSIONS[op.kind])
            behind = _with_activation_apart(op)
        return behind

    def _in_blocks(self, matrix: BlockMatrix, like: LiteTensor) -> LiteTensor:
        """Return a tensor that holds a matrix in blocks."""
        if matrix.range not in self._stored:
            blocks = matrix.levels.reshape(*matrix.steps.shape, -1)
            steps = self._graph.add_tensor(like.like("float16"))
            steps.value = np.where(blocks.any(2), matrix.steps, _FREE)
            tensor = self._stored[matrix.range] = like.like("int4")
            tensor.value = matrix.levels
            size = blocks.shape[2]
            tensor.quantization = Quantization((), (), block=size, block_scales=steps)
        return self._stored[matrix.range]


def _with_activation_apart(op: LiteOp) -> list[LiteOp]:
    """Return the activation of a product as an op of its own.

    TFLite's own kernel leaves it out where weights are in blocks (LiteRT 2.3).
    """
    kind, result = op.options["fused_activation_function"], op.outputs[0]
    if kind not in _ACTIVATIONS:
        return []
    op.options["fused_activation_function"] = "NONE"
    op.set_output(0, result.like())
    return [LiteOp(kind, op.outputs, [result])]


def check_all_found(matrices: Sequence[BlockMatrix], found: set[str]) -> None:
    """Raise QuantizeError if no layer of a file reads weights that are in blocks."""
    for matrix in matrices:
        if matrix.range not in found:
            raise QuantizeError(_refusal(matrix, "other constants"))


def warn_of_runtime() -> None:
    """Log a warning if the runtime is older than those that compute with blocks."""
    name, version = runtime_name(), runtime_version()
    first = _RIGHT_SINCE[name]
    if version < first:
        _logger.warning(
            "to_tflite: %s %s may make wrong numbers of weights in blocks with "
            "XNNPACK, its default delegate; run the file by %s or later",
            name,
            ".".join(map(str, version)),
            ".".join(map(str, first)),
        )


def _refusal(matrix: BlockMatrix, made: str) -> str:
    return (
        f"the weights of '{matrix.range}' are simulated in blocks, and TFLite's "
        f"converter makes {made} of the layer, where TFLite has no kernel for them; "
        "quantize with an override for it: geutil.quantize.Spec(weight_bits=8)"
    )
