"""The walk over the ops of a graph.

It uses a distinctive batch size, and includes version 1 loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from geutil.graph.types import Tensor
from geutil.graph.walks import node_name
from geutil.model.batch_size.batch_edits import (
    BatchPlan,
    Scope,
    ScopeNode,
    SizeSource,
    shape_of,
)
from geutil.model.batch_size.op_rules import RULES
from geutil.model.batch_size.row_loops import RowFrames
from geutil.model.batch_size.sites import REFUSALS, Probing, Site, source_at


@dataclass
class Walk:
    """A finished walk."""

    values: dict[str, Tensor]  # The tensor in the probing graph of each `node:k`.
    plan: BatchPlan = field(default_factory=BatchPlan)
    source: SizeSource | None = None  # Where the size of the batch can be read.


Starts = Mapping[str, tuple[int, int]]

Caller = Callable[[Site, tuple[str, ...]], "list[Tensor] | None"]
"""Walks through the functions that an op calls; None if it calls none."""


def walk(
    scope: Scope,
    feeds: Mapping[str, Tensor],
    probing: Probing,
    calls: Caller,
    active: tuple[str, ...] = (),
    starts: Starts | None = None,
) -> Walk:
    """Find the changes that a graph or a function body needs."""
    # `starts` has, by the Enter op of a variable of a version 1 loop that has to have
    # the batch from the start, the axis and how many times the batch it is long.
    done = Walk(dict(feeds))
    done.source = _first_source(feeds, probing)
    entries = {entry.node.name: entry for entry in scope.entries}
    readers = scope.readers()
    frames = RowFrames(scope)
    for entry in scope.entries:
        if f"{entry.node.name}:0" in done.values:
            continue
        start = (starts or {}).get(entry.node.name)
        _visit(entry, done, probing, calls, active, entries, readers, start, frames)
    return done


def _first_source(feeds: Mapping[str, Tensor], probing: Probing) -> SizeSource | None:
    for name, t in feeds.items():
        axis = probing.axis(t)
        if axis is not None:
            return source_at(probing, t, name.removesuffix(":0"), axis)
    return None


def _visit(
    entry: ScopeNode,
    done: Walk,
    probing: Probing,
    calls: Caller,
    active: tuple[str, ...],
    entries: Mapping[str, ScopeNode],
    readers: Mapping[str, list[tuple[ScopeNode, int]]],
    start: tuple[int, int] | None,
    frames: RowFrames,
) -> None:
    # The edge that closes a loop has no value yet; the loop keeps the shape it has.
    first = next((done.values[n] for n in entry.inputs if n in done.values), None)
    operands = [done.values.get(name, first) for name in entry.inputs]
    site = Site(
        entry,
        [t for t in operands if t is not None],
        probing,
        done.plan,
        done.source,
        [entries.get(node_name(name)) for name in entry.inputs],
        [(e.node.op, i) for e, i in readers.get(f"{entry.node.name}:0", ())],
    )
    if start is not None:
        site.broadcast(0, *start)
    frames.see(site)
    outputs = calls(site, active)
    if outputs is None:
        outputs = _tried(site)
    if any(name not in done.values for name in entry.inputs):
        # A value that comes round a loop is unknown here; it may depend on the inputs.
        probing.mark(outputs)
    for index, t in enumerate(outputs):
        done.values[f"{entry.node.name}:{index}"] = t
    if any(probing.grows(t) for t in outputs):
        done.plan.growing.add(entry.node.name)
    if done.source is None:
        done.source = site.source()


def _tried(site: Site) -> list[Tensor]:
    """Make an op, mended where its rule says so."""
    rule = RULES.get(site.node.op)
    if rule is not None:
        rule(site)
    try:
        outputs = site.probing.make(site.node, site.operands)
        _follow_rows(site, outputs)
        return outputs
    except REFUSALS as refusal:
        if not _joined(site):
            return _unknown(site, refusal)
    try:
        return site.probing.make(site.node, site.operands)
    except REFUSALS as refusal:
        return _unknown(site, refusal)


def _follow_rows(site: Site, outputs: list[Tensor]) -> None:
    """Note whether an op makes a list with an element for each row of the batch."""
    made = site.node.op == "TensorListFromTensor" and site.axis(0) == 0
    kept = site.node.op in _SAME_LENGTH and site.probing.is_list_of_rows(
        site.operands[0]
    )
    if made or kept:
        site.probing.mark_list_of_rows(outputs[0])


_SAME_LENGTH = frozenset(("Identity", "TensorListSetItem"))


def _joined(site: Site) -> bool:
    """Repeat operands of the old batch size where they meet one that has the batch."""
    any_repeated = False
    growing = [i for i in range(len(site.operands)) if site.axis(i) is not None]
    for index, t in enumerate(site.operands):
        shape = shape_of(t)
        # A scalar fits any batch, and so does a tensor that follows the input.
        if not shape or site.probing.grows(t):
            continue
        for other in growing:
            like, axis = site.shape(other) or (), site.axis(other) or 0
            place = axis - len(like) + len(shape)
            dim = like[axis]
            if place >= 0 and dim and shape[place] == site.sizes.before(dim):
                factor = site.sizes.factor(dim)
                any_repeated = site.broadcast(index, place, factor) or any_repeated
                break
    return any_repeated


def _unknown(site: Site, refusal: Exception) -> list[Tensor]:
    """Note a refusal, and go on with outputs of unknown shape."""
    reason = str(refusal).partition(" for '{{node")[0].partition("\n")[0]
    site.problem(
        f"TensorFlow refuses it for other batch sizes ({reason})",
        "rewrite this part of the model, or cut the model around it",
    )
    blank = [
        t
        if t.dtype in (tf.resource, tf.variant) or site.probing.value(t) is not None
        else site.probing.placeholder(t.dtype, None, like=[t])
        for t in site.operands
    ]
    outputs = site.probing.make(site.node, blank)
    if any(site.probing.grows(t) for t in site.operands):
        site.probing.mark(outputs)
    return outputs


Walker = Callable[[Starts], Walk]


def walk_loops(scope: Scope, probing: Probing, walker: Walker) -> Walk:
    """Walk until every loop variable that has the batch has it from the start."""
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


def _variables(scope: Scope) -> Iterator[tuple[ScopeNode, ScopeNode]]:
    """Yield (Enter, Merge) of each loop variable."""
    entries = {entry.node.name: entry for entry in scope.entries}
    for entry in scope.entries:
        if entry.node.op == "Merge" and len(entry.inputs) == 2:
            enter, back = (entries.get(node_name(name)) for name in entry.inputs)
            ends = (enter and enter.node.op, back and back.node.op)
            if enter is not None and ends == ("Enter", "NextIteration"):
                yield enter, entry


def _ends(merge: ScopeNode, done: Walk) -> tuple[Tensor, Tensor]:
    before, after = (done.values[name] for name in merge.inputs)
    return before, after


def _growing(
    loops: list[tuple[ScopeNode, ScopeNode]], done: Walk, probing: Probing
) -> dict[str, tuple[int, int]]:
    """Return the variables that gain the batch in an iteration."""
    growth_by_enter = {}
    for enter, merge in loops:
        before, after = _ends(merge, done)
        axis, old, new = probing.axis(after), shape_of(before), shape_of(after)
        if axis is None or old is None or new is None or len(old) != len(new):
            continue
        grown = new[axis] or 0
        start = done.values[enter.inputs[0]]
        if old[axis] == probing.sizes.before(grown) and not probing.grows(start):
            growth_by_enter[enter.node.name] = axis, probing.sizes.factor(grown)
    return {
        name: start for name, start in growth_by_enter.items() if not _had(name, done)
    }


def _had(enter: str, done: Walk) -> bool:
    """Tell whether a variable was given the batch, or could not be."""
    noted = [e.node for e in done.plan.edits] + [p.node for p in done.plan.problems]
    return enter in noted


def _guessed(
    loops: list[tuple[ScopeNode, ScopeNode]], done: Walk, probing: Probing
) -> dict[str, tuple[int, int]]:
    """Return the variables that look as if they had the batch at their start."""
    growth_by_enter = {}
    for enter, _ in loops:
        start = done.values[enter.inputs[0]]
        shape = shape_of(start)
        if not shape or shape[0] != probing.sizes.old or probing.grows(start):
            continue
        if probing.rows_are_equal(start, 0):
            growth_by_enter[enter.node.name] = 0, 1
    return growth_by_enter


def _held(
    loops: list[tuple[ScopeNode, ScopeNode]],
    done: Walk,
    probing: Probing,
    starts: Starts,
) -> bool:
    """Tell whether variables that have the batch at their start keep it."""
    return all(
        probing.axis(t) == starts[enter.node.name][0]
        for enter, merge in loops
        if enter.node.name in starts
        for t in _ends(merge, done)
    )
