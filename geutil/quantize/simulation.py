"""Simulated quantization of a graph or model: FakeQuant ops, inserted by a plan."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import (
    adjacency,
    creation,
    edits,
    op_types,
    replicas,
    state,
    types,
)
from geutil.graph.creation import Later, Stencils
from geutil.graph.edits import Liveness, undone_on_error
from geutil.graph.resource_variables import step_counter, step_counter_of
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize import fake_quants, spec
from geutil.quantize.calibration.calibration import set_ranges_of_weights
from geutil.quantize.fake_quants import Pair, Point, RangeGroup, RangeVariables
from geutil.quantize.planning import lowering, network
from geutil.quantize.planning.int8_kernels import ACTIVATIONS
from geutil.quantize.planning.network import Edge
from geutil.quantize.planning.plan import QuantizePlan, plan_quantization, quantized_ops
from geutil.quantize.report import Quantized, QuantizeReport, Skipped
from geutil.quantize.spec import Format, Mode, Override, QuantizeChoices, Range
from geutil.select import selections
from geutil.select.networks.batch_norms import is_layer_norm
from geutil.select.networks.layers import Origins

_logger = logging.getLogger("geutil")
_DEFAULT_BITS = 8  # those of the arguments of `quantize`


@tf.autograph.experimental.do_not_convert
def quantize(
    graph_or_model: Any,
    *,
    scheme: str | None = None,
    is_training: bool = True,
    weight_bits: int = 8,
    activation_bits: int = 8,
    symmetric_weights: bool = True,
    per_channel: bool = True,
    ema_decay: float = 0.999,
    quant_delay: int | None = None,
    step: Any = None,
    vars_collection: str | None = None,
    variables: Mapping[str, Any] | None = None,
    scope: Any = None,
    overrides: Mapping[Any, Override] | None = None,
    activations: Iterable[str] = tuple(sorted(ACTIVATIONS)),
    strict: bool = False,
    outputs: Any = (),
) -> QuantizeReport:
    """Simulate the quantization of a network: insert FakeQuant ops, in place.

    A FakeQuant op rounds a tensor to the values that a few bits can store, but keeps it
    in float32; so the graph gives the results of TFLite's integer kernels, and can be
    trained (Jacob et al. 2018, arXiv 1712.05877). Weights, activations, inputs and
    results are quantized, but not tensors between ops that TFLite fuses, such as a
    convolution, its bias and its Relu. The inputs and the result of a concat share one
    range. Fold batch norms first: `geutil.batchnorm.fold_batch_norms`. Dropout and
    noise in training mode forward rounded values, as at inference, where
    `Model.strip_training()` removes them.

    In training, ranges are learnt in every step: those of weights from the last values,
    those of activations as moving averages (see `geutil.quantize.fake_quants`).
    Otherwise they are read from variables that a checkpoint or `calibrate` sets; those
    of weights start with the range of the weights, if it is known.

    Args:
        graph_or_model: a graph, or a `geutil.model.Model` with its signatures.
        scheme: the name of a scheme, instead of `weight_bits` and `activation_bits`:
            "int8", "int8x4" (weights of 4 bits), "int16x8" (activations of 16),
            "weight_only_int8", "weight_only_int4", "dynamic_range" or
            "dynamic_range_int4" (only weights); see `geutil.quantize.to_tflite`.
        is_training: whether to learn the ranges, before gradients are built.
        weight_bits: bits of the weights of layers, 2 to 16. Parameters of other ops
            have at least 8, unless an override requests less.
        activation_bits: bits of activations, 2 to 16. Ranges of 16 bits are symmetric,
            since TFLite's kernels for them have no zero point.
        symmetric_weights: whether ranges of weights are symmetric and narrow, as TFLite
            requires.
        per_channel: whether each output channel has its own range: in the weights of
            convolutions, and in symmetric matrices of 8 bits that are not transposed.
            Other layers have one range, since TFLite's converter fails otherwise.
            TensorFlow 2.16 stores one range for a matrix.
        ema_decay: the decay of an activation's range in a training step. The average is
            of the steps only: the initial range does not enter it.
        quant_delay: the training step, counted from 1, from which on values are
            rounded; ranges are also learnt before. An int64 variable
            `fake_quantization_step` counts the steps. None or 0 starts at once, without
            a counter.
        step: the int64 variable that counts, for functions that are traced more than
            once; None creates one.
        vars_collection: a collection of a v1 graph to add the variables of the ranges
            to, besides `GLOBAL_VARIABLES`.
        variables: variables of ranges by name, from the report of another call, to
            share between traces of one function, or replicas. Towers of one graph have
            their own names, which must be the keys. Each tower or replica updates them
            in a step.
        scope: the name scope, or Keras layer (the layer, its name or path), whose ops
            to quantize; None is all.
        overrides: a mapping from ops, Keras layers or their names, or regular
            expressions searched in the names of ops, to a `Spec`, or to "skip", which
            leaves them in float, in a file too. A string that names a layer is not a
            regular expression. The first match counts. A `Spec` must be possible for at
            least one of its ops.
        activations: the names of the activation functions to quantize.
        strict: whether to raise if an op with an int8 kernel in TFLite is not
            quantized.
        outputs: tensors of a graph that also has other networks, or gradients of
            others: only their ancestors are quantized. None is all; in a replica of
            `tf.distribute`, those of that replica.

    Returns:
        Every op that computes with data: quantized and how, or not and why. Its
        `tensor` returns the tensor to fetch, or return, instead of another one.

    Raises:
        ArgumentTypeError: an argument is of another type.
        QuantizeError: a number is out of range, an override matches no op or cannot be
            applied, the graph holds gradients or optimizer ops, or, with `outputs`,
            gradients that read their ancestors, or, with `strict`, the coverage is
            below 1; nothing is changed.
        SelectionError: an output belongs to another graph.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.quantize import quantize
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 3], "x")
        ...     y = tf.nn.conv2d(x, tf.ones([1, 1, 3, 2]), 1, "SAME", name="conv")
        ...     z = tf.nn.relu(y, name="relu")
        >>> report = quantize(graph, is_training=False)
        >>> print(report)
        3 op(s) quantized, 0 skipped, coverage 1.000
        quantized:
          x (Placeholder): result 8 bits (x/input_quant)
          conv (Conv2D): weights 8 bits, symmetric, per channel (conv/weights_quant); \
