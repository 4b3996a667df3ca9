"""Side effects: those that outputs need stay; others are removed with their inputs.

Writes of variables that nothing reads, reports and assertions serve training and
diagnosis alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from geutil.graph.call_graph import Effects, functions_of_attributes
from geutil.graph.op_types import ENTERS, MERGES, RANDOM_STATE, is_random
from geutil.graph.walks import closure, data_inputs, node_name, walk
from geutil.model import programs
from geutil.model.programs import ModelProgram
from geutil.model.strip_report import StripOptions, Stripped

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
            del node.input[:]
            node.input.extend(inputs)
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

PASSING = frozenset(
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
DIAGNOSTICS = PASSING | frozenset(
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


def is_training_write(node: Any) -> bool:
    """Tell whether a node is the step of an optimizer."""
    return bool(node.op.startswith(_TRAINING))


def is_write(node: Any) -> bool:
    """Tell whether a node changes the variable that its first input is."""
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
        if node.op in DIAGNOSTICS:
            return ("diagnostic",)
        if is_write(node):
            return ("write",)
        return ("other",) if self._effects.of(node) else ()


_HANDING_ON = frozenset(("Enter", "Identity", "Switch"))


@dataclass
class Known:
    """Known facts of side effects before their graph is looked at."""

    # For nodes that go in any case the reason.
    dropped: dict[str, str] = field(default_factory=dict)
    # For nodes that stay in any case the reason.
    kept: dict[str, str] = field(default_factory=dict)
    # The name of each variable by the node of its handle.
    variable_names: Mapping[str, str] = field(default_factory=dict)
    # For nodes of handles the signature that reads the variable too.
    read_elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Decision:
    """Nodes with side effects: those that go, and those that stay."""

    dropped: list[str]  # The names of those that go.
    kept: list[str]  # The names of those that stay.
    entries: list[Stripped]


def decide_effects(
    program: ModelProgram, options: StripOptions, known_effects: Known
) -> Decision:
    """Decide about each node with a side effect that a call of a program runs."""
    return _Decider(program, options, known_effects).decide()


class _Decider:
    """The state of one decision."""

    # A write of a variable is pending until something that stays reads the variable.

    def __init__(
        self, program: ModelProgram, options: StripOptions, known_effects: Known
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

    def decide(self) -> Decision:
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
        return Decision(
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
        elif is_training_write(node):
            self._drop(name, kind, f"it trains '{self._shown(self._variable(node))}'")
        elif is_write(node):
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
        """Return what a node reads, and the writes of variables among it."""
        if name in self._handles:
            return []
        node = self._nodes[name]
        before = list(map(node_name, data_inputs(node.input)))
        # An assignment only writes; what draws from a generator reads it, too.
        assigns = is_write(node) and not is_random(node.op)
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
