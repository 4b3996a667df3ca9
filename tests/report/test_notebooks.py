"""What notebooks show of models, selections, reports and timelines."""

import base64
import html
import json
import re
import sys
import types
import zlib

import pytest
import tensorflow as tf

import geutil as ge
from geutil import memory, model, report
from geutil.errors import ReportError
from geutil.report import page
from geutil.report.rows import rows_of
from tests.report.samples import timeline
from tests.settings import needs_eager

pytestmark = [needs_eager]


FRAME = 60_000
"""Bytes of a shown model, at most, where the viewer was shown before."""


def text_of(shown):
    """Return the page in a notebook's frame."""
    (text,) = re.findall(r'srcdoc="([^"]*)"', shown)
    return html.unescape(text)


def framed(value):
    """Return what the page in a notebook's frame draws."""
    found = re.search(r'id="payload"[^>]*>(.*?)</script>', text_of(value._repr_html_()))
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


class Kernel:
    """What IPython tells of the cell that runs."""

    def __init__(self):
        self.execution_count = 0
        self._cell = ""

    def run(self, cell, value):
        """Show a value at the end of a cell."""
        self._cell = cell
        self.execution_count += 1
        return value._repr_html_()

    def get_parent(self):
        return {"metadata": {"cellId": self._cell}, "content": {"code": ""}}


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    ipython = types.SimpleNamespace(get_ipython=lambda: made)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(page, "_runs", {})
    return made


def has_viewer(shown):
    return 'id="viewer"' in text_of(shown)


def test_the_viewer_is_in_a_notebook_once(kernel, folded, monkeypatch):
    first = kernel.run("a", folded.before)
    # Two pages of one cell share it, too.
    again = folded.before._repr_html_()
    second = kernel.run("b", folded.after)
    assert [has_viewer(shown) for shown in (first, again, second)] == [
        True,
        False,
        False,
    ]
    assert len(second.encode()) < FRAME < len(first.encode())
    # A cell that runs again has it, and so has each where outputs see no others.
    assert has_viewer(kernel.run("b", folded.before))
    assert not has_viewer(kernel.run("c", folded.before))
    assert has_viewer(kernel.run("a", folded.before))
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("colab"))
    for cell in ("d", "e"):
        assert has_viewer(kernel.run(cell, folded.before))


def test_outside_of_notebooks_each_page_has_the_viewer(folded):
    for _ in range(2):
        assert has_viewer(folded.before._repr_html_())


@pytest.fixture
def notebook(tabs, tmp_path):
    """Return what opens a page of outputs, as a notebook shows them."""
    _, new_tab = tabs
    tab = new_tab()
    complaints = []
    tab.on("console", lambda m: complaints.append(m.text) if m.type == "error" else 0)
    tab.on("pageerror", lambda error: complaints.append(str(error)))

    def show(*outputs, script=""):
        tab.add_init_script(script)
        path = tmp_path / "notebook.html"
        cells = "".join(f"<div>{output}</div>" for output in outputs)
        path.write_text(f"<!DOCTYPE html><meta charset=utf-8>{cells}", encoding="utf-8")
        tab.goto(path.as_uri())
        frames = tab.locator("iframe")
        return [frames.nth(at).content_frame for at in range(frames.count())]

    yield show
    tab.close()
    assert complaints == []


def test_frames_draw_with_the_viewer_of_another(kernel, notebook, folded):
    shown = [
        kernel.run("a", folded.before),
        kernel.run("b", report.view(folded.after, title="after")),
        kernel.run("c", timeline([4, 8])),
    ]
    assert [has_viewer(output) for output in shown] == [True, False, False]
    # Its own frame may come last.
    frames = notebook(*reversed(shown))
    for frame in frames:
        frame.locator("body[data-ready]").wait_for()
    curves, drawing, _ = frames
    assert drawing.locator("h1").inner_text() == "after"
    names = "window.geutil.drawings[0].graph.data.names.length"
    drawn = drawing.locator("body").evaluate(f"() => {names}")
    (data,) = framed(folded.after)["graphs"]
    assert drawn == len(data["names"])
    assert "8.0 MB (predicted)" in curves.locator(".answers").inner_text()
    drawing.get_by_role("button", name="open all").click()
    drawing.locator("body:not([data-busy])").wait_for()


