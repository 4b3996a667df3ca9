"""Dead-branch folding: conditionals whose predicate is a constant."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from geutil.graph.op_types import SWITCHES
from geutil.graph.types import Operation, Tensor, is_func_graph
from geutil.rewrite.compiling import Const, constant_value
from geutil.rewrite.matching import Match
from geutil.rewrite.patterns import Any, Op
from geutil.rewrite.rule import Replaced, Rule

MAX_BRANCH = 10_000
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
            Op(SWITCHES, Any("data"), Const("pred")),
            _passed_on,
            _is_done,
            f"{title} (Switch)",
        ),
    )


def is_true(value: np.ndarray) -> bool:
    """Tell which way an If goes: scalars by their value, other tensors by their size.

    Example:
        >>> import numpy as np
        >>> from geutil.rewrite.rules.dead_branch import is_true
        >>> is_true(np.array(0.5)), is_true(np.array(b"")), is_true(np.zeros([3]))
        (True, False, True)
    """
    return bool(value.size) if value.ndim else bool(value.item())


def _runs_anyway(match: Match) -> str | None:
    if match.root.type == "If" and is_func_graph(match.root.graph):
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
    for step in range(MAX_BRANCH):
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
