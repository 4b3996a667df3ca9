"""FakeQuant ops: the points where they go, their TensorFlow ops, their ranges.

The name of a range says where in the network it belongs: `<context>/<slot>`, as in
`block1/conv/weights_quant`. The context is the name scope of the op, or its whole name
where several ops of a scope need the slot. Names do not depend on the order in which
ops were made, nor on skips by overrides: a graph for training and one for
inference that were made by the same code have the same ranges.

A range is learnt in training steps. Weights take the last value of their tensor,
which is known when they are read. Activations take a moving average of the batches,

    learnt  = decay * learnt + (1 - decay)
    average = average + (batch - average) * (1 - decay) / learnt

where `learnt` starts at 0: after n steps it is 1 - decay^n. So the average is that of
the batches alone, however few they are, and the range to start with has no part in it
(Kingma and Ba 2014, arXiv 1412.6980, section 3). Ranges are widened to hold zero before
they are averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph import creation, replicas, types
from geutil.graph.op_types import types_in
from geutil.graph.resource_variables import handle_in, variables_outside
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.lowering import Form, Prelu
from geutil.quantize.planning.network import Edge, Network, simulation_of, source_of
from geutil.quantize.spec import (
    BLOCK_MARK,
    Format,
    Overrides,
    Range,
    Spec,
    block_count,
    chosen,
    constant_format,
    from_blocks,
    in_blocks,
    symmetric,
    symmetric_ratio,
    with_stored_steps,
    with_zero,
)


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
    """Return whether a FakeQuant op has the requested value of a key, if it shows."""
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


Pair = tuple[Any, Any]
"""The two ends of a range, or the handles of the variables that hold them."""


def fake_quant(x: Tensor, ends: Pair, form: Format) -> Tensor:
    """Return the values nearest to those of a tensor that its format can store."""
    # `ends`: the low and the high end of the range: scalars, or vectors with one
    # element for each channel.
    # `form`: the format. Channels of several axes have to be neighbours, and the last;
    # unless there are blocks.
    low, high = ends
    more = {"num_bits": form.bits, "narrow_range": form.narrow_range}
    if form.block is not None:
        made = _by_channel(in_blocks(x, form), low, high, **more)
        creation.set_mark(made.op, BLOCK_MARK)
        return from_blocks(made, form, x.shape.as_list())
    if not form.axes:
        return tf.quantization.fake_quant_with_min_max_vars(x, low, high, **more)
    sizes = x.shape.as_list()
    last = len(sizes) - len(form.axes)
    if len(form.axes) == 1 and last == form.axes[0]:
        return _by_channel(x, low, high, **more)
    # The op knows the last axis alone.
    flat = tf.reshape(x, [*sizes[:last], int(np.prod(sizes[last:]))])
    return tf.reshape(_by_channel(flat, low, high, **more), sizes)


def fixed_fake_quant(x: Tensor, ends: tuple[float, float], form: Format) -> Tensor:
    """Return the values nearest to those of a tensor, in a range that stays."""
    low, high = ends
    return tf.quantization.fake_quant_with_min_max_args(
        x, low, high, num_bits=form.bits, narrow_range=form.narrow_range
    )


def _by_channel(x: Tensor, low: Tensor, high: Tensor, **more: Any) -> Tensor:
    return tf.quantization.fake_quant_with_min_max_vars_per_channel(
        x, low, high, **more
    )


def ends_of(
    xs: Sequence[Tensor], form: Format, never_negative: Sequence[bool] = ()
) -> Pair:
    """Return the range of the values of tensors, with zero in it."""
    # Channels of tensors are counted by the last axes.
    # `never_negative`: of each, whether it holds nothing below zero, which is then its
    # low end without looking; none is known if this is empty.
    if form.symmetric and form.narrow_range:
        sizes = [_reduced(tf.reduce_max, tf.abs(x), form) for x in xs]
        size = _joined(sizes, tf.maximum)
        return tuple(with_stored_steps(Range(-size, size), form))
    high = _joined([_reduced(tf.reduce_max, x, form) for x in xs], tf.maximum)
    # One constant for both: there are many ranges.
    zero = tf.constant(0.0)
    known = never_negative or [False] * len(xs)
    lows = [
        _reduced(tf.reduce_min, x, form)
        for x, is_known in zip(xs, known, strict=True)
        # Of channels there is a vector of zeros.
        if form.axes or not is_known
    ]
    low = tf.minimum(_joined(lows, tf.minimum), zero) if lows else zero
    high = tf.maximum(high, zero)
    if not form.symmetric:
        return low, high
    ratio = symmetric_ratio(form.bits, form.narrow_range)
    return tf.minimum(low, high * (-1.0 / ratio)), tf.maximum(high, low * -ratio)


_NEVER_NEGATIVE = types_in(
    """
    Abs Exp Relu Relu6 Sigmoid Softmax Softplus Square
    """
)
_KEEP_SIGNS = FAKE_QUANT | {
    *["AvgPool", "ExpandDims", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose"]
}
"""Zero is a value of every range, so rounding makes nothing negative of the rest."""


def is_never_negative(tensor: Tensor) -> bool:
    """Return whether a tensor is known to hold nothing below zero."""
    op = tensor.op
    while op.type in _KEEP_SIGNS:
        op = op.inputs[0].op
    return op.type in _NEVER_NEGATIVE


def _reduced(reduce: Any, x: Tensor, form: Format) -> Tensor:
    """Reduce a tensor to one value, or to one for each channel, in a vector."""
    if not form.axes:
        return reduce(x)
    if form.block is not None:
        return reduce(in_blocks(x, form), [0])
    axes = [axis for axis in range(x.shape.rank) if axis not in form.axes]
    reduced = reduce(x, axes)
    return tf.reshape(reduced, [-1]) if len(form.axes) > 1 else reduced


def _joined(tensors: Sequence[Tensor], join: Any) -> Tensor:
    first, *others = tensors
    for other in others:
        first = join(first, other)
    return first


def read(handles: Pair) -> Pair:
    """Return the values of the two variables of a range."""
    low, high = handles
    return _read(low), _read(high)


def _read(handle: Any) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def assign(handles: Pair, ends: Pair) -> Pair:
    """Set the two variables of a range; return the ends, which wait for that."""
    # No gradients go through them: what is learnt is not by descent, and a range that
    # is taken from a tensor would hand the gradients of its clipped values to its
    # extremes.
    return _behind(ends, _written(handles, ends))


def _written(handles: Pair, ends: Pair) -> list[Any]:
    return [
        tf.raw_ops.AssignVariableOp(resource=handle, value=end)
        for handle, end in zip(handles, ends, strict=True)
    ]


def _behind(ends: Pair, writes: Sequence[Any]) -> Pair:
    with tf.control_dependencies(writes):
        low, high = (tf.stop_gradient(end) for end in ends)
    return low, high


def moving_average(
    batch: Pair, handles: Pair, learnt: Any, decay: float
) -> tuple[Pair, Pair]:
    """Move a range towards that of a batch; return it as it was, and as it is now."""
    share = tf.constant(1.0 - decay)
    learnt_share = _read(learnt)
    # A replica may move the range meanwhile: what is read of it is not older than that.
    with tf.control_dependencies([learnt_share]):
        before = read(handles)
    total = learnt_share + (1.0 - learnt_share) * share
    stays = 1.0 - share / total
    low, high = (
        new + (old - new) * stays for old, new in zip(before, batch, strict=True)
    )
    writes = _written(handles, (low, high))
    with tf.control_dependencies(writes):
        learnt_write = tf.raw_ops.AssignVariableOp(resource=learnt, value=total)
    return before, _behind((low, high), [*writes, learnt_write])


def delayed(quantized: Tensor, x: Tensor, steps: Tensor, delay: int) -> Tensor:
    """Return a tensor as it is, and quantized from the step `delay` on."""
    starts = tf.greater_equal(steps, tf.constant(delay, steps.dtype))
    return tf.where(starts, quantized, x)


ENDS = ("min", "max")
LEARNT = "learnt"
"""How much of a moving average the batches made: 0 before the first, then up to 1."""


class NewRange(NamedTuple):
    """A range that needs variables."""

    name: str
    shape: tuple[int, ...]
    ends: Range  # the range to start with
    averages: bool = False  # whether a moving average is learnt, which is counted
    device: str = ""  # that of the ops that read it, "" for none


class RangeVariables:
    """Makes the variables of ranges, or takes those that are given."""

    # `collection`: the collection of a v1 graph that they are put in, besides that of
    # all variables.

    def __init__(
        self, graph: Graph, variable_by_name: Mapping[str, Any], collection: str | None
    ) -> None:
        self._graph = graph
        self._given = variable_by_name
        self._collection = collection
        # All variables that the ranges of the graph are in, by name.
        self.by_name: dict[str, Any] = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise QuantizeError if a given variable cannot hold an end of a range."""
        for end, needed in zip((*ENDS, LEARNT), (shape, shape, ()), strict=True):
            variable = self._given.get(f"{name}/{end}")
            if variable is None:
                continue
            if tuple(variable.shape) != needed:
                raise QuantizeError(
                    f"'{name}/{end}' is given with shape {variable.shape}, and a range "
                    f"of shape {list(needed)} is needed"
                )
            handle = replicas.local_handle(variable)
            owner = getattr(handle, "graph", self._graph)
            if owner is not self._graph and not types.is_func_graph(self._graph):
                raise QuantizeError(
                    f"'{name}/{end}' is given from another graph; graphs share ranges "
                    "through a checkpoint, by name"
                )

    def make(self, ranges: Sequence[NewRange]) -> None:
        """Make the variables of ranges that are not given, in one go."""
        initial_values, devices = [], []
        for new in ranges:
            for name, initial in self._values(new):
                existing_variable = self._given.get(name)
                if existing_variable is None:
                    initial_values.append((name, initial))
                    devices.append(new.device)
                else:
                    self.by_name[name] = existing_variable
        new_variables = variables_outside(self._graph, initial_values, devices)
        for (name, _), variable in zip(initial_values, new_variables, strict=True):
            self.by_name[name] = variable
            if self._collection is not None and not name.endswith(f"/{LEARNT}"):
                self._add_to(self._collection, variable)

    def _values(self, new: NewRange) -> Iterator[tuple[str, Any]]:
        """Yield the names and the first values of the variables of a range."""
        for end, value in zip(ENDS, new.ends, strict=True):
            initial = np.broadcast_to(np.asarray(value, np.float32), new.shape)
            yield f"{new.name}/{end}", initial
        if new.averages:
            # A range that is given was learnt elsewhere.
            is_learnt = all(f"{new.name}/{end}" in self._given for end in ENDS)
            yield f"{new.name}/{LEARNT}", np.float32(is_learnt)

    def handles(self, name: str) -> Pair:
        """Return the handles of the two variables of a range, as the graph has them."""
        low, high = (
            handle_in(self._graph, self.by_name[f"{name}/{end}"]) for end in ENDS
        )
        return low, high

    def learnt(self, name: str) -> Any:
        """Return the handle of the variable that counts a moving average."""
        return handle_in(self._graph, self.by_name[f"{name}/{LEARNT}"])

    def _add_to(self, collection: str, variable: Any) -> None:
        collection_list = self._graph.get_collection_ref(collection)
        if not any(v is variable for v in collection_list):
            collection_list.append(variable)


