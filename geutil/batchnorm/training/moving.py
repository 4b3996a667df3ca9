"""Finds the moving averages of a statistic, and what updates them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from geutil.batchnorm.paths import Obstacle
from geutil.batchnorm.training.chains import base_of, behind, readers_onwards
from geutil.graph.kinds import Operation, Tensor, is_reference
from geutil.graph.op_types import REF_VARIABLES
from geutil.select.networks.origins import Origins

_REPLACING = frozenset(("Assign", "AssignVariableOp"))
_CHANGING = frozenset(
    ("AssignAdd", "AssignAddVariableOp", "AssignSub", "AssignSubVariableOp")
)
_UPDATES = _REPLACING | _CHANGING


@dataclass(frozen=True, eq=False)
class Moving:
    """A moving average.

    Attributes:
        value: what the update reads of it: the average before the step.
        update: the op that moves it on; its input 1 is what it assigns, adds or
            subtracts.
    """

    value: Tensor
    update: Operation

    @property
    def replaces(self) -> bool:
        """Whether the update assigns a new value, rather than a difference."""
        return self.update.type in _REPLACING

    @property
    def is_reference(self) -> bool:
        """Whether it is a ref variable, whose readers may see its new value."""
        return is_reference(self.update.inputs[0])


def moving_average(
    statistic: Tensor, kind: str, stops: Collection[Operation], origins: Origins
) -> Moving | Obstacle:
    """Return the moving average of a statistic of the batch, or why there is none.

    Its update reads the variable and the statistic, and nothing but arithmetic lies
    between: `assign(v, v * m + s * (1 - m))`, `assign_sub(v, (v - s) * (1 - m))`, or an
    assignment of what a fused batch norm averaged by itself.

    Args:
        statistic: the mean or variance of the batch.
        kind: "mean" or "variance", for the reason.
        stops: ops that belong to another statistic.
        origins: of the graph's tensors.

    Cost: linear in the ops that read the statistic.
    """
    found: dict[Operation, Operation] = {}
    for op, tensor in readers_onwards(statistic, stops, origins):
        if op.type in _UPDATES and op.inputs[1] is tensor:
            found.setdefault(_variable(op.inputs[0]), op)
    if not found:
        return Obstacle(
            f"is the {kind} of the batch, and no moving {kind} is kept of it",
            statistic.op,
        )
    if len(found) > 1:
        names = ", ".join(f"'{variable.name}'" for variable in found)
        return Obstacle(
            f"is the {kind} of the batch, and goes into several variables: {names}",
            statistic.op,
        )
    variable, update = next(iter(found.items()))
    for tensor in behind(update.inputs[1]):
        if _reads(tensor, variable):
            return Moving(tensor, update)
    return Obstacle(
        f"({update.type}) keeps the {kind} of the last batch, and no moving average",
        update,
    )


def _variable(handle: Tensor) -> Operation:
    return base_of(handle).op


def _reads(tensor: Tensor, variable: Operation) -> bool:
    op = tensor.op
    if op.type == "ReadVariableOp":
        return _variable(op.inputs[0]) is variable
    return op.type in REF_VARIABLES and op is variable
