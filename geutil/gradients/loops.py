"""Loops of a step, and what their backward pass could compute again.

The forward loop pushes values onto lists, and the loop of the backward pass pops one of
each every time it turns. Some of these values follow from others: of an LSTM the gates,
from what it reads and its state. Nothing is built here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import tensorflow as tf

from geutil.gradients.segments import why_kept
from geutil.gradients.step import PlainStep
from geutil.graph import function_calls, op_types
from geutil.graph.function_loops import LoopBody, source_of
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.memory.function_memory import Called
from geutil.memory.sizes import UNKNOWN, tensor_bytes
from geutil.memory.times import BODIES, HEAVY, op_time
from geutil.select.walks import get_backward_walk_ops

LIGHT, ALL = 1, 2
"""How much of a loop runs again: no products and convolutions, or anything."""

_SMALL = 256
"""Bytes of values that stay in their lists: counters, shapes."""
_SEVERAL = "several loops read its lists"
_SHARED = "another op runs the same function"
_NOTHING = "no list of its own holds values that follow from others"
_NO_ROOM = "it would need more lists than it has"


@dataclass(frozen=True)
class Pile:
    """A list that a loop pushes a value onto each time it turns.

    Attributes:
        output: its place among the results of the loop.
        argument: its place among the arguments of the loop of the backward pass.
        value: the name of the value, in the body.
        pop: the name of the op of the other body that takes the value out again.
    """

    output: int
    argument: int
    value: str
    pop: str


@dataclass(frozen=True)
class LoopCut:
    """Values that a loop of the backward pass computes again, and from what.

    Attributes:
        dropped: the lists that are not filled.
        read: the values that get the first of these lists, in that order, since what
            runs again reads them.
        ops: the names of the ops of the body that run again.
        saved: the bytes that lists hold less, all iterations together.
        time: how much longer the loop takes, in the unit of `op_time`.
    """

    dropped: tuple[Pile, ...]
    read: tuple[str, ...]
    ops: tuple[str, ...]
    saved: int
    time: float


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of the forward pass, with that of the backward pass.

    Attributes:
        forward: the loop.
        backward: the one that reads its lists.
        piles: the lists.
        cuts: for `LIGHT` and `ALL` what runs again, where that saves anything.
        reason: why nothing can, if nothing can.
    """

    forward: Operation
    backward: Operation
    piles: tuple[Pile, ...] = ()
    cuts: Mapping[int, LoopCut] = field(default_factory=dict)
    reason: str | None = None


def find_loops(step: PlainStep) -> list[Loop]:
    """Return the loops of a step that are differentiated, in the order of its ops.

    Cost: none without loops; otherwise linear in the ops of the step and of the bodies,
        but for the cuts (`least_cut`).
    """
    backward = frozenset(step.backward)
    ops = step.ops()
    loops = [op for op in ops if op.type in op_types.LOOPS and op not in backward]
    pairs = [(op, readers) for op in loops if (readers := _loops_behind(op, backward))]
    if not pairs:
        return []
    names = (n for c in function_calls.callers_in(step.graph) for n in c.names)
    callers = Counter(names)
    return [_loop(op, readers, step.calls, callers) for op, readers in pairs]


def _loops_behind(op: Operation, backward: Collection[Operation]) -> list[Operation]:
    """Return the loops of the backward pass that read lists of a loop."""
    readers = (
        reader
        for t in op.outputs
        if t.dtype == tf.variant
        for reader in t.consumers()
        if reader.type in op_types.LOOPS and reader in backward
    )
    return list(dict.fromkeys(readers))


