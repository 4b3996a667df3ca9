"""What a notebook shows of models, selections, reports and timelines."""

from __future__ import annotations

import html

from geutil.errors import ReportError
from geutil.memory import Timeline, TimelineComparison
from geutil.model import Model
from geutil.report.pages import memory, view
from geutil.report.rows import Row, rows_of
from geutil.select.subgraph import SubGraphView

_SHOWN = 200
"""Rows of a table; the text of the report has all of them."""
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
    more = f"<div>and {rest} more, which print() lists</div>" if rest > 0 else ""
    title = html.escape(rows.title)
    return (
        f"<div><b>{title}</b>{summary}"
        f'<div style="{_SCROLLING}"><table>{body}</table></div>{more}</div>'
    )


def _row(row: Row) -> str:
    outcome = f'<td style="color:{_COLOURS[row.good]}">{html.escape(row.outcome)}</td>'
    cells = (html.escape(text) for text in (row.what, row.detail))
    return f"<tr>{outcome}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
