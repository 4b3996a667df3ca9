"""New nodes in a graph or in a function, where names are written differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.model.batching.edits import Dims, Grown
from geutil.model.batching.sizes import Source
from geutil.model.programs.program import fresh_name

_INT = tf.int32.as_datatype_enum


class Writer:
    """Adds nodes to a graph or a function body.

    Args:
        nodes: the repeated field of nodes.
        function: whether it is that of a function.
        new: the new batch size, None if any.
        taken: names that are in use besides the nodes'.
    """

    def __init__(
        self, nodes: Any, *, function: bool, new: int | None, taken: Sequence[str] = ()
    ) -> None:
        self._nodes = nodes
        self._function = function
        self._new = new
        self._names = {node.name for node in nodes} | set(taken)

    def constant(self, name: str, value: Any, dtype: int, after: Sequence[str]) -> str:
        """Add a constant; `after` keeps it in the loop of version 1 that it is for."""
        node = self._node(name, "Const", after)
        array = np.asarray(value, tf.as_dtype(dtype).as_numpy_dtype)
        node.attr["dtype"].type = dtype
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))
        return self._output(node, "output")

    def dims(
        self, name: str, dims: Dims, source: Source, dtype: int, after: Sequence[str]
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

    def pack(self, name: str, parts: Sequence[str], dtype: int) -> str:
        """Add a vector of scalars."""
        node = self._node(name, "Pack", parts)
        node.attr["N"].i = len(parts)
        node.attr["T"].type = dtype
        node.attr["axis"].i = 0
        return self._output(node, "output")

    def broadcast(self, name: str, tensor: str, shape: str, dtype: int) -> str:
        """Add what repeats a tensor to a shape."""
        node = self._node(name, "BroadcastTo", [tensor, shape])
        node.attr["T"].type = dtype
        node.attr["Tidx"].type = _INT
        return self._output(node, "output")

    def first(
        self, name: str, tensor: str, axis: int, rank: int, dtype: int, after: Any
    ) -> str:
        """Add what takes the first slice along an axis, and keeps the axis."""
        end = [1 if i == axis else 0 for i in range(rank)]
        masked = sum(1 << i for i in range(rank) if i != axis)
        return self._slice(name, tensor, ([0] * rank, end), masked, 0, dtype, after)

    def add(self, name: str, x: str, y: str, dtype: int) -> str:
        """Add a sum."""
        node = self._node(name, "AddV2", [x, y])
        node.attr["T"].type = dtype
        return self._output(node, "z")

    def _size(
        self, name: str, factor: int, source: Source, dtype: int, after: Sequence[str]
    ) -> str:
        shape = self._node(f"{name}/shape", "Shape", [source.tensor])
        shape.attr["out_type"].type = dtype
        shape.attr["T"].type = source.dtype
        at = ([source.axis], [source.axis + 1])
        size = self._slice(name, self._output(shape, "output"), at, 0, 1, dtype, after)
        if source.factor == factor:
            return size
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
