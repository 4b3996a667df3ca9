"""Cuts of the forward pass, and the costs of each stretch between two of them.

A cut is a place in the forward pass; the tensors made before it and read after it are
kept together. A cut of any graph is a minimum vertex cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from geutil.gradients.segments import Keeps, recomputable
from geutil.gradients.step import PlainStep
from geutil.graph.op_types import SUMS
from geutil.graph.types import Operation, Tensor
from geutil.memory.costs import multiply_adds, tensor_bytes, tensor_elements
from geutil.memory.cpu import aliases

NEVER = 1 << 44
"""More than there is; even thousands of these can be added up."""


@dataclass(frozen=True, eq=False)
class ForwardBuffer:
    """Tensors that share one piece of memory."""

    # Each with the place that makes it and the last one that reads it.
    tensors: list[tuple[Tensor, int, int]]
    bytes: int
    # Of keeping it, in bytes; `NEVER` where that shall not be.
    price: int
    # The place that makes it, and the last that reads it when the pass runs again.
    made: int
    last: int
    # The numbers of the backward ops: behind all, and -1, if none reads it.
    first_read: int
    last_read: int


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward ops that would be run again if nothing were kept by choice."""

    # In topological order; the place of an op is its index.
    ops: Sequence[Operation]
    # Negligible tensors are left out.
    buffers: Sequence[ForwardBuffer]
    # The number of backward ops.
    end: int


def read_forward(step: PlainStep, always: Keeps, smallest: int = 0) -> ForwardPass:
    """Return the part of a step's forward pass that could be run again."""
    # Tensors of fewer elements than `smallest` are not chosen, except those that reach
    # far: the mask of an attention, say, which each layer reads.
    read = [(r.tensor, r.op) for r in step.edges.reads]
    needed = [(t, op) for t, op in read if not always(t)]
    ops = _ordered(step, recomputable(step, always), read)
    place = {op: i for i, op in enumerate(ops)}
    turn = {op: i for i, op in enumerate(step.backward)}
    reads: dict[int, tuple[int, int]] = {}
    for t, reader in needed:
        first, _ = reads.get(id(t), (turn[reader], 0))
        reads[id(t)] = (first, turn[reader])
    last = {id(t): i for i, op in enumerate(ops) for t in op.inputs}
    buffers = []
    groups = _sharing(ops, place, always)
    matters = 0.01 * sum(tensor_bytes(group[0]) for group in groups)
    for group in groups:
        starts = [place[t.op] for t in group]
        ends = [last.get(id(t), place[t.op]) for t in group]
        turns = [reads[id(t)] for t in group if id(t) in reads]
        # One that reaches over a tenth of the pass hinders all its cuts.
        far = max(ends) - min(starts) > 0.1 * len(ops)
        least = 0 if far and tensor_bytes(group[0]) < matters else smallest
        buffers.append(
            ForwardBuffer(
                tensors=list(zip(group, starts, ends, strict=True)),
                bytes=tensor_bytes(group[0]),
                price=max(_price(t, least) for t in group),
                made=min(starts),
                last=max(ends),
                first_read=min((first for first, _ in turns), default=len(turn)),
                last_read=max((latest for _, latest in turns), default=-1),
            )
        )
    return ForwardPass(ops, buffers, len(turn))


def _ordered(
    step: PlainStep,
    ops: Iterable[Operation],
    read: Sequence[tuple[Tensor, Operation]],
) -> list[Operation]:
    """Put helpers of gradient functions behind their inputs, not at the end."""
    # One without inputs (zeros, say) goes where the other inputs of its reader are.
    place = step.edges.forward
    near = _places_of_others(step, place, read)
    key: dict[Operation, int] = {}
    for op in ops:
        if not step.is_helper(op):
            key[op] = place[op]
            continue
        producers = (t.op for t in op.inputs if t.op in key or not step.is_helper(t.op))
        # A tensor that is no part of the step was there before.
        behind = [key[m] if m in key else place.get(m, -1) for m in producers]
        key[op] = max(behind) if behind else near.get(op, len(place))
    return sorted(key, key=key.__getitem__)


