"""Simulated quantization of a graph or model."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import edits, replicas
from geutil.graph.edits import undone_on_error
from geutil.graph.op_types import FUSED_NORMS
from geutil.graph.resource_variables import step_counter_of
from geutil.graph.types import Graph, Operation, Tensor, is_graph, quoted, signatures_of
from geutil.quantize import insertion
from geutil.quantize.calibration.calibration import set_ranges_of_weights
from geutil.quantize.insertion import Mode
from geutil.quantize.planning import forms
from geutil.quantize.planning.int8_kernels import ACTIVATIONS
from geutil.quantize.planning.network import leave_in_float, live_simulations
from geutil.quantize.planning.plan import QuantizePlan, plan_quantization, quantized_ops
from geutil.quantize.range_variables import RangeVariables, described
from geutil.quantize.report import Quantized, QuantizeReport, Skipped
from geutil.quantize.spec import FOLD, Override, QuantizeChoices, scheme_named
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
    those of activations as moving averages (see `geutil.quantize.range_variables`).
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
    mode = Mode(
        is_training, insertion.checked_delay(quant_delay, is_training, step), step
    )
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
        set(quantized_ops(graph, results) if live_simulations(graph) else ())
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
            rewritten, stands_for = forms.lower(
                graph, plan.prelus, plan.calls, plan.forms, plan.biases
            )
            if rewritten:
                # A result may be another tensor now.
                results = {n: tensors for n, _, tensors in _places(graph_or_model)}
                new_choices = replace(choices, stands_for=stands_for)
                plan = plan_quantization(graph, results[name], new_choices)
            if len(places) > 1:
                ranges_here = described(graph, plan.groups)
                _name_apart(plan, ranges_here, described_ranges, name)
            ranges = RangeVariables(graph, variable_by_name, vars_collection)
            quantized_by_tensor = insertion.insert(graph, plan.groups, mode, ranges)
            variable_by_name.update(ranges.by_name)
            counter = step_counter_of(graph)
            steps = None if counter is None else counter.variable
            report = _report(
                plan, graph, name, choices, quantized_by_tensor, ranges.by_name, steps
            )
            reports.append(replace(report, rewritten=tuple(rewritten)))
            if not choices.weights_only and plan.groups:
                in_float = [op for op in plan.in_float if op not in done]
                leave_in_float(in_float, plan.kernels)
    if choices.weights_only and not mode.is_training and not is_graph(graph_or_model):
        # No data will tell more of them.
        for _, graph, _ in places:
            set_ranges_of_weights(graph, graph_or_model.variables)
    return _merged(reports)


def _of_scheme(name: str, choices: QuantizeChoices) -> QuantizeChoices:
    """Return choices with the bits of a scheme."""
    scheme = scheme_named(name)
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
    if is_graph(graph_or_model):
        meant = replicas.outputs_meant(graph_or_model)
        results = list(meant) or edits.results_of(graph_or_model)
        return [("", graph_or_model, results)]
    verb = "quantization is simulated in a tf.Graph or a geutil.model.Model, not in"
    return [
        (name, model.graph, list(model.outputs.values()))
        for name, model in signatures_of(graph_or_model, verb).items()
    ]


def _planned(
    graph: Graph, results: list[Tensor], choices: QuantizeChoices, mode: Mode
) -> QuantizePlan:
    if mode.is_training or not results or replicas.outputs_meant(graph):
        insertion.refuse_training_ops(graph)
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
        warnings.append(f"no op in the scope {quoted(choices.scope)} can be quantized")
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
            f"them, and cost time and accuracy; fold them before, with {FOLD}"
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
        if (op.type in FUSED_NORMS and not is_layer_norm(op))
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
