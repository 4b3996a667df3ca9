"""Refusals: ops that are not quantized, overrides that cannot be obeyed, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from geutil.errors import QuantizeError
from geutil.graph.op_types import SUMS
from geutil.graph.types import Operation, Tensor
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.draft_points import Drafts, Point, RangeGroup, Skip
from geutil.quantize.planning.fused_ops import Composite, Prelu
from geutil.quantize.planning.int8_kernels import Kernel, Treatment
from geutil.quantize.planning.network import Network, is_quantized
from geutil.quantize.spec import Overrides, QuantizeChoices, chosen
from geutil.select.networks.batch_norms import fused_norm, is_layer_norm

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
                asked = f"{field}={value}" if field else "quantization"
                raise QuantizeError(
                    f"the override '{name}' asks for {asked}, which cannot be: "
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
        found = [point for op in parts for point in self._parameters.get(op, ())]
        if found:
            return _fault_of(found, field, value)
        there = any(is_quantized(t) for op in parts for t in op.inputs)
        return "" if there else "has no weights"

    def _fault_of_result(self, parts: list[Operation], field: str, value: Any) -> str:
        found = [p for op in parts if (p := self._plan.results.get(op)) is not None]
        if found:
            return _fault_of(found, field, value)
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


BEHIND = (
    "is behind the last layer, and may be part of a loss; an override with a "
    "geutil.quantize.Spec for it quantizes it"
)
_FOLD = "fold it first, with geutil.batchnorm.fold_batch_norms"
_MORE_AT_THE_END = frozenset((Treatment.PASSES, Treatment.KEEPS, Treatment.JOINS))


class Refusals(Drafts):
    """Drafts of points, and which ops get none.

    Args:
        network: the network.
        choices: what the caller asks for.

    Attributes:
        composites: activations that are several ops, by their last op.
        inner: their other ops.
    """

    def __init__(self, network: Network, choices: QuantizeChoices) -> None:
        super().__init__(network, choices)
        self.composites: dict[Operation, Composite] = {}
        self.inner: set[Operation] = set()

    def refusal(self, op: Operation) -> str:
        """Return why an op is not quantized; "" if it can be."""
        if not self.choices.in_scope(op):
            return f"is outside the scope '{self.choices.scope}'"
        if self.overrides.skipped(op):
            return "is skipped by an override"
        obstacle = self.network.obstacle(op)
        if obstacle:
            return obstacle
        if fused_norm(op) is not None and not is_layer_norm(op):
            return f"is a batch norm; {_FOLD}"
        if any(self.network.is_statistic(t) for t in op.inputs):
            return f"belongs to a batch norm in training; {_FOLD}"
        kernel = int8_kernels.KERNELS.get(op.type)
        if kernel and kernel.activation not in ("", *self.choices.activations):
            return f"is no activation that is asked for ({kernel.activation})"
        behind = self.network.is_behind_layers(op) and not self.overrides.asked(op)
        return BEHIND if behind and not self._may_end(op, kernel) else ""

    def _may_end(self, op: Operation, kernel: Kernel | None) -> bool:
        """Tell whether an op behind the last layer is still part of the network."""
        if kernel is None or kernel.treatment in _MORE_AT_THE_END:
            return kernel is not None and self._reads_network(op)
        return op.type in (
            *SUMS,
            *int8_kernels.FUSED_ACTIVATIONS,
        ) and self._reads_network(op)

    def _reads_network(self, op: Operation) -> bool:
        data = [t for t in op.inputs if self.network.is_data(t)]
        return bool(data) and all(
            t in self.carried or self._is_asked_for(t) for t in data
        )

    def _is_asked_for(self, tensor: Tensor) -> bool:
        """Tell whether the network reads a tensor quantized, its input for example."""
        source, _ = self.origin.get(tensor, (tensor, None))
        return source in self.drafts

    def may_take(self, op: Operation) -> bool:
        """Tell whether an op may become part of the kernel before it."""
        statistic = any(self.network.is_statistic(t) for t in op.inputs)
        if op in self.inner or op in self.composites:
            return False
        if statistic:
            return self.choices.in_scope(op) and not self.overrides.skipped(op)
        kernel = int8_kernels.KERNELS.get(op.type)
        passes = kernel is not None and kernel.treatment is Treatment.PASSES
        fuses = passes or op.type in (*int8_kernels.FUSED_ACTIVATIONS, *SUMS, "BiasAdd")
        if fuses and self.network.is_behind_layers(op):
            return self.choices.in_scope(op) and not self.overrides.skipped(op)
        return self.refusal(op) == ""
