"""Collects what shall be quantized."""

from __future__ import annotations

from geutil.graph.identity import IdentitySet, MutableIdentityMap
from geutil.graph.kinds import Operation, Tensor
from geutil.quantize.finding.choices import Choices
from geutil.quantize.finding.drafts import Draft
from geutil.quantize.finding.network import Edge, Network
from geutil.quantize.finding.points import SharedRanges
from geutil.quantize.finding.weights import constant_format, is_quantized, source_of
from geutil.quantize.spec import Format, Spec


class Drafts:
    """The tensors of a network that shall be quantized, and those that are.

    Args:
        network: the network.
        choices: what the caller asks for.
    """

    def __init__(self, network: Network, choices: Choices) -> None:
        self.network = network
        self.choices = choices
        self.overrides = choices.matcher(network.ops)
        self.shared = SharedRanges()
        self.drafts: MutableIdentityMap[Draft] = MutableIdentityMap()
        self.results: dict[Operation, Draft] = {}
        # Tensors that hold quantized values.
        self.carried: IdentitySet = IdentitySet()
        # Of other tensors: where their values come from, and the edge there.
        self.origin: MutableIdentityMap[tuple[Tensor, Edge]] = MutableIdentityMap()
        self.kernels: dict[Operation, Operation] = {}
        self.bits: MutableIdentityMap[int] = MutableIdentityMap()
        # What ops read besides data and weights.
        self.constants: dict[Operation, list[Draft]] = {}

    def can_share(self, tensors: list[Tensor]) -> bool:
        """Tell whether tensors can have one range."""
        roots = [self.shared.root(t) for t in tensors]
        fixed = [self.shared.fixed(t) for t in tensors]
        bits = {self.bits.get(root) for root in roots}
        return len(set(fixed)) == 1 and len(bits) == 1

    def quantize(
        self,
        tensor: Tensor,
        anchor: Operation,
        slot: str,
        spec: Spec,
        *,
        counts: bool = True,
        fixed: tuple[float, float] | None = None,
        positive: bool = False,
        readers: list[Edge] | None = None,
    ) -> Draft | None:
        """Let a tensor be quantized, unless it is."""
        if readers is None:
            self.carried.add(tensor)
        if tensor in self.drafts:
            return self.drafts[tensor]
        low, high = self.choices.initial
        initial = (0.0, high) if positive else (low, high)
        if spec.range is not None:
            fixed = (float(spec.range[0]), float(spec.range[1]))
        if fixed is not None and counts:
            self.shared.fix(tensor, fixed)
        bits = spec.activation_bits or 8
        if counts:
            self.bits[self.shared.root(tensor)] = bits
        if self.network.quantized(tensor) is not None:
            return None
        # What is kept or joined has to have the range of what it is made of.
        if counts and readers is None and self.network.is_quantized_behind(tensor):
            return None
        draft = Draft(
            tensor,
            anchor,
            slot,
            spec,
            Format(bits),
            readers,
            counts,
            None,
            fixed or initial,
            fixed is not None,
            # Of what is a result, too, the converter would lose it (TensorFlow 2.21).
            () if tensor in self.network.results else (tensor,),
        )
        self.drafts[tensor] = draft
        return draft

    def demand(self, op: Operation, index: int) -> None:
        """See to it that an op reads quantized values."""
        tensor = op.inputs[index]
        if tensor in self.carried or not self.network.is_data(tensor):
            return
        source, edge = self.origin.get(tensor, (tensor, Edge(op, index)))
        draft = self.drafts.get(source)
        if draft is None:
            outside = not self.choices.in_scope(source.op)
            # Only what asks for it reads it quantized; but inputs are int8 for all.
            everywhere = self.network.is_input(source.op) and not outside
            anchor = op if outside else source.op
            draft = self.input(source, anchor, None if everywhere else [])
        edges = None if draft is None else draft.readers
        if edges is not None and edge not in edges:
            edges.append(edge)

    def input(
        self, tensor: Tensor, anchor: Operation, readers: list[Edge] | None
    ) -> Draft | None:
        """Let a tensor be quantized that no kernel makes."""
        # What overrides say of an op that reads it is about what that makes.
        spec = self.overrides.spec([tensor.op])
        draft = self.quantize(tensor, anchor, "input_quant", spec, readers=readers)
        if draft is not None and self.network.is_input(tensor.op):
            self.kernels[tensor.op] = tensor.op
            self.results[tensor.op] = draft
        return draft

    def constant(self, op: Operation, index: int) -> None:
        """Let a parameter be quantized that an op reads besides data."""
        tensor = op.inputs[index]
        if not self.network.is_parameter(tensor) or is_quantized(tensor):
            return
        spec = self.overrides.spec([op])
        form = constant_format(spec)
        draft = self.parameter(tensor, Edge(op, index), op, spec, form)
        self.constants.setdefault(op, []).append(draft)

    def parameter(
        self, tensor: Tensor, edge: Edge, op: Operation, spec: Spec, form: Format
    ) -> Draft:
        """Let a parameter be quantized for one that reads it."""
        draft = self.drafts.get(tensor)
        if draft is None:
            source = source_of(tensor)
            draft = Draft(
                tensor, op, "weights_quant", spec, form, [], True, source, (-6.0, 6.0)
            )
            self.drafts[tensor] = draft
        elif draft.form != form:
            # Layers that want channels along other axes share one range.
            draft.form = constant_format(draft.spec)
        if draft.readers is not None:
            draft.readers.append(edge)
        return draft
