"""Sizes of tensors: their bytes by static shapes, given ones, or assumed ones.

Where an unknown dimension comes from (a placeholder, an iterator, `tf.where`) it is
given by the caller, or assumed. All other shapes follow from these: TensorFlow infers
them in a copy of the part of the graph that leaves them open.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.errors import ArgumentTypeError, PredictionError, SelectionError, Words
from geutil.graph import (
    adjacency,
    creation,
    functions,
    op_types,
    shape_inference,
    types,
)
from geutil.graph.state import slot
from geutil.graph.types import (
    GivenShapes,
    Graph,
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
)
from geutil.graph.walks import closure, data_inputs, tensor_name

Dims: TypeAlias = tuple[int | None, ...]

UNKNOWN = 32
"""The size assumed for an unknown dimension: most are a batch."""
STRING_BYTES = 24
"""The bytes of one string in TensorFlow, besides the characters of a long one."""
ONLY_ON_GPUS = frozenset((("FusedBatchNormV3", 5), ("_FusedBatchNormEx", 5)))
"""Outputs, by type and place, that hold nothing on a CPU; their rank is not known."""
_SHOWN = 6
"""How many tensors a message names."""
# Handles to variables and lists, which have a shape of their own.
_ELSEWHERE = (tf.resource, tf.variant)
# They yield a few axes, or dimensions, at most.
_OF_NO_SIZE = op_types.AXES | {"VariableShape"}


def dtype_bytes(dtype: Any) -> int:
    """Return the bytes of one element; handles and variants lead elsewhere."""
    base = dtype.base_dtype
    if base.name in ("resource", "variant"):
        return 0
    return STRING_BYTES if base.name == "string" else int(base.size)


def bytes_of_shape(dtype: Any, dims: Sequence[int | None] | None) -> int | None:
    """Return the bytes of a tensor of a dtype and shape, or None where it is open."""
    each = dtype_bytes(dtype)
    if not each:
        return 0
    if dims is None:
        return None
    static_dims = [dim for dim in dims if dim is not None]
    return each * math.prod(static_dims) if len(static_dims) == len(dims) else None


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
    return bytes_of_shape(tensor.dtype, dims)


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
        size = bytes_of_shape(tensor.dtype, dims)
        if size is None:
            size = bytes_of_shape(tensor.dtype, self._said_of(tensor))
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
        read = IdentitySet(t for op in members for t in op.inputs)
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
