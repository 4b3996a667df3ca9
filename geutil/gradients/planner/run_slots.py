"""Sequences of runs, changed in place by kernels that numba compiles.

A sequence holds every node once or more; a use reads the latest run of its node, and an
output is freed behind its last use. Runs lie in slots with empty ones between, so that
one more moves few of the others, and a change touches only what it has to: the bytes
between two slots, and some last uses. A log of changes takes them back.

numba's cache of `sequence_search`, which has these kernels inlined, sees changes of
that file alone: where this one changes, so has `RUN_SLOTS` there (a test says to what).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from geutil.gradients.planner.problem import Problem

Array = npt.NDArray[Any]


def compiled(function: Callable[..., Any]) -> Any:
    """Have a function compiled, once for all processes where that can be written.

    Sums may be added up in any order: bytes are whole numbers, so nothing differs.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract", "nnan", "nsz"},
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # Neither the package's folder nor the user's can be written.
        return numba.njit(**options)(function)


CHAIN = 24
"""The most runs that one move puts in."""
_SPREAD = 1.4
"""Slots for each run; more of them make a step longer, fewer have more runs moved."""


# numba's cache holds the names of these classes: files of one that was renamed since
# cannot be read any more.
class Nodes(NamedTuple):
    """A problem as arrays.

    Attributes:
        start: where the inputs of each node begin in `inputs`; one more at the end.
        inputs: the inputs of all nodes.
        read_start: where the readers of each node begin in `readers`.
        readers: the readers of all nodes.
        sizes: in bytes.
        work: the bytes of the workspace of each node.
        times: of one run.
        stays: whether the output has to be there at the end.
        outputs: the nodes of which it has to be.
        once: whether the node may run only once.
        again: those that may run again and leave something behind.
        ahead: the node whose first run comes before; -1 for none, or for any order.
        behind: the node whose first run comes after.
    """

    start: Array
    inputs: Array
    read_start: Array
    readers: Array
    sizes: Array
    work: Array
    times: Array
    stays: Array
    outputs: Array
    once: Array
    again: Array
    ahead: Array
    behind: Array


class SearchState(NamedTuple):
    """A sequence of runs in slots, and what else goes on from slice to slice.

    Attributes:
        node: of the run in each slot; -1 in an empty one.
        last: the slot of the last use of each run; its own if nothing reads it.
        level: the bytes that are held in each slot, empty or not; workspaces included.
        filled: 1 for a slot with a run, 0 for an empty one.
        before: the slot of the run before of the same node; -1 for none.
        after: the slot of its next run.
        first: the slot of the first run of each node.
        newest: the slot of its last one.
        copies: how many runs each node has.
        log: what the current move did, as pairs of a node and a slot: a run that was
            put in; one taken out, as -1 - node; one that slid there from a slot, which
            is given above the numbers of nodes, the other way round.
        loose: runs that nothing reads since the current move.
        best: the runs of the best sequence that keeps the budget.
        numbers: how many slots and runs there are, of the best runs, of the log, of the
            loose runs, of the moves of this window and of those above the budget.
        figures: the bytes above the budget, summed over the runs; the time; the time of
            the best; the price; the budget.
        dice: the state of the random numbers.
    """

    node: Array
    last: Array
    level: Array
    filled: Array
    before: Array
    after: Array
    first: Array
    newest: Array
    copies: Array
    log: Array
    loose: Array
    best: Array
    numbers: Array
    figures: Array
    dice: Array


SPAN, LENGTH, _BEST_LENGTH, LOGGED, LOOSE, MOVES, OVER, _SLID = range(8)
EXCESS, TIME, BEST_TIME, PRICE, BUDGET = range(5)


