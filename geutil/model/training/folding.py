"""The branch of each conditional that a constant selects, and nothing of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from geutil.graph.function_attributes import functions_of_attributes
from geutil.graph.kinds import Tensor
from geutil.model.programs.materializing import materialize
from geutil.model.programs.program import Program, node_of, nodes_by_name
from geutil.model.training.working import keep_of, program_of_parts
from geutil.select.walks import get_forward_walk_ops
from geutil.transform.rewrite import Any as AnyTensor
from geutil.transform.rewrite import Const, Match, Op, Rule, constant_value, rewrite
from geutil.transform.rewrite.rules import constant_folding, dead_branch_folding
from geutil.transform.rewrite.rules.dead_branch import is_true

_SCALAR = 8
"""Bytes of the largest values that are folded: predicates are scalars."""
_CALLS = {"If": "StatefulPartitionedCall", "StatelessIf": "PartitionedCall"}
_CASES = {"Case": "StatefulPartitionedCall", "StatelessCase": "PartitionedCall"}


def folded(program: Program, switches: Iterable[str], what: str) -> Program:
    """Return a program without the branches that constants rule out.

    Predicates are folded, version 1 conditionals and selections by a scalar are
    rewritten, and functional ones become calls of the branch that runs, which are
    inlined; then there may be more predicates to fold, and so on inwards.

    Args:
        program: the program, which may be changed.
        switches: the names of the constants that decide.
        what: what it is made from, for messages.

    Raises:
        ModelError: TensorFlow refuses the graph.

    Cost: linear in nodes and edges, for each level of conditionals in conditionals.
    """
    rules = (constant_folding(max_bytes=_SCALAR), dead_branch_folding(), _selection())
    calls = set(_calls(program))
    deciding = set(switches)
    parts = materialize(program, inline=False, what=what)
    while True:
        seeds = [op for op in parts.graph.get_operations() if op.name in deciding]
        within = get_forward_walk_ops(seeds)
        report = rewrite(parts.graph, rules, ops=within, keep=keep_of(parts))
        deciding.update(name for done in report.rewritten for name in done.new_ops)
        program = program_of_parts(parts)
        _decide(program.graph_def)
        called = _calls(program)
        if called.keys() <= calls:
            return program
        keep = {f for name in calls & called.keys() for f in called[name]}
        parts = materialize(program, inline=True, keep=keep, what=what)
        program = program_of_parts(parts)
        # What could not be inlined stays a call.
        calls |= _calls(program).keys()


def _calls(program: Program) -> dict[str, list[str]]:
    """Return the functions that each call of a program calls."""
    return {
        node.name: list(functions_of_attributes(node.attr))
        for node in program.graph_def.node
        if node.op in ("PartitionedCall", "StatefulPartitionedCall")
    }


def _decide(graph_def: Any) -> None:
    """Make conditionals whose predicate is a constant calls of a branch, in place."""
    nodes = nodes_by_name(graph_def)
    for node in graph_def.node:
        if node.op not in _CALLS and node.op not in _CASES:
            continue
        value = _constant(nodes, node.input[0])
        if value is None:
            continue
        if node.op in _CALLS:
            branch = node.attr["then_branch" if is_true(value) else "else_branch"].func
            op = _CALLS[node.op]
        else:
            branches = node.attr["branches"].list.func
            index = int(value)
            # As the kernel does it: what is out of range is the last one.
            branch = branches[index if 0 <= index < len(branches) else -1]
            op = _CASES[node.op]
        _as_call(node, op, branch)


def _constant(nodes: Any, text: str) -> Any:
    node = nodes[node_of(text)]
    while node.op == "Identity":
        node = nodes[node_of(node.input[0])]
    return tf.make_ndarray(node.attr["value"].tensor) if node.op == "Const" else None


def _as_call(node: Any, op: str, branch: Any) -> None:
    call = type(node)(name=node.name, op=op, device=node.device, input=node.input[1:])
    for name in ("Tin", "Tout", "_output_shapes"):
        if name in node.attr:
            call.attr[name].CopyFrom(node.attr[name])
    call.attr["f"].func.CopyFrom(branch)
    node.CopyFrom(call)


def _selection() -> Rule:
    """Return the rule for a choice between tensors by one truth value."""
    pattern = Op(
        {"Select", "SelectV2"},
        Const("pred", where=lambda t: t.shape.rank == 0),
        AnyTensor("then"),
        AnyTensor("else"),
    )
    return Rule(pattern, _selected, name="selection")


def _selected(match: Match) -> Tensor:
    is_then = bool(constant_value(match["pred"]))
    chosen, other = match["then"], match["else"]
    if not is_then:
        chosen, other = other, chosen
    if match.root.type == "Select" or other.shape.rank == 0:
        return chosen
    if chosen.shape.is_fully_defined() and chosen.shape == match.root.outputs[0].shape:
        return chosen
    # The other one may have more elements, to which the chosen one is broadcast.
    shape = tf.broadcast_dynamic_shape(tf.shape(chosen), tf.shape(other))
    return tf.broadcast_to(chosen, shape)
