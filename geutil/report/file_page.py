"""Pages of TFLite files alone, which need no TensorFlow."""

from __future__ import annotations

from typing import Any

from geutil.report.differences import compared
from geutil.report.page import Page, payload_of
from geutil.report.tflite_nodes import FileSubject, file_subject, precision_rows


def view_file(value: Any, title: str) -> Page:
    """Draw a TFLite file; see `geutil.report.view`."""
    return page_of_file(file_subject(value), title)


def diff_files(before: Any, after: Any, labels: tuple[str, str]) -> Page:
    """Draw two TFLite files side by side; see `geutil.report.diff`."""
    sides = (file_subject(*side) for side in zip((before, after), labels, strict=True))
    title = f"{labels[0]} and {labels[1]}"
    return Page(title, payload_of("diff", title, compared(*sides), None))


def page_of_file(drawn: FileSubject, title: str) -> Page:
    """Return the page of a file."""
    rows = precision_rows(drawn)
    return Page(title, payload_of("view", title, drawn.data(), rows))
