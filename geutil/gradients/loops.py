"""Loops of a step whose backward pass recomputes values.

The forward loop pushes values onto lists, and the loop of the backward pass pops one of
each in every iteration. Some of these values can be computed from others: the gates of
an LSTM, from its inputs and its state. Both loops get new bodies and keep their
arguments and results: a list that is not filled passes through empty, or holds an input
of the ops that run again, such as a bias, each time the same buffer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import tensorflow as tf

from geutil.bodies.function_bodies import OpenedFunction, open_function
from geutil.errors import PlanError, TransformError
from geutil.gradients.step import PlainStep, why_kept
from geutil.graph import adjacency, creation, function_calls, functions, op_types, types
from geutil.graph.function_calls import Caller, LoopBody, source_of
from geutil.graph.types import Graph, IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import closure_by_identity
from geutil.memory.costs import BODIES, HEAVY, UNKNOWN, op_time, tensor_bytes
from geutil.memory.read import ITERATIONS, Called
from geutil.select.queries import make_view
from geutil.select.walks import get_backward_walk_ops
from geutil.transform.transformer import copy_replacing

# How much of a loop runs again: no products and convolutions, or anything.
LIGHT, ALL = 1, 2
_SEVERAL = "several loops read its lists"
_SHARED = "another op runs the same function"
_NOTHING = "no list of its own holds values that follow from others"
_NO_ROOM = "it would need more lists than it has"


@dataclass(frozen=True)
class Pile:
    """A list that a loop pushes a value onto in each iteration."""

    # Its places among the results of the loop, and the arguments of the backward loop.
    output: int
    argument: int
    # The name of the value in the body, and of the op of the other body that pops it.
    value: str
    pop: str


@dataclass(frozen=True)
class LoopCut:
    """Values that a loop of the backward pass recomputes, and their sources."""

    # The lists that are not filled.
    dropped: tuple[Pile, ...]
    # The values that the first of them get, since ops that run again read these.
    read: tuple[str, ...]
    # The names of the ops of the body that run again.
    ops: tuple[str, ...]
    # The bytes that lists hold less, all iterations together.
    saved: int
    # How much longer the loop takes, in the unit of `op_time`.
    time: float


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of the forward pass, with that of the backward pass and cuts by level."""

    forward: Operation
    backward: Operation
    piles: tuple[Pile, ...] = ()
    # Only cuts that save anything; if there is none, the reason.
    cuts: Mapping[int, LoopCut] = field(default_factory=dict)
    reason: str | None = None


def find_loops(step: PlainStep) -> list[Loop]:
    """Return the loops of a step that are differentiated, in the order of its ops."""
    backward = frozenset(step.backward)
    ops = step.ops()
    loops = [op for op in ops if op.type in op_types.LOOPS and op not in backward]
    pairs = [(op, readers) for op in loops if (readers := _loops_behind(op, backward))]
    if not pairs:
        return []
    callers = function_calls.callers_in(step.graph)
    counts = Counter(name for caller in callers for name in caller.names)
    return [_loop(op, readers, step.calls, counts) for op, readers in pairs]


def _loops_behind(op: Operation, backward: Collection[Operation]) -> list[Operation]:
    """Return the loops of the backward pass that read lists of a loop."""
    readers = (
        reader
        for t in op.outputs
        if t.dtype == tf.variant
        for reader in t.consumers()
        if reader.type in op_types.LOOPS and reader in backward
    )
    return list(dict.fromkeys(readers))


