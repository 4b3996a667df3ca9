"""The pages that people look at, and the display of each object in a notebook.

The page of memory shows timelines, and its answers at first sight. That of a plan of
bits shows the curve of size against noise, drawn as SVG here, and a table of layers: it
needs no script.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from geutil.errors import ArgumentTypeError, ReportError
from geutil.gradients import PlanCurve
from geutil.gradients import Report as GradientReport
from geutil.graph.types import type_name
from geutil.memory import (
    LiveTensor,
    Measurement,
    Timeline,
    TimelineComparison,
    compare,
    program,
)
from geutil.model import Model
from geutil.quantize import BitPlan, Int8Comparison, LayerBits
from geutil.quantize.bit_plans import decibels
from geutil.report.differences import compared, graph_and_file
from geutil.report.graphs import add_noise, sides_of, subject_of
from geutil.report.page import Page, Row, payload_of
from geutil.report.rows import rows_of
from geutil.report.stage_pairs import pipeline_data, stages_of
from geutil.report.tflite_differences import (
    difference_of_file,
    file_rows,
    page_data,
    swapped,
)
from geutil.report.tflite_nodes import FileSubject, page_of_file
from geutil.select.subgraph import SubGraphView
from geutil.version import __version__


def view(subject: Any, *, title: str | None = None, report: object = None) -> Page:
    """Draw a graph by its name scopes, as an interactive page.

    Scopes are collapsed at first, and expand in place. Ops can be searched by name,
    type and regular expression, and show their attributes, shapes, device and
    consumers. The functions that a model's graph calls are drawn as well.

    Args:
        subject: a `Model`, a `tf.Graph`, a `SubGraphView`, a `ConcreteFunction`, or the
            path or bytes of a TFLite file, whose ops are coloured by the type that they
            compute in; its subgraphs are drawn like functions.
        title: the title of the page.
        report: the report of `fold_batch_norms`, `quantize`, `strip_training` or
            `rewrite`: its lines are listed and link to their ops. A result of
            `compare_int8` with `layers=True` also colours ops by the noise that each of
            them adds. With a `Timeline` of `geutil.memory.predict`, a slider moves
            through the step, and ops whose results are in memory are highlighted by
            their bytes.

    Returns:
        The page, to `save`; a notebook shows it.

    Raises:
        ArgumentTypeError: `subject` has no graph.
        ReportError: the timeline belongs to another graph, or has no lifetimes.
        ModelError: it is a TFLite file that cannot be read or is damaged.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import report
        >>> with tf.Graph().as_default() as graph:
        ...     y = tf.nn.relu(tf.ones([2, 3]), name="layer/relu")
        >>> report.view(graph, title="a layer").title
        'a layer'
    """
    drawn = subject_of(subject)
    heading = f"{drawn.label}" if title is None else title
    if isinstance(report, Timeline):
        graphs = drawn.data()
        lives = _lifetimes_data(graphs[0], report)
        payload = _payload("view", heading, graphs, None)
        return Page(heading, {**payload, "lives": lives})
    if isinstance(drawn, FileSubject) and report is None:
        return page_of_file(drawn, heading)
    return _graph_page("view", heading, drawn.data(), report, sides=1)


def diff(
    before: Any,
    after: Any,
    *,
    title: str | None = None,
    labels: Sequence[str] = ("before", "after"),
    report: object = None,
) -> Page:
    """Draw two graphs side by side, with their differences coloured.

    The differences are ops that were added, removed or rewired, or whose attributes
    changed. Ops are identified by their names, as in `difference`. For models, the
    functions that their graphs call are compared as well. For a graph and the TFLite
    file that it was converted to, each op of the file is shown beside the op, or the
    fused ops, that it computes.

    Args:
        before: a subject as for `view`.
        after: the same for the second graph.
        title: the title of the page.
        labels: the titles of the two.
        report: the report of the function that made the change; see `view`.

    Returns:
        The page, to `save`; a notebook shows it.

    Raises:
        ArgumentTypeError: one of the two has no graph.
        ModelError: one is a TFLite file that cannot be read or is damaged.

    Cost: linear in ops and edges.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model, report
        >>> @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
        ... def f(x):
        ...     return {"y": tf.nn.relu6(x)}
        >>> m = model.open(f)
        >>> page = report.diff(m, m.replace_op("Relu6", "Relu"))
        >>> page.title
        'before and after'
    """
    sides = sides_of(before, after, labels)
    heading = f"{labels[0]} and {labels[1]}" if title is None else title
    graph, file = graph_and_file(*sides)
    if graph is not None and file is not None:
        graphs = page_data(graph, file)
        # The graph was put first; the caller's order is another.
        if graph is not sides[0]:
            graphs = swapped(graphs)
        if report is None:
            report = file_rows(difference_of_file(graph, file))
    else:
        graphs = compared(*sides)
    return _graph_page("diff", heading, graphs, report, sides=2)


def pipeline(
    stages: object, *, title: str | None = None, noise: Int8Comparison | None = None
) -> Page:
    """Draw the stages of a pipeline, such as original, folded, quantized and file.

    A strip lists each stage with its ops, its bytes and its changes from the previous
    stage. Two stages are shown side by side as by `diff`: neighbours at first, any two
    on request; keys step through the pipeline, and a selected op stays selected if the
    next stage has it. Ops are identified by their names; those of a TFLite file by the
    ops that they compute, and named after the nearest graph.

    Args:
        stages: subjects as for `view`, by name and in order: a mapping, or pairs.
        title: the title of the page; by default the names of the first and the last.
        noise: the result of `compare_int8` with `layers=True`: it is listed, and
            colours the ops of the last quantized graph and of the last quantized file
            by the noise that each of them adds.

    Returns:
        The page, to `save`; a notebook shows it. It contains each graph once, and the
        changes of each op for each pair of stages.

    Raises:
        ArgumentTypeError: `stages` is neither a mapping nor pairs, or a stage has no
            graph; `noise` is not a comparison.
        ReportError: there are fewer than two stages, or two of one name; `noise` has no
            layers, or matches no stage.
        ModelError: a stage is a TFLite file that cannot be read or is damaged.

    Cost: linear in ops and edges, times the number of stages.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model, report
        >>> @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
        ... def f(x):
        ...     return {"y": tf.nn.relu6(x)}
        >>> first = model.open(f)
        >>> second = first.replace_op("Relu6", "Relu")
        >>> report.pipeline({"relu6": first, "relu": second}).title
        'relu6 to relu'
    """
    named = stages_of(stages)
    heading = f"{named[0].label} to {named[-1].label}" if title is None else title
    graphs, told = pipeline_data(named, noise)
    payload = _payload("pipeline", heading, graphs, noise)
    return Page(heading, {**payload, "pipeline": told})


def memory(
    plain: Any,
    saving: Any = None,
    *,
    title: str | None = None,
    report: object = None,
    curve: object = None,
) -> Page:
    """Draw the memory of a step, op by op, or of two steps in one chart.

    The top shows the peak, when it occurs, the layers that hold most of it, and advice.
    The x axis is the estimated time of the ops, or on request their index; shapes,
    constants and control ops take no time. Below are the order of execution (forward,
    recompute, backward, update, bookkeeping), and the tensors that are alive at each
    peak. The phases follow from the name scopes in which TensorFlow and geutil create
    gradients.

    Args:
        plain: a `Timeline`, a `Measurement` that has one, or a `TimelineComparison`.
        saving: the same for a changed step, such as one with checkpoints.
        title: the title of the page.
        report: the result of `geutil.gradients.explain` or `last_report`.
        curve: the result of `geutil.gradients.plan_curve`, drawn below with the
            recomputation of each plan. The point with the budget of `report` is marked.

    Returns:
        The page, to `save`; a notebook shows it.

    Raises:
        ArgumentTypeError: one is neither a timeline nor a measurement, or `curve` is
            not a curve.
        MeasurementError: a measurement has no timeline, as under XLA.

    Cost: linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import memory, report
        >>> with tf.Graph().as_default() as graph:
        ...     y = tf.tanh(tf.random.normal([8, 8]))
        >>> report.memory(memory.predict([y])).title
        'memory'
    """
    names = ("plain", "checkpoints")
    if isinstance(plain, TimelineComparison):
        names = ("before", "after")
        plain, saving = plain.before, plain.after
    timelines = _timelines(plain, saving)
    labelled = [("step", timelines[0])]
    if len(timelines) > 1:
        labelled = list(zip(names, timelines, strict=True))
    payload = _payload("memory", "memory" if title is None else title, [], report)
    payload["memory"] = {
        "timelines": [_timeline_data(name, timeline) for name, timeline in labelled],
        "phaseNames": _PHASES,
        "answers": _answers_of(labelled, report, curve),
    }
    if curve is not None:
        payload["memory"]["curve"] = _curve_data(curve, report)
    return Page(payload["title"], payload)


def _timelines(plain: object, saving: object) -> list[Timeline]:
    for side in (plain, saving):
        if not isinstance(side, Timeline | Measurement | None):
            raise ArgumentTypeError(
                f"expected a Timeline or a Measurement, got {type_name(side)}; "
                "geutil.memory.predict and measure make them"
            )
    both = compare(plain, plain if saving is None else saving)  # type: ignore[arg-type]
    return [both.before] if saving is None else [both.before, both.after]


def _graph_page(
    kind: str, title: str, graphs: list[dict[str, Any]], report: object, *, sides: int
) -> Page:
    if isinstance(report, Int8Comparison) and report.layers:
        # Names in the bodies of functions, which come behind, may be those of others.
        for graph in graphs[:sides]:
            add_noise(graph, report)
    return Page(title, _payload(kind, title, graphs, report))


def _payload(
    kind: str, title: str, graphs: list[dict[str, Any]], report: object
) -> dict[str, Any]:
    rows = None if report is None else rows_of(report)
    return payload_of(kind, title, graphs, rows)


_SHOWN = 200
"""Rows of a table; the object has all of them."""
_COLOURS = {True: "#00734f", False: "#b34700"}
_SCROLLING = "max-height:420px;overflow:auto"


def html_of(value: object) -> str:
    """Return the HTML that a notebook shows of a value.

    Graphs and timelines are pages in a frame, reports are tables.

    Example:
        >>> from geutil.batchnorm import FoldReport
        >>> "0 of 0 batch norm(s) folded" in html_of(FoldReport((), ()))
        True
    """
    try:
        if isinstance(value, Model | SubGraphView):
            return view(value)._repr_html_()
        if isinstance(value, Timeline | TimelineComparison):
            return memory(value)._repr_html_()
    except ReportError as error:
        return _text(f"{value!r}\n({error})")
    return _table(value)


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _table(report: object) -> str:
    rows = rows_of(report)
    summary = "".join(f"<div>{html.escape(line)}</div>" for line in rows.summary)
    body = "".join(map(_row, rows.rows[:_SHOWN]))
    rest = len(rows.rows) - _SHOWN
    more = f"<div>and {rest} more, which the object has</div>" if rest > 0 else ""
    title = html.escape(rows.title)
    return (
        f"<div><b>{title}</b>{summary}"
        f'<div style="{_SCROLLING}"><table>{body}</table></div>{more}</div>'
    )


def _row(row: Row) -> str:
    outcome = f'<td style="color:{_COLOURS[row.good]}">{html.escape(row.outcome)}</td>'
    cells = (html.escape(text) for text in (row.what, row.detail))
    return f"<tr>{outcome}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


_PHASES = (*program.PHASES, "other")


def _timeline_data(label: str, timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as the viewer takes it."""
    return {
        "label": label,
        "source": timeline.source,
        "ops": [moment.op for moment in timeline.moments],
        "bytes": [moment.bytes for moment in timeline.moments],
        "times": [moment.time for moment in timeline.moments],
        "phases": [
            _PHASES.index(moment.phase or "other") for moment in timeline.moments
        ],
        "held": [
            {"name": t.name, "type": t.op_type, "bytes": t.bytes}
            for t in timeline.at_peak
        ],
        "variables": timeline.variable_bytes,
        "constants": timeline.constant_bytes,
    }


