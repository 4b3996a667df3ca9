"""Gradient functions of ops.

The registry, those of calls, and those of `tf.custom_gradient` after an edit.

Such a gradient is a Python closure over the tensors that the op read when it was made.
Once an input of the op is another tensor, the gradient shall be that of the other one:
the closure is called as it is, and its result is rewired to the op's present inputs.

`tf.custom_gradient` in a graph registers a Python closure under a name made up on the
spot and writes that name into the `_gradient_op_type` attribute of an IdentityN.

`tf.function` keeps the gradient of a call in Python, and writes into the node a name
that means nothing anywhere else. Without either, TensorFlow falls back on gradients
written in C++, which many ops lack, loops among them. Here one gradient serves the
calls of geutil's graphs: it looks up the op's function, and lets TensorFlow
differentiate that. It is registered for the op types, so it is found in bodies of
bodies too, and nothing of it is written into a model. A call in a graph that is not
geutil's falls back as before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import (
    _tf,
    creation,
    functions,
    op_types,
    resource_variables,
    state,
    types,
)
from geutil.graph._tf import ConcreteFunction, FuncGraph, IsTrainable
from geutil.graph.protos import AttrValue
from geutil.graph.types import Graph, IdentityMap, MutableIdentityMap, Operation, Tensor

ATTRIBUTE = "_gradient_op_type"
_CLOSURES = ("CustomGradient-", "GeutilCustomGradient-")
_numbers = itertools.count()


def is_closure(gradient_type: str) -> bool:
    """Return whether a gradient's name is that of a closure over a graph's tensors."""
    return gradient_type.startswith(_CLOSURES) and gradient_type in registered_names()


def registered_names() -> Any:
    """Return the names in the registry."""
    return _tf.gradient_registry.list()


def lookup(gradient_type: str) -> Callable[..., Any]:
    """Return the gradient function of that name."""
    function: Callable[..., Any] = _tf.gradient_registry.lookup(gradient_type)
    return function


def register(function: Callable[..., Any]) -> str:
    """Register a gradient function and return the name made for it."""
    name = f"{_CLOSURES[1]}{next(_numbers)}"
    tf.RegisterGradient(name)(function)
    return name


def new_body(name: str) -> Any:
    """Return an empty FuncGraph, to trace a gradient function in."""
    return FuncGraph(name)


def captures_of(body: Any) -> list[tuple[Any, Any]]:
    """Return (outside tensor, placeholder inside) for each capture of a FuncGraph."""
    return list(body.captures)


def gradient_of(op: Any) -> str | None:
    """Return the name of the gradient that an op names, None where it names none."""
    try:
        value: bytes = op.get_attr(ATTRIBUTE)
    except ValueError:
        return None
    return value.decode()


def set_gradient(op: Any, name: str) -> None:
    """Make an op name a gradient of the registry."""
    op._set_attr(ATTRIBUTE, AttrValue(s=name.encode()))


def gradient_function(op: Any) -> Callable[..., Any] | None:
    """Return the gradient function of an op; None if its gradient is nothing."""
    if is_symbolic_call(op):
        return _symbolic_gradient
    function: Callable[..., Any] | None = _tf.get_gradient_function(op)
    return function


def is_symbolic_call(op: Any) -> bool:
    """Return whether an op calls a function that no gradient is registered for."""
    # So it is once a graph was imported: TensorFlow differentiates it when it runs.
    called = op.type in op_types.CALLS or op.graph._is_function(op.type)
    if not called:
        return False
    try:
        _tf.get_gradient_function(op)
    except LookupError:
        return True
    return False


def _symbolic_gradient(op: Any, *gradients: Any) -> list[Any]:
    input_gradients: list[Any] = _tf.symbolic_gradient(op, list(gradients))
    return input_gradients


def has_gradient(tensor: Any) -> bool:
    """Return whether TensorFlow differentiates a tensor: floats, and lists of them."""
    return bool(IsTrainable(tensor))


def default_gradient_kind(tensor: Any) -> tuple[Any, Any] | None:
    """Return the shape and dtype of the gradient of a tensor; None if it has none."""
    # For a variable's handle: those of the variable, if they are known.
    if not has_gradient(tensor) or not _tf.supports_default_grad(tensor):
        return None
    kind: tuple[Any, Any] = _tf.shape_and_dtype(tensor)
    return kind


_SHAPES = "_input_shapes"


def _call_gradient(op: Operation, *grads: Any) -> Any:
    """Let TensorFlow differentiate the function that `op` calls."""
    # TensorFlow gives the op more outputs, which its gradient reads; a second gradient
    # has to know them, so the op remembers its gradient function.
    if not any(state.is_own_graph(graph) for graph in _around(op.graph)):
        output_gradients = [
            tf.zeros_like(t) if grad is None else grad
            for grad, t in zip(grads, op.outputs, strict=True)
        ]
        return _tf.symbolic_gradient(op, output_gradients)
    gradient = _function_of(op)._get_gradient_function()
    op._gradient_function = gradient
    return gradient(op, *grads)


for _type in sorted(op_types.CALLS):
    if _type not in registered_names():
        tf.RegisterGradient(_type)(_call_gradient)


class _CallFunctions(dict[Any, Any]):
    """The functions as which calls of a graph were differentiated."""


def _function_of(op: Operation) -> Any:
    """Return a concrete function of the callee of `op`; equal calls share it."""
    name = op.get_attr("f").name
    graph = _holder(op.graph, name)
    call_functions = state.slot(graph, _CallFunctions)
    key = (name, *(_kind(t) for t in op.inputs))
    if key not in call_functions:
        call_functions[key] = _concrete_function(graph, name, op)
    return call_functions[key]


def _kind(t: Tensor) -> tuple[str, bytes]:
    """Return the static shape of an argument, and the variable behind a resource."""
    if t.dtype in (tf.resource, tf.variant):
        data = _tf.get_handle_data(t)
        return "", data.SerializeToString(deterministic=True)
    return str(t.shape), b""


def _around(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and those around it, outwards."""
    around: Any = graph
    while around is not None:
        yield around
        around = getattr(around, "outer_graph", None)


