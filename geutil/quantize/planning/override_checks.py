"""Overrides that cannot be obeyed, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph.types import Operation
from geutil.quantize.planning.draft_points import Point, RangeGroup, Skip
from geutil.quantize.planning.forms import Form
from geutil.quantize.planning.fused_ops import Prelu
from geutil.quantize.planning.network import Network, simulation_of
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
    forms: dict[Operation, Form]


def check_obeyed(
    overrides: Overrides, plan: Planned, parameters: Parameters, network: Network
) -> None:
    """Raise QuantizeError for an override that no op is quantized by."""
    # An override of a regular expression may be for ops of many kinds: it is obeyed
    # where each of its fields is, by one of them.
    obeyed = _Obeyed(plan, parameters, network)
    for name, spec, ops in overrides.specs:
        for field, value in chosen(spec) or [("", None)]:
            faults = [obeyed.fault(op, field, value) for op in ops]
            if faults and all(faults):
                request = f"{field}={value}" if field else "quantization"
                # A name is a regular expression, too; the op of that name is meant.
                named = [i for i, op in enumerate(ops) if op.name == name]
                place = named[0] if named else 0
                op, fault = ops[place], faults[place]
                raise QuantizeError(
                    f"the override '{name}' asks for {request}, which cannot be: "
                    f"'{op.name}' ({op.type}) {fault}; nothing was changed"
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
        self._rewritten = {*plan.forms, *inside}

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
        found = (simulation_of(t) for op in parts for t in op.inputs)
        earlier = [simulation for simulation in found if simulation is not None]
        return _fault_of_earlier(earlier, field, value) if earlier else "has no weights"

    def _fault_of_result(self, parts: list[Operation], field: str, value: Any) -> str:
        points = [p for op in parts if (p := self._plan.results.get(op)) is not None]
        if points:
            return _fault_of(points, field, value)
        found = (self._network.quantized(t) for op in parts for t in op.outputs)
        earlier = [quantized.op for quantized in found if quantized is not None]
        if earlier:
            return _fault_of_earlier(earlier, field, value)
        return "hands values on in the range of what it reads; ask for it there"


def _fault_of(points: list[Point], field: str, value: Any) -> str:
    if any(_values(point.group)[field] == value for point in points):
        return ""
    if field == "per_channel":
        return "has weights that can have one range only, for all channels"
    return f"has the range '{points[0].group.name}', which is that of other ops"


def _fault_of_earlier(simulations: Sequence[Operation], field: str, value: Any) -> str:
    """Return how earlier FakeQuant ops differ from an override; "" if one fits."""
    if any(_is_asked_for(op, field, value) for op in simulations):
        return ""
    return f"is quantized already, by '{simulations[0].name}'; edit that op instead"


def _is_asked_for(simulation: Operation, field: str, value: Any) -> bool:
    """Tell whether a FakeQuant op has the requested value of a field, if it shows."""
    get = simulation.get_attr
    if field in ("weight_bits", "activation_bits"):
        return bool(get("num_bits") == value)
    if field == "per_channel":
        return simulation.type.endswith("PerChannel") is bool(value)
    ends = [tf.get_static_value(t) for t in list(simulation.inputs)[1:]]
    if not ends:
        ends = [get("min"), get("max")]
    if any(end is None for end in ends):
        return False
    low, high = (np.asarray(end, np.float32) for end in ends)
    if field == "symmetric_weights":
        return bool(np.all(low == -high)) is bool(value)
    if field == "range":
        return bool(
            np.all(low == np.float32(value[0])) and np.all(high == np.float32(value[1]))
        )
    return False


def _values(group: RangeGroup) -> dict[str, Any]:
    """Return the properties of a range by the names of a Spec's fields."""
    form = group.form
    return {
        "weight_bits": form.bits,
        "activation_bits": form.bits,
        "symmetric_weights": form.symmetric,
        "per_channel": bool(form.axes),
        "range": group.initial if group.fixed else None,
        "ema_decay": group.decay,
    }
