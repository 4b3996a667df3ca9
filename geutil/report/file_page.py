"""The page of a TFLite file alone, which needs no TensorFlow."""

from __future__ import annotations

from typing import Any

from geutil.report.page import Page, payload_of
from geutil.report.tflite_nodes import FileSubject, file_subject, precision_rows


def view_file(value: Any, title: str) -> Page:
    """Draw a TFLite file; see `geutil.report.view`.

    Args:
        value: its path, or its bytes.
        title: the title of the page.

    Raises:
        ModelError: it cannot be read, is no TFLite file, or is not whole.

    Cost: linear in ops and edges.
    """
    return page_of_file(file_subject(value), title)


def page_of_file(drawn: FileSubject, title: str) -> Page:
    """Return the page of what is drawn of a file."""
    rows = precision_rows(drawn)
    return Page(title, payload_of("view", title, drawn.data(), rows))
