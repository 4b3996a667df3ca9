"""The places of FakeQuant ops.

Decided, named, checked against the caller's overrides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import tensorflow as tf

from geutil.graph import function_calls, op_types, types
from geutil.graph.op_types import FUSED_NORMS, SUMS, types_in
from geutil.graph.runtime import is_convolution_call
from geutil.graph.types import Graph, IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.quantize import fake_quants
from geutil.quantize.fake_quants import Draft, Point, RangeGroup, SharedRanges, Skip
from geutil.quantize.planning import int8_kernels, lowering
from geutil.quantize.planning.int8_kernels import Kernel, Treatment
from geutil.quantize.planning.lowering import Chain, Composite, Form, Prelu
from geutil.quantize.planning.network import (
    BODIES,
    Edge,
    Network,
    RandomLayer,
    delayed_input,
    find_twins,
    is_left_in_float,
    is_quantized,
    kernel_of,
    source_of,
)
from geutil.quantize.spec import (
    FOLD,
    SYMMETRIC_START,
    Format,
    QuantizeChoices,
    Spec,
    activation_format,
    block_format,
    constant_format,
    fixed_range,
    format_of,
)
from geutil.select.networks.batch_norms import is_layer_norm
from geutil.select.networks.layers import Layer

# The converter's ranges of other ops' parameters are as good.
_WITH_PARAMETERS = types_in(
    """
    Add AddV2 BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd Einsum MatMul Mul
    SquaredDifference Sub
    """
)
# TensorFlow 2.21 refuses divisors that are stored as 0, whatever the zero point is.
_DIVIDES = "divides by data, for which TFLite has no int8 kernel that works"
_RANKS = "yields places only: TFLite's converter quantizes it by the values it yields"
_DROPS = (
    "is the end of a dropout or noise layer, which forwards its input at inference; "
    "Model.strip_training() takes it out"
)
_NOISE = "computes with random numbers alone, which are not rounded"
_NO_KERNEL = (_DIVIDES, _DROPS, _NOISE, _RANKS)
_REFUSED = (
    "has no kernel in TFLite, in float neither, so that to_int8() and to_tflite() will "
    "refuse the model; compute it by other ops (geutil.rewrite), or cut the "
    "model before it (Model.cut)"
)
_NO_WEIGHTS = "has no weights, and the scheme leaves activations in float"
_FEW = "rounding data as it runs takes longer than it saves"
BEHIND = (
    "is behind the last layer, and may be part of a loss; an override with a "
    "geutil.quantize.Spec for it quantizes it"
)
_MORE_AT_THE_END = frozenset((Treatment.PASSES, Treatment.KEEPS, Treatment.JOINS))


@dataclass(eq=False)
class QuantizePlan:
    """Where FakeQuant ops go in a graph."""

    # The ranges, each with its points.
    groups: list[RangeGroup] = field(default_factory=list)
    # The ops that will be quantized, each with the op whose kernel computes it, and
    # with the point of what that makes, if it has one.
    kernels: dict[Operation, Operation] = field(default_factory=dict)
    # The ops that will not be.
    skips: dict[Operation, Skip] = field(default_factory=dict)
    # For each layer the point of its weights.
    weights: dict[Operation, Point] = field(default_factory=dict)
    # For each kernel the point of what it makes.
    results: dict[Operation, Point] = field(default_factory=dict)
    # Of layers, why their weights are stored otherwise than most.
    notes: dict[Operation, str] = field(default_factory=dict)
    # Activations to be written in another form before all this.
    prelus: list[Prelu] = field(default_factory=list)
    # Of other ops what computes the same, likewise.
    forms: dict[Operation, Form] = field(default_factory=dict)
    # Calls of one convolution to be written as that, likewise.
    calls: list[Operation] = field(default_factory=list)
    # Sums behind a Reshape that a layer could compute, likewise.
    biases: list[Operation] = field(default_factory=list)
    # The skipped ops that the caller does not want quantized.
    in_float: list[Operation] = field(default_factory=list)
    # Ops of which TFLite's converter will make nothing.
    refused: list[Operation] = field(default_factory=list)
    # Products of constants and variables, which may have been meant.
    unfed: list[Operation] = field(default_factory=list)


def plan_quantization(
    graph: Graph, results: Iterable[Tensor], choices: QuantizeChoices
) -> QuantizePlan:
    """Return where FakeQuant ops go."""
    return _PointPlanner(Network(graph, results), choices).plan()


def quantized_ops(graph: Graph, results: Iterable[Tensor]) -> list[Operation]:
    """Return the ops that read and make nothing that is left to be quantized."""
    plan = plan_quantization(graph, results, QuantizeChoices())
    points = [point for group in plan.groups for point in group.points]
    left = {edge.op for point in points for edge in point.readers or ()}
    for point in points:
        if point.readers is None:
            left.update((point.tensor.op, *point.tensor.consumers()))
    kernels = {plan.kernels.get(op, op) for op in left}
    return [
        op
        for op, kernel in plan.kernels.items()
        if kernel not in kernels and not is_left_in_float(op)
    ]


class _PointPlanner:
    """Plans the tensors of a network to quantize; tells of others why they are not."""

    def __init__(self, network: Network, choices: QuantizeChoices) -> None:
        self.network = network
        self.choices = choices
        # Activations that are several ops, by their last op.
        self.composites: dict[Operation, Composite] = {}
        self.inner: set[Operation] = set()  # their other ops
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
        # The parameters of ops besides weights.
        self.constants: dict[Operation, list[Draft]] = {}
        self.weights: dict[Operation, Draft] = {}
        self.skips: dict[Operation, Skip] = {}
        self.notes: dict[Operation, str] = {}
        self.blocked: list[Operation] = []
        # Ops that a file holds as parts of others, or not at all.
        self.converted: set[Operation] = set()
        # Ops that forward what is not quantized (yet), with what they read.
        self.passing: dict[Operation, Edge] = {}
        for composite in lowering.find_composites(
            network.ops, lambda t: [edge.op for edge in network.readers(t)]
        ):
            self.converted.update(composite.ops)
            if all(self.refusal(op) == "" for op in composite.ops):
                self.composites[composite.end] = composite
                self.inner.update(composite.ops[1:])
        for layer in network.random_layers.values():
            self.inner.update(self._only_for(layer))
            self.converted.update(layer.ops)

    def can_share(self, tensors: list[Tensor]) -> bool:
        """Return whether tensors can have one range."""
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
        bits = spec.activation_bits or 8
        if spec.range is not None:
            fixed = (float(spec.range[0]), float(spec.range[1]))
        elif fixed is not None:
            fixed = fixed_range(fixed, bits)
        form = activation_format(bits)
        if form.symmetric:
            initial = (-SYMMETRIC_START, SYMMETRIC_START)
        if fixed is not None and form.symmetric:
            fixed = -max(-fixed[0], fixed[1]), max(-fixed[0], fixed[1])
        if fixed is not None and counts:
            self.shared.fix(tensor, fixed)
        if counts:
            self.bits[self.shared.root(tensor)] = bits
        if self.network.quantized(tensor) is not None:
            return None
        # A kept or joined tensor has to have the range of its sources.
        if counts and readers is None and self.network.is_quantized_behind(tensor):
            return None
        draft = Draft(
            tensor,
            anchor,
            slot,
            spec,
            form,
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
            everywhere = self.network.is_input(source.op) and not self.left_out(
                source.op
            )
            anchor = op if outside else source.op
            draft = self.input(source, anchor, None if everywhere else [])
        edges = None if draft is None else draft.readers
        if edges is not None and edge not in edges:
            edges.append(edge)

    def input(
        self, tensor: Tensor, anchor: Operation, readers: list[Edge] | None
    ) -> Draft | None:
        """Let a tensor be quantized that no kernel makes."""
        # Overrides of an op that reads it are about that op's result.
        spec = self.overrides.spec([tensor.op])
        draft = self.quantize(tensor, anchor, "input_quant", spec, readers=readers)
        is_input = self.network.is_input(tensor.op)
        if draft is not None and is_input and not self.overrides.skipped(tensor.op):
            self.kernels[tensor.op] = tensor.op
            self.results[tensor.op] = draft
        return draft

    def constant(self, op: Operation, index: int) -> None:
        """Let a parameter be quantized that an op reads besides data."""
        tensor = op.inputs[index]
        if not self.network.is_parameter(tensor) or is_quantized(tensor):
            return
        spec = self.overrides.constant_spec(op)
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

    def left_out(self, op: Operation) -> str:
        """Return why the caller does not want an op quantized; "" if he does."""
        if not self.choices.in_scope(op):
            return f"is outside the scope {types.quoted(self.choices.scope)}"
        if self.overrides.skipped(op):
            return "is skipped by an override"
        kernel = kernel_of(op)
        if kernel and kernel.activation not in ("", *self.choices.activations):
            return f"is no activation that is asked for ({kernel.activation})"
        return ""

    def refusal(self, op: Operation) -> str:
        """Return why an op is not quantized; "" if it can be."""
        left_out = self.left_out(op)
        if left_out:
            return left_out
        obstacle = self.network.obstacle(op)
        if obstacle:
            return obstacle
        if op.type in FUSED_NORMS and not is_layer_norm(op):
            return f"is a batch norm; fold it first, with {FOLD}"
        if any(self.network.is_statistic(t) for t in op.inputs):
            return f"belongs to a batch norm in training; fold it first, with {FOLD}"
        kernel = kernel_of(op)
        behind = self.network.is_behind_layers(op) and not self.overrides.asked(op)
        return BEHIND if behind and not self._may_end(op, kernel) else ""

    def _may_end(self, op: Operation, kernel: Kernel | None) -> bool:
        """Return whether an op behind the last layer is still part of the network."""
        if kernel is None or kernel.treatment in _MORE_AT_THE_END:
            return kernel is not None and self._reads_network(op)
        kinds = (*SUMS, *int8_kernels.FUSED_ACTIVATIONS)
        if self.choices.products_at_end and not self.network.leads_to_loss(op):
            kinds += ("Mul",)
        return op.type in kinds and self._reads_network(op)

    def _reads_network(self, op: Operation) -> bool:
        data = [t for t in op.inputs if self.network.is_data(t)]
        return bool(data) and all(
            t in self.carried or self._is_asked_for(t) for t in data
        )

    def _is_asked_for(self, tensor: Tensor) -> bool:
        """Return whether the network reads a tensor quantized, as it does its input."""
        source, _ = self.origin.get(tensor, (tensor, None))
        return source in self.drafts

    def may_take(self, op: Operation) -> bool:
        """Return whether an op may become part of the kernel before it."""
        statistic = any(self.network.is_statistic(t) for t in op.inputs)
        if op in self.inner or op in self.composites:
            return False
        kernel = kernel_of(op)
        passes = kernel is not None and kernel.treatment is Treatment.PASSES
        fuses = passes or op.type in (*int8_kernels.FUSED_ACTIVATIONS, *SUMS, "BiasAdd")
        if statistic or (fuses and self.network.is_behind_layers(op)):
            return self.choices.in_scope(op) and not self.overrides.skipped(op)
        return self.refusal(op) == ""

    def _only_for(self, layer: RandomLayer) -> list[Operation]:
        """Return the ops of a random layer but its end that nothing else reads."""
        inside = {layer.end}
        for op in sorted(layer.ops, key=lambda op: -self.network.place.get(op, -1)):
            readers = (r for t in op.outputs for r, _ in self.network.readers(t))
            if op is not layer.end and inside.issuperset(readers):
                inside.add(op)
        return [op for op in layer.ops if op in inside and op is not layer.end]

    def plan(self) -> QuantizePlan:
        """Go through the ops in topological order."""
        if self.choices.weights_only:
            for op in self.network.ops:
                self._weigh(op)
            plan = self._plan_of_drafts()
            plan.forms, plan.calls = self._forms(), self._calls()
            plan.refused = self._refused(plan)
            return self._obeying(plan)
        for op in self.network.ops:
            if op not in self.kernels and op not in self.inner:
                self._treat(op)
        self._finish()
        self._share_with_twins()
        drafted_edges = {e for d in self.drafts.values() for e in d.readers or ()}
        for op, edge in self.passing.items():
            draft = self.drafts.get(edge.op.inputs[edge.slot])
            if edge in drafted_edges or (draft is not None and draft.readers is None):
                self.kernels[op] = op
        plan = self._plan_of_drafts()
        prelus = self._prelus()
        inside = {op for prelu in prelus for op in prelu.ops}
        plan.prelus = prelus
        plan.forms = {op: f for op, f in self._forms().items() if op not in inside}
        plan.calls = self._calls()
        plan.refused = self._refused(plan)
        plan.biases = [op for op in self.network.ops if self._adds_parted_bias(op)]
        return self._obeying(plan)

    def _plan_of_drafts(self) -> QuantizePlan:
        """Return the plan of the drafts."""
        groups, points = fake_quants.named(
            list(self.drafts.values()), self.network, self.shared
        )
        return QuantizePlan(
            groups,
            self.kernels,
            self.skips,
            {op: points[draft.tensor] for op, draft in self.weights.items()},
            {op: points[draft.tensor] for op, draft in self.results.items()},
            self._notes_of(points),
            in_float=[
                op
                for op in self.skips
                if self.left_out(op) and not self.network.obstacle(op)
            ],
            unfed=self.network.unfed,
        )

    def _notes_of(self, points: MutableIdentityMap[Point]) -> dict[Operation, str]:
        """Return the notes, also on weights that several layers read."""
        for op in self.blocked:
            if points[self.weights[op].tensor].form.block is None:
                self.notes[op] = "not in blocks: others read them along other axes"
        return self.notes

    def _obeying(self, plan: QuantizePlan) -> QuantizePlan:
        """Return a plan if it obeys the overrides; raise otherwise."""
        if not self.overrides.specs:
            return plan
        point_of = MutableIdentityMap(
            (point.tensor, point) for group in plan.groups for point in group.points
        )
        parameters = {op: [point] for op, point in plan.weights.items()}
        for op, drafts in self.constants.items():
            constant_points = [point_of[draft.tensor] for draft in drafts]
            parameters[op] = [*parameters.get(op, ()), *constant_points]
        fake_quants.check_obeyed(self.overrides, plan, parameters, self.network)
        return plan

    def _weigh(self, op: Operation) -> None:
        """Plan the range of an op's weights alone."""
        layer = self.network.layers.get(op)
        floats = any(t.dtype.is_floating for t in op.outputs)
        if layer is None:
            if floats and not self.network.is_input(op) and kernel_of(op) is not None:
                self.skips[op] = Skip(op, _NO_WEIGHTS, False)
            return
        reason = self.refusal(op)
        if reason:
            self._skip(op, reason)
            return
        self._weights_of(layer, self.overrides.spec([op]))
        if op in self.weights or is_quantized(layer.kernel):
            self.kernels[op] = op

    def _weights_of(self, layer: Layer, spec: Spec) -> None:
        if not is_quantized(layer.kernel):
            form = self._format_of(layer, spec)
            count = layer.kernel.shape.num_elements() or 0
            is_large = count >= self.choices.fewest_weights or form.block is not None
            if not (is_large or self.overrides.asked(layer.op)):
                few = f"with {count} weights, {_FEW}"
                self.skips[layer.op] = Skip(layer.op, few, False)
                return
            edge = Edge(layer.op, layer.weights)
            self.weights[layer.op] = self.parameter(
                layer.kernel, edge, layer.op, spec, form
            )

    def _format_of(self, layer: Layer, spec: Spec) -> Format:
        """Return how weights are stored: in blocks where these are asked for."""
        block = self.choices.block
        if block is None:
            return format_of(layer, spec)
        form = block_format(layer, self.overrides.block_spec(layer.op), block)
        if isinstance(form, Format):
            self.blocked.append(layer.op)
            return form
        if form:
            self.notes[layer.op] = f"not in blocks: {form}"
        return format_of(layer, spec)

    def _share_with_twins(self) -> None:
        """Let twins share a range: the converter makes one op of them."""
        for twins in find_twins(self.network.ops):
            for outputs in zip(*(op.outputs for op in twins), strict=True):
                drafted = [t for t in outputs if t in self.drafts]
                if len(drafted) > 1 and self.can_share(drafted):
                    for tensor in drafted[1:]:
                        self.shared.join(drafted[0], tensor)

    def _forms(self) -> dict[Operation, Form]:
        """Return the forms of ops that TFLite has no kernel for."""
        network, forms = self.network, {}
        for op in network.ops:
            if op in network.noise or op in network.random_layers:
                continue
            in_float = op in self.skips and op.outputs[0].dtype == tf.float32
            in_float = in_float and not self.choices.weights_only
            form = lowering.int8_form(op) if in_float else lowering.converted_form(op)
            if form is not None and not self.refusal(op):
                forms[op] = form
        return forms

    def _calls(self) -> list[Operation]:
        """Return the calls of one convolution, which Keras writes for groups."""
        return [
            op
            for op in self.network.ops
            if is_convolution_call(op) and not self.left_out(op)
        ]

    def _refused(self, plan: QuantizePlan) -> list[Operation]:
        """Return the ops that the converter will refuse, and skip them for that."""
        refused = [
            op
            for op in self.network.ops
            if op not in self.converted
            and op not in plan.forms
            and lowering.is_refused(op)
        ]
        for op in refused:
            self.kernels.pop(op, None)
            self.skips[op] = Skip(op, _REFUSED, False)
        return refused

    def _adds_parted_bias(self, op: Operation) -> bool:
        """Return whether a sum could be a layer's bias, but for a Reshape between."""
        parted, network = lowering.parted_bias(op), self.network
        if parted is None or op not in self.kernels or op in self.inner:
            return False
        layer = network.layers.get(parted.data.op)
        if layer is None or layer.spreads or layer.axis != -1:
            return False
        between = [parted.data, *(t for t in op.inputs if t is not parted.bias)]
        # The Reshape becomes another op, which no override would find.
        reshape = between[1].op
        if self.refusal(reshape) or self.overrides.asked(reshape):
            return False
        return (
            parted.data.op in self.kernels
            and network.is_parameter(parted.bias)
            and not is_quantized(parted.bias)
            and all(len(network.readers(t)) == 1 for t in between)
            and not any(t in network.results for t in between)
            and all(network.quantized(t) is None for t in between)
        )

    def _prelus(self) -> list[Prelu]:
        if "prelu" not in self.choices.activations:
            return []
        prelus = lowering.find_prelus(self.network)
        return [p for p in prelus if not any(map(self.refusal, p.ops))]

    def _finish(self) -> None:
        """Let inputs and results be quantized, whatever reads or makes them."""
        network = self.network
        inputs = (op.outputs[0] for op in network.ops if network.is_input(op))
        for tensor in inputs:
            if tensor not in self.drafts and self._is_input(tensor):
                self.input(tensor, tensor.op, None)
        for tensor in network.results:
            if tensor in self.carried or not network.is_data(tensor):
                continue
            if tensor in self.origin:
                source, edge = self.origin[tensor]
                # Results of bodies that are not looked into stay as they are.
                if not network.obstacle(source.op):
                    self.demand(*edge)
            elif not self.refusal(tensor.op):
                spec = self.overrides.spec([tensor.op])
                self.quantize(tensor, tensor.op, "output_quant", spec)

    def _is_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor is fed with values, no indices in float."""
        readers = self.network.readers(tensor)
        values = any(t.dtype.is_floating for edge in readers for t in edge.op.outputs)
        return tensor.dtype == tf.float32 and values and not self.refusal(tensor.op)

    def _treat(self, op: Operation) -> None:
        floats = any(t.dtype.is_floating for t in op.outputs)
        floats = floats or self.network.fills_lists(op)
        if op.type in int8_kernels.DECISIONS and not self.refusal(op):
            for index in range(len(op.inputs)):
                self.demand(op, index)
        if op.type in int8_kernels.TESTS and self.network.is_data(op.inputs[0]):
            self._skip(op, int8_kernels.without_kernel(op.type))
        if not floats or op.type in op_types.VALUE_BLIND:
            return
        if self.network.is_input(op):
            if self.overrides.skipped(op):
                self._skip(op, self.left_out(op))
            return
        if self._is_simulation(op):
            self.carried.add(op.outputs[0])
            return
        if op in self.network.random_layers:
            self._drop(self.network.random_layers[op])
            return
        reason = _NOISE if op in self.network.noise else self.refusal(op)
        if reason:
            self._skip(op, reason)
            return
        composite = self.composites.get(op)
        layer = self.network.layers.get(op)
        kernel = kernel_of(op)
        if composite is not None:
            self._composite(composite)
        elif layer is not None:
            self._layer(layer)
        elif op.type in op_types.LOOKUPS and not self.network.is_data(op.inputs[0]):
            # The converter stores the table in the range of what is looked up.
            spec = self.overrides.spec([op])
            self._end(Chain((op,), op.outputs[0], ""), "lookup_quant", spec)
        elif kernel is None:
            self._skip(op, int8_kernels.without_kernel(op.type))
        elif kernel.treatment is Treatment.PASSES:
            self._pass(op, kernel)
        elif kernel.treatment is Treatment.KEEPS:
            self._keep(op, kernel)
        elif kernel.treatment is Treatment.JOINS:
            self._join(op, kernel)
        else:
            self._make(op, kernel)

    def _is_simulation(self, op: Operation) -> bool:
        """Return whether an op is FakeQuant, or delays it."""
        return op.type in int8_kernels.FAKE_QUANT or delayed_input(op) is not None

    def _skip(self, op: Operation, reason: str) -> None:
        # Ops in a body may well have kernels.
        may_have_kernel = (
            op.type in (*int8_kernels.KERNELS, *BODIES) or op in self.network.layers
        )
        may_have_kernel = may_have_kernel or function_calls.called_function(op) != ""
        in_loss = reason == BEHIND and self.network.leads_to_loss(op)
        has_kernel = may_have_kernel and not in_loss and reason not in _NO_KERNEL
        self.skips[op] = Skip(op, reason, has_kernel)

    def _layer(self, layer: Layer) -> None:
        op = layer.op
        chain = lowering.chain_from(op, self.network, self.may_take)
        spec = self.overrides.spec(chain.ops)
        self._weights_of(layer, spec)
        self.demand(op, layer.data)
        slot = "act_quant"
        if not chain.activation and self._feeds_sum(chain.result):
            slot = "conv_quant"
        self._end(chain, slot, spec)

    def _feeds_pool_and_more(self, tensor: Tensor) -> bool:
        """Return whether the converter forgets the range of a forwarded tensor."""
        # It does so if an AvgPool reads it, and something else (TensorFlow 2.21).
        readers = self.network.readers(tensor)
        return len(readers) > 1 and any(edge.op.type == "AvgPool" for edge in readers)

    def _feeds_sum(self, tensor: Tensor) -> bool:
        return any(
            edge.op.type in op_types.SUMS for edge in self.network.readers(tensor)
        )

    def _make(self, op: Operation, kernel: Kernel) -> None:
        """Plan the ranges of an op whose int8 kernel makes a range of its own."""
        network = self.network
        data = [i for i, t in enumerate(op.inputs) if network.is_data(t)]
        if op.type == "RealDiv" and not network.is_parameter(op.inputs[1]):
            self._skip(op, _DIVIDES)
            return
        for index in kernel.data_inputs(op):
            if index in data:
                self.demand(op, index)
            # The converter gives parameters of other ops ranges that are as good.
            elif op.type in _WITH_PARAMETERS:
                self.constant(op, index)
        chain = Chain((op,), op.outputs[0], kernel.activation)
        if kernel.fuses:
            chain = lowering.chain_from(op, network, self.may_take)
        spec = self.overrides.spec(chain.ops)
        learnt = chain.activation and not kernel.range
        slot = "act_quant" if learnt else kernel.slot
        self._end(chain, slot, spec, kernel.range)

    def _composite(self, composite: Composite) -> None:
        for op in composite.ops:
            self.kernels[op] = composite.end
            for index, t in enumerate(op.inputs):
                if t is composite.source:
                    self.demand(op, index)
        end = composite.end
        chain = Chain((end,), end.outputs[0], composite.name)
        self._end(chain, "act_quant", self.overrides.spec(composite.ops))

    def _pass(self, op: Operation, kernel: Kernel) -> None:
        if any(self._feeds_pool_and_more(t) for t in op.outputs):
            self._keep(op, replace(kernel, slot="keep_quant"))
            return
        for index in kernel.data_inputs(op):
            # Of several inputs each is forwarded as the output of its place.
            t = op.outputs[index if len(op.outputs) > 1 else 0]
            source = op.inputs[index]
            if not self.network.is_data(source):
                continue
            self.shared.join(source, t)
            if source in self.carried:
                self.carried.add(t)
                self.kernels[op] = op
            else:
                start = self.origin.get(source, (source, Edge(op, index)))
                self.origin[t], self.passing[op] = start, start[1]

    def _drop(self, layer: RandomLayer) -> None:
        """Let a random layer forward its input, rounded or not, as at inference."""
        source, result = layer.source, layer.end.outputs[0]
        self._skip(layer.end, _DROPS)
        if not self.network.is_data(source):
            return
        self.shared.join(source, result)
        if source in self.carried:
            self.carried.add(result)
            return
        edges = (e for e in self.network.readers(source) if e.op in layer.ops)
        self.origin[result] = self.origin.get(source, (source, next(edges)))

    def _keep(self, op: Operation, kernel: Kernel) -> None:
        """Plan the ranges of an op that forwards its own, at the end of a model too."""
        (index,) = kernel.data_inputs(op)
        source = op.inputs[index]
        if not self.network.is_data(source):
            return
        if op.type == "TopKV2" and not self._is_read(op.outputs[0]):
            self._skip(op, _RANKS)
            return
        self.demand(op, index)
        self.kernels[op] = op
        spec = self.overrides.spec([op])
        for t in op.outputs:
            if not t.dtype.is_floating:
                continue
            self.shared.join(source, t)
            draft = self.quantize(t, op, kernel.slot, spec, counts=False)
            if draft is not None:
                self.results.setdefault(op, draft)

    def _is_read(self, tensor: Tensor) -> bool:
        return tensor in self.network.results or bool(self.network.readers(tensor))

    def _join(self, op: Operation, kernel: Kernel) -> None:
        data = [i for i in kernel.data_inputs(op) if self.network.is_data(op.inputs[i])]
        for index in data:
            self.demand(op, index)
        self.kernels[op] = op
        spec = self.overrides.spec([op])
        result = op.outputs[0]
        sources = [op.inputs[index] for index in data]
        together = self.can_share(sources)
        if together:
            for tensor in (*sources[1:], result):
                self.shared.join(sources[0], tensor)
        draft = self.quantize(result, op, kernel.slot, spec, counts=not together)
        if draft is not None:
            self.results[op] = draft

    def _end(
        self,
        chain: Chain,
        slot: str,
        spec: Spec,
        range_: tuple[float, float] | None = None,
    ) -> None:
        for op in chain.ops:
            self.kernels[op] = chain.ops[0]
            self.skips.pop(op, None)
        draft = self.quantize(
            chain.result,
            chain.ops[0],
            slot,
            spec,
            fixed=range_,
            positive=chain.activation in int8_kernels.FUSED_ACTIVATIONS.values(),
        )
        if draft is None:
            return
        self.results[chain.ops[0]] = draft
        statistics = (
            self.network.is_statistic(t) for op in chain.ops for t in op.inputs
        )
        if draft.shapes and not any(statistics):
            # Else a shape may be read to make what the result depends on.
            draft.shapes = (*draft.shapes, *chain.inside)
