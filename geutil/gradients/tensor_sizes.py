"""Sizes of tensors, with open dimensions that fit each other.

Where an unknown dimension comes from (a placeholder, an iterator, `tf.where`) it is
given by the caller, or assumed. All other shapes follow from these: TensorFlow infers
them in a copy of the part of the graph that leaves them open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients.step import reached
from geutil.graph import adjacency, fetched_subgraph, op_types, shape_inference, types
from geutil.graph.state import state_of
from geutil.graph.types import (
    GivenShapes,
    Graph,
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
)
from geutil.graph.walks import tensor_name
from geutil.memory.kernels.cpu import ONLY_ON_GPUS
from geutil.memory.sizes import UNKNOWN, Dims, known_dims

# Handles to variables and lists, which have a shape of their own.
_ELSEWHERE = (tf.resource, tf.variant)
# They yield a few axes, or dimensions, at most.
_OF_NO_SIZE = op_types.AXES | {"VariableShape"}


def given_shapes(graph: Graph, shapes: GivenShapes | None) -> list[tuple[Tensor, Dims]]:
    """Return the tensors whose shapes a caller gives, with these, checked."""
    tensor_dims = []
    for key, shape in types.pairs_of(shapes):
        tensor = _found(graph, types.dereference(key))
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


def _found(graph: Graph, key: Any) -> Tensor:
    if types.is_tensor(key) and key.graph is graph:
        return key
    try:
        return graph.get_tensor_by_name(tensor_name(key))
    except (KeyError, ValueError, TypeError):
        name = getattr(key, "name", key)
        raise SelectionError(
            f"shapes= names {name!r}, but the graph has no such tensor"
        ) from None


class OpenShapes:
    """The shapes that tensors of one graph with open shapes are taken to have."""

    def __init__(self) -> None:
        # Those that are given, assumed, or follow from these; and the assumed ones.
        self.known: MutableIdentityMap[Dims] = MutableIdentityMap()
        self.assumed: MutableIdentityMap[Dims] = MutableIdentityMap()
        # Why TensorFlow takes them not to fit each other, if it does.
        self.refusal = ""
        self._given: MutableIdentityMap[Dims] = MutableIdentityMap()

    def tell(self, caller_dims: Sequence[tuple[Tensor, Dims]]) -> None:
        """Take in the shapes of the caller, and forget those assumed without them."""
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
        """Tell whether a size depends on an unknown part of a tensor's shape."""
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

        return adjacency.topological_sort(reached(ops, makers))

    def _is_given(self, tensor: Tensor) -> bool:
        """Tell whether nothing behind a tensor is of use."""
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
        """Assume shapes that do not follow from other open ones; tell if any."""
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
            graph_def = fetched_subgraph.step_graph_def(graph, members, feeds)
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
            data = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(data)
            if node.op in op_types.PLACEHOLDERS and t in self.known:
                shape = tf.TensorShape(self.known[t])
                node.attr["shape"].shape.CopyFrom(shape.as_proto())
            elif node.op == "PlaceholderWithDefault":
                # Shapes follow through an Identity, but not through this.
                node.op = "Identity"
                node.attr["T"].CopyFrom(node.attr["dtype"])
                del node.attr["dtype"], node.attr["shape"]


def open_shapes_of(graph: Graph) -> OpenShapes:
    """Return the shapes assumed for open ones of a graph."""
    state = state_of(graph)
    if state.open_shapes is None:
        state.open_shapes = OpenShapes()
    shapes: OpenShapes = state.open_shapes
    return shapes


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