def _lifetimes_data(graph: Mapping[str, Any], timeline: Timeline) -> dict[str, Any]:
    """Return when which op's results are held, as the viewer takes it."""
    if not timeline.lifetimes:
        raise ReportError(
            "the timeline does not know when each tensor is held; "
            "geutil.memory.predict makes one that does"
        )
    places = {name: place for place, name in enumerate(graph["names"])}
    makers = [places.get(life.op, -1) for life in timeline.lifetimes]
    if max(makers) < 0:
        raise ReportError(
            "no op whose result is held is in the graph: pass a timeline of this graph"
        )
    lives = timeline.lifetimes
    return {
        "timeline": _timeline_data("step", timeline),
        "phaseNames": _PHASES,
        "steps": [places.get(moment.op, -1) for moment in timeline.moments],
        "names": [life.tensor.name for life in lives],
        "ops": makers,
        "bytes": [life.tensor.bytes for life in lives],
        "first": [life.first for life in lives],
        "last": [life.last for life in lives],
    }


_TYPES = 4
"""How many types of recomputed ops are named, the most frequent ones."""


def _curve_data(curve: object, report: object) -> dict[str, Any]:
    """Return a curve of plans as the viewer takes it."""
    if not isinstance(curve, PlanCurve):
        raise ArgumentTypeError(
            f"expected a PlanCurve, got {type_name(curve)}; "
            "geutil.gradients.plan_curve makes them"
        )
    chosen = getattr(report, "budget", None)
    return {
        "plain": curve.plain_peak,
        "ordered": curve.ordered_peak,
        "plans": [
            {
                "budget": plan.budget,
                "peak": plan.peak,
                "extraTime": plan.extra_time,
                "bound": plan.bound,
                "again": sum(map(len, plan.bursts)),
                "types": plan.types[:_TYPES],
                "loops": plan.looping,
                "chosen": plan.budget == chosen,
            }
            for plan in curve.plans
        ],
        "unmet": list(curve.unmet),
    }


