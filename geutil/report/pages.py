"""The pages that people look at, and the display of each object in a notebook.

The page of memory shows timelines, and its answers at first sight.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from geutil.quantize import Int8Comparison
from geutil.report.differences import compared, graph_and_file
from geutil.report.file_page import page_of_file
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
from geutil.report.tflite_nodes import FileSubject
from geutil.select.subgraph import SubGraphView


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
