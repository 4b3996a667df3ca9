"""Runs the blocks of every page: see tests/documentation/pages.py."""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.documentation.pages import COMPARED, pages
from tests.thorough import thorough

# They need mkdocs, which is not there wherever tests are.
collect_ignore = ["hooks"]
# The tests of the command do the same on smaller networks.
REPEATING = ("start.md", "howto/batch.md", "howto/scripts.md")
THOROUGH = [Path(__file__).parent / page for page in REPEATING]

if COMPARED:
    pytest_collect_file = pages().pytest()


def pytest_collection_modifyitems(items):
    """Mark the pages that take longest."""
    for item in items:
        if item.path in THOROUGH:
            item.add_marker(thorough)
