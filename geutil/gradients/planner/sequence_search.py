"""Local search over sequences of runs, compiled by numba.

A sequence holds every node once or more; a use reads the latest run of its node, and an
output is freed behind its last use. Runs lie in slots with empty ones between, so that
one more moves few of the others, and a change touches only the bytes between two slots,
and some last uses. A log of changes takes them back. `evict` frees the cheapest output
for its bytes until the budget is kept. `rebuild` removes several runs and evicts
again, a search of large neighbourhoods ("ruin and recreate", Schrimpf et al. 2000).
"""

# All of it is in one file, since numba's cache of a function sees changes of its file
# alone. Functions that only compiled ones call have no wrappers, and count no
# references: numba compiles them in 8 s where it took 14.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from geutil.gradients.planner.problem import Problem

Array = npt.NDArray[Any]
Arrays = tuple[Array, Array, Array, Array, Array]

CHAIN = 48
"""The most runs that one move puts in."""
WAYS = FLAT, DEEP, LONG = range(3)
"""How an eviction is valued: by the bytes above the budget that it frees, summed over
runs, over the time of the node and of its inputs that are gone; over that of all that
has to run again for it; or by all bytes that it frees, over the first of these times.
None leads to the least time everywhere (benchmarks/schedules/budgets.py)."""
_SPREAD = 1.4
"""Slots for each run; more of them make a step longer, fewer have more runs moved."""
_ONE, _WAYS = np.int64(1), np.int64(len(WAYS))
_NEAR = np.int64(15)
"""How many slots near a full one a run may lie that is moved."""

_NODE = np.dtype(
    [(name, np.float64) for name in ("size", "work", "time")]
    + [(name, np.int64) for name in ("once", "ahead", "behind")]
)
"""The bytes of a node and of its workspace, its time, whether it may run only once; and
in a fixed order of first runs, the node ahead of it and the one behind, or -1."""
_PLACE = np.dtype([(name, np.int64) for name in ("first", "newest", "copies")])
"""The slots of the first and the last run of a node, and how many it has."""
_SLOT = np.dtype([(name, np.int64) for name in ("node", "last", "before", "after")])
"""The node of the run in a slot, -1 in an empty one; the slot of the last use of the
run, its own if nothing reads it; the slots of the runs of its node before and after it,
or -1."""
_NOW = np.dtype(
    [(name, np.int64) for name in ("span", "length", "best_length", "logged")]
    + [(name, np.int64) for name in ("loose", "slid")]
    + [(name, np.float64) for name in ("excess", "time", "best_time", "budget")]
    + [("dice", np.uint64)]
)
"""How many slots there are, runs, best runs, entries of the log, loose runs, and slid
runs since all were spread; the bytes above the budget, summed over the runs, the time,
that of the best runs, and the budget; the state of the random numbers."""


class SearchState(NamedTuple):
    """A problem as arrays, a sequence of runs in slots, and the best one so far."""

    # Those of node v are `inputs[inputs[v] : inputs[v + 1]]`; readers likewise.
    inputs: Array
    readers: Array
    # The nodes whose outputs have to be there at the end.
    outputs: Array
    # The nodes that may run again and leave something behind.
    again: Array
    # A `_NODE` and a `_PLACE` for each node; a `_SLOT` for each slot.
    nodes: Array
    places: Array
    slots: Array
    # Bytes that are held in each slot, workspaces included; 1 for a slot with a run.
    level: Array
    filled: Array
    # The changes of the current move, as pairs of a node and a slot: a run put in;
    # one taken out, as -1 - node; one that slid there from a slot, which is given above
    # the numbers of nodes, the other way round.
    log: Array
    # Runs that nothing reads since the current move.
    loose: Array
    # The runs of the best sequence that keeps the budget, and one `_NOW`.
    best: Array
    now: Array

    @property
    def best_runs(self) -> list[int] | None:
        """The best runs within the budget; None if there were none."""
        now = self.now[0]
        found = np.isfinite(now["best_time"])
        return self.best[: now["best_length"]].tolist() if found else None

    @property
    def runs(self) -> list[int]:
        """The runs at which the search stands."""
        nodes: Array = self.slots["node"]
        return nodes[nodes >= 0].tolist()

    @property
    def rank(self) -> tuple[float, float]:
        """The best time, and the bytes above the budget."""
        return float(self.now[0]["best_time"]), float(self.now[0]["excess"])


