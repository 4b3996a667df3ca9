"""Runs a network as if it were not quantized, and measures what it quantizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import (
    bindings,
    build_function,
    call_function,
    make_capture_placeholder,
    new_function_graph,
)
from geutil.graph.importing import graph_def_of, import_ops, neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.order import topological_sort
from geutil.quantize.finding.kernels import FAKE_QUANT

Array = np.ndarray[Any, Any]
Measure = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]

_CHOICES = frozenset(("Select", "SelectV2"))


class Probe:
    """A function that measures tensors of a network that is not quantized.

    Args:
        graph: the FuncGraph of the network.
        inputs: its inputs by name.
        groups: for each name the tensors to measure together.
        measure: makes tensors that say something of others.

    Cost: one copy of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        groups: Mapping[str, Sequence[Tensor]],
        measure: Measure,
    ) -> None:
        copies = _Copy(graph, inputs)
        tensors = copies.of([t for group in groups.values() for t in group])
        given = iter(tensors)
        results: dict[str, Tensor] = {}
        with neutral(copies.graph):
            for name, group in groups.items():
                measured = measure([next(given) for _ in group])
                for key, tensor in measured.items():
                    results[f"{name}\n{key}"] = tf.identity(tensor)
        self._function = build_function(copies.graph, copies.inputs, results, [], [])

    def run(self, sample: Mapping[str, Any]) -> dict[str, dict[str, Array]]:
        """Return for each group what was measured on a sample."""
        found: dict[str, dict[str, Array]] = {}
        for name, value in call_function(self._function, sample).items():
            group, _, key = name.partition("\n")
            found.setdefault(group, {})[key] = value.numpy()
        return found


class _Copy:
    """A copy of what some tensors need, without FakeQuant."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Tensor]) -> None:
        self._source = graph
        self._given = dict(inputs)
        self.graph = new_function_graph("probe")
        self.inputs: dict[str, Tensor] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies of tensors."""
        source, copy = self._source, self.graph
        mapped: dict[str, Tensor] = {}
        with copy.as_default(), copy.name_scope(None):
            for name, t in self._given.items():
                made = tf.compat.v1.placeholder(t.dtype, t.shape, t.op.name)
                self.inputs[name] = mapped[t.op.name] = made
        needed = set(_walk([t.op for t in tensors]))
        for external, inside in bindings(source):
            if inside.op in needed:
                mapped[inside.op.name] = make_capture_placeholder(
                    copy, inside.op.name, inside.dtype, inside.shape, external
                )
        ops = [op for op in topological_sort(needed) if op.name not in mapped]
        graph_def = graph_def_of(source, ops)
        graph_def.library.CopyFrom(source.as_graph_def().library)
        for node, op in zip(graph_def.node, ops, strict=True):
            _pass_through(node, op)
            node.attr.pop("_class", None)
        given = {f"{name}:0": t for name, t in mapped.items()}
        made = import_ops(copy, graph_def, given)
        # Names may have changed, where a placeholder took one.
        copies = dict(zip(ops, made, strict=True))
        return [
            mapped[t.op.name] if t.op.name in mapped else _copied(t, copies)
            for t in tensors
        ]


def _copied(tensor: Tensor, copies: Mapping[Operation, Operation]) -> Tensor:
    return copies[tensor.op].outputs[tensor.value_index]


def _walk(ops: Sequence[Operation]) -> list[Operation]:
    """Return what ops depend on, FakeQuant ops by what they quantize alone."""
    found = dict.fromkeys(ops)
    waiting = list(found)
    for op in waiting:
        passed = _passed(op)
        before = [t.op for t in (op.inputs if passed is None else [op.inputs[passed]])]
        if passed is None:
            before += op.control_inputs
        for producer in before:
            if producer not in found:
                found[producer] = None
                waiting.append(producer)
    return list(found)


def _passed(op: Operation) -> int | None:
    """Return which input an op is replaced with: of what simulates, the tensor."""
    if op.type in FAKE_QUANT:
        return 0
    if op.type in _CHOICES and op.inputs[1].op.type in FAKE_QUANT:
        return 2
    return None


def _pass_through(node: Any, op: Operation) -> None:
    index = _passed(op)
    if index is None:
        return
    kept = node.input[index]
    del node.input[:]
    node.input.append(kept)
    node.op = "Identity"
    node.attr.clear()
    node.attr["T"].type = op.inputs[index].dtype.as_datatype_enum
