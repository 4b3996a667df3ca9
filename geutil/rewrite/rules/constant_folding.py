"""Constant folding, with the values that TensorFlow itself computes on the CPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import adjacency, call_graph, creation, op_types
from geutil.graph.types import Graph, Operation, is_reference, scope_basename
from geutil.graph.walks import data_inputs
from geutil.rewrite.matching import Match
from geutil.rewrite.patterns import Op
from geutil.rewrite.rule import Replaced, Rule

NEVER = op_types.FAKE_QUANT | frozenset(
    {
        # Sources, and what may be fed.
        "Const",
        "Placeholder",
        "PlaceholderV2",
        "PlaceholderWithDefault",
        # Passes a constant on: a copy of it would gain nothing.
        "Identity",
        # Kept for what they say, not for what they compute.
        "QuantizeAndDequantizeV2",
        "QuantizeAndDequantizeV3",
        "QuantizeAndDequantizeV4",
        # Control flow of version 1.
        "Switch",
        "Merge",
        "Enter",
        "Exit",
        "NextIteration",
        "LoopCond",
    }
)
"""Types that are never folded, besides stateful ops and ops that call functions."""


def constant_folding(
    *, max_ops: int = 16, max_bytes: int = 1 << 20, exclude: Collection[str] = ()
) -> Rule:
    """Return a rule that replaces an op that depends on constants alone by its value.

    The op is folded together with the ops above it, and TensorFlow computes them on the
    CPU. Larger subgraphs are folded from the top down, piece by piece. The new constant
    waits for the control inputs of the folded ops.

    Never folded: stateful ops (variables, assertions), random ops, ops that call
    functions, placeholders, fake quantization, references, resources and variants, ops
    of version 1 control flow, and Identity ops (which pass constants on as it is).

    Refused: an output is larger than `max_bytes`, or of unknown shape; ops run in
    different control-flow contexts; TensorFlow cannot compute the value.

    Args:
        max_ops: how many ops are folded at once at most.
        max_bytes: how many bytes each output of a folded op may have.
        exclude: further types that are not folded.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import constant_value, rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        ...     y = x + tf.sqrt(tf.constant(2.0) * 8.0)
        >>> report = rewrite(graph, rules.constant_folding())
        >>> constant_value(y.op.inputs[1])
        array(4., dtype=float32)
    """
    excluded = NEVER.union(exclude)

    def depends_on_constants(op: Operation) -> bool:
        return (
            op.type not in excluded
            and bool(op.inputs)
            and _subgraph(op, max_ops, excluded) is not None
        )

    def objection(match: Match) -> str | None:
        return _objection(_found(match), match.root, max_bytes)

    def fold(match: Match) -> Replaced:
        return _fold(_found(match), match.root)

    def _found(match: Match) -> _ConstantPart:
        subgraph = _subgraph(match.root, max_ops, excluded)
        return subgraph or _ConstantPart([], [])

    return Rule(
        Op(depends_on_constants), fold, objection, "constant_folding", reach=max_ops
    )


@dataclass(frozen=True, eq=False)
class _ConstantPart:
    """Ops to fold, the last first, and the constants that they begin with."""

    ops: list[Operation]
    constants: list[Operation]


def _subgraph(
    root: Operation, max_ops: int, excluded: Collection[str]
) -> _ConstantPart | None:
    """Return the ancestors of `root`, or None unless they are few ops and constants."""
    ops: dict[Operation, None] = {root: None}
    constants: dict[Operation, None] = {}
    queue = [root]
    # Depth first: the next input of a chain tells soonest that it is too long.
    while queue:
        op = queue.pop()
        for tensor in op.inputs:
            producer = tensor.op
            kind = producer.type
            if kind == "Const":
                constants[producer] = None
            elif kind == "Identity" or (kind not in excluded and producer.inputs):
                if producer not in ops:
                    if len(ops) == max_ops:
                        return None
                    ops[producer] = None
                    queue.append(producer)
            else:
                return None
    if not all(op.type == "Identity" or is_foldable(op) for op in ops):
        return None
    return _ConstantPart(list(ops), list(constants))


def is_foldable(op: Operation) -> bool:
    """Tell whether an op computes values, always the same, from values."""
    tensors = (*op.inputs, *op.outputs)
    return is_pure(op.op_def, op.node_def.attr) and not any(
        is_reference(t) or t.dtype in (tf.resource, tf.variant) for t in tensors
    )


def is_pure(op_def: Any, attributes: Any) -> bool:
    """Tell whether an op of this signature, None if unknown, has no state."""
    # Random numbers by a seed depend on the device that draws them.
    return (
        op_def is not None
        and not op_def.is_stateful
        and not op_def.name.startswith("Stateless")
        and not any(call_graph.functions_of_attributes(attributes))
    )


def _objection(subgraph: _ConstantPart, root: Operation, max_bytes: int) -> str | None:
    for op in (*subgraph.ops, *subgraph.constants):
        if adjacency.control_flow_context(op) is not adjacency.control_flow_context(
            root
        ):
            return f"'{op.name}' runs in another control-flow context"
    for op in subgraph.ops:
        for tensor in op.outputs:
            count = tensor.shape.num_elements()
            if count is None:
                return f"the size of '{tensor.name}' is not known"
            if count * tensor.dtype.size > max_bytes:
                return f"'{tensor.name}' has {count * tensor.dtype.size} bytes"
    return None


def _fold(subgraph: _ConstantPart, root: Operation) -> Replaced:
    """Return constants in the place of an op's outputs, or why there are none."""
    try:
        values = _evaluate(subgraph, root)
    except (tf.errors.OpError, ValueError) as error:
        return f"TensorFlow cannot compute it: {str(error).splitlines()[0]}"
    awaited = dict.fromkeys(
        c
        for op in (*subgraph.ops, *subgraph.constants)
        for c in adjacency.control_inputs(op)
    )
    members = {*subgraph.ops, *subgraph.constants}
    # Ops that waited for an op outside asked for an order, which the constants keep.
    with root.graph.control_dependencies([c for c in awaited if c not in members]):
        return [
            tf.constant(value, tensor.dtype, name=scope_basename(root.name))
            for tensor, value in zip(root.outputs, values, strict=True)
        ]


def _evaluate(subgraph: _ConstantPart, root: Operation) -> list[np.ndarray]:
    graph_def = creation.graph_def_of(root.graph, [*subgraph.constants, *subgraph.ops])
    names: list[str] = [tensor.name for tensor in root.outputs]
    with exact_session(on_cpu(graph_def)) as session:
        values: list[np.ndarray] = session.run(names)
    return values


def on_cpu(graph_def: Any) -> Graph:
    """Return a graph of some nodes, which are changed: on the CPU, waiting for none."""
    for node in graph_def.node:
        node.device = "/CPU:0"
        node.attr.pop("_class", None)
        # Control inputs come last; the part is computed without what it waits for.
        node.input[:] = data_inputs(node.input)
    with tf.device(None), creation.new_graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
    return graph


def exact_session(graph: Graph) -> Any:
    """Return a session that runs each op as it is, which Grappler does not."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return tf.compat.v1.Session(graph=graph, config=config)
