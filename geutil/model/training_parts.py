"""Stripping: a model without the parts that serve training, in its functions, too.

Side effects that outputs need stay, others go with all that served them: writes of
variables that nothing reads, reports and assertions serve training and diagnosis alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from geutil.errors import ModelError, SelectionError
from geutil.graph.functions import bindings
from geutil.graph.op_types import (
    ENTERS,
    FUSED_NORMS,
    MERGES,
    NORMAL_DRAWS,
    RANDOM_STATE,
    UNIFORM_DRAWS,
    is_random,
)
from geutil.graph.protos import Effects, functions_of_attributes
from geutil.graph.types import Operation, Tensor, as_list, is_in_scope
from geutil.graph.walks import closure, data_inputs, node_name, walk
from geutil.model import inference_form, programs
from geutil.model.core import EditableModel, M
from geutil.model.inference_form import StripOptions, Stripped, StripReport, Turned
from geutil.model.programs import ModelProgram, nodes_behind
from geutil.model.to_graph import GraphParts, keep_of, materialize, program_of_parts
from geutil.rewrite import Any as AnyTensor
from geutil.rewrite import Match, Op, RewriteReport, Rule, rewrite
from geutil.rewrite.rules.dropout import dropout_removal, noise_removal
from geutil.select import selections as layer_names
from geutil.select.selections import LayerNames
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
        Op(_PASSING, AnyTensor("x"), ...), lambda match: match["x"], name=_CHECK
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
    return node.op in _DIAGNOSTICS or _is_write(node) or is_random(node.op)


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
    decision = _decide_effects(program, options, known_effects)
    named = {entry.name for entry in entries}
    entries += [entry for entry in decision.entries if entry.name not in named]
    if any(entry.action != "kept" for entry in entries):
        prune(program, decision.dropped, decision.kept)
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
    graph_def = programs.subgraph(original.graph_def, original.graph_def.node)
    program = replace(original, graph_def=graph_def, inputs=dict(original.inputs))
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
) -> _KnownNodes:
    """Return the known facts of side effects from the earlier steps."""
    inside = {id(outside): t.op.name for outside, t in bindings(parts.graph)}
    elsewhere = {
        inside[handle]: signature
        for handle, signature in _captured_elsewhere(model).items()
        if handle in inside
    }
    for op in bypassed.generators:
        elsewhere.pop(op.name, None)
    return _KnownNodes(
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
    before = programs.needed_names(original)
    after = programs.needed_names(program)
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
    behind = nodes_behind(program.graph_def, ends, stops)
    return programs.subgraph(program.graph_def, behind)


def _unread_variables(model: EditableModel, program: ModelProgram) -> list[Stripped]:
    """Return the variables that no signature uses any more."""
    running = programs.needed_names(program)
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


_SWITCHES = frozenset(("RefSwitch", "Switch", "_SwitchN"))


def prune(program: ModelProgram, dropped: Iterable[str], kept: Iterable[str]) -> None:
    """Drop nodes, and those that outputs and kept effects do not need, in place."""
    # A node is waited for no more, unless an effect that stays happens before it, its
    # value is needed anyway, or it decides whether the waiting node runs: the branches
    # and loops of version 1 are held together by such edges.
    graph_def = programs.subgraph(program.graph_def, program.graph_def.node)
    nodes = programs.nodes_by_name(graph_def)
    effects = list(kept)
    stops = [node_name(t) for t in program.captures]
    roots = [*map(node_name, program.outputs.values()), *effects]
    needed = programs.values_behind(nodes, roots)
    # Nobody needs what is computed from a dropped node; it can only be waited for.
    emptied = programs.nodes_ahead(graph_def, dropped, data_only=True)
    for name in emptied:
        as_no_op(nodes[name], nodes)
    effective = programs.nodes_ahead(graph_def, effects)
    awaited = effective | programs.nodes_ahead(graph_def, _of_types(graph_def, ENTERS))
    # A conditional ends at its Merge, whose output is there whichever branch ran.
    awaited |= programs.nodes_ahead(
        graph_def, _of_types(graph_def, _SWITCHES), until=MERGES
    )
    awaited_or_needed = awaited | needed.keys()
    for node in graph_def.node:
        # An emptied node need not wait for its old inputs.
        before = awaited if node.name in emptied else awaited_or_needed
        inputs = [t for t in node.input if t[0] != "^" or node_name(t) in before]
        if len(inputs) < len(node.input):
            node.input[:] = inputs
    program.side_effects = [n for n in program.side_effects if n in effective]
    unread = map(node_name, program.inputs.values())
    ends = [*roots, *program.side_effects, *unread]
    program.graph_def = programs.subgraph(
        graph_def, programs.nodes_behind(graph_def, ends, stops)
    )


def as_no_op(node: Any, nodes: Container[str]) -> None:
    """Make a node one that only waits, for all nodes that it waited for or read."""
    before = dict.fromkeys(map(node_name, node.input))
    node.CopyFrom(type(node)(name=node.name, op="NoOp", device=node.device))
    # Arguments of a function cannot be waited for.
    node.input.extend(f"^{name}" for name in before if name in nodes)


def _of_types(graph_def: Any, types: frozenset[str]) -> list[str]:
    return [node.name for node in graph_def.node if node.op in types]


Kind: TypeAlias = Literal["diagnostic", "write", "other"]

_PASSING = frozenset(
    (
        "CheckNumerics",
        "CheckNumericsV2",
        "DebugIdentity",
        "DebugIdentityV2",
        "DebugIdentityV3",
        "Print",
    )
)
"""Diagnostics that pass their first input on."""
_SUMMARIES = ("Audio", "Histogram", "Image", "Merge", "Scalar", "Tensor")
_DIAGNOSTICS = _PASSING | frozenset(
    (
        "Assert",
        "CloseSummaryWriter",
        "CreateSummaryDbWriter",
        "CreateSummaryFileWriter",
        "FlushSummaryWriter",
        "ImportEvent",
        "PrintV2",
        "SummaryWriter",
        "WriteRawProtoSummary",
        "WriteSummary",
        "WriteGraphSummary",
        *(f"{kind}Summary{version}" for kind in _SUMMARIES for version in ("", "V2")),
        *(f"Write{kind}Summary" for kind in _SUMMARIES),
    )
)
_TRAINING = ("ResourceApply", "ResourceSparseApply")
_WRITES = (
    "AssignAddVariable",
    "AssignSubVariable",
    "AssignVariable",
    "ResourceScatter",
)


def _is_training_write(node: Any) -> bool:
    """Return whether a node is the step of an optimizer."""
    return bool(node.op.startswith(_TRAINING))


def _is_write(node: Any) -> bool:
    """Return whether a node changes the variable that its first input is."""
    return node.op in RANDOM_STATE or node.op.startswith((*_TRAINING, *_WRITES))


class EffectKinds:
    """Tells of each node which kinds of effects it has."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._effects = Effects(functions)
        self._functions = functions
        self._callees: dict[str, dict[str, None]] = {name: {} for name in functions}
        self._kinds: dict[str, dict[Kind, None]] = {name: {} for name in functions}
        for name, function in functions.items():
            for node in function.node_def:
                self._callees[name] |= dict.fromkeys(self.called(node))
                self._kinds[name] |= dict.fromkeys(self._by_itself(node))

    def called(self, node: Any) -> list[str]:
        """Return the functions that a node may call."""
        names = [*functions_of_attributes(node.attr), node.op]
        return [name for name in names if name in self._functions]

    def of(self, node: Any) -> tuple[Kind, ...]:
        """Return the kinds of effects of a node; none if it only computes."""
        run = closure(self.called(node), self._callees.__getitem__)
        kinds = dict.fromkeys(kind for name in run for kind in self._kinds[name])
        return tuple(kinds | dict.fromkeys(self._by_itself(node)))

    def _by_itself(self, node: Any) -> tuple[Kind, ...]:
        """Return the kinds of a node besides those of the functions that it calls."""
        # A RemoteCall, or what saves a dataset, does more than its function.
        if self.called(node) and self._effects.depends(node):
            return ()
        if node.op in _DIAGNOSTICS:
            return ("diagnostic",)
        if _is_write(node):
            return ("write",)
        return ("other",) if self._effects.of(node) else ()


