"""Dead branches.

Those that no constant selects, once switches between training and inference are
constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph.call_graph import functions_of_attributes
from geutil.graph.types import Tensor
from geutil.graph.walks import node_name, tensor_name
from geutil.model.programs import ModelProgram, nodes_by_name
from geutil.model.strip.report import Stripped
from geutil.model.strip.strip_options import StripOptions, keep_of, program_of_parts
from geutil.model.to_graph import materialize
from geutil.rewrite import Any as AnyTensor
from geutil.rewrite import Const, Match, Op, Rule, constant_value, rewrite
from geutil.rewrite.rules import constant_folding, dead_branch_folding
from geutil.rewrite.rules.dead_branch import is_true
from geutil.select.walks import get_forward_walk_ops

KNOWN = frozenset(
    (
        "is_train",
        "is_training",
        "istraining",
        "keras_learning_phase",
        "learning_phase",
        "phase_train",
        "train_mode",
        "train_phase",
        "training",
        "training_mode",
    )
)
"""Default names of training switches."""
_PLACEHOLDERS = frozenset(("Placeholder", "PlaceholderV2", "PlaceholderWithDefault"))


@dataclass(frozen=True)
class Switches:
    """The switches of a program."""

    nodes: list[str]  # The names of the nodes that are constants now.
    entries: list[Stripped]


def set_switches(program: ModelProgram, options: StripOptions) -> Switches:
    """Make switches of a program constants; return them and inputs that may be."""
    nodes = nodes_by_name(program.graph_def)
    values = _named(program, nodes, options.switches)
    entries = []
    for node in program.graph_def.node:
        if node.op not in _PLACEHOLDERS or tensor_name(node.name) in program.captures:
            continue
        if not _may_switch(node) or node.name in values:
            continue
        name = _input_of(program, node.name) or node.name
        if not (_is_known(name) or _is_known(node.name)):
            if name in program.inputs:
                reason = f"pass switches={{'{name}': False}} if it selects training"
                entries.append(Stripped("kept", "switch", name, reason))
        elif options.keeps(node.name):
            entries.append(Stripped("kept", "switch", name, "it is in keep"))
        else:
            values[node.name] = (name, False)
    for placeholder, (name, value) in values.items():
        node = nodes[placeholder]
        _set(node, name, value)
        program.inputs.pop(name, None)
        entries.append(Stripped("removed", "switch", name, f"it is {value} from now"))
    return Switches(list(values), entries)


def _named(
    program: ModelProgram, nodes: Mapping[str, Any], switches: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return for the node of each switch that the caller names its name and value."""
    values = {}
    for name, value in switches.items():
        node = node_name(program.inputs.get(name, name))
        if node not in nodes or nodes[node].op not in _PLACEHOLDERS:
            names = [n for n in nodes if nodes[n].op in _PLACEHOLDERS]
            raise ModelError(
                f"there is no input or placeholder '{name}' to switch; there are "
                f"{[*program.inputs, *(n for n in names if n not in program.inputs)]}"
            )
        values[node] = (_input_of(program, node) or name, value)
    return values


def _input_of(program: ModelProgram, node: str) -> str | None:
    for name, tensor in program.inputs.items():
        if node_name(tensor) == node:
            return name
    return None


def _is_known(name: str) -> bool:
    return name.rpartition("/")[2].rstrip("_0123456789").lower() in KNOWN


def _may_switch(node: Any) -> bool:
    """Tell whether a placeholder holds one truth value; unknown shapes may be one."""
    shape = node.attr["shape"].shape
    return node.attr["dtype"].type == tf.bool.as_datatype_enum and not shape.dim


def _set(node: Any, name: str, value: Any) -> None:
    """Turn the placeholder of a switch into a constant."""
    dtype = tf.as_dtype(node.attr["dtype"].type)
    shape = tf.TensorShape(node.attr["shape"].shape)
    try:
        array = np.asarray(value, dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise ModelError(f"switch '{name}' is {dtype.name}, got {value!r}") from error
    if not shape.is_compatible_with(array.shape):
        if array.ndim or not shape.is_fully_defined():
            raise ModelError(f"switch '{name}' has shape {shape}, got {value!r}")
        # A scalar switches all elements.
        array = np.broadcast_to(array, shape.as_list())
    node.op = "Const"
    node.ClearField("attr")
    del node.input[:]
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))


_SCALAR = 8
"""Bytes of the largest values that are folded: predicates are scalars."""
_CALLS = {"If": "StatefulPartitionedCall", "StatelessIf": "PartitionedCall"}
_CASES = {"Case": "StatefulPartitionedCall", "StatelessCase": "PartitionedCall"}


def folded(program: ModelProgram, switches: Iterable[str], what: str) -> ModelProgram:
    """Return a program without the branches that constants rule out."""
    # Predicates are folded, version 1 conditionals and selections by a scalar are
    # rewritten, and functional ones become calls of the branch that runs, which are
    # inlined; then there may be more predicates to fold, and so on inwards.
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
        # A call that could not be inlined stays.
        calls |= _calls(program).keys()


def _calls(program: ModelProgram) -> dict[str, list[str]]:
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
    node = nodes[node_name(text)]
    while node.op == "Identity":
        node = nodes[node_name(node.input[0])]
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
