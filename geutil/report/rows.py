"""Reports of clients as tables: a line for each candidate, with its subject."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

from geutil.batchnorm import FoldReport
from geutil.gradients import Report as GradientReport
from geutil.model import BatchReport, Comparison, Inspection
from geutil.model.inference_form import StripReport
from geutil.quantize import (
    BitPlan,
    CalibrationReport,
    Int8Comparison,
    LayerNoise,
    QuantizeReport,
)
from geutil.report.page import Row, Rows
from geutil.rewrite import RewriteReport
from geutil.select.selections import with_layer
from geutil.sizes import size_text


@singledispatch
def rows_of(report: object) -> Rows:
    """Return a report as a table; of other things, the lines of their text."""
    first, *lines = str(report).splitlines() or [""]
    entries = tuple(Row("", True, line.strip()) for line in lines)
    return Rows(type(report).__name__, (first,), entries)


@rows_of.register
def _same_rows(report: Rows) -> Rows:
    return report


def _shown(entry: Any, name: str = "") -> str:
    """Return the name of an entry's op, or a given name, with its Keras layer."""
    return with_layer(entry.keras_layer, name or entry.op)


@rows_of.register
def _fold_rows(report: FoldReport) -> Rows:
    folded = []
    for entry in report.folded:
        into = f"into {entry.layer_type} {entry.layer}"
        into += ", which comes behind it" if entry.forward else ""
        names = entry.into, entry.layer, entry.norm
        folded.append(Row("folded", True, _shown(entry, entry.norm), into, names))
    refused = [
        Row("refused", False, _shown(r, r.norm), f"{r.op} {r.reason}", (r.op, r.norm))
        for r in report.refused
    ]
    # Refusals come first, as they are what a reader looks for.
    return Rows("Batch norms", _head(report), (*refused, *folded))


@rows_of.register
def _quantize_rows(report: QuantizeReport) -> Rows:
    quantized = [
        Row("quantized", True, _shown(q), f"{q.op_type}: {q}", _named(q.op, q.into))
        for q in report.quantized
    ]
    skipped = [
        Row("skipped", False, _shown(s), f"{s.op_type}: {s.reason}", (s.op,))
        for s in report.skipped
    ]
    summary = (*_head(report), *report.warnings, *report.rewritten)
    return Rows("Quantization", summary, (*skipped, *quantized))


@rows_of.register
def _strip_rows(report: StripReport) -> Rows:
    rows = tuple(
        Row(e.action, e.action != "kept", f"{e.kind} {e.name}", e.reason, (e.name,))
        for e in report.entries
    )
    return Rows("Training", _head(report), rows)


@rows_of.register
def _rewrite_rows(report: RewriteReport) -> Rows:
    done = [
        Row("rewritten", True, e.op, str(e), (*e.new_ops, *e.ops))
        for e in report.rewritten
    ]
    refused = [
        Row("refused", False, e.op, f"{e.rule}: {e.reason}", (e.op,))
        for e in report.refused
    ]
    return Rows("Rewrites", _head(report), (*refused, *done))


@rows_of.register
def _gradient_rows(report: GradientReport) -> Rows:
    rows = []
    for k in report.kept:
        detail = f"{k.op_type}, {k.bytes:,} bytes: {k.reason}"
        rows.append(Row("kept", True, _shown(k, k.name), detail))
    rows += [
        Row("recomputed", True, r.name, f"{r.op_type}, segment {r.segment}", (r.name,))
        for r in report.recomputed
    ]
    # Told apart from the peaks of timelines, which know Grappler and the updates.
    peaks = f"{size_text(report.peak)}, plain {size_text(report.plain_peak)}"
    summary = (
        f"checkpoints: {report.mode}",
        f"peak as the plan estimates it: {peaks}",
        f"under any schedule: {report.worst_cases()}",
        f"kept: {len(report.kept)} tensors, {size_text(report.kept_bytes)}",
        f"recomputed: {len(report.recomputed)} ops in {report.segments} segments",
    )
    return Rows("Checkpoints", (*summary, *report.warnings), tuple(rows))


@rows_of.register
def _calibration_rows(report: CalibrationReport) -> Rows:
    narrow = tuple(
        Row("too narrow", False, entry.input, str(entry), (entry.input, entry.op))
        for entry in report.narrow
    )
    rows = tuple(
        Row("set", True, name, report.range_text(name), (name,))
        for name in report.ranges
    )
    return Rows("Ranges", _head(report), (*narrow, *rows))


NOISE_BANDS = (
    "below 10 dB",
    "10 to 20 dB",
    "20 to 30 dB",
    "30 to 40 dB",
    "40 dB and more",
    "exact",
    "all zeros",
)
"""Signal-to-noise ratios of single layers in words, the noisiest first."""
_EXACT, _SILENT = len(NOISE_BANDS) - 2, len(NOISE_BANDS) - 1
_GOOD = 2
"""The first band that is no reason to look closer: 20 dB is a tenth of the values."""