_HANDING_ON = frozenset(("Enter", "Identity", "Switch"))


@dataclass
class _KnownNodes:
    """_KnownNodes facts of side effects before their graph is looked at."""

    # For nodes that go in any case the reason.
    dropped: dict[str, str] = field(default_factory=dict)
    # For nodes that stay in any case the reason.
    kept: dict[str, str] = field(default_factory=dict)
    # The name of each variable by the node of its handle.
    variable_names: Mapping[str, str] = field(default_factory=dict)
    # For nodes of handles the signature that reads the variable too.
    read_elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Decision:
    """Nodes with side effects: those that go, and those that stay."""

    dropped: list[str]  # The names of those that go.
    kept: list[str]  # The names of those that stay.
    entries: list[Stripped]


def _decide_effects(
    program: ModelProgram, options: StripOptions, known_effects: _KnownNodes
) -> _Decision:
    """Decide about each node with a side effect that a call of a program runs."""
    return _Decider(program, options, known_effects).decide()


class _Decider:
    """The state of one decision."""

    # A write of a variable is pending until something that stays reads the variable.

    def __init__(
        self, program: ModelProgram, options: StripOptions, known_effects: _KnownNodes
    ) -> None:
        graph_def = program.graph_def
        functions = {f.signature.name: f for f in graph_def.library.function}
        self._nodes = programs.nodes_by_name(graph_def)
        self._outputs = [node_name(t) for t in program.outputs.values()]
        self._handles = frozenset(node_name(t) for t in program.captures)
        ends = [*self._outputs, *program.side_effects]
        self._running = programs.nodes_behind(graph_def, ends, self._handles)
        self._options = options
        self._known = known_effects
        self._kinds = EffectKinds(functions)
        self._needed: set[str] = set()
        self._read: set[str] = set()
        self._pending: dict[str, list[str]] = {}
        self._dropped: dict[str, Stripped] = {}
        # None for a node that stays without a line in the report.
        self._kept: dict[str, Stripped | None] = {}

    def decide(self) -> _Decision:
        """Decide about each node: first those that surely stay, then pending writes."""
        self._need(self._outputs)
        for node in self._running:
            kinds = self._kinds.of(node)
            if kinds:
                self._judge(node, kinds)
        self._need(self._kept)
        # A variable may have been read before its write became pending.
        for variable in list(self._pending):
            if variable in self._read:
                self._need(self._keep_writes(variable))
        for variable, names in self._pending.items():
            reason = f"nothing that stays reads '{self._shown(variable)}'"
            for name in names:
                self._drop(name, "side effect", reason)
        decided = {**self._dropped, **self._kept}
        entries = [decided.get(node.name) for node in self._running]
        return _Decision(
            list(self._dropped),
            list(self._kept),
            [entry for entry in entries if entry is not None],
        )

    def _judge(self, node: Any, kinds: tuple[Kind, ...]) -> None:
        """Drop a node with an effect, keep it, or let it be pending."""
        name, known_effects = node.name, self._known
        kind = "diagnostic" if kinds == ("diagnostic",) else "side effect"
        if self._options.keeps(name):
            self._keep(name, kind, "it is in keep")
        elif name in known_effects.kept:
            self._keep(name, kind, known_effects.kept[name])
        elif name in known_effects.dropped:
            self._drop(name, kind, known_effects.dropped[name])
        elif name in self._needed:
            if kinds == ("other",):
                # It computes something, and nothing tells that it serves training.
                self._kept[name] = None
            else:
                self._keep(name, kind, "outputs are computed from what it gives")
        elif kind == "diagnostic":
            self._drop(name, kind, f"{node.op} only checks or reports")
        elif _is_training_write(node):
            self._drop(name, kind, f"it trains '{self._shown(self._variable(node))}'")
        elif _is_write(node):
            self._judge_write(node)
        else:
            self._keep(name, kind, f"{node.op} may serve more than training")

    def _judge_write(self, node: Any) -> None:
        variable = self._variable(node)
        if variable in self._known.read_elsewhere:
            other = self._known.read_elsewhere[variable]
            reason = f"signature '{other}' uses '{self._shown(variable)}'"
            self._keep(node.name, "side effect", reason)
        else:
            self._pending.setdefault(variable, []).append(node.name)

    def _need(self, names: Iterable[str]) -> None:
        """Take in the ancestors of nodes; keep writes of variables that they read."""
        more = [name for name in names if name not in self._needed]
        for name in walk(more, self._behind):
            self._needed.add(name)
            if name in self._dropped:
                dropped = self._dropped.pop(name)
                self._keep(name, dropped.kind, "what stays reads what it gives")

    def _behind(self, name: str) -> list[str]:
        """Return the inputs of a node, and the writes of variables among them."""
        if name in self._handles:
            return []
        node = self._nodes[name]
        before = list(map(node_name, data_inputs(node.input)))
        # An assignment only writes; what draws from a generator reads it, too.
        assigns = _is_write(node) and not is_random(node.op)
        handles = self._handles.intersection(before[1:] if assigns else before)
        read = [handle for handle in before if handle in handles - self._read]
        self._read.update(read)
        writes = [write for handle in read for write in self._keep_writes(handle)]
        return [n for n in (*before, *writes) if n not in self._needed]

    def _keep_writes(self, variable: str) -> list[str]:
        names = self._pending.pop(variable, [])
        for name in names:
            reason = f"what stays reads '{self._shown(variable)}'"
            self._keep(name, "side effect", reason)
        return names

    def _keep(self, name: str, kind: str, reason: str) -> None:
        self._kept[name] = Stripped("kept", kind, name, reason)

    def _drop(self, name: str, kind: str, reason: str) -> None:
        self._dropped[name] = Stripped("removed", kind, name, reason)

    def _variable(self, node: Any) -> str:
        """Return the node of the handle that a node writes to."""
        before = self._nodes[node_name(node.input[0])]
        while before.op in _HANDING_ON and before.name not in self._handles:
            before = self._nodes[node_name(before.input[0])]
        return str(before.name)

    def _shown(self, variable: str) -> str:
        return self._known.variable_names.get(variable, variable)
