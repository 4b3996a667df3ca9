"""Ops between a layer and a batch norm that change no channel, or each by itself."""

from __future__ import annotations

from dataclasses import dataclass

from geutil.batchnorm.passing import PASSING
from geutil.batchnorm.steps import Step, step_of
from geutil.graph.kinds import Operation, Tensor
from geutil.select.networks.origins import Origins


@dataclass(frozen=True, eq=False)
class Link:
    """An op between a layer and the end of a batch norm, or the other way round.

    Attributes:
        op: the op.
        index: which of its inputs is the data.
        step: the op as a step; None if it only hands channels on.
    """

    op: Operation
    index: int
    step: Step | None

    @property
    def data(self) -> Tensor:
        """What it reads of the data."""
        return self.op.inputs[self.index]


def link_of(op: Operation, origins: Origins) -> Link | None:
    """Return an op that may stand between a layer and a norm as a link, or None.

    Whether it hands on the channels is for `axis_after` to say.
    """
    step = step_of(op, origins)
    if step is not None:
        return Link(op, step.index, step)
    if op.type in PASSING and op.inputs and origins.of(op.outputs[0]) is None:
        return Link(op, 0, None)
    return None


def as_links(steps: tuple[Step, ...]) -> list[Link]:
    """Return steps as links."""
    return [Link(step.op, step.index, step) for step in steps]
