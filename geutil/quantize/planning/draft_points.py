"""Points where FakeQuant ops go: drafted, refused, named, sharing ranges, as asked.

A name says where in the network a range belongs: `<context>/<slot>`, as in
`block1/conv/weights_quant`. The context is the name scope of the op, or its whole name
where several ops of a scope need the slot. Names do not depend on the order in which
ops were made, nor on skips by overrides: a graph for training and one for
inference that were made by the same code have the same ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import types
from geutil.graph.op_types import FUSED_NORMS, SUMS
from geutil.graph.types import IdentitySet, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.forms import Form
from geutil.quantize.planning.fused_ops import Composite, Prelu
from geutil.quantize.planning.int8_kernels import Kernel, Treatment
from geutil.quantize.planning.network import (
    Edge,
    Network,
    is_quantized,
    kernel_of,
    simulation_of,
    source_of,
)
from geutil.quantize.spec import (
    FOLD,
    SYMMETRIC_START,
    Format,
    Overrides,
    QuantizeChoices,
    Spec,
    activation_format,
    chosen,
    constant_format,
    fixed_range,
)
from geutil.select.networks.batch_norms import is_layer_norm


@dataclass(eq=False)
class RangeGroup:
    """Tensors that one range is for."""

    name: str  # the name of the range, as in `<name>/min`
    form: Format
    weights: bool  # whether they are weights, whose range is that of their last value
    decay: float  # how much of the range each training step keeps
    initial: tuple[float, float]  # the range to start with
    fixed: bool = False  # whether it stays so
    # Where it is used, in topological order.
    points: list[Point] = field(default_factory=list)

    @property
    def sources(self) -> list[Point]:
        """The points whose tensors the range is learnt from."""
        return [point for point in self.points if point.counts]


@dataclass(eq=False)
class Point:
    """A tensor that is quantized."""

    tensor: Tensor
    name: str  # the scope of the new ops, as in `<name>/FakeQuantWithMinMaxVars`
    group: RangeGroup
    readers: list[Edge] | None = None  # what shall read it quantized; None is all
    # True if its values count for the range; those of a concat do not, which have been
    # counted one by one.
    counts: bool = True
    # Tensors of its shape. What reads only the shape of one of them shall read that of
    # the quantized one: the converter leaves a kernel in float if anything reads what
    # it makes before that is quantized.
    shapes: tuple[Tensor, ...] = ()

    @property
    def form(self) -> Format:
        """How it is stored."""
        return self.group.form


class SharedRanges:
    """The tensors that share a range: a union-find over tensors."""

    def __init__(self) -> None:
        self._above: MutableIdentityMap[Tensor] = MutableIdentityMap()
        self._fixed: MutableIdentityMap[tuple[float, float]] = MutableIdentityMap()

    def root(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands for all those of its range."""
        path = []
        while tensor in self._above:
            path.append(tensor)
            tensor = self._above[tensor]
        for passed in path[:-1]:
            self._above[passed] = tensor
        return tensor

    def join(self, tensor: Tensor, other: Tensor) -> None:
        """Let two tensors share a range; the first one's root stays."""
        first, second = self.root(tensor), self.root(other)
        if first is not second:
            self._above[second] = first

    def fix(self, tensor: Tensor, ends: tuple[float, float]) -> None:
        """Set the range of a tensor for good."""
        self._fixed[self.root(tensor)] = ends

    def fixed(self, tensor: Tensor) -> tuple[float, float] | None:
        """Return the range of a tensor, if it is set."""
        return self._fixed.get(self.root(tensor))


@dataclass(frozen=True, eq=False)
class Skip:
    """An op that is not quantized, and why."""

    op: Operation
    reason: str
    has_kernel: bool  # whether TFLite has an int8 kernel for it


@dataclass(eq=False)
class Draft:
    """A tensor that will be quantized."""

    tensor: Tensor
    anchor: Operation  # the op that the point is named after
    slot: str  # what it is, as in `<scope of the anchor>/<slot>`
    spec: Spec  # how its op is quantized
    form: Format
    readers: list[Edge] | None = None  # what shall read it quantized; None is all
    counts: bool = True  # whether the range is learnt from it
    # The source of the weights that it holds; None for activations.
    weights: Tensor | None = None
    initial: tuple[float, float] = (-6.0, 6.0)  # the range to start with
    fixed: bool = False  # whether that stays
    shapes: tuple[Tensor, ...] = ()  # see `Point`


_FOLD = "_fold"
"""The suffix of ops that batch-norm folding makes."""


def named(
    drafts: Sequence[Draft], network: Network, shared: SharedRanges
) -> tuple[list[RangeGroup], MutableIdentityMap[Point]]:
    """Return the ranges, and the point of each tensor."""
    ordered = sorted(drafts, key=lambda d: network.place.get(d.tensor.op, -1))
    groups: MutableIdentityMap[RangeGroup] = MutableIdentityMap()
    points: MutableIdentityMap[Point] = MutableIdentityMap()
    for draft, name in zip(ordered, _names(ordered), strict=True):
        key = shared.root(draft.tensor) if draft.weights is None else draft.weights
        group = groups.get(key)
        if group is None:
            group = groups[key] = _group(draft, name)
        elif draft.weights is not None and draft.form != group.form:
            # Layers that want channels along other axes share one range.
            group.form = _in_one_range(group.form, draft)
        point = Point(
            draft.tensor, name, group, draft.readers, draft.counts, draft.shapes
        )
        group.points.append(point)
        points[draft.tensor] = point
        if draft.counts:
            _take_in(group, draft, name)
    for group in groups.values():
        if not group.sources:
            # Joined or pooled tensors were quantized before, in a range of their own.
            group.points[0].counts = True
    return list(groups.values()), points


