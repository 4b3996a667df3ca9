"""Local search over sequences of runs, compiled by numba.

A state is a sequence in which every node occurs once or more; a use reads the latest
run of its node, and an output is freed behind its last use. Moves put in a run right
before a use (with runs of inputs that are gone by then), take one out, or put one
elsewhere. Simulated annealing (Kirkpatrick et al. 1983) lowers extra time plus a
price on the bytes above the budget, summed over all runs; the price follows how often
the budget is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from geutil.gradients.planner.problem import Problem

Array = npt.NDArray[Any]


def _compiled(function: Callable[..., Any]) -> Any:
    """Have a function compiled, once for all processes where that can be written."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # Neither the package's folder nor the user's can be written.
        return numba.njit(nogil=True)(function)


_INSERT, _REMOVE = 0.35, 0.6
"""Of a number between 0 and 1: insert below the first, remove below the second."""
_AT_END = 0.05
"""The share of inserted runs that are for what has to be there at the end."""
_CHAIN = 24
"""The most runs that one move puts in."""
_TRIES = 12
_WINDOW = 2000
"""After how many moves the price is looked at."""


# numba's cache holds the names of these classes: files of one that was renamed since
# cannot be read any more.
class Nodes(NamedTuple):
    """A problem as arrays.

    Attributes:
        start: where the inputs of each node begin in `inputs`; one more at the end.
        inputs: the inputs of all nodes.
        sizes: in bytes.
        times: of one run.
        stays: whether the output has to be there at the end.
        outputs: the nodes of which it has to be.
        once: whether the node may run only once.
        rank: its place in the order of first runs; all 0 for any order.
    """

    start: Array
    inputs: Array
    sizes: Array
    times: Array
    stays: Array
    outputs: Array
    once: Array
    rank: Array


class Sequence(NamedTuple):
    """A sequence of runs, in arrays with room for more.

    Attributes:
        runs: the nodes.
        last: the run of the last use of each run's output.
        uses: how often it is read.
        held: the bytes that are held during each run.
    """

    runs: Array
    last: Array
    uses: Array
    held: Array


class SearchState(NamedTuple):
    """What goes on from one slice of a search to the next.

    Attributes:
        now: the sequence.
        trial: room for the next one.
        best: the runs of the best sequence that keeps the budget.
        figures: the length of now, its peak, excess and time; the length and the time
            of the best; the price; how many moves of this window, and how many of them
            were over the budget; the least peak.
        latest: room for the latest run of each node.
        dice: the state of the random numbers.
    """

    now: Sequence
    trial: Sequence
    best: Array
    figures: Array
    latest: Array
    dice: Array


_LENGTH, _PEAK, _EXCESS, _TIME, _BEST_LENGTH, _BEST_TIME, _PRICE = range(7)
_MOVES, _OVER, _LEAST_PEAK = range(7, 10)


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
    rank = np.zeros(count, np.int64)
    if order is not None:
        rank[list(order)] = np.arange(count)
    inputs = [u for inputs in problem.inputs for u in inputs]
    lengths = [0, *map(len, problem.inputs)]
    return Nodes(
        np.cumsum(lengths),
        np.array(inputs, np.int64),
        np.array(problem.sizes, np.float64),
        np.array(problem.times, np.float64),
        stays,
        np.nonzero(stays)[0],
        once,
        rank,
    )


def new_search(nodes: Nodes, runs: list[int], budget: float, seed: int) -> SearchState:
    """Return a search that begins with some runs.

    Args:
        nodes: the computation.
        runs: every node once or more, each behind a run of its inputs.
        budget: in bytes.
        seed: of the random numbers.
    """
    count = len(nodes.sizes)
    room = max(4 * count, 2 * len(runs)) + 4 * _CHAIN
    now, trial = (
        Sequence(
            np.zeros(room, np.int64),
            np.zeros(room, np.int64),
            np.zeros(room, np.int64),
            np.zeros(room + 1, np.float64),
        )
        for _ in range(2)
    )
    now.runs[: len(runs)] = runs
    figures = np.zeros(10)
    figures[_LENGTH], figures[_BEST_TIME], figures[_PRICE] = len(runs), np.inf, 0.1
    dice = np.array([0x9E3779B97F4A7C15 ^ (seed * 2654435761 + 1)], np.uint64)
    search = SearchState(
        now, trial, now.runs.copy(), figures, np.zeros(count, np.int64), dice
    )
    _begin(nodes, search, budget)
    return search


def best_runs(search: SearchState) -> list[int] | None:
    """Return the best runs within the budget; None if there were none."""
    if not np.isfinite(search.figures[_BEST_TIME]):
        return None
    return search.best[: int(search.figures[_BEST_LENGTH])].tolist()


def current_runs(search: SearchState) -> list[int]:
    """Return the runs at which a search stands."""
    return search.now.runs[: int(search.figures[_LENGTH])].tolist()


