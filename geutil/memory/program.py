"""Programs: a step as numbers, and the phase of each op.

Nothing here knows TensorFlow, so a plan can be tried out without building its graph.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

from geutil.errors import PredictionError
from geutil.graph.op_types import SHAPE_READERS

BOOKKEEPING = "bookkeeping"
PHASES = ("forward", "recompute", "backward", "update", BOOKKEEPING)
"""The parts, in the order in which they begin; bookkeeping is part of none of them."""

_SCOPE = re.compile(r"(?:^|/)(recomputed|gradients|gradient_tape)(?:_\d+)?/")
"""The scopes of ops that run again, and of gradients: geutil's and TensorFlow's."""


_DATALESS = SHAPE_READERS | {"Const", "ControlTrigger", "NoOp"}
"""Types of ops whose results depend on no data."""
_DRAWS = re.compile(r"Random|Uniform|Normal|Rng")
"""Types of ops that draw numbers: data, though they read no more than a shape."""
_FEW_BYTES = 512
"""The size of shapes, axes and scalars: 64 integers of 8 bytes, as `costs` has it."""


class Ran(NamedTuple):
    """An op of a step that ran: the places of ops it read, the bytes it made."""

    name: str
    type: str
    reads: Sequence[int] = ()
    bytes: int = 0


def phases_of(ops: Iterable[Ran]) -> list[str]:
    """Return the phase of each op of a step, given in the order of execution."""
    # Gradients lie in a scope that TensorFlow or geutil gave them, and recomputed ops
    # in geutil's own. Of the rest, an op that depends on either belongs to the update,
    # and any other to the forward pass. Constants, shapes, control, and values that
    # follow from these alone are bookkeeping, unless a forward op makes a large one: no
    # data goes through them, and the executor runs them before the forward pass begins.
    phases: list[str] = []
    depends: list[bool] = []
    has_data: list[bool] = []
    for name, kind, reads, size in ops:
        scope = _SCOPE.search(name)
        again = scope is not None and scope[1] == "recomputed"
        phase = ("recompute" if again else "backward") if scope else None
        behind = any(depends[place] for place in reads)
        data = kind not in _DATALESS and (
            not reads
            or _DRAWS.search(kind) is not None
            or any(has_data[place] for place in reads)
        )
        is_bookkeeping = not data and (
            kind in _DATALESS or scope is not None or size <= _FEW_BYTES
        )
        own = phase or ("update" if behind else "forward")
        phases.append(BOOKKEEPING if is_bookkeeping else own)
        # A constant in the scope of gradients may serve the forward pass, too:
        # Grappler keeps one of several that are equal.
        depends.append(data and (behind or phase is not None))
        has_data.append(data)
    return phases


class Node(NamedTuple):
    """An op of a step.

    Attributes:
        name: its name.
        type: its type.
        inputs: the tensors that it reads, by number.
        outputs: the tensors that it makes, by number.
        controls: the nodes of its control inputs, by number.
        aliases: pairs (output, input) of indices: the output is the input's buffer.
        reuses: pairs (output, input) of indices, best first: the output reuses the
            input's buffer if the sizes are equal and nothing else will read it.
        temporary: the bytes that it holds only while it runs.
        packed: the bytes that its kernel takes outside TensorFlow's allocator while it
            runs (`geutil.memory.kernels.cpu.packed_bytes`).
        surge: the further bytes that it may hold under a bad schedule: more iterations
            of a loop at once.
        cheap: whether the executor runs it at once, instead of handing it to a thread.
        queue: nodes with the same queue can wait for each other
            (`geutil.memory.schedule`); None if a node runs as soon as it can.
        updates: for a node that changes a variable, the tensors in the variable's
            buffer until then. If any is still to be read, the first output is a new
            buffer for the variable, counted until the old one is freed; otherwise there
            is no such buffer.
    """

    name: str
    type: str
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()
    controls: Sequence[int] = ()
    aliases: Sequence[tuple[int, int]] = ()
    reuses: Sequence[tuple[int, int]] = ()
    temporary: int = 0
    surge: int = 0
    cheap: bool = False
    queue: str | None = None
    updates: Sequence[int] = ()
    packed: int = 0

    def changed(self, **changes: Any) -> Node:
        """Return the node with some attributes changed."""
        return self._replace(**changes)

    def renumbered(self, place: Mapping[int, int] | Sequence[int]) -> Node:
        """Return the node with its control inputs renumbered."""
        if not self.controls:
            return self
        return self.changed(controls=list({place[c]: None for c in self.controls}))


def addresses(nodes: Sequence[Node], seed: int) -> list[int]:
    """Return numbers for the addresses of nodes, equal where names and seeds are."""
    # TensorFlow names a captured tensor by a count of the whole process, by which the
    # same step would have another order each time that it is traced: its rank counts.
    ranks = count()
    names = (n.name if not n.name.isdigit() else str(next(ranks)) for n in nodes)
    return [zlib.crc32(f"{seed} {name}".encode()) for name in names]


@dataclass(frozen=True)
class Allocator:
    """The rules by which a device hands out its memory: best fit with coalescing."""

    # Growing memory (`set_memory_growth`) is regions that nothing joins, each at least
    # twice the one before; else one region is taken at the start.
    grows: bool = False


@dataclass(frozen=True)
class Device:
    """The device that a step runs on."""

    # oneDNN merges ops and makes some of them run later. Without an allocator each
    # buffer takes its own bytes.

    kind: str = "CPU"
    onednn: bool = False
    allocator: Allocator | None = None


@dataclass(frozen=True)
class Program:
    """A step: nodes, and the tensors between them.

    Attributes:
        nodes: the nodes, in any order; a node's number is its index. Where several
            nodes are ready at once, this order decides.
        sizes: the bytes of each tensor. Those held all the time (variables, constants,
            feeds) have size 0.
        fetched: the tensors that are held to the end, by number.
        variable_bytes: the bytes of the variables.
        variables: the bytes of each variable, if known.
        constant_bytes: the bytes of the constants.
        device: the device that it runs on.
    """

    nodes: Sequence[Node]
    sizes: Sequence[int]
    fetched: Collection[int] = ()
    variable_bytes: int = 0
    constant_bytes: int = 0
    device: Device = Device()
    variables: Sequence[int] = ()

    def with_queues(self, queues: Sequence[str | None]) -> Program:
        """Return the program with a queue for each node."""
        pairs = zip(self.nodes, queues, strict=True)
        return replace(self, nodes=[node.changed(queue=queue) for node, queue in pairs])

    def held_on(
        self,
        here: Collection[int],
        *,
        in_place: bool = False,
        received: Callable[[int], int] | None = None,
    ) -> Program:
        """Return the program with only the buffers of the nodes `here`, of one device.

        The nodes of other devices hold nothing, and order those of this one as before.
        With `in_place`, devices share a memory: others read and forward the buffers of
        this one. `received` returns the bytes of a received tensor; None if the nodes
        have receipts, or if results of others are not held. A received tensor has one
        buffer for all its readers, from its arrival to the last of them; a sent one is
        freed once made. With `received`, the nodes of others run as soon as they can:
        no tensor can arrive earlier, so none can be held for longer.
        Cost: linear in nodes and edges.
        """
        if len(here) == len(self.nodes):
            return self
        own = {t for i in here for t in self.nodes[i].outputs}
        sizes = [size if t in own else 0 for t, size in enumerate(self.sizes)]
        posts: dict[int, int] = {}
        messages: list[Node] = []

        def across(tensor: int, is_here: bool) -> int:
            if received is None or (tensor in own) == is_here:
                return tensor
            if tensor not in posts:
                posts[tensor] = len(sizes)
                kind = "received" if is_here else "sent"
                sizes.append(received(tensor) if is_here else 0)
                name, outputs = f"{kind} {tensor}", [posts[tensor]]
                messages.append(Node(name, kind, [tensor], outputs, cheap=True))
            return posts[tensor]

        nodes = []
        for i, node in enumerate(self.nodes):
            is_here = i in here
            inputs = [across(t, is_here) for t in node.inputs]
            aliases, reuses = node.aliases, node.reuses
            if is_here:
                # An input of another device has no buffer here to be taken over.
                if received is None:
                    aliases = [p for p in aliases if inputs[p[1]] in own]
                    reuses = [p for p in reuses if inputs[p[1]] in own]
                node = node.changed(inputs=inputs, aliases=aliases, reuses=reuses)
            else:
                # Reversed, so that an alias wins over a reuse for the same output.
                passed = dict(reversed((*aliases, *reuses))) if in_place else {}
                node = Node(
                    node.name,
                    node.type,
                    inputs,
                    node.outputs,
                    node.controls,
                    list(passed.items()),
                    cheap=node.cheap or received is not None,
                    queue=node.queue,
                    updates=() if received else node.updates,
                )
            nodes.append(node)
        return replace(self, nodes=[*nodes, *messages], sizes=sizes)

    def merged(self, instead: Mapping[int, int]) -> Program:
        """Return the program with nodes replaced by the earlier ones that they map to.

        Cost: linear in nodes and edges.
        """
        if not instead:
            return self
        nodes = self.nodes
        same = {
            t: other
            for i, j in instead.items()
            for t, other in zip(nodes[i].outputs, nodes[j].outputs, strict=True)
        }
        left = [i for i in range(len(nodes)) if i not in instead]
        place = {i: n for n, i in enumerate(left)}
        place |= {i: place[j] for i, j in instead.items()}
        kept = (nodes[i].renumbered(place) for i in left)
        merged = [n.changed(inputs=[same.get(t, t) for t in n.inputs]) for n in kept]
        return replace(self, nodes=merged)

    def without(
        self, numbers: Collection[int], most: int | None = None
    ) -> tuple[Program, dict[int, int]]:
        """Return the program without some nodes, and the new number of each other node.

        Readers and successors of a removed node wait for its inputs and control inputs
        instead. Nodes of `numbers` that wait for more than `most` others stay; None
        removes all. The tensors are the same. Cost: linear in nodes and edges.
        """
        sizes = list(self.sizes)
        place: dict[int, int] = {}
        awaited: dict[int, dict[int, None]] = {}
        lost: dict[int, int] = {}
        maker: dict[int, int] = {}
        nodes: list[Node] = []
        for i, node in enumerate(self.nodes):
            waits: dict[int, None] = {}
            for c in node.controls:
                # A node of a loop may wait for a later one.
                waits |= awaited.get(c, {place[c]: None} if c in place else {})
            read: dict[int, None] = {}
            for t in node.inputs:
                if t in lost:
                    waits |= awaited[lost[t]]
                else:
                    read[place[maker[t]]] = None
            if i in numbers and (most is None or len(waits | read) <= most):
                awaited[i] = waits | read
                lost.update(dict.fromkeys(node.outputs, i))
                continue
            place[i] = len(nodes)
            maker.update(dict.fromkeys(node.outputs, i))
            left = [p for p, t in enumerate(node.inputs) if t not in lost]
            if len(left) == len(node.inputs):
                nodes.append(node.changed(controls=list(waits)))
                continue
            for out, source in node.aliases:
                if node.inputs[source] in lost:
                    sizes[node.outputs[out]] = 0
            moved = {p: n for n, p in enumerate(left)}
            renews = not lost.keys().isdisjoint(node.updates)
            nodes.append(
                node.changed(
                    inputs=[node.inputs[p] for p in left],
                    outputs=node.outputs[1:] if renews else node.outputs,
                    controls=list(waits),
                    aliases=[(o, moved[p]) for o, p in node.aliases if p in moved],
                    reuses=[(o, moved[p]) for o, p in node.reuses if p in moved],
                    updates=() if renews else node.updates,
                )
            )
        return replace(self, nodes=nodes, sizes=sizes), place

    def without_views(
        self, apart: Collection[int]
    ) -> tuple[Program, dict[int, int], dict[int, int]]:
        """Return the program in which readers of a view read its source instead.

        Also return the tensor that each view shows, and the new number of each other
        node. Tensors `apart` stay, views or not. Cost: linear in nodes and edges.
        """
        shown: dict[int, int] = {}
        nodes = list(self.nodes)
        views = set()
        for i, node in enumerate(nodes):
            inputs = [shown.get(t, t) for t in node.inputs]
            if inputs != list(node.inputs):
                node = nodes[i] = node.changed(inputs=inputs)
            if len(inputs) == 1 and len(node.aliases) == len(node.outputs) == 1:
                (view,) = node.outputs
                # A view with control inputs orders its readers, so it stays.
                if view not in apart and not node.controls:
                    views.add(i)
                    shown[view] = inputs[0]
        program, place = replace(self, nodes=nodes).without(views)
        return program, shown, place

    def pending(self) -> list[int]:
        """Return the number of inputs and control inputs of each node."""
        return [len(node.inputs) + len(node.controls) for node in self.nodes]

    def require_done(self, pending: Sequence[int]) -> None:
        """Raise `PredictionError` if some node is still pending, since none can run."""
        stuck = next((i for i, count in enumerate(pending) if count), None)
        if stuck is not None:
            raise self.waits_forever(stuck)

    def waits_forever(self, stuck: int) -> PredictionError:
        """Return the error about a node that can never run."""
        return PredictionError(
            f"'{self.nodes[stuck].name}' never becomes ready: it waits for itself, or "
            "for a node that does"
        )

    @cached_property
    def makers(self) -> Mapping[int, int]:
        """The node that makes each tensor."""
        return {t: i for i, node in enumerate(self.nodes) for t in node.outputs}

    def needs(self) -> list[set[int]]:
        """Return, for each node, the nodes that it reads or waits for."""
        makers = self.makers
        return [{*(makers[t] for t in n.inputs), *n.controls} for n in self.nodes]

    def readers(self) -> list[list[int]]:
        """Return the readers of each tensor, a node as often as it reads it."""
        readers: list[list[int]] = [[] for _ in self.sizes]
        for i, node in enumerate(self.nodes):
            for tensor in node.inputs:
                readers[tensor].append(i)
        return readers

    def successors(
        self, readers: Sequence[list[int]] | None = None
    ) -> Iterator[list[int]]:
        """Yield the successors of each node, a successor once for each edge.

        Readers come first, in the order of nodes, then the nodes that only wait. Cost:
        linear in nodes and edges; less if the `readers` of each tensor are given.
        """
        readers = self.readers() if readers is None else readers
        waiting: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for control in node.controls:
                waiting[control].append(i)
        for node, after in zip(self.nodes, waiting, strict=True):
            outputs = node.outputs
            if len(outputs) == 1:
                yield readers[outputs[0]] + after
            else:
                data = [reader for tensor in outputs for reader in readers[tensor]]
                yield sorted(data) + after
