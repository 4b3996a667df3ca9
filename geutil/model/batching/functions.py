"""Functions as the walk sees them, and what stands for one of several results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from geutil.graph.kinds import Tensor
from geutil.model.batching.probing import Probing
from geutil.model.batching.sites import Site, broadcast_for_batch
from geutil.model.batching.sizes import Shape, shape_of
from geutil.model.batching.walking import Walk

OPAQUE = (tf.resource, tf.variant)
"""Handles: their shapes say nothing about what they stand for."""


@dataclass(frozen=True)
class Callee:
    """A function as a node names it."""

    attribute: str | None
    position: int
    name: str


@dataclass
class Called:
    """A walk through a function."""

    callee: Callee
    done: Walk
    results: list[Tensor]


def match_result(site: Site, called: Called, index: int, like: Tensor) -> None:
    """Repeat a function's result for the batch where `like` has the batch."""
    probing, result = site.probing, called.results[index]
    axis, shape, wanted = probing.axis(like), shape_of(result), shape_of(like)
    if (
        axis is None
        or probing.axis(result) is not None
        or shape is None
        or len(shape) != len(wanted or ())
        or probing.grows(result)
    ):
        return
    dim = (wanted or ())[axis] or 0
    if shape[axis] != site.sizes.before(dim) or called.done.source is None:
        return
    inner = site.inside(called.done.source)
    made = broadcast_for_batch(
        inner, result, index, axis, site.sizes.factor(dim), result=True
    )
    if made is not None:
        edit, called.results[index] = made
        called.done.plan.edits.append(edit)


def _stand_in(probing: Probing, tensors: Sequence[Tensor]) -> Tensor:
    return probing.placeholder(tensors[0].dtype, _common(tensors), like=list(tensors))


def merged(probing: Probing, tensors: Sequence[Tensor]) -> Tensor:
    """Return what stands for one of several tensors, no one knows which."""
    if tensors[0].dtype in OPAQUE:
        grown = [t for t in tensors if probing.grows(t)]
        return (grown or list(tensors))[0]
    return _stand_in(probing, tensors)


def _common(tensors: Sequence[Tensor]) -> Shape:
    shapes = [shape_of(t) for t in tensors]
    known = [s for s in shapes if s is not None]
    if len(known) < len(shapes) or len({len(s) for s in known}) != 1:
        return None
    return tuple(
        dims[0] if len(set(dims)) == 1 else None for dims in zip(*known, strict=True)
    )
