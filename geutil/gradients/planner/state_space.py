"""States of a computation, what has run and what is held, searched by numba.

A* (Hart et al. 1968): what is freed though something still needs it has to run again,
with what is missing of its inputs. That time counts at once, so a state is worth what
ran again before it and what surely will. The least worth of the states that were not
looked at yet bounds the extra time of every schedule; where none is left below that of
a schedule, the schedule is the best.

Nothing is freed before another output needs the room, and then no more than it needs:
any schedule can wait so long. What cannot be of use again is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from geutil.gradients.planner.problem import Problem
from geutil.gradients.planner.run_slots import Array, compiled, nodes_of

_NEEDED, _SURE = 1, 2
"""Marks of nodes: something that has not run reads it; it surely runs again."""
_MOST_FREED = 1000
"""How many choices of what is freed for one run are looked at."""
_CHOICES = 20
"""As many choices as this count for a state."""
_WORD = 64


class StateSpace(NamedTuple):
    """A problem and the states that were met, as arrays.

    Attributes:
        start: where the inputs of each node begin in `inputs`; one more at the end.
        inputs: the inputs of all nodes.
        read_start: where the readers of each node begin in `readers`.
        readers: the readers of all nodes.
        sizes: in bytes.
        work: the bytes of the workspace of each node.
        times: of one run.
        stays: whether the output has to be there at the end.
        keep: whether it may not be freed.
        once: whether the node may run only once.
        backwards: the nodes, each before its inputs.
        ahead: the node whose first run comes before; -1 for none, or for any order.
        ran: of each state, what has run, as bits.
        held: of each state, what is held, as bits.
        spent: the time of second runs up to each state.
        worth: that and the time of those that surely come.
        parent: the state before.
        action: the node that ran in between.
        depth: how many nodes have run.
        table: the states by hash; -1 in an empty place.
        heap_worth: the worth of the states in the heap, when they came in.
        heap: the states that were not looked at yet, the least worth first.
        numbers: how many states there are, and in the heap; the state of the best
            schedule, -1 for none; 1 if there is no room for more.
        figures: the budget; the time of the best schedule; by how much less another has
            to take; the least worth of what was left out.
    """

    start: Array
    inputs: Array
    read_start: Array
    readers: Array
    sizes: Array
    work: Array
    times: Array
    stays: Array
    keep: Array
    once: Array
    backwards: Array
    ahead: Array
    ran: Array
    held: Array
    spent: Array
    worth: Array
    parent: Array
    action: Array
    depth: Array
    table: Array
    heap_worth: Array
    heap: Array
    numbers: Array
    figures: Array


_STATES, _HEAPED, _GOAL, _FULL = range(4)
_BUDGET, UPPER, _STEP, _LOST, _PULL = range(5)


def new_space(
    problem: Problem,
    order: Sequence[int] | None,
    budget: float,
    figures: tuple[float, float, float],
    most: int,
) -> StateSpace:
    """Return the space of a problem with the state in which nothing has run.

    Args:
        problem: the computation.
        order: in which nodes run for the first time; None for any.
        budget: in bytes.
        figures: extra time, by how much less a schedule has to take, and by how much
            a state comes earlier for each node that has run.
        most: how many states there is room for.
    """
    count = len(problem)
    nodes = nodes_of(problem, None if order is None else tuple(order))
    keep = np.zeros(count, np.bool_)
    keep[list(problem.keep)] = True
    words = max(-(-count // _WORD), 1)
    places = 1 << (2 * most).bit_length()
    return StateSpace(
        nodes.start,
        nodes.inputs,
        nodes.read_start,
        nodes.readers,
        nodes.sizes,
        nodes.work,
        nodes.times,
        nodes.stays,
        keep,
        nodes.once,
        np.array(problem.topological_order[::-1], np.int64),
        nodes.ahead,
        np.zeros((most, words), np.uint64),
        np.zeros((most, words), np.uint64),
        np.zeros(most),
        np.zeros(most),
        np.full(most, -1, np.int64),
        np.full(most, -1, np.int64),
        np.zeros(most, np.int64),
        np.full(places, -1, np.int64),
        np.zeros(2 * most),
        np.zeros(2 * most, np.int64),
        np.array([1, 1, -1, 0], np.int64),
        np.array([np.floor(min(budget, 2.0**53)), *figures[:2], np.inf, figures[2]]),
    )


def bound_of(space: StateSpace) -> float:
    """Return extra time that every schedule takes at least, as far as is known."""
    figures, numbers = space.figures, space.numbers
    waiting = np.inf
    if numbers[_HEAPED]:
        waiting = 0.0 if figures[_PULL] else space.heap_worth[0]
    return float(min(figures[UPPER], figures[_LOST], waiting))


def is_done(space: StateSpace) -> bool:
    """Tell whether nothing more is to be learned."""
    return bool(
        space.numbers[_FULL]
        or not space.numbers[_HEAPED]
        or bound_of(space) > space.figures[UPPER] - space.figures[_STEP]
    )


def found_runs(space: StateSpace) -> list[int] | None:
    """Return the runs of a better schedule; None for none."""
    state = int(space.numbers[_GOAL])
    if state < 0:
        return None
    runs = []
    while space.action[state] >= 0:
        runs.append(int(space.action[state]))
        state = int(space.parent[state])
    return runs[::-1]


@compiled
def _judge(space, ran, held, slack, marks, costs):  # type: ignore[no-untyped-def]
    """Free what cannot be of use, and return the time of what surely runs again.

    Args:
        space: the problem.
        ran: what has run.
        held: what is held; changed.
        slack: the extra time that a schedule may still take; infinity if unknown.
        marks: for each node, 1 if something needs it that has not run, and 2 added if
            it surely runs again; changed.
        costs: how much time it would take at least to run each node again to some
            use, besides what surely comes; changed.
    """
    again = 0.0
    for u in space.backwards:
        marks[u] = 0
        if not ran[u]:
            continue
        needed, sure = space.stays[u], False
        for e in range(space.read_start[u], space.read_start[u + 1]):
            w = space.readers[e]
            if ran[w]:
                sure |= marks[w] >= _SURE
            else:
                needed = True
        marks[u] = _NEEDED if needed else 0
        if not held[u] and (needed or sure):
            if space.once[u]:
                return np.inf
            marks[u] += _SURE
            again += space.times[u]
    slack -= again
    for u in space.backwards:
        costs[u] = np.inf
        if not ran[u]:
            continue
        cost = 0.0 if marks[u] & _NEEDED else np.inf
        for e in range(space.read_start[u], space.read_start[u + 1]):
            if ran[space.readers[e]]:
                cost = min(cost, costs[space.readers[e]])
        # What only a run reads that would cost too much is of no use.
        if held[u] and cost == np.inf and not space.keep[u]:
            held[u] = False
        if marks[u] >= _SURE:
            costs[u] = 0.0
            continue
        cost += space.times[u]
        missing = 0.0
        for e in range(space.start[u], space.start[u + 1]):
            w = space.inputs[e]
            if not held[w] and marks[w] < _SURE:
                missing += np.inf if space.once[w] else space.times[w]
        if not space.once[u] and cost + missing <= slack:
            costs[u] = cost
    return again


@compiled
def _find(space, ran_bits, held_bits):  # type: ignore[no-untyped-def]
    """Return the place of a state in the table, or an empty one for it."""
    key = np.uint64(1469598103934665603)
    for i in range(len(ran_bits)):
        key = (key ^ ran_bits[i]) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
        key = (key ^ held_bits[i]) * np.uint64(0xBF58476D1CE4E5B9)
        key ^= key >> np.uint64(32)
    mask = len(space.table) - 1
    place = np.int64(key & np.uint64(mask))
    while space.table[place] >= 0:
        state = space.table[place]
        same = True
        for i in range(len(ran_bits)):
            same &= space.ran[state, i] == ran_bits[i]
            same &= space.held[state, i] == held_bits[i]
        if same:
            break
        place = (place + 1) & mask
    return place


@compiled
def _is_before(space, i, j):  # type: ignore[no-untyped-def]
    """Tell whether an entry of the heap comes before another: less worth, or deeper."""
    if space.heap_worth[i] != space.heap_worth[j]:
        return space.heap_worth[i] < space.heap_worth[j]
    return space.depth[space.heap[i]] > space.depth[space.heap[j]]


@compiled
def _swap(space, i, j):  # type: ignore[no-untyped-def]
    space.heap_worth[i], space.heap_worth[j] = space.heap_worth[j], space.heap_worth[i]
    space.heap[i], space.heap[j] = space.heap[j], space.heap[i]


@compiled
def _key(space, state):  # type: ignore[no-untyped-def]
    """Return by what a state is looked at: its worth, less where it is deep."""
    return space.worth[state] - space.figures[_PULL] * space.depth[state]


@compiled
def _push(space, state):  # type: ignore[no-untyped-def]
    i = space.numbers[_HEAPED]
    space.numbers[_HEAPED] += 1
    space.heap_worth[i], space.heap[i] = _key(space, state), state
    while i > 0 and _is_before(space, i, (i - 1) // 2):
        _swap(space, i, (i - 1) // 2)
        i = (i - 1) // 2


@compiled
def _pop(space):  # type: ignore[no-untyped-def]
    state = space.heap[0]
    space.numbers[_HEAPED] -= 1
    count, i = space.numbers[_HEAPED], 0
    _swap(space, 0, count)
    while True:
        least = i
        for child in range(2 * i + 1, min(2 * i + 3, count)):
            if _is_before(space, child, least):
                least = child
        if least == i:
            return state
        _swap(space, i, least)
        i = least


@compiled
def _come_to(space, parent, node, spent, ran, held, bits, marks, costs):  # type: ignore[no-untyped-def]
    """Add a state, unless it is known or worth too much."""
    figures, numbers = space.figures, space.numbers
    most = figures[UPPER] - figures[_STEP]
    worth = spent + _judge(space, ran, held, most - spent, marks, costs)
    # A state is worth no less than the one before but for rounding.
    worth = max(worth, space.worth[parent])
    if worth > most or worth == np.inf:
        return
    bits[:] = 0
    depth = 0
    done = True
    for u in range(len(ran)):
        if ran[u]:
            bits[0, u // 64] |= np.uint64(1) << np.uint64(u % 64)
            depth += 1
            done &= not space.stays[u] or held[u]
        if held[u]:
            bits[1, u // 64] |= np.uint64(1) << np.uint64(u % 64)
    place = _find(space, bits[0], bits[1])
    state = space.table[place]
    if state >= 0:
        if spent >= space.spent[state] - 1e-12 * (1.0 + spent):
            return
    elif numbers[_STATES] == len(space.ran):
        numbers[_FULL] = 1
        figures[_LOST] = min(figures[_LOST], worth)
        return
    else:
        state = numbers[_STATES]
        numbers[_STATES] += 1
        space.table[place] = state
        space.ran[state], space.held[state] = bits[0], bits[1]
        space.depth[state] = depth
    space.spent[state], space.worth[state] = spent, worth
    space.parent[state], space.action[state] = parent, node
    if depth == len(ran) and done:
        figures[UPPER], numbers[_GOAL] = spent, state
    elif numbers[_HEAPED] == len(space.heap):
        numbers[_FULL] = 1
        figures[_LOST] = min(figures[_LOST], worth)
    else:
        _push(space, state)


@compiled
def _may_run(space, node, ran, held, costs):  # type: ignore[no-untyped-def]
    """Tell whether a node may run next."""
    if held[node] or (ran[node] and costs[node] == np.inf):
        return False
    ready = ran[node] or space.ahead[node] < 0 or ran[space.ahead[node]]
    for e in range(space.start[node], space.start[node + 1]):
        ready &= held[space.inputs[e]]
    return ready


@compiled
def _freeable(space, node, held, marks, costs, by_size, chosen):  # type: ignore[no-untyped-def]
    """Collect what may be freed for a run of a node, the largest first; count it."""
    count = 0
    for u in by_size:
        if not held[u] or space.keep[u] or space.sizes[u] == 0.0:
            continue
        # What something needs has to be made again, which may take too long.
        if marks[u] & _NEEDED and costs[u] == np.inf:
            continue
        is_input = False
        for e in range(space.start[node], space.start[node + 1]):
            is_input |= space.inputs[e] == u
        if not is_input:
            chosen[count] = u
            count += 1
    return count


@compiled
def expand(space, most):  # type: ignore[no-untyped-def]
    """Look at some states, the first of the heap first; return at how many.

    Many choices of what is freed count for several.

    Args:
        space: the problem and its states; changed.
        most: how many states.

    Cost: a state takes the nodes and their readers, for each run that may follow and
    each choice of what is freed for it.
    """
    count = len(space.sizes)
    figures, numbers = space.figures, space.numbers
    ran, held = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    then_ran, then_held = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    marks, then_marks = np.zeros(count, np.int64), np.zeros(count, np.int64)
    costs, then_costs = np.zeros(count), np.zeros(count)
    bits = np.zeros((2, space.ran.shape[1]), np.uint64)
    chosen = np.zeros(count, np.int64)
    taken = np.zeros(count, np.int64)
    rest = np.zeros(count + 1)
    by_size = np.argsort(-space.sizes)
    looked = choices_tried = 0
    while looked + choices_tried // _CHOICES < most:
        looked += 1
        if not numbers[_HEAPED] or numbers[_FULL]:
            break
        key = space.heap_worth[0]
        state = _pop(space)
        worth = space.worth[state]
        # It was met again, in less time, and looked at then; or a schedule was found.
        if key > _key(space, state) or worth > figures[UPPER] - figures[_STEP]:
            continue
        for u in range(count):
            word, bit = u // 64, np.uint64(u % 64)
            ran[u] = (space.ran[state, word] >> bit) & np.uint64(1)
            held[u] = (space.held[state, word] >> bit) & np.uint64(1)
        spent = space.spent[state]
        slack = figures[UPPER] - figures[_STEP] - spent
        slack -= _judge(space, ran, held, slack, marks, costs)
        level = 0.0
        for u in range(count):
            if held[u]:
                level += space.sizes[u]
        for v in range(count):
            if not _may_run(space, v, ran, held, costs):
                continue
            then = spent + space.times[v] if ran[v] else spent
            wanted = level + space.sizes[v] + space.work[v] - figures[_BUDGET]
            choices = 0
            if wanted > 0.0:
                choices = _freeable(space, v, held, marks, costs, by_size, chosen)
            rest[choices] = 0.0
            for i in range(choices - 1, -1, -1):
                rest[i] = rest[i + 1] + space.sizes[chosen[i]]
            i, freed, cost, tried = 0, 0.0, 0.0, 0
            while True:
                if freed >= wanted:
                    least = True
                    for j in range(i):
                        if taken[j] and freed - space.sizes[chosen[j]] >= wanted:
                            least = False
                    if least:
                        then_ran[:] = ran
                        then_held[:] = held
                        for j in range(i):
                            if taken[j]:
                                then_held[chosen[j]] = False
                        then_ran[v] = then_held[v] = True
                        _come_to(
                            space,
                            state,
                            v,
                            then,
                            then_ran,
                            then_held,
                            bits,
                            then_marks,
                            then_costs,
                        )
                elif i < choices and freed + rest[i] >= wanted:
                    u = chosen[i]
                    price = space.times[u] if marks[u] & _NEEDED else 0.0
                    taken[i] = cost + price <= slack
                    if taken[i]:
                        freed += space.sizes[u]
                        cost += price
                    i += 1
                    continue
                tried += 1
                # Back to the latest that was freed, which is not freed now.
                while i > 0 and not taken[i - 1]:
                    i -= 1
                if i == 0:
                    break
                if tried >= _MOST_FREED:
                    figures[_LOST] = min(figures[_LOST], worth)
                    break
                u = chosen[i - 1]
                taken[i - 1] = 0
                freed -= space.sizes[u]
                cost -= space.times[u] if marks[u] & _NEEDED else 0.0
            choices_tried += tried
    return looked + choices_tried // _CHOICES