result 8 bits (conv/act_quant)
          relu (Relu): part of 'conv'
        >>> list(report.variables)[:2]
        ['conv/weights_quant/min', 'conv/weights_quant/max']
    """
    choices = QuantizeChoices(
        weight_bits,
        activation_bits,
        symmetric_weights,
        per_channel,
        ema_decay,
        selections.scopes_meant(
            [graph for _, graph, _ in _places(graph_or_model)], scope
        ),
        dict(overrides or {}),
        frozenset(activations),
    )
    if scheme is not None:
        choices = _of_scheme(scheme, choices)
    mode = Mode(is_training, spec.checked_delay(quant_delay, is_training, step), step)
    with selections.outputs_meant(graph_or_model, outputs):
        return quantize_by(
            graph_or_model, choices, mode, variables, vars_collection, strict=strict
        )


def quantize_by(
    graph_or_model: Any,
    choices: QuantizeChoices,
    mode: Mode,
    variables: Mapping[str, Any] | None = None,
    vars_collection: str | None = None,
    *,
    strict: bool = False,
) -> QuantizeReport:
    """Quantize all signatures by choices; see `quantize`."""
    variable_by_name = dict(variables or {})
    reports = []
    places = _places(graph_or_model)
    plans = [_planned(graph, results, choices, mode) for _, graph, results in places]
    earlier = [
        set(quantized_ops(graph, results) if network.live_simulations(graph) else ())
        for _, graph, results in places
    ]
    if strict:
        _check_whole(
            _merged(
                [
                    _report(plan, graph, name, choices)
                    for (name, graph, _), plan in zip(places, plans, strict=True)
                ]
            )
        )
    described_ranges: dict[str, Hashable] = {}
    with ExitStack() as stack:
        for _, graph, _ in places:
            stack.enter_context(undone_on_error(graph))
        for (name, graph, _), plan, done in zip(places, plans, earlier, strict=True):
            rewritten, stands_for = lowering.lower(
                graph, plan.prelus, plan.calls, plan.forms, plan.biases
            )
            if rewritten:
                # A result may be another tensor now.
                results = {n: tensors for n, _, tensors in _places(graph_or_model)}
                new_choices = replace(choices, stands_for=stands_for)
                plan = plan_quantization(graph, results[name], new_choices)
            if len(places) > 1:
                ranges_here = fake_quants.described(graph, plan.groups)
                _name_apart(plan, ranges_here, described_ranges, name)
            ranges = RangeVariables(graph, variable_by_name, vars_collection)
            quantized_by_tensor = insert(graph, plan.groups, mode, ranges)
            variable_by_name.update(ranges.by_name)
            counter = step_counter_of(graph)
            steps = None if counter is None else counter.variable
            report = _report(
                plan, graph, name, choices, quantized_by_tensor, ranges.by_name, steps
            )
            reports.append(replace(report, rewritten=tuple(rewritten)))
            if not choices.weights_only and plan.groups:
                in_float = [op for op in plan.in_float if op not in done]
                network.leave_in_float(in_float, plan.kernels)
    if (
        choices.weights_only
        and not mode.is_training
        and not types.is_graph(graph_or_model)
    ):
        # No data will tell more of them.
        for _, graph, _ in places:
            set_ranges_of_weights(graph, graph_or_model.variables)
    return _merged(reports)


def _of_scheme(name: str, choices: QuantizeChoices) -> QuantizeChoices:
    """Return choices with the bits of a scheme."""
    scheme = spec.scheme_named(name)
    if scheme.is_float:
        call = Words(f"geutil.quantize.to_tflite(model, scheme='{name}')", name)
        raise QuantizeError(
            f"the scheme '{name}' quantizes nothing",
            remedy=f"convert the model as it is, with {call}",
        )
    for argument, bits in (
        ("weight_bits", choices.weight_bits),
        ("activation_bits", choices.activation_bits),
    ):
        if bits != _DEFAULT_BITS:
            raise QuantizeError(
                f"the scheme '{name}' says how many bits there are, and {argument}="
                f"{bits} is given, too; pass one of them, or overrides for single ops"
            )
    return replace(
        choices,
        weight_bits=scheme.weight_bits,
        activation_bits=scheme.activation_bits or _DEFAULT_BITS,
        depthwise_bits=scheme.depthwise_bits,
        weights_only=scheme.weights_only,
        block=scheme.block,
        fewest_weights=scheme.fewest_weights,
    )


def _name_apart(
    plan: QuantizePlan,
    ranges: Mapping[str, Hashable],
    earlier: dict[str, Hashable],
    signature: str,
) -> None:
    """Give ranges names of their own where another signature's mean something else."""
    # Signatures of one network share theirs: what calibrates one calibrates all. Others
    # may have ops of the same names.
    if any(earlier.get(name, meant) != meant for name, meant in ranges.items()):
        for group in plan.groups:
            group.name = f"{signature}/{group.name}"
    else:
        earlier.update(ranges)


