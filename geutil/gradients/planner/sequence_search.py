"""Local search over sequences of runs, compiled by numba.

A state is a sequence in which every node occurs once or more; a use reads the latest
run of its node, and an output is freed behind its last use. Moves put in a run right
before a use (with runs of inputs that are gone by then), take one out, or put one
elsewhere. Simulated annealing (Kirkpatrick et al. 1983) lowers extra time plus a
price on the bytes above the budget, summed over all runs; the price follows how often
the budget is kept.

Runs lie in slots with empty ones between, so that one more moves few of the others, and
a move changes only what it has to: the bytes between two slots and some last uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from geutil.gradients.planner.problem import Problem

Array = npt.NDArray[Any]


def _compiled(function: Callable[..., Any]) -> Any:
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


_AT_END = 0.05
"""The share of inserted runs that are for what has to be there at the end."""
_CHAIN = 24
"""The most runs that one move puts in."""
_TRIES = 24
_WINDOW = 2000
"""After how many moves the price is looked at."""
_SHIFTED = 0.2
"""How often a rebuilding moves a run, and then one more."""
_RUINED = 3.0
"""How many runs a rebuilding takes out, on average."""
_CHAINED = 6.0
"""How long a chain it puts in at most, on average."""
_ROUNDS = 60
_NOISE = 4.0
"""By how much its choices differ from the greedy ones at most, as a power of e."""
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
        times: of one run.
        stays: whether the output has to be there at the end.
        outputs: the nodes of which it has to be.
        once: whether the node may run only once.
        ahead: the node whose first run comes before; -1 for none, or for any order.
        behind: the node whose first run comes after.
    """

    start: Array
    inputs: Array
    read_start: Array
    readers: Array
    sizes: Array
    times: Array
    stays: Array
    outputs: Array
    once: Array
    ahead: Array
    behind: Array


