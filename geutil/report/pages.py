"""The public functions that draw pages, and the notebook display of each object."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from geutil.errors import ArgumentTypeError, ReportError
from geutil.graph.types import type_name
from geutil.memory import Measurement, Timeline, TimelineComparison, compare
from geutil.model import Model
from geutil.quantize import Int8Comparison
from geutil.report.accepted_inputs import sides_of, subject_of
from geutil.report.differences import compared, graph_and_file
from geutil.report.file_page import page_of_file
from geutil.report.graphs import add_noise
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
from geutil.report.timelines import (
    PHASES,
    answers_of,
    curve_data,
    lifetimes_data,
    timeline_data,
)
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
        lives = lifetimes_data(graphs[0], report)
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
        "timelines": [timeline_data(name, timeline) for name, timeline in labelled],
        "phaseNames": PHASES,
        "answers": answers_of(labelled, report, curve),
    }
    if curve is not None:
        payload["memory"]["curve"] = curve_data(curve, report)
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
