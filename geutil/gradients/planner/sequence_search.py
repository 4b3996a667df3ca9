"""Local search over sequences of runs, compiled by numba.

Two searches. Annealing (Kirkpatrick et al. 1983) puts in a run right before a use (with
runs of inputs that are gone by then), takes one out, or puts one elsewhere; it lowers
extra time plus a price on the bytes above the budget, summed over all runs, and the
price follows how often the budget is kept. Rebuilding takes several runs out and then
frees, time after time, what is cheapest for what it frees, until the budget is kept: a
search of large neighbourhoods ("ruin and recreate", Schrimpf et al. 2000). It stays
near the order with which it begins, where annealing finds others.
"""

from __future__ import annotations

import numpy as np

from geutil.gradients.planner.run_slots import (
    BEST_TIME,
    BUDGET,
    CHAIN,
    EXCESS,
    LENGTH,
    LOGGED,
    LOOSE,
    MOVES,
    OVER,
    PRICE,
    SPAN,
    TIME,
    add_run,
    compiled,
    drop_loose,
    first_use,
    has_room,
    has_space,
    last_use,
    make_room,
    note,
    note_best,
    pick,
    roll,
    run_before,
    take_run,
    undo,
    waited,
)

RUN_SLOTS = "0912af45"
"""The first digits of the SHA-256 of `run_slots.py`; see there."""
_AT_END = 0.05
"""The share of inserted runs that are for what has to be there at the end."""
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
WAYS = FLAT, DEEP, LONG = range(3)
"""How an eviction is valued: by the bytes above the budget that it frees, summed over
runs, over the time of the node and of its inputs that are gone; over that of all that
has to run again for it; or by all bytes that it frees, over the first of these times.
None leads to the least time everywhere (benchmarks/schedules/budgets.py)."""
_NOISE = 4.0
"""By how much its choices differ from the greedy ones at most, as a power of e."""


@compiled
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
            if nodes.once[u] or state.last[run_before(state, u, slot)] >= slot:
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
            elif count < len(chain) and roll(state.dice) < eagerness:
                chain[count] = u
                count += 1
    return count


@compiled
def _put_in(nodes, state, slot, chain, count):  # type: ignore[no-untyped-def]
    """Put a chain in right before a slot; return whether that can be."""
    slot = make_room(nodes, state, slot, count)
    for i in range(count):
        node = chain[count - 1 - i]
        if not add_run(nodes, state, node, slot - count + i):
            return False
        note(state, node, slot - count + i)
    return True


@compiled
def _random_run(state):  # type: ignore[no-untyped-def]
    slot = pick(state.dice, state.numbers[SPAN])
    while state.node[slot] < 0:
        slot = pick(state.dice, state.numbers[SPAN])
    return slot


@compiled
def _insert(nodes, state, chain):  # type: ignore[no-untyped-def]
    """Put in a run before a use, with inputs that are gone; tell whether that was done.

    Above the budget mostly where something waits across a slot that is too full.
    """
    dice = state.dice
    budget = state.figures[BUDGET]
    over = state.figures[EXCESS] > 0.0
    for _ in range(_TRIES):
        if len(nodes.outputs) and roll(dice) < _AT_END:
            # The end reads all outputs.
            node = nodes.outputs[pick(dice, len(nodes.outputs))]
            slot = state.numbers[SPAN] - 1
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
            node = nodes.inputs[nodes.start[reader] + pick(dice, inputs)]
            if nodes.once[node]:
                continue
        run = run_before(state, node, slot)
        used = last_use(nodes, state, node, run, slot)
        if over and roll(dice) < 0.9:
            between = used + 1 + pick(dice, max(slot - used - 1, 1))
            if state.level[between] <= budget:
                continue
        count = _chain(nodes, state, node, slot, roll(dice), chain)
        return _put_in(nodes, state, slot, chain, count)
    return False


@compiled
def _remove(nodes, state):  # type: ignore[no-untyped-def]
    """Take out a run that is not its node's first; tell whether that was done."""
    if state.numbers[LENGTH] == len(state.copies):
        return False
    for _ in range(2 * _TRIES):
        slot = pick(state.dice, state.numbers[SPAN])
        node = state.node[slot]
        is_again = node >= 0 and state.before[slot] >= 0
        if is_again and take_run(nodes, state, slot):
            note(state, -1 - node, slot)
            return True
    return False


