"""Parameters that edits compute from parameters: computed when a program is frozen.

Protobufs are read and changed; TensorFlow computes the values, on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

import tensorflow as tf

from geutil.graph import call_graph, flat_body
from geutil.graph.creation import DERIVED
from geutil.graph.types import Graph, Operation
from geutil.graph.walks import node_name
from geutil.model import programs
from geutil.model.programs import ModelProgram
from geutil.rewrite.rules.constant_folding import (
    NEVER,
    exact_session,
    is_foldable,
    is_pure,
    on_cpu,
)

_PASSED = ("Const", "Identity")
_INTERMEDIATE = 1 << 20
"""Bytes of intermediate values in any graph: `max_bytes` of `constant_folding`."""


def fold_constants(program: ModelProgram, kept: Iterable[str]) -> None:
    """Replace the parameters that edits compute from constants by values, in place."""
    # Of all ops that follow from constants, those are replaced that are marked
    # `DERIVED` or read by such: other ops go on reading constants that have the names
    # of variables. Left as they are: what `constant_folding` never folds; ops with
    # control inputs, or in bodies of functions, which take constants as arguments; ops
    # whose values take more bytes than all that is dropped for them, are of unknown
    # size, or beyond 1 MiB and the size of the graph.
    node_by_name = programs.nodes_by_name(program.graph_def)
    marked = [node for node in node_by_name.values() if DERIVED in node.attr]
    if not marked:
        return
    # A fold may read the arithmetic of a norm as it is.
    names = {node.name for node in marked}
    names.update(node_name(text) for node in marked for text in node.input)
    ends = [*program.outputs.values(), *program.side_effects, *kept]
    uses = Counter(map(node_name, ends))
    for node in node_by_name.values():
        uses.update(map(node_name, node.input))
    candidates = _following(node_by_name)
    part = tf.compat.v1.GraphDef()
    part.node.extend(node_by_name[name] for name in candidates)
    graph = on_cpu(part)
    limit = max(_INTERMEDIATE, part.ByteSize())
    with closing(exact_session(graph)) as session:
        # Readers first: what they do not need any more is not computed.
        for op in reversed(_computable(graph, candidates, limit)):
            if op.name in names and uses[op.name] and op.type not in _PASSED:
                _replace(op, session, node_by_name, uses)
    program.keep(node_by_name.values())


def _following(node_by_name: Mapping[str, Any]) -> list[str]:
    """Return the nodes that follow from constants, in topological order."""
    found: dict[str, None] = {}
    needs = {
        name: [node_name(text) for text in node.input]
        for name, node in node_by_name.items()
    }
    for name in call_graph.needs_first(needs):
        node = node_by_name[name]
        if node.op in NEVER or not node.input:
            follows = node.op in _PASSED
        else:
            follows = is_pure(flat_body.signature_of(node.op, {}), node.attr)
        # A control input is no key of `found`; it keeps its node from being one.
        if follows and all(text.partition(":")[0] in found for text in node.input):
            found[name] = None
    return list(found)


def _computable(graph: Graph, names: Iterable[str], limit: int) -> list[Operation]:
    """Return the ops that have a result of known size, like all before them."""
    found: dict[Operation, None] = {}
    for name in names:
        op = graph.get_operation_by_name(name)
        sizes = [(t.shape.num_elements(), t.dtype.size) for t in op.outputs]
        if (
            len(op.outputs) == 1
            and all(
                count is not None and count * size <= limit for count, size in sizes
            )
            and all(tensor.op in found for tensor in op.inputs)
            and (op.type in _PASSED or is_foldable(op))
        ):
            found[op] = None
    return list(found)


def _replace(
    op: Operation, session: Any, node_by_name: dict[str, Any], uses: Counter[str]
) -> None:
    """Replace an op by a constant if it can be computed and nothing grows."""
    try:
        (value,) = session.run(op.outputs)
    except tf.errors.OpError:
        return
    const = programs.const_node(op.name, tf.constant(value, op.outputs[0].dtype))
    ended: Counter[str] = Counter()
    gone = [op.name]
    for name in gone:
        for node in map(node_name, node_by_name[name].input):
            ended[node] += 1
            if ended[node] == uses[node]:
                gone.append(node)
    if const.ByteSize() <= sum(node_by_name[name].ByteSize() for name in gone):
        for name in gone[1:]:
            del node_by_name[name]
        node_by_name[op.name] = const
        uses.subtract(ended)
