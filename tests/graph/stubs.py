"""Ops that TensorFlow would not let a test make, for `verify` to judge.

They have what an op has that the checks read, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tensorflow as tf


class StubGraph:
    """A graph that knows its ops and functions."""

    def __init__(self, functions: tuple[str, ...] = ()) -> None:
        self.ops: list[StubOp] = []
        self.functions = functions

    def get_operations(self) -> list[StubOp]:
        return list(self.ops)

    def _is_function(self, name: str) -> bool:
        return name in self.functions


@dataclass(eq=False)
class StubTensor:
    op: StubOp
    readers: list[StubOp] = field(default_factory=list)
    dtype: Any = tf.float32

    @property
    def name(self) -> str:
        return f"{self.op.name}:0"

    @property
    def graph(self) -> StubGraph:
        return self.op.graph

    def consumers(self) -> list[StubOp]:
        return self.readers


class StubOp:
    """An op of one float output that reads `inputs` and waits for `control_inputs`."""

    type = "Stub"

    def __init__(self, graph, name, inputs=(), control_inputs=()) -> None:
        self.graph, self.name = graph, name
        self._id = len(graph.ops)
        graph.ops.append(self)
        self.outputs = [StubTensor(self)]
        self.inputs = list(inputs)
        self.control_inputs = list(control_inputs)
        self._control_outputs: list[StubOp] = []
        self._input_types = [tensor.dtype for tensor in inputs]
        self.node_def = SimpleNamespace(attr={})
        for tensor in inputs:
            tensor.readers.append(self)
        for op in control_inputs:
            op._control_outputs.append(self)

    def get_attr(self, name: str) -> Any:
        raise ValueError(name)

    def _get_control_flow_context(self) -> None:
        return None
