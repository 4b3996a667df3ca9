"""Overrides that cannot be obeyed, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from geutil.errors import QuantizeError
from geutil.graph.types import Operation
from geutil.quantize.planning.draft_points import Point, RangeGroup, Skip
from geutil.quantize.planning.fused_ops import Prelu
from geutil.quantize.planning.network import Network, is_quantized
from geutil.quantize.spec import Overrides, chosen

Parameters = Mapping[Operation, Sequence[Point]]
"""The points of the parameters that ops read."""

_OF_WEIGHTS = frozenset(("weight_bits", "symmetric_weights", "per_channel"))


class Planned(Protocol):
    """The parts of a `Plan` that overrides speak of."""

    kernels: dict[Operation, Operation]
    skips: dict[Operation, Skip]
    results: dict[Operation, Point]
    prelus: list[Prelu]
    negations: list[Operation]
    roots: list[Operation]
    squares: list[Operation]


def check_obeyed(
    overrides: Overrides, plan: Planned, parameters: Parameters, network: Network
) -> None:
    """Raise QuantizeError for an override that no op is quantized by.

    An override of a regular expression may be for ops of many kinds: it is obeyed where
    each of its fields is, by one of them.

    Cost: linear in overrides and their ops.
    """
    obeyed = _Obeyed(plan, parameters, network)
    for name, spec, ops in overrides.specs:
        for field, value in chosen(spec) or [("", None)]:
            faults = [obeyed.fault(op, field, value) for op in ops]
            if faults and all(faults):
                request = f"{field}={value}" if field else "quantization"
                raise QuantizeError(
                    f"the override '{name}' asks for {request}, which cannot be: "
                    f"'{ops[0].name}' ({ops[0].type}) {faults[0]}; nothing was changed"
                )


class _Obeyed:
    def __init__(self, plan: Planned, parameters: Parameters, network: Network) -> None:
        self._plan = plan
        self._parameters = parameters
        self._network = network
        self._parts: dict[Operation, list[Operation]] = {}
        for op, kernel in plan.kernels.items():
            self._parts.setdefault(kernel, []).append(op)
        # Of these another plan is made, once they are written in another form.
        inside = (op for prelu in plan.prelus for op in prelu.ops)
        self._rewritten = {*plan.negations, *plan.roots, *plan.squares, *inside}

    def fault(self, op: Operation, field: str, value: Any) -> str:
        """Return why a field of an override is not obeyed for an op; "" if it is."""
        kernel = self._plan.kernels.get(op)
        if kernel is None:
            skip = self._plan.skips.get(op)
            reason = skip.reason if skip else "makes no values that are quantized"
            return "" if op in self._rewritten else reason
        if not field:
            return ""
        parts = self._parts[kernel]
        return (
            self._fault_of_weights(parts, field, value)
            if field in _OF_WEIGHTS
            else self._fault_of_result(parts, field, value)
        )

    def _fault_of_weights(self, parts: list[Operation], field: str, value: Any) -> str:
        points = [point for op in parts for point in self._parameters.get(op, ())]
        if points:
            return _fault_of(points, field, value)
        has_quantized_weights = any(is_quantized(t) for op in parts for t in op.inputs)
        return "" if has_quantized_weights else "has no weights"

    def _fault_of_result(self, parts: list[Operation], field: str, value: Any) -> str:
        points = [p for op in parts if (p := self._plan.results.get(op)) is not None]
        if points:
            return _fault_of(points, field, value)
        quantized = self._network.quantized
        if any(quantized(t) is not None for op in parts for t in op.outputs):
            return ""
        return "hands values on in the range of what it reads; ask for it there"


def _fault_of(points: list[Point], field: str, value: Any) -> str:
    if any(_values(point.group)[field] == value for point in points):
        return ""
    if field == "per_channel":
        return "has weights that can have one range only, for all channels"
    return f"has the range '{points[0].group.name}', which is that of other ops"


def _values(group: RangeGroup) -> dict[str, Any]:
    """Return what the range of a tensor is like, by the names of a Spec's fields."""
    form = group.form
    return {
        "weight_bits": form.bits,
        "activation_bits": form.bits,
        "symmetric_weights": form.symmetric,
        "per_channel": bool(form.axes),
        "range": group.initial if group.fixed else None,
        "ema_decay": group.decay,
    }