def noise_band(layer: LayerNoise) -> int:
    """Return which of `NOISE_BANDS` holds the noise that a layer adds by itself."""
    own = layer.worst.own
    if own == math.inf:
        return _SILENT if layer.silent else _EXACT
    return int(min(max(own / 10, 0.0), _EXACT - 1))


@rows_of.register
def _inspection_rows(info: Inspection) -> Rows:
    """Return rows of a file's signatures, then of the parts that it lists."""
    rows = [
        Row(role, True, key, f"{tensor}, signature {name}")
        for name, signature in info.signatures.items()
        for role, tensors in (("in", signature.inputs), ("out", signature.outputs))
        for key, tensor in tensors.items()
    ]
    for f in info.functions:
        detail = f"{f.ops} ops, {f.inputs} -> {f.outputs}"
        rows.append(Row("function", True, f.name, detail))
    for v in info.variables:
        frozen = " (frozen)" if v.trainable is False else ""
        rows.append(Row("variable", True, v.name, f"{v.tensor}{frozen}"))
    rows += [Row("layer", True, layer.name, layer.type) for layer in info.layers]
    for outcome, ops in (("op", info.ops), ("op in functions", info.function_ops)):
        rows += [Row(outcome, True, name, str(count)) for name, count in ops.items()]
    rows += [Row("asset", True, name) for name in info.assets]
    first, *others = str(info).splitlines()
    told = [line for line in others if line.startswith(("tags: ", "size: "))]
    return Rows("Files of a model", (first, *told), tuple(rows))


@rows_of.register
def _comparison_rows(report: Comparison) -> Rows:
    rows = tuple(
        Row(
            "equal" if difference.equal else "different",
            difference.equal,
            name,
            str(difference).removeprefix(f"{difference.output}: "),
        )
        for name, difference in report.differences.items()
    )
    # Differences come first, as a reader looks for them.
    return Rows("Outputs", _head(report), tuple(sorted(rows, key=lambda r: r.good)))


def _step_rows(report: Int8Comparison) -> Rows:
    rows = []
    for output in report.outputs:
        for steps in (output, *output.parts):
            part = "" if steps is output else f", {steps.output}"
            detail = (
                f"within 1 step: {steps.share(1):.4%}, same largest: {steps.agreeing} "
                f"of {steps.clear} (step {steps.step:.4g})"
            )
            told = f"{steps.most} step(s)", steps.most <= 1
            rows.append(Row(*told, f"{output.output}{part}", detail))
    return Rows("Steps", _head(report), (*rows, *_float_rows(report)))


def _float_rows(report: Int8Comparison) -> list[Row]:
    rows = []
    for op in report.float_ops:
        noted = "though it is quantized in the model" if op in report.missed else ""
        name = op.partition(" ")[2].strip("'")
        rows.append(Row("float", not noted, op, noted, (name,)))
    return rows


@rows_of.register
def _noise_rows(report: Int8Comparison) -> Rows:
    if not report.layers:
        return _step_rows(report)
    # The noisiest come first, as they are what a reader looks for.
    ordered = sorted(report.layers, key=lambda layer: layer.worst.own)
    rows = []
    for layer in ordered:
        band, names = noise_band(layer), (layer.op, layer.tensor.rpartition(":")[0])
        told = NOISE_BANDS[band], band >= _GOOD
        rows.append(Row(*told, _shown(layer), f"{layer.op_type}: {layer}", names))
    summary = [*_head(report)]
    summary += [f"{o.output}: {o.most} step(s) apart at most" for o in report.outputs]
    summary += [
        line.partition(", marked")[0]
        for line in str(report).splitlines()
        if "layer(s)" in line
    ]
    return Rows("Noise of layers", tuple(summary), (*rows, *_float_rows(report)))


@rows_of.register
def _bit_rows(plan: BitPlan) -> Rows:
    left = [Row("float", False, op, reason, (op,)) for op, reason in plan.left]
    chosen = []
    for layer in plan.layers:
        detail, ops = f"{layer.op_type}: {layer.size:,} bytes", layer.ops
        chosen.append(Row(f"{layer.bits} bits", True, ", ".join(ops), detail, ops))
    summary = str(plan).splitlines()[:3]
    return Rows("Bits", tuple(map(str.strip, summary)), (*left, *chosen))


@rows_of.register
def _batch_rows(report: BatchReport) -> Rows:
    rows = [Row(e.action, e.is_done, e.name, str(e)) for e in report.entries]
    # Jobs that are not done come first, as a reader looks for them.
    summary = (*_head(report), *report.notes)
    return Rows("Models", summary, tuple(sorted(rows, key=lambda row: row.good)))


def _head(report: object) -> tuple[str, ...]:
    return (str(report).splitlines()[0],)


def _named(op: str, tensor: str) -> tuple[str, ...]:
    """Return the op that stores a result, if there is one, and the op itself."""
    stored = tensor.rpartition(":")[0]
    return (stored, op) if stored else (op,)
