"""A graph with the memory of its step: what the page is given, and in a browser."""

import pytest
import tensorflow as tf

from geutil import memory, report
from geutil.errors import ReportError
from geutil.memory import Moment, Timeline
from tests.report import samples
from tests.report.test_keyboard import VIEWS, audit


@pytest.fixture(scope="module")
def chain():
    """Return a graph in which each of three results is held by its one reader."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [100, 100], name="x")
        w = tf.compat.v1.placeholder(tf.float32, [100, 100], name="w")
        with tf.name_scope("layer"):
            first = tf.matmul(x, w, name="first")
            second = tf.matmul(first, w, name="second")
        third = tf.matmul(second, w, name="third")
    return graph, memory.predict(third)


@pytest.fixture
def opened(browse, chain):
    return browse(report.view(chain[0], report=chain[1]))


def held_bytes(timeline, step):
    return sum(
        life.tensor.bytes
        for life in timeline.lifetimes
        if life.first <= step <= life.last
    )


def test_lifetimes_of_a_chain(chain):
    _, timeline = chain
    ran = [moment.op for moment in timeline.moments]
    lives = {life.op: (ran[life.first], ran[life.last]) for life in timeline.lifetimes}
    assert lives["layer/first"] == ("layer/first", "layer/second")
    assert lives["layer/second"] == ("layer/second", "third")
    assert lives["third"] == ("third", ran[-1])


def test_lifetimes_add_up_to_each_moment(steps):
    for timeline in (steps.plain, steps.saving):
        sums = [held_bytes(timeline, at) for at in range(len(timeline.moments))]
        assert sums == [moment.bytes for moment in timeline.moments]
        assert max(sums) == timeline.peak > 0


def test_refusals(chain):
    graph, timeline = chain
    with pytest.raises(ReportError, match="of this graph"):
        report.view(samples.nested(), report=timeline)
    bare = Timeline((Moment("layer/first", 8),), (), 0, 0, "measured")
    with pytest.raises(ReportError, match="predict"):
        report.view(graph, report=bare)


def go_to(page, timeline, op):
    ran = [moment.op for moment in timeline.moments]
    slider = page.page.get_by_label("moment of the step")
    slider.focus()
    page.page.keyboard.press("Home")
    for _ in range(ran.index(op)):
        page.page.keyboard.press("ArrowRight")
    return page.page.locator(".lives .reading").inner_text()


def test_the_slider_lights_what_is_held(opened, chain, keep):
    _, timeline = chain
    opened.press("open all")
    text = go_to(opened, timeline, "layer/second")
    assert "layer/second" in text and "80.0 kB held" in text
    fills = opened.colours("fill")
    lit, dark = "#f0703c", "#ffffff"
    assert fills[":layer/first"] == fills[":layer/second"] == lit
    assert fills[":third"] == dark
    assert opened.marked() == {":layer/second"}
    rows = opened.page.locator(".held tr").all_inner_texts()
    assert len(rows) == 2 and all("40.0 kB" in row for row in rows)
    keep(opened, "slider")
    go_to(opened, timeline, "third")
    fills = opened.colours("fill")
    assert fills[":layer/first"] == dark
    assert fills[":layer/second"] == fills[":third"] == lit


def test_a_closed_scope_is_lit_by_what_is_held_in_it(opened, chain):
    opened.press("close all")
    go_to(opened, chain[1], "layer/first")
    fills = opened.colours("fill")
    assert fills["layer"] == "#f0703c"
    assert fills[":third"] == "#ffffff"


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_an_audit_finds_nothing(opened, scheme, width, keep):
    audit(opened, keep, "slider", scheme, width)
