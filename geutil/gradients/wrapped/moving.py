"""Gradients that were built in one graph, moved to another that holds the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.gradients.delays import SCOPE
from geutil.gradients.step import Step, tensors_of
from geutil.gradients.updates import order_moved
from geutil.graph.identity import IdentityMap, IdentitySet, MutableIdentityMap
from geutil.graph.importing import capture
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.surroundings import ops_since
from geutil.select.views import make_view
from geutil.transform.transformer import copy_replacing


def move_gradients(
    step: Step, before: int, given: Iterable[tuple[Tensor, Tensor]], graph: Graph
) -> list[Any]:
    """Copy the backward pass of a step, with what it recomputes, to another graph.

    The other graph captures what the backward pass reads of the forward pass, and that
    is what TensorFlow holds for it: kept tensors, if the step recomputes the others.

    Args:
        step: the step; its gradients depend on seeds that were made of stand-ins.
        before: how many ops its graph had before it was built.
        given: the gradient in `graph` for each stand-in.
        graph: the other graph, a FuncGraph.

    Returns:
        The gradients of the step, in `graph`.

    Cost: linear in the ops that are copied and their inputs.
    """
    there = MutableIdentityMap(given)
    moving = _after(step.seeds, ops_since(step.graph, before))
    ops, read = _needed(tensors_of(step.gradients), moving, there)
    for t in read:
        there[t] = capture(graph, t)
    if ops:
        _, info = copy_replacing(
            make_view(ops), there, graph, SCOPE, "", reuse_dst_scope=True
        )
        order_moved(graph, (info.transformed(op) for op in ops))
        there.update((t, info.transformed(t)) for op in ops for t in op.outputs)
    return [_mapped(gradient, there) for gradient in step.gradients]


def _after(seeds: Iterable[Operation], made: Iterable[Operation]) -> set[Operation]:
    """Return the seeds and those of the ops that run after one of them."""
    after = set(seeds)
    # Edits let backward ops read copies that were made later, never the reverse.
    waiting = list(after)
    readers: dict[Operation, list[Operation]] = {}
    for op in made:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            readers.setdefault(before, []).append(op)
    while waiting:
        for op in readers.get(waiting.pop(), ()):
            if op not in after:
                after.add(op)
                waiting.append(op)
    return after


def _needed(
    tensors: Iterable[Tensor], moving: set[Operation], there: IdentityMap[Tensor]
) -> tuple[list[Operation], IdentitySet]:
    """Return the ops to copy for some tensors, and the tensors to capture."""
    read = IdentitySet()
    met: dict[Operation, None] = {}
    waiting: list[Operation] = []

    def visit(op: Operation) -> None:
        if op not in met:
            met[op] = None
            waiting.append(op)

    def visit_tensor(t: Tensor) -> None:
        if t in there:
            return
        if t.op in moving or t.op.type == "Const":
            visit(t.op)
        else:
            read.add(t)

    for t in tensors:
        visit_tensor(t)
    while waiting:
        op = waiting.pop()
        for t in op.inputs:
            visit_tensor(t)
        for control in op.control_inputs:
            if control in moving:
                visit(control)
    return list(met), read


def _mapped(gradient: Any, there: IdentityMap[Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            there[gradient.values],
            there[gradient.indices],
            None if gradient.dense_shape is None else there[gradient.dense_shape],
        )
    return None if gradient is None else there[gradient]