_UNITS = (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1))
"""Units, their bytes, and decimals, as `bytesText` in web/src/dom.ts has them."""


def _size(count: int) -> str:
    """Return bytes in words, as the rest of the page shows them."""
    for unit, size, decimals in _UNITS:
        if count >= size:
            return f"{count / size:.{decimals}f} {unit}"
    return f"{count} B"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_Labelled = Sequence[tuple[str, Timeline]]
"""Timelines with their labels."""

_NAMED = 3
"""The layers that are named of each step."""
_MUCH = 0.25
"""A part of the peak that is worth an advice: without it a quarter less is held."""
_GRADIENT = re.compile(r"^.*(?:^|/)(?:recomputed|gradients|gradient_tape)(?:_\d+)?/")
"""The scopes that TensorFlow and geutil put before the name of a forward op."""


def _answers_of(timelines: _Labelled, report: object, curve: object) -> dict[str, Any]:
    """Return the answers that a memory page gives at first sight, as lines of text."""
    return {
        "Peak": _peak_lines(timelines),
        "Moment": [_moment_line(label, line) for label, line in timelines],
        "Layers": [_layers_line(label, line) for label, line in timelines],
        "Advice": _advice(timelines, report, curve),
    }


def _peak_lines(timelines: _Labelled) -> list[str]:
    first, last = timelines[0][1], timelines[-1][1]
    lines = [f"{label}: {_size(t.peak)} ({t.source})" for label, t in timelines]
    if last is not first and first.peak:
        lines.append(f"ratio {last.peak / first.peak:.2f}")
    lines.append(
        f"variables {_size(last.variable_bytes)} and constants "
        f"{_size(last.constant_bytes)} come on top"
    )
    return lines


