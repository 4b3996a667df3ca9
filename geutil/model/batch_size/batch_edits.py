"""Changes of a graph or function body as values, and the new nodes that they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from geutil.graph.walks import walk_by_identity
from geutil.model.batch_size.batch_axes import SizeSource
from geutil.model.programs import fresh_name


@dataclass(frozen=True)
class Grown:
    """A dimension that is some times the batch."""

    factor: int


Dims: TypeAlias = tuple["int | Grown", ...]


@dataclass(frozen=True)
class SetConstant:
    """Input `index` of `node` becomes a constant of its own."""

    node: str
    index: int
    value: np.ndarray[Any, Any]


@dataclass(frozen=True)
class SetElements:
    """Elements of the vector that a Pack op makes for input `index` are replaced."""

    node: str
    index: int
    pack: str
    elements: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SetDims:
    """Input `index` of `node` becomes a vector of dimensions."""

    node: str
    index: int
    dims: Dims
    source: SizeSource
    dtype: int


@dataclass(frozen=True)
class SetSize:
    """Input `index` of `node`, a number of rows, becomes the batch size."""

    node: str
    index: int
    source: SizeSource  # Where the size of the batch is read.
    # The loop of version 1 that the node is in; None outside of them.
    frame: str | None = None


@dataclass(frozen=True)
class Broadcast:
    """Input `index` of `node`, or a result of a function, is repeated for the batch."""

    node: str | None  # The node, or None for a result.
    index: int  # The index of the input or of the result.
    axis: int  # The axis that is repeated; of several equal rows the first is taken.
    rows: int
    dims: Dims
    source: SizeSource  # Where the size of the batch is read.
    dtype: int


@dataclass(frozen=True)
class SetAttribute:
    """An attribute of `node` gets a new value."""

    node: str
    name: str
    value: Any = field(repr=False)


@dataclass(frozen=True)
class BiasToAdd:
    """A BiasAdd becomes an AddV2 that reads `bias` as it was before a Squeeze."""

    node: str
    bias: str


@dataclass(frozen=True)
class CallAnew:
    """A function that `node` calls is replaced by a changed copy."""

    node: str
    # The attribute that names the function; None if it is the op's type.
    attribute: str | None
    position: int  # The place in the attribute, for a list of functions.
    function: str
    plan: BatchPlan


Edit: TypeAlias = (
    SetConstant
    | SetElements
    | SetDims
    | SetSize
    | Broadcast
    | SetAttribute
    | BiasToAdd
    | CallAnew
)


@dataclass(frozen=True)
class BatchObstacle:
    """A problem that cannot be mended, and its remedy."""

    node: str
    op: str
    reason: str
    remedy: str
    constants: tuple[str, ...] = ()

    def __str__(self) -> str:
        reads = f" with {', '.join(self.constants)}" if self.constants else ""
        return f"'{self.node}' ({self.op}){reads}: {self.reason}; {self.remedy}"


@dataclass
class BatchPlan:
    """The changes of one graph or function body."""

    # The changes, in the order of the ops.
    edits: list[Edit] = field(default_factory=list)
    problems: list[BatchObstacle] = field(default_factory=list)
    # The names of the nodes that depend on the batch; their recorded shapes no longer
    # hold.
    growing: set[str] = field(default_factory=set)

    def all_problems(self) -> list[BatchObstacle]:
        """Return the problems, those of the functions that are called included."""
        plans = walk_by_identity(
            [self], lambda p: [e.plan for e in p.edits if isinstance(e, CallAnew)]
        )
        return list(dict.fromkeys(problem for p in plans for problem in p.problems))


_INT = tf.int32.as_datatype_enum


class NodeWriter:
    """Adds nodes to a graph or a function body."""

    def __init__(
        self,
        nodes: Any,
        *,
        function: bool,
        new: int | None,
        used_names: Sequence[str] = (),
    ) -> None:
        self._nodes = nodes
        self._function = function
        self._new = new
        self._names = {node.name for node in nodes} | set(used_names)

    def constant(self, name: str, value: Any, dtype: int, after: Sequence[str]) -> str:
        """Add a constant; `after` keeps it in the loop of version 1 that it is for."""
        node = self._node(name, "Const", after)
        array = np.asarray(value, tf.as_dtype(dtype).as_numpy_dtype)
        node.attr["dtype"].type = dtype
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))
        return self._output(node, "output")

    def dims(
        self,
        name: str,
        dims: Dims,
        source: SizeSource,
        dtype: int,
        after: Sequence[str],
    ) -> str:
        """Add a vector of dimensions, read at run time if any batch size is allowed."""
        factors = {d.factor for d in dims if isinstance(d, Grown)}
        if self._new is not None or not factors:
            sizes = [
                d.factor * (self._new or 0) if isinstance(d, Grown) else d for d in dims
            ]
            return self.constant(name, sizes, dtype, after)
        sizes_of = {
            f: self._size(f"{name}/batch", f, source, dtype, after) for f in factors
        }
        parts = [
            sizes_of[d.factor]
            if isinstance(d, Grown)
            else self.constant(f"{name}/dim_{i}", d, dtype, after)
            for i, d in enumerate(dims)
        ]
        return self.pack(name, parts, dtype)

    def size(self, name: str, source: SizeSource, after: Sequence[str]) -> str:
        """Add the batch size as a scalar, read at run time if any is allowed."""
        if self._new is not None:
            return self.constant(name, self._new, _INT, after)
        return self._size(name, 1, source, _INT, after)

    def enter(self, name: str, tensor: str, frame: str) -> str:
        """Add an Enter op that takes a number into a loop of version 1."""
        node = self._node(name, "Enter", [tensor])
        node.attr["T"].type = _INT
        node.attr["frame_name"].s = frame.encode()
        node.attr["is_constant"].b = True
        node.attr["parallel_iterations"].i = 10
        return self._output(node, "output")

    def pack(self, name: str, parts: Sequence[str], dtype: int) -> str:
        """Add a vector of scalars."""
        node = self._node(name, "Pack", parts)
        node.attr["N"].i = len(parts)
        node.attr["T"].type = dtype
        node.attr["axis"].i = 0
        return self._output(node, "output")

    def broadcast(self, name: str, tensor: str, shape: str, dtype: int) -> str:
        """Add an op that repeats a tensor to a shape."""
        node = self._node(name, "BroadcastTo", [tensor, shape])
        node.attr["T"].type = dtype
        node.attr["Tidx"].type = _INT
        return self._output(node, "output")

    def first(
        self, name: str, tensor: str, axis: int, rank: int, dtype: int, after: Any
    ) -> str:
        """Add an op that takes the first slice along an axis, and keeps the axis."""
        end = [1 if i == axis else 0 for i in range(rank)]
        masked = sum(1 << i for i in range(rank) if i != axis)
        return self._slice(name, tensor, ([0] * rank, end), masked, 0, dtype, after)

    def add(self, name: str, x: str, y: str, dtype: int) -> str:
        """Add a sum."""
        node = self._node(name, "AddV2", [x, y])
        node.attr["T"].type = dtype
        return self._output(node, "z")

    def _size(
        self,
        name: str,
        factor: int,
        source: SizeSource,
        dtype: int,
        after: Sequence[str],
    ) -> str:
        """Add a scalar: the batch size of a source, times a factor."""
        if source.axis is None:
            length = self._node(name, "TensorListLength", [source.tensor])
            return self._output(length, "length")
        shape = self._node(f"{name}/shape", "Shape", [source.tensor])
        shape.attr["out_type"].type = dtype
        shape.attr["T"].type = source.dtype
        at = ([source.axis], [source.axis + 1])
        size = self._slice(name, self._output(shape, "output"), at, 0, 1, dtype, after)
        if source.factor == factor:
            return size
        # The axis of the source is a multiple of the batch size itself.
        one = self._arithmetic(name, "FloorDiv", size, source.factor, dtype, after)
        return self._arithmetic(name, "Mul", one, factor, dtype, after)

    def _arithmetic(
        self, name: str, op: str, x: str, y: int, dtype: int, after: Sequence[str]
    ) -> str:
        number = self.constant(f"{name}/{op}/y", y, dtype, after)
        node = self._node(f"{name}/{op}", op, [x, number])
        node.attr["T"].type = dtype
        return self._output(node, "z")

    def _slice(
        self,
        name: str,
        tensor: str,
        span: tuple[list[int], list[int]],
        masked: int,
        shrink: int,
        dtype: int,
        after: Sequence[str],
    ) -> str:
        """Add a slice, with bit masks of the whole axes and of those to shrink."""
        begin, end = (
            self.constant(f"{name}/{part}", v, _INT, after)
            for part, v in zip(("begin", "end"), span, strict=True)
        )
        strides = self.constant(f"{name}/strides", [1] * len(span[0]), _INT, after)
        node = self._node(name, "StridedSlice", [tensor, begin, end, strides])
        node.attr["T"].type = dtype
        node.attr["Index"].type = _INT
        for mask in ("begin_mask", "end_mask"):
            node.attr[mask].i = masked
        node.attr["shrink_axis_mask"].i = shrink
        for mask in ("ellipsis_mask", "new_axis_mask"):
            node.attr[mask].i = 0
        return self._output(node, "output")

    def _node(self, name: str, op: str, inputs: Sequence[str]) -> Any:
        node = self._nodes.add()
        node.name = fresh_name(self._names, name)
        self._names.add(node.name)
        node.op = op
        node.input.extend(inputs)
        return node

    def _output(self, node: Any, output: str) -> str:
        name: str = node.name
        return f"{name}:{output}:0" if self._function else name
