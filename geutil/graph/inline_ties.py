"""Which nodes of a body have to be tied to what reads the results of a call.

A call runs all of its body, and whoever reads a result or waits for the call can rely
on that. Once the body stands in the caller's place, they can rely only on the nodes
that lie on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from geutil.graph.inline_plan import Plan, producer_of

_MAX_SEPARATE = 1000
"""Effects that are told apart; where there are more, each result waits for all."""


@dataclass(frozen=True)
class Ties:
    """What to tie, as names of nodes and arguments of the body.

    Attributes:
        effects: what each result has to wait for.
        loose: the positions of the results that do not wait for all of them by
            themselves.
        done: what has to be waited for by whoever waits for the call.
        late: the nodes and arguments that have an effect or come behind one.
    """

    effects: tuple[str, ...]
    loose: frozenset[int]
    done: tuple[str, ...]
    late: frozenset[str]


def find_ties(plan: Plan, late_args: Iterable[str]) -> Ties:
    """Return the ties of one body.

    Args:
        plan: the body.
        late_args: the arguments that come behind an effect in the caller.

    Cost: linear in the nodes and their inputs, times the effects over 64.
    """
    body = plan.body
    late = set(plan.effective)
    late.update(late_args)
    members = [name for name in (*plan.args, *plan.names) if name in late]
    results = [producer_of(result.tensor) for result in body.results]
    # A call is strict about effects, by the ties of its own body.
    effects = _last(members, plan.order, plan.needs.__getitem__)
    done = dict.fromkeys((*members, *(n for _, n in body.control_results), *results))
    # It is not about the rest: its results need not need what it reads.
    last = _last(done, plan.order, lambda name: _reliable_needs(plan, name))
    if late:
        for name in plan.order:
            if not late.isdisjoint(plan.needs[name]):
                late.add(name)
    loose = _loose(plan, effects, results)
    return Ties(tuple(effects), frozenset(loose), tuple(last), frozenset(late))


def _last(
    members: Iterable[str],
    order: Sequence[str],
    needs: Callable[[str], Iterable[str]],
) -> list[str]:
    """Return the members that no other member needs."""
    members = dict.fromkeys(members)
    needed: set[str] = set()
    for name in reversed(order) if members else ():
        if name in needed or name in members:
            needed.update(needs(name))
    return [name for name in members if name not in needed]


def _reliable_needs(plan: Plan, name: str) -> Iterable[str]:
    if name not in plan.calls:
        return plan.needs[name]
    return plan.control_needs(name)


def _loose(plan: Plan, effects: Sequence[str], results: Sequence[str]) -> list[int]:
    if not effects or not results:
        return []
    if len(effects) > _MAX_SEPARATE:
        return list(range(len(results)))
    # A bit for each effect that a node needs or is.
    bits = {name: 1 << i for i, name in enumerate(effects)}
    for name in plan.order:
        bit = bits.get(name, 0)
        for needed in plan.needs[name]:
            bit |= bits.get(needed, 0)
        if bit:
            bits[name] = bit
    every = (1 << len(effects)) - 1
    return [i for i, name in enumerate(results) if bits.get(name, 0) != every]
