"""Unrolling: loops replaced by copies of their bodies, one for each time they run.

A loop becomes a chain of calls of its body, which are inlined. Its counters are
constants then, and each element of a list that it reads or writes is a tensor of its
own: an op that takes an element out reads that tensor, and one that stacks the list
packs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import function_calls, op_types
from geutil.graph.function_calls import Caller, Loops
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import control_references, data_inputs
from geutil.model.core import EditableModel, M
from geutil.model.programs import (
    ModelProgram,
    fresh_name,
    nodes_by_name,
    redirect,
    rename_nodes,
)
from geutil.model.to_graph import GraphParts, keep_of, materialize, program_of_parts
from geutil.rewrite import Match, Op, Rule, rewrite
from geutil.rewrite.rules import constant_folding
from geutil.select.queries import select_ops

_CALLS = {"While": "StatefulPartitionedCall", "StatelessWhile": "PartitionedCall"}
_SCALAR = 8
"""Bytes of the largest values that are folded: counters are scalars."""
# Names that a message lists; the rest is counted.
_SHOWN = 10


def unroll(model: M, loops: Any, max_ops: int) -> M:
    """Return a model without its loops; see `Model.unroll`."""
    program = model.program()
    wanted = _selected(model, loops)
    unrolled: list[str] = []
    left = max_ops - len(model.graph.get_operations())
    parts = materialize(program, inline=False, what=repr(model))
    _fold_scalars(parts)
    while True:
        found = [c for c in _loops_in(parts.graph) if wanted is None or _in(c, wanted)]
        if not found:
            return model.derived(_with_short_names(parts, unrolled))
        times = {}
        for caller in found:
            count, size = _count(caller)
            if count is None:
                continue
            left -= count * size
            times[caller.op.name] = count
        if left < 0:
            raise ModelError(
                f"unrolled, the loops of {model!r} have over {max_ops:,} ops",
                remedy=f"pass {Words('max_ops=')} to allow more, or {Words('loops=')} "
                "to unroll some of them",
            )
        if not times:
            # A loop whose bound the result of another one tells had its turn before.
            raise ModelError(_refusal(model, found))
        program = program_of_parts(parts)
        _write_calls(program, times)
        unrolled.extend(times)
        parts = materialize(program, inline=True, what=repr(model))
        _fold_scalars(parts)
        rewrite(parts.graph, _list_rules(), keep=keep_of(parts))


def _selected(model: EditableModel, loops: Any) -> frozenset[str] | None:
    """Return the names of the loops that are selected; None for all."""
    callers = _loops_in(model.graph)
    if not callers:
        raise ModelError(f"{model!r} has no loop to unroll{_elsewhere(model.graph)}")
    if loops is None:
        return None
    meant = frozenset(select_ops(loops, graph=model.graph))
    names = frozenset(c.op.name for c in callers if c.op in meant)
    if not names:
        raise ModelError(
            f"selects none of the loops of {model!r}: "
            f"{[c.op.name for c in callers][:_SHOWN]}",
            subject=Words(f"loops={loops!r}"),
        )
    return names


def _elsewhere(graph: Graph) -> str:
    """Return where the loops of a graph may be that has none of version 2."""
    if any(op.type in op_types.ENTERS for op in graph.get_operations()):
        return (
            ": its loops are of version 1; build them after "
            "tf.compat.v1.enable_control_flow_v2()"
        )
    names = [caller.op.name for caller in function_calls.callers_in(graph)]
    if names:
        return (
            f"; functions that {names[:_SHOWN]} run are not looked into: open it with "
            "their calls inlined"
        )
    return ""


def _in(caller: Caller, names: Iterable[str]) -> bool:
    """Tell whether a loop is one of those named, or was in the body of one."""
    name = caller.op.name
    return any(name == n or name.startswith(f"{n}/") for n in names)


def _loops_in(graph: Graph) -> list[Caller]:
    return [c for c in function_calls.callers_in(graph) if c.is_loop]


def _count(caller: Caller) -> tuple[int | None, int]:
    """Return how often a loop runs, None if that is not known, and its body's ops."""
    op = caller.op
    graphs = [
        function_calls.body_for_call(op.graph, callee.name, list(op.inputs))
        for callee in sorted(caller.callees, key=lambda c: c.attribute != "cond")
    ]
    condition, body = graphs
    if condition is None or body is None:
        return None, 0
    count = Loops({op: (condition, body)}).exact_times(op)
    return count, len(body.get_operations())


def _refusal(model: EditableModel, found: list[Caller]) -> str:
    names = ", ".join(f"'{caller.op.name}'" for caller in found[:_SHOWN])
    return (
        f"how often {names} of {model!r} runs cannot be read off constants and shapes: "
        "give the input a fixed number of steps where the model is built, as in "
        "keras.Input([12, 6]) or tf.TensorSpec([None, 12, 6]), or pass "
        f"{Words('loops=')} with those that are to be unrolled"
    )


