"""What inlining needs to know of one graph that calls: the main one or a body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from geutil.graph.bodies import Body, BodyNode
from geutil.graph.calls import Call
from geutil.graph.dependencies import dependency_order
from geutil.graph.effects import Effects
from geutil.graph.inlining.names import is_automatic
from geutil.graph.op_types import ENTERS, SWITCHES

_ENTRANCES = ENTERS | SWITCHES


def producer_of(reference: str) -> str:
    """Return the node that `node`, `node:k`, `^node` or `^node:k` names."""
    return reference.removeprefix("^").partition(":")[0]


@dataclass
class Plan:
    """One graph that calls: the main one, or a function for a choice of attributes.

    Attributes:
        body: its nodes.
        effects: tells which nodes have an effect.
        state: tells which nodes have one or read what effects change.
        calls: what the nodes call that will be replaced.
        kept: the function and the reason of each other call.
        size: number of nodes, those of the calls' bodies included.
        automatic: number of those whose name says nothing.
        bytes: about the size of all that as a protobuf.
    """

    body: Body
    effects: Effects = field(repr=False)
    state: Effects = field(repr=False)
    calls: dict[str, Call] = field(default_factory=dict)
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    size: int = 0
    automatic: int = 0
    bytes: int = 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.body.nodes)

    @cached_property
    def automatic_names(self) -> frozenset[str]:
        """The names that say nothing."""
        definitions = (node.definition for node in self.body.nodes)
        return frozenset(d.name for d in definitions if is_automatic(d.name, d.op))

    @cached_property
    def args(self) -> Mapping[str, int]:
        """The position of each argument."""
        return {arg.name: i for i, arg in enumerate(self.body.args)}

    @cached_property
    def needs(self) -> dict[str, list[str]]:
        """The nodes and arguments that each node reads or waits for.

        Without the back edges of loops.
        """
        definitions = {node.name: node.definition for node in self.body.nodes}

        def is_back_edge(reader: Any, producer: str) -> bool:
            known = definitions.get(producer)
            return known is not None and is_loop_edge(known.op, reader.op)

        return {
            node.name: [
                producer
                for producer in dict.fromkeys(map(producer_of, node.inputs))
                if not is_back_edge(node.definition, producer)
            ]
            for node in self.body.nodes
        }

    def reliable_needs(self, name: str) -> list[str]:
        """Return the needs that hold for all that stands for a node in the end.

        What a call reads, its body need not read.
        """
        return self._control_needs.get(name) or (
            [] if name in self.calls else self.needs[name]
        )

    @cached_property
    def _control_needs(self) -> dict[str, list[str]]:
        return {
            node.name: [producer_of(r) for r in node.inputs if r.startswith("^")]
            for node in self.body.nodes
            if node.name in self.calls
        }

    @cached_property
    def order(self) -> list[str]:
        """The names of the nodes in topological order."""
        return dependency_order(self.needs)

    @cached_property
    def waiting(self) -> list[BodyNode]:
        """The nodes that have to be told to wait: all others wait for one of them.

        Those that read nothing of the body, and calls that will be replaced: what their
        bodies start with need not read what the call reads.
        """
        return [node for node in self.body.nodes if self._has_to_be_told(node)]

    def _has_to_be_told(self, node: BodyNode) -> bool:
        inputs: Iterable[str] = node.inputs
        if node.name in self.calls:
            inputs = (name for name in inputs if name.startswith("^"))
        return all(producer_of(name) in self.args for name in inputs)

    @cached_property
    def branched(self) -> frozenset[str]:
        """The nodes that may be in a version 1 loop or in a branch: behind an entrance.

        What follows the loop or the branches is among them, for simplicity.
        """
        found: set[str] = set()
        entrances = {n.name for n in self.body.nodes if n.definition.op in _ENTRANCES}
        if entrances:
            for name in self.order:
                if not found.isdisjoint(self.needs[name]) or name in entrances:
                    found.add(name)
        return frozenset(found)

    @cached_property
    def effective(self) -> list[str]:
        """The nodes with an effect."""
        return [n.name for n in self.body.nodes if self.effects.of(n.definition)]

    @cached_property
    def stateful(self) -> list[str]:
        """The nodes with an effect and those that read what effects change."""
        return [n.name for n in self.body.nodes if self.state.of(n.definition)]

    @cached_property
    def frames(self) -> list[str]:
        """The frames of the loops of version 1."""
        enters = (n.definition for n in self.body.nodes if "Enter" in n.definition.op)
        attributes = (d.attr["frame_name"].s for d in enters if "frame_name" in d.attr)
        return list(dict.fromkeys(s.decode("utf-8", "replace") for s in attributes))


def is_loop_edge(producer: str, consumer: str) -> bool:
    """Tell, from the types of two ops, whether an edge leads back in a loop."""
    return producer.removeprefix("Ref") == "NextIteration" and (
        consumer.removeprefix("Ref") == "Merge"
    )