@compiled
def _shift(nodes, state):  # type: ignore[no-untyped-def]
    """Move a run between its inputs and its first use; tell whether that was done."""
    dice = state.dice
    if not has_space(state, 1):
        return False
    slot, span = _random_run(state), state.numbers[SPAN]
    if roll(dice) < 0.6:
        # Near where most is held: elsewhere, order matters little.
        full = 0.9 * state.figures[BUDGET]
        for _ in range(_TRIES):
            if state.level[slot] >= full:
                break
            slot = _random_run(state)
        slot = min(max(slot + pick(dice, 15) - 7, 0), span - 1)
        while state.node[slot] < 0:
            slot = pick(dice, span)
    node = state.node[slot]
    low, high = -1, first_use(nodes, state, node, slot)
    for e in range(nodes.start[node], nodes.start[node + 1]):
        low = max(low, run_before(state, nodes.inputs[e], slot))
    draw = roll(dice)
    # Right before a slot that lies behind the inputs and not behind the first use.
    target = low + 1 + pick(dice, high - low)
    if draw < 0.25:
        target = high
    elif draw < 0.4:
        target = low + 1
    if target == slot or target == slot + 1:
        return False
    empty = make_room(nodes, state, target, 1) - 1
    # Making room may have moved it by one.
    if state.node[slot] != node:
        slot += 1 if slot + 1 < span and state.node[slot + 1] == node else -1
    if not add_run(nodes, state, node, empty):
        return False
    note(state, node, empty)
    if not take_run(nodes, state, slot):
        return False
    note(state, -1 - node, slot)
    return True


@compiled
def _adapt_price(state):  # type: ignore[no-untyped-def]
    """Raise the price where the budget is rarely kept; lower it where it mostly is."""
    numbers = state.numbers
    if numbers[MOVES] >= _WINDOW:
        share = numbers[OVER] / numbers[MOVES]
        if share > 0.8:
            state.figures[PRICE] *= 1.3
        elif share < 0.4:
            state.figures[PRICE] /= 1.2
        numbers[MOVES] = numbers[OVER] = 0


@compiled
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
    chain = np.zeros(CHAIN, np.int64)
    figures, numbers, dice = state.figures, state.numbers, state.dice
    total = max(nodes.times.sum(), 1e-30)
    scale = max(figures[BUDGET], 1.0)
    for move in range(moves):
        if figures[BEST_TIME] <= goal:
            return
        if not has_room(nodes, state, 2 * CHAIN):
            return
        excess, time = figures[EXCESS], figures[TIME]
        draw = roll(dice)
        over = excess > 0.0
        if draw < (0.45 if over else 0.15):
            done = _insert(nodes, state, chain)
        elif draw < (0.6 if over else 0.55):
            done = _remove(nodes, state)
        else:
            done = _shift(nodes, state)
        if done:
            drop_loose(nodes, state)
            worse = (figures[TIME] - time) / total
            worse += figures[PRICE] * (figures[EXCESS] - excess) / scale
            temperature = heat * (cold / heat) ** (move / moves)
            done = worse <= 0.0 or roll(dice) < np.exp(-worse / temperature)
        if done:
            numbers[LOGGED] = numbers[LOOSE] = 0
            note_best(nodes, state)
        else:
            undo(nodes, state, 0)
            # As they were: what was rounded is forgotten, too.
            figures[EXCESS], figures[TIME] = excess, time
        numbers[MOVES] += 1
        numbers[OVER] += figures[EXCESS] > 0.0
        _adapt_price(state)


@compiled
def _next_use(nodes, state, node, slot):  # type: ignore[no-untyped-def]
    """Return the slot of a node's first use from a slot on, and where its reader is.

    That is its place in `nodes.readers`; without a use, the slot behind all and -1.
    """
    use, read = state.numbers[SPAN], -1
    for e in range(nodes.read_start[node], nodes.read_start[node + 1]):
        later = state.newest[nodes.readers[e]]
        while later >= slot:
            if later < use:
                use, read = later, e
            later = state.before[later]
    return use, read


@compiled
def _evict_one(  # type: ignore[no-untyped-def]
    nodes, state, failed, round_, noise, way, chain, over
):
    """Free what waits across the fullest run, and put it in before its next use.

    Args:
        nodes: the computation.
        state: where the search stands; changed.
        failed: for each pair of a node and a reader, and behind them for each node and
            the end, the latest round in which that brought nothing.
        round_: the number of this round.
        noise: how much a choice is left to chance.
        way: one of `WAYS`.
        chain: room for the runs.
        over: room for the bytes above the budget up to each slot, and for the runs.

    Returns:
        Whether less is held above the budget, or something else may be tried.
    """
    figures, dice = state.figures, state.dice
    if not has_space(state, len(chain)):
        return False
    span = state.numbers[SPAN]
    fullest, most = span - 1, -1.0
    bytes_over, runs_over = 0.0, 0
    for slot in range(span):
        level = state.filled[slot] * state.level[slot]
        if level > most:
            fullest, most = slot, level
        if level > figures[BUDGET]:
            bytes_over += level - figures[BUDGET]
            runs_over += 1
        over[slot, 0], over[slot, 1] = bytes_over, runs_over
    best, place, node, edge = 0.0, span, fullest, -1
    for u in nodes.again:
        run = run_before(state, u, fullest)
        if run < 0 or state.last[run] <= fullest:
            continue
        use, read = _next_use(nodes, state, u, fullest)
        if read < 0:
            read = len(nodes.readers) + u
        # What is read by the fullest run itself stays.
        if use == fullest or failed[read] == round_:
            continue
        used = last_use(nodes, state, u, run, fullest)
        time = nodes.times[u]
        for f in range(nodes.start[u], nodes.start[u + 1]):
            w = nodes.inputs[f]
            if state.last[run_before(state, w, use)] < use:
                time += nodes.times[w]
        freed = nodes.sizes[u] * (use - used)
        if way != LONG:
            # At most: where less than the node is above the budget, less counts.
            freed = nodes.sizes[u] * (over[use - 1, 1] - over[used, 1])
            freed = min(freed, over[use - 1, 0] - over[used, 0])
        if noise > 0.0:
            freed *= np.exp(noise * (roll(dice) - 0.5))
        if freed <= best * time:
            continue
        if way == DEEP:
            count = _chain(nodes, state, u, use, 2.0, chain)
            time = 0.0
            for i in range(count):
                time += nodes.times[chain[i]]
        gain = freed / (time + 1e-12)
        if gain > best:
            best, place, node, edge = gain, use, u, read
    if best <= 0.0:
        return False
    excess, time, mark = figures[EXCESS], figures[TIME], state.numbers[LOGGED]
    eagerness = 2.0 if noise <= 0.0 or roll(dice) < 0.7 else roll(dice)
    added = _chain(nodes, state, node, place, eagerness, chain)
    if _put_in(nodes, state, place, chain, added) and figures[EXCESS] < excess:
        drop_loose(nodes, state)
    else:
        undo(nodes, state, mark)
        figures[EXCESS], figures[TIME] = excess, time
        failed[edge] = round_
    return True


