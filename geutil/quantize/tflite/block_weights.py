"""Weights of a file in blocks, as `geutil.quantize.blocks` simulates them.

TFLite's converter knows no blocks: a product whose weights are moved behind a FakeQuant
op it leaves a BATCH_MATMUL. So it is given a constant with a FakeQuant op of one range,
as other weights are. The constant holds the levels of the blocks, whole numbers, times
a step that tells which matrix it is; the converter rounds constants, and these stay as
they are. In the file the FULLY_CONNECTED ops that read such levels get the matrix
instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation
from geutil.graph.types import Graph, Operation, Tensor
from geutil.quantize.blocks import MOVES, block_of, with_stored_steps
from geutil.quantize.calibration.ranges import (
    frozen,
    live_simulations,
    range_values,
    variable_values,
)
from geutil.quantize.partial_copy import values_of
from geutil.quantize.spec import Format, Range
from geutil.tflite import old_edits as tflite_edits
from geutil.tflite.run import runtime_name, runtime_version

Array = np.ndarray[Any, Any]

_logger = logging.getLogger("geutil")
_RIGHT_SINCE = {"LiteRT": (2, 1), "TensorFlow Lite": (2, 21)}
"""The first runtimes that were found to compute with blocks as they are stored."""
_APART = 2.0**-10
_MOST = 127
_WEIGHTS = 1
_INT4_VERSION = 10
_ACTIVATIONS = {1: "RELU", 2: "RELU_N1_TO_1", 3: "RELU6"}
"""Activations that products have, by the numbers of the schema."""
_FREE = 1.0
"""The step of a block of zeros, which has none; XNNPACK wants one above 0."""


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix as it is simulated.

    Attributes:
        range: the name of its ranges.
        levels: its values in steps, whole numbers: [outputs, inputs].
        steps: the sizes of the steps, which float16 holds: [outputs, blocks].
    """

    range: str
    levels: Array
    steps: Array


def in_blocks(graph: Graph) -> list[Operation]:
    """Return the FakeQuant ops of a graph whose columns are blocks."""
    return [op for op in live_simulations(graph) if block_of(op) is not None]


def block_matrices(graph: Graph) -> list[BlockMatrix]:
    """Return the weights of a FuncGraph that are in blocks.

    Raises:
        QuantizeError: a step is no float16: somebody else set the range; or no runtime
            is installed that knows blocks.

    Cost: linear in the ops; one run of what weights depend on.
    """
    ops = in_blocks(graph)
    if not ops:
        return []
    if not tflite_edits.knows_blocks():
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
    form = Format(int(op.get_attr("num_bits")), True, True, (1,), block_of(op))
    ends = [ranges.get(t.op, tf.get_static_value(t)) for t in list(op.inputs)[1:]]
    low, high = (np.asarray(end, np.float32) for end in ends)
    if not np.array_equal((low, high), with_stored_steps(Range(low, high), form)):
        raise QuantizeError(
            f"the ranges of '{op.name}' have steps that are no float16 numbers, which "
            "a file cannot store; set them with geutil.quantize.calibrate, or round "
            "their ends to whole float16 steps"
        )
    steps = high / np.float32(2 ** (form.bits - 1) - 1)
    levels = np.round(values / np.where(steps > 0, steps, np.float32(1.0)))
    block, blocks, outputs = _parts(op)
    by_output = levels.reshape(block, blocks, outputs).transpose(2, 1, 0)
    return BlockMatrix(
        op.name.rpartition("/")[0],
        by_output.reshape(outputs, blocks * block).astype(np.int8),
        steps.reshape(blocks, outputs).T,
    )


def _by_block(levels: Array, op: Operation) -> Array:
    """Return levels [outputs, inputs] as a FakeQuant op makes them."""
    block, blocks, outputs = _parts(op)
    parted = levels.reshape(outputs, blocks, block).transpose(2, 1, 0)
    return parted.reshape(block, blocks * outputs).astype(np.float32)


def _parts(op: Operation) -> tuple[int, int, int]:
    """Return the shape that the op behind a FakeQuant op gives to blocks."""
    block, blocks, outputs = _behind(op, MOVES[0]).outputs[0].shape.as_list()
    return block, blocks, outputs


def levels_of_blocks(graph: Graph) -> dict[Operation, Array]:
    """Return the ops that make simulated weights of blocks, with their levels.

    Args:
        graph: a FuncGraph that is quantized.

    Cost: linear in the ops; one run of what weights depend on.
    """
    ends = [_end(op) for op in in_blocks(graph)]
    levels = {
        op: _by_block(matrix.levels, op)
        for op, matrix in zip(in_blocks(graph), block_matrices(graph), strict=True)
    }
    arrays = values_of([op.outputs[0] for op in ends], frozen(levels))
    return dict(zip(ends, arrays, strict=True))


def _end(simulation: Operation) -> Operation:
    """Return the op that makes weights of their own shape again."""
    op = simulation
    for kind in MOVES:
        op = _behind(op, kind)
    return op


def _behind(op: Operation, kind: str) -> Operation:
    (behind,) = [o for o in op.outputs[0].consumers() if o.type == kind]
    return behind


