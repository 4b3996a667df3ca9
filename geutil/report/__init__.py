"""Pages for people to look at: graphs, differences, reports and memory, in one file."""

from geutil.report.bits_page import bits
from geutil.report.differences import Altered, GraphDifference, Rewired, difference
from geutil.report.page import Page
from geutil.report.pages import diff, memory, pipeline, view
from geutil.report.tflite_differences import FileDifference, FileOpMatch

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
