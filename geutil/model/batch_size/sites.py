"""A site: one op on the walk, as the rules see it, and run in a graph of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.creation import make_op, new_graph
from geutil.graph.types import Tensor
from geutil.graph.walks import tree
from geutil.model.batch_size import batch_edits
from geutil.model.batch_size.batch_edits import (
    BatchPlan,
    Broadcast,
    Dims,
    Edit,
    Grown,
    ScopeNode,
    Shape,
    Sizes,
    SizeSource,
)

_LARGE = 4096
"""Elements of a constant beyond which a placeholder replaces it: it is no shape."""
REFUSALS = (ValueError, TypeError, tf.errors.OpError)
"""Errors that TensorFlow raises for a node that its shape inference refuses."""
_EQUAL_ROWS = frozenset(("Tile", "BroadcastTo"))
_LOOP_EDGES = frozenset(("Enter", "Exit", "NextIteration"))
_COPIES = ("Identity", "Enter", "StopGradient", "Snapshot", "Cast")
_ELEMENTWISE = frozenset(
    (*_COPIES, "Add", "AddV2", "Maximum", "Minimum", "Mul", "RealDiv", "Sub")
)


class Probing:
    """The graph in which shapes are inferred; nothing of it is ever run."""

    def __init__(self, sizes: Sizes, library: Mapping[str, Any]) -> None:
        self.sizes = sizes
        self.library = library
        self._graph = new_graph()
        self._numbers = itertools.count()
        self._large: dict[str, Any] = {}
        self._growing: set[str] = set()
        self._lists_of_rows: set[str] = set()
        # The ops that take rows of the batch in a loop over all of them, and those that
        # take all elements of an array of rows.
        self.row_reads: set[str] = set()

    def make(self, node: Any, operands: Sequence[Tensor]) -> list[Tensor]:
        """Make an op like `node`; its inputs tell whether it depends on the model's."""
        if node.op == "Const":
            dims = [d.size for d in node.attr["value"].tensor.tensor_shape.dim]
            if prod(dims) > _LARGE:
                stand_in = self.placeholder(node.attr["dtype"].type, dims)
                self._large[stand_in.name] = node
                return [stand_in]
        op, attribute_names = node.op, frozenset(node.attr)
        if op in _LOOP_EDGES:
            # Shape inference forgets the shape there.
            op, attribute_names = "Identity", frozenset("T")
        copy = tf.compat.v1.NodeDef(name=f"n{next(self._numbers)}", op=op)
        for name, value in node.attr.items():
            # A rule that looks for an attribute leaves an empty one behind.
            is_set = value.WhichOneof("value") is not None
            if is_set and name in attribute_names and not name.startswith("_"):
                copy.attr[name].CopyFrom(value)
        outputs = list(make_op(self._graph, copy, operands).outputs)
        if any(self.grows(t) for t in operands):
            self.mark(outputs)
        return outputs

    def placeholder(self, dtype: Any, shape: Any, *, like: Any = ()) -> Tensor:
        """Make a placeholder; it depends on the inputs if one of `like` does."""
        with self._graph.as_default():
            placeholder = tf.compat.v1.placeholder(tf.as_dtype(dtype), shape)
        if any(self.grows(t) for t in like):
            self.mark([placeholder])
        return placeholder

    def variable(self, dtype: Any, shape: Any) -> Tensor:
        """Make the handle of a variable."""
        with self._graph.as_default():
            return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape)

    def constant(self, value: Any, dtype: Any) -> Tensor:
        """Make a constant."""
        with self._graph.as_default():
            return tf.constant(value, dtype)

    def mark(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors depend on the inputs."""
        self._growing.update(t.name for t in tensors)

    def grows(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the inputs."""
        return tensor.name in self._growing

    def mark_list_of_rows(self, handle: Tensor) -> None:
        """Note that a list has an element for each row of the batch."""
        self._lists_of_rows.add(handle.name)

    def is_list_of_rows(self, handle: Tensor) -> bool:
        """Return whether a list has an element for each row of the batch."""
        return handle.name in self._lists_of_rows

    def axis(self, tensor: Tensor) -> int | None:
        """Return the axis of the batch, None if there is none."""
        if not self.grows(tensor):
            return None
        return self.sizes.axis(batch_edits.shape_of(tensor))

    def value(self, tensor: Tensor) -> np.ndarray[Any, Any] | None:
        """Return the value of a tensor that constants alone make, if it is known."""
        node = self._large.get(tensor.name)
        if node is not None:
            value: np.ndarray[Any, Any] = batch_edits.constant_value(node)
            return value
        return tf.get_static_value(tensor)

    def dims(self, tensor: Tensor) -> list[int | None] | None:
        """Return the known elements of a vector, a -1 in it among them."""
        value = tf.get_static_value(tensor)
        if value is not None and np.ndim(value) == 1:
            return [int(v) for v in value]
        if tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.rank != 1:
            return None
        dims: list[int | None] = []
        for part in _joined(tensor):
            part_dims = self._dims_of_part(part)
            if part_dims is None:
                return None
            dims += part_dims
        return dims

    def _dims_of_part(self, tensor: Tensor) -> list[int | None] | None:
        # TensorFlow evaluates more of it where it is a shape, but a -1 means there that
        # nothing is known.
        with self._graph.as_default():
            anything = tf.compat.v1.placeholder(tf.int32)
            shape = batch_edits.shape_of(
                tf.raw_ops.Reshape(tensor=anything, shape=tensor)
            )
        packed = tf.get_static_value(tensor, partial=True)
        if shape is None or packed is None:
            return None if shape is None else list(shape)
        pairs = zip(packed, shape, strict=True)
        return [d if v is None else int(v) for v, d in pairs]

    def rows_are_equal(self, tensor: Tensor, axis: int) -> bool:
        """Return whether it is certain that all slices along an axis are equal."""
        waiting = [(tensor, axis)]
        for tensor, axis in waiting:
            dims = batch_edits.shape_of(tensor)
            if dims is None:
                return False
            # A tensor of fewer axes, or of one row, is repeated where others have rows.
            if axis < 0 or dims[axis] == 1:
                continue
            value = self.value(tensor)
            if value is not None:
                if not np.all(value == np.take(value, [0], axis)):
                    return False
                continue
            kind, inputs = tensor.op.type, tensor.op.inputs
            if kind in _ELEMENTWISE:
                waiting += [(t, axis - len(dims) + (t.shape.rank or 0)) for t in inputs]
            elif kind in _EQUAL_ROWS:
                inner = batch_edits.shape_of(inputs[0])
                at = axis - len(dims) + len(inner or ())
                if inner is None or (at >= 0 and inner[at] != 1):
                    return False
            else:
                return False
        return True


def _joined(tensor: Tensor) -> list[Tensor]:
    """Return the vectors that a vector is a concatenation of."""

    def parts(part: Tensor) -> Sequence[Tensor]:
        is_join = part.op.type == "ConcatV2"
        return part.op.inputs[:-1] if is_join else part.op.inputs[:1]

    passed = ("ConcatV2", "Identity")
    joined = tree([tensor], lambda t: parts(t) if t.op.type in passed else ())
    return [t for t in joined if t.op.type not in passed]


# Elements up to which a message prints a constant.
_SHOWN = 16


class Site:
    """One op, its inputs, and the changes to make."""

    def __init__(
        self,
        entry: ScopeNode,
        operands: list[Tensor],
        probing: Probing,
        plan: BatchPlan,
        fallback: SizeSource | None,
        producers: Sequence[ScopeNode | None] = (),
        readers: Sequence[tuple[str, int]] = (),
    ) -> None:
        # A copy, since the definition in the program stays while rules are tried.
        # A copy of its definition, which rules may change; the op is tried as it stands
        # there.
        self.node = type(entry.node)()
        self.node.CopyFrom(entry.node)
        self.written = entry.written  # Its inputs as the graph or function writes them.
        # Its inputs, in the probing graph; rules may replace them.
        self.operands = operands
        self.probing = probing
        # Where the batch can be read if none of the operands shows it.
        self.fallback = fallback
        # The ops that make its inputs, None for an argument.
        self.producers = producers
        self.readers = readers  # (type, index) of each input that reads its results.
        self.plan = plan
        # The operands that differ from `written` now.
        self.replaced: frozenset[int] = frozenset()

    def inside(self, source: SizeSource) -> Site:
        """Return the site as a function that it calls sees it: its batch is there."""
        entry = ScopeNode(self.node, (), ())
        return Site(entry, [], self.probing, self.plan, source)

    def attempt(self) -> Site:
        """Return the site as it is, with changes of its own that can be given up."""
        entry = ScopeNode(self.node, (), self.written)
        site = Site(
            entry,
            list(self.operands),
            self.probing,
            BatchPlan(),
            self.fallback,
        )
        site.producers, site.readers = self.producers, self.readers
        site.replaced = self.replaced
        return site

    def adopt(self, attempt: Site) -> None:
        """Take the changes of an attempt over."""
        self.node, self.operands = attempt.node, attempt.operands
        self.replaced = attempt.replaced
        self.plan.edits += attempt.plan.edits
        self.plan.problems += attempt.plan.problems

    @property
    def sizes(self) -> Sizes:
        """The batch sizes."""
        return self.probing.sizes

    def shape(self, index: int) -> Shape:
        """Return the shape of an operand."""
        return batch_edits.shape_of(self.operands[index])

    def axis(self, index: int) -> int | None:
        """Return the axis of the batch of an operand."""
        return self.probing.axis(self.operands[index])

    def source(self, index: int | None = None) -> SizeSource | None:
        """Return where the size of the batch can be read, at an operand if it shows."""
        for i in range(len(self.operands)) if index is None else [index]:
            axis = self.axis(i)
            # Under the name of an operand that is replaced, the old one is read.
            if axis is not None and i not in self.replaced:
                return source_at(self.probing, self.operands[i], self.written[i], axis)
        return self.fallback

    def edit(self, edit: Edit) -> None:
        """Plan a change."""
        self.plan.edits.append(edit)

    def problem(self, reason: str, remedy: str) -> None:
        """Note a problem that cannot be mended."""
        self.plan.problems.append(
            batch_edits.BatchObstacle(
                self.node.name, self.node.op, reason, remedy, self._constants()
            )
        )

    def set_constant(self, index: int, value: Sequence[int], probed: Any) -> None:
        """Give the op a constant of its own; `probed` is its value with the probe."""
        dtype = self.operands[index].dtype
        array = np.array(value, dtype.as_numpy_dtype)
        self.edit(batch_edits.SetConstant(self.node.name, index, array))
        self.operands[index] = self.probing.constant(probed, dtype)

    def set_dims(self, index: int, dims: Dims, data: int) -> None:
        """Give the op a vector of dimensions, of which some grow with the batch."""
        source = self.source(data)
        if source is None:
            self.problem(*NO_SOURCE)
            return
        dtype = self.operands[index].dtype
        enum = dtype.as_datatype_enum
        self.edit(batch_edits.SetDims(self.node.name, index, dims, source, enum))
        self.operands[index] = self.probing.constant(self.probed(dims), dtype)

    def set_attribute(self, name: str, value: Any) -> None:
        """Give an attribute a new value."""
        self.edit(batch_edits.SetAttribute(self.node.name, name, value))
        self.node.attr[name].CopyFrom(value)

    def probed(self, dims: Dims) -> list[int]:
        """Return dimensions with the size that corresponds to the batch."""
        return [
            d.factor * self.sizes.probe if isinstance(d, Grown) else d for d in dims
        ]

    def symbolic(self, shape: Sequence[int]) -> Dims:
        """Return a shape of the probing graph with the batch as such."""
        return tuple(
            Grown(self.sizes.factor(d)) if self.sizes.factor(d) else d for d in shape
        )

    def broadcast(self, index: int, axis: int, factor: int) -> bool:
        """Repeat an operand that is the same for every row, if it is certain to be."""
        broadcast = broadcast_for_batch(self, self.operands[index], index, axis, factor)
        if broadcast is None:
            return False
        edit, self.operands[index] = broadcast
        self.replaced |= {index}
        self.edit(edit)
        return True

    def _constants(self) -> tuple[str, ...]:
        shown = []
        for index, (name, t) in enumerate(
            zip(self.written, self.operands, strict=False)
        ):
            value = None if self.probing.grows(t) else self.probing.value(t)
            if value is not None and np.size(value) <= _SHOWN:
                listed = np.asarray(value).tolist()
                shown.append(f"input {index} '{name.partition(':')[0]}' = {listed}")
        return tuple(shown)


NO_SOURCE = (
    "nothing here tells how large the batch is",
    "set a fixed batch size instead of None",
)


def source_at(probing: Probing, tensor: Tensor, written: str, axis: int) -> SizeSource:
    """Return a tensor as a source of the batch size."""
    factor = probing.sizes.factor((batch_edits.shape_of(tensor) or ())[axis])
    return SizeSource(written, axis, factor, tensor.dtype.as_datatype_enum)


def broadcast_for_batch(
    site: Site,
    tensor: Tensor,
    index: int,
    axis: int,
    factor: int,
    *,
    result: bool = False,
) -> tuple[Broadcast, Tensor] | None:
    """Return the change that repeats a tensor for the batch, and its result."""
    # With `result`, the tensor is result `index` of a function that the site calls.
    shape = batch_edits.shape_of(tensor)
    if shape is None or None in shape:
        site.problem(
            f"input {index} would have to be repeated for each row, and its shape "
            f"{tensor.shape} is not known",
            "make it depend on the input's shape",
        )
        return None
    if not site.probing.rows_are_equal(tensor, axis):
        site.problem(
            f"input {index} of shape {tensor.shape} has rows of its own for a batch of "
            f"{site.sizes.old}",
            "they cannot be continued; make it depend on the input",
        )
        return None
    source = site.source()
    if source is None:
        site.problem(*NO_SOURCE)
        return None
    static_dims = [d for d in shape if d is not None]
    dims: Dims = (
        *static_dims[:axis],
        Grown(factor),
        *static_dims[axis + 1 :],
    )
    edit = Broadcast(
        None if result else site.node.name,
        index,
        axis,
        static_dims[axis],
        dims,
        source,
        tensor.dtype.as_datatype_enum,
    )
    grown = site.probing.placeholder(tensor.dtype, site.probed(dims))
    site.probing.mark([grown])
    return edit, grown


def attribute_of_shape(shape: Shape) -> Any:
    """Return an attribute that holds a shape."""
    return tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
