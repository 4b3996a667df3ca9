"""The code that the README shows runs, and the names it gives exist."""

import importlib
import re
from pathlib import Path

import tensorflow as tf
from sybil.document import Document

import geutil as ge
from tests.documentation.pages import COMPARED, pages

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_every_block_runs_and_prints_its_text():
    sybil = pages(compared=COMPARED)
    document = Document.parse(str(README), *sybil.parsers)
    sybil.setup(document.namespace)
    try:
        examples = list(document.examples())
        for example in examples:
            example.evaluate()
    finally:
        sybil.teardown(document.namespace)
    assert len(examples) >= 4


def test_every_name_in_the_table_exists():
    rows = re.findall(
        r"^\| \w[\w ]* \| `(geutil\.[\w.]+)` \| (.*) \|$", TEXT, re.MULTILINE
    )
    assert len(rows) == 16
    flat = {f"geutil.{layer}" for layer in ("select", "reroute", "transform", "graph")}
    for module, row in rows:
        home = ge if module in flat else importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", row):
            assert hasattr(home, name), name


def test_every_method_in_the_table_of_models_exists():
    rows = re.findall(
        r"^\| (?:use|take|turn|reach|write)\b[\w ]* \| (.*) \|$", TEXT, re.MULTILINE
    )
    assert len(rows) == 5
    opened = ge.model.open(
        tf.function(lambda x: {"y": x}, [tf.TensorSpec([], name="x")])
    )
    for row in rows:
        for name in re.findall(r"`(\w+)`", row):
            assert hasattr(opened, name), name
