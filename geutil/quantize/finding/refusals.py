"""Why an op is not quantized, and what may become part of the kernel before it."""

from __future__ import annotations

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import SUMS
from geutil.quantize.finding.choices import Choices
from geutil.quantize.finding.composites import Composite
from geutil.quantize.finding.drafting import Drafts
from geutil.quantize.finding.kernels import (
    FUSED_ACTIVATIONS,
    KERNELS,
    Kernel,
    Treatment,
)
from geutil.quantize.finding.network import Network
from geutil.select.networks.norms import FUSED, is_layer_norm

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

    def __init__(self, network: Network, choices: Choices) -> None:
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
        if op.type in FUSED and not is_layer_norm(op):
            return f"is a batch norm; {_FOLD}"
        if any(self.network.is_statistic(t) for t in op.inputs):
            return f"belongs to a batch norm in training; {_FOLD}"
        kernel = KERNELS.get(op.type)
        if kernel and kernel.activation not in ("", *self.choices.activations):
            return f"is no activation that is asked for ({kernel.activation})"
        behind = self.network.is_behind_layers(op) and not self.overrides.asked(op)
        return BEHIND if behind and not self._may_end(op, kernel) else ""

    def _may_end(self, op: Operation, kernel: Kernel | None) -> bool:
        """Tell whether an op behind the last layer is still part of the network."""
        if kernel is None or kernel.treatment in _MORE_AT_THE_END:
            return kernel is not None and self._reads_network(op)
        return op.type in (*SUMS, *FUSED_ACTIVATIONS) and self._reads_network(op)

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
        kernel = KERNELS.get(op.type)
        passes = kernel is not None and kernel.treatment is Treatment.PASSES
        fuses = passes or op.type in (*FUSED_ACTIVATIONS, *SUMS, "BiasAdd")
        if fuses and self.network.is_behind_layers(op):
            return self.choices.in_scope(op) and not self.overrides.skipped(op)
        return self.refusal(op) == ""