def _places_of_others(
    step: PlainStep,
    place: Mapping[Operation, int],
    read: Sequence[tuple[Tensor, Operation]],
) -> dict[Operation, int]:
    """Return for each op where its first backward reader's other inputs are made."""
    beside: dict[Operation, int] = {}
    for t, reader in read:
        if not step.is_helper(t.op):
            beside[reader] = max(beside.get(reader, 0), place.get(t.op, 0))
    near: dict[Operation, int] = {}
    for t, reader in read:
        near.setdefault(t.op, beside.get(reader, len(place)))
    return near


def _sharing(
    ops: Sequence[Operation], place: dict[Operation, int], always: Keeps
) -> list[list[Tensor]]:
    """Return the tensors that are not always kept, in groups of one buffer each."""
    groups: dict[int, list[Tensor]] = {}
    for op in ops:
        source = {out: op.inputs[place] for out, place in aliases(op)}
        for index, t in enumerate(op.outputs):
            if always(t):
                continue
            group = groups.get(id(source.get(index)))
            if group is None:
                group = []
            group.append(t)
            groups[id(t)] = group
    # A group is listed once for each of its tensors.
    return list({id(group): group for group in groups.values()}.values())


def _is_passed_over(tensor: Tensor) -> bool:
    """Return whether a tensor only goes from one sum into the next."""
    # Grappler adds up a chain of sums in one op, in an order of its own, unless another
    # op reads a sum in between. To keep that one would change how the forward pass
    # rounds; and the next sum is no larger.
    readers = tensor.consumers()
    return tensor.op.type in SUMS and len(readers) == 1 and readers[0].type in SUMS


def _price(tensor: Tensor, smallest: int) -> int:
    if tensor_elements(tensor) < smallest or _is_passed_over(tensor):
        return NEVER
    size = tensor_bytes(tensor)
    if tensor.op.type == "Cast":
        # More than both take, so that the source is kept, which is at hand before.
        return max(size, tensor_bytes(tensor.op.inputs[0])) + 1
    return size


Ints = npt.NDArray[np.int64]

MOST_CUTS = 320
"""How many places are looked at: the work for each pair of them is cheap."""


@dataclass(frozen=True, eq=False)
class Stretches:
    """The stretches between any two cuts: triangles above the diagonals."""

    # The place of each cut: behind the op of this number.
    places: Ints
    # Bytes that cut j keeps in addition to cut i; of these, the bytes that the backward
    # pass does not read itself.
    kept: Ints
    idle: Ints
    # Bytes held, but for those kept at i, while the stretch from i to j is run again
    # and passed backwards, each backward op as soon as it can; and at worst, if all is
    # held until the stretch is done.
    in_turn: Ints
    at_worst: Ints
    # Multiply-adds to run the stretch again.
    cost: Ints


def measure_stretches(
    forward: ForwardPass, gradient_bytes: Sequence[int], most: int = MOST_CUTS
) -> Stretches:
    """Return the costs of each stretch between two of the best cuts."""
    # `gradient_bytes` are those of the backward pass alone at each of its ops.
    costs = np.array([multiply_adds(op) for op in forward.ops], np.int64)
    places = _best_places(forward, costs, most)
    table = _Table(forward, places)
    gradients = np.append(np.asarray(gradient_bytes, np.int64), 0)
    in_turn, at_worst = _held(forward, table, gradients)
    return Stretches(
        places=places,
        kept=table.crossing(table.prices),
        idle=table.crossing(np.where(table.last_read < 0, table.prices, 0)),
        in_turn=in_turn,
        at_worst=at_worst,
        cost=_costs(table, costs),
    )


