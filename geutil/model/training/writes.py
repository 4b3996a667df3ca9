"""Which side effects stay: those that the outputs, or other signatures, depend on.

What writes a variable that nothing reads, or reports and asserts, serves training and
diagnosis alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from geutil.model.programs.program import Program, node_of, nodes_behind, nodes_by_name
from geutil.model.training.kinds import (
    EffectKinds,
    Kind,
    is_random,
    is_training_write,
    is_write,
)
from geutil.model.training.options import Options
from geutil.model.training.report import Stripped

_HANDING_ON = frozenset(("Enter", "Identity", "Switch"))


@dataclass
class Known:
    """What is known of side effects before their graph is looked at.

    Attributes:
        dropped: for nodes that go in any case the reason.
        kept: for nodes that stay in any case the reason.
        variable_names: the name of each variable by the node of its handle.
        read_elsewhere: for nodes of handles the signature that reads the variable too.
    """

    dropped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    variable_names: Mapping[str, str] = field(default_factory=dict)
    read_elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Decision:
    """Which nodes with side effects go and which stay.

    Attributes:
        dropped: the names of those that go.
        kept: the names of those that stay.
        entries: for the report.
    """

    dropped: list[str]
    kept: list[str]
    entries: list[Stripped]


def decide_effects(program: Program, options: Options, known: Known) -> Decision:
    """Decide about each node with a side effect that a call of a program runs.

    Cost: linear in nodes and edges, function bodies included.
    """
    return _Decider(program, options, known).decide()


class _Decider:
    """The state of one decision.

    A write of a variable is pending until something that stays reads the variable.
    """

    def __init__(self, program: Program, options: Options, known: Known) -> None:
        graph_def = program.graph_def
        functions = {f.signature.name: f for f in graph_def.library.function}
        self._nodes = nodes_by_name(graph_def)
        self._outputs = [node_of(t) for t in program.outputs.values()]
        self._handles = frozenset(node_of(t) for t in program.captures)
        ends = [*self._outputs, *program.side_effects]
        self._running = nodes_behind(graph_def, ends, self._handles)
        self._options = options
        self._known = known
        self._kinds = EffectKinds(functions)
        self._needed: set[str] = set()
        self._read: set[str] = set()
        self._pending: dict[str, list[str]] = {}
        self._dropped: dict[str, Stripped] = {}
        self._kept: dict[str, Stripped | None] = {}

    def decide(self) -> Decision:
        self._need(self._outputs)
        for node in self._running:
            kinds = self._kinds.of(node)
            if kinds:
                self._judge(node, kinds)
        self._need(self._kept)
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
        name, known = node.name, self._known
        kind = "diagnostic" if kinds == ("diagnostic",) else "side effect"
        if self._options.keeps(name):
            self._keep(name, kind, "it is in keep")
        elif name in known.kept:
            self._keep(name, kind, known.kept[name])
        elif name in known.dropped:
            self._drop(name, kind, known.dropped[name])
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
        """Take in what nodes are computed from; keep what writes what that reads."""
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in self._needed:
                continue
            self._needed.add(name)
            if name in self._dropped:
                dropped = self._dropped.pop(name)
                self._keep(name, dropped.kind, "what stays reads what it gives")
            node = self._nodes[name]
            before = [node_of(text) for text in node.input if text[0] != "^"]
            if name in self._handles:
                continue
            waiting.extend(before)
            # An assignment only writes; what draws from a generator reads it, too.
            assigns = is_write(node) and not is_random(node)
            for handle in before[1:] if assigns else before:
                if handle in self._handles and handle not in self._read:
                    self._read.add(handle)
                    waiting.extend(self._keep_writes(handle))

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
        before = self._nodes[node_of(node.input[0])]
        while before.op in _HANDING_ON and before.name not in self._handles:
            before = self._nodes[node_of(before.input[0])]
        return str(before.name)

    def _shown(self, variable: str) -> str:
        return self._known.variable_names.get(variable, variable)