def _loop(
    op: Operation,
    readers: Sequence[Operation],
    calls: Mapping[Operation, Called],
    callers: Mapping[str, int],
) -> Loop:
    """Return a loop with the best cut of each level, or why it has none."""
    reader = readers[0]
    if len(readers) > 1:
        return Loop(op, reader, reason=_SEVERAL)
    if any(callers[o.get_attr("body").name] > 1 for o in (op, reader)):
        return Loop(op, reader, reason=_SHARED)
    forward, backward = (calls[o].body if o in calls else None for o in (op, reader))
    if forward is None or backward is None:
        return Loop(op, reader, reason=_NOTHING)
    piles = list(_piles(op, reader, forward, backward))
    if not piles:
        read = IdentitySet(reader.inputs)
        lists = [t for t in op.outputs if t.dtype == tf.variant and t in read]
        others = any(t.consumers() not in ([reader], []) for t in lists)
        return Loop(op, reader, reason=_SEVERAL if others else _NOTHING)
    body = _Body(forward, piles)
    times = calls[op].times
    count = UNKNOWN if times is None else times
    cuts: dict[int, LoopCut] = {}
    reason = None
    for level in (LIGHT, ALL):
        cut = body.cut(count, with_heavy=level == ALL)
        if isinstance(cut, str):
            reason = cut
        elif not cuts or cut.saved > cuts[LIGHT].saved:
            cuts[level] = cut
    return Loop(op, reader, tuple(piles), cuts, None if cuts else reason)


def _piles(
    op: Operation, reader: Operation, body: Graph, backward_body: Graph
) -> Iterator[Pile]:
    """Yield the lists that one loop fills and the other one alone empties."""
    argument_of = {id(t): i for i, t in enumerate(reader.inputs)}
    for i, t in enumerate(op.outputs):
        argument = argument_of.get(id(t))
        if t.dtype != tf.variant or argument is None or t.consumers() != [reader]:
            continue
        begins = op.inputs[i]
        if begins.op.type != "EmptyTensorList" or begins.consumers() != [op]:
            continue
        push = source_of(body.outputs[i]).op
        if push.type != "TensorListPushBack":
            continue
        list_before, value = push.inputs
        if source_of(list_before) is not body.inputs[i] or value.dtype == tf.variant:
            continue
        pops = backward_body.inputs[argument].consumers()
        rest = source_of(backward_body.outputs[argument])
        if [pop.type for pop in pops] == ["TensorListPopBack"] and (
            rest is pops[0].outputs[0]
        ):
            yield Pile(i, argument, value.name, pops[0].name)


class _Body:
    """The body of a loop, its lists, and what its values weigh in one."""

    def __init__(self, graph: Graph, piles: Sequence[Pile]) -> None:
        self._body = LoopBody(graph)
        filled = frozenset(pile.output for pile in piles)
        others = (i for i in range(len(graph.outputs)) if i not in filled)
        elements = (t for i in others for t in self._body.added(i))
        self._listed = IdentitySet(map(source_of, elements))
        self._piles = piles
        self._values = [graph.get_tensor_by_name(pile.value) for pile in piles]

    def cut(self, count: int, *, with_heavy: bool) -> LoopCut | str:
        """Return the best cut if the loop turns `count` times, or why there is none."""
        values = self._values
        small = IdentitySet(t for t in values if tensor_bytes(t) <= _SMALL)
        pairs = [p for p in zip(self._piles, values, strict=True) if p[1] not in small]

        def runs_again(t: Tensor) -> bool:
            return t not in small and _runs_again(t.op, with_heavy=with_heavy)

        tensors = _behind((t for _, t in pairs), runs_again)
        number = {id(t): i for i, t in enumerate(tensors)}
        again = list(map(runs_again, tensors))
        cut = least_cut(
            # Lists of nothing new are no reason to compute, but for the list itself.
            [1 if t in small else 1 + self._bytes(t) for t in tensors],
            [
                [number[id(t)] for t in tensor.op.inputs] if is_again else []
                for tensor, is_again in zip(tensors, again, strict=True)
            ],
            [i for i, is_again in enumerate(again) if not is_again],
            [number[id(t)] for _, t in pairs],
        )
        kept = IdentitySet(tensors[i] for i in cut)
        dropped = [(pile, t) for pile, t in pairs if t not in kept]
        listed = IdentitySet(values)
        read = [t for t in kept if t not in listed]
        saved = sum(self._bytes(t) for _, t in dropped) - sum(map(self._bytes, read))
        if saved <= 0:
            return _NOTHING
        if len(read) > len(dropped):
            return _NO_ROOM
        ops = get_backward_walk_ops([t for _, t in dropped], stop_at_ts=list(kept))
        return LoopCut(
            tuple(pile for pile, _ in dropped),
            tuple(t.name for t in read),
            tuple(op.name for op in ops),
            count * saved,
            count * sum(map(op_time, ops)),
        )

    def _bytes(self, tensor: Tensor) -> int:
        """Return what a list of a value holds each time that is not there anyway."""
        source = source_of(tensor)
        before = self._body.origin(source)
        if (
            source.op.type == "Const"
            or source in self._listed
            or before in self._listed
        ):
            return 0
        if source.op.type == "ReadVariableOp":
            # Each time the same buffer, if it is each time the same variable.
            place = self._body.place(source_of(source.op.inputs[0]))
        elif source.op.type == "TensorListGetItem":
            place = self._body.list_argument(source)
        else:
            place = self._body.place(source)
        return 0 if self._body.stays(place) else tensor_bytes(tensor)


