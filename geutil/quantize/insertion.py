"""The insertion of FakeQuant ops by a plan, and the graphs that it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph import adjacency, creation, op_types, replicas, runtime, state, types
from geutil.graph.creation import Later, Stencils
from geutil.graph.edits import (
    InputEdit,
    Liveness,
    apply_edits,
    order_exchanges,
    results_of,
    set_results,
)
from geutil.graph.resource_variables import check_step_variable, step_counter
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize import range_variables as rv
from geutil.quantize.planning.draft_points import Point, RangeGroup
from geutil.quantize.planning.network import Edge
from geutil.quantize.range_variables import (
    KnownValues,
    NewRange,
    RangeVariables,
    range_of,
    shape_of,
)
from geutil.quantize.spec import Format, Range
from geutil.select.networks.layers import Origins, training_ops


def refuse_mesh(graph: Graph) -> None:
    """Raise QuantizeError for a function that reads variables of a DTensor mesh."""
    if runtime.is_on_mesh(graph):
        raise QuantizeError(
            "the function reads variables of a DTensor mesh, and DTensor has no layout "
            "for FakeQuant ops; quantize it outside of the mesh, or shard the batch by "
            "tf.distribute"
        )


def refuse_training_ops(graph: Graph) -> None:
    """Raise QuantizeError for a graph that holds gradients or optimizer ops."""
    refused_ops = training_ops(graph)
    if refused_ops:
        raise QuantizeError(
            f"'{refused_ops[0].name}' ({refused_ops[0].type}) belongs to gradients or "
            "an optimizer; insert quantization before gradients, into a graph that "
            "has none"
        )
    if replicas.outputs_meant(graph):
        _refuse_gradients_of_outputs(graph)


def _refuse_gradients_of_outputs(graph: Graph) -> None:
    own = frozenset(replicas.own_operations(graph))
    origins = Origins(graph)
    for op in training_ops(graph, graph.get_operations()):
        for t in op.inputs:
            is_input = t.op.type in op_types.PLACEHOLDERS or origins.is_parameter(t)
            if t.op in own and t.dtype.is_floating and not is_input:
                raise QuantizeError(
                    f"'{op.name}' ({op.type}) belongs to gradients and reads "
                    f"'{t.name}', which the outputs depend on; insert quantization "
                    "before gradients"
                )


_logger = logging.getLogger("geutil")


def checked_delay(delay: Any, is_training: bool, step: Any = None) -> int:
    """Return the delay as a number."""
    if step is not None:
        check_step_variable(step)
    if delay is None:
        return 0
    if isinstance(delay, bool) or not isinstance(delay, int):
        raise ArgumentTypeError(
            f"quant_delay is a number of steps or None, not {types.type_name(delay)}"
        )
    if delay < 0:
        raise QuantizeError(f"quant_delay is {delay}; pass 0 or more")
    if delay and not is_training:
        raise QuantizeError("quant_delay is for training; pass is_training=True")
    return delay


Ends = tuple[Any, Any]


@dataclass(frozen=True, eq=False)
class Mode:
    """How ranges come about."""

    is_training: bool  # learn them; else they are read
    # The training step from which on anything is quantized; 0 is at once.
    delay: int = 0
    # The variable that counts the steps; None makes one where it is needed.
    step: Any = None


def insert(
    graph: Graph, groups: list[RangeGroup], mode: Mode, variables: RangeVariables
) -> MutableIdentityMap[Tensor]:
    """Quantize the tensors of ranges."""
    # Returns for each tensor what it is quantized to.
    if not groups:
        return MutableIdentityMap()
    refuse_mesh(graph)
    if replicas.in_several():
        _name_as_first(groups)
    elif mode.is_training and replicas.in_nested_function():
        _logger.warning(
            "quantize: in a tf.function inside a replica's function replicas can "
            "exchange nothing, so that each moves the ranges in turn; quantize in the "
            "function that strategy.run calls, for ranges over all replicas"
        )
    live = Liveness(graph)
    edges = {id(point): _edges(point, live) for g in groups for point in g.points}
    if replicas.outputs_meant(graph):
        _leave_others_alone(graph, groups, edges)
    state.check_editable(
        graph, [edge.op for point_edges in edges.values() for edge in point_edges]
    )
    for group in groups:
        if not group.fixed:
            variables.check(group.name, shape_of(group))
    devices = {id(p): _device(p, edges[id(p)]) for g in groups for p in g.points}
    builder = _Builder(graph, mode, variables, devices)
    builder.make_variables(groups)
    builder.merge(groups)
    for group in groups:
        builder.add(group)
    quantized = builder.make()
    edits = [
        InputEdit(edge.op, edge.slot, quantized[point.tensor])
        for group in groups
        for point in group.points
        for edge in edges[id(point)]
    ]
    # The new ops come last, and belong between those that are there.
    state.renew_order(graph)
    apply_edits(graph, edits)
    if builder.exchanges:
        order_exchanges(graph)
    everywhere: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (point.tensor, quantized[point.tensor])
        for group in groups
        for point in group.points
        if point.readers is None
    )
    set_results(graph, [everywhere.get(t, t) for t in results_of(graph)])
    return quantized


def _name_as_first(groups: list[RangeGroup]) -> None:
    """Give the ranges of a replica the names, and so the variables, of the first's."""

    def check(every: list[list[tuple[str, Any]]]) -> None:
        for others in every[1:]:
            kinds = [[kind for _, kind in listed] for listed in (every[0], others)]
            if kinds[0] != kinds[1]:
                raise QuantizeError(
                    f"the replicas have other ranges to learn: {len(every[0])} in the "
                    f"first, {len(others)} in another, or of other formats; quantize "
                    "the same network with the same arguments in each"
                )

    own = [(g.name, (g.form, shape_of(g), g.weights, g.fixed)) for g in groups]
    first = replicas.from_first_replica(own, check)
    for group, (name, _) in zip(groups, first, strict=True):
        group.name = name