def _moment_line(label: str, timeline: Timeline) -> str:
    """Say in which phase the peak is, how late, and in which layer."""
    at = timeline.peak_index
    if at is None:
        return f"{label}: no ops"
    moment = timeline.moments[at]
    times = [m.time for m in timeline.moments]
    total = sum(times)
    late = sum(times[:at]) / total if total else at / len(times)
    unit = "time" if total else "ops"
    phase = f"{moment.phase}, " if moment.phase else ""
    passed = f"{_percent(late)} of the {unit}"
    return f"{label}: {phase}after {passed}, in {_layer_of(moment.op)}"


def _layer_of(op: str) -> str:
    """Return the scope of the forward op that an op is, repeats or differentiates.

    An op in no scope is its own layer.

    Example:
        >>> _layer_of("gradients/net/conv_1/Conv2D_grad/Conv2DBackpropInput")
        'net/conv_1'
        >>> _layer_of("Tanh_3")
        'Tanh_3'
    """
    parts = _GRADIENT.sub("", op).split("/")
    behind = next((i for i, part in enumerate(parts) if part.endswith("_grad")), None)
    if behind is not None:
        parts = [*parts[:behind], parts[behind].removesuffix("_grad")]
    return "/".join(parts[:-1]) or parts[0]


def _layers_line(label: str, timeline: Timeline) -> str:
    """Name the layers whose tensors are most of the peak, the largest first."""
    held: Counter[str] = Counter()
    for tensor in timeline.at_peak:
        held[_layer_of(_maker(tensor))] += tensor.bytes
    held = _below_root(held)
    most = ", ".join(
        f"{layer} {_size(size)} ({_percent(size / timeline.peak)})"
        for layer, size in held.most_common(_NAMED)
        if size
    )
    return f"{label}: {most or 'nothing is held'}"


