"""The walk through loops: which variables have to have the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from geutil.graph.kinds import Tensor
from geutil.model.batching.edits import Problem
from geutil.model.batching.functions import OPAQUE, Called, match_result, merged
from geutil.model.batching.sites import Site
from geutil.model.batching.sizes import shape_of

Body = Callable[[Site, Sequence[Tensor]], Called]
"""Walks through a loop's body with its variables."""


@dataclass
class Settled:
    """A loop whose variables keep their shapes.

    Attributes:
        site: the loop, with its changes.
        state: its variables.
        called: the walk through its body with these.
        earlier: what could not be mended in walks before.
        lost: whether less is known of a variable's shape than at the start.
    """

    site: Site
    state: list[Tensor]
    called: Called
    earlier: list[Problem]
    lost: bool

    @property
    def problems(self) -> list[Problem]:
        """What cannot be mended."""
        return [*self.called.done.plan.all_problems(), *self.site.plan.problems]

    @property
    def sound(self) -> bool:
        """Tell whether nothing speaks against it."""
        return not self.problems and not (self.earlier and self.lost)


def settle(site: Site, body: Body, fixed: frozenset[int]) -> Settled:
    """Find out which of a loop's variables have to have the batch.

    A variable that has it after an iteration gets it from the start. Where that leads
    nowhere, since the first iteration already fails, those get it that start with equal
    rows, as many as the old batch had.

    Args:
        site: the loop; its changes are those of the result's site, to be adopted.
        body: walks through its body.
        fixed: the variables that never change.
    """
    settled = _rounds(site.attempt(), body, fixed)
    if settled.sound:
        return settled
    guess = site.attempt()
    guessed = _guess(guess, fixed)
    if guessed:
        other = _rounds(guess, body, fixed)
        held = all(site.probing.axis(other.state[i]) == 0 for i in guessed)
        if held and other.sound:
            return other
    if settled.lost:
        settled.site.plan.problems += settled.earlier
    return settled


def _guess(site: Site, fixed: frozenset[int]) -> list[int]:
    """Repeat for the batch each start value that looks as if it had it."""
    guessed = []
    for index, t in enumerate(site.operands):
        shape = shape_of(t)
        if index in fixed or t.dtype in OPAQUE or not shape or site.probing.grows(t):
            continue
        equal = shape[0] == site.sizes.old and site.probing.rows_are_equal(t, 0)
        if equal and site.broadcast(index, 0, 1):
            guessed.append(index)
    return guessed


def _rounds(site: Site, body: Body, fixed: frozenset[int]) -> Settled:
    """Walk through a body until the variables keep their shapes.

    In each round a variable gains the batch, or loses what is known of its shape.
    """
    probing = site.probing
    start = [
        t
        if i in fixed or t.dtype in OPAQUE
        else probing.placeholder(t.dtype, shape_of(t), like=[t])
        for i, t in enumerate(site.operands)
    ]
    state, problems = start, list[Problem]()
    while True:
        called = body(site, state)
        after = []
        for index, t in enumerate(state):
            if index in fixed:
                after.append(t)
            elif t.dtype in OPAQUE:
                after.append(called.results[index])
            else:
                match_result(site, called, index, t)
                after.append(_next_state(site, index, t, called.results[index]))
        pairs = list(zip(state, after, strict=True))
        state = after
        if all(
            shape_of(a) == shape_of(b) and probing.grows(a) == probing.grows(b)
            for a, b in pairs
        ):
            lost = any(_vaguer(a, b) for a, b in zip(start, state, strict=True))
            return Settled(site, state, called, problems, lost)
        problems += called.done.plan.all_problems()


def _vaguer(before: Tensor, after: Tensor) -> bool:
    """Tell whether less is known of a shape."""
    old, new = shape_of(before), shape_of(after)
    if old is None or new is None:
        return old is not None
    return any(a is not None and b is None for a, b in zip(old, new, strict=False))


def _next_state(site: Site, index: int, before: Tensor, result: Tensor) -> Tensor:
    """Return what a variable is, given what it is before and after an iteration."""
    probing = site.probing
    shape, grown = shape_of(before), shape_of(result)
    axis = probing.axis(result)
    if (
        axis is not None
        and shape is not None
        and len(shape) == len(grown or ())
        and probing.axis(before) is None
        and shape[axis] == site.sizes.before((grown or ())[axis] or 0)
        and not probing.grows(site.operands[index])
    ):
        factor = site.sizes.factor((grown or ())[axis])
        if site.broadcast(index, axis, factor):
            return site.operands[index]
    return merged(probing, [before, result])