def _write_calls(program: ModelProgram, times: Mapping[str, int]) -> None:
    """Replace each loop by a chain of calls of its body, in place."""
    graph_def = program.graph_def
    nodes = nodes_by_name(graph_def)
    for name, count in times.items():
        loop = nodes[name]
        controls = control_references(loop.input)
        values = data_inputs(loop.input)
        places = range(len(values))
        for step in range(count):
            call = graph_def.node.add(op=_CALLS[loop.op], device=loop.device)
            call.name = fresh_name(nodes, f"{name}/step_{step}")
            nodes[call.name] = call
            call.input.extend([*values, *controls])
            call.attr["f"].func.CopyFrom(loop.attr["body"].func)
            for attribute in ("Tin", "Tout"):
                call.attr[attribute].CopyFrom(loop.attr["T"])
            values = [f"{call.name}:{i}" for i in places]
        # Ops that wait for the loop wait for its results.
        last = type(loop)(op="IdentityN", name=name, device=loop.device)
        last.input.extend([*values, *controls])
        last.attr["T"].CopyFrom(loop.attr["T"])
        loop.CopyFrom(last)
        waiting = [n for n in graph_def.node if f"^{name}" in n.input]
        redirect(program, {f"{name}:{i}": values[i] for i in places})
        for node in waiting:
            node.input.append(f"^{name}")


def _with_short_names(parts: GraphParts, loops: Sequence[str]) -> ModelProgram:
    """Return the program of a graph, with the scope of each loop in a name once."""
    # Nodes of a body have its scope already, and get that of their step before it.
    program = program_of_parts(parts)
    nodes = nodes_by_name(program.graph_def)
    taken = set(nodes)
    names = {}
    for name in nodes:
        short = name
        for loop in loops:
            short = re.sub(
                rf"({re.escape(loop)}/step_\d+/){re.escape(loop)}/", r"\1", short
            )
        if short != name:
            names[name] = fresh_name(taken, short)
            taken.add(names[name])
    graph = parts.graph
    counts = {n: len(graph.get_operation_by_name(n).outputs) for n in names}
    rename_nodes(program, names, counts)
    return program


def _fold_scalars(parts: GraphParts) -> None:
    """Fold the ancestors of counters and bounds."""
    rules = constant_folding(max_bytes=_SCALAR)
    rewrite(parts.graph, rules, keep=keep_of(parts))


def _list_rules() -> tuple[Rule, ...]:
    """Return rules that read elements of lists where these come from."""
    unstacked: dict[int, list[Tensor]] = {}

    def element(match: Match) -> Any:
        """Return the tensor that an element is, or why it is not known."""
        handle, index = match.root.inputs[:2]
        place = _number(index)
        if place is None:
            return "its place in the list is no constant"
        for op in _writers(handle):
            if op.type == "TensorListSetItem":
                written = _number(op.inputs[1])
                if written is None:
                    return f"the place that '{op.name}' writes is no constant"
                if written == place:
                    return op.inputs[2]
            elif op.type == "TensorListFromTensor":
                rows = _rows(op, unstacked)
                return rows[place] if 0 <= place < len(rows) else "there is none"
        return "nothing that is known was put there"

    def stacked(match: Match) -> Any:
        """Return the elements of a list packed, or why they are not known."""
        elements: dict[int, Tensor] = {}
        length = None
        for op in _writers(match.root.inputs[0]):
            if op.type == "TensorListSetItem":
                place = _number(op.inputs[1])
                if place is None:
                    return f"the place that '{op.name}' writes is no constant"
                # The last write of a place comes first, and counts.
                elements.setdefault(place, op.inputs[2])
            elif op.type == "TensorListReserve":
                length = _number(op.inputs[1])
        if length is None or sorted(elements) != list(range(length)):
            return "not all elements are known"
        return tf.stack([elements[i] for i in range(length)])

    return (
        Rule(Op("TensorListGetItem", ...), element, name="element of a list"),
        Rule(Op("TensorListStack", ...), stacked, name="stacked list"),
    )


def _rows(op: Operation, unstacked: dict[int, list[Tensor]]) -> list[Tensor]:
    """Return the rows of the tensor that a list was made from, unstacked once."""
    tensor = op.inputs[0]
    if id(op) not in unstacked:
        unstacked[id(op)] = tf.unstack(tensor)
    return unstacked[id(op)]


def _writers(handle: Tensor) -> Iterator[Operation]:
    """Yield the ops that wrote a list, the last one first."""
    while True:
        op = handle.op
        yield op
        if op.type not in ("TensorListSetItem", "Identity"):
            return
        handle = op.inputs[0]


def _number(tensor: Tensor) -> int | None:
    value = tf.get_static_value(tensor)
    return None if value is None or value.ndim else int(value)
