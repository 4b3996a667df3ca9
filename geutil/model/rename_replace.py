"""Ends, signatures and ops of a model, renamed and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from geutil.errors import GeutilError, ModelError, SelectionError
from geutil.graph.creation import make_op_like
from geutil.graph.types import Operation, is_op, is_tensor
from geutil.graph.walks import node_name
from geutil.model.core import EditableModel, M
from geutil.model.programs import fresh_name, legal_name, rename_nodes
from geutil.rewrite import Match, Op, Rule, rewrite
from geutil.select import names
from geutil.select.queries import select_ops

Replacement = str | Callable[..., Any]


def replace_op(model: M, ops: Any, replacement: Replacement) -> M:
    """Return a model with some ops replaced; see `Model.replace_op`."""
    selected = frozenset(op.name for op in _selected(model, ops))
    result = model.derived(model.program())
    op_names = {op.name for op in result.graph.get_operations()}
    unneeded = sorted(selected - op_names)
    if unneeded:
        raise ModelError(
            f"no output of {model!r} depends on {unneeded[:10]}: replacing would "
            "change nothing"
        )

    def build(match: Match) -> list[Any]:
        return _computed(match.root, replacement)

    title = replacement if isinstance(replacement, str) else "replacement"
    rule = Rule(Op(lambda op: op.name in selected, ...), build, name=title)
    try:
        report = rewrite(result.graph, rule)
    except GeutilError as error:
        raise ModelError(f"cannot replace {sorted(selected)[:10]}: {error}") from error
    refused = [f"'{entry.op}': {entry.reason}" for entry in report.refused]
    if refused:
        raise ModelError(f"some ops cannot be replaced: {'; '.join(refused)}")
    # Once more, without the ops that were replaced.
    return result.derived(result.program())


def _selected(model: EditableModel, ops: Any) -> list[Operation]:
    """Return the ops that are selected; see `Model.replace_op`."""
    selected_ops: list[Operation] = []
    if isinstance(ops, str):
        selected_ops = [op for op in model.graph.get_operations() if op.type == ops]
    if not selected_ops and names.is_name(ops):
        selected_ops = _op_of_layer(model, ops)
    if not selected_ops:
        selected_ops = [ops] if is_op(ops) else select_ops(ops, graph=model.graph)
    own = {id(sink) for sink in model.outputs.sinks.values()}
    selected_ops = [op for op in selected_ops if id(op) not in own]
    if not selected_ops:
        types = sorted({op.type for op in model.graph.get_operations()})
        raise ModelError(
            f"{model!r} has no op of type or name {ops!r}; its types are {types}"
        )
    for op in selected_ops:
        if op.graph is not model.graph:
            raise ModelError(f"'{op.name}' is in another graph than {model!r}")
        if op.type in ("Placeholder", "VarHandleOp"):
            raise ModelError(
                f"'{op.name}' ({op.type}) stands for what comes from outside and "
                "cannot be replaced; use prepend() for inputs, or replace what reads it"
            )
    return selected_ops


def _op_of_layer(model: EditableModel, item: Any) -> list[Operation]:
    """Return the op that a layer computes with in each of its calls, or None."""
    try:
        ops = names.ops_of_layers(model.graph, item, repr(model))
    except SelectionError as error:
        raise ModelError(str(error)) from error
    computing = [op for op in ops if op.type not in _PARAMETERS]
    if len({op.type for op in computing}) > 1:
        candidates = [f"'{op.name}' ({op.type})" for op in computing[:10]]
        raise ModelError(
            f"layer '{getattr(item, 'path', getattr(item, 'name', item))}' computes "
            f"with several ops: {', '.join(candidates)}; name one of them, or replace "
            "the layer with splice"
        )
    return computing


_PARAMETERS = frozenset(("Const", "Placeholder", "ReadVariableOp", "VarHandleOp"))


def _computed(op: Operation, replacement: Replacement) -> list[Any]:
    """Return the result of the replacement for the inputs of an op."""
    if isinstance(replacement, str):
        return list(make_op_like(op, replacement).outputs)
    result = replacement(*op.inputs)
    if isinstance(result, Mapping):
        result = list(result.values())
    results = list(result) if isinstance(result, list | tuple) else [result]
    results = [t if is_tensor(t) else tf.convert_to_tensor(t) for t in results]
    if len(results) != len(op.outputs):
        raise ModelError(
            f"the replacement of '{op.name}' returns {len(results)} tensors; the op "
            f"has {len(op.outputs)} outputs"
        )
    return results


def rename(
    model: M,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    signature: str | None,
) -> M:
    """Return a model with other names; see `Model.rename`."""
    new_inputs = _renamed(model.inputs, inputs, "input")
    new_outputs = _renamed(model.outputs, outputs, "output")
    if signature is not None and signature != model.signature:
        if signature in model.signatures:
            raise ModelError(
                f"{model!r} has a signature '{signature}' already; rename that "
                "one first"
            )
        if not signature:
            raise ModelError("a signature needs a name")
    program = model.program()
    tensors = list(program.inputs.values())
    program.inputs = dict(zip(new_inputs, tensors, strict=True))
    program.outputs = dict(zip(new_outputs, program.outputs.values(), strict=True))
    node_names = {node.name for node in program.graph_def.node}
    placeholders = {}
    for old, new in inputs.items():
        if new != old:
            before = node_name(program.inputs[new])
            placeholders[before] = fresh_name(node_names, legal_name(new))
            node_names.add(placeholders[before])
    rename_nodes(program, placeholders)
    return model.derived(program, signature=signature)


def _renamed(ends: Iterable[str], new_names: Mapping[str, str], kind: str) -> list[str]:
    old_names = list(ends)
    for old, new in new_names.items():
        if old not in old_names:
            raise ModelError(f"there is no {kind} '{old}'; there are {old_names}")
        if not new:
            raise ModelError(f"{kind} '{old}' needs a name")
    renamed = [new_names.get(name, name) for name in old_names]
    twice = sorted({name for name in renamed if renamed.count(name) > 1})
    if twice:
        raise ModelError(f"two {kind}s would be called {twice}; choose other names")
    return renamed