def _holder(graph: Graph, name: str) -> Graph:
    """Return the outermost graph around `graph` that knows the function."""
    holders = [around for around in _around(graph) if around._is_function(name)]
    if not holders:
        raise LookupError(
            f"'{name}' cannot be differentiated: no graph holds the function"
        )
    return holders[-1]


def _concrete_function(graph: Graph, name: str, op: Operation) -> Any:
    """Return a copy of the callee of `op` that TensorFlow can differentiate."""
    # Its loops and conditionals have bodies of their own: TensorFlow names the
    # functions that it derives from a body after the body, and no two may have the same
    # name.
    original_definition = graph._get_function(name).cached_definition
    definition, library = functions.with_own_control_flow(graph, original_definition)
    functions.add_functions(graph, library.function)
    handles = (tf.resource, tf.variant)
    shapes = [None if t.dtype in handles else t.shape for t in op.inputs]
    with graph.as_default():
        body = _tf.function_def_to_graph(definition, shapes)
    for outside, inside in zip(op.inputs, body.inputs, strict=True):
        _tf.copy_handle_data(outside, inside)
    resource_variables.carry_loop_handles(body)
    functions.add_functions(body, library.function)
    functions.publish_functions(body)
    allowed = _tf.MONOMORPHIC_FUNCTION_ALLOWLIST - {_SHAPES}
    attributes = {k: v for k, v in definition.attr.items() if k in allowed}
    return ConcreteFunction.from_func_graph(body, None, attributes)


CLOSURE_TYPE = "IdentityN"
"""The type of the ops that `tf.custom_gradient` makes."""


@dataclass(frozen=True, eq=False)
class RewiredOp:
    """An op whose inputs may have changed since its gradient was made."""

    op: Operation
    inputs: tuple[Tensor, ...]  # Its inputs when its gradient was made.
    gradient: str  # The name of that gradient, a closure.

    def stand_ins(self) -> IdentityMap[Tensor | None]:
        """Return the present tensor in place of each input that changed."""
        # None for a tensor that was read twice, in whose place two are read.
        current_of: MutableIdentityMap[Tensor | None] = MutableIdentityMap()
        for before, now in zip(self.inputs, self.op.inputs, strict=True):
            same = before not in current_of or current_of[before] is now
            current_of[before] = now if same else None
        return IdentityMap((t, t_) for t, t_ in current_of.items() if t_ is not t)


class RewiredOps(dict[str, RewiredOp]):
    """Ops with gradients that follow their inputs, by the names of these."""


def follow_inputs(op: Operation) -> Callable[[], None] | None:
    """Give an op a gradient that follows its inputs; return the undo."""
    # None if the gradient of the op is no closure, or follows its inputs already.
    gradient = gradient_of(op)
    rewired_ops = state.slot(op.graph, RewiredOps)
    if gradient is None or gradient in rewired_ops:
        return None
    if not is_closure(gradient):
        return None
    target = weakref.ref(op.graph)

    # TensorFlow traces it for a SavedModel, and would rewrite all that it calls.
    @tf.autograph.experimental.do_not_convert
    def following(_: Operation | None, *grads: Tensor | None) -> list[Any]:
        graph = target()
        if graph is None:
            raise TransformError(
                f"the graph is gone whose tensors the gradient '{name}' reads; copy "
                "graphs with geutil.copy instead of importing their GraphDefs"
            )
        return _gradient_now(state.slot(graph, RewiredOps)[name], grads)

    name = register(following)
    # On the graph, which the registry would keep alive as long as the process.
    rewired_ops[name] = RewiredOp(op, tuple(op.inputs), gradient)
    set_gradient(op, name)

    def undo() -> None:
        set_gradient(op, gradient)
        rewired_ops.pop(name, None)

    return undo


def _gradient_now(rewired: RewiredOp, grads: Iterable[Tensor | None]) -> list[Any]:
    """Build the gradient of an op for its present inputs, in the default graph."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    results = lookup(rewired.gradient)(rewired.op, *grads)
    results = list(results) if isinstance(results, list | tuple) else [results]
    stand_ins = _within(graph, rewired)

    def now(t: Any) -> Any:
        if t not in stand_ins:
            return t
        t_ = stand_ins[t]
        if t_ is None:
            raise TransformError(
                f"the gradient of '{rewired.op.name}' reads a tensor in whose place "
                "the op reads two others now; give both of these inputs the same one"
            )
        return t_

    # The closure reads the inputs of its day: its new ops are moved to those of today.
    for op in graph.get_operations()[before:]:
        for index, t in enumerate(op.inputs):
            if t in stand_ins:
                creation.set_new_input(op, index, now(t))
    flat = [now(leaf) for leaf in tf.nest.flatten(results, expand_composites=True)]
    packed = tf.nest.pack_sequence_as(results, flat, expand_composites=True)
    return list(packed)


def _within(graph: Graph, rewired: RewiredOp) -> IdentityMap[Tensor | None]:
    """Return the stand-ins as ops of a graph read them: a FuncGraph captures them."""
    stand_ins = rewired.stand_ins()
    if graph is rewired.op.graph or not types.is_func_graph(graph):
        return stand_ins
    return IdentityMap(
        (
            inside,
            None if stand_ins[t] is None else creation.capture(graph, stand_ins[t]),
        )
        for t, inside in captures_of(graph)
        if t in stand_ins
    )