def arrays_of(problem: Problem, order: Sequence[int] | None) -> Arrays:
    """Return a problem, maybe with an order of first runs, as `SearchState` begins."""
    nodes = np.zeros(len(problem), _NODE)
    nodes["size"], nodes["work"] = problem.sizes, problem.workspaces
    nodes["time"] = problem.times
    nodes["once"][list(problem.once)] = 1
    nodes["ahead"] = nodes["behind"] = -1
    if order is not None:
        nodes["ahead"][list(order[1:])] = order[:-1]
        nodes["behind"][list(order[:-1])] = order[1:]
    outputs = sorted(problem.staying)
    again = np.nonzero((nodes["once"] == 0) & (nodes["size"] > 0))[0]
    inputs, readers = map(_flat, (problem.inputs, problem.readers))
    return inputs, readers, np.array(outputs, np.int64), again, nodes


def _flat(lists: Sequence[Sequence[int]]) -> Array:
    """Return lists in one array, behind the places where each of them begins there."""
    starts = len(lists) + 1 + np.cumsum([0, *map(len, lists)])
    return np.array([*starts, *(u for us in lists for u in us)], np.int64)


def new_search(
    arrays: Arrays, runs: Sequence[int], budget: float, seed: int
) -> SearchState:
    """Return a search in the arrays of a problem that begins with some runs."""
    count = len(arrays[-1])
    room = int(_SPREAD * max(4 * count, 2 * len(runs))) + 8 * CHAIN
    search = SearchState(
        *arrays,
        np.zeros(count, _PLACE),
        np.zeros(room, _SLOT),
        np.zeros(room),
        np.zeros(room),
        # For the longest chain, each of whose runs may have all others slide. Zeros
        # take no memory before they are written to.
        np.zeros((4 * CHAIN * (room + 1), 2), np.int64),
        np.zeros(2 * room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(1, _NOW),
    )
    search.now["best_time"] = np.inf
    # Bytes are whole, so that sums of them above the budget are, too.
    search.now["budget"] = np.floor(min(budget, 2.0**53))
    search.now["dice"] = 0x9E3779B97F4A7C15 ^ (seed * 2654435761 + 1)
    restart(search, np.array(runs, np.int64))
    return search


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function, once for all processes where the cache can be written."""
    # Sums may be added up in any order: bytes are whole numbers, so nothing differs.
    options |= {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    options["fastmath"] = {"reassoc", "contract", "nnan", "nsz"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # Neither the package's folder nor the user's can be written.
        return numba.njit(**options)(function)


def _part(function: Callable[..., Any]) -> Any:
    """Have a function compiled that makes no array, for compiled ones alone."""
    return compiled(function, no_cpython_wrapper=True, _nrt=False)


@_part
def _roll(now):  # type: ignore[no-untyped-def]
    """Return a number from 0 up to 1 (Marsaglia's xorshift)."""
    x = now.dice
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    now.dice = x
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@_part
def _pick(now, count):  # type: ignore[no-untyped-def]
    """Return a whole number from 0 up to a count, without it."""
    return min(int(_roll(now) * count), count - 1)


@_part
def _waited(now):  # type: ignore[no-untyped-def]
    """Return a number above 0 whose mean is 1, exponentially distributed."""
    return -np.log(max(_roll(now), 1e-12))


@_part
def _spread(search, runs, room):  # type: ignore[no-untyped-def]
    """Lay runs out in slots, with room for more, and compute their figures."""
    inputs, places, slots = search.inputs, search.places, search.slots
    level, now, length = search.level, search.now[0], len(runs)
    span = min(int(_SPREAD * (length + room)), len(slots) - 2)
    for place in range(len(places)):
        places[place].first = places[place].newest = -1
        places[place].copies = 0
    for slot in range(len(slots)):
        slots[slot].node = slots[slot].before = slots[slot].after = -1
    level[:] = 0.0
    search.filled[:] = 0.0
    now.time = now.excess = 0.0
    now.span, now.length, now.slid = span, length, 0
    for i in range(length):
        slot = (i + 1) * span // (length + 1)
        node = runs[i]
        slots[slot].node, slots[slot].last, search.filled[slot] = node, slot, 1.0
        for e in range(inputs[node], inputs[node + 1]):
            slots[places[inputs[e]].newest].last = slot
        before = places[node].newest
        if before >= 0:
            slots[slot].before, slots[before].after = before, slot
        else:
            places[node].first = slot
        places[node].newest = slot
        places[node].copies += 1
        now.time += search.nodes[node].time
    for node in search.outputs:
        slots[places[node].newest].last = span
    for slot in range(span):
        if slots[slot].node >= 0:
            size = search.nodes[slots[slot].node].size
            level[slot] += size
            level[slots[slot].last + 1] -= size
    held = 0.0
    for slot in range(span):
        held += level[slot]
        level[slot] = held
        if slots[slot].node >= 0:
            level[slot] += search.nodes[slots[slot].node].work
        now.excess += max(level[slot] - now.budget, 0.0) * search.filled[slot]


@compiled
def restart(search, runs):  # type: ignore[no-untyped-def]
    """Have a search go on from other runs."""
    _spread(search, runs, np.int64(CHAIN))
    _note_best(search)


@_part
def _note_best(search):  # type: ignore[no-untyped-def]
    """Remember the current runs if they keep the budget in less time."""
    now = search.now[0]
    close = 1e-12 * max(1.0, now.time)
    if now.excess <= 0.0 and now.time < now.best_time - close:
        # Added up again: millions of moves would leave their rounding behind.
        now.time = 0.0
        now.best_length = 0
        for slot in range(now.span):
            node = search.slots[slot].node
            if node >= 0:
                search.best[now.best_length] = node
                now.best_length += 1
                now.time += search.nodes[node].time
        now.best_time = now.time


@_part
def _run_before(search, node, slot):  # type: ignore[no-untyped-def]
    """Return the slot of a node's latest run before a slot; -1 if there is none."""
    run = search.places[node].newest
    while run >= slot:
        run = search.slots[run].before
    return run


@_part
def _last_use(search, node, run, end):  # type: ignore[no-untyped-def]
    """Return the slot of the last use of a run before another slot."""
    last = run
    for e in range(search.readers[node], search.readers[node + 1]):
        last = max(last, _run_before(search, search.readers[e], end))
    return last


@_part
def _next_use(search, node, slot):  # type: ignore[no-untyped-def]
    """Return the slot of a node's first use from a slot on, and its reader's place."""
    # Without a use: the slot behind all, and the node.
    use, read = search.now[0].span, node
    for e in range(search.readers[node], search.readers[node + 1]):
        later = search.places[search.readers[e]].newest
        while later >= slot:
            if later < use:
                use, read = later, e
            later = search.slots[later].before
    return use, read


@_part
def _hold(search, low, high, size):  # type: ignore[no-untyped-def]
    """Add bytes from one slot to another, both included."""
    if low > high:
        return
    # Slices, since indices from 0 up let the loop be vectorized.
    levels, filled = search.level[low : high + 1], search.filled[low : high + 1]
    budget, more = search.now[0].budget, 0.0
    for i in range(len(levels)):
        level = levels[i]
        then = level + size
        levels[i] = then
        more += (max(then, budget) - max(level, budget)) * filled[i]
    search.now[0].excess += more


@_part
def _shorten(search, node, run, slot):  # type: ignore[no-untyped-def]
    """End a run with its last use before a slot; note it where nothing reads it."""
    shorter = _last_use(search, node, run, slot)
    search.slots[run].last = shorter
    if shorter == run and search.now[0].loose < len(search.loose):
        search.loose[search.now[0].loose] = run
        search.now[0].loose += 1
    return shorter


@_part
def _link(search, node, before, after, earlier, later):  # type: ignore[no-untyped-def]
    """Have `later` come behind a run of a node, and `earlier` ahead of another."""
    # Where there is no such run, they are the newest and the first of the node.
    if before < 0:
        search.places[node].first = later
    else:
        search.slots[before].after = later
    if after < 0:
        search.places[node].newest = earlier
    else:
        search.slots[after].before = earlier


@_part
def _add_run(search, node, slot):  # type: ignore[no-untyped-def]
    """Put a run into an empty slot; return whether it may be there."""
    inputs, nodes, slots, now = search.inputs, search.nodes, search.slots, search.now[0]
    before = _run_before(search, node, slot)
    if before < 0:
        ahead = nodes[node].ahead
        if ahead >= 0 and search.places[ahead].first > slot:
            return False
    for e in range(inputs[node], inputs[node + 1]):
        first = search.places[inputs[e]].first
        if first < 0 or first > slot:
            return False
    size = nodes[node].size
    after = slots[before].after if before >= 0 else search.places[node].first
    slots[slot].node, slots[slot].before, slots[slot].after = node, before, after
    search.filled[slot] = 1.0
    search.level[slot] += nodes[node].work
    now.excess += max(search.level[slot] - now.budget, 0.0)
    for e in range(inputs[node], inputs[node + 1]):
        u = inputs[e]
        run = _run_before(search, u, slot)
        if slots[run].last < slot:
            _hold(search, slots[run].last + 1, slot, nodes[u].size)
            slots[run].last = slot
    _link(search, node, before, after, slot, slot)
    last = slot if before < 0 else max(slot, slots[before].last)
    if last == slot:
        _hold(search, slot, slot, size)
    else:
        # Readers of the run before read this one now.
        shorter = _shorten(search, node, before, slot)
        _hold(search, shorter + 1, slot - 1, -size)
    slots[slot].last = last
    search.places[node].copies += 1
    now.length += 1
    now.time += nodes[node].time
    return True


@_part
def _take_run(search, slot):  # type: ignore[no-untyped-def]
    """Take a run out of its slot; return whether it may go."""
    inputs, nodes, slots, now = search.inputs, search.nodes, search.slots, search.now[0]
    node, last = slots[slot].node, slots[slot].last
    before, after = slots[slot].before, slots[slot].after
    if before < 0:
        behind = nodes[node].behind
        is_first = behind < 0 or search.places[behind].first >= after
        if after < 0 or last > slot or not is_first:
            return False
    _link(search, node, before, after, before, after)
    size = nodes[node].size
    if last > slot:
        _hold(search, slots[before].last + 1, slot - 1, size)
        slots[before].last = last
    else:
        _hold(search, slot, slot, -size)
    for e in range(inputs[node], inputs[node + 1]):
        u = inputs[e]
        run = _run_before(search, u, slot)
        if slots[run].last == slot:
            shorter = _shorten(search, u, run, slot)
            _hold(search, shorter + 1, slot, -nodes[u].size)
    now.excess -= max(search.level[slot] - now.budget, 0.0)
    search.level[slot] -= nodes[node].work
    slots[slot].node, search.filled[slot] = -1, 0.0
    search.places[node].copies -= 1
    now.length -= 1
    now.time -= nodes[node].time
    return True


@_part
def _note(search, node, slot):  # type: ignore[no-untyped-def]
    """Log a change, so that `_undo` takes it back."""
    now = search.now[0]
    search.log[now.logged, 0], search.log[now.logged, 1] = node, slot
    now.logged += 1


@_part
def _add(search, node, slot):  # type: ignore[no-untyped-def]
    """Put a run into an empty slot, logged; return whether it may be there."""
    if not _add_run(search, node, slot):
        return False
    _note(search, node, slot)
    return True


@_part
def _remove(search, slot):  # type: ignore[no-untyped-def]
    """Take a run out of its slot, logged; return whether it may go."""
    node = search.slots[slot].node
    if not _take_run(search, slot):
        return False
    _note(search, -1 - node, slot)
    return True


@_part
def _drop_loose(search):  # type: ignore[no-untyped-def]
    """Take out runs that nothing reads any more, if their node runs elsewhere."""
    now = search.now[0]
    while now.loose and now.logged < len(search.log):
        now.loose -= 1
        slot = search.loose[now.loose]
        node = search.slots[slot].node
        # It may have gone, or be read again, since it was noted.
        is_loose = node >= 0 and search.slots[slot].last == slot
        if is_loose and search.places[node].copies > 1:
            _remove(search, slot)


@_part
def _undo(search, mark):  # type: ignore[no-untyped-def]
    """Take back logged changes, the latest first, down to a length of the log."""
    count, now = len(search.nodes), search.now[0]
    while now.logged > mark:
        now.logged -= 1
        node, slot = search.log[now.logged, 0], search.log[now.logged, 1]
        if node >= count:
            _slide(search, node - count, slot)
        elif node >= 0:
            _take_run(search, slot)
        else:
            _add_run(search, -1 - node, slot)
    now.loose = 0


@_part
def _slide(search, slot, then):  # type: ignore[no-untyped-def]
    """Put a run into the slot next to it, which is empty; its order stays."""
    inputs, nodes, slots = search.inputs, search.nodes, search.slots
    search.now[0].slid += 1
    node = slots[slot].node
    across = search.level[slot] - nodes[node].work
    for e in range(inputs[node], inputs[node + 1]):
        u = inputs[e]
        run = _run_before(search, u, slot)
        if slots[run].last == slot:
            slots[run].last = then
            if then < slot:
                across -= nodes[u].size
    last = slots[slot].last
    if last == slot:
        last = then
    if then > slot or last == then:
        across -= nodes[node].size
    # Beside the run the same bytes are held; behind or before it, those that pass.
    search.level[then], search.level[slot] = search.level[slot], across
    before, after = slots[slot].before, slots[slot].after
    slots[then].node, slots[slot].node = node, -1
    search.filled[then], search.filled[slot] = 1.0, 0.0
    slots[then].last, slots[then].before, slots[then].after = last, before, after
    _link(search, node, before, after, then, then)


@_part
def _make_room(search, slot, wanted):  # type: ignore[no-untyped-def]
    """Have some slots right before a slot empty; return where the run there is then."""
    slots, span = search.slots, search.now[0].span
    have, count = 0, len(search.nodes)
    while True:
        while have < wanted and slot > have and slots[slot - 1 - have].node < 0:
            have += 1
        if have == wanted:
            return slot
        # The nearest empty slot on either side; there is one.
        low, high = slot - 1 - have, slot
        while not (low >= 0 and slots[low].node < 0):
            if high < span and slots[high].node < 0:
                break
            low, high = low - 1, high + 1
        if low >= 0 and slots[low].node < 0:
            for i in range(low, slot - 1 - have):
                _slide(search, i + 1, i)
                _note(search, count + i, i + 1)
        else:
            for i in range(high, slot, -1):
                _slide(search, i - 1, i)
                _note(search, count + i, i - 1)
            slot += 1
        have += 1


@_part
def _has_space(search, wanted):  # type: ignore[no-untyped-def]
    """Return whether some more runs have room, in the slots and in the log."""
    now = search.now[0]
    length = int(1.1 * (now.length + wanted))
    return length < now.span and now.logged + wanted * (now.span + 1) <= len(search.log)


@compiled
def _has_room(search, wanted):  # type: ignore[no-untyped-def]
    """Return whether some more runs have room, and make some if that can be."""
    now = search.now[0]
    length = int(1.1 * (now.length + wanted))
    # Where many had to slide, the empty slots lie elsewhere.
    is_full = now.span <= length < len(search.slots) - 2
    if is_full or now.slid > 2 * now.span:
        runs, found = np.empty(now.length, np.int64), 0
        for slot in range(now.span):
            if search.slots[slot].node >= 0:
                runs[found] = search.slots[slot].node
                found += 1
        _spread(search, runs, wanted)
    return length < now.span


@_part
def _chain(search, node, slot, eagerness, chain):  # type: ignore[no-untyped-def]
    """Collect a node and inputs that are gone by a slot, readers first; count them."""
    inputs, slots, now = search.inputs, search.slots, search.now[0]
    chain[0] = node
    count, done, looks = 1, 0, 4 * len(chain)
    while done < count and looks:
        reader = chain[done]
        done += 1
        looks -= 1
        for e in range(inputs[reader], inputs[reader + 1]):
            u = inputs[e]
            if search.nodes[u].once or slots[_run_before(search, u, slot)].last >= slot:
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
            elif count < len(chain) and _roll(now) < eagerness:
                chain[count] = u
                count += 1
    return count


@_part
def _put_in(search, slot, chain, count):  # type: ignore[no-untyped-def]
    """Put a chain in right before a slot; return whether that can be."""
    slot = _make_room(search, slot, count) - count
    while count > 0 and _add(search, chain[count - 1], slot):
        count, slot = count - 1, slot + 1
    return count == 0


@_part
def _random_run(search):  # type: ignore[no-untyped-def]
    slot = np.int64(-1)
    while slot < 0 or search.slots[slot].node < 0:
        slot = _pick(search.now[0], search.now[0].span)
    return slot


@_part
def _shift(search):  # type: ignore[no-untyped-def]
    """Move a run between its inputs and its first use; return whether that was done."""
    slots, now = search.slots, search.now[0]
    if not _has_space(search, _ONE):
        return False
    slot, span = _random_run(search), now.span
    if _roll(now) < 0.6:
        # Near where most is held: elsewhere, order matters little.
        full = 0.9 * now.budget
        for _ in range(24):
            if search.level[slot] >= full:
                break
            slot = _random_run(search)
        slot = min(max(slot + _pick(now, _NEAR) - _NEAR // 2, 0), span - 1)
        while slots[slot].node < 0:
            slot = _pick(now, span)
    node = slots[slot].node
    low, high = -1, _next_use(search, node, slot + 1)[0]
    if slots[slot].after >= 0:
        high = min(high, slots[slot].after)
    for e in range(search.inputs[node], search.inputs[node + 1]):
        low = max(low, _run_before(search, search.inputs[e], slot))
    draw = _roll(now)
    # Right before a slot that lies behind the inputs and not behind the first use.
    target = low + 1 + _pick(now, high - low)
    if draw < 0.4:
        target = high if draw < 0.25 else low + 1
    if target == slot or target == slot + 1:
        return False
    empty = _make_room(search, target, _ONE) - 1
    # Making room may have moved it by one.
    if slots[slot].node != node:
        slot += 1 if slot + 1 < span and slots[slot + 1].node == node else -1
    return _add(search, node, empty) and _remove(search, slot)


@_part
def _evict_one(  # type: ignore[no-untyped-def]
    search, failed, round_, noise, way, chain, over
):
    """Free an output that waits across the fullest run; return whether to go on."""
    # `failed` has, at the places of `readers` and for nodes that are read at the end,
    # the latest round in which freeing brought nothing. `chain` and `over` are room for
    # runs, and for the bytes and the runs above the budget up to each slot.
    inputs, nodes, slots, now = search.inputs, search.nodes, search.slots, search.now[0]
    if not _has_space(search, len(chain)):
        return False
    fullest, most = now.span - 1, -1.0
    bytes_over, runs_over = 0.0, 0
    for slot in range(now.span):
        level = search.filled[slot] * search.level[slot]
        if level > most:
            fullest, most = slot, level
        if level > now.budget:
            bytes_over += level - now.budget
            runs_over += 1
        over[slot, 0], over[slot, 1] = bytes_over, runs_over
    best, place, node, edge = 0.0, now.span, fullest, fullest
    for u in search.again:
        run = _run_before(search, u, fullest)
        if run < 0 or slots[run].last <= fullest:
            continue
        use, read = _next_use(search, u, fullest)
        # Inputs of the fullest run itself stay.
        if use == fullest or failed[read] == round_:
            continue
        used = _last_use(search, u, run, fullest)
        time = nodes[u].time
        for e in range(inputs[u], inputs[u + 1]):
            if slots[_run_before(search, inputs[e], use)].last < use:
                time += nodes[inputs[e]].time
        freed = nodes[u].size * (use - used)
        if way != LONG:
            # At most: where less than the node is above the budget, less counts.
            freed = nodes[u].size * (over[use - 1, 1] - over[used, 1])
            freed = min(freed, over[use - 1, 0] - over[used, 0])
        if noise > 0.0:
            freed *= np.exp(noise * (_roll(now) - 0.5))
        if freed <= best * time:
            continue
        if way == DEEP:
            count = _chain(search, u, use, 2.0, chain)
            time = 0.0
            for i in range(count):
                time += nodes[chain[i]].time
        gain = freed / (time + 1e-12)
        if gain > best:
            best, place, node, edge = gain, use, u, read
    if best <= 0.0:
        return False
    excess, time, mark = now.excess, now.time, now.logged
    eagerness = 2.0 if noise <= 0.0 or _roll(now) < 0.7 else _roll(now)
    added = _chain(search, node, place, eagerness, chain)
    if _put_in(search, place, chain, added) and now.excess < excess:
        _drop_loose(search)
    else:
        _undo(search, mark)
        now.excess, now.time = excess, time
        failed[edge] = round_
    return True


@compiled
def evict(search, rounds, noise, way):  # type: ignore[no-untyped-def]
    """Free and recompute the cheapest outputs for their bytes."""
    # `noise` is how much a choice is left to chance, `way` one of `WAYS`.
    now = search.now[0]
    chain = np.zeros(4 * CHAIN, np.int64)
    over = np.zeros((len(search.slots), 2))
    failed = np.zeros(len(search.readers), np.int64)
    for _ in range(rounds):
        if now.excess <= 0.0 or not _has_room(search, len(chain)):
            break
        # Any number but 0 will do; a literal one would have it compiled once more.
        if not _evict_one(search, failed, rounds, noise, way, chain, over):
            break
        now.logged = 0
    _note_best(search)


@_part
def _ruin(search, wanted):  # type: ignore[no-untyped-def]
    """Take out some runs that are not their nodes' first, mostly near each other."""
    now, span = search.now[0], search.now[0].span
    slot, step = _pick(now, span), 1
    if _roll(now) < 0.5:
        step = 1 + _pick(now, span)
    for _ in range(span):
        if wanted == 0:
            return
        slot = (slot + step) % span
        is_again = search.slots[slot].node >= 0 and search.slots[slot].before >= 0
        if is_again and _roll(now) < 0.5 and _remove(search, slot):
            _drop_loose(search)
            wanted -= 1


@_part
def _rebuilt(  # type: ignore[no-untyped-def]
    search, shifted, most, failed, round_, chain, over
):
    """Move some runs, remove some, and evict again; stop above the most time."""
    now = search.now[0]
    while _roll(now) < shifted:
        mark = now.logged
        if _shift(search):
            _drop_loose(search)
        else:
            _undo(search, mark)
    _ruin(search, 1 + int(3.0 * _waited(now)))
    noise = 4.0 * _roll(now)
    way = _pick(now, _WAYS)
    for _ in range(60):
        if now.excess <= 0.0 or now.time >= most:
            return
        # Long chains take long, and are rarely worth it.
        part = chain[: min(2 + int(6.0 * _waited(now)), len(chain))]
        if not _evict_one(search, failed, round_, noise, way, part, over):
            return


@compiled
def rebuild(search, shifted, heat, cold, moves, goal):  # type: ignore[no-untyped-def]
    """Repeat: remove runs and evict again; accept good results."""
    # A move shifts a run, and then one more, as often as `shifted` says. `heat` and
    # `cold` are the first and the last temperature, in the time of all nodes; `goal` is
    # the time at which nothing is left to gain.
    now = search.now[0]
    chain = np.zeros(CHAIN, np.int64)
    over = np.zeros((len(search.slots), 2))
    failed = np.zeros(len(search.readers), np.int64)
    total = search.nodes["time"].sum()
    for move in range(moves):
        if now.best_time <= goal or not _has_room(search, 4 * len(chain)):
            return
        excess, time = now.excess, now.time
        most = time + total * heat * (cold / heat) ** (move / moves) * _waited(now)
        if excess > 0.0:
            # A run that keeps more of the budget is welcome at any time.
            most = np.inf
        _rebuilt(search, shifted, most, failed, move + 1, chain, over)
        if now.excess <= excess and now.time <= most:
            _note_best(search)
        else:
            _undo(search, np.int64(0))
            now.excess, now.time = excess, time
        now.logged = 0
