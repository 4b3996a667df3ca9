"""Runs the blocks of every page: see tests/documentation/pages.py."""

import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.documentation.pages import pages
from tests.settings import V1
from tests.thorough import thorough

# They need mkdocs, which is not there wherever tests are.
collect_ignore = ["hooks"]
# What pages print is what this version of TensorFlow makes of it, and later ones.
OLDEST = (2, 20)
# What these do is done by the tests of the command, too, on smaller networks.
REPEATING = ("start.md", "howto/batch.md", "howto/scripts.md")
THOROUGH = [Path(__file__).parent / page for page in REPEATING]

if not V1 and tuple(map(int, version("tensorflow").split(".")[:2])) >= OLDEST:
    pytest_collect_file = pages().pytest()


def pytest_collection_modifyitems(items):
    """Mark the pages that take longest."""
    for item in items:
        if item.path in THOROUGH:
            item.add_marker(thorough)
