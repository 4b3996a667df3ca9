"""Chains of ops that work channel by channel on parameters and statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from geutil.graph.kinds import Operation, Tensor
from geutil.select.networks.norms import FUSED
from geutil.select.networks.origins import Origins

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
