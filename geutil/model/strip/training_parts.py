"""Stripping: a model without the parts that serve training, in its functions, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, SelectionError
from geutil.graph.functions import bindings
from geutil.graph.op_types import FUSED_NORMS, NORMAL_DRAWS, UNIFORM_DRAWS, is_random
from geutil.graph.types import Operation, Tensor, as_list, is_in_scope
from geutil.graph.walks import closure, node_name
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram, nodes_behind
from geutil.model.strip import inference_form, side_effects
from geutil.model.strip.inference_form import Turned
from geutil.model.strip.side_effects import DIAGNOSTICS, PASSING, EffectKinds, Known
from geutil.model.strip.strip_report import StripOptions, Stripped, StripReport
from geutil.model.to_graph import GraphParts, keep_of, materialize, program_of_parts
from geutil.rewrite import Any as AnyTensor
from geutil.rewrite import Match, Op, RewriteReport, Rule, rewrite
from geutil.rewrite.rules.dropout import dropout_removal, noise_removal
from geutil.select import names as layer_names
from geutil.select.names import LayerNames
from geutil.select.walks import get_backward_walk_ops

_CHECK = "check"
_DROPOUT = "dropout_removal"


@dataclass
class Bypassed:
    """The ops that were bypassed."""

    entries: list[Stripped] = field(default_factory=list)
    # The ops that yield the handles of the variables which the random numbers of the
    # bypassed ops were seeded from.
    generators: list[Operation] = field(default_factory=list)


def set_neutral(parts: GraphParts, options: StripOptions) -> Bypassed:
    """Let ops yield the values that the caller gives for inference, in place."""
    if not options.neutral:
        return Bypassed()

    def is_named(op: Operation) -> bool:
        return op.name in options.neutral

    def replacement(match: Match) -> Tensor | str:
        return _neutral(match.root, options.neutral[match.root.name])

    rule = Rule(Op(is_named), replacement, name="neutral")
    report = rewrite(parts.graph, rule, keep=keep_of(parts))
    if report.refused:
        first = report.refused[0]
        raise ModelError(
            f"neutral: '{first.op}' cannot be {options.neutral[first.op]!r}: "
            f"{first.reason}"
        )
    done = {entry.op for entry in report.rewritten}
    entries = []
    for name, value in options.neutral.items():
        if name not in done:
            entries.append(Stripped("kept", "random", name, "no output needs it"))
            continue
        reason = (
            "an input passes through" if value is None else f"it is {value} from now"
        )
        if any(t.consumers() for t in parts.graph.get_operation_by_name(name).outputs):
            reason += "; it runs on for its shape, which is not known before"
        entries.append(Stripped("turned", "random", name, reason))
    return Bypassed(entries, _generators(parts, report))


def _neutral(op: Operation, value: Any) -> Tensor | str:
    """Return the result of an op at inference, or why there is none."""
    if len(op.outputs) != 1:
        return f"it has {len(op.outputs)} results; name an op with one"
    (result,) = op.outputs
    if value is None:
        for t in op.inputs:
            if t.dtype == result.dtype and t.shape.is_compatible_with(result.shape):
                return t
        return "no input has the type and the shape of its result; pass a number"
    try:
        number = tf.constant(value, result.dtype, [])
    except (TypeError, ValueError) as error:
        return f"its result is {result.dtype.name} ({error})"
    if result.shape.is_fully_defined():
        return tf.fill(result.shape, number)
    # Else the op goes on running, for its shape.
    draws = op.type in UNIFORM_DRAWS | NORMAL_DRAWS
    is_told = draws and not op.type.startswith("Stateful")
    return tf.fill(op.inputs[0] if is_told else tf.shape(result), number)


def bypass_layers(parts: GraphParts, options: StripOptions) -> Bypassed:
    """Let dropout, noise and checks pass on their input, in place."""
    check = Rule(
        Op(PASSING, AnyTensor("x"), ...), lambda match: match["x"], name=_CHECK
    )
    rules = (dropout_removal(), noise_removal(), check)
    retained_ops = [op for op in parts.graph.get_operations() if options.keeps(op.name)]
    report = rewrite(parts.graph, rules, keep=[*keep_of(parts), *retained_ops])
    bypassed = Bypassed(generators=_generators(parts, report))
    for done in report.rewritten:
        reason = "what it gets passes through unchanged"
        bypassed.entries.append(Stripped("removed", _kind(done.rule), done.op, reason))
    for refused in report.refused:
        bypassed.entries.append(
            Stripped("kept", _kind(refused.rule), refused.op, refused.reason)
        )
    return bypassed


def _kind(rule: str) -> str:
    if rule == _CHECK:
        return "diagnostic"
    return "dropout" if rule.startswith(_DROPOUT) else "noise"


def _generators(parts: GraphParts, report: RewriteReport) -> list[Operation]:
    """Return the handles that the seeds of bypassed random ops are read from."""
    seeds = []
    for done in report.rewritten:
        for name in done.ops:
            op = parts.graph.get_operation_by_name(name)
            if is_random(op.type):
                # The first input of stateless ops is the shape.
                is_stateless = op.type.startswith("Stateless")
                seeds += list(op.inputs)[1 if is_stateless else 0 :]
    if not seeds:
        return []
    behind = get_backward_walk_ops(seeds)
    return [t.op for op in behind for t in op.inputs if t.dtype.name == "resource"]


# Names that a message lists; the rest is counted.
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
    def called(name: str) -> list[str]:
        return [c for inner in functions[name].node_def for c in kinds.called(inner)]

    for name in closure(kinds.called(node), called):
        for inner in functions[name].node_def:
            if _serves_training(inner):
                yield f"{inner.op} '{inner.name}'"


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


def checked_options(
    model: EditableModel,
    switches: Mapping[str, Any] | None,
    statistics: Mapping[str, tuple[str, str]] | None,
    keep: Iterable[Any],
    neutral: Mapping[str, Any] | None,
) -> StripOptions:
    """Return the options."""
    scopes = [scope for item in as_list(keep) for scope in _scopes(model, item)]
    op_names = {op.name for op in model.graph.get_operations()}
    inputs = {t.op.name for t in model.inputs.values()}
    for name in neutral or {}:
        if name in inputs:
            raise ModelError(f"neutral: '{name}' is an input; pass it in switches")
        if name not in op_names:
            raise ModelError(
                f"neutral: {model!r} has no op '{name}'; "
                f"{layer_names.similar(model.graph, name)}"
            )
    return StripOptions(
        dict(switches or {}),
        _variables(model, statistics or {}),
        tuple(scopes),
        dict(neutral or {}),
    )


def _scopes(model: EditableModel, item: Any) -> tuple[str, ...]:
    """Return the scopes of an item of `keep`: an op, a name scope, a layer."""
    graph = model.graph
    try:
        scopes = layer_names.scopes_meant([graph], item, repr(model)) or ("",)
    except SelectionError as error:
        raise ModelError(f"keep: {error}") from error
    if not any(is_in_scope(op.name, scopes) for op in graph.get_operations()):
        name = str(getattr(item, "name", item))
        raise ModelError(
            f"keep: {model!r} has no op, name scope, or layer with ops, '{name}'; "
            f"{layer_names.similar(graph, name)}"
        )
    return scopes


def _variables(
    model: EditableModel, statistics: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[tf.Variable, tf.Variable]]:
    variables_by_norm = {}
    for norm, pair in statistics.items():
        for name in pair:
            if name not in model.variables:
                raise ModelError(
                    f"statistics: {model!r} has no variable '{name}' for '{norm}'; it "
                    f"has {list(model.variables)[:20]}"
                )
        mean, variance = pair
        variables_by_norm[norm] = (model.variables[mean], model.variables[variance])
    return variables_by_norm


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
    turned = inference_form.turn_batch_norms(parts, options, names)
    neutralized = set_neutral(parts, options)
    bypassed = bypass_layers(parts, options)
    bypassed.entries[:0] = neutralized.entries
    bypassed.generators += neutralized.generators
    entries += [*turned.entries, *bypassed.entries]
    program = program_of_parts(parts)
    inference_form.write_fused(program.graph_def, turned.fused)
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
    switches = inference_form.set_switches(program, options)
    if not switches.nodes:
        return program, switches.entries
    return inference_form.folded(program, switches.nodes, what), switches.entries


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
