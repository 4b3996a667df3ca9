"""HTML pages of graphs, differences, reports and memory, each in one file.

The names are imported when they are first used: a file alone needs no TensorFlow.
"""

import typing

from geutil import lazy

__all__ = [
    "bits",
    "view",
    "diff",
    "memory",
    "pipeline",
    "Page",
    "difference",
    "GraphDifference",
    "Rewired",
    "Altered",
    "FileDifference",
    "FileOpMatch",
]

if typing.TYPE_CHECKING:
    from geutil.report.differences import Altered, GraphDifference, Rewired, difference
    from geutil.report.page import Page
    from geutil.report.pages import bits, diff, memory, pipeline, view
    from geutil.report.tflite_differences import FileDifference, FileOpMatch
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "differences": ("Altered", "GraphDifference", "Rewired", "difference"),
            "page": ("Page",),
            "pages": ("bits", "diff", "memory", "pipeline", "view"),
            "tflite_differences": ("FileDifference", "FileOpMatch"),
        },
    )