def _loop(
    op: Operation,
    readers: Sequence[Operation],
    calls: Mapping[Operation, Called],
    callers: Mapping[str, int],
) -> Loop:
    """Return a loop with the best cut of each level, or why it has none."""
    reader = readers[0]
    refused = partial(Loop, op, reader, (), {})
    if len(readers) > 1:
        return refused(_SEVERAL)
    if any(callers[o.get_attr("body").name] > 1 for o in (op, reader)):
        return refused(_SHARED)
    forward, backward = (calls[o].body if o in calls else None for o in (op, reader))
    if forward is None or backward is None:
        return refused(_NOTHING)
    piles = tuple(_piles(op, reader, forward, backward))
    if not piles:
        read = IdentitySet(reader.inputs)
        lists = [t for t in op.outputs if t.dtype == tf.variant and t in read]
        others = any(t.consumers() not in ([reader], []) for t in lists)
        return refused(_SEVERAL if others else _NOTHING)
    body = _Body(forward, piles)
    times = calls[op].times
    found = {
        level: body.cut(UNKNOWN if times is None else times, with_heavy=level == ALL)
        for level in (LIGHT, ALL)
    }
    cuts = {level: cut for level, cut in found.items() if isinstance(cut, LoopCut)}
    if not cuts:
        return Loop(op, reader, piles, {}, str(found[ALL]))
    # A cut with heavy ops takes longer, so it has to save more than the light one.
    if len(cuts) > 1 and cuts[ALL].saved <= cuts[LIGHT].saved:
        del cuts[ALL]
    return Loop(op, reader, piles, cuts)


def _piles(
    op: Operation, reader: Operation, body: Graph, backward_body: Graph
) -> Iterator[Pile]:
    """Yield the lists that one loop fills and the other one alone empties."""
    argument_of = {id(t): i for i, t in enumerate(reader.inputs)}
    for i, t in enumerate(op.outputs):
        argument = argument_of.get(id(t))
        if t.dtype != tf.variant or argument is None or t.consumers() != [reader]:
            continue
        # A list that others read, or that begins with elements, is not the loop's.
        begins = op.inputs[i]
        if begins.op.type != "EmptyTensorList" or begins.consumers() != [op]:
            continue
        push = source_of(body.outputs[i]).op
        if push.type != "TensorListPushBack":
            continue
        list_before, value = push.inputs
        if source_of(list_before) is not body.inputs[i] or value.dtype == tf.variant:
            continue
        pops = backward_body.inputs[argument].consumers()
        rest = source_of(backward_body.outputs[argument])
        # The backward loop may pop elements and hand on the rest, and no more.
        is_alone = [pop.type for pop in pops] == ["TensorListPopBack"]
        if is_alone and rest is pops[0].outputs[0]:
            yield Pile(i, argument, value.name, pops[0].name)


class _Body:
    """The body of a loop, its lists, and the bytes that each value takes in one."""

    def __init__(self, graph: Graph, piles: Sequence[Pile]) -> None:
        self._body = LoopBody(graph)
        filled = frozenset(pile.output for pile in piles)
        others = (i for i in range(len(graph.outputs)) if i not in filled)
        elements = (t for i in others for t in self._body.added(i))
        self._listed = IdentitySet(map(source_of, elements))
        self._piles = piles
        self._values = [graph.get_tensor_by_name(pile.value) for pile in piles]

    def cut(self, count: int, *, with_heavy: bool) -> LoopCut | str:
        """Return the best cut for `count` iterations, or why there is none."""
        values = self._values
        # Counters and shapes stay in their lists.
        small = IdentitySet(t for t in values if tensor_bytes(t) <= 256)
        pairs = [p for p in zip(self._piles, values, strict=True) if p[1] not in small]

        # The inputs of a tensor if its op runs again; None if it does not.
        read_again: dict[int, Sequence[Tensor] | None] = {}

        def inputs_of(t: Tensor) -> Sequence[Tensor]:
            again = t not in small and _runs_again(t.op, with_heavy=with_heavy)
            read_again[id(t)] = t.op.inputs if again else None
            return read_again[id(t)] or ()

        # The tensors that the values follow from.
        behind = closure_by_identity((t for _, t in pairs), inputs_of)
        tensors = list(behind.values())
        inputs = [read_again[key] for key in behind]
        number = {key: i for i, key in enumerate(behind)}
        cut = least_cut(
            # Lists of nothing new are no reason to compute, but for the list itself.
            [1 if t in small else 1 + self._bytes(t) for t in tensors],
            [[number[id(t)] for t in read or ()] for read in inputs],
            [i for i, read in enumerate(inputs) if read is None],
            [number[id(t)] for _, t in pairs],
        )
        kept = IdentitySet(tensors[i] for i in cut)
        dropped = [(pile, t) for pile, t in pairs if t not in kept]
        listed = IdentitySet(values)
        read = [t for t in kept if t not in listed]
        saved = sum(self._bytes(t) for _, t in dropped) - sum(map(self._bytes, read))
        if saved <= 0:
            return _NOTHING
        if len(read) > len(dropped):
            return _NO_ROOM
        ops = get_backward_walk_ops([t for _, t in dropped], stop_at_ts=list(kept))
        return LoopCut(
            tuple(pile for pile, _ in dropped),
            tuple(t.name for t in read),
            tuple(op.name for op in ops),
            count * saved,
            count * sum(map(op_time, ops)),
        )

    def _bytes(self, tensor: Tensor) -> int:
        """Return the new bytes that a list of a value holds in each iteration."""
        source = source_of(tensor)
        before = self._body.origin(source)
        listed = source in self._listed or before in self._listed
        if listed or source.op.type == "Const":
            return 0
        if source.op.type == "ReadVariableOp":
            # Each time the same buffer, if it is each time the same variable.
            place = self._body.place(source_of(source.op.inputs[0]))
        elif source.op.type == "TensorListGetItem":
            place = self._body.list_argument(source)
        else:
            place = self._body.place(source)
        return 0 if self._body.stays(place) else tensor_bytes(tensor)


