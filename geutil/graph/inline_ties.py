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
class Surroundings:
    """Where a call stands among the effects of its caller.

    Attributes:
        late: the arguments, by name, that come behind an effect.
        early: whether an effect comes behind a result.
    """

    late: tuple[str, ...] = ()
    early: bool = False


@dataclass(frozen=True)
class Ties:
    """What to tie, as names of nodes and arguments of the body.

    Attributes:
        effects: what each result has to wait for.
        loose: the positions of the results that do not wait for all of them by
            themselves.
        done: what has to be waited for by whoever waits for the call.
        told: the nodes that have to be told to wait for the late arguments.
        late: the nodes and arguments that have an effect or come behind one.
        early: the nodes that yield something to an effect or to what comes before one.
    """

    effects: tuple[str, ...]
    loose: frozenset[int]
    done: tuple[str, ...]
    told: tuple[str, ...]
    late: frozenset[str]
    early: frozenset[str]


def find_ties(plan: Plan, around: Surroundings) -> Ties:
    """Return the ties of one body.

    Args:
        plan: the body.
        around: where the call stands.

    Cost: linear in the nodes and their inputs, times the effects over 64.
    """
    body = plan.body
    results = [producer_of(result.tensor) for result in body.results]
    controls = [node for _, node in body.control_results]
    noticed = plan.stateful if around.early else plan.effective
    # A call is strict about effects, by the ties of its own body; not about reads.
    needs = plan.reliable_needs if around.early else plan.needs.__getitem__
    effects = _last((*around.late, *noticed), plan.order, needs)
    done = (*around.late, *plan.stateful, *controls, *results)
    late = _late(plan, around.late)
    return Ties(
        effects=tuple(effects),
        loose=frozenset(_loose(plan.order, needs, effects, results)),
        done=tuple(_last(done, plan.order, plan.reliable_needs)),
        told=tuple(_told(plan, late)) if around.late else (),
        late=frozenset(late),
        early=frozenset(_early(plan, results if around.early else [])),
    )


def _late(plan: Plan, late_args: Iterable[str]) -> set[str]:
    late = {*plan.effective, *late_args}
    for name in plan.order if late else ():
        if not late.isdisjoint(plan.needs[name]):
            late.add(name)
    return late


def _early(plan: Plan, results: Iterable[str]) -> set[str]:
    """Return the nodes whose outputs reach an effect or one of `results`."""
    found = set(results)
    before = {*plan.effective, *found}
    inputs = {node.name: node.inputs for node in plan.body.nodes}
    for name in reversed(plan.order) if before else ():
        if name in before:
            before.update(plan.needs[name])
            found.update(producer_of(r) for r in inputs[name] if r[:1] != "^")
    return found


def _told(plan: Plan, late: set[str]) -> list[str]:
    """Return the stateful nodes that come behind no late argument by themselves."""
    stateful = set(plan.stateful)
    behind = late.difference(plan.order)
    told = []
    for name in plan.order:
        # A call whose argument is late finds its own nodes to tell.
        own = name in plan.calls and not late.isdisjoint(plan.needs[name])
        if own or not behind.isdisjoint(plan.reliable_needs(name)):
            behind.add(name)
        elif name in stateful:
            behind.add(name)
            told.append(name)
    return told


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


def _loose(
    order: Sequence[str],
    needs: Callable[[str], Iterable[str]],
    effects: Sequence[str],
    results: Sequence[str],
) -> list[int]:
    """Return the positions of the results that do not need all of `effects`."""
    if not effects or not results:
        return []
    if len(effects) > _MAX_SEPARATE:
        return list(range(len(results)))
    # A bit for each effect that a node needs or is.
    bits = {name: 1 << i for i, name in enumerate(effects)}
    for name in order:
        bit = bits.get(name, 0)
        for needed in needs(name):
            bit |= bits.get(needed, 0)
        if bit:
            bits[name] = bit
    every = (1 << len(effects)) - 1
    return [i for i, name in enumerate(results) if bits.get(name, 0) != every]
