"""The sizes of the tensors of a step, with what the caller knows of their shapes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.errors import PredictionError
from geutil.graph.kinds import Graph, Tensor
from geutil.memory.sizes import bytes_of_shape, dims_of


class Shapes:
    def __init__(self, graph: Graph, shapes: Any) -> None:
        self._graph = graph
        self._given = {}
        for key, shape in dict(shapes or {}).items():
            name = key if isinstance(key, str) else key.name
            self._given[name if ":" in name else name + ":0"] = tf.TensorShape(shape)
        self._unknown: list[str] = []

    def applied(self, graph_def: Any) -> Any:
        for node in graph_def.node:
            node.attr.pop("_class", None)
            if node.op == "PlaceholderWithDefault":
                node.op = "Identity"
                node.attr["T"].CopyFrom(node.attr["dtype"])
                del node.attr["dtype"], node.attr["shape"]
            if node.op == "Placeholder" and node.name + ":0" in self._given:
                node.attr["shape"].shape.CopyFrom(
                    self._given[node.name + ":0"].as_proto()
                )
        return graph_def

    def bytes_of(self, tensor: Tensor) -> int:
        size = bytes_of_shape(tensor.dtype, dims_of(tensor))
        if size is None and tensor.name in self._given:
            size = bytes_of_shape(tensor.dtype, self._given[tensor.name].as_list())
        if size is None:
            try:
                before = self._graph.get_tensor_by_name(tensor.name)
                size = bytes_of_shape(before.dtype, dims_of(before))
            except (KeyError, ValueError):
                pass
        if size is None:
            self._unknown.append(tensor.name)
            return 0
        return size

    def check(self) -> None:
        if self._unknown:
            raise PredictionError(f"unknown dims: {self._unknown[:10]}")