def least_cut(
    weights: Sequence[int],
    read: Sequence[Collection[int]],
    given: Collection[int],
    needed: Collection[int],
) -> list[int]:
    """Return the nodes of least weight that all needed ones follow from, in order."""
    # A minimum vertex cut between given and needed nodes; `read` has the inputs of
    # each. Of equal cuts it is the one nearest to the needed nodes. Source: Ford and
    # Fulkerson, "Maximal flow through a network", 1956; the shortest path first
    # (Edmonds and Karp, 1972).
    source, sink = -1, -2
    # More than any cut of the nodes weighs: such edges are never a part of one.
    unlimited = sum(weights) + 1
    # Node i is an edge of its weight, from an entrance 2 i to an exit 2 i + 1.
    edges = [(2 * i, 2 * i + 1, weight) for i, weight in enumerate(weights)]
    edges += [(2 * j + 1, 2 * i, unlimited) for i in range(len(read)) for j in read[i]]
    edges += [(source, 2 * i, unlimited) for i in given]
    edges += [(2 * i + 1, sink, unlimited) for i in needed]
    # The capacity left on each edge, and the flow on it that can be taken back.
    left: dict[int, dict[int, int]] = defaultdict(dict)
    for start, end, most in edges:
        left[start][end] = most
        left[end].setdefault(start, 0)

    def reached(first: int, *, back: bool) -> dict[int, int]:
        """Return the nodes that flow can reach, each with the one before."""
        met = {first: first}
        waiting = [first]
        for node in waiting:
            for other in left[node]:
                room = left[other][node] if back else left[node][other]
                if room and other not in met:
                    met[other] = node
                    waiting.append(other)
        return met

    while sink in (before := reached(source, back=False)):
        way = [sink]
        while way[-1] != source:
            way.append(before[way[-1]])
        more = min(left[start][end] for end, start in pairwise(way))
        for end, start in pairwise(way):
            left[start][end] -= more
            left[end][start] += more
    behind = reached(sink, back=True)
    nodes = range(len(weights))
    return [i for i in nodes if 2 * i + 1 in behind and 2 * i not in behind]


def _runs_again(op: Operation, *, with_heavy: bool) -> bool:
    """Return whether an op can run again in the loop of the backward pass."""
    if op.type == "Const":
        return True
    if any(t.dtype in (tf.variant, tf.resource) for t in (*op.inputs, *op.outputs)):
        # An element of a list is there anyway, and a list may have changed.
        return False
    if not with_heavy and op.type in HEAVY:
        return False
    return op.type not in BODIES and why_kept(op) is None