def nodes_of(problem: Problem, order: tuple[int, ...] | None) -> Nodes:
    """Return a problem as arrays.

    Args:
        problem: the computation.
        order: in which nodes run for the first time; None for any.
    """
    count = len(problem)
    stays, once = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    stays[[*problem.outputs, *problem.keep]] = True
    once[[*problem.no_recompute, *problem.keep]] = True
    ahead, behind = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    if order is not None:
        ahead[list(order[1:])] = order[:-1]
        behind[list(order[:-1])] = order[1:]
    return Nodes(
        *_flat(problem.inputs),
        *_flat(problem.readers),
        np.array(problem.sizes, np.float64),
        np.array(problem.workspaces, np.float64),
        np.array(problem.times, np.float64),
        stays,
        np.nonzero(stays)[0],
        once,
        np.nonzero(~once & (np.array(problem.sizes) > 0))[0],
        ahead,
        behind,
    )


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return where each list begins in all of them together, and these."""
    start = np.cumsum([0, *map(len, lists)])
    return start, np.array([u for us in lists for u in us], np.int64)


def new_search(
    nodes: Nodes, runs: Sequence[int], budget: float, seed: int
) -> SearchState:
    """Return a search that begins with some runs.

    Args:
        nodes: the computation.
        runs: every node once or more, each behind a run of its inputs.
        budget: in bytes.
        seed: of the random numbers.
    """
    count = len(nodes.sizes)
    room = int(_SPREAD * max(4 * count, 2 * len(runs))) + 8 * CHAIN
    slots = [np.full(room, -1, np.int64) for _ in range(4)]
    state = SearchState(
        slots[0],
        slots[1],
        np.zeros(room),
        np.zeros(room),
        slots[2],
        slots[3],
        np.full(count, -1, np.int64),
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
        # For the longest chain, each of whose runs may have all others slide. Zeros
        # take no memory before they are written to.
        np.zeros((8 * CHAIN * (room + 1), 2), np.int64),
        np.zeros(2 * room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(8, np.int64),
        np.zeros(5),
        np.array([0x9E3779B97F4A7C15 ^ (seed * 2654435761 + 1)], np.uint64),
    )
    state.figures[BEST_TIME], state.figures[PRICE] = np.inf, 0.1
    # Bytes are whole, so that sums of them above the budget are, too.
    state.figures[BUDGET] = np.floor(min(budget, 2.0**53))
    restart(nodes, state, np.array(runs, np.int64))
    return state


def best_runs(state: SearchState) -> list[int] | None:
    """Return the best runs within the budget; None if there were none."""
    if not np.isfinite(state.figures[BEST_TIME]):
        return None
    return state.best[: int(state.numbers[_BEST_LENGTH])].tolist()


def rank(state: SearchState) -> tuple[float, float]:
    """Return the best time of a search, and the bytes above the budget."""
    return float(state.figures[BEST_TIME]), float(state.figures[EXCESS])


def current_runs(state: SearchState) -> list[int]:
    """Return the runs at which a search stands."""
    return state.node[state.node >= 0].tolist()


@compiled
def roll(dice):  # type: ignore[no-untyped-def]
    """Return a number from 0 up to 1 (Marsaglia's xorshift)."""
    x = dice[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    dice[0] = x
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@compiled
def pick(dice, count):  # type: ignore[no-untyped-def]
    """Return a whole number from 0 up to a count, without it."""
    return min(int(roll(dice) * count), count - 1)


@compiled
def waited(dice):  # type: ignore[no-untyped-def]
    """Return a number above 0 whose mean is 1, exponentially distributed."""
    return -np.log(max(roll(dice), 1e-12))


@compiled
def _spread(nodes, state, runs, room):  # type: ignore[no-untyped-def]
    """Lay runs out in slots, with room for more, and compute what is known of them."""
    length = len(runs)
    span = min(int(_SPREAD * (length + room)), len(state.node) - 2)
    state.node[:] = -1
    state.before[:] = -1
    state.after[:] = -1
    state.newest[:] = -1
    state.first[:] = -1
    state.copies[:] = 0
    state.level[:] = 0.0
    state.filled[:] = 0.0
    time = 0.0
    for i in range(length):
        slot = (i + 1) * span // (length + 1)
        node = runs[i]
        state.node[slot], state.last[slot], state.filled[slot] = node, slot, 1.0
        for e in range(nodes.start[node], nodes.start[node + 1]):
            state.last[state.newest[nodes.inputs[e]]] = slot
        if state.newest[node] >= 0:
            state.before[slot] = state.newest[node]
            state.after[state.newest[node]] = slot
        else:
            state.first[node] = slot
        state.newest[node] = slot
        state.copies[node] += 1
        time += nodes.times[node]
    for node in nodes.outputs:
        state.last[state.newest[node]] = span
    state.numbers[SPAN], state.numbers[LENGTH] = span, length
    state.numbers[_SLID] = 0
    state.figures[EXCESS], state.figures[TIME] = 0.0, time
    for slot in range(span):
        if state.node[slot] >= 0:
            size = nodes.sizes[state.node[slot]]
            state.level[slot] += size
            state.level[state.last[slot] + 1] -= size
    level = 0.0
    for slot in range(span):
        level += state.level[slot]
        state.level[slot] = level
        if state.node[slot] >= 0:
            state.level[slot] += nodes.work[state.node[slot]]
        over = max(state.level[slot] - state.figures[BUDGET], 0.0)
        state.figures[EXCESS] += over * state.filled[slot]


@compiled
def note_best(nodes, state):  # type: ignore[no-untyped-def]
    """Remember the current runs if they keep the budget in less time."""
    figures = state.figures
    close = 1e-12 * max(1.0, figures[TIME])
    if figures[EXCESS] <= 0.0 and figures[TIME] < figures[BEST_TIME] - close:
        length, time = 0, 0.0
        for slot in range(state.numbers[SPAN]):
            node = state.node[slot]
            if node >= 0:
                state.best[length] = node
                length += 1
                time += nodes.times[node]
        state.numbers[_BEST_LENGTH] = length
        # Added up anew: millions of moves would leave their rounding behind.
        figures[TIME] = figures[BEST_TIME] = time


@compiled
def run_before(state, node, slot):  # type: ignore[no-untyped-def]
    """Return the slot of a node's latest run before a slot; -1 if there is none."""
    run = state.newest[node]
    while run >= slot:
        run = state.before[run]
    return run


@compiled
def last_use(nodes, state, node, run, end):  # type: ignore[no-untyped-def]
    """Return the slot of the last use of a run before another slot."""
    last = run
    for e in range(nodes.read_start[node], nodes.read_start[node + 1]):
        last = max(last, run_before(state, nodes.readers[e], end))
    return last


@compiled
def first_use(nodes, state, node, run):  # type: ignore[no-untyped-def]
    """Return the slot of the first use of a run, or of the next run of its node."""
    first = state.after[run]
    if first < 0:
        first = state.numbers[SPAN]
    for e in range(nodes.read_start[node], nodes.read_start[node + 1]):
        use = state.newest[nodes.readers[e]]
        while use > run:
            first = min(first, use)
            use = state.before[use]
    return first


@compiled
def _hold(state, low, high, size):  # type: ignore[no-untyped-def]
    """Add bytes from one slot to another, both included."""
    if low > high:
        return
    # Slices, since indices from 0 up let the loop be vectorized.
    levels, filled = state.level[low : high + 1], state.filled[low : high + 1]
    budget, more = state.figures[BUDGET], 0.0
    for i in range(len(levels)):
        level = levels[i]
        then = level + size
        levels[i] = then
        more += (max(then, budget) - max(level, budget)) * filled[i]
    state.figures[EXCESS] += more


@compiled
def add_run(nodes, state, node, slot):  # type: ignore[no-untyped-def]
    """Put a run into an empty slot; return whether it may be there."""
    before = run_before(state, node, slot)
    if before < 0:
        ahead = nodes.ahead[node]
        if ahead >= 0 and state.first[ahead] > slot:
            return False
    for e in range(nodes.start[node], nodes.start[node + 1]):
        first = state.first[nodes.inputs[e]]
        if first < 0 or first > slot:
            return False
    size = nodes.sizes[node]
    after = state.after[before] if before >= 0 else state.first[node]
    state.node[slot], state.before[slot], state.after[slot] = node, before, after
    state.filled[slot] = 1.0
    state.level[slot] += nodes.work[node]
    state.figures[EXCESS] += max(state.level[slot] - state.figures[BUDGET], 0.0)
    for e in range(nodes.start[node], nodes.start[node + 1]):
        u = nodes.inputs[e]
        run = run_before(state, u, slot)
        if state.last[run] < slot:
            _hold(state, state.last[run] + 1, slot, nodes.sizes[u])
            state.last[run] = slot
    if after >= 0:
        state.before[after] = slot
    else:
        state.newest[node] = slot
    last = slot
    if before < 0:
        state.first[node] = slot
    else:
        state.after[before] = slot
        last = max(last, state.last[before])
    if last == slot:
        _hold(state, slot, slot, size)
    else:
        # What read the run before reads this one now.
        shorter = last_use(nodes, state, node, before, slot)
        _hold(state, shorter + 1, slot - 1, -size)
        state.last[before] = shorter
        if shorter == before:
            _note_loose(state, before)
    state.last[slot] = last
    state.copies[node] += 1
    state.numbers[LENGTH] += 1
    state.figures[TIME] += nodes.times[node]
    return True


@compiled
def take_run(nodes, state, slot):  # type: ignore[no-untyped-def]
    """Take a run out of its slot; return whether it may go."""
    node = state.node[slot]
    before, after, last = state.before[slot], state.after[slot], state.last[slot]
    if before < 0:
        behind = nodes.behind[node]
        if after < 0 or last > slot or (behind >= 0 and state.first[behind] < after):
            return False
        state.first[node] = after
    else:
        state.after[before] = after
    if after < 0:
        state.newest[node] = before
    else:
        state.before[after] = before
    size = nodes.sizes[node]
    if last > slot:
        _hold(state, state.last[before] + 1, slot - 1, size)
        state.last[before] = last
    else:
        _hold(state, slot, slot, -size)
    for e in range(nodes.start[node], nodes.start[node + 1]):
        u = nodes.inputs[e]
        run = run_before(state, u, slot)
        if state.last[run] == slot:
            shorter = last_use(nodes, state, u, run, slot)
            _hold(state, shorter + 1, slot, -nodes.sizes[u])
            state.last[run] = shorter
            if shorter == run:
                _note_loose(state, run)
    state.figures[EXCESS] -= max(state.level[slot] - state.figures[BUDGET], 0.0)
    state.level[slot] -= nodes.work[node]
    state.node[slot], state.filled[slot] = -1, 0.0
    state.copies[node] -= 1
    state.numbers[LENGTH] -= 1
    state.figures[TIME] -= nodes.times[node]
    return True


@compiled
def _note_loose(state, slot):  # type: ignore[no-untyped-def]
    if state.numbers[LOOSE] < len(state.loose):
        state.loose[state.numbers[LOOSE]] = slot
        state.numbers[LOOSE] += 1


@compiled
def note(state, node, slot):  # type: ignore[no-untyped-def]
    """Log a change, so that `undo` takes it back."""
    state.log[state.numbers[LOGGED], 0] = node
    state.log[state.numbers[LOGGED], 1] = slot
    state.numbers[LOGGED] += 1


@compiled
def drop_loose(nodes, state):  # type: ignore[no-untyped-def]
    """Take out runs that nothing reads any more, if their node runs elsewhere."""
    while state.numbers[LOOSE] and state.numbers[LOGGED] < len(state.log):
        state.numbers[LOOSE] -= 1
        slot = state.loose[state.numbers[LOOSE]]
        node = state.node[slot]
        # It may have gone, or be read again, since it was noted.
        is_loose = node >= 0 and state.last[slot] == slot and state.copies[node] > 1
        if is_loose and take_run(nodes, state, slot):
            note(state, -1 - node, slot)


@compiled
def undo(nodes, state, mark):  # type: ignore[no-untyped-def]
    """Take back what was logged, the latest first, down to a length of the log."""
    count = len(state.copies)
    while state.numbers[LOGGED] > mark:
        state.numbers[LOGGED] -= 1
        node = state.log[state.numbers[LOGGED], 0]
        slot = state.log[state.numbers[LOGGED], 1]
        if node >= count:
            _slide(nodes, state, node - count, slot)
        elif node >= 0:
            take_run(nodes, state, slot)
        else:
            add_run(nodes, state, -1 - node, slot)
    state.numbers[LOOSE] = 0


@compiled
def _slide(nodes, state, slot, then):  # type: ignore[no-untyped-def]
    """Put a run into the slot next to it, which is empty; its order stays."""
    state.numbers[_SLID] += 1
    node = state.node[slot]
    across = state.level[slot] - nodes.work[node]
    for e in range(nodes.start[node], nodes.start[node + 1]):
        u = nodes.inputs[e]
        run = run_before(state, u, slot)
        if state.last[run] == slot:
            state.last[run] = then
            if then < slot:
                across -= nodes.sizes[u]
    last = state.last[slot]
    if last == slot:
        last = then
    if then > slot or last == then:
        across -= nodes.sizes[node]
    # What is held beside the run is what was; behind it, or before it, what passes.
    state.level[then], state.level[slot] = state.level[slot], across
    before, after = state.before[slot], state.after[slot]
    state.node[then], state.node[slot] = node, -1
    state.filled[then], state.filled[slot] = 1.0, 0.0
    state.last[then], state.before[then], state.after[then] = last, before, after
    if before < 0:
        state.first[node] = then
    else:
        state.after[before] = then
    if after < 0:
        state.newest[node] = then
    else:
        state.before[after] = then


@compiled
def make_room(nodes, state, slot, wanted):  # type: ignore[no-untyped-def]
    """Have some slots right before a slot empty; return where the run there is then."""
    span, have, count = state.numbers[SPAN], 0, len(state.copies)
    while True:
        while have < wanted and slot > have and state.node[slot - 1 - have] < 0:
            have += 1
        if have == wanted:
            return slot
        # The nearest empty slot on either side.
        low, high = slot - 1 - have, slot
        while low >= 0 or high < span:
            if (low >= 0 and state.node[low] < 0) or (
                high < span and state.node[high] < 0
            ):
                break
            low, high = low - 1, high + 1
        if low >= 0 and state.node[low] < 0:
            for i in range(low, slot - 1 - have):
                _slide(nodes, state, i + 1, i)
                note(state, count + i, i + 1)
        else:
            for i in range(high, slot, -1):
                _slide(nodes, state, i - 1, i)
                note(state, count + i, i - 1)
            slot += 1
        have += 1


@compiled
def has_space(state, wanted):  # type: ignore[no-untyped-def]
    """Tell whether some more runs have room, in the slots and in the log."""
    length = int(1.1 * (state.numbers[LENGTH] + wanted))
    logged = state.numbers[LOGGED] + wanted * (state.numbers[SPAN] + 1)
    return length < state.numbers[SPAN] and logged <= len(state.log)


@compiled
def has_room(nodes, state, wanted):  # type: ignore[no-untyped-def]
    """Tell whether some more runs have room, and make some if that can be."""
    length = int(1.1 * (state.numbers[LENGTH] + wanted))
    # Where many had to slide, the empty slots lie elsewhere.
    is_crowded = state.numbers[_SLID] > 2 * state.numbers[SPAN]
    is_full = state.numbers[SPAN] <= length < len(state.node) - 2
    if is_crowded or is_full:
        runs, found = np.empty(state.numbers[LENGTH], np.int64), 0
        for slot in range(state.numbers[SPAN]):
            if state.node[slot] >= 0:
                runs[found] = state.node[slot]
                found += 1
        _spread(nodes, state, runs, wanted)
    return length < state.numbers[SPAN]


@compiled
def restart(nodes, state, runs):  # type: ignore[no-untyped-def]
    """Have a search go on from other runs."""
    _spread(nodes, state, runs, 2 * CHAIN)
    note_best(nodes, state)
