"""Runs the blocks of every page: see tests/documentation/pages.py."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tests.documentation.pages import pages
from tests.settings import V1

# They need mkdocs, which is not there wherever tests are.
collect_ignore = ["hooks"]
# What pages print is what this version of TensorFlow makes of it, and later ones.
OLDEST = (2, 20)

if not V1 and tuple(map(int, tf.__version__.split(".")[:2])) >= OLDEST:
    pytest_collect_file = pages().pytest()