_SCOPE = "again"
_BODY = "body"
_ELEMENT = "element_dtype"
_REFUSED = "the body of the loop '{op.name}' cannot be rebuilt: {reason}"


@dataclass(frozen=True, eq=False)
class _Elements:
    """The new elements of a list that is empty when a loop begins."""

    # Inputs that a loop was given when it was differentiated cannot be exchanged: a
    # list that it begins with stays, and gets other elements.

    # The list, and the results of the two loops for it.
    lists: tuple[Tensor, ...]
    # A list of such elements, in another graph.
    like: Tensor

    def write(self, graph_def: Any, node: Any) -> None:
        """Let the node of the list know."""
        shape = graph_def.node.add()
        shape.CopyFrom(self.like.op.inputs[0].op.node_def)
        shape.name = node.input[0] = f"{node.name}/{_SCOPE}"
        node.attr[_ELEMENT].CopyFrom(self.like.op.node_def.attr[_ELEMENT])

    def apply(self) -> None:
        """Let the op and TensorFlow's shape inference know."""
        op = self.lists[0].op
        with creation.surroundings_of(op):
            dims = tf.get_static_value(self.like.op.inputs[0])
            shape = tf.constant(dims, tf.int32, name="element_shape")
            # TensorFlow does not let an op read a vector of another length.
            unknown = tf.TensorShape(None)
            hidden = tf.raw_ops.PlaceholderWithDefault(input=shape, shape=unknown)
        creation.set_new_input(op, 0, hidden)
        creation.set_element_type(op, self.like.op.get_attr(_ELEMENT))
        for t in self.lists:
            # The loops may be differentiated again.
            creation.copy_handle_data(self.like, t)


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Two loops of which one recomputes values."""

    # The loops, with the functions that they call otherwise.
    callers: tuple[Caller, Caller]
    # The new body of each: a `FunctionDef`.
    bodies: tuple[Any, Any]
    # The lists that the forward loop begins with and whose elements change.
    lists: tuple[_Elements, ...]

    def write(self, graph_def: Any) -> None:
        """Let the loops of a `GraphDef` run the new bodies: linear in its nodes."""
        nodes = {node.name: node for node in graph_def.node}
        graph_def.library.function.extend(self.bodies)
        for caller, body in zip(self.callers, self.bodies, strict=True):
            nodes[caller.op.name].attr[_BODY].func.name = body.signature.name
        at_once = nodes[self.callers[1].op.name].attr["parallel_iterations"]
        at_once.i = min(at_once.i, ITERATIONS)
        for elements in self.lists:
            elements.write(graph_def, nodes[elements.lists[0].op.name])

    def apply(self) -> None:
        """Let the loops run the new bodies."""
        for caller, body in zip(self.callers, self.bodies, strict=True):
            graph, name = caller.op.graph, body.signature.name
            function_calls.register(body)
            functions.add_functions(graph, [body])
            if types.is_func_graph(graph):
                functions.publish_functions(graph, [name])
            function_calls.call_others(caller, {_body_of(caller): name})
        # Values computed for more iterations would be there at once.
        function_calls.limit_parallel_iterations(self.callers[1].op, ITERATIONS)
        for elements in self.lists:
            elements.apply()


def rebuild(loop: Loop, level: int) -> Rebuilt:
    """Return bodies for two loops, one of which recomputes a cut's values."""
    # The graph stays as it is until `Rebuilt.apply`.
    cut = loop.cuts[level]
    graph = loop.forward.graph
    callers = {c.op: c for c in function_calls.callers_in(graph)}
    forward, backward = (callers[op] for op in (loop.forward, loop.backward))
    opened, opened_backward = (_opened(graph, c) for c in (forward, backward))
    read = [opened.graph.get_tensor_by_name(name) for name in cut.read]
    likes = list(map(_list_of, read))
    try:
        _compute_again(loop, cut, opened, opened_backward, read, likes)
    except TransformError as error:
        raise PlanError(_REFUSED.format(op=backward.op, reason=error)) from error
    arguments, sinks = list(opened.inputs.values()), list(opened.sinks.values())
    changes = []
    for pile, t, like in zip_longest(cut.dropped, read, likes):
        made = arguments[pile.output]
        if t is not None:
            creation.copy_handle_data(like, made)
            with creation.surroundings_of(t.op):
                made = tf.raw_ops.TensorListPushBack(input_handle=made, tensor=t)
            starts = loop.forward.inputs[pile.output]
            results = loop.forward.outputs[pile.output]
            rest = loop.backward.outputs[pile.argument]
            changes.append(_Elements((starts, results, rest), like))
        creation.set_new_input(sinks[pile.output], 0, made)
    bodies = tuple(
        body.define(function_calls.unused_name(body.name))
        for body in (opened, opened_backward)
    )
    return Rebuilt((forward, backward), bodies, tuple(changes))