def _places(graph_or_model: Any) -> list[tuple[str, Graph, list[Tensor]]]:
    """Return the graphs of a model by signature, with their results."""
    if types.is_graph(graph_or_model):
        meant = replicas.outputs_meant(graph_or_model)
        results = list(meant) or edits.results_of(graph_or_model)
        return [("", graph_or_model, results)]
    verb = "quantization is simulated in a tf.Graph or a geutil.model.Model, not in"
    return [
        (name, model.graph, list(model.outputs.values()))
        for name, model in types.signatures_of(graph_or_model, verb).items()
    ]


def _planned(
    graph: Graph, results: list[Tensor], choices: QuantizeChoices, mode: Mode
) -> QuantizePlan:
    if mode.is_training or not results or replicas.outputs_meant(graph):
        network.refuse_training_ops(graph)
    return plan_quantization(graph, results, choices)


def _check_whole(report: QuantizeReport) -> None:
    missed = [entry for entry in report.skipped if entry.has_kernel]
    if missed:
        lines = "\n".join(f"  {e.op} ({e.op_type}): {e.reason}" for e in missed)
        raise QuantizeError(
            f"{len(missed)} op(s) with int8 kernels would not be quantized; nothing "
            f"was changed:\n{lines}"
        )


def _report(
    plan: QuantizePlan,
    graph: Graph,
    signature: str,
    choices: QuantizeChoices,
    quantized_by_tensor: Mapping[Tensor, Tensor] | None = None,
    variables: Mapping[str, Any] | None = None,
    step: Any = None,
) -> QuantizeReport:
    """Return the report of a plan, and log its warnings."""
    quantized = [
        _entry(op, kernel, plan, signature, quantized_by_tensor or {})
        for op, kernel in plan.kernels.items()
    ]
    skipped = [
        Skipped(s.op.name, s.op.type, s.reason, s.has_kernel, signature)
        for s in plan.skips.values()
    ]
    warnings = []
    if choices.scope and not quantized:
        warnings.append(
            f"no op in the scope {types.quoted(choices.scope)} can be quantized"
        )
    elif plan.unfed and not quantized and not skipped:
        first = plan.unfed[0]
        warnings.append(
            f"no op computes with data: '{first.name}' ({first.type}) reads constants "
            "and variables only; feed the network through a placeholder"
        )
    if plan.refused:
        first = plan.refused[0]
        warnings.append(
            f"{len(plan.refused)} op(s) have no kernel in TFLite, '{first.name}' "
            f"({first.type}) among them; to_int8() and to_tflite() will refuse it"
        )
    norms = _norms(plan, choices)
    if norms:
        warnings.append(
            f"{len(norms)} batch norm(s) are still there, '{norms[0].name}' among "
            f"them, and cost time and accuracy; fold them before, with {spec.FOLD}"
        )
    for warning in warnings:
        _logger.warning("quantize: %s", warning)
    layers = selections.LayerNames(graph)
    return QuantizeReport(
        tuple(layers.noted(quantized)),
        tuple(layers.noted(skipped)),
        tuple(warnings),
        variables or {},
        step,
    )