def excess(search: SearchState) -> float:
    """Return by how much the current runs exceed the budget, summed over the runs."""
    return float(search.figures[_EXCESS])


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
def _evaluate(nodes, sequence, length, budget, latest):  # type: ignore[no-untyped-def]
    """Fill in uses and bytes; return peak, excess and time, a peak of -1 if invalid."""
    runs, last, uses, held = sequence
    latest[:] = -1
    rank = -1
    for i in range(length):
        node = runs[i]
        last[i] = i
        uses[i] = 0
        for e in range(nodes.start[node], nodes.start[node + 1]):
            j = latest[nodes.inputs[e]]
            if j < 0:
                return -1.0, 0.0, 0.0
            last[j] = i
            uses[j] += 1
        if latest[node] < 0:
            if nodes.rank[node] < rank:
                return -1.0, 0.0, 0.0
            rank = nodes.rank[node]
        latest[node] = i
    for node in range(len(latest)):
        if nodes.stays[node] and latest[node] >= 0:
            last[latest[node]] = length - 1
            uses[latest[node]] += 1
    held[: length + 1] = 0.0
    time = 0.0
    for i in range(length):
        size = nodes.sizes[runs[i]]
        time += nodes.times[runs[i]]
        held[i] += size
        held[last[i] + 1] -= size
    peak = over = level = 0.0
    for i in range(length):
        level += held[i]
        held[i] = level
        peak = max(peak, level)
        over += max(level - budget, 0.0)
    return peak, over, time


@_compiled
def _begin(nodes, search, budget):  # type: ignore[no-untyped-def]
    figures = search.figures
    length = int(figures[_LENGTH])
    peak, over, time = _evaluate(nodes, search.now, length, budget, search.latest)
    figures[_PEAK], figures[_EXCESS], figures[_TIME] = peak, over, time
    figures[_LEAST_PEAK] = peak
    _note_best(search)


@_compiled
def _note_best(search):  # type: ignore[no-untyped-def]
    """Remember the current runs if they keep the budget in less time."""
    figures = search.figures
    figures[_LEAST_PEAK] = min(figures[_LEAST_PEAK], figures[_PEAK])
    if figures[_EXCESS] <= 0.0 and figures[_TIME] < figures[_BEST_TIME] - 1e-12:
        length = int(figures[_LENGTH])
        search.best[:length] = search.now.runs[:length]
        figures[_BEST_LENGTH], figures[_BEST_TIME] = length, figures[_TIME]


@_compiled
def _run_before(runs, node, place):  # type: ignore[no-untyped-def]
    """Return the latest run of a node before a place; -1 if there is none."""
    i = place - 1
    while i >= 0 and runs[i] != node:
        i -= 1
    return i


@_compiled
def _reads(nodes, reader, node):  # type: ignore[no-untyped-def]
    for e in range(nodes.start[reader], nodes.start[reader + 1]):
        if nodes.inputs[e] == node:
            return True
    return False


@_compiled
def _chain(nodes, now, node, place, eagerness, dice, chain):  # type: ignore[no-untyped-def]
    """Collect a node and inputs that are gone by a place, readers first; count them."""
    chain[0] = node
    count, done, looks = 1, 0, 4 * len(chain)
    while done < count and looks:
        reader = chain[done]
        done += 1
        looks -= 1
        for e in range(nodes.start[reader], nodes.start[reader + 1]):
            u = nodes.inputs[e]
            if nodes.once[u]:
                continue
            run = _run_before(now.runs, u, place)
            if run >= 0 and now.last[run] >= place:
                continue
            known = -1
            for i in range(count):
                if chain[i] == u:
                    known = i
            if known >= done:
                # It has to come before this reader, too.
                for i in range(known, count - 1):
                    chain[i] = chain[i + 1]
                chain[count - 1] = u
            elif known >= 0:
                # Among those that were looked at: looked at again, further back.
                for i in range(known, count - 1):
                    chain[i] = chain[i + 1]
                chain[count - 1] = u
                done -= 1
            elif count < len(chain) and _roll(dice) < eagerness:
                chain[count] = u
                count += 1
    return count


