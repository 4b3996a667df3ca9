"""Constant folding, with the values that TensorFlow computes, and dead branches.

A conditional whose predicate is a constant is replaced by the branch that runs. Values
are those of TensorFlow's kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import adjacency, creation, op_types, protos, types
from geutil.graph.op_types import SWITCHES
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import data_inputs
from geutil.rewrite.matcher import Match
from geutil.rewrite.patterns import Any as AnyPattern
from geutil.rewrite.patterns import Const, Op, constant_value
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
    """Return whether an op computes values, always the same, from values."""
    tensors = (*op.inputs, *op.outputs)
    return is_pure(op.op_def, op.node_def.attr) and not any(
        types.is_reference(t) or t.dtype in (tf.resource, tf.variant) for t in tensors
    )


def is_pure(op_def: Any, attributes: Any) -> bool:
    """Return whether an op of this signature, None if unknown, has no state."""
    # Random numbers by a seed depend on the device that draws them.
    return (
        op_def is not None
        and not op_def.is_stateful
        and not op_def.name.startswith("Stateless")
        and not any(protos.functions_of_attributes(attributes))
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
            tf.constant(value, tensor.dtype, name=types.scope_basename(root.name))
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


_MAX_BRANCH = 10_000
"""Ops of a branch that are looked at to find the Switch which makes it dead."""
_LOOP = frozenset({"Enter", "RefEnter", "NextIteration", "RefNextIteration"})


def dead_branch_folding() -> tuple[Rule, ...]:
    """Return rules that keep the branch that runs, where a constant decides.

    - An If or StatelessIf becomes a call of its branch.
    - Of version 1 conditionals, whoever reads a Merge reads the branch that runs, and
      that branch reads the inputs of its Switch ops. The other branch stays, without
      readers.

    Refused: an If with a state in a function that is being traced, because TensorFlow
    would run the old one too; a Merge that no constant decides, of a loop, of a branch
    of over 10,000 ops, or of a branch that ends in a conditional of its own.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import rewrite, rules
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2])
        ...     pred = tf.constant(True)
        ...     y = tf.cond(pred, lambda: tf.exp(x), lambda: tf.sin(x))
        ...     z = tf.negative(y)
        >>> report = rewrite(graph, rules.dead_branch_folding())
        >>> report.counts["dead_branch_folding (If)"]
        (1, 0)
    """
    title = "dead_branch_folding"
    return (
        Rule(
            Op({"If", "StatelessIf"}, Const("pred"), ...),
            _call,
            _runs_anyway,
            f"{title} (If)",
        ),
        Rule(Op({"Merge", "RefMerge"}), _live_input, name=f"{title} (Merge)"),
        Rule(
            Op(SWITCHES, AnyPattern("data"), Const("pred")),
            _passed_on,
            _is_done,
            f"{title} (Switch)",
        ),
    )


def is_true(value: np.ndarray) -> bool:
    """Return whether an If runs its first branch: scalars by value, others by size.

    Example:
        >>> import numpy as np
        >>> from geutil.rewrite.rules.constant_folding import is_true
        >>> is_true(np.array(0.5)), is_true(np.array(b"")), is_true(np.zeros([3]))
        (True, False, True)
    """
    return bool(value.size) if value.ndim else bool(value.item())


def _runs_anyway(match: Match) -> str | None:
    if match.root.type == "If" and types.is_func_graph(match.root.graph):
        return (
            "it has a state, and TensorFlow runs every op of a function that has one: "
            "the old If would go on running"
        )
    return None


def _call(match: Match) -> Replaced:
    """Call the branch that runs."""
    op = match.root
    branch = "then_branch" if is_true(constant_value(match["pred"])) else "else_branch"
    # The branches of an `If` may change state, those of a `StatelessIf` may not.
    call = (
        tf.raw_ops.StatefulPartitionedCall
        if op.type == "If"
        else tf.raw_ops.PartitionedCall
    )
    results = call(
        args=list(op.inputs)[1:],
        Tout=op.get_attr("Tout"),
        f=op.get_attr(branch).name,
    )
    return list(results) if op.outputs else results


def _is_done(match: Match) -> str | None:
    if not _live_output(match.root).consumers():
        return "nobody reads its live output"
    return None


def _live_output(switch: Operation) -> Tensor:
    return switch.outputs[int(is_true(constant_value(switch.inputs[1])))]


def _passed_on(match: Match) -> Replaced:
    """Let readers of the live output read the Switch's input; the dead one stays."""
    live = _live_output(match.root)
    return [match["data"] if t is live else None for t in match.root.outputs]


def _live_input(match: Match) -> Replaced:
    """Return the one input of a Merge that is not dead, and its number."""
    merge = match.root
    tensors = list(merge.inputs)
    if len(tensors) != 2:
        return f"it has {len(tensors)} inputs, not one for each branch"
    if any(t.op.type in _LOOP for t in tensors):
        return "it is part of a loop"
    dead = _dead_input(tensors)
    if dead is None:
        return "no constant decides between its inputs"
    index = None
    if merge.outputs[1].consumers():
        index = tf.constant(1 - dead, merge.outputs[1].dtype, name="value_index")
    return [tensors[1 - dead], index]


def _dead_input(tensors: list[Tensor]) -> int | None:
    """Return which of two tensors a constant predicate makes dead, or None."""
    # Both branches are searched in turn, so a short one is done when it is.
    queues = [[t] for t in tensors]
    seen: list[set[Operation]] = [set(), set()]
    for step in range(_MAX_BRANCH):
        if all(step >= len(queue) for queue in queues):
            break
        for index, queue in enumerate(queues):
            if step < len(queue) and _grow(queue, queue[step], seen[index]):
                return index
    return None


def _grow(queue: list[Tensor], tensor: Tensor, seen: set[Operation]) -> bool:
    """Queue the ancestors of a tensor; tell whether it is dead."""
    op = tensor.op
    if op.type in SWITCHES:
        return Const().accepts(op.inputs[1]) and tensor is not _live_output(op)
    if op in seen:
        return False
    seen.add(op)
    if op.type not in ("Merge", "RefMerge"):
        queue.extend(op.inputs)
        # The op of a control input decides too; any of its outputs tells.
        queue.extend(
            c.outputs[0]
            for c in op.control_inputs
            if c.outputs and c.type not in SWITCHES
        )
    return False