def crossing_tensors(
    buffers: Sequence[ForwardBuffer], places: Sequence[int]
) -> list[Tensor]:
    """Return the tensors that cross one of some cuts, whose places ascend."""
    tensors = []
    for buffer in buffers:
        for tensor, start, last in buffer.tensors:
            cut = bisect_left(places, start)
            if cut < len(places) and places[cut] < last:
                tensors.append(tensor)
    return tensors


def _best_places(forward: ForwardPass, costs: Ints, most: int) -> Ints:
    """Return the start, the places where least is kept (all if few), and the end."""
    count = len(forward.ops)
    crossing = np.zeros(count + 1, np.int64)
    dear = np.zeros(count + 1, np.int64)
    needed = np.zeros(count + 1, np.int64)
    for buffer in forward.buffers:
        crossing[buffer.made] += buffer.price
        crossing[buffer.last] -= buffer.price
        dear[buffer.made] += buffer.price > buffer.bytes
        dear[buffer.last] -= buffer.price > buffer.bytes
        if buffer.last_read >= 0:
            needed[buffer.made] += buffer.bytes
    crossing = np.cumsum(crossing)[:count]
    before = np.append(np.iinfo(np.int64).max, crossing[:-1])
    after = np.append(crossing[1:], np.iinfo(np.int64).max)
    least = crossing <= np.minimum(before, after)
    allowed = (crossing > 0) & (crossing < NEVER)
    low = np.flatnonzero(allowed & (least | (np.cumsum(dear)[:count] == 0)))
    if len(low) > most:
        low = low[least[low]]
    if len(low) > most:
        # The best place of each portion of about as many bytes.
        needed = np.cumsum(needed)[:count]
        portion = needed[low] * most // max(int(needed[-1]) + 1, 1)
        order = np.lexsort((-costs[low], crossing[low], portion))
        first = np.unique(portion[order], return_index=True)[1]
        low = np.sort(low[order[first]])
    return np.concatenate(([-1], low, [count]))


class _Table:
    """The buffers as arrays, and between which cuts each is made and last read."""

    def __init__(self, forward: ForwardPass, places: Ints) -> None:
        buffers = forward.buffers
        self.cuts = len(places)
        self.places = places
        rows = [
            (b.made, b.last, b.bytes, b.price, b.first_read, b.last_read)
            for b in buffers
        ]
        columns = np.array(rows, np.int64).reshape(-1, 6).T
        self.made, self.last, self.bytes, self.prices = columns[:4]
        self.first_read, self.last_read = columns[4:]
        # The first cut behind the op that makes it, and behind its last reader.
        self.stretch = np.searchsorted(places, self.made)
        self.until = np.searchsorted(places, self.last)

    def crossing(self, weights: Ints) -> Ints:
        """Return for i, j the weights of tensors made from i to j and read after."""
        differences = np.zeros((self.cuts, self.cuts + 1), np.int64)
        np.add.at(differences, (self.stretch, self.stretch), weights)
        np.add.at(differences, (self.stretch, self.until), -weights)
        across = np.cumsum(differences, axis=1)[:, :-1]
        from_here = np.cumsum(across[::-1], axis=0)[::-1]
        return np.vstack((from_here[1:], np.zeros((1, self.cuts), np.int64)))


def _costs(table: _Table, costs: Ints) -> Ints:
    """Return the cost to run each stretch again, less its kept tensors."""
    behind = np.append(0, np.cumsum(costs))
    at = behind[np.minimum(table.places + 1, len(costs))]
    whole = at[np.newaxis, :] - at[:, np.newaxis]
    saved = table.crossing(costs[table.made])
    cost = np.maximum(whole - saved, 0)
    # The first inputs of the backward pass are not run again.
    cost[:, -1] = 0
    return cost


