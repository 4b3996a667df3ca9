"""What notebooks show of models, selections, reports and timelines."""

from __future__ import annotations

import html
import json
import re

import pytest
import tensorflow as tf

import geutil as ge
from geutil import memory
from geutil.errors import ReportError
from geutil.model import Stripped, StripReport
from geutil.report import page
from geutil.report.rows import rows_of
from geutil.transform.rewrite import RewriteReport, Rewritten
from tests.settings import needs_eager

pytestmark = [needs_eager]


def framed(value):
    """Return what the page in a notebook's frame draws."""
    (text,) = re.findall(r'srcdoc="([^"]*)"', value._repr_html_())
    found = re.search(r'id="payload">(.*?)</script>', html.unescape(text), re.DOTALL)
    return json.loads(found[1])


def test_a_model_shows_its_graph(mobilenet_folded):
    drawn = framed(mobilenet_folded.before)
    assert drawn["kind"] == "view"
    names = {op.name for op in mobilenet_folded.before.graph.get_operations()}
    assert set(drawn["graphs"][0]["names"]) == names


def test_a_selection_shows_its_ops_and_leaves_none_out():
    with tf.Graph().as_default() as graph:
        tf.nn.relu(tf.ones([2, 3]), name="layer/relu")
    view = ge.sgv_scope("layer", graph)
    (drawn,) = framed(view)["graphs"]
    assert drawn["names"] == ["layer/relu"]
    assert drawn["leftOut"] == 0


def test_timelines_show_their_curves():
    moments = (memory.Moment("a", 4_000_000), memory.Moment("b", 8_000_000))
    timeline = memory.Timeline(moments, (), 0, 0, "predicted")
    (line,) = framed(timeline)["memory"]["timelines"]
    assert line["bytes"] == [4_000_000, 8_000_000]
    both = framed(memory.compare(timeline, timeline))["memory"]["timelines"]
    assert len(both) == 2


def test_reports_are_tables(mobilenet_folded, mobilenet_quantized):
    for edited in (mobilenet_folded, mobilenet_quantized):
        told = edited.report._repr_html_()
        rows = rows_of(edited.report).rows
        assert told.count("<tr>") == min(len(rows), 200)
        assert str(edited.report).splitlines()[0] in html.unescape(told)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            StripReport((Stripped("kept", "dropout", "drop/<b>", "it is read"),)),
            ["kept", "drop/&lt;b&gt;", "it is read"],
        ),
        (
            RewriteReport((Rewritten("relu6", "a/Relu6", ("a/Relu6",), ("a/Relu",)),)),
            ["rewritten", "a/Relu6", "a/Relu"],
        ),
    ],
    ids=["strip", "rewrite"],
)
def test_rows_are_escaped_and_complete(said, words):
    told = said._repr_html_()
    for word in words:
        assert word in told


def test_without_the_viewer_the_text_is_shown(monkeypatch):
    def missing():
        raise ReportError("the viewer's script was not built; call `make web`")

    monkeypatch.setattr(page, "read_bundle", missing)
    timeline = memory.Timeline((memory.Moment("a", 8),), (), 0, 0, "predicted")
    told = timeline._repr_html_()
    assert told.startswith("<pre>")
    assert "make web" in told
