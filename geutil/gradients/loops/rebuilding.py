"""Loops rebuilt: their backward pass computes values again, and pops fewer lists.

Both loops get other bodies and keep their arguments and results: a list that is not
filled goes through as it is, empty, or holds what runs again reads instead, such as a
bias, each time the same buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import PlanError, TransformError
from geutil.gradients.loops.finding import Loop, LoopCut
from geutil.graph import creation, function_calls, function_defs, functions, types
from geutil.graph.function_calls import Caller
from geutil.graph.types import Graph, MutableIdentityMap, Tensor
from geutil.memory.function_memory import ITERATIONS
from geutil.select.queries import make_view
from geutil.transform.function_bodies import OpenedFunction, open_function
from geutil.transform.transformer import copy_replacing

_SCOPE = "again"
_BODY = "body"
_ELEMENT = "element_dtype"
_REFUSED = "the body of the loop '{op.name}' cannot be rebuilt: {reason}"


@dataclass(frozen=True, eq=False)
class _Elements:
    """What an empty list is going to hold.

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
    """What two loops are when one computes values again.

    Attributes:
        callers: the loops, with the functions that they call otherwise.
        bodies: the new body of each: a `FunctionDef`.
        lists: what the lists hold that the forward loop begins with, where that
            changes.
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
        """Let the loops run the new bodies.

        Cost: linear in the bodies, and in the attributes of the ops.
        """
        for caller, body in zip(self.callers, self.bodies, strict=True):
            _add(caller.op.graph, body)
            function_calls.call_others(caller, {_body_of(caller): body.signature.name})
        # Values computed for more iterations would be there at once.
        function_calls.limit_parallel_iterations(self.callers[1].op, ITERATIONS)
        for elements in self.lists:
            elements.apply()


def rebuild(loop: Loop, level: int) -> Rebuilt:
    """Return bodies for two loops, one of which computes values again.

    The graph stays as it is until `Rebuilt.apply`.

    Args:
        loop: the loops.
        level: which of the cuts of the loop.

    Raises:
        PlanError: TensorFlow does not take a body apart.

    Cost: linear in the ops of the bodies.
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
    dropped = {pile.value for pile in cut.dropped}
    there: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for pile in loop.piles:
        if pile.value not in dropped:
            pop = backward.graph.get_operation_by_name(pile.pop)
            there[opened.graph.get_tensor_by_name(pile.value)] = pop.outputs[1]
    for i, pile in enumerate(cut.dropped):
        rest = arguments[pile.argument]
        if i < len(read):
            creation.copy_handle_data(lists[i], rest)
            rest, there[read[i]] = _popped(backward, pile.pop, rest, read[i])
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
        value = info.transformed(opened.graph.get_tensor_by_name(pile.value))
        popped = backward.graph.get_operation_by_name(pile.pop).outputs[1]
        for reader in popped.consumers():
            for index, t in enumerate(reader.inputs):
                if t is popped:
                    creation.set_new_input(reader, index, value)


def _popped(
    backward: OpenedFunction, beside: str, rest: Tensor, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Take a value from a list, in the place of another op; return rest and value."""
    graph = backward.graph
    with creation.surroundings_of(graph.get_operation_by_name(beside)):
        return tf.raw_ops.TensorListPopBack(
            input_handle=rest,
            element_shape=_element_shape(like),
            element_dtype=like.dtype,
        )


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


def _add(graph: Graph, definition: Any) -> None:
    """Give a graph the function of an edited body."""
    function_defs.register(definition)
    functions.add_functions(graph, [definition])
    if types.is_func_graph(graph):
        functions.publish_functions(graph, [definition.signature.name])


def _list_of(element: Tensor) -> Tensor:
    """Return an empty list of such elements, in a graph of its own."""
    with creation.new_graph().as_default():
        made: Any = tf.raw_ops.EmptyTensorList(
            element_shape=_element_shape(element),
            max_num_elements=-1,
            element_dtype=element.dtype,
        )
    return made


def _element_shape(tensor: Tensor) -> Any:
    """Return the shape of a list's elements as TensorFlow takes it, -1 where open."""
    dims = types.dims_of(tensor)
    return -1 if dims is None else [-1 if dim is None else dim for dim in dims]
