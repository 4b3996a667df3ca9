"""Statistics of a batch.

Found, with the ops that compute them and their moving averages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from geutil.batchnorm.channel_affine import Kind
from geutil.batchnorm.norm_finding import Norm
from geutil.batchnorm.norm_path import Obstacle
from geutil.graph.op_types import REF_VARIABLES
from geutil.graph.types import Operation, Tensor, is_reference
from geutil.select.networks.provenance import FUSED, Origin, Origins, is_statistic

_UNARY = frozenset(
    (
        "Cast",
        "ExpandDims",
        "Identity",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
    )
)
_BINARY = frozenset(("Add", "AddV2", "Mul", "RealDiv", "Sub"))


def base_of(tensor: Tensor) -> Tensor:
    """Return what a tensor is but another form of."""
    while tensor.op.type in _UNARY:
        tensor = tensor.op.inputs[0]
    return tensor


def readers_onwards(
    start: Tensor, stops: Collection[Operation], origins: Origins
) -> Iterator[tuple[Operation, Tensor]]:
    """Yield who reads a statistic, and what is computed of it and of parameters.

    Args:
        start: the statistic.
        stops: ops that are not passed.
        origins: of the graph's tensors.

    Yields:
        Each reader with what it reads.

    Cost: linear in the readers.
    """
    reached: set[Operation] = set()
    queue = [start]
    while queue:
        tensor = queue.pop(0)
        for op in tensor.consumers():
            yield op, tensor
            if op in reached or op in stops:
                continue
            if op.type in _UNARY or (
                op.type in _BINARY
                and all(
                    t is tensor
                    or t.op in reached
                    or t.shape.rank == 0
                    or origins.of(t) is not None
                    for t in op.inputs
                )
            ):
                reached.add(op)
                queue.append(op.outputs[0])


def behind(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what a value is computed of, channel by channel, itself first.

    A fused batch norm adds a part of what it reads as its mean or variance, if its
    averaging factor is not 1.

    Cost: linear in what is yielded.
    """
    seen: set[int] = set()
    queue = [tensor]
    while queue:
        tensor = queue.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield tensor
        op = tensor.op
        if op.type in _UNARY:
            queue.append(op.inputs[0])
        elif op.type in _BINARY:
            queue += op.inputs
        elif op.type in FUSED and averaging_factor(op) != 1.0:
            queue.append(op.inputs[tensor.value_index + 2])


def averaging_factor(op: Operation) -> float:
    """Return the part that the batch has in what a fused op returns as statistics."""
    known = {attribute.name for attribute in op.op_def.attr}
    if "exponential_avg_factor" not in known:
        return 1.0
    return float(op.get_attr("exponential_avg_factor"))


_REPLACING = frozenset(("Assign", "AssignVariableOp"))
_CHANGING = frozenset(
    ("AssignAdd", "AssignAddVariableOp", "AssignSub", "AssignSubVariableOp")
)
_UPDATES = _REPLACING | _CHANGING


@dataclass(frozen=True, eq=False)
class MovingVariable:
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
) -> MovingVariable | Obstacle:
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
            return MovingVariable(tensor, update)
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


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a norm in training normalizes by.

    Attributes:
        norm: the norm.
        mean: the mean of the batch; of a fused op, its output.
        variance: the variance of the batch: what epsilon is added to; of a fused op,
            its output, which is unbiased.
        root: the op that takes the root; of a fused op that op itself.
        moving_variance: the moving average of the variance.
        moving_mean: that of the mean; None if it was not asked for.
    """

    norm: Norm
    mean: Tensor
    variance: Tensor
    root: Operation
    moving_variance: MovingVariable
    moving_mean: MovingVariable | None

    @property
    def fused(self) -> bool:
        """Whether the norm is one op."""
        return self.norm.steps[0].kind is Kind.NORMALIZE


def statistics_of(
    norm: Norm, origins: Origins, *, with_mean: bool
) -> Statistics | Obstacle:
    """Return the statistics of a norm in training, or what cannot be found.

    Args:
        norm: the norm.
        origins: of the graph's tensors.
        with_mean: whether the moving mean is needed.

    Cost: linear in the ops that compute and read the statistics.
    """
    found = _of_fused(norm) if _is_fused(norm) else _of_steps(norm, origins)
    if isinstance(found, Obstacle):
        return found
    mean, variance, root = found
    first, second = base_of(mean), base_of(variance)
    moving = moving_average(second, "variance", (), origins)
    if isinstance(moving, Obstacle):
        return moving
    moving_mean = None
    if with_mean:
        # The variance may be made of the mean; its average is not the mean's.
        average = moving_average(first, "mean", {second.op}, origins)
        if isinstance(average, Obstacle):
            return average
        moving_mean = average
    return Statistics(norm, mean, variance, root, moving, moving_mean)


def _is_fused(norm: Norm) -> bool:
    return norm.steps[0].kind is Kind.NORMALIZE


def _of_fused(norm: Norm) -> tuple[Tensor, Tensor, Operation]:
    op = norm.steps[0].op
    return op.outputs[1], op.outputs[2], op


def _of_steps(
    norm: Norm, origins: Origins
) -> tuple[Tensor, Tensor, Operation] | Obstacle:
    """Return the mean, the variance and the op of its root in a norm of single ops."""
    operands = [step.operand for step in norm.steps if step.operand is not None]
    last = norm.steps[-1].op
    roots = dict.fromkeys(root for t in operands for root in origins.spreads(t))
    if len(roots) != 1:
        return Obstacle(f"takes the roots of {len(roots)} variances", last)
    root = next(iter(roots))
    batch = [t for t in root.inputs[0].op.inputs if origins.of(t) is Origin.BATCH]
    # The root is that of a sum: the batch's variance and a parameter, epsilon.
    if len(batch) != 1:
        return Obstacle("does not take the root of the batch's variance", root)
    variance = batch[0]
    means = _means(operands, base_of(variance).op, variance.op)
    if len(means) != 1:
        return Obstacle(
            f"shifts by {len(means)} means of the batch; it can be folded with one",
            last,
        )
    return means[0].outputs[0], variance, root


def _means(operands: list[Tensor], *stops: Operation) -> list[Operation]:
    """Return the means of the batch that operands are made of, the variance apart."""
    found: dict[Operation, None] = {}
    seen: set[Operation] = set(stops)
    queue = [t.op for t in operands]
    while queue:
        op = queue.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type == "Mean" and is_statistic(op):
            found[op] = None
        else:
            queue += [t.op for t in op.inputs]
    return list(found)