def test_a_frame_without_the_viewer_says_what_to_do(kernel, notebook, folded):
    kernel.run("a", folded.before)
    # The looks for the viewer follow each other without a pause.
    hasty = "const wait = setTimeout; window.setTimeout = (act) => wait(act, 0);"
    (frame,) = notebook(kernel.run("b", folded.before), script=hasty)
    frame.get_by_text("Run this cell again").wait_for()
    (frame,) = notebook(kernel.run("b", folded.before))
    frame.locator("section.drawing").wait_for()


def test_an_inspection_is_a_table(tmp_path):
    @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
    def f(x):
        return {"y": tf.nn.relu(x) * tf.constant(3.0)}

    model.open(f).save(tmp_path / "saved")
    info = model.inspect(tmp_path / "saved")
    rows = rows_of(info).rows
    signature = info.signatures["serving_default"]
    assert [(r.outcome, r.what) for r in rows if r.outcome in ("in", "out")] == [
        ("in", "x"),
        ("out", "y"),
    ]
    assert str(signature.inputs["x"]) in rows[0].detail
    ops = {r.what: int(r.detail) for r in rows if r.outcome == "op in functions"}
    assert ops == dict(info.function_ops)
    functions = [r.what for r in rows if r.outcome == "function"]
    assert functions == [function.name for function in info.functions]
    told = info._repr_html_()
    assert told.count("<tr>") == len(rows)
    assert "size: " in told


def test_a_comparison_is_a_table_with_what_differs_first(folded):
    @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
    def plain(x):
        return {"same": x + 1.0, "other": tf.nn.relu(x) + 3.0}

    @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
    def changed(x):
        return {"same": x + 1.0, "other": tf.nn.relu(x) + 5.0}

    found = model.open(plain).compare(model.open(changed))
    rows = rows_of(found).rows
    assert [(r.outcome, r.good, r.what) for r in rows] == [
        ("different", False, "other"),
        ("equal", True, "same"),
    ]
    assert "largest difference 2 absolute" in rows[0].detail
    assert "different on" in found._repr_html_()


def test_a_model_and_a_selection_show_their_ops(folded):
    drawn = framed(folded.before)
    assert drawn["kind"] == "view"
    names = {op.name for op in folded.before.graph.get_operations()}
    assert set(drawn["graphs"][0]["names"]) == names
    with tf.Graph().as_default() as graph:
        tf.nn.relu(tf.ones([2, 3]), name="layer/relu")
    (drawn,) = framed(ge.sgv_scope("layer", graph))["graphs"]
    assert drawn["names"] == ["layer/relu"]
    assert drawn["leftOut"] == 0


def test_timelines_show_their_curves():
    step = timeline([4, 8])
    (line,) = framed(step)["memory"]["timelines"]
    assert line["bytes"] == [4_000_000, 8_000_000]
    both = framed(memory.compare(step, step))["memory"]["timelines"]
    assert len(both) == 2


def test_reports_are_tables(folded, quantized):
    for edited in (folded, quantized):
        told = edited.report._repr_html_()
        rows = rows_of(edited.report).rows
        assert told.count("<tr>") == min(len(rows), 200)
        assert str(edited.report).splitlines()[0] in html.unescape(told)


def test_without_the_viewer_the_text_is_shown(monkeypatch):
    def missing():
        raise ReportError("the viewer's script was not built; call `make web`")

    monkeypatch.setattr(page, "read_bundle", missing)
    told = timeline([8])._repr_html_()
    assert told.startswith("<pre>")
    assert "make web" in told