def _below_root(held: Counter[str]) -> Counter[str]:
    """Return the bytes of layers, by the scopes below the one that holds most."""
    root = ""
    while True:
        inner: Counter[str] = Counter()
        for name, size in held.items():
            if name.startswith(root):
                inner[name[len(root) :].split("/")[0]] += size
        largest, most = max(inner.items(), key=lambda item: item[1], default=("", 0))
        is_scope = any(name.startswith(f"{root}{largest}/") for name in held)
        # Below a scope with less than half, other layers would be hidden.
        if not is_scope or most <= sum(held.values()) / 2:
            break
        root = f"{root}{largest}/"
    short: Counter[str] = Counter()
    for name, size in held.items():
        inside = name.removeprefix(root)
        short[inside.split("/")[0] if name.startswith(root) else name] += size
    return short


def _maker(tensor: LiveTensor) -> str:
    """Return the name of the op that a buffer was made by."""
    return tensor.name.partition(":")[0].partition(" ")[0]


def _advice(timelines: _Labelled, report: object, curve: object) -> list[str]:
    """Return advice that follows from the figures, the largest saving first."""
    lines = _saving_lines(timelines, report)
    if isinstance(curve, PlanCurve) and curve.plans:
        least = min(curve.plans, key=lambda plan: plan.peak)
        lines.append(
            f"A budget of {_size(least.budget)} holds {_size(least.peak)} in "
            f"{_percent(least.extra_time)} more time: the least peak of the curve."
        )
    step = timelines[-1][1]
    phases = {moment.op: moment.phase for moment in step.moments}
    made: Counter[str] = Counter()
    for tensor in step.at_peak:
        made[phases.get(_maker(tensor), "")] += tensor.bytes
    parts = {phase: size / step.peak for phase, size in made.items() if step.peak}
    is_trained = "backward" in phases.values()
    if is_trained and len(timelines) == 1 and parts.get("forward", 0) >= _MUCH:
        lines.append(
            f"Checkpoints: {_percent(parts['forward'])} of the peak are results of the "
            "forward pass, which gradients(..., checkpoints='memory') computes again."
        )
    if is_trained and len(timelines) == 1 and parts.get("backward", 0) >= _MUCH:
        lines.append(
            f"Order: {_percent(parts['backward'])} of the peak are gradients; "
            "gradients(..., checkpoints=None) lets each update come as soon as its "
            "gradient is there, and takes no more time."
        )
    largest = max(step.at_peak, key=lambda tensor: tensor.bytes, default=None)
    if largest is not None and largest.bytes >= step.peak / 2:
        lines.append(
            f"One tensor of {_layer_of(_maker(largest))} is "
            f"{_percent(largest.bytes / step.peak)} of the peak: only a smaller batch, "
            "or smaller parts of that layer, lower it."
        )
    if step.variable_bytes > step.peak:
        lines.append(
            "Variables hold more than the step: a smaller batch changes little."
        )
    return lines or ["No single cause: a smaller batch lowers all of it."]


