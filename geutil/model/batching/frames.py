"""The walk through graphs with loops of version 1, made of Enter, Merge and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from geutil.graph.kinds import Tensor
from geutil.model.batching.probing import Probing
from geutil.model.batching.scopes import Entry, Scope
from geutil.model.batching.sizes import shape_of
from geutil.model.batching.walking import Starts, Walk
from geutil.model.programs.program import node_of

Walker = Callable[[Starts], Walk]


def walk_loops(scope: Scope, probing: Probing, walker: Walker) -> Walk:
    """Walk until every loop variable that has the batch has it from the start.

    Args:
        scope: the graph.
        probing: where shapes are inferred.
        walker: walks with the batch given to some variables at their start.

    Cost: a walk for each round in which a variable turns out to have the batch.
    """
    loops = list(_variables(scope))
    starts: dict[str, tuple[int, int]] = {}
    while True:
        done = walker(starts)
        more = _growing(loops, done, probing)
        if not more:
            break
        starts |= more
    if done.plan.problems:
        guess = starts | _guessed(loops, done, probing)
        if guess.keys() != starts.keys():
            other = walker(guess)
            if not other.plan.problems and _held(loops, other, probing, guess):
                return other
    return done


def _variables(scope: Scope) -> Iterator[tuple[Entry, Entry]]:
    """Yield (Enter, Merge) of each loop variable."""
    entries = {entry.node.name: entry for entry in scope.entries}
    for entry in scope.entries:
        if entry.node.op == "Merge" and len(entry.inputs) == 2:
            enter, back = (entries.get(node_of(name)) for name in entry.inputs)
            ends = (enter and enter.node.op, back and back.node.op)
            if enter is not None and ends == ("Enter", "NextIteration"):
                yield enter, entry


def _ends(merge: Entry, done: Walk) -> tuple[Tensor, Tensor]:
    before, after = (done.values[name] for name in merge.inputs)
    return before, after


def _growing(
    loops: list[tuple[Entry, Entry]], done: Walk, probing: Probing
) -> dict[str, tuple[int, int]]:
    """Return the variables that gain the batch in an iteration."""
    found = {}
    for enter, merge in loops:
        before, after = _ends(merge, done)
        axis, old, new = probing.axis(after), shape_of(before), shape_of(after)
        if axis is None or old is None or new is None or len(old) != len(new):
            continue
        grown = new[axis] or 0
        start = done.values[enter.inputs[0]]
        if old[axis] == probing.sizes.before(grown) and not probing.grows(start):
            found[enter.node.name] = axis, probing.sizes.factor(grown)
    return {name: start for name, start in found.items() if not _had(name, done)}


def _had(enter: str, done: Walk) -> bool:
    """Tell whether a variable was given the batch, or could not be."""
    noted = [e.node for e in done.plan.edits] + [p.node for p in done.plan.problems]
    return enter in noted


def _guessed(
    loops: list[tuple[Entry, Entry]], done: Walk, probing: Probing
) -> dict[str, tuple[int, int]]:
    """Return the variables that look as if they had the batch at their start."""
    found = {}
    for enter, _ in loops:
        start = done.values[enter.inputs[0]]
        shape = shape_of(start)
        if not shape or shape[0] != probing.sizes.old or probing.grows(start):
            continue
        if probing.rows_are_equal(start, 0):
            found[enter.node.name] = 0, 1
    return found


def _held(
    loops: list[tuple[Entry, Entry]], done: Walk, probing: Probing, starts: Starts
) -> bool:
    """Tell whether variables that have the batch at their start keep it."""
    return all(
        probing.axis(t) == starts[enter.node.name][0]
        for enter, merge in loops
        if enter.node.name in starts
        for t in _ends(merge, done)
    )
