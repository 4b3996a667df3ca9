"""Costs of ops: bytes of tensors, multiply-adds, estimated and measured times.

Where an unknown dimension comes from (a placeholder, an iterator, `tf.where`) it is
given by the caller, or assumed. All other shapes follow from these: TensorFlow infers
them in a copy of the part of the graph that leaves them open.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from inspect import signature
from itertools import islice
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from geutil.errors import (
    ArgumentTypeError,
    PlanError,
    PredictionError,
    SelectionError,
    Words,
)
from geutil.graph import (
    adjacency,
    creation,
    functions,
    op_types,
    shape_inference,
    types,
)
from geutil.graph.op_types import SHAPE_READERS, types_in
from geutil.graph.state import slot
from geutil.graph.types import GivenShapes, Graph, MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import closure, data_inputs, tensor_name
from geutil.memory.kernels import cpu

Dims: TypeAlias = tuple[int | None, ...]

UNKNOWN = 32
"""The size assumed for an unknown dimension: most are a batch."""
ONLY_ON_GPUS = frozenset((("FusedBatchNormV3", 5), ("_FusedBatchNormEx", 5)))
"""Outputs, by type and place, that hold nothing on a CPU; their rank is not known."""
_SHOWN = 6
"""How many tensors a message names."""
# Handles to variables and lists, which have a shape of their own.
_ELSEWHERE = (tf.resource, tf.variant)
# They yield a few axes, or dimensions, at most.
_OF_NO_SIZE = op_types.AXES | {"VariableShape"}


def bytes_of(tensor: Tensor, shapes: GivenShapes | None = None) -> int | None:
    """Return the bytes of a tensor's elements, without building anything.

    Args:
        tensor: a symbolic tensor.
        shapes: shapes for tensors whose static shapes leave dimensions open: a mapping,
            or pairs. A key is a tensor, its `ref()` or its name; the name of an op
            means its first output.

    Returns:
        The bytes, or None where a dimension is unknown. A handle or variant counts 0
        bytes, a string 24.

    Cost: linear in `shapes`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.memory import bytes_of
        >>> with tf.Graph().as_default():
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 10], name="x")
        >>> print(bytes_of(x), bytes_of(x, {"x": [8, 10]}))
        None 320
    """
    dims = types.dims_of(tensor)
    for key, shape in types.pairs_of(shapes):
        key = types.dereference(key)
        if key is tensor or (isinstance(key, str) and tensor_name(key) == tensor.name):
            dims = tuple(type(tensor.shape)(shape).as_list())
    return types.bytes_of_shape(tensor.dtype, dims)


def known_dims(tensor: Tensor) -> Dims | None:
    """Return the shape of a tensor as known, given or assumed; None without a rank."""
    dims = types.dims_of(tensor)
    is_open = dims is None or None in dims
    return open_shapes_of(tensor.graph).known.get(tensor, dims) if is_open else dims


def tensor_elements(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the number of elements of a tensor; 0 for an unknown rank."""
    dims = known_dims(tensor)
    return 0 if dims is None else math.prod(unknown if d is None else d for d in dims)


def tensor_bytes(tensor: Tensor, unknown: int = UNKNOWN) -> int:
    """Return the size of a tensor in bytes, by its known or assumed shape."""
    # Handles, variants and strings count nothing: their contents are elsewhere. So does
    # a tensor of unknown rank.
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    return tensor_elements(tensor, unknown) * int(tensor.dtype.size)