class SearchState(NamedTuple):
    """A sequence of runs in slots, and what else goes on from slice to slice.

    Attributes:
        node: of the run in each slot; -1 in an empty one.
        last: the slot of the last use of each run; its own if nothing reads it.
        level: the bytes that are held in each slot, empty or not.
        filled: 1 for a slot with a run, 0 for an empty one.
        before: the slot of the run before of the same node; -1 for none.
        after: the slot of its next run.
        first: the slot of the first run of each node.
        newest: the slot of its last one.
        count: how many runs each node has.
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
    count: Array
    log: Array
    loose: Array
    best: Array
    numbers: Array
    figures: Array
    dice: Array


_SPAN, _LENGTH, _BEST_LENGTH, _LOGGED, _LOOSE, _MOVES, _OVER, _SLID = range(8)
_EXCESS, _TIME, _BEST_TIME, _PRICE, _BUDGET = range(5)


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
        np.array(problem.times, np.float64),
        stays,
        np.nonzero(stays)[0],
        once,
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
    room = int(_SPREAD * max(4 * count, 2 * len(runs))) + 8 * _CHAIN
    slots = [np.full(room, -1, np.int64) for _ in range(4)]
    state = SearchState(
        slots[0],
        slots[1],
        np.zeros(room),
        np.zeros(room),
        slots[2],
        slots[3],
        *(np.full(count, -1, np.int64) for _ in range(2)),
        np.zeros(count, np.int64),
        np.zeros((32 * room, 2), np.int64),
        np.zeros(2 * room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(8, np.int64),
        np.zeros(5),
        np.array([0x9E3779B97F4A7C15 ^ (seed * 2654435761 + 1)], np.uint64),
    )
    state.figures[_BEST_TIME], state.figures[_PRICE] = np.inf, 0.1
    # Bytes are whole, so that sums of them above the budget are, too.
    state.figures[_BUDGET] = np.floor(min(budget, 2.0**53))
    restart(nodes, state, np.array(runs, np.int64))
    return state


def best_runs(state: SearchState) -> list[int] | None:
    """Return the best runs within the budget; None if there were none."""
    if not np.isfinite(state.figures[_BEST_TIME]):
        return None
    return state.best[: int(state.numbers[_BEST_LENGTH])].tolist()


def current_runs(state: SearchState) -> list[int]:
    """Return the runs at which a search stands."""
    return state.node[state.node >= 0].tolist()


@_compiled
def _roll(dice):  # type: ignore[no-untyped-def]
    """Return a number from 0 up to 1 (Marsaglia's xorshift)."""
    x = dice[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    dice[0] = x
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@_compiled
def _pick(dice, count):  # type: ignore[no-untyped-def]
    return min(int(_roll(dice) * count), count - 1)


@_compiled
def _waited(dice):  # type: ignore[no-untyped-def]
    """Return a number above 0 whose mean is 1, exponentially distributed."""
    return -np.log(max(_roll(dice), 1e-12))


@_compiled
def _spread(nodes, state, runs, room):  # type: ignore[no-untyped-def]
    """Lay runs out in slots, with room for more, and compute what is known of them."""
    length = len(runs)
    span = min(int(_SPREAD * (length + room)), len(state.node) - 2)
    state.node[:] = -1
    state.before[:] = -1
    state.after[:] = -1
    state.newest[:] = -1
    state.first[:] = -1
    state.count[:] = 0
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
        state.count[node] += 1
        time += nodes.times[node]
    for node in nodes.outputs:
        state.last[state.newest[node]] = span
    state.numbers[_SPAN], state.numbers[_LENGTH] = span, length
    state.numbers[_SLID] = 0
    state.figures[_EXCESS], state.figures[_TIME] = 0.0, time
    for slot in range(span):
        if state.node[slot] >= 0:
            size = nodes.sizes[state.node[slot]]
            state.level[slot] += size
            state.level[state.last[slot] + 1] -= size
    level = 0.0
    for slot in range(span):
        level += state.level[slot]
        state.level[slot] = level
        over = max(level - state.figures[_BUDGET], 0.0)
        state.figures[_EXCESS] += over * state.filled[slot]


@_compiled
def _note_best(nodes, state):  # type: ignore[no-untyped-def]
    """Remember the current runs if they keep the budget in less time."""
    figures = state.figures
    close = 1e-12 * max(1.0, figures[_TIME])
    if figures[_EXCESS] <= 0.0 and figures[_TIME] < figures[_BEST_TIME] - close:
        length, time = 0, 0.0
        for slot in range(state.numbers[_SPAN]):
            node = state.node[slot]
            if node >= 0:
                state.best[length] = node
                length += 1
                time += nodes.times[node]
        state.numbers[_BEST_LENGTH] = length
        # Added up anew: millions of moves would leave their rounding behind.
        figures[_TIME] = figures[_BEST_TIME] = time


@_compiled
def _run_before(state, node, slot):  # type: ignore[no-untyped-def]
    """Return the slot of a node's latest run before a slot; -1 if there is none."""
    run = state.newest[node]
    while run >= slot:
        run = state.before[run]
    return run


@_compiled
def _last_use(nodes, state, node, run, end):  # type: ignore[no-untyped-def]
    """Return the slot of the last use of a run before another slot."""
    last = run
    for e in range(nodes.read_start[node], nodes.read_start[node + 1]):
        last = max(last, _run_before(state, nodes.readers[e], end))
    return last


@_compiled
def _first_use(nodes, state, node, run):  # type: ignore[no-untyped-def]
    """Return the slot of the first use of a run, or of the next run of its node."""
    first = state.after[run]
    if first < 0:
        first = state.numbers[_SPAN]
    for e in range(nodes.read_start[node], nodes.read_start[node + 1]):
        use = state.newest[nodes.readers[e]]
        while use > run:
            first = min(first, use)
            use = state.before[use]
    return first


@_compiled
def _hold(state, low, high, size):  # type: ignore[no-untyped-def]
    """Add bytes from one slot to another, both included."""
    if low > high:
        return
    # Slices, since indices from 0 up let the loop be vectorized.
    levels, filled = state.level[low : high + 1], state.filled[low : high + 1]
    budget, more = state.figures[_BUDGET], 0.0
    for i in range(len(levels)):
        level = levels[i]
        then = level + size
        levels[i] = then
        more += (max(then, budget) - max(level, budget)) * filled[i]
    state.figures[_EXCESS] += more


@_compiled
def _add_run(nodes, state, node, slot):  # type: ignore[no-untyped-def]
    """Put a run into an empty slot; return whether it may be there."""
    before = _run_before(state, node, slot)
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
    state.figures[_EXCESS] += max(state.level[slot] - state.figures[_BUDGET], 0.0)
    for e in range(nodes.start[node], nodes.start[node + 1]):
        u = nodes.inputs[e]
        run = _run_before(state, u, slot)
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
        shorter = _last_use(nodes, state, node, before, slot)
        _hold(state, shorter + 1, slot - 1, -size)
        state.last[before] = shorter
        if shorter == before:
            _note_loose(state, before)
    state.last[slot] = last
    state.count[node] += 1
    state.numbers[_LENGTH] += 1
    state.figures[_TIME] += nodes.times[node]
    return True


@_compiled
def _take_run(nodes, state, slot):  # type: ignore[no-untyped-def]
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
        run = _run_before(state, u, slot)
        if state.last[run] == slot:
            shorter = _last_use(nodes, state, u, run, slot)
            _hold(state, shorter + 1, slot, -nodes.sizes[u])
            state.last[run] = shorter
            if shorter == run:
                _note_loose(state, run)
    state.figures[_EXCESS] -= max(state.level[slot] - state.figures[_BUDGET], 0.0)
    state.node[slot], state.filled[slot] = -1, 0.0
    state.count[node] -= 1
    state.numbers[_LENGTH] -= 1
    state.figures[_TIME] -= nodes.times[node]
    return True


@_compiled
def _note_loose(state, slot):  # type: ignore[no-untyped-def]
    if state.numbers[_LOOSE] < len(state.loose):
        state.loose[state.numbers[_LOOSE]] = slot
        state.numbers[_LOOSE] += 1


@_compiled
def _note(state, node, slot):  # type: ignore[no-untyped-def]
    state.log[state.numbers[_LOGGED]] = node, slot
    state.numbers[_LOGGED] += 1


@_compiled
def _drop_loose(nodes, state):  # type: ignore[no-untyped-def]
    """Take out runs that nothing reads any more, if their node runs elsewhere."""
    while state.numbers[_LOOSE] and state.numbers[_LOGGED] < len(state.log):
        state.numbers[_LOOSE] -= 1
        slot = state.loose[state.numbers[_LOOSE]]
        node = state.node[slot]
        # It may have gone, or be read again, since it was noted.
        is_loose = node >= 0 and state.last[slot] == slot and state.count[node] > 1
        if is_loose and _take_run(nodes, state, slot):
            _note(state, -1 - node, slot)


@_compiled
def _undo(nodes, state, mark):  # type: ignore[no-untyped-def]
    """Take back what was logged, the latest first, down to a length of the log."""
    count = len(state.count)
    while state.numbers[_LOGGED] > mark:
        state.numbers[_LOGGED] -= 1
        node, slot = state.log[state.numbers[_LOGGED]]
        if node >= count:
            _slide(nodes, state, node - count, slot)
        elif node >= 0:
            _take_run(nodes, state, slot)
        else:
            _add_run(nodes, state, -1 - node, slot)
    state.numbers[_LOOSE] = 0


@_compiled
def _slide(nodes, state, slot, then):  # type: ignore[no-untyped-def]
    """Put a run into the slot next to it, which is empty; its order stays."""
    state.numbers[_SLID] += 1
    node = state.node[slot]
    across = state.level[slot]
    for e in range(nodes.start[node], nodes.start[node + 1]):
        u = nodes.inputs[e]
        run = _run_before(state, u, slot)
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


@_compiled
def _make_room(nodes, state, slot, wanted):  # type: ignore[no-untyped-def]
    """Have some slots right before a slot empty; return where the run there is then."""
    span, have, count = state.numbers[_SPAN], 0, len(state.count)
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
                _note(state, count + i, i + 1)
        else:
            for i in range(high, slot, -1):
                _slide(nodes, state, i - 1, i)
                _note(state, count + i, i - 1)
            slot += 1
        have += 1


@_compiled
def _has_space(state, wanted):  # type: ignore[no-untyped-def]
    """Tell whether some more runs have room, in the slots and in the log."""
    length = int(1.1 * (state.numbers[_LENGTH] + wanted))
    return length < state.numbers[_SPAN] and 2 * state.numbers[_LOGGED] < len(state.log)


@_compiled
def _has_room(nodes, state, wanted):  # type: ignore[no-untyped-def]
    """Tell whether some more runs have room, and make some if that can be."""
    length = int(1.1 * (state.numbers[_LENGTH] + wanted))
    # Where many had to slide, the empty slots lie elsewhere.
    is_crowded = state.numbers[_SLID] > 2 * state.numbers[_SPAN]
    is_full = state.numbers[_SPAN] <= length < len(state.node) - 2
    if is_crowded or is_full:
        slots = np.nonzero(state.node >= 0)[0]
        _spread(nodes, state, state.node[slots], wanted)
    return length < state.numbers[_SPAN]


@_compiled
def _chain(nodes, state, node, slot, eagerness, chain):  # type: ignore[no-untyped-def]
    """Collect a node and inputs that are gone by a slot, readers first; count them."""
    chain[0] = node
    count, done, looks = 1, 0, 4 * len(chain)
    while done < count and looks:
        reader = chain[done]
        done += 1
        looks -= 1
        for e in range(nodes.start[reader], nodes.start[reader + 1]):
            u = nodes.inputs[e]
            if nodes.once[u] or state.last[_run_before(state, u, slot)] >= slot:
                continue
            known = -1
            for i in range(count):
                if chain[i] == u:
                    known = i
            if known >= 0:
                # It has to come before this reader, too.
                for i in range(known, count - 1):
                    chain[i] = chain[i + 1]
                chain[count - 1] = u
                # Among those that were looked at: looked at again, further back.
                done -= known < done
            elif count < len(chain) and _roll(state.dice) < eagerness:
                chain[count] = u
                count += 1
    return count


@_compiled
def _put_in(nodes, state, slot, chain, count):  # type: ignore[no-untyped-def]
    """Put a chain in right before a slot; return whether that can be."""
    slot = _make_room(nodes, state, slot, count)
    for i in range(count):
        node = chain[count - 1 - i]
        if not _add_run(nodes, state, node, slot - count + i):
            return False
        _note(state, node, slot - count + i)
    return True


@_compiled
def _random_run(state):  # type: ignore[no-untyped-def]
    slot = _pick(state.dice, state.numbers[_SPAN])
    while state.node[slot] < 0:
        slot = _pick(state.dice, state.numbers[_SPAN])
    return slot


@_compiled
def _insert(nodes, state, chain):  # type: ignore[no-untyped-def]
    """Put in a run before a use, with inputs that are gone; tell whether that was done.

    Above the budget mostly where something waits across a slot that is too full.
    """
    dice = state.dice
    budget = state.figures[_BUDGET]
    over = state.figures[_EXCESS] > 0.0
    for _ in range(_TRIES):
        if len(nodes.outputs) and _roll(dice) < _AT_END:
            # The end reads all outputs.
            node = nodes.outputs[_pick(dice, len(nodes.outputs))]
            slot = state.numbers[_SPAN] - 1
            while state.node[slot] < 0:
                slot -= 1
            if nodes.once[node] or state.node[slot] == node:
                continue
            slot += 1
        else:
            slot = _random_run(state)
            reader = state.node[slot]
            inputs = nodes.start[reader + 1] - nodes.start[reader]
            if not inputs:
                continue
            node = nodes.inputs[nodes.start[reader] + _pick(dice, inputs)]
            if nodes.once[node]:
                continue
        run = _run_before(state, node, slot)
        used = _last_use(nodes, state, node, run, slot)
        if over and _roll(dice) < 0.9:
            between = used + 1 + _pick(dice, max(slot - used - 1, 1))
            if state.level[between] <= budget:
                continue
        count = _chain(nodes, state, node, slot, _roll(dice), chain)
        return _put_in(nodes, state, slot, chain, count)
    return False


@_compiled
def _remove(nodes, state):  # type: ignore[no-untyped-def]
    """Take out a run that is not its node's first; tell whether that was done."""
    if state.numbers[_LENGTH] == len(state.count):
        return False
    for _ in range(2 * _TRIES):
        slot = _pick(state.dice, state.numbers[_SPAN])
        node = state.node[slot]
        is_again = node >= 0 and state.before[slot] >= 0
        if is_again and _take_run(nodes, state, slot):
            _note(state, -1 - node, slot)
            return True
    return False


@_compiled
def _shift(nodes, state):  # type: ignore[no-untyped-def]
    """Move a run between its inputs and its first use; tell whether that was done."""
    dice = state.dice
    if not _has_space(state, 1):
        return False
    slot, span = _random_run(state), state.numbers[_SPAN]
    if _roll(dice) < 0.6:
        # Near where most is held: elsewhere, order matters little.
        full = 0.9 * state.figures[_BUDGET]
        for _ in range(_TRIES):
            if state.level[slot] >= full:
                break
            slot = _random_run(state)
        slot = min(max(slot + _pick(dice, 15) - 7, 0), span - 1)
        while state.node[slot] < 0:
            slot = _pick(dice, span)
    node = state.node[slot]
    low, high = -1, _first_use(nodes, state, node, slot)
    for e in range(nodes.start[node], nodes.start[node + 1]):
        low = max(low, _run_before(state, nodes.inputs[e], slot))
    draw = _roll(dice)
    # Right before a slot that lies behind the inputs and not behind the first use.
    target = low + 1 + _pick(dice, high - low)
    if draw < 0.25:
        target = high
    elif draw < 0.4:
        target = low + 1
    if target == slot or target == slot + 1:
        return False
    empty = _make_room(nodes, state, target, 1) - 1
    # Making room may have moved it by one.
    if state.node[slot] != node:
        slot += 1 if slot + 1 < span and state.node[slot + 1] == node else -1
    if not _add_run(nodes, state, node, empty):
        return False
    _note(state, node, empty)
    if not _take_run(nodes, state, slot):
        return False
    _note(state, -1 - node, slot)
    return True


@_compiled
def _adapt_price(state):  # type: ignore[no-untyped-def]
    """Raise the price where the budget is rarely kept; lower it where it mostly is."""
    numbers = state.numbers
    if numbers[_MOVES] >= _WINDOW:
        share = numbers[_OVER] / numbers[_MOVES]
        if share > 0.8:
            state.figures[_PRICE] *= 1.3
        elif share < 0.4:
            state.figures[_PRICE] /= 1.2
        numbers[_MOVES] = numbers[_OVER] = 0


@_compiled
def anneal(nodes, state, heat, cold, moves, goal):  # type: ignore[no-untyped-def]
    """Try some moves, and take those that are good enough.

    Args:
        nodes: the computation.
        state: where the search stands; changed.
        heat: the temperature at the first move, as a share of the time of all nodes.
        cold: the temperature at the last one.
        moves: how many.
        goal: the time at which nothing is left to gain.

    Cost: a move takes the time of the slots over which what it changes is held.
    """
    chain = np.zeros(_CHAIN, np.int64)
    figures, numbers, dice = state.figures, state.numbers, state.dice
    total = max(nodes.times.sum(), 1e-30)
    scale = max(figures[_BUDGET], 1.0)
    for move in range(moves):
        if figures[_BEST_TIME] <= goal:
            return
        if not _has_room(nodes, state, 2 * _CHAIN):
            return
        excess, time = figures[_EXCESS], figures[_TIME]
        draw = _roll(dice)
        over = excess > 0.0
        if draw < (0.45 if over else 0.15):
            done = _insert(nodes, state, chain)
        elif draw < (0.6 if over else 0.55):
            done = _remove(nodes, state)
        else:
            done = _shift(nodes, state)
        if done:
            _drop_loose(nodes, state)
            worse = (figures[_TIME] - time) / total
            worse += figures[_PRICE] * (figures[_EXCESS] - excess) / scale
            temperature = heat * (cold / heat) ** (move / moves)
            done = worse <= 0.0 or _roll(dice) < np.exp(-worse / temperature)
        if done:
            numbers[_LOGGED] = numbers[_LOOSE] = 0
            _note_best(nodes, state)
        else:
            _undo(nodes, state, 0)
            # As they were: what was rounded is forgotten, too.
            figures[_EXCESS], figures[_TIME] = excess, time
        numbers[_MOVES] += 1
        numbers[_OVER] += figures[_EXCESS] > 0.0
        _adapt_price(state)


@_compiled
def _next_use(nodes, state, node, slot):  # type: ignore[no-untyped-def]
    """Return the slot of a node's first use from a slot on, and where its reader is.

    That is its place in `nodes.readers`; without a use, the slot behind all and -1.
    """
    use, read = state.numbers[_SPAN], -1
    for e in range(nodes.read_start[node], nodes.read_start[node + 1]):
        later = state.newest[nodes.readers[e]]
        while later >= slot:
            if later < use:
                use, read = later, e
            later = state.before[later]
    return use, read


@_compiled
def _evict_one(nodes, state, failed, round_, noise, chain):  # type: ignore[no-untyped-def]
    """Free what waits across the fullest run, and put it in before its next use.

    Args:
        nodes: the computation.
        state: where the search stands; changed.
        failed: for each pair of a node and a reader, and behind them for each node and
            the end, the latest round in which that brought nothing.
        round_: the number of this round.
        noise: how much a choice is left to chance.
        chain: room for the runs.

    Returns:
        Whether less is held above the budget, or something else may be tried.
    """
    figures, dice = state.figures, state.dice
    if not _has_space(state, len(chain)):
        return False
    span = state.numbers[_SPAN]
    fullest = int(np.argmax(state.level[:span] * state.filled[:span]))
    best, place, node, edge = 0.0, -1, -1, -1
    for u in range(len(state.count)):
        if nodes.once[u]:
            continue
        run = _run_before(state, u, fullest)
        if run < 0 or state.last[run] <= fullest:
            continue
        use, read = _next_use(nodes, state, u, fullest)
        if read < 0:
            read = len(nodes.readers) + u
        # What is read by the fullest run itself stays.
        if use == fullest or failed[read] == round_:
            continue
        used = _last_use(nodes, state, u, run, fullest)
        time = nodes.times[u]
        for f in range(nodes.start[u], nodes.start[u + 1]):
            w = nodes.inputs[f]
            if state.last[_run_before(state, w, use)] < use:
                time += nodes.times[w]
        gain = nodes.sizes[u] * (use - used) / (time + 1e-12)
        if noise > 0.0:
            gain *= np.exp(noise * (_roll(dice) - 0.5))
        if gain > best:
            best, place, node, edge = gain, use, u, read
    if place < 0:
        return False
    excess, time, mark = figures[_EXCESS], figures[_TIME], state.numbers[_LOGGED]
    eagerness = 2.0 if noise <= 0.0 or _roll(dice) < 0.7 else _roll(dice)
    added = _chain(nodes, state, node, place, eagerness, chain)
    if _put_in(nodes, state, place, chain, added) and figures[_EXCESS] < excess:
        _drop_loose(nodes, state)
    else:
        _undo(nodes, state, mark)
        figures[_EXCESS], figures[_TIME] = excess, time
        failed[edge] = round_
    return True


@_compiled
def evict(nodes, state, rounds):  # type: ignore[no-untyped-def]
    """Free and compute again, time after time what is cheapest for what it frees.

    Each round looks at the fullest run, and at everything that waits there for a later
    use: its bytes and how long it waits, over the time of running it again with those
    of its inputs that are gone.

    Args:
        nodes: the computation.
        state: where the search stands; changed.
        rounds: the most rounds.

    Returns:
        Whether the budget is kept.

    Cost: rounds times the nodes, their readers and what they hold.
    """
    figures = state.figures
    chain = np.zeros(_CHAIN * 8, np.int64)
    failed = np.zeros(len(nodes.readers) + len(state.count), np.int64)
    for _ in range(rounds):
        if figures[_EXCESS] <= 0.0 or not _has_room(nodes, state, len(chain)):
            break
        if not _evict_one(nodes, state, failed, 1, 0.0, chain):
            break
        state.numbers[_LOGGED] = 0
    _note_best(nodes, state)
    return figures[_EXCESS] <= 0.0


@_compiled
def _ruin(nodes, state, wanted):  # type: ignore[no-untyped-def]
    """Take out some runs that are not their nodes' first, mostly near each other."""
    dice, span = state.dice, state.numbers[_SPAN]
    slot, step = _pick(dice, span), 1
    if _roll(dice) < 0.5:
        step = 1 + _pick(dice, span)
    for _ in range(span):
        if wanted == 0:
            return
        slot = (slot + step) % span
        node = state.node[slot]
        is_chosen = node >= 0 and state.before[slot] >= 0 and _roll(dice) < 0.5
        if is_chosen and _take_run(nodes, state, slot):
            _note(state, -1 - node, slot)
            _drop_loose(nodes, state)
            wanted -= 1


@_compiled
def _rebuilt(nodes, state, most, failed, round_, chain):  # type: ignore[no-untyped-def]
    """Move some runs, take some out, and evict anew; stop above the most time."""
    figures, dice = state.figures, state.dice
    while _roll(dice) < _SHIFTED:
        mark = state.numbers[_LOGGED]
        if _shift(nodes, state):
            _drop_loose(nodes, state)
        else:
            _undo(nodes, state, mark)
    _ruin(nodes, state, 1 + int(_RUINED * _waited(dice)))
    noise = _NOISE * _roll(dice)
    for _ in range(_ROUNDS):
        if figures[_EXCESS] <= 0.0 or figures[_TIME] >= most:
            return
        # Long chains take long, and are rarely worth it.
        longest = min(2 + int(_CHAINED * _waited(dice)), len(chain))
        if not _evict_one(nodes, state, failed, round_, noise, chain[:longest]):
            return


@_compiled
def rebuild(nodes, state, heat, cold, moves, goal):  # type: ignore[no-untyped-def]
    """Take runs out and evict anew, again and again; take what is good enough.

    It is a search of large neighbourhoods ("ruin and recreate", Schrimpf et al. 2000).

    Args:
        nodes: the computation.
        state: where the search stands; changed.
        heat: the temperature at the first move, as a share of the time of all nodes.
        cold: the temperature at the last one.
        moves: how many.
        goal: the time at which nothing is left to gain.

    Cost: that of some rounds of eviction for each move.
    """
    chain = np.zeros(2 * _CHAIN, np.int64)
    figures, numbers, dice = state.figures, state.numbers, state.dice
    failed = np.zeros(len(nodes.readers) + len(state.count), np.int64)
    total = nodes.times.sum()
    for move in range(moves):
        if figures[_BEST_TIME] <= goal or not _has_room(nodes, state, 4 * len(chain)):
            return
        excess, time = figures[_EXCESS], figures[_TIME]
        most = time + total * heat * (cold / heat) ** (move / moves) * _waited(dice)
        if excess > 0.0:
            # What keeps more of the budget is welcome at any time.
            most = np.inf
        _rebuilt(nodes, state, most, failed, move + 1, chain)
        if figures[_EXCESS] <= excess and figures[_TIME] <= most:
            _note_best(nodes, state)
        else:
            _undo(nodes, state, 0)
            figures[_EXCESS], figures[_TIME] = excess, time
        numbers[_LOGGED] = 0


@_compiled
def restart(nodes, state, runs):  # type: ignore[no-untyped-def]
    """Have a search go on from other runs."""
    _spread(nodes, state, runs, 2 * _CHAIN)
    _note_best(nodes, state)