def _in_order(graph: Graph, groups: list[RangeGroup]) -> list[RangeGroup]:
    """Return ranges in topological order of the tensors they are learnt from."""
    ops = adjacency.topological_sort(replicas.own_operations(graph))
    place = {op: index for index, op in enumerate(ops)}
    return sorted(
        groups, key=lambda g: max(place.get(p.tensor.op, -1) for p in g.points)
    )


def _edges(point: Point, live: Liveness) -> list[Edge]:
    """Return the inputs that will read a tensor quantized."""
    if point.readers is not None:
        return point.readers
    values = [
        e for e in _reading(point.tensor, live) if e.op.type not in op_types.VALUE_BLIND
    ]
    shapes = [
        edge
        for tensor in point.shapes
        for edge in _reading(tensor, live)
        if edge.op.type in op_types.VALUE_BLIND
    ]
    return [*values, *shapes]


def _leave_others_alone(
    graph: Graph, groups: list[RangeGroup], edges: dict[int, list[Edge]]
) -> None:
    """Let other networks of a graph read the inputs and weights that they share."""
    own = frozenset(replicas.own_operations(graph))
    origins = Origins(graph)
    for point in (point for group in groups for point in group.points):
        t = point.tensor
        if t.op.type in op_types.PLACEHOLDERS or origins.is_parameter(t):
            edges[id(point)] = [e for e in edges[id(point)] if e.op in own]


def _reading(tensor: Tensor, live: Liveness) -> list[Edge]:
    ops = dict.fromkeys(tensor.consumers())
    return edges_to(tensor, (op for op in ops if not live.is_retired(op)))


def edges_to(tensor: Tensor, readers: Iterable[Operation]) -> list[Edge]:
    """Return the inputs of ops that read a tensor."""
    return [
        Edge(op, index)
        for op in readers
        for index, t in enumerate(op.inputs)
        if t is tensor
    ]


def _device(point: Point, edges: list[Edge]) -> str:
    """Return where a tensor is quantized: weights where they are read."""
    # The reader of a variable stands where that does, or nowhere.
    own = str(point.tensor.op.device)
    reading = str(edges[0].op.device) if edges else ""
    return reading or own if point.group.weights else own or reading


