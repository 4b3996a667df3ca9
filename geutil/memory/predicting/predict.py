"""The peak of one step, from its graph alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.errors import PredictionError
from geutil.graph.grappler import optimized
from geutil.graph.identity import IdentitySet
from geutil.graph.importing import import_ops
from geutil.graph.kinds import Graph, Operation, Tensor, is_op
from geutil.graph.steps import step_graph_def, step_ops
from geutil.graph.trees import flatten
from geutil.memory.predicting.onednn import with_onednn
from geutil.memory.predicting.reading import read_program
from geutil.memory.predicting.shapes import Shapes
from geutil.memory.program import Program
from geutil.memory.simulation import simulate
from geutil.memory.timeline import Timeline
from geutil.select.lists import get_unique_graph


def predict(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    order: Iterable[Operation] | None = None,
    shapes: Any = None,
    grappler: bool = True,
) -> Timeline:
    """Predict what one step holds in memory, op by op, without running it."""
    program, scratch = step_program(
        ys_or_fetches, feeds=feeds, shapes=shapes, grappler=grappler and order is None
    )
    if order is None:
        return simulate(with_onednn(program)).timeline()
    return simulate(program, _numbers(program, order)).timeline()


def step_program(
    ys_or_fetches: Any,
    *,
    feeds: Iterable[Tensor] | None = None,
    shapes: Any = None,
    grappler: bool = True,
) -> tuple[Program, Graph]:
    fetches = [leaf for leaf in flatten(ys_or_fetches) if leaf is not None]
    graph = get_unique_graph(fetches)
    given = IdentitySet(feeds or ())
    ops = step_ops((f if is_op(f) else f.op for f in fetches), given)
    graph_def = step_graph_def(graph, ops, given)
    if grappler:
        graph_def = optimized(graph_def, [f.name for f in fetches])
    sizes = Shapes(graph, shapes)
    scratch = tf.Graph()
    import_ops(scratch, sizes.applied(graph_def), {})
    names = [f.name for f in fetches if not is_op(f)]
    fetched = [scratch.get_tensor_by_name(n) for n in names]
    program = read_program(scratch, fetched, sizes.bytes_of)
    sizes.check()
    return program, scratch


def _numbers(program: Program, order: Iterable[Operation]) -> list[int]:
    place = {node.name: i for i, node in enumerate(program.nodes)}
    return [place[op.name] for op in order if op.name in place]