def shape_of(group: RangeGroup) -> tuple[int, ...]:
    """Return the shape of the ends of a range."""
    axes = group.form.axes
    if not axes:
        return ()
    sizes = group.points[0].tensor.shape.as_list()
    if group.form.block is not None:
        return (block_count(group.form, sizes),)
    return (int(np.prod([sizes[axis] for axis in axes])),)


class KnownValues:
    """The values of weights, as far as they are known without running the graph."""

    def __init__(self, graph: Graph) -> None:
        captures = getattr(graph, "captures", ())
        self._outside: MutableIdentityMap[Any] = MutableIdentityMap(
            (inside, outside) for outside, inside in captures
        )

    def key(self, weights: Tensor) -> Hashable:
        """Return a key of the variable or the constant that weights are."""
        source = source_of(weights)
        handle = self._outside.get(source)
        if handle is not None:
            return id(handle)
        value = tf.get_static_value(source) if source.op.type == "Const" else None
        return source.name if value is None else np.asarray(value).tobytes()

    def of(self, weights: Tensor) -> Any:
        """Return the value of weights as an array; None if it is not known."""
        source = source_of(weights)
        handle = self._outside.get(source)
        if handle is None:
            return tf.get_static_value(source) if source.op.type == "Const" else None
        if not isinstance(handle, tf.Tensor) or not hasattr(handle, "numpy"):
            return None
        with tf.init_scope():
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=weights.dtype)
            return read.numpy()


def described(graph: Graph, groups: Sequence[RangeGroup]) -> dict[str, Hashable]:
    """Return by name a key of each range, equal for equal ranges of two graphs."""
    # Ranges of weights are for a variable or for values, others for what makes a
    # tensor.
    known_values = KnownValues(graph)
    return {
        group.name: (
            group.form,
            shape_of(group),
            tuple(
                (
                    p.tensor.op.type,
                    known_values.key(p.tensor) if group.weights else "",
                )
                for p in group.points
            ),
        )
        for group in groups
    }


def range_of(values: Any, form: Format) -> Range:
    """Return the range of weights in their format; infinities are not counted."""
    values = np.where(np.isinf(values), np.float32(0.0), values)
    axes: tuple[int, ...] | None = None
    if form.block is not None:
        values, axes = in_blocks(values, form, np), (0,)
    elif form.axes:
        axes = tuple(a for a in range(values.ndim) if a not in form.axes)
    low, high = with_zero(values.min(axes).reshape(-1), values.max(axes).reshape(-1))
    if not form.axes:
        low, high = low[0], high[0]
    if form.symmetric:
        ends = symmetric(low, high, form.bits, form.narrow_range)
        return with_stored_steps(ends, form)
    return Range(low, high)