def mark_blocks(tensors: Sequence[Tensor]) -> None:
    """Put what tells matrices apart in the place of the levels of blocks.

    Each op that reads one gets a range of its own, since the converter rounds itself
    what several read.

    Args:
        tensors: constants that hold levels, in a copy of a graph and in the order of
            `levels_of_blocks`; the caller is in it.
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


def store_in_blocks(
    model: Any, graph: Any, matrices: Sequence[BlockMatrix]
) -> set[str]:
    """Let the layers of a file read weights in blocks.

    Args:
        model: a file of float kernels, which is changed.
        graph: one of its subgraphs.
        matrices: the weights that are in blocks, in the order of the model.

    Returns:
        The ranges of the weights that layers of this subgraph read.

    Raises:
        QuantizeError: something else reads them.

    Cost: linear in ops, and in the weights that are in blocks.
    """
    return _Storing(model, graph, matrices).run() if matrices else set()


class _Storing:
    """The weights of one subgraph, on their way to where they are read."""

    def __init__(self, model: Any, graph: Any, matrices: Sequence[BlockMatrix]) -> None:
        self._model, self._graph = model, graph
        self._matrices = matrices
        # By numbers of tensors: the matrix, and its levels as they lie there.
        self._known: dict[int, tuple[BlockMatrix, Array]] = {}
        self._stored: dict[str, int] = {}

    def run(self) -> set[str]:
        """Go through the ops in order."""
        operators = []
        for op in self._graph.operators:
            if not self._moves(op):
                operators += [op, *self._read(op)]
        self._graph.operators = operators
        return set(self._stored)

    def _moves(self, op: Any) -> bool:
        """Tell whether an op only marks or moves weights, and follow them."""
        kind = tflite_edits.kind_of(self._model, op)
        if not len(op.inputs):
            return False
        source, result = int(op.inputs[0]), int(op.outputs[0])
        known = self._marked(op) if kind == "QUANTIZE" else self._known.get(source)
        if known is None:
            return False
        matrix, levels = known
        if kind == "TRANSPOSE":
            order = tflite_edits.constant(
                self._model, self._graph.tensors[op.inputs[1]]
            )
            if order is None:
                return False
            levels = levels.transpose([int(axis) for axis in order])
        elif kind == "RESHAPE":
            levels = levels.reshape([int(n) for n in self._graph.tensors[result].shape])
        elif kind not in ("QUANTIZE", "DEQUANTIZE"):
            return False
        self._known[result] = matrix, levels
        return True

    def _marked(self, op: Any) -> tuple[BlockMatrix, Array] | None:
        """Return the matrix whose levels a QUANTIZE op reads, and these levels."""
        source, result = (self._graph.tensors[i[0]] for i in (op.inputs, op.outputs))
        value = tflite_edits.constant(self._model, source)
        steps = tflite_edits.steps_of(result)
        if value is None or steps is None or steps.size > 1:
            return None
        number = (float(steps[0]) - 1.0) / _APART
        if not number.is_integer() or number < 0:
            return None
        matrix = self._matrices[int(number) % len(self._matrices)]
        levels = value / steps[0]
        # In any order; where they are read it has to be that of the matrix.
        same = np.array_equal(np.sort(levels, None), np.sort(matrix.levels, None))
        return (matrix, levels) if same else None

    def _read(self, op: Any) -> list[Any]:
        """Let an op read weights in blocks; return ops to run behind it."""
        kind = tflite_edits.kind_of(self._model, op)
        behind: list[Any] = []
        for slot, index in enumerate(map(int, op.inputs)):
            if index not in self._known:
                continue
            matrix, levels = self._known[index]
            fits = np.array_equal(levels, matrix.levels)
            if kind != "FULLY_CONNECTED" or slot != _WEIGHTS or not fits:
                raise QuantizeError(_refusal(matrix, f"a {kind} that reads them"))
            op.inputs[slot] = self._in_blocks(matrix, index)
            op.builtinOptions.asymmetricQuantizeInputs = True
            tflite_edits.code_index(self._model, kind, _INT4_VERSION)
            behind = self._with_activation_apart(op)
        return behind

    def _with_activation_apart(self, op: Any) -> list[Any]:
        """Return the activation of a product as an op of its own.

        TFLite's own kernel leaves it out where weights are in blocks (LiteRT 2.3).
        """
        options, result = op.builtinOptions, int(op.outputs[0])
        kind = _ACTIVATIONS.get(options.fusedActivationFunction)
        if kind is None:
            return []
        options.fusedActivationFunction = 0
        before = tflite_edits.new_tensor(self._graph, self._graph.tensors[result])
        op.outputs[0] = before
        return [tflite_edits.new_op(self._model, kind, [before], [result], 1)]

    def _in_blocks(self, matrix: BlockMatrix, like: int) -> int:
        """Return the number of a tensor that holds a matrix in blocks."""
        if matrix.range in self._stored:
            return self._stored[matrix.range]
        graph, model = self._graph, self._model
        blocks = matrix.levels.reshape(*matrix.steps.shape, -1)
        sizes = np.where(blocks.any(2), matrix.steps, _FREE)
        steps = tflite_edits.new_tensor(graph, graph.tensors[like])
        tflite_edits.set_constant(model, graph.tensors[steps], sizes, "FLOAT16")
        index = tflite_edits.new_tensor(graph, graph.tensors[like])
        tflite_edits.set_constant(model, graph.tensors[index], matrix.levels, "INT4")
        tflite_edits.set_blocks(graph.tensors[index], steps, blocks.shape[2])
        self._stored[matrix.range] = index
        return index


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
