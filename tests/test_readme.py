"""The code that the README shows runs, and the names it gives exist."""

import importlib
import re
from pathlib import Path

import tensorflow as tf

import geutil as ge

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_every_python_block_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_name_in_the_table_exists():
    rows = re.findall(
        r"^\| \w[\w ]* \| `(geutil\.[\w.]+)` \| (.*) \|$", README, re.MULTILINE
    )
    assert len(rows) == 12
    flat = {f"geutil.{layer}" for layer in ("select", "reroute", "transform", "graph")}
    for module, row in rows:
        home = ge if module in flat else importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", row):
            assert hasattr(home, name), name


def test_every_method_in_the_table_of_models_exists():
    rows = re.findall(
        r"^\| (?:use|take|turn|reach|write)[\w ]* \| (.*) \|$", README, re.MULTILINE
    )
    assert len(rows) == 5
    opened = ge.model.open(
        tf.function(lambda x: {"y": x}, [tf.TensorSpec([], name="x")])
    )
    for row in rows:
        for name in re.findall(r"`(\w+)`", row):
            assert hasattr(opened, name), name