def _in_one_range(form: Format, draft: Draft) -> Format:
    """Return the format of weights that layers read along several axes."""
    # A single range of 4 bits would be worse than blocks, and no smaller in a file.
    is_in_blocks = form.block is not None or draft.form.block is not None
    return constant_format(draft.spec) if is_in_blocks else replace(form, axes=())


def _group(draft: Draft, name: str) -> RangeGroup:
    return RangeGroup(
        name,
        draft.form,
        draft.weights is not None,
        draft.spec.ema_decay or 0.0,
        draft.initial,
        draft.fixed,
    )


def _take_in(group: RangeGroup, draft: Draft, name: str) -> None:
    """Widen a range to hold the initial range of one more tensor."""
    if len(group.sources) == 1:
        group.name, group.initial, group.fixed = name, draft.initial, draft.fixed
    low, high = group.initial
    group.initial = min(low, draft.initial[0]), max(high, draft.initial[1])


def _names(drafts: Sequence[Draft]) -> list[str]:
    base_names = [f"{_scope(draft.anchor)}{draft.slot}" for draft in drafts]
    base_counts = Counter(base_names)
    names = [
        f"{_bare(draft.anchor.name)}/{draft.slot}" if base_counts[name] > 1 else name
        for draft, name in zip(drafts, base_names, strict=True)
    ]
    earlier_counts: Counter[str] = Counter()
    for index, name in enumerate(names):
        if earlier_counts[name]:
            names[index] = f"{name}_{earlier_counts[name]}"
        earlier_counts[name] += 1
    return names


def _scope(op: Operation) -> str:
    return types.scope_dirname(op.name) or f"{_bare(op.name)}/"


def _bare(name: str) -> str:
    base = types.scope_basename(name)
    return types.scope_dirname(name) + base.removesuffix(_FOLD)


BEHIND = (
    "is behind the last layer, and may be part of a loss; an override with a "
    "geutil.quantize.Spec for it quantizes it"
)
_MORE_AT_THE_END = frozenset((Treatment.PASSES, Treatment.KEEPS, Treatment.JOINS))


class Drafts:
    """The tensors of a network to quantize, those that are, and refusals."""

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
        """Tell whether an op behind the last layer is still part of the network."""
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
        kernel = kernel_of(op)
        passes = kernel is not None and kernel.treatment is Treatment.PASSES
        fuses = passes or op.type in (*int8_kernels.FUSED_ACTIVATIONS, *SUMS, "BiasAdd")
        if fuses and self.network.is_behind_layers(op):
            return self.choices.in_scope(op) and not self.overrides.skipped(op)
        return self.refusal(op) == ""


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
        for key, value in chosen(spec) or [("", None)]:
            faults = [obeyed.fault(op, key, value) for op in ops]
            if faults and all(faults):
                request = f"{key}={value}" if key else "quantization"
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

    def fault(self, op: Operation, key: str, value: Any) -> str:
        """Return why a key of an override is not obeyed for an op; "" if it is."""
        kernel = self._plan.kernels.get(op)
        if kernel is None:
            skip = self._plan.skips.get(op)
            reason = skip.reason if skip else "makes no values that are quantized"
            return "" if op in self._rewritten else reason
        if not key:
            return ""
        parts = self._parts[kernel]
        return (
            self._fault_of_weights(parts, key, value)
            if key in _OF_WEIGHTS
            else self._fault_of_result(parts, key, value)
        )

    def _fault_of_weights(self, parts: list[Operation], key: str, value: Any) -> str:
        points = [point for op in parts for point in self._parameters.get(op, ())]
        if points:
            return _fault_of(points, key, value)
        found = (simulation_of(t) for op in parts for t in op.inputs)
        earlier = [simulation for simulation in found if simulation is not None]
        return _fault_of_earlier(earlier, key, value) if earlier else "has no weights"

    def _fault_of_result(self, parts: list[Operation], key: str, value: Any) -> str:
        points = [p for op in parts if (p := self._plan.results.get(op)) is not None]
        if points:
            return _fault_of(points, key, value)
        found = (self._network.quantized(t) for op in parts for t in op.outputs)
        earlier = [quantized.op for quantized in found if quantized is not None]
        if earlier:
            return _fault_of_earlier(earlier, key, value)
        return "hands values on in the range of what it reads; ask for it there"


def _fault_of(points: list[Point], key: str, value: Any) -> str:
    if any(_values(point.group)[key] == value for point in points):
        return ""
    if key == "per_channel":
        return "has weights that can have one range only, for all channels"
    return f"has the range '{points[0].group.name}', which is that of other ops"


def _fault_of_earlier(simulations: Sequence[Operation], key: str, value: Any) -> str:
    """Return how earlier FakeQuant ops differ from an override; "" if one fits."""
    if any(_is_asked_for(op, key, value) for op in simulations):
        return ""
    return f"is quantized already, by '{simulations[0].name}'; edit that op instead"


def _is_asked_for(simulation: Operation, key: str, value: Any) -> bool:
    """Tell whether a FakeQuant op has the requested value of a key, if it shows."""
    get = simulation.get_attr
    if key in ("weight_bits", "activation_bits"):
        return bool(get("num_bits") == value)
    if key == "per_channel":
        return simulation.type.endswith("PerChannel") is bool(value)
    ends = [tf.get_static_value(t) for t in list(simulation.inputs)[1:]]
    # FakeQuantWithMinMaxArgs has its range in attributes.
    if not ends:
        ends = [get("min"), get("max")]
    if any(end is None for end in ends):
        return False
    low, high = (np.asarray(end, np.float32) for end in ends)
    if key == "symmetric_weights":
        return bool(np.all(low == -high)) is bool(value)
    if key == "range":
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