@_compiled
def _insert(nodes, search, budget, chain):  # type: ignore[no-untyped-def]
    """Write the current runs with one or more put in before a use; return how many."""
    now, dice = search.now, search.dice
    length = int(search.figures[_LENGTH])
    if length + len(chain) >= len(now.runs):
        return 0
    over = search.figures[_EXCESS] > 0
    for _ in range(_TRIES):
        if len(nodes.outputs) and _roll(dice) < _AT_END:
            # The end reads all outputs.
            node = nodes.outputs[_pick(dice, len(nodes.outputs))]
            if nodes.once[node] or now.runs[length - 1] == node:
                continue
            count = _chain(nodes, now, node, length, _roll(dice), dice, chain)
            _put_in(now.runs, length, length, chain, count, search.trial.runs)
            return length + count
        place = _pick(dice, length)
        if over and now.held[place] <= budget and _roll(dice) < 0.7:
            continue
        reader = now.runs[place]
        inputs = nodes.start[reader + 1] - nodes.start[reader]
        if not inputs:
            continue
        node = nodes.inputs[nodes.start[reader] + _pick(dice, inputs)]
        if nodes.once[node] or (place and now.runs[place - 1] == node):
            continue
        count = _chain(nodes, now, node, place, _roll(dice), dice, chain)
        _put_in(now.runs, length, place, chain, count, search.trial.runs)
        return length + count
    return 0


@_compiled
def _put_in(runs, length, place, chain, count, result):  # type: ignore[no-untyped-def]
    result[:place] = runs[:place]
    for i in range(count):
        result[place + i] = chain[count - 1 - i]
    result[place + count : length + count] = runs[place:length]


@_compiled
def _remove(search):  # type: ignore[no-untyped-def]
    """Write the current runs without one that is not its node's first."""
    runs = search.now.runs
    length = int(search.figures[_LENGTH])
    if length == len(search.latest):
        return 0
    for _ in range(2 * _TRIES):
        place = _pick(search.dice, length)
        if _run_before(runs, runs[place], place) >= 0:
            search.trial.runs[:place] = runs[:place]
            search.trial.runs[place : length - 1] = runs[place + 1 : length]
            return length - 1
    return 0


@_compiled
def _shift(nodes, search, budget):  # type: ignore[no-untyped-def]
    """Write the current runs with one moved between its inputs and its first use."""
    now, dice = search.now, search.dice
    length = int(search.figures[_LENGTH])
    place = _pick(dice, length)
    if _roll(dice) < 0.6:
        # Near where most is held: elsewhere, order matters little.
        full = 0.9 * min(budget, search.figures[_PEAK])
        for _ in range(_TRIES):
            if now.held[place] >= full:
                break
            place = _pick(dice, length)
        place = min(max(place + _pick(dice, 11) - 5, 0), length - 1)
    node = now.runs[place]
    low, high = 0, place
    for e in range(nodes.start[node], nodes.start[node + 1]):
        low = max(low, _run_before(now.runs, nodes.inputs[e], place) + 1)
    while high + 1 < length:
        reader = now.runs[high + 1]
        if reader == node or _reads(nodes, reader, node):
            break
        high += 1
    draw = _roll(dice)
    target = low + _pick(dice, high - low + 1)
    if draw < 0.25:
        target = high
    elif draw < 0.4:
        target = low
    if target == place:
        return 0
    result = search.trial.runs
    result[:length] = now.runs[:length]
    if target > place:
        result[place:target] = now.runs[place + 1 : target + 1]
    else:
        result[target + 1 : place + 1] = now.runs[target:place]
    result[target] = node
    return length


@_compiled
def _take_over(search, length):  # type: ignore[no-untyped-def]
    """Make the trial the current sequence."""
    now, trial = search.now, search.trial
    now.runs[:length] = trial.runs[:length]
    now.last[:length] = trial.last[:length]
    now.uses[:length] = trial.uses[:length]
    now.held[:length] = trial.held[:length]
    search.figures[_LENGTH] = length


@_compiled
def _drop_unused(nodes, search, budget):  # type: ignore[no-untyped-def]
    """Take out runs that nothing reads, if their node runs elsewhere."""
    now, latest = search.now, search.latest
    any_order = not nodes.rank.any()
    dropped = search.figures[_LENGTH] > len(latest)
    while dropped:
        dropped = False
        length = int(search.figures[_LENGTH])
        count = np.zeros(len(latest), np.int64)
        for i in range(length):
            count[now.runs[i]] += 1
        kept = 0
        latest[:] = -1
        for i in range(length):
            node = now.runs[i]
            # A first run keeps its place in a fixed order, even if nothing reads it.
            free = any_order or latest[node] >= 0
            if now.uses[i] == 0 and count[node] > 1 and free:
                count[node] -= 1
                dropped = True
            else:
                latest[node] = i
                now.runs[kept] = node
                kept += 1
        if dropped:
            figures = search.figures
            peak, over, time = _evaluate(nodes, now, kept, budget, latest)
            figures[_LENGTH], figures[_PEAK] = kept, peak
            figures[_EXCESS], figures[_TIME] = over, time


@_compiled
def _adapt_price(figures):  # type: ignore[no-untyped-def]
    """Raise the price where the budget is rarely kept; lower it where it mostly is."""
    if figures[_MOVES] >= _WINDOW:
        share = figures[_OVER] / figures[_MOVES]
        if share > 0.8:
            figures[_PRICE] *= 1.3
        elif share < 0.4:
            figures[_PRICE] /= 1.2
        figures[_MOVES] = figures[_OVER] = 0.0