def _norms(plan: QuantizePlan, choices: QuantizeChoices) -> list[Operation]:
    """Return an op of each batch norm: it scales data by the root of a variance."""
    ops = [op for op in (*plan.kernels, *plan.skips) if choices.in_scope(op)]
    if not ops:
        return []
    origins = Origins(ops[0].graph)
    return [
        op
        for op in ops
        if (op.type in op_types.FUSED_NORMS and not is_layer_norm(op))
        or (
            op.type in ("Mul", "RealDiv")
            and any(origins.is_parameter(t) and origins.spreads(t) for t in op.inputs)
        )
    ]


def _entry(
    op: Operation,
    kernel: Operation,
    plan: QuantizePlan,
    signature: str,
    quantized_by_tensor: Mapping[Tensor, Tensor],
) -> Quantized:
    """Return the entry of an op: the formats and ranges of its weights and result."""
    weights, result = plan.weights.get(op), plan.results.get(op)
    return Quantized(
        op.name,
        op.type,
        kernel.name,
        weights.form if weights else None,
        weights.group.name if weights else "",
        result.form if result else None,
        result.group.name if result and not result.group.fixed else "",
        signature,
        quantized_by_tensor[result.tensor].name
        if result and quantized_by_tensor
        else "",
        plan.notes.get(op, ""),
    )


def _merged(reports: list[QuantizeReport]) -> QuantizeReport:
    return QuantizeReport(
        tuple(entry for report in reports for entry in report.quantized),
        tuple(entry for report in reports for entry in report.skipped),
        tuple(warning for report in reports for warning in report.warnings),
        {name: v for report in reports for name, v in report.variables.items()},
        next((r.step for r in reports if r.step is not None), None),
        tuple(line for report in reports for line in report.rewritten),
    )


def insert(
    graph: Graph, groups: list[RangeGroup], mode: Mode, variables: RangeVariables
) -> MutableIdentityMap[Tensor]:
    """Quantize the tensors of ranges."""
    # Returns for each tensor what it is quantized to.
    if not groups:
        return MutableIdentityMap()
    network.refuse_mesh(graph)
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
            variables.check(group.name, fake_quants.shape_of(group))
    devices = {id(p): _device(p, edges[id(p)]) for g in groups for p in g.points}
    builder = _Builder(graph, mode, variables, devices)
    builder.make_variables(groups)
    builder.merge(groups)
    for group in groups:
        builder.add(group)
    quantized = builder.make()
    input_edits = [
        edits.InputEdit(edge.op, edge.slot, quantized[point.tensor])
        for group in groups
        for point in group.points
        for edge in edges[id(point)]
    ]
    # The new ops come last, and belong between those that are there.
    state.renew_order(graph)
    edits.apply_edits(graph, input_edits)
    if builder.exchanges:
        edits.order_exchanges(graph)
    everywhere: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (point.tensor, quantized[point.tensor])
        for group in groups
        for point in group.points
        if point.readers is None
    )
    edits.set_results(graph, [everywhere.get(t, t) for t in edits.results_of(graph)])
    return quantized