def _saving_lines(timelines: _Labelled, report: object) -> list[str]:
    """Say how much less the second step holds, and at which price in time."""
    lines = []
    if len(timelines) > 1:
        (_, first), (label, second) = timelines
        times = [sum(m.time for m in line.moments) for line in (first, second)]
        saved = first.peak - second.peak
        text = f"{label}: {_size(abs(saved))} {'less' if saved >= 0 else 'more'}"
        # Times of different origins, such as measured ones, cannot be compared.
        if min(times) > 0 and first.source == second.source:
            longer = times[1] / times[0] - 1
            word = "more" if longer >= 0 else "less"
            text += f", {_percent(abs(longer))} {word} time"
        lines.append(f"{text}.")
    if isinstance(report, GradientReport):
        again = len({op.name for op in report.recomputed})
        lines.append(
            f"{len(report.kept)} tensors are kept, {_size(report.kept_bytes)}; "
            f"{again} ops run again."
        )
    return lines


# Pixels, chosen by eye: the page is 60rem wide, and scales the drawing to that.
_WIDTH, _HEIGHT = 720, 340
# Margins that hold labels of 12 px, chosen by eye.
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 20, 48
# Round distances between ticks in decimals: 1, 2 or 5 times a power of ten.
_STEPS = (1, 2, 5, 10)
_TICKS = 6  # about so many on an axis, by eye: as many labels do not touch
_BITS_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; color: light-dark(#1b2430, #eef2f7);
  background: light-dark(#fff, #14181d); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: light-dark(#4a5665, #a9b4c0); }
.grid { stroke: light-dark(#d9dee5, #333c46); }
.curve { stroke: light-dark(#1f5fb4, #7ab2ff); fill: none; stroke-width: 2; }
.point { fill: light-dark(#1f5fb4, #7ab2ff); }
.chosen { fill: light-dark(#b34700, #ff9a5c); }
.predicted { stroke: light-dark(#6b7684, #98a3af); fill: none; stroke-dasharray: 4 4; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid light-dark(#d9dee5, #333c46);
  text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
.bits { color: light-dark(#b34700, #ff9a5c); font-weight: 600; }
/* On a phone the name of a layer has a line of its own above its numbers. */
@media (max-width: 40rem) {
  tr { display: grid; grid-template-columns: repeat(var(--numbers), minmax(0, 1fr)); }
  th, td { padding: .2rem; font-size: .75rem; overflow-wrap: anywhere; }
  th:first-child, td:first-child { grid-column: 1 / -1; border-bottom: 0; }
}
"""


def bits(plan: BitPlan, *, title: str | None = None) -> Page:
    """Draw a bit plan: the curve of size against noise, and a table of layers.

    The curve shows the signal-to-noise ratio of the best choice of each size, as
    measured and as predicted by the sum of the layers' noise; the chosen point is
    marked. The table shows for each layer its bits, its bytes, and the noise of each
    option, alone and with all others in 8 bits.

    Args:
        plan: the result of `geutil.quantize.choose_bits`, or of `BitPlan.load`.
        title: the title of the page.

    Returns:
        The page, to `save`; a notebook shows it.

    Raises:
        ArgumentTypeError: `plan` is not a bit plan.

    Cost: linear in the layers.

    Example:
        >>> from geutil import report
        >>> from geutil.quantize import BitOption, BitPlan, LayerBits
        >>> options = (BitOption(4, 32, 0.01, 0.02), BitOption(8, 64, 0.0001, 0.01))
        >>> layer = LayerBits(("dense",), "MatMul", 64, 4, options)
        >>> plan = BitPlan("int8", "size 40", (layer,), (), 32, 64, 0.02, 0.02, 0.01)
        >>> "<td>dense</td>" in report.bits(plan, title="small").html
        True
    """
    if not isinstance(plan, BitPlan):
        raise ArgumentTypeError(
            f"a geutil.quantize.BitPlan is drawn, not a {type_name(plan)}; "
            "geutil.quantize.choose_bits makes one"
        )
    heading = "bits of weights" if title is None else title
    payload = {
        "kind": "bits",
        "title": heading,
        "versions": f"geutil {__version__}",
    }
    return Page(heading, payload, "\n".join(_bits_body(plan, heading)), _BITS_STYLE)


def _bits_body(plan: BitPlan, heading: str) -> Iterator[str]:
    yield f"<main><h1>{html.escape(heading)}</h1>"
    head = str(plan).splitlines()[: 3 + (plan.scores is not None)]
    yield from (f"<div>{html.escape(line.strip())}</div>" for line in head)
    if plan.curve:
        yield "<h2>Size and noise</h2>"
        yield from _curve_drawing(plan)
    yield "<h2>Layers</h2>"
    yield from _layer_table(plan)
    if plan.left:
        yield "<h2>Left in float</h2><ul>"
        for name, reason in plan.left:
            yield f"<li>{html.escape(name)}: {html.escape(reason)}</li>"
        yield "</ul>"
    yield "</main>"


class _Axis:
    """Places numbers of a range between two pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
        self._low, self._high = low - margin, high + margin
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """Return a few round numbers within the range."""
        rough = (self._high - self._low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * s for s in _STEPS if power * s >= rough)
        first = math.ceil(self._low / step)
        last = math.floor(self._high / step)
        return [n * step for n in range(first, last + 1)]


def _curve_drawing(plan: BitPlan) -> Iterator[str]:
    """Yield the curve as SVG."""
    # Without noise there is no number to draw.
    points = [p for p in plan.curve if p.noise > 0]
    if not points:
        yield "<p>No choice makes any noise.</p>"
        return
    predicted = [(p.size, decibels(p.predicted)) for p in points if p.predicted > 0]
    measured = [(p.size, p.decibels) for p in points]
    both = [*measured, *predicted]
    x = _Axis([size for size, _ in both], _LEFT, _WIDTH - _RIGHT)
    y = _Axis([value for _, value in both], _HEIGHT - _BOTTOM, _TOP)
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    yield "<title>Signal to noise by the bytes of the weights</title>"
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for tick in y.ticks():
        at = y(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{tick:g}</text>'
    for tick in x.ticks():
        at = x(tick)
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>'
    middle = (_LEFT + right) // 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">bytes</text>'
    yield f'<text x="{_LEFT - 8}" y="{_TOP - 6}" text-anchor="end">dB</text>'
    for name, pairs in (("predicted", predicted), ("curve", measured)):
        places = " ".join(f"{x(size)},{y(value)}" for size, value in pairs)
        yield f'<polyline class="{name}" points="{places}"/>'
    for size, value in measured:
        name = "chosen" if size == plan.size else "point"
        yield (
            f'<circle class="{name}" cx="{x(size)}" cy="{y(value)}" r="4">'
            f"<title>{size:,} bytes, {value:.1f} dB</title></circle>"
        )
    yield "</svg>"
    yield "<p>Solid: measured. Dashed: predicted, as the sum of what layers add.</p>"


def _layer_table(plan: BitPlan) -> Iterator[str]:
    """Yield the layers as a table, with the noise of each option."""
    options = sorted({o.bits for layer in plan.layers for o in layer.options})
    heads = ["layer", "type", "weights", "bits", "bytes"]
    heads += [f"{each} bits, alone / with others, dB" for each in options]
    yield f'<table style="--numbers: {len(heads) - 1}"><thead><tr>'
    yield "".join(f"<th>{head}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for layer in plan.layers:
        yield f"<tr>{''.join(_layer_cells(layer, options))}</tr>"
    yield "</tbody></table>"


def _layer_cells(layer: LayerBits, options: Sequence[int]) -> Iterator[str]:
    yield f"<td>{html.escape(', '.join(layer.ops))}</td>"
    yield f"<td>{html.escape(layer.op_type)}</td><td>{layer.weights:,}</td>"
    yield f'<td class="bits">{layer.bits}</td><td>{layer.size:,}</td>'
    by_bits = {option.bits: option for option in layer.options}
    for each in options:
        option = by_bits[each]
        yield f"<td>{_noise_text(option.alone)} / {_noise_text(option.together)}</td>"


def _noise_text(noise: float) -> str:
    return f"{decibels(noise):.1f}" if noise > 0 else "no noise"