def _behind(
    needed: Iterable[Tensor], runs_again: Callable[[Tensor], bool]
) -> list[Tensor]:
    """Return what some values follow from, these included."""
    waiting = list(needed)
    found = IdentitySet()
    while waiting:
        t = waiting.pop()
        if t not in found:
            found.add(t)
            waiting += t.op.inputs if runs_again(t) else ()
    return list(found)


def _runs_again(op: Operation, *, with_heavy: bool) -> bool:
    """Tell whether an op can run again in the loop of the backward pass."""
    if op.type == "Const":
        return True
    if any(t.dtype in (tf.variant, tf.resource) for t in (*op.inputs, *op.outputs)):
        # An element of a list is there anyway, and a list may have changed.
        return False
    if not with_heavy and op.type in HEAVY:
        return False
    return op.type not in BODIES and why_kept(op) is None


def least_cut(
    weights: Sequence[int],
    read: Sequence[Collection[int]],
    given: Collection[int],
    needed: Collection[int],
) -> list[int]:
    """Return the nodes of least weight that all needed ones follow from, in order.

    A minimum vertex cut: each way from a given node to a needed one goes through a node
    of the cut, its ends included. Of cuts of the same weight it is the one nearest to
    the needed nodes.

    Args:
        weights: of each node, from 0 up.
        read: for each node the nodes that it reads.
        given: nodes that cannot be computed from others.
        needed: nodes that are asked for.

    Cost: an augmentation of the flow, linear in nodes and edges, for each path that it
        takes; in bodies of loops about as many as there are needed nodes.

    Source: Ford and Fulkerson, "Maximal flow through a network", 1956; the shortest
        path first (Edmonds and Karp, 1972).

    Example:
        Two gates of 4 bytes follow from a state of 2 bytes and a weight of none:

        >>> least_cut([2, 0, 8, 4, 4], [[], [], [0, 1], [2], [2]], [0, 1], [3, 4])
        [0, 1]
    """
    # Node i is an edge of its weight, from an entrance 2 i to an exit 2 i + 1.
    source, sink = -1, -2
    # More than any cut of the nodes weighs: such edges are never a part of one.
    unlimited = sum(weights) + 1
    edges = [(2 * i, 2 * i + 1, weight) for i, weight in enumerate(weights)]
    edges += [(2 * j + 1, 2 * i, unlimited) for i in range(len(read)) for j in read[i]]
    edges += [(source, 2 * i, unlimited) for i in given]
    edges += [(2 * i + 1, sink, unlimited) for i in needed]
    # The capacity left on each edge, and the flow on it that can be taken back.
    left: dict[int, dict[int, int]] = defaultdict(dict)
    for start, end, most in edges:
        left[start][end] = most
        left[end].setdefault(start, 0)

    def reached(first: int, *, back: bool) -> dict[int, int]:
        """Return the nodes that flow can reach, each with the one before."""
        met = {first: first}
        waiting = [first]
        for node in waiting:
            for other in left[node]:
                room = left[other][node] if back else left[node][other]
                if room and other not in met:
                    met[other] = node
                    waiting.append(other)
        return met

    while sink in (before := reached(source, back=False)):
        way = [sink]
        while way[-1] != source:
            way.append(before[way[-1]])
        more = min(left[start][end] for end, start in pairwise(way))
        for end, start in pairwise(way):
            left[start][end] -= more
            left[end][start] += more
    behind = reached(sink, back=True)
    nodes = range(len(weights))
    return [i for i in nodes if 2 * i + 1 in behind and 2 * i not in behind]
