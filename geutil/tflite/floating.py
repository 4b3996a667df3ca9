"""Files of integers turned back into floats.

Weights and biases become the numbers that their integers stand for, kernels compute in
float32 with the activations that they have fused, and ops that only change types go. A
change of steps that cuts off all below 0 becomes the Relu that it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite.arguments import checked
from geutil.tflite.ends import move_ends
from geutil.tflite.numbers import Stored, numbers
from geutil.tflite.parts import Buffer, Contents, LiteGraph, LiteOp, LiteTensor
from geutil.tflite.steps import STEPPED, limits, one_step
from geutil.tflite.versions import version_of

_CHANGES = frozenset({"DENSIFY", "DEQUANTIZE", "QUANTIZE"})
"""Kinds that make the same numbers in another type."""
_RAW = frozenset({"BITCAST", "CAST"})
"""Kinds that read integers themselves, and not the numbers that they stand for."""
_PLANNED = ("OfflineMemoryAllocation", "model_control_dependencies")
_WIDE = ("int32", "int64")


@checked
def dequantize(file: Contents) -> Stored:
    """Turn integers, and float16 weights, into float32: weights, kernels and ends.

    Activations that are fused into kernels stay; QUANTIZE and DEQUANTIZE ops go.

    Returns:
        A report of the tensors that changed.

    Raises:
        TFLiteError: a custom op reads or makes integers. The file is as it was.

    Cost: linear in ops and weights, which are four times as large.

    Example:
        >>> from geutil import tflite
        >>> m, steps = tflite.LiteFile(), tflite.Quantization((1 / 128,))
        >>> x = m.add_input("x", "int8", [4], quantization=steps)
        >>> y = m.add("TANH", [x], name="y", quantization=steps, version=2)
        >>> m.set_outputs([y])
        >>> print(m.dequantize())
        2 tensors changed; none clipped
        >>> m.tensor("y"), m.graphs[0].ops[0].version
        (<LiteTensor 'y' float32 [4]>, 1)
    """
    for name in _PLANNED:
        if name in file.metadata:
            raise TFLiteError(
                f"ops that only change types go, and the metadata '{name}' names ops "
                "by their places; call strip() first"
            )
    changed = [
        t for t in file.tensors if _stands_for_numbers(t) or t.dtype == "float16"
    ]
    concerned = set(changed)
    for op in file.ops:
        ends = [t for t in (*op.inputs, *op.outputs) if t in concerned]
        if ends and op.is_custom:
            raise TFLiteError(
                f"custom op {op!r} takes or makes {ends[0]}, and nothing says whether "
                "it can compute in float32; cut the file around it"
            )
        if op.kind in _RAW and any(_stands_for_numbers(t) for t in ends):
            raise TFLiteError(
                f"{op!r} reads the integers of {ends[0].label} themselves; replace it "
                "by a DEQUANTIZE"
            )
    cutting = [op for op in file.ops if _cuts_at_zero(op)]
    dropped = [
        op for op in file.ops if _is_dropped(op, concerned) and op not in cutting
    ]
    sparse = [t for op in dropped for t in op.inputs if t is not None and t.is_sparse]
    whole = list(dict.fromkeys([*changed, *sparse]))
    values = {
        t: numbers(t).astype(np.float32)
        for t in whole
        if t.buffer.size and not t.makers
    }
    touched = {op for t in changed for op in (*t.makers, *t.readers)}
    for tensor in whole:
        tensor.dtype, tensor.quantization = "float32", None
        if tensor in values:
            tensor.value = values[tensor]
        elif not tensor.buffer.size:
            tensor.buffer = Buffer(tensor.buffer.data)
    for op in cutting:
        op.kind, op.table, op.options = "RELU", None, {}
    for graph in file.graphs:
        _drop(file, graph, [op for op in graph.ops if op in set(dropped)])
    for op in file.ops:
        if op in touched:
            _become_float_op(op)
    return Stored({}, tuple(whole))


def _stands_for_numbers(tensor: LiteTensor) -> bool:
    kinds = (*STEPPED, *_WIDE)
    return tensor.quantization is not None and tensor.dtype in kinds


def _is_dropped(op: LiteOp, changed: set[LiteTensor]) -> bool:
    """Tell whether an op forwards its input in float32."""
    source = op.inputs[0] if op.inputs else None
    if op.is_custom or op.kind not in _CHANGES or source is None:
        return False
    made = op.outputs[0]
    return all(t in changed or t.dtype == "float32" for t in (source, made))


def _cuts_at_zero(op: LiteOp) -> bool:
    """Tell whether a change of steps is a Relu, too: its new range begins at 0."""
    if op.kind != "QUANTIZE" or op.is_custom or op.inputs[0] is None:
        return False
    least = []
    for tensor in (op.inputs[0], op.outputs[0]):
        step = one_step(tensor)
        if step is None or tensor.dtype not in STEPPED:
            return False
        least.append((limits(tensor.dtype)[0] - step[1]) * step[0])
    return least[0] < 0 == least[1]


def _become_float_op(op: LiteOp) -> None:
    """Let an op have the version and the options of its float kernel."""
    op.version = version_of(op)
    for name, value in (
        ("asymmetric_quantize_inputs", False),
        ("quantized_bias_type", "FLOAT32"),
    ):
        if name in op.options:
            op.options[name] = value
    # They describe what an integer kernel computes on the way.
    op.intermediates = ()


def _drop(file: Contents, graph: LiteGraph, ops: Iterable[LiteOp]) -> None:
    """Remove ops that forward their input, and let their readers read that."""
    replaced: dict[LiteTensor, LiteTensor] = {}
    gone = set(ops)
    for op in graph.ops:
        source = op.inputs[0] if op.inputs else None
        if op in gone and source is not None:
            # Ops come in their order, so the source has its replacement already.
            replaced[op.outputs[0]] = replaced.get(source, source)
    kept = [op for op in graph.ops if op not in gone]
    graph.set_ops(kept)
    for op in kept:
        op.inputs = [t and replaced.get(t, t) for t in op.inputs]
    ends = {*graph.inputs, *graph.outputs}
    for made, source in replaced.items():
        if made in ends and source not in ends:
            source.name = made.name
            ends.add(source)
    move_ends(file, graph, "outputs", replaced)
    read = {*graph.inputs, *graph.outputs}
    unused = [t for t in graph.tensors if not (t.makers or t.readers or t in read)]
    graph.drop_tensors(unused)
