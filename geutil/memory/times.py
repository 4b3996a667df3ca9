"""The time of ops: multiply-adds, an estimate from static shapes, measured seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import PlanError
from geutil.graph.op_types import SHAPE_READERS, types_in
from geutil.graph.types import Operation, Tensor
from geutil.memory import cpu
from geutil.memory.sizes import UNKNOWN, known_dims, tensor_elements

Times = Callable[[Operation], float]
"""Returns the time of an op, in any unit."""


CONVOLUTIONS = types_in(
    "Conv Conv2D Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropInput "
    "Conv3DBackpropInputV2 DepthwiseConv2dNative Dilation2D XlaConv XlaConvV2"
)
_FILTER_GRADIENTS = types_in(
    "Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv3DBackpropFilterV2 "
    "DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput"
)
"""Ops of the backward pass alone that take as long as a convolution."""
PRODUCTS = types_in(
    "BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul SparseMatMul "
    "SparseTensorDenseMatMul XlaDot XlaDotV2 XlaEinsum"
)
# Loops, branches and calls: their time is unknown here, and often long.
BODIES = types_in("If PartitionedCall StatelessCase StatelessIf StatelessWhile While")
HEAVY = (
    CONVOLUTIONS
    | PRODUCTS
    | BODIES
    | types_in("BlockLSTM BlockLSTMV2 CudnnRNN CudnnRNNV2 CudnnRNNV3 GRUBlockCell")
    | types_in("Cholesky MatrixInverse MatrixSolve MatrixTriangularSolve Qr Svd")
)
"""Types of ops that are worth more to keep than their neighbours."""
_BIAS = types_in("BiasAdd BiasAddV1")

# From commit f896a26a: two cores with AVX512, the mean of the ops of eleven networks.
# Not reproduced: benchmarks/op_times.py, on two busy cores, has 5 for _MOVED, 3 to 15
# for a depthwise multiply-add; its table has the others.
_MOVED = 16
"""Multiply-adds of a convolution or product in the time of moving one element."""
_DEPTHWISE = 8
"""Multiply-adds of others in the time of one of a depthwise convolution."""
_FACTORS = {
    kind: factor
    for factor, kinds in {
        2: "All Any AvgPool AvgPool3D Einsum Max Mean Min Prod Sum",
        3: "Cos Elu Log Selu Sin Softplus Softsign",
        4: "AvgPool3DGrad AvgPoolGrad Erf Erfc Log1p Pow Sigmoid Tanh",
        8: "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
        10: "MaxPool3DGrad MaxPoolGrad",
    }.items()
    for kind in kinds.split()
}
"""Elements moved in the time of one element of an op that does more than move it."""


def is_heavy(tensor: Tensor) -> bool:
    """Return whether a tensor is the result of a heavy op, its bias included."""
    # Kernels add the bias in place, so it is the sum that is kept.
    op = tensor.op
    if op.type in _BIAS:
        return op.inputs[0].op.type in HEAVY
    readers = (reader for t in op.outputs for reader in t.consumers())
    return op.type in HEAVY and all(reader.type not in _BIAS for reader in readers)


def multiply_adds(op: Operation) -> int:
    """Return the multiply-adds of an op, an unknown dimension counted as 32."""
    # Exact for convolutions, their gradients and matrix products. Any other op counts
    # one for each element that it reads or writes.
    if op.type in CONVOLUTIONS or op.type in _FILTER_GRADIENTS:
        return _convolution(op)
    if op.type in PRODUCTS and len(op.inputs) == 2:
        return _product(op)
    return _moved_elements(op)


def _moved_elements(op: Operation) -> int:
    return sum(map(tensor_elements, (*op.inputs, *op.outputs)))


def _convolution(op: Operation) -> int:
    """Count the weights that each element of the layer's output depends on."""
    # A gradient, and a transposed convolution, read the result of the plain one.
    spread = op.inputs[2] if "Backprop" in op.type else op.outputs[0]
    weights = _dims(op.outputs[0] if "BackpropFilter" in op.type else op.inputs[1])
    # Weights are [*window, channels in, channels out]; each output channel has its own.
    by_channel = op.type.startswith(("Depthwise", "Dilation2D"))
    return tensor_elements(spread) * math.prod(weights[: 2 if by_channel else -1])