class _Builder:
    """Makes the ops of many ranges."""

    def __init__(
        self,
        graph: Graph,
        mode: Mode,
        variables: RangeVariables,
        devices: Mapping[int, str],
    ) -> None:
        self._graph = graph
        self._mode = mode
        self._variables = variables
        # By the ids of points.
        self._devices = devices
        self._values = KnownValues(graph)
        self._stencils = Stencils(graph)
        self._results: list[tuple[Point, Later]] = []
        # Ops of an imported graph leave their scopes free in TensorFlow's books.
        self._scopes = types.scopes_in_use(graph)
        self._in_step = mode.is_training and replicas.in_several()
        self.exchanges = False
        # By the ids of ranges: their ends in this step, over all replicas.
        self._merged: dict[int, Ends] = {}
        self._steps: Tensor | None = None
        if mode.is_training and mode.delay:
            self._steps = step_counter(graph, mode.step).value

    def make(self) -> MutableIdentityMap[Tensor]:
        """Make the ops; return the quantized version of each tensor."""
        tensor_of = self._stencils.make()
        return MutableIdentityMap(
            (p.tensor, tensor_of[later]) for p, later in self._results
        )

    def make_variables(self, groups: list[RangeGroup]) -> None:
        """Make the variables of ranges."""
        learns = self._mode.is_training
        self._variables.make(
            [
                NewRange(
                    g.name,
                    shape_of(g),
                    self._initial(g),
                    learns and not g.weights,
                    self._devices[id(g.points[0])],
                )
                for g in groups
                if not g.fixed
            ]
        )

    def merge(self, groups: list[RangeGroup]) -> None:
        """Reduce the ends of ranges over all replicas, one range after the other."""
        learnt = [g for g in groups if not g.fixed and not g.weights]
        if not self._in_step or not learnt:
            return
        self.exchanges = True
        # A runtime that runs transfers in the order in which they were made would wait
        # for ever otherwise.
        learnt = _in_order(self._graph, learnt)
        stencils = Stencils(self._graph)
        ends, scopes = [], []
        for group in learnt:
            sources = [point.tensor for point in group.sources]
            never_negative = tuple(map(rv.is_never_negative, sources))
            scopes.append(self._unused(f"{group.points[-1].name}/over_replicas"))
            ends.append(
                stencils.add(
                    ("ends", group.form, never_negative),
                    partial(_ends_of, group.form, never_negative),
                    scopes[-1],
                    sources,
                    self._devices[id(group.points[0])],
                )
            )
        tensor_of = stencils.make()
        for group, (low, high), scope in zip(learnt, ends, scopes, strict=True):
            with (
                creation.neutral(self._graph),
                replicas.device(),
                tf.name_scope(f"{scope}/"),
            ):
                self._merged[id(group)] = replicas.all_reduce_range(
                    tensor_of[low], tensor_of[high]
                )

    def add(self, group: RangeGroup) -> None:
        """Plan the ops of a range, whose variables are there."""
        names = [self._unused(point.name) for point in group.points]
        if group.fixed:
            for point, name in zip(group.points, names, strict=True):
                self._quantize(point, name, None, group.initial)
            return
        handles = self._variables.handles(group.name)
        early, late = self._ends(group, names[-1], handles)
        last = group.points[-1]
        for point, name in zip(group.points, names, strict=True):
            self._quantize(point, name, late if point is last else early)

    def _unused(self, name: str) -> str:
        (unique_name,) = types.absolute_unique_names(self._graph, [name])
        while f"{unique_name}/" in self._scopes:
            (unique_name,) = types.absolute_unique_names(self._graph, [name])
        return unique_name

    def _initial(self, group: RangeGroup) -> Range:
        if group.weights and not self._mode.is_training:
            value = self._values.of(group.points[0].tensor)
            if value is not None and value.size:
                return range_of(value, group.form)
        return Range(*group.initial)

    def _ends(self, group: RangeGroup, name: str, handles: Ends) -> tuple[Ends, Ends]:
        """Return the range for all points of it but the last, and for the last."""
        form = group.form
        scope = f"{name}/range"
        device = self._devices[id(group.points[0])]
        add = self._stencils.add
        if not self._mode.is_training:
            low, high = add(
                "read",
                lambda low, high: [*rv.read((low, high))],
                scope,
                handles,
                device,
            )
            return (low, high), (low, high)
        if group.weights:
            first = group.points[0].tensor
            low, high = add(
                ("last value", form, _shape(first, form)),
                lambda low, high, x: [*rv.last_value([x], (low, high), form)],
                scope,
                [*handles, first],
                device,
            )
            return (low, high), (low, high)
        variables = [*handles, self._variables.learnt(group.name)]
        decay = group.decay
        if self._in_step:
            ends = add(
                ("moving average of ends", decay),
                lambda low, high, learnt, *ends: _flat(
                    rv.moving_average_of(ends, (low, high), learnt, decay)
                ),
                scope,
                [*variables, *self._merged[id(group)]],
                device,
            )
        else:
            sources = [point.tensor for point in group.sources]
            never_negative = tuple(map(rv.is_never_negative, sources))
            ends = add(
                ("moving average", form, decay, never_negative),
                lambda low, high, learnt, *xs: _flat(
                    rv.moving_average(
                        xs, (low, high), learnt, form, decay, never_negative
                    )
                ),
                scope,
                [*variables, *sources],
                device,
            )
        return (ends[0], ends[1]), (ends[2], ends[3])

    def _quantize(
        self,
        point: Point,
        name: str,
        ends: Ends | None,
        fixed: tuple[float, float] | None = None,
    ) -> None:
        """Insert the FakeQuant op of a point; equal points share a template."""
        form, tensor = point.form, point.tensor
        kind = ("quantize", form, fixed, _shape(tensor, form), self._mode.delay)
        arguments = [tensor, *(ends or ())]
        if self._steps is not None:
            arguments.append(self._steps)
        delay = self._mode.delay if self._steps is not None else 0

        def rounded(x: Tensor, *others: Tensor) -> list[Tensor]:
            if fixed is None:
                result = rv.fake_quant(x, (others[0], others[1]), form)
            else:
                result = rv.fixed_fake_quant(x, fixed, form)
            return [rv.delayed(result, x, others[-1], delay) if delay else result]

        device = self._devices[id(point)]
        (result,) = self._stencils.add(kind, rounded, name, arguments, device)
        self._results.append((point, result))


def _flat(pairs: tuple[Ends, Ends]) -> list[Tensor]:
    early, late = pairs
    return [*early, *late]


def _ends_of(
    form: Format, never_negative: tuple[bool, ...], *xs: Tensor
) -> list[Tensor]:
    return [*rv.ends_of(xs, form, never_negative)]


def _shape(tensor: Tensor, form: Any) -> Any:
    """Return the shape that ops for channels of several axes or blocks depend on."""
    by_shape = len(form.axes) > 1 or form.block is not None
    return tuple(tensor.shape.as_list()) if by_shape else None
