"""Loops rebuilt: their backward pass computes values again, and pops fewer lists.

Both loops get other bodies and keep their arguments and results: a list that is not
filled goes through as it is, empty, or holds what runs again reads instead, such as a
bias, each time the same buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from geutil.errors import PlanError, TransformError
from geutil.gradients.loops import Loop, LoopCut
from geutil.gradients.step import PlainStep
from geutil.graph import adjacency, creation, function_calls, function_defs, functions
from geutil.graph.function_calls import Caller
from geutil.graph.types import Graph, MutableIdentityMap, Tensor, dims_of, is_func_graph
from geutil.memory.function_memory import ITERATIONS
from geutil.select.queries import make_view
from geutil.transform.function_bodies import OpenedFunction, open_function
from geutil.transform.transformer import copy_replacing

_SCOPE = "again"
_BODY = "body"
_ELEMENT = "element_dtype"
_REFUSED = "the body of the loop '{op.name}' cannot be rebuilt: {reason}"
NO_LESS = "the step would hold no less at its peak, or take longer than it may"
_NO_FASTER = "the step is within the budget in less time without"
_OTHER_STEP = (
    "the plan was made for another step: that one had {planned} loops whose values can "
    "be computed again, this one has {found}; call geutil.gradients.plan again"
)


@dataclass(frozen=True, eq=False)
class _Elements:
    """The new elements of a list that is empty when a loop begins.

    Inputs that a loop was given when it was differentiated cannot be exchanged: a list
    that it begins with stays, and is made to hold something else.

    Attributes:
        lists: the list, and what the two loops make of it.
        like: a list of such elements, in another graph.
    """

    lists: tuple[Tensor, ...]
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
    """Two loops of which one computes values again.

    Attributes:
        callers: the loops, with the functions that they call otherwise.
        bodies: the new body of each: a `FunctionDef`.
        lists: the elements of the lists that the forward loop begins with, where these
            change.
    """

    callers: tuple[Caller, Caller]
    bodies: tuple[Any, Any]
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
            function_defs.register(body)
            functions.add_functions(graph, [body])
            if is_func_graph(graph):
                functions.publish_functions(graph, [name])
            function_calls.call_others(caller, {_body_of(caller): name})
        # Values computed for more iterations would be there at once.
        function_calls.limit_parallel_iterations(self.callers[1].op, ITERATIONS)
        for elements in self.lists:
            elements.apply()


def rebuild(loop: Loop, level: int) -> Rebuilt:
    """Return bodies for two loops, one of which computes the values of a cut again.

    The graph stays as it is until `Rebuilt.apply`. `PlanError` is raised if TensorFlow
    does not take a body apart.
    """
    cut = loop.cuts[level]
    graph = loop.forward.graph
    callers = {c.op: c for c in function_calls.callers_in(graph)}
    forward, backward = (callers[op] for op in (loop.forward, loop.backward))
    opened, opened_backward = (_opened(graph, c) for c in (forward, backward))
    read = [opened.graph.get_tensor_by_name(name) for name in cut.read]
    changes = [
        _Elements(
            (
                loop.forward.inputs[pile.output],
                loop.forward.outputs[pile.output],
                loop.backward.outputs[pile.argument],
            ),
            _list_of(tensor),
        )
        for pile, tensor in zip(cut.dropped, read, strict=False)
    ]
    likes = [elements.like for elements in changes]
    try:
        _compute_again(loop, cut, opened, opened_backward, read, likes)
    except TransformError as error:
        raise PlanError(_REFUSED.format(op=backward.op, reason=error)) from error
    _push_others(cut, opened, read, likes)
    bodies = tuple(
        body.define(function_defs.unused_name(body.name))
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
    lists: Sequence[Tensor],
) -> None:
    """Let the body of the backward pass compute values that it took from lists."""
    arguments = list(backward.inputs.values())
    sinks = list(backward.sinks.values())
    value_of = opened.graph.get_tensor_by_name
    pop_of = backward.graph.get_operation_by_name
    there: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for pile in loop.piles:
        if pile not in cut.dropped:
            there[value_of(pile.value)] = pop_of(pile.pop).outputs[1]
    for i, pile in enumerate(cut.dropped):
        rest = arguments[pile.argument]
        if i < len(read):
            creation.copy_handle_data(lists[i], rest)
            with creation.surroundings_of(pop_of(pile.pop)):
                rest, there[read[i]] = tf.raw_ops.TensorListPopBack(
                    input_handle=rest,
                    element_shape=_element_shape(read[i]),
                    element_dtype=read[i].dtype,
                )
        creation.set_new_input(sinks[pile.argument], 0, rest)
    ops = [opened.graph.get_operation_by_name(name) for name in cut.ops]
    _, info = copy_replacing(
        make_view(ops),
        there,
        backward.graph,
        _SCOPE,
        "",
        reuse_dst_scope=False,
        keep_control_inputs=False,
    )
    for pile in cut.dropped:
        popped = pop_of(pile.pop).outputs[1]
        value = info.transformed(value_of(pile.value))
        for reader in adjacency.consumers(popped):
            for index in adjacency.input_indices(reader, popped):
                creation.set_new_input(reader, index, value)


def _push_others(
    cut: LoopCut,
    opened: OpenedFunction,
    read: Sequence[Tensor],
    lists: Sequence[Tensor],
) -> None:
    """Let the body of the forward pass fill fewer lists."""
    arguments = list(opened.inputs.values())
    sinks = list(opened.sinks.values())
    for i, pile in enumerate(cut.dropped):
        made = arguments[pile.output]
        if i < len(read):
            creation.copy_handle_data(lists[i], made)
            with creation.surroundings_of(read[i].op):
                made = tf.raw_ops.TensorListPushBack(input_handle=made, tensor=read[i])
        creation.set_new_input(sinks[pile.output], 0, made)


def _list_of(element: Tensor) -> Tensor:
    """Return an empty list of such elements, in a graph of its own."""
    shape = _element_shape(element)
    with creation.new_graph().as_default():
        made: Tensor = tf.raw_ops.EmptyTensorList(
            element_shape=shape, max_num_elements=-1, element_dtype=element.dtype
        )
    return made


def _element_shape(tensor: Tensor) -> Any:
    """Return the shape of a list's elements as TensorFlow takes it, -1 where open."""
    dims = dims_of(tensor)
    return -1 if dims is None else [-1 if dim is None else dim for dim in dims]