def _body_of(caller: Caller) -> str:
    """Return the name of the body of a loop."""
    (name,) = (c.name for c in caller.callees if c.attribute == _BODY)
    return name


def _opened(graph: Graph, caller: Caller) -> OpenedFunction:
    opened = open_function(graph, caller, _body_of(caller))
    if isinstance(opened, OpenedFunction):
        return opened
    raise PlanError(_REFUSED.format(op=caller.op, reason=opened.reason))


def _compute_again(
    loop: Loop,
    cut: LoopCut,
    opened: OpenedFunction,
    backward: OpenedFunction,
    read: Sequence[Tensor],
    likes: Sequence[Tensor],
) -> None:
    """Let the body of the backward pass compute values that it took from lists."""
    arguments, sinks = list(backward.inputs.values()), list(backward.sinks.values())
    value_of = opened.graph.get_tensor_by_name
    pop_of = backward.graph.get_operation_by_name
    there: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for pile in loop.piles:
        # Lists that stay are popped as before, and the copies read their values.
        if pile not in cut.dropped:
            there[value_of(pile.value)] = pop_of(pile.pop).outputs[1]
    for pile, t, like in zip_longest(cut.dropped, read, likes):
        rest = arguments[pile.argument]
        # Fewer values are read than lists are dropped: the other lists stay empty.
        if t is not None:
            creation.copy_handle_data(like, rest)
            kind = {"element_shape": _element_shape(t), "element_dtype": t.dtype}
            with creation.surroundings_of(pop_of(pile.pop)):
                rest, there[t] = tf.raw_ops.TensorListPopBack(input_handle=rest, **kind)
        creation.set_new_input(sinks[pile.argument], 0, rest)
    ops = [opened.graph.get_operation_by_name(name) for name in cut.ops]
    where = (backward.graph, _SCOPE, "")
    _, info = copy_replacing(
        make_view(ops), there, *where, reuse_dst_scope=False, keep_control_inputs=False
    )
    for pile in cut.dropped:
        popped = pop_of(pile.pop).outputs[1]
        value = info.transformed(value_of(pile.value))
        for reader in adjacency.consumers(popped):
            for index in adjacency.input_indices(reader, popped):
                creation.set_new_input(reader, index, value)


def _list_of(element: Tensor) -> Tensor:
    """Return an empty list of such elements, in a graph of its own."""
    kind = {"element_shape": _element_shape(element), "element_dtype": element.dtype}
    with creation.new_graph().as_default():
        made: Tensor = tf.raw_ops.EmptyTensorList(max_num_elements=-1, **kind)
    return made


def _element_shape(tensor: Tensor) -> Any:
    """Return the shape of a list's elements as TensorFlow takes it, -1 where open."""
    dims = types.dims_of(tensor)
    return -1 if dims is None else [-1 if dim is None else dim for dim in dims]