def _held(forward: ForwardPass, table: _Table, gradients: Ints) -> tuple[Ints, Ints]:
    starts = _turns(forward, table)
    again = _run_again(forward, table, gradients[starts])
    in_turn = np.zeros((table.cuts, table.cuts), np.int64)
    at_worst = np.zeros_like(in_turn)
    most = np.maximum.accumulate
    ending = np.zeros(forward.end + 1, np.int64)
    needed = table.last_read >= 0
    for i in range(table.cuts - 2, -1, -1):
        new = needed & (table.stretch == i + 1)
        np.add.at(ending, table.last_read[new], table.bytes[new])
        alive = np.cumsum(ending[::-1])[::-1]
        # Stretch i to i+1 comes last in the backward pass: its addition is first here.
        bounds = starts[i : table.cuts][::-1]
        both = _most_between(alive + gradients, bounds)[::-1]
        flowing = _most_between(gradients, bounds)[::-1]
        in_turn[i, i + 1 :] = most(both)
        at_worst[i, i + 1 :] = most(flowing) + alive[starts[i + 1 :]]
    return np.maximum(in_turn, again), np.maximum(at_worst, again)


def _turns(forward: ForwardPass, table: _Table) -> Ints:
    """Return, for each cut, when the backward pass first needs a tensor before it."""
    # A tensor that crosses the cut is kept, so it does not count.
    first = np.full(table.cuts + 1, forward.end, np.int64)
    needed = table.last_read >= 0
    np.minimum.at(first, table.until[needed], table.first_read[needed])
    turns = np.minimum.accumulate(first)[:-1]
    turns[-1] = 0
    return turns


def _run_again(forward: ForwardPass, table: _Table, started: Ints) -> Ints:
    """Return the most that is held while each stretch is run again."""
    count = len(forward.ops)
    passing = np.zeros(count + 2, np.int64)
    made_bytes = np.zeros(count + 2, np.int64)
    needed = table.last_read >= 0
    np.add.at(made_bytes, table.made[needed], table.bytes[needed])
    np.add.at(passing, table.made[~needed], table.bytes[~needed])
    np.add.at(passing, table.last[~needed] + 1, -table.bytes[~needed])
    held_bytes = np.cumsum(made_bytes)
    total = (held_bytes + np.cumsum(passing))[:count]
    bounds = np.minimum(table.places + 1, count)
    within = np.append(0, _most_between(total, bounds))
    before = np.append(0, held_bytes)[bounds]
    again = np.zeros((table.cuts, table.cuts), np.int64)
    for i in range(table.cuts - 1):
        reached = np.maximum.accumulate(within[i + 1 :])
        again[i, i + 1 :] = reached - before[i] + started[i + 1 :]
    return again


def _most_between(values: Ints, bounds: Ints) -> Ints:
    """Return the maximum of `values` in each interval of ascending bounds, or 0."""
    maxima = np.zeros(len(bounds) - 1, np.int64)
    full = np.flatnonzero(bounds[1:] > bounds[:-1])
    if len(full):
        ends = np.append(bounds[full], bounds[full[-1] + 1])
        # Intervals that are not empty lie side by side.
        maxima[full] = np.maximum.reduceat(values[: ends[-1]], ends[:-1])
    return maxima


def least_cut(
    weights: Sequence[int],
    read: Sequence[Collection[int]],
    given: Collection[int],
    needed: Collection[int],
) -> list[int]:
    """Return the nodes of least weight that all needed ones follow from, in order."""
    # A minimum vertex cut between given and needed nodes; `read` has the inputs of
    # each. Of equal cuts it is the one nearest to the needed nodes. Source: Ford and
    # Fulkerson, "Maximal flow through a network", 1956; the shortest path first
    # (Edmonds and Karp, 1972).
    source, sink = -1, -2
    # More than any cut of the nodes weighs: such edges are never a part of one.
    unlimited = sum(weights) + 1
    # Node i is an edge of its weight, from an entrance 2 i to an exit 2 i + 1.
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