def _name_as_first(groups: list[RangeGroup]) -> None:
    """Give the ranges of a replica the names, and so the variables, of the first's."""

    def check(every: list[list[tuple[str, Any]]]) -> None:
        for others in every[1:]:
            # One variable is for ranges at the same place of the list, in any replica.
            kinds = [[kind for _, kind in listed] for listed in (every[0], others)]
            if kinds[0] != kinds[1]:
                raise QuantizeError(
                    f"the replicas have other ranges to learn: {len(every[0])} in the "
                    f"first, {len(others)} in another, or of other formats; quantize "
                    "the same network with the same arguments in each"
                )

    own = [
        (g.name, (g.form, fake_quants.shape_of(g), g.weights, g.fixed)) for g in groups
    ]
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
        self._values = fake_quants.KnownValues(graph)
        self._stencils = Stencils(graph)
        self._results: list[tuple[Point, Later]] = []
        # Ops of an imported graph leave their scopes free in TensorFlow's books.
        self._scopes = types.scopes_in_use(graph)
        self._in_step = mode.is_training and replicas.in_several()
        self.exchanges = False
        # By the ids of ranges: their ends in this step, over all replicas.
        self._merged: dict[int, Pair] = {}
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
                fake_quants.NewRange(
                    g.name,
                    fake_quants.shape_of(g),
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
            never_negative = tuple(map(fake_quants.is_never_negative, sources))
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
                return fake_quants.range_of(value, group.form)
        return Range(*group.initial)

    def _ends(self, group: RangeGroup, name: str, handles: Pair) -> tuple[Pair, Pair]:
        """Return the range for all points of it but the last, and for the last."""
        form = group.form
        scope = f"{name}/range"
        device = self._devices[id(group.points[0])]
        add = self._stencils.add
        if not self._mode.is_training:
            low, high = add(
                "read",
                lambda low, high: [*fake_quants.read((low, high))],
                scope,
                handles,
                device,
            )
            return (low, high), (low, high)
        if group.weights:
            first = group.points[0].tensor
            low, high = add(
                ("last value", form, _shape(first, form)),
                lambda low, high, x: [
                    *fake_quants.assign((low, high), fake_quants.ends_of([x], form))
                ],
                scope,
                [*handles, first],
                device,
            )
            return (low, high), (low, high)
        variables = [*handles, self._variables.learnt(group.name)]
        decay = group.decay
        in_step = self._in_step
        never_negative: tuple[bool, ...] = ()
        if in_step:
            sources = [*self._merged[id(group)]]
        else:
            sources = [point.tensor for point in group.sources]
            never_negative = tuple(map(fake_quants.is_never_negative, sources))

        def moved(low: Tensor, high: Tensor, learnt: Any, *xs: Tensor) -> list[Tensor]:
            batch = xs if in_step else fake_quants.ends_of(xs, form, never_negative)
            ends = fake_quants.moving_average(batch, (low, high), learnt, decay)
            return [end for pair in ends for end in pair]

        kind = ("moving average", in_step, form, decay, never_negative)
        ends = add(kind, moved, scope, [*variables, *sources], device)
        return (ends[0], ends[1]), (ends[2], ends[3])

    def _quantize(
        self,
        point: Point,
        name: str,
        ends: Pair | None,
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
                result = fake_quants.fake_quant(x, (others[0], others[1]), form)
            else:
                result = fake_quants.fixed_fake_quant(x, fixed, form)
            return [
                fake_quants.delayed(result, x, others[-1], delay) if delay else result
            ]

        device = self._devices[id(point)]
        (result,) = self._stencils.add(kind, rounded, name, arguments, device)
        self._results.append((point, result))


def _ends_of(
    form: Format, never_negative: tuple[bool, ...], *xs: Tensor
) -> list[Tensor]:
    return [*fake_quants.ends_of(xs, form, never_negative)]


def _shape(tensor: Tensor, form: Any) -> Any:
    """Return the shape that ops for channels of several axes or blocks depend on."""
    by_shape = len(form.axes) > 1 or form.block is not None
    return tuple(tensor.shape.as_list()) if by_shape else None
