"""Control dependencies of an inlined body.

Which nodes are tied to the readers of a call's results.

A call runs all of its body, and whoever reads a result or waits for the call can rely
on that. Once the body stands in the caller's place, they can rely only on the nodes
that lie on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from geutil.bodies.inlining_plan import CallerPlan
from geutil.graph.walks import node_name

_MAX_SEPARATE = 1000
"""The most effects or arguments with ties of their own; above it, all wait for all."""


@dataclass(frozen=True)
class CallSurroundings:
    """Where a call stands among the effects of its caller."""

    late: tuple[str, ...] = ()  # The arguments, by name, that come behind an effect.
    # Those that come behind a read of state that effects change, too.
    seen: tuple[str, ...] = ()
    early: bool = False  # Whether an effect comes behind a result.


@dataclass(frozen=True)
class Ties:
    """The ties to make, as names of nodes and arguments of the body."""

    effects: tuple[str, ...]  # The nodes that each result has to wait for.
    # The positions of the results that do not wait for all of them by themselves.
    loose: frozenset[int]
    done: tuple[str, ...]  # The nodes that ops waiting for the call have to wait for.
    # The nodes that need control inputs from the late arguments.
    told_late: tuple[str, ...]
    told_seen: tuple[str, ...]  # Those that need control inputs from the seen ones.
    # The nodes and arguments that have an effect or come behind one.
    late: frozenset[str]
    # Those that read state that effects change, or come behind a read, too.
    seen: frozenset[str]
    early: frozenset[str]  # The nodes that an effect, or a node before one, depends on.


def find_ties(plan: CallerPlan, around: CallSurroundings) -> Ties:
    """Return the ties of one body: linear in the nodes, times the effects over 64."""
    body = plan.body
    results = [node_name(result.tensor) for result in body.results]
    controls = [node for _, node in body.control_results]
    # A call is strict about effects, by the ties of its own body; not about reads.
    needs: Callable[[str], Iterable[str]] = plan.needs.__getitem__
    noticed = [*around.late, *plan.effective]
    if around.early:
        noticed, needs = [*around.seen, *plan.stateful], plan.reliable_needs
    effects = _last(noticed, plan.order, needs)
    done = (*around.seen, *plan.stateful, *controls, *results)
    told_late = _told(plan, around.late, plan.stateful, strict=True)
    return Ties(
        effects=tuple(effects),
        loose=frozenset(_loose(plan.order, needs, effects, results)),
        done=tuple(_last(done, plan.order, plan.reliable_needs)),
        told_late=tuple(told_late),
        told_seen=tuple(_told(plan, around.seen, plan.effective, strict=False)),
        late=frozenset(_behind(plan, (*around.late, *plan.effective, *told_late))),
        seen=frozenset(_behind(plan, (*around.seen, *plan.stateful))),
        early=frozenset(_early(plan, results if around.early else [])),
    )


def _behind(plan: CallerPlan, starts: Iterable[str]) -> set[str]:
    """Return `starts` and all that comes behind one of them."""
    reachable = set(starts)
    for name in plan.order if reachable else ():
        if not reachable.isdisjoint(plan.needs[name]):
            reachable.add(name)
    return reachable


def _early(plan: CallerPlan, results: Iterable[str]) -> set[str]:
    """Return the nodes whose outputs reach an effect or one of `results`."""
    early_nodes = set(results)
    before = {*plan.effective, *early_nodes}
    inputs = {node.name: node.inputs for node in plan.body.nodes}
    for name in reversed(plan.order) if before else ():
        if name in before:
            before.update(plan.needs[name])
            early_nodes.update(node_name(r) for r in inputs[name] if r[:1] != "^")
    return early_nodes


def _told(
    plan: CallerPlan, args: Sequence[str], members: Iterable[str], *, strict: bool
) -> list[str]:
    """Return the members that do not come behind all of `args` by themselves."""
    # If `strict`, a call that reads such an argument makes the readers of its results
    # wait, whatever its body is.
    members = frozenset(members if args else ())
    if not members or len(args) > _MAX_SEPARATE:
        return [name for name in plan.order if name in members]
    # A bit for each argument that a node comes behind.
    bits = {name: 1 << i for i, name in enumerate(args)}
    every = (1 << len(args)) - 1
    unordered_members = []
    for name in plan.order:
        # A call that reads the arguments finds the nodes to tell in its own body.
        own = _union(bits, plan.needs[name])
        if name in members and own != every:
            unordered_members.append(name)
            bits[name] = every
        elif own:
            sure = strict or name not in plan.calls
            bits[name] = own if sure else _union(bits, plan.reliable_needs(name))
    return unordered_members


def _union(bits: Mapping[str, int], names: Iterable[str]) -> int:
    result = 0
    for name in names:
        result |= bits.get(name, 0)
    return result


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
        bit = bits.get(name, 0) | _union(bits, needs(name))
        if bit:
            bits[name] = bit
    every = (1 << len(effects)) - 1
    return [i for i, name in enumerate(results) if bits.get(name, 0) != every]