class Shapes:
    """The bytes of the tensors of a step, by shapes that a caller gives for some."""

    def __init__(self, graph: Graph, shapes: GivenShapes | None) -> None:
        self._graph = graph
        self._given = {
            _found(graph, key, PredictionError).name: tf.TensorShape(shape)
            for key, shape in types.pairs_of(shapes)
        }
        self._open: list[Tensor] = []

    def told_to(self, graph_def: Any) -> Any:
        """Return the `GraphDef` with the shapes in it; others follow from them."""
        for node in graph_def.node:
            _write_shape(node, self._given.get(f"{node.name}:0"))
        return graph_def

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor, 0 where they are not known: `check` tells."""
        dims = types.dims_of(tensor)
        if (tensor.op.type, tensor.value_index) in ONLY_ON_GPUS:
            return 0
        if tensor.op.type in op_types.AXES:
            # At most all axes; only the value tells.
            dims = types.dims_of(tensor.op.inputs[0])
        size = types.bytes_of_shape(tensor.dtype, dims)
        if size is None:
            size = types.bytes_of_shape(tensor.dtype, self._said_of(tensor))
        if size is None:
            self._open.append(tensor)
        return size or 0

    def _said_of(self, tensor: Tensor) -> list[int | None] | None:
        """Return a shape given by the caller or by `set_shape`, even of dependents."""
        # In the body of a call, the one in the function from which that was made.
        graph = self._graph
        if hasattr(tensor.graph, "outer_graph"):
            graph = functions.body_graph(graph, tensor.graph.name)
            shape = None
        else:
            shape = self._given.get(tensor.name)
        if shape is None and graph is not None:
            # A missing tensor was made by the optimizer.
            with suppress(KeyError, ValueError):
                shape = graph.get_tensor_by_name(tensor.name).shape
        return None if shape is None or shape.rank is None else shape.as_list()

    def check(self, fed: Iterable[Tensor]) -> None:
        """Raise `PredictionError` if some bytes were not known, due to `fed`."""
        if not self._open:
            return
        causes = [t.name for t in fed if not t.shape.is_fully_defined()]
        causes = [name for name in causes if name not in self._given]
        names = causes or [t.name for t in self._open]
        shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        given = Words(f"shapes={{'{names[0]}': [...]}}")
        raise PredictionError(
            f"the sizes of {len(self._open)} tensors, '{self._open[0].name}' among "
            f"them, depend on dimensions that are not known, of {shown}{more}",
            remedy=f"pass {given}",
        )


def given_shapes(graph: Graph, shapes: GivenShapes | None) -> list[tuple[Tensor, Dims]]:
    """Return the tensors whose shapes a caller gives, with these, checked."""
    tensor_dims = []
    for key, shape in types.pairs_of(shapes):
        tensor = _found(graph, key, SelectionError)
        try:
            tensor_shape = tf.TensorShape(shape)
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(f"shapes= has {shape!r}: {error}") from None
        fits = tensor_shape.is_compatible_with(tensor.shape)
        if not (fits and tensor_shape.is_fully_defined()):
            raise SelectionError(
                f"shapes= says {tensor_shape} of '{tensor.name}' {tensor.shape}; "
                "pass a shape without open dimensions that fits"
            )
        tensor_dims.append((tensor, tuple(tensor_shape.as_list())))
    return tensor_dims


def _found(
    graph: Graph, key: Any, error: type[PredictionError | SelectionError]
) -> Tensor:
    """Return the tensor of a key of `shapes=`, or raise an error."""
    key = types.dereference(key)
    if types.is_tensor(key):
        if key.graph is not graph:
            raise SelectionError(
                f"shapes= has '{key.name}', a tensor of another graph; pass the tensor "
                "of the step's graph, or its name"
            )
        return key
    try:
        return graph.get_tensor_by_name(tensor_name(key))
    except (KeyError, ValueError, TypeError):
        name = getattr(key, "name", key)
        raise error(
            f"shapes= names {name!r}, but the graph has no such tensor"
        ) from None


def _write_shape(node: Any, shape: tf.TensorShape | None) -> None:
    """Write the shape of a placeholder into its node, from which others follow."""
    # Shape inference follows constants through an Identity, but not through this op,
    # which does the same.
    if node.op == "PlaceholderWithDefault":
        node.op = "Identity"
        node.attr["T"].CopyFrom(node.attr["dtype"])
        del node.attr["dtype"], node.attr["shape"]
    elif shape is not None and node.op in op_types.PLACEHOLDERS:
        node.attr["shape"].shape.CopyFrom(shape.as_proto())


class OpenShapes:
    """The shapes assumed for the tensors of one graph whose shapes are open."""

    def __init__(self) -> None:
        # Those that are given, assumed, or follow from these; and the assumed ones.
        self.known: MutableIdentityMap[Dims] = MutableIdentityMap()
        self.assumed: MutableIdentityMap[Dims] = MutableIdentityMap()
        # Why TensorFlow takes them not to fit each other, if it does.
        self.refusal = ""
        self._given: MutableIdentityMap[Dims] = MutableIdentityMap()

    def tell(self, caller_dims: Sequence[tuple[Tensor, Dims]]) -> None:
        """Add the shapes of the caller, and forget those assumed without them."""
        if caller_dims:
            self._given.update(caller_dims)
            self.known = MutableIdentityMap(self._given.items())
            self.assumed = MutableIdentityMap()
            self.refusal = ""

    def settle(self, ops: Sequence[Operation]) -> None:
        """Find the shapes of the results of ops, as far as that can be done."""
        # As often, assumed shapes follow on others.
        for again in range(4):
            left = self._open(ops)
            if not left or self.refusal:
                return
            assumed_any = self._assume(self._behind(left), sources=not again)
            if again and not assumed_any:
                return
            self._infer(self._behind(self._open(left)))

    def _open(self, ops: Iterable[Operation]) -> list[Operation]:
        return [op for op in ops if any(map(self.is_open, op.outputs))]

    def is_open(self, tensor: Tensor) -> bool:
        """Return whether a size depends on an unknown part of a tensor's shape."""
        if tensor.dtype in _ELSEWHERE or tensor in self.known:
            return False
        if (tensor.op.type, tensor.value_index) in ONLY_ON_GPUS:
            return False
        dims = types.dims_of(tensor)
        return dims is None or None in dims

    def _behind(self, ops: Iterable[Operation]) -> list[Operation]:
        """Return the ops that open shapes depend on, up to tensors of known shapes."""

        def makers(op: Operation) -> Iterable[Operation]:
            return (t.op for t in op.inputs if not self._is_given(t))

        return adjacency.topological_sort(closure(ops, makers))

    def _is_given(self, tensor: Tensor) -> bool:
        """Return whether nothing behind a tensor is of use."""
        if tensor.op.type in op_types.PLACEHOLDERS:
            return False
        if tensor in self.assumed or tensor in self._given:
            return True
        if self.is_open(tensor):
            return False
        elements = tf.TensorShape(known_dims(tensor)).num_elements()
        # Few integers may be a shape, and are computed if they can be.
        return not (tensor.dtype.is_integer and (elements or 0) <= 64)

    def _assume(self, members: Sequence[Operation], *, sources: bool) -> bool:
        """Assume open shapes that follow from no others; return whether any were."""
        # Of an unknown rank nothing can be assumed. With `sources`, only those are
        # assumed that cannot follow from anything.
        follows: set[Operation] = set()
        assumed_any = False
        for op in members:
            left = [t for t in op.outputs if self.is_open(t)]
            may_follow = any(
                (sources and t.dtype not in _ELSEWHERE)
                or self.is_open(t)
                or t.op in follows
                for t in op.inputs
            )
            if may_follow or left:
                follows.add(op)
            for t in () if may_follow else left:
                dims = types.dims_of(t)
                if dims is not None:
                    assumed_any = True
                    self.known[t] = tuple(UNKNOWN if d is None else d for d in dims)
                    if op.type not in _OF_NO_SIZE:
                        self.assumed[t] = self.known[t]
        return assumed_any

    def _infer(self, members: Sequence[Operation]) -> None:
        """Have TensorFlow infer the shapes that follow."""
        if not members:
            return
        inside = frozenset(members)
        read = types.IdentitySet(t for op in members for t in op.inputs)
        feeds = [t for t in read if t.op not in inside]
        try:
            graph = members[0].graph
            graph_def = creation.step_graph_def(graph, members, feeds)
            self._write(graph_def, members, feeds)
            scratch = shape_inference.inferred_graph(graph_def)
        except Exception as error:  # TensorFlow raises errors of any kind.
            self.refusal = str(error).splitlines()[0]
            return
        for t in (t for op in members for t in op.outputs if self.is_open(t)):
            dims = types.dims_of(scratch.get_tensor_by_name(t.name))
            if dims is not None and None not in dims:
                self.known[t] = dims

    def _write(
        self, graph_def: Any, members: Sequence[Operation], feeds: Sequence[Tensor]
    ) -> None:
        """Write the shapes into a `GraphDef`, and leave out irrelevant attributes."""
        placeholders = (op.outputs[0] if op.outputs else None for op in members)
        for node, t in zip(graph_def.node, (*placeholders, *feeds), strict=True):
            node.input[:] = data_inputs(node.input)
            dims = self.known.get(t) if t is not None else None
            _write_shape(node, None if dims is None else tf.TensorShape(dims))