@_compiled
def anneal(nodes, search, budget, heat, cold, moves, goal):  # type: ignore[no-untyped-def]
    """Try some moves, and take those that are good enough.

    Args:
        nodes: the computation.
        search: where it stands; changed.
        budget: in bytes.
        heat: the temperature at the first move, as a share of the time of all nodes.
        cold: the temperature at the last one.
        moves: how many.
        goal: the time at which nothing is left to gain.
    """
    chain = np.zeros(_CHAIN, np.int64)
    figures, dice = search.figures, search.dice
    total = max(nodes.times.sum(), 1e-30)
    scale = max(budget, 1.0)
    for move in range(moves):
        if figures[_BEST_TIME] <= goal:
            return
        temperature = heat * (cold / heat) ** (move / moves)
        draw = _roll(dice)
        if draw < _INSERT:
            length = _insert(nodes, search, budget, chain)
        elif draw < _REMOVE and figures[_LENGTH] > len(search.latest):
            length = _remove(search)
        else:
            length = _shift(nodes, search, budget)
        if not length:
            continue
        peak, over, time = _evaluate(nodes, search.trial, length, budget, search.latest)
        # Not the order that is asked for.
        if peak < 0.0:
            continue
        worse = (time - figures[_TIME]) / total
        worse += figures[_PRICE] * (over - figures[_EXCESS]) / scale
        if worse <= 0.0 or _roll(dice) < np.exp(-worse / temperature):
            _take_over(search, length)
            figures[_PEAK], figures[_EXCESS], figures[_TIME] = peak, over, time
            _drop_unused(nodes, search, budget)
            _note_best(search)
        figures[_MOVES] += 1
        figures[_OVER] += figures[_EXCESS] > 0.0
        _adapt_price(figures)


@_compiled
def evict(nodes, search, budget, rounds):  # type: ignore[no-untyped-def]
    """Free and compute again, time after time what is cheapest for what it frees.

    Each round looks at the fullest run, and at everything that waits there for a later
    use: its bytes and how long it waits, over the time of running it again with those
    of its inputs that are gone.

    Args:
        nodes: the computation.
        search: where it stands; changed.
        budget: in bytes.
        rounds: the most rounds.

    Returns:
        Whether the budget is kept.

    Cost: rounds times the runs and their inputs.
    """
    figures, now, latest = search.figures, search.now, search.latest
    chain = np.zeros(_CHAIN * 8, np.int64)
    count = len(latest)
    used = np.zeros(count, np.int64)
    # Pairs of a node and a reader that brought nothing.
    failed = np.zeros(len(nodes.inputs), np.bool_)
    ended = np.zeros(count, np.bool_)
    for _ in range(rounds):
        if figures[_EXCESS] <= 0.0:
            return True
        length = int(figures[_LENGTH])
        if length + len(chain) >= len(now.runs):
            return False
        fullest = int(np.argmax(now.held[:length]))
        latest[:] = -1
        best, place, node, edge = 0.0, -1, -1, -1
        for i in range(length):
            reader = now.runs[i]
            for e in range(nodes.start[reader], nodes.start[reader + 1]):
                u = nodes.inputs[e]
                waits = used[u] < fullest < i and 0 <= latest[u] < fullest
                if waits and not nodes.once[u] and not failed[e]:
                    time = nodes.times[u]
                    for f in range(nodes.start[u], nodes.start[u + 1]):
                        w = nodes.inputs[f]
                        if now.last[latest[w]] < i:
                            time += nodes.times[w]
                    gain = nodes.sizes[u] * (i - used[u]) / (time + 1e-12)
                    if gain > best:
                        best, place, node, edge = gain, i, u, e
                used[u] = i
            latest[reader] = i
            used[reader] = i
        for u in nodes.outputs:
            if used[u] < fullest and latest[u] < fullest and not nodes.once[u]:
                gain = nodes.sizes[u] * (length - used[u]) / (nodes.times[u] + 1e-12)
                if gain > best and not ended[u]:
                    best, place, node, edge = gain, length, u, -1
        if place < 0:
            return False
        added = _chain(nodes, now, node, place, 2.0, search.dice, chain)
        _put_in(now.runs, length, place, chain, added, search.trial.runs)
        peak, over, time = _evaluate(
            nodes, search.trial, length + added, budget, latest
        )
        if peak >= 0.0 and over < figures[_EXCESS]:
            _take_over(search, length + added)
            figures[_PEAK], figures[_EXCESS], figures[_TIME] = peak, over, time
            _drop_unused(nodes, search, budget)
            _note_best(search)
        elif edge >= 0:
            failed[edge] = True
        else:
            ended[node] = True
    return figures[_EXCESS] <= 0.0
