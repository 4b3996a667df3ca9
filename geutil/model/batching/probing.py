"""Ops in a graph of their own, where the batch has the size that stands for all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.importing import make_op, new_graph
from geutil.graph.kinds import Tensor
from geutil.model.batching.scopes import constant_value
from geutil.model.batching.sizes import Sizes, shape_of

_LARGE = 4096
REFUSALS = (ValueError, TypeError, tf.errors.OpError)
"""What TensorFlow raises for a node that its shape inference refuses."""
_EQUAL_ROWS = frozenset(("Tile", "BroadcastTo"))
_LOOP_EDGES = frozenset(("Enter", "Exit", "NextIteration"))
_COPIES = frozenset(("Identity", "Enter", "StopGradient", "Snapshot", "Cast"))


class Probing:
    """The graph in which shapes are inferred; nothing of it is ever run.

    Args:
        sizes: the batch sizes.
        library: the functions by name.
    """

    def __init__(self, sizes: Sizes, library: Mapping[str, Any]) -> None:
        self.sizes = sizes
        self.library = library
        self._graph = new_graph()
        self._numbers = itertools.count()
        self._large: dict[str, Any] = {}
        self._growing: set[str] = set()

    def make(self, node: Any, operands: Sequence[Tensor]) -> list[Tensor]:
        """Make an op like `node`; what it reads says whether it depends on the inputs.

        Raises:
            Exception: one of `REFUSALS`: its shape inference refuses.
        """
        if node.op == "Const":
            dims = [d.size for d in node.attr["value"].tensor.tensor_shape.dim]
            if prod(dims) > _LARGE:
                stand_in = self.placeholder(node.attr["dtype"].type, dims)
                self._large[stand_in.name] = node
                return [stand_in]
        op, kept = node.op, frozenset(node.attr)
        if op in _LOOP_EDGES:
            # Shape inference forgets the shape there.
            op, kept = "Identity", frozenset("T")
        copy = tf.compat.v1.NodeDef(name=f"n{next(self._numbers)}", op=op)
        for name, value in node.attr.items():
            # A rule that looks for an attribute leaves an empty one behind.
            given = value.WhichOneof("value") is not None
            if given and name in kept and not name.startswith("_"):
                copy.attr[name].CopyFrom(value)
        outputs = list(make_op(self._graph, copy, operands).outputs)
        if any(self.grows(t) for t in operands):
            self.mark(outputs)
        return outputs

    def placeholder(self, dtype: Any, shape: Any, *, like: Any = ()) -> Tensor:
        """Make a placeholder; it depends on the inputs if one of `like` does."""
        with self._graph.as_default():
            made = tf.compat.v1.placeholder(tf.as_dtype(dtype), shape)
        if any(self.grows(t) for t in like):
            self.mark([made])
        return made

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
        """Tell whether a tensor depends on the inputs."""
        return tensor.name in self._growing

    def axis(self, tensor: Tensor) -> int | None:
        """Return the axis of the batch, None if there is none."""
        if not self.grows(tensor):
            return None
        return self.sizes.axis(shape_of(tensor))

    def value(self, tensor: Tensor) -> np.ndarray[Any, Any] | None:
        """Return the value of a tensor that constants alone make, if it is known."""
        node = self._large.get(tensor.name)
        if node is not None:
            value: np.ndarray[Any, Any] = constant_value(node)
            return value
        return tf.get_static_value(tensor)

    def dims(self, tensor: Tensor) -> list[int | None] | None:
        """Return what is known of the elements of a vector.

        A -1 that is put into it counts as known.
        """
        value = tf.get_static_value(tensor)
        if value is not None and np.ndim(value) == 1:
            return [int(v) for v in value]
        if tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.rank != 1:
            return None
        found: list[int | None] = []
        for part in _joined(tensor):
            known = self._dims_of_part(part)
            if known is None:
                return None
            found += known
        return found

    def _dims_of_part(self, tensor: Tensor) -> list[int | None] | None:
        # TensorFlow evaluates more of it where it is a shape, but a -1 means there that
        # nothing is known.
        with self._graph.as_default():
            anything = tf.compat.v1.placeholder(tf.int32)
            shape = shape_of(tf.raw_ops.Reshape(tensor=anything, shape=tensor))
        packed = tf.get_static_value(tensor, partial=True)
        if shape is None or packed is None:
            return None if shape is None else list(shape)
        pairs = zip(packed, shape, strict=True)
        return [d if v is None else int(v) for v, d in pairs]

    def rows_are_equal(self, tensor: Tensor, axis: int) -> bool:
        """Tell whether it is certain that all slices along an axis are equal."""
        while True:
            dims = shape_of(tensor)
            if dims is None or dims[axis] == 1:
                return dims is not None
            value = self.value(tensor)
            if value is not None:
                return bool(np.all(value == np.take(value, [0], axis)))
            if tensor.op.type in _EQUAL_ROWS:
                inner = shape_of(tensor.op.inputs[0])
                at = axis - len(dims) + len(inner or ())
                return inner is not None and (at < 0 or inner[at] == 1)
            if tensor.op.type not in _COPIES:
                return False
            tensor = tensor.op.inputs[0]


def _joined(tensor: Tensor) -> list[Tensor]:
    """Return the vectors that a vector is a concatenation of."""
    found, waiting = [], [tensor]
    while waiting:
        part = waiting.pop()
        if part.op.type == "ConcatV2":
            waiting += reversed(part.op.inputs[:-1])
        elif part.op.type == "Identity":
            waiting += part.op.inputs
        else:
            found.append(part)
    return found