def open_shapes_of(graph: Graph) -> OpenShapes:
    """Return the shapes assumed for open ones of a graph."""
    return slot(graph, OpenShapes)


def settle_shapes(
    ops: Sequence[Operation], caller_dims: Sequence[tuple[Tensor, Dims]] = ()
) -> None:
    """Find the shapes to assume for the open results of ops, by those of the caller."""
    if not ops:
        return
    shapes = open_shapes_of(ops[0].graph)
    shapes.tell(caller_dims)
    shapes.settle(ops)
    if caller_dims and shapes.refusal:
        raise SelectionError(f"shapes= does not fit the graph: {shapes.refusal}")


def warning_of_sizes(ops: Iterable[Operation]) -> str | None:
    """Return a warning of sizes that are guesses, or None if there are none."""
    listed = adjacency.topological_sort(ops)
    if not listed:
        return None
    shapes = open_shapes_of(listed[0].graph)
    left = [t for op in listed for t in op.outputs if shapes.is_open(t)]
    if not left:
        return None
    why = "these do not follow from other shapes"
    if shapes.refusal:
        assumed = ", ".join(f"'{t.name}' {[*d]}" for t, d in shapes.assumed.items())
        why = f"TensorFlow refuses the assumed {assumed}: {shapes.refusal}"
    return (
        f"the sizes of {len(left)} tensors, '{left[0].name}' among them, are guesses, "
        f"so predicted peaks are: an unknown dimension counts as {UNKNOWN}, an unknown "
        f"rank as nothing; {why}. Pass shapes= with the shapes of what is fed"
    )


def negligible_bytes(sizes: Iterable[int], share: float = 0.01) -> int:
    """Return the largest size of tensors that together are a small share."""
    # The statistics of a batch norm, pooled features, indices: to recompute them would
    # save nothing, and would tie segments together.
    counts = Counter(sizes)
    left = share * sum(counts.elements())
    limit = 0
    # Of tensors of one size, all are negligible or none.
    for size, count in sorted(counts.items()):
        left -= size * count
        if left < 0:
            break
        limit = size
    return limit


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
