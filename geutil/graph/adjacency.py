"""The edges around an op, and a topological order of all ops that follows edits.

TensorFlow keeps the consumers of a tensor in a hash set of pointers once there are more
than eight, so their order changes from process to process. The functions here return
them in graph order (the order in which the ops were made).

The order of creation is topological until somebody rewires the graph. From then on the
order is mended at each new edge in the way of Pearce and Kelly, "A dynamic topological
sort algorithm for directed acyclic graphs" (ACM JEA 11, 2006): only the ops between the
two ends of the edge in the present order are searched, so an edit whose neighbourhood
is local has a local cost, whatever the size of the graph.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from geutil.errors import SelectionError
from geutil.graph.op_types import MERGES, NEXT_ITERATIONS
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.graph.walks import closure, topological_order

creation_index = attrgetter("_id_value")
"""Key that sorts ops into graph order."""

_LISTED = 8
"""How many edges TensorFlow keeps in a list."""


def consumers(tensor: Tensor) -> list[Operation]:
    """Return the ops that read `tensor`, each once, in graph order."""
    ops: list[Operation] = tensor.consumers()
    if len(ops) < 2:
        return ops
    return sorted(dict.fromkeys(ops), key=creation_index)


def control_inputs(op: Operation) -> list[Operation]:
    """Return the ops that `op` waits for, in graph order."""
    ops = list(op.control_inputs)
    if len(ops) > 1:
        ops.sort(key=creation_index)
    return ops


def control_input_orders(op: Operation) -> tuple[list[Operation], list[Operation]]:
    """Return the ops that `op` waits for as TensorFlow lists and as it writes them."""
    # TensorFlow keeps few edges of an op in a list, many in a hash set, whose order
    # means nothing: then both are in the order of the op's definition.
    ops: list[Operation] = op.control_inputs
    names = (name[1:] for name in op.node_def.input if name.startswith("^"))
    place = {name: index for index, name in enumerate(names)}
    written = sorted(ops, key=lambda c: (place.get(c.name, len(place)), c._id))
    return (ops if len(ops) + len(op.inputs) <= _LISTED else written), written


def control_outputs(op: Operation) -> list[Operation]:
    """Return the ops that have `op` as a control input, in graph order."""
    ops = op._control_outputs
    return sorted(ops, key=creation_index) if len(ops) > 1 else list(ops)


def is_back_edge(producer: Operation, consumer: Operation) -> bool:
    """Return whether an edge is the back edge of a version 1 while loop."""
    return producer.type in NEXT_ITERATIONS and consumer.type in MERGES


def predecessors(op: Operation) -> Iterator[Operation]:
    """Yield the ops that must run before `op`, loop back edges left out."""
    for tensor in op.inputs:
        producer = tensor.op
        if not is_back_edge(producer, op):
            yield producer
    yield from control_inputs(op)


def successors(op: Operation) -> Iterator[Operation]:
    """Yield the ops that must run after `op`, loop back edges left out."""
    for tensor in op.outputs:
        for consumer in tensor.consumers():
            if not is_back_edge(op, consumer):
                yield consumer
    yield from op._control_outputs


def producers(op: Operation) -> list[Operation]:
    """Return the ops whose results `op` reads, one for each input."""
    return [tensor.op for tensor in op.inputs]


def source_behind(tensor: Tensor, forwarding: Container[str]) -> Tensor:
    """Return the tensor that ops of some types forward, each its first input."""
    while tensor.op.type in forwarding:
        tensor = tensor.op.inputs[0]
    return tensor


def graph_order(ops: Iterable[Operation]) -> list[Operation]:
    """Return `ops` sorted into graph order."""
    return sorted(ops, key=creation_index)


def step_ops(
    fetches: Iterable[Operation],
    feeds: IdentitySet,
    *,
    without: Collection[Operation] = (),
) -> list[Operation]:
    """Return the ops that run for `fetches`, in graph order."""
    # Nothing behind `feeds` runs; the ops of `without` are assumed to have no control
    # inputs.

    def needed(op: Operation) -> list[Operation]:
        behind = [t.op for t in op.inputs if t not in feeds]
        return behind if op in without else [*behind, *op.control_inputs]

    return graph_order(closure(fetches, needed))


def input_indices(op: Operation, tensor: Tensor) -> list[int]:
    """Return the positions at which `op` reads `tensor`."""
    return [index for index, t in enumerate(op.inputs) if t is tensor]


def takes_reference(op: Operation, index: int) -> bool:
    """Return whether input `index` of `op` must be a reference to a variable."""
    return bool(op._input_types[index]._is_ref_dtype)


def control_flow_context(op: Operation) -> Any:
    """Return the version 1 control-flow context of `op`, or None."""
    return op._get_control_flow_context()


@dataclass(frozen=True)
class Rewiring:
    """The inputs and control inputs that ops will have once an edit is applied.

    Attributes:
        inputs: the producer of each (op, index) that changes; None for one that needs
            nothing.
        controls: the new control inputs of each op whose control inputs change.
    """

    inputs: Mapping[tuple[Operation, int], Operation | None]
    controls: Mapping[Operation, Sequence[Operation]]

    def edges(self) -> Iterator[tuple[Operation, Operation]]:
        """Yield (producer, consumer) for each edge that may be new."""
        for (op, _), producer in self.inputs.items():
            if producer is not None and not is_back_edge(producer, op):
                yield producer, op
        for op, producers in self.controls.items():
            yield from ((producer, op) for producer in producers)

    @cached_property
    def ops(self) -> frozenset[Operation]:
        """The ops whose edges change."""
        return frozenset((*(op for op, _ in self.inputs), *self.controls))

    def producers(self, op: Operation) -> dict[Operation, None]:
        """Return the ops that one of these ops will depend on."""
        read = (self.inputs.get((op, i), t.op) for i, t in enumerate(op.inputs))
        awaited = self.controls.get(op, op.control_inputs)
        dependencies = (p for p in (*read, *awaited) if p is not None)
        return {p: None for p in dependencies if not is_back_edge(p, op)}


_UNEDITED: Mapping[Operation, Sequence[Operation]] = MappingProxyType({})


def topological_sort(
    ops: Iterable[Operation],
    edited: Mapping[Operation, Sequence[Operation]] = _UNEDITED,
) -> list[Operation]:
    """Return `ops`, each after its predecessors among them, back edges aside."""
    # The order of creation is kept, except that an op made after one that needs it
    # comes just ahead of that one.
    listed = graph_order(dict.fromkeys(ops))
    members = frozenset(listed)
    placed: dict[Operation, None] = {}

    def missing(op: Operation) -> list[Operation]:
        before = edited.get(op) or predecessors(op)
        return [p for p in before if p in members and p not in placed]

    for op in listed:
        if op in placed:
            continue
        for t in op.inputs:
            producer = t.op
            if producer not in placed and producer in members:
                break
        else:
            if not op.control_inputs and op not in edited:
                placed[op] = None
                continue
        placed.update(dict.fromkeys(topological_order([op], missing, _refuse_cycle)))
    return list(placed)


def _refuse_cycle(cycle: list[Operation]) -> None:
    raise SelectionError(
        f"the ops hold a cycle, and '{cycle[-1].name}' is on it; geutil.verify names "
        "the cycle"
    )


class TopologicalOrder:
    """Positions of the ops of one graph such that every edge goes upwards."""

    # Back edges of version 1 loops do not count. Edges that somebody adds through
    # TensorFlow's private API are seen when the ops around them are new; otherwise call
    # `rebuild`.

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._version = -1
        self._cyclic = False

    def refresh(self, graph: Graph) -> None:
        """Add the ops made since the last call: linear in those."""
        if self._cyclic:
            # Somebody made a cycle past geutil; it may be gone by now.
            self.rebuild(graph)
        if graph.version == self._version:
            return
        position = self._position
        valid = True
        for op in graph.get_operations()[len(position) :]:
            place = position[op._id] = len(position)
            if valid:
                valid = all(
                    position.get(p._id, place) < place for p in predecessors(op)
                )
        self._version = graph.version
        if not valid:
            self.rebuild(graph)

    def rebuild(self, graph: Graph) -> None:
        """Recompute the order; ops on a cycle, and those behind it, come last."""
        ops = graph.get_operations()
        waiting = {op._id: sum(1 for _ in predecessors(op)) for op in ops}
        ready = [op for op in ops if not waiting[op._id]]
        for op in ready:
            for successor in successors(op):
                waiting[successor._id] -= 1
                if not waiting[successor._id]:
                    ready.append(successor)
        self._cyclic = len(ready) < len(ops)
        placed = {op._id for op in ready}
        ready.extend(op for op in ops if op._id not in placed)
        self._position = {op._id: place for place, op in enumerate(ready)}
        self._version = graph.version

    def rewire(
        self, rewiring: Rewiring, *, keep: bool = True
    ) -> list[Operation] | None:
        """Mend the order for a rewiring; return a cycle that it closes, or None."""
        place = self._position
        falling = [(p, c) for p, c in rewiring.edges() if place[p._id] >= place[c._id]]
        # A cycle made past geutil is no fault of this edit: its old edges do not count.
        if self._cyclic:
            falling = [(p, c) for p, c in falling if p not in set(predecessors(c))]
        if not falling:
            return None
        search = _AffectedRegion(place, rewiring, falling)
        for producer, consumer in falling:
            cycle = search.insert(producer, consumer)
            if cycle is not None:
                # The edit is refused, so the order stays that of the graph as it is.
                search.undo()
                return cycle
        # A check alone: the edges that the mended order counts on will not be there.
        if not keep:
            search.undo()
        return None


class _AffectedRegion:
    """The edges of the graph with a set of rewirings laid over them."""

    def __init__(
        self,
        position: dict[int, int],
        rewiring: Rewiring,
        falling: Iterable[tuple[Operation, Operation]],
    ) -> None:
        self._position = position
        self._rewiring = rewiring
        self._undo: list[tuple[int, int]] = []
        self._producers: dict[int, dict[Operation, None]] = {}
        self._gained: dict[int, list[Operation]] = {}
        # Edges that go up in the present order close no cycle by themselves: they count
        # from the start, and those that go down are inserted one by one.
        for producer, consumer in rewiring.edges():
            if position[producer._id] < position[consumer._id]:
                self._gained.setdefault(producer._id, []).append(consumer)
        self._missing: dict[int, set[Operation]] = {}
        """The producers of each op whose edges were not inserted so far."""
        for producer, consumer in falling:
            self._missing.setdefault(consumer._id, set()).add(producer)

    def undo(self) -> None:
        """Restore the positions."""
        for key, place in reversed(self._undo):
            self._position[key] = place

    def insert(
        self, producer: Operation, consumer: Operation
    ) -> list[Operation] | None:
        """Add one edge, or return the cycle that it would close."""
        if producer is consumer:
            return [producer]
        low, high = self._position[consumer._id], self._position[producer._id]
        # Mending for an edge before may have put these two in order already.
        if low < high:
            # Only ops between the two places can lie on a cycle or have to move, so the
            # search ends there.
            above, path = self._reach(
                consumer, self._successors, lambda place: place <= high, producer
            )
            if path:
                return path
            below, _ = self._reach(
                producer, self._predecessors, lambda place: place > low
            )
            self._reorder(below, above)
        self._missing[consumer._id].discard(producer)
        self._gained.setdefault(producer._id, []).append(consumer)
        return None

    def _successors(self, op: Operation) -> Iterator[Operation]:
        for successor in successors(op):
            if successor not in self._rewiring.ops or self._depends(successor, op):
                yield successor
        yield from self._gained.get(op._id, ())

    def _depends(self, op: Operation, producer: Operation) -> bool:
        """Return whether a rewired op depends on another, as far as edges are there."""
        return producer in self._after(op) and producer not in self._absent(op)

    def _predecessors(self, op: Operation) -> Iterable[Operation]:
        if op not in self._rewiring.ops:
            return predecessors(op)
        absent = self._absent(op)
        return (p for p in self._after(op) if p not in absent)

    def _after(self, op: Operation) -> dict[Operation, None]:
        producers = self._producers.get(op._id)
        if producers is None:
            producers = self._producers[op._id] = self._rewiring.producers(op)
        return producers

    def _absent(self, op: Operation) -> Collection[Operation]:
        return self._missing.get(op._id, ())

    def _reach(
        self,
        start: Operation,
        neighbours: Callable[[Operation], Iterable[Operation]],
        within: Callable[[int], bool],
        goal: Operation | None = None,
    ) -> tuple[list[Operation], list[Operation]]:
        """Return the ops reached from `start`, and the path to `goal` if it is met."""
        parent: dict[Operation, Operation | None] = {start: None}
        reached = [start]
        for op in reached:
            for neighbour in neighbours(op):
                if neighbour in parent or not within(self._position[neighbour._id]):
                    continue
                parent[neighbour] = op
                if neighbour is goal:
                    return reached, _path(parent, goal)
                reached.append(neighbour)
        return reached, []

    def _reorder(self, below: list[Operation], above: list[Operation]) -> None:
        """Give `below` the lower of the positions that both sides hold together."""
        position = self._position
        ids = [
            *sorted((op._id for op in below), key=position.__getitem__),
            *sorted((op._id for op in above), key=position.__getitem__),
        ]
        places = sorted(position[key] for key in ids)
        for key, place in zip(ids, places, strict=True):
            self._undo.append((key, position[key]))
            position[key] = place


def _path(
    parent: dict[Operation, Operation | None], goal: Operation
) -> list[Operation]:
    path = []
    op: Operation | None = goal
    while op is not None:
        path.append(op)
        op = parent[op]
    return path[::-1]
