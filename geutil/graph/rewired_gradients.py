"""Gradients of `tf.custom_gradient` that follow the inputs of their op.

Such a gradient is a Python closure over the tensors that the op read when it was made.
Once an input of the op is another tensor, the gradient shall be that of the other one:
the closure is called as it is, and what it builds is rewired to what the op reads now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import gradient_registry
from geutil.graph.identity import IdentityMap, MutableIdentityMap
from geutil.graph.importing import capture, set_new_input
from geutil.graph.kinds import Graph, Operation, Tensor, is_func_graph
from geutil.graph.state import state_of

_TYPE = "IdentityN"
"""The type of the ops that `tf.custom_gradient` makes."""


@dataclass(frozen=True, eq=False)
class RewiredOp:
    """An op that need not read any more what its gradient was made for.

    Attributes:
        op: the op.
        inputs: what it read when its gradient was made.
        gradient: the name of that gradient, a closure.
    """

    op: Operation
    inputs: tuple[Tensor, ...]
    gradient: str

    def stand_ins(self) -> IdentityMap[Tensor | None]:
        """Return what is read now in place of each input that is another one.

        None for a tensor that was read twice, in whose place two are read.
        """
        found: MutableIdentityMap[Tensor | None] = MutableIdentityMap()
        for before, now in zip(self.inputs, self.op.inputs, strict=True):
            same = before not in found or found[before] is now
            found[before] = now if same else None
        return IdentityMap((t, t_) for t, t_ in found.items() if t_ is not t)


def follow_inputs(op: Operation) -> Callable[[], None] | None:
    """Give an op whose inputs are about to change a gradient that follows them.

    Returns:
        What takes this back; None if the gradient of the op is no closure, or follows
        its inputs already.
    """
    gradient = gradient_registry.gradient_of(op) if op.type == _TYPE else None
    known = state_of(op.graph).rewired_ops
    if gradient is None or gradient in known:
        return None
    if not gradient_registry.is_closure(gradient):
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
        return _gradient_now(state_of(graph).rewired_ops[name], grads)

    name = gradient_registry.register(following)
    # On the graph, which the registry would keep alive as long as the process.
    known[name] = RewiredOp(op, tuple(op.inputs), gradient)
    gradient_registry.set_gradient(op, name)

    def undo() -> None:
        gradient_registry.set_gradient(op, gradient)
        known.pop(name, None)

    return undo


def _gradient_now(rewired: RewiredOp, grads: Iterable[Tensor | None]) -> list[Any]:
    """Build the gradient of an op for what it reads now, in the default graph."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    results = gradient_registry.lookup(rewired.gradient)(rewired.op, *grads)
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

    for op in graph.get_operations()[before:]:
        for index, t in enumerate(op.inputs):
            if t in stand_ins:
                set_new_input(op, index, now(t))
    flat = [now(leaf) for leaf in tf.nest.flatten(results, expand_composites=True)]
    packed = tf.nest.pack_sequence_as(results, flat, expand_composites=True)
    return list(packed)


def _within(graph: Graph, rewired: RewiredOp) -> IdentityMap[Tensor | None]:
    """Return the stand-ins as ops of a graph read them: a FuncGraph captures them."""
    stand_ins = rewired.stand_ins()
    if graph is rewired.op.graph or not is_func_graph(graph):
        return stand_ins
    return IdentityMap(
        (inside, None if stand_ins[t] is None else capture(graph, stand_ins[t]))
        for t, inside in gradient_registry.captures_of(graph)
        if t in stand_ins
    )