@dataclass(frozen=True)
class LoopValues:
    """Values that the backward pass of a loop computes again each time it turns.

    Attributes:
        name: the name of the loop of the forward pass.
        values: the names of the values, in the body, that are not kept; empty if all
            are.
        ops: how many ops of the body run again.
        bytes: what all iterations together hold less.
        reason: why all values are kept, None if not all are.
    """

    name: str
    values: tuple[str, ...] = ()
    ops: int = 0
    bytes: int = 0
    reason: str | None = None


Levels = tuple[int, ...]
"""For each loop what runs again: nothing (0), or one of its cuts."""


class LoopChoices:
    """The loops of a step, if there is a choice, and what they compute again."""

    def __init__(self, step: PlainStep, loops: Sequence[Loop]) -> None:
        self.loops = loops
        self._step = step
        self._rebuilt: dict[tuple[int, int], Rebuilt] = {}
        self._refused: dict[int, str] = {}
        self._time = sum(map(step.op_times(), step.ops())) if loops else 0.0

    def planned(self, levels: Sequence[int]) -> Levels:
        """Return a choice made before, or raise `PlanError` if for another step."""
        found = len(self.loops)
        levels = tuple(levels) or (0,) * found
        pairs = zip(self.loops, levels, strict=False)
        if len(levels) != found or any(n and n not in loop.cuts for loop, n in pairs):
            raise PlanError(_OTHER_STEP.format(planned=len(levels), found=found))
        return levels

    def in_order(self) -> list[Levels]:
        """Return choices that hold less and less and take longer and longer.

        Each loop goes on by what saves the most bytes for its time.
        """
        choices: list[Levels] = [(0,) * len(self.loops)]
        while True:
            levels = choices[-1]
            more = [
                (_saved_for_time(loop, level, now), -i, level)
                for i, (loop, now) in enumerate(zip(self.loops, levels, strict=True))
                for level in loop.cuts
                if level > now
            ]
            if not more:
                return choices
            _, place, level = max(more)
            i = -place
            choices.append((*levels[:i], level, *levels[i + 1 :]))

    def rebuilt(self, levels: Levels) -> PlainStep:
        """Return the step with other loops, by edits to make, or raise `PlanError`."""
        loops = [self._with(i, level) for i, level in enumerate(levels) if level]
        if not loops:
            return self._step
        return replace(self._step, edits=replace(self._step.edits, loops=tuple(loops)))

    def _with(self, i: int, level: int) -> Rebuilt:
        """Return a loop rebuilt, the same each time."""
        if (i, level) not in self._rebuilt:
            try:
                self._rebuilt[i, level] = rebuild(self.loops[i], level)
            except PlanError as error:
                self._refused[i] = str(error)
                raise
        return self._rebuilt[i, level]

    def longer(self, levels: Levels) -> float:
        """Return the time of the step's ops, as a part of that when values are kept."""
        pairs = zip(self.loops, levels, strict=True)
        more = sum(loop.cuts[level].time for loop, level in pairs if level)
        return 1 + more / (self._time or 1.0)

    def values(self, levels: Levels, *, in_budget: bool) -> tuple[LoopValues, ...]:
        """Return what a report says of the loops by a choice."""
        values = []
        for i, (loop, level) in enumerate(zip(self.loops, levels, strict=True)):
            name, cut = loop.forward.name, loop.cuts.get(level)
            if cut is not None:
                names = tuple(pile.value for pile in cut.dropped)
                values.append(LoopValues(name, names, len(cut.ops), cut.saved))
            else:
                reason = _NO_FASTER if in_budget else NO_LESS
                reason = self._refused.get(i) or loop.reason or reason
                values.append(LoopValues(name, reason=reason))
        return tuple(values)


def _saved_for_time(loop: Loop, level: int, now: int) -> float:
    """Return the bytes that a cut saves beyond another one, for the time it takes."""
    cut, before = loop.cuts[level], loop.cuts.get(now)
    saved = cut.saved - (before.saved if before else 0)
    return saved / max(cut.time - (before.time if before else 0.0), 1.0)
