"""The walk: each op is tried with the batch at the size that stands for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from geutil.graph.kinds import Tensor
from geutil.model.batching.edits import Plan
from geutil.model.batching.probing import REFUSALS, Probing
from geutil.model.batching.rules import RULES
from geutil.model.batching.scopes import Entry, Scope
from geutil.model.batching.sites import Site, source_at
from geutil.model.batching.sizes import Source, shape_of
from geutil.model.programs.program import node_of


@dataclass
class Walk:
    """A finished walk.

    Attributes:
        values: what each tensor, as `node:k`, is in the probing graph.
        plan: the changes.
        source: where the size of the batch can be read.
    """

    values: dict[str, Tensor]
    plan: Plan = field(default_factory=Plan)
    source: Source | None = None


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
    """Find what a graph or a function body has to have changed.

    Args:
        scope: the graph or body.
        feeds: what stands for placeholders or arguments.
        probing: where shapes are inferred.
        calls: walks through functions.
        active: the functions that the walk is in, for `calls`.
        starts: for variables of version 1 loops that have to have the batch from the
            start, by the Enter op: the axis, and how many times the batch it is long.

    Cost: linear in the nodes and edges; some 300 us a node.
    """
    done = Walk(dict(feeds))
    done.source = _first_source(feeds, probing)
    entries = {entry.node.name: entry for entry in scope.entries}
    readers = scope.readers()
    for entry in scope.entries:
        if f"{entry.node.name}:0" in done.values:
            continue
        start = (starts or {}).get(entry.node.name)
        _visit(entry, done, probing, calls, active, entries, readers, start)
    return done


def _first_source(feeds: Mapping[str, Tensor], probing: Probing) -> Source | None:
    for name, t in feeds.items():
        axis = probing.axis(t)
        if axis is not None:
            return source_at(probing, t, name.removesuffix(":0"), axis)
    return None


def _visit(
    entry: Entry,
    done: Walk,
    probing: Probing,
    calls: Caller,
    active: tuple[str, ...],
    entries: Mapping[str, Entry],
    readers: Mapping[str, list[tuple[Entry, int]]],
    start: tuple[int, int] | None,
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
        [entries.get(node_of(name)) for name in entry.inputs],
        [(e.node.op, i) for e, i in readers.get(f"{entry.node.name}:0", ())],
    )
    if start is not None:
        site.broadcast(0, *start)
    outputs = calls(site, active)
    if outputs is None:
        outputs = _tried(site)
    if any(name not in done.values for name in entry.inputs):
        # What comes round a loop is not known here; it may depend on the inputs.
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
        return site.probing.make(site.node, site.operands)
    except REFUSALS as refusal:
        if not _joined(site):
            return _unknown(site, refusal)
    try:
        return site.probing.make(site.node, site.operands)
    except REFUSALS as refusal:
        return _unknown(site, refusal)


def _joined(site: Site) -> bool:
    """Repeat operands of the old batch size where they meet one that has the batch.

    Returns:
        Whether any was repeated.
    """
    found = False
    growing = [i for i in range(len(site.operands)) if site.axis(i) is not None]
    for index, t in enumerate(site.operands):
        shape = shape_of(t)
        if not shape or site.probing.grows(t):
            continue
        for other in growing:
            like, axis = site.shape(other) or (), site.axis(other) or 0
            place = axis - len(like) + len(shape)
            dim = like[axis]
            if place >= 0 and dim and shape[place] == site.sizes.before(dim):
                factor = site.sizes.factor(dim)
                found = site.broadcast(index, place, factor) or found
                break
    return found


def _unknown(site: Site, refusal: Exception) -> list[Tensor]:
    """Note a refusal, and go on with what is known of the outputs without shapes."""
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
