"""A copy of a part of a FuncGraph, with other values in some places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import adjacency, creation, functions, gradient_functions
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure
from geutil.select.networks.layers import LED_IN

Array = np.ndarray[Any, Any]
Replace = Callable[[Operation], "Tensor | Array | None"]
"""Returns the replacement of an op: for each of its results another tensor of the
graph, for its first one a value, or, with None, the op itself."""
Amend = Callable[[Any, Operation], None]
"""Changes the node that an op is copied to, its name too."""


class PartialCopy:
    """A copy of a part of a graph."""

    # `inputs`: by name its inputs, or other tensors that will be given: each the only
    # result of its op.

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        replace: Replace,
        amend: Amend | None = None,
    ) -> None:
        self._source = graph
        self._given = dict(inputs)
        self._replace = replace
        self._amend = amend
        self.graph = functions.new_function_graph("copy")
        self.inputs: dict[str, Tensor] = {}  # the inputs of the copy by name
        self.externals: list[Any] = []  # what lies outside and is read by the copy

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies of tensors; to be called once."""
        mapped = self._copied_inputs()
        given = {t.op for t in self._given.values()}
        needed, stand_ins = _walk([t.op for t in tensors], self._replace, given)
        mapped.update(self._captured(needed))
        ops = [op for op in adjacency.topological_sort(needed) if op.name not in mapped]
        graph_def = creation.graph_def_of(self._source, ops)
        called, _ = functions.calls_of(ops)
        library, _ = functions.library_for_copies(self._source, called, ())
        graph_def.library.CopyFrom(library)
        for node, op in zip(graph_def.node, ops, strict=True):
            node.attr.pop("_class", None)
            # Nobody differentiates a copy, and a function of Python cannot be saved.
            node.attr.pop(gradient_functions.ATTRIBUTE, None)
            if op in stand_ins:
                _stand_in(node, op, stand_ins[op])
            if self._amend is not None:
                self._amend(node, op)
        _rename(graph_def, [op.name for op in ops])
        read = {name.partition(":")[0] for n in graph_def.node for name in n.input}
        input_map = {f"{name}:0": t for name, t in mapped.items() if name in read}
        imported_ops = creation.import_ops(self.graph, graph_def, input_map)
        # Names may have changed, where a placeholder took one.
        copies = dict(zip(ops, imported_ops, strict=True))
        return [
            mapped[t.op.name]
            if t.op.name in mapped
            else copies[t.op].outputs[t.value_index]
            for t in tensors
        ]

    def _copied_inputs(self) -> dict[str, Tensor]:
        with self.graph.as_default(), self.graph.name_scope(None):
            self.inputs = {
                name: tf.compat.v1.placeholder(t.dtype, t.shape, t.op.name)
                for name, t in self._given.items()
            }
        return {self._given[name].op.name: t for name, t in self.inputs.items()}

    def _captured(self, needed: set[Operation]) -> dict[str, Tensor]:
        captured = {}
        for external, inside in functions.bindings(self._source):
            if inside.op in needed:
                self.externals.append(external)
                captured[inside.op.name] = functions.make_capture_placeholder(
                    self.graph, inside.op.name, inside.dtype, inside.shape, external
                )
        return captured


def values_of(
    tensors: Sequence[Tensor], replace: Replace = lambda op: None
) -> list[Array]:
    """Return the values of tensors of a FuncGraph that need no inputs."""
    # In a branch or a loop of version 1 they are what they would be if it is taken.
    if not tensors:
        return []

    def outside(op: Operation) -> Tensor | Array | None:
        stand_in = replace(op)
        return _outside_of_flow(op) if stand_in is None else stand_in

    copy = PartialCopy(tensors[0].graph, {}, outside)
    copies = copy.of(tensors)
    with creation.neutral(copy.graph):
        results = {str(index): tf.identity(t) for index, t in enumerate(copies)}
    value_by_name = functions.call_function(
        functions.build_function(copy.graph, {}, results, [], []), {}
    )
    return [np.asarray(value_by_name[name].numpy()) for name in results]


def _outside_of_flow(op: Operation) -> Tensor | Array | None:
    """Return the stand-in of an op that leads into a branch or loop of version 1."""
    # Constants in there wait for the op that tells whether it is taken.
    if op.type in LED_IN:
        return op.inputs[0]
    switch = op.inputs[0].op if op.type == "Identity" else op
    if switch.type != "Switch":
        return None
    data, chooses = switch.inputs
    if data is chooses or chooses.op.type == "LoopCond":
        return np.zeros((), op.outputs[0].dtype.as_numpy_dtype)
    return None


def _rename(graph_def: Any, names: Sequence[str]) -> None:
    """Let nodes read those that have other names now."""
    pairs = zip(names, graph_def.node, strict=True)
    renamed = {name: node.name for name, node in pairs if node.name != name}
    for node in graph_def.node if renamed else ():
        for index, read in enumerate(node.input):
            mark = "^" if read.startswith("^") else ""
            name, *rest = read.removeprefix(mark).split(":")
            if name in renamed:
                node.input[index] = mark + ":".join([renamed[name], *rest])


def _walk(
    ops: Sequence[Operation], replace: Replace, given: AbstractSet[Operation]
) -> tuple[set[Operation], dict[Operation, Tensor | Array]]:
    """Return the ancestors of `ops`, with replaced ops mapped to their replacements."""
    # These depend on their stand-ins alone, and given ones on nothing.
    stand_ins: dict[Operation, Tensor | Array] = {}

    def before(op: Operation) -> list[Operation]:
        if op in given:
            return []
        stand_in = replace(op)
        if stand_in is None:
            return [*(t.op for t in op.inputs), *op.control_inputs]
        stand_ins[op] = stand_in
        return [] if isinstance(stand_in, np.ndarray) else [stand_in.op]

    return {*closure(ops, before)}, stand_ins


def _stand_in(node: Any, op: Operation, stand_in: Tensor | Array) -> None:
    """Make the node of an op one that yields its stand-in."""
    dtype = op.outputs[0].dtype
    del node.input[:]
    node.attr.clear()
    if isinstance(stand_in, np.ndarray):
        node.op = "Const"
        node.attr["dtype"].type = dtype.as_datatype_enum
        proto = tf.make_tensor_proto(stand_in, dtype, stand_in.shape)
        node.attr["value"].tensor.CopyFrom(proto)
    else:
        # Of a Switch either result may be read.
        count = len(op.outputs)
        node.op = "IdentityN"
        node.input.extend([stand_in.name] * count)
        node.attr["T"].list.type.extend([dtype.as_datatype_enum] * count)
