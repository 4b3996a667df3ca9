"""Stripping: a model without the parts that serve training, in its functions, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from geutil.graph.functions import bindings
from geutil.graph.op_types import FUSED_NORMS, is_random
from geutil.graph.walks import node_name
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram, nodes_behind
from geutil.model.strip import batch_norm_inference, dead_branches, side_effects
from geutil.model.strip.batch_norm_inference import Turned
from geutil.model.strip.options import StripOptions, checked_options, program_of_parts
from geutil.model.strip.report import Stripped, StripReport
from geutil.model.strip.side_effects import DIAGNOSTICS, EffectKinds, Known
from geutil.model.strip.stochastic_layers import Bypassed, bypass_layers, set_neutral
from geutil.model.to_graph import GraphParts, materialize
from geutil.select.names import LayerNames

_SHOWN = 5


def candidates_in_bodies(graph_def: Any) -> list[Stripped]:
    """Return an entry for each node whose functions hold strippable parts."""
    functions = {f.signature.name: f for f in graph_def.library.function}
    kinds = EffectKinds(functions)
    entries = []
    for node in graph_def.node:
        labels = list(_found(node, functions, kinds))
        if labels:
            more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
            reason = (
                f"its functions hold {', '.join(labels[:_SHOWN])}{more}; bodies are "
                "not stripped: edit them, or trace the function for inference"
            )
            entries.append(Stripped("kept", "body", node.name, reason))
    return entries


def _found(node: Any, functions: dict[str, Any], kinds: EffectKinds) -> Iterator[str]:
    waiting = kinds.called(node)
    seen = set(waiting)
    for name in waiting:
        for inner in functions[name].node_def:
            if _serves_training(inner):
                yield f"{inner.op} '{inner.name}'"
            for called in kinds.called(inner):
                if called not in seen:
                    seen.add(called)
                    waiting.append(called)


def _serves_training(node: Any) -> bool:
    if node.op in FUSED_NORMS:
        return bool(node.attr["is_training"].b)
    return node.op in DIAGNOSTICS or side_effects.is_write(node) or is_random(node.op)


def random_ops(graph_def: Any) -> list[Stripped]:
    """Return an entry for each random op of a graph that was left."""
    reason = "it is no part of a dropout or noise layer that geutil knows"
    remedy = (
        "pass neutral={name: value} to set it, or what is made of it, for inference"
    )
    return [
        Stripped("kept", "random", node.name, f"{reason} ({node.op}); {remedy}")
        for node in graph_def.node
        if is_random(node.op)
    ]


def strip_training(
    model: M,
    switches: Mapping[str, Any] | None,
    statistics: Mapping[str, tuple[str, str]] | None,
    keep: Iterable[str],
    neutral: Mapping[str, Any] | None,
) -> M:
    """Return a model without the parts for training; see `Model.strip_training`."""
    options = checked_options(model, switches, statistics, keep, neutral)
    names = {id(v.handle): name for name, v in model.variables.items()}
    original = model.program(checked=False)
    program, entries = _without_switches(original, options, repr(model))
    parts = materialize(program, inline=False, what=repr(model))
    names |= {id(i): names[id(o)] for o, i in bindings(parts.graph) if id(o) in names}
    turned = batch_norm_inference.turn_batch_norms(parts, options, names)
    neutralized = set_neutral(parts, options)
    bypassed = bypass_layers(parts, options)
    bypassed.entries[:0] = neutralized.entries
    bypassed.generators += neutralized.generators
    entries += [*turned.entries, *bypassed.entries]
    program = program_of_parts(parts)
    batch_norm_inference.write_fused(program.graph_def, turned.fused)
    known_effects = _known(model, parts, names, turned, bypassed)
    decision = side_effects.decide_effects(program, options, known_effects)
    named = {entry.name for entry in entries}
    entries += [entry for entry in decision.entries if entry.name not in named]
    if any(entry.action != "kept" for entry in entries):
        side_effects.prune(program, decision.dropped, decision.kept)
        entries += _drop_inputs(original, program)
    else:
        program = original
    needed = _needed(program)
    entries += random_ops(needed)
    entries += candidates_in_bodies(needed)
    entries += _unread_variables(model, program)
    removed_names = {entry.name for entry in entries if entry.kind == "variable"}
    variables = {n: v for n, v in model.variables.items() if n not in removed_names}
    result = model.derived(
        program, holdings=replace(model.holdings, variables=variables)
    )
    noted = LayerNames(model.graph).noted(entries, "name")
    result.strip_report = StripReport(tuple(noted), _dropped(original, needed))
    return result


def _without_switches(
    original: ModelProgram, options: StripOptions, what: str
) -> tuple[ModelProgram, list[Stripped]]:
    program = replace(original, inputs=dict(original.inputs))
    program.graph_def = type(original.graph_def)()
    program.graph_def.CopyFrom(original.graph_def)
    switches = dead_branches.set_switches(program, options)
    if not switches.nodes:
        return program, switches.entries
    return dead_branches.folded(program, switches.nodes, what), switches.entries


def _known(
    model: EditableModel,
    parts: GraphParts,
    names: Mapping[int, str],
    turned: Turned,
    bypassed: Bypassed,
) -> Known:
    """Return the known facts of side effects from the earlier steps."""
    inside = {id(outside): t.op.name for outside, t in bindings(parts.graph)}
    elsewhere = {
        inside[handle]: signature
        for handle, signature in _captured_elsewhere(model).items()
        if handle in inside
    }
    for op in bypassed.generators:
        elsewhere.pop(op.name, None)
    return Known(
        {u: f"the moving average of '{norm}'" for u, norm in turned.updates.items()},
        {u: f"batch norm '{norm}' is kept" for u, norm in turned.kept_updates.items()},
        {t.op.name: names[id(t)] for _, t in bindings(parts.graph) if id(t) in names},
        elsewhere,
    )


def _captured_elsewhere(model: EditableModel) -> dict[int, str]:
    """Return a signature for each tensor outside that another signature reads."""
    captured: dict[int, str] = {}
    for name, function in model.unopened_signatures().items():
        captured |= {id(t): name for t in function.captured_inputs}
    for name, other in model.opened_signatures().items():
        if name != model.signature:
            captured |= {id(t): name for t, _ in bindings(other.graph)}
    return captured


def _drop_inputs(original: ModelProgram, program: ModelProgram) -> list[Stripped]:
    """Drop the inputs that only stripped parts needed, in place."""
    before = {node.name for node in _needed(original).node}
    after = {node.name for node in _needed(program).node}
    gone = [
        name
        for name, t in program.inputs.items()
        if node_name(t) in before and node_name(t) not in after
    ]
    for name in gone:
        del program.inputs[name]
    reason = "nothing that stays reads it"
    return [Stripped("removed", "input", name, reason) for name in gone]


def _needed(program: ModelProgram) -> Any:
    """Return the graph that a call of a program runs."""
    ends = [*map(node_name, program.outputs.values()), *program.side_effects]
    stops = [node_name(t) for t in program.captures]
    graph_def = type(program.graph_def)()
    graph_def.node.extend(nodes_behind(program.graph_def, ends, stops))
    graph_def.library.CopyFrom(program.graph_def.library)
    return graph_def


def _unread_variables(model: EditableModel, program: ModelProgram) -> list[Stripped]:
    """Return the variables that no signature uses any more."""
    running = {node.name for node in _needed(program).node}
    used = {id(e) for t, e in program.captures.items() if node_name(t) in running}
    used |= _captured_elsewhere(model).keys()
    return [
        Stripped("removed", "variable", name, "no signature uses it")
        for name, v in model.variables.items()
        if id(v.handle) not in used
    ]


def _dropped(original: ModelProgram, needed: Any) -> tuple[str, ...]:
    stay = {node.name for node in needed.node}
    return tuple(n.name for n in _needed(original).node if n.name not in stay)