@compiled
def evict(nodes, state, rounds, noise, way):  # type: ignore[no-untyped-def]
    """Free and compute again, time after time what is cheapest for what it frees.

    Each round looks at the fullest run, and at everything that waits there for a later
    use.

    Args:
        nodes: the computation.
        state: where the search stands; changed.
        rounds: the most rounds.
        noise: how much a choice is left to chance.
        way: one of `WAYS`.

    Returns:
        Whether the budget is kept.

    Cost: rounds times the nodes, their readers and what they hold.
    """
    figures = state.figures
    chain = np.zeros(CHAIN * 8, np.int64)
    over = np.zeros((len(state.node), 2))
    failed = np.zeros(len(nodes.readers) + len(state.copies), np.int64)
    for _ in range(rounds):
        if figures[EXCESS] <= 0.0 or not has_room(nodes, state, len(chain)):
            break
        # Any number but 0 will do; a literal one would have it compiled once more.
        if not _evict_one(nodes, state, failed, rounds, noise, way, chain, over):
            break
        state.numbers[LOGGED] = 0
    note_best(nodes, state)
    return figures[EXCESS] <= 0.0


@compiled
def _ruin(nodes, state, wanted):  # type: ignore[no-untyped-def]
    """Take out some runs that are not their nodes' first, mostly near each other."""
    dice, span = state.dice, state.numbers[SPAN]
    slot, step = pick(dice, span), 1
    if roll(dice) < 0.5:
        step = 1 + pick(dice, span)
    for _ in range(span):
        if wanted == 0:
            return
        slot = (slot + step) % span
        node = state.node[slot]
        is_chosen = node >= 0 and state.before[slot] >= 0 and roll(dice) < 0.5
        if is_chosen and take_run(nodes, state, slot):
            note(state, -1 - node, slot)
            drop_loose(nodes, state)
            wanted -= 1


@compiled
def _rebuilt(nodes, state, most, failed, round_, chain, over):  # type: ignore[no-untyped-def]
    """Move some runs, take some out, and evict anew; stop above the most time."""
    figures, dice = state.figures, state.dice
    while roll(dice) < _SHIFTED:
        mark = state.numbers[LOGGED]
        if _shift(nodes, state):
            drop_loose(nodes, state)
        else:
            undo(nodes, state, mark)
    _ruin(nodes, state, 1 + int(_RUINED * waited(dice)))
    noise = _NOISE * roll(dice)
    way = pick(dice, 3)
    for _ in range(_ROUNDS):
        if figures[EXCESS] <= 0.0 or figures[TIME] >= most:
            return
        # Long chains take long, and are rarely worth it.
        longest = min(2 + int(_CHAINED * waited(dice)), len(chain))
        if not _evict_one(
            nodes, state, failed, round_, noise, way, chain[:longest], over
        ):
            return


@compiled
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
    chain = np.zeros(2 * CHAIN, np.int64)
    over = np.zeros((len(state.node), 2))
    figures, numbers, dice = state.figures, state.numbers, state.dice
    failed = np.zeros(len(nodes.readers) + len(state.copies), np.int64)
    total = nodes.times.sum()
    for move in range(moves):
        if figures[BEST_TIME] <= goal or not has_room(nodes, state, 4 * len(chain)):
            return
        excess, time = figures[EXCESS], figures[TIME]
        most = time + total * heat * (cold / heat) ** (move / moves) * waited(dice)
        if excess > 0.0:
            # What keeps more of the budget is welcome at any time.
            most = np.inf
        _rebuilt(nodes, state, most, failed, move + 1, chain, over)
        if figures[EXCESS] <= excess and figures[TIME] <= most:
            note_best(nodes, state)
        else:
            undo(nodes, state, 0)
            figures[EXCESS], figures[TIME] = excess, time
        numbers[LOGGED] = 0
