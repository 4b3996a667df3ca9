"""The rules for ops that take parts of a tensor or drop its axes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from geutil.model.batching.sites import Site


def slice_(site: Site) -> None:
    """Let a slice that took the whole batch go on to do so."""
    shape, axis = site.shape(0), site.axis(0)
    begin = site.probing.dims(site.operands[1])
    size = site.probing.dims(site.operands[2])
    if axis is None or shape is None or begin is None or size is None:
        return
    if begin[axis] == 0 and size[axis] == site.sizes.before(shape[axis] or 0):
        known = [d for d in size if d is not None]
        if len(known) == len(size):
            known[axis] = -1
            site.set_constant(2, known, known)


def strided_slice(site: Site) -> None:
    """Let a slice that took the whole batch go on to do so; refuse to take a row."""
    shape, axis = site.shape(0), site.axis(0)
    if axis is None or shape is None:
        return
    begin, end, strides = (site.probing.dims(t) for t in site.operands[1:])
    place = _place_in_slice(site.node, axis, len(shape), len(begin or ()))
    if begin is None or end is None or strides is None or place is None:
        return
    old = site.sizes.before(shape[axis] or 0)
    bit = 1 << place
    if site.node.attr["shrink_axis_mask"].i & bit:
        site.problem(
            f"it takes row {begin[place]} of the batch",
            "let it take a slice, or cut the model in front of it",
        )
        return
    from_start = site.node.attr["begin_mask"].i & bit or begin[place] == 0
    stop = end[place]
    if site.node.attr["end_mask"].i & bit or stop is None or strides[place] != 1:
        return
    if from_start and stop >= old:
        mask = site.node.attr["end_mask"].i | bit
        site.set_attribute("end_mask", tf.compat.v1.AttrValue(i=mask))


def _place_in_slice(node: Any, axis: int, rank: int, length: int) -> int | None:
    """Return which element of a slice's `begin` is about an axis, None if none is."""
    ellipsis, added = node.attr["ellipsis_mask"].i, node.attr["new_axis_mask"].i
    own = sum(not ((ellipsis | added) >> i & 1) for i in range(length))
    at = 0
    for place in range(length):
        if ellipsis >> place & 1:
            at += rank - own
        elif not added >> place & 1:
            if at == axis:
                return place
            at += 1
        if at > axis:
            return None
    return None


def squeeze(site: Site) -> None:
    """Refuse to squeeze the batch away."""
    shape, axis = site.shape(0), site.axis(0)
    if axis is None or shape is None or site.sizes.before(shape[axis] or 0) != 1:
        return
    dims = [d % len(shape) for d in site.node.attr["squeeze_dims"].list.i]
    if not dims and all(reader == ("BiasAdd", 1) for reader in site.readers):
        return  # The next rule sees to it.
    if not dims or axis in dims:
        site.problem(
            "it squeezes the axis of the batch away, because the batch is 1",
            "name the other axes: tf.squeeze(x, axis=[...])",
        )