def _product(op: Operation) -> int:
    """Count each kind of dimension once."""
    # In |left| x |right| x |out| each counts twice, except one of a batch, which all
    # three have: it counts three times.
    sizes = (tensor_elements(t) for t in (*op.inputs, op.outputs[0]))
    shared = _shared_by_einsum(op) if op.type == "Einsum" else _shared_batch(op)
    return math.isqrt(math.prod(sizes) // shared) if shared else 0


def _shared_batch(op: Operation) -> int:
    """Return the product of the batch dimensions that are not broadcast."""
    left, right = (reversed(_dims(t)[:-2]) for t in op.inputs)
    return math.prod(a for a, b in zip(left, right, strict=False) if a == b)


def _shared_by_einsum(op: Operation) -> int:
    """Return the product of the dimensions that all three terms of an einsum have."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "." in equation or "->" not in equation:
        return 1
    terms, result = equation.split("->")
    left, right = terms.split(",")
    sizes = dict(zip(left, _dims(op.inputs[0]), strict=True))
    shared = set(left) & set(right) & set(result)
    return math.prod(sizes[label] for label in sorted(shared))


def _dims(tensor: Tensor) -> list[int]:
    return [UNKNOWN if d is None else d for d in known_dims(tensor) or ()]


def op_time(op: Operation) -> float:
    """Return an estimate of the time of an op, in multiply-adds of a convolution."""
    # Its multiply-adds, and 16 for each element that it reads or writes. Ops that
    # reduce, pool or compute a transcendental function take more for an element. Views
    # of another tensor or of a variable, and the shape of either, take no time.
    is_view = 0 < len(op.outputs) == len(cpu.aliases(op))
    if op.type in cpu.HELD or op.type in SHAPE_READERS or is_view:
        return 0.0
    time = _MOVED * _FACTORS.get(op.type, 1) * _moved_elements(op)
    if op.type in HEAVY or op.type in _FILTER_GRADIENTS:
        is_depthwise = op.type.startswith("Depthwise")
        time += (_DEPTHWISE if is_depthwise else 1) * multiply_adds(op)
    return float(time)


def op_times(
    ops: Iterable[Operation],
    called_times: Mapping[Operation, float],
    *,
    measured: bool = False,
    in_seconds: bool = False,
) -> Times:
    """Return the times of ops: estimated, or in seconds if some can be `measured`."""
    # Where others are measured, an op that cannot be takes as long as its estimate next
    # to theirs. Ops that run functions have the time of these in `called_times`.
    ops = list(ops)

    def estimate(op: Operation) -> float:
        return called_times[op] if op in called_times else op_time(op)

    if not measured:
        return estimate
    seconds = measured_times(ops)
    if in_seconds and not any(seconds.values()):
        raise PlanError(
            "how long transfers take can be weighed against seconds only, and no op of "
            "this step can be measured: none is large, or TensorFlow does not run "
            "eagerly; plan without offload=True"
        )
    estimated = sum(estimate(op) for op in ops if op.name in seconds)
    scale = sum(seconds.values()) / estimated if estimated else 1.0
    return lambda op: seconds.get(op.name, scale * estimate(op))


_MOST_VALUES = 64
"""Integer tensors up to here may be axes, shapes or paddings, whose values matter."""


def measured_times(ops: Iterable[Operation]) -> dict[str, float]:
    """Return the seconds of large ops by name, run one by one on made-up numbers."""
    # Ops of one type, with the same attributes and shapes, are run once for all,
    # outside of their graph: the least of three runs after a first one. An op that
    # cannot be run so (variables, strings, calls, unknown shapes) has no time, and none
    # has where TensorFlow does not run eagerly.
    # A thread of its own is in no graph.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measured_times, list(ops)).result()


def _measured_times(ops: Sequence[Operation]) -> dict[str, float]:
    known: dict[str, float | None] = {}
    times: dict[str, float | None] = {}
    for op in ops if tf.executing_eagerly() else ():
        read = sum(cpu.bytes_at(t, known_dims) for t in op.inputs)
        written = sum(cpu.bytes_at(t, known_dims) for t in op.outputs)
        # Of smaller ops the call takes longer.
        if read + written >= 1 << 16:
            like = [(t.dtype.name, known_dims(t), _few_integers(t)) for t in op.inputs]
            key = repr((op.type, like, written, _attributes(op)))
            if key not in known:
                known[key] = _seconds(op)
            times[op.name] = known[key]
    return {name: time for name, time in times.items() if time is not None}


def _few_integers(tensor: Tensor) -> Any:
    """Return the value of axes, shapes and paddings, as a list; None if unknown."""
    is_small = cpu.bytes_at(tensor, known_dims) <= 8 * _MOST_VALUES
    may_matter = is_small and tensor.dtype.is_integer
    value = tf.get_static_value(tensor) if may_matter else None
    return None if value is None else np.asarray(value).tolist()


def _attributes(op: Operation) -> list[tuple[str, bytes]]:
    return [
        (name, value.SerializeToString(deterministic=True))
        for name, value in sorted(op.node_def.attr.items())
        if not name.startswith("_")
    ]


def _made_up(tensor: Tensor) -> tf.Tensor | None:
    """Return numbers like those of a tensor; None if they cannot be made up."""
    dtype, dims = tensor.dtype.base_dtype, known_dims(tensor)
    integers = _few_integers(tensor)
    if integers is not None:
        return tf.constant(integers, dtype)
    if dims is None or None in dims:
        return None
    sizes = [int(d or 0) for d in dims]
    if dtype.is_floating:
        numbers = np.random.default_rng(0).normal(size=sizes)
        return tf.cast(numbers.astype(np.float32), dtype)
    # Few integers may be a shape or axes, which have to fit.
    if dtype.is_bool or (dtype.is_integer and math.prod(sizes) > _MOST_VALUES):
        return tf.zeros(sizes, dtype)
    return None


_SHAPE_INPUTS = {
    **dict.fromkeys(("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput"), 0),
    **dict.fromkeys(("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter"), 1),
    "Reshape": 1,
}
"""Ops that read the shape of their result, with the number of that input."""


def raw_call(op: Operation, values: Iterable[Any]) -> Callable[[], Any] | None:
    """Return the call of an op's function in `tf.raw_ops`; None if there is none."""
    run = getattr(tf.raw_ops, op.type, None)
    if run is None:
        return None
    parameters = signature(run).parameters
    left = iter(values)
    attributes = [a.name for a in op.op_def.attr if a.name in parameters]
    arguments = {name: op.get_attr(name) for name in attributes}
    for argument in op.op_def.input_arg:
        # Reductions call `reduction_indices` "axis".
        name = argument.name if argument.name in parameters else "axis"
        if argument.number_attr:
            arguments[name] = list(islice(left, op.get_attr(argument.number_attr)))
        elif argument.type_list_attr:
            dtypes = op.get_attr(argument.type_list_attr)
            arguments[name] = list(islice(left, len(dtypes)))
        else:
            arguments[name] = next(left)
    return partial(run, **arguments)


def _seconds(op: Operation) -> float | None:
    """Return how long an op takes outside of its graph; None if it cannot run there."""
    try:
        values = list(map(_made_up, op.inputs))
        shape = known_dims(op.outputs[0]) if op.type in _SHAPE_INPUTS else None
        if shape and None not in shape:
            values[_SHAPE_INPUTS[op.type]] = tf.constant(shape)
        is_made_up = values and all(value is not None for value in values)
        run = raw_call(op, values) if is_made_up else None
        if run is None:
            return None
        # The first call is a trial.
        return min([_seconds_of_call(run) for _ in range(1 + 3)][1:])
    except (TypeError, ValueError, tf.errors.OpError):
        # Numbers that the op does not take, or an attribute of functions.
        return None


def _seconds_of_call(run: Callable[[], Any]) -> float:
    began = perf_counter()
    run()
    # A GPU runs it behind the caller's back.
    tf.test.experimental.sync_devices()
    return perf_counter() - began
