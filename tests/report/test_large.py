"""Large graphs: how long a person waits."""

from __future__ import annotations

import time

import pytest
import tensorflow as tf

from geutil import model, report
from tests.report.browsing import Opened
from tests.thorough import thorough

READY = 3.0
"""Seconds in which the page of ResNet152 is to be ready."""
ANSWER = 1.0
RUNS = 3


@pytest.fixture(scope="module")
def resnet152(tmp_path_factory):
    network = tf.keras.applications.ResNet152(weights=None, input_shape=(64, 64, 3))
    opened = model.open(network)
    page = report.view(opened, title="ResNet152")
    path = tmp_path_factory.mktemp("large") / "resnet152.html"
    return page.save(path), len(opened.graph.get_operations())


@pytest.fixture
def context(chromium):
    made = chromium.new_context(viewport={"width": 1400, "height": 900})
    made.set_offline(True)
    yield made
    made.close()


def best(act):
    """Return the least seconds of a few runs: what else runs here only adds to it."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@thorough
def test_the_page_of_resnet152_is_ready_in_three_seconds(resnet152, context, keep):
    path, count = resnet152
    assert count > 5000
    pages = []
    seconds = best(lambda: pages.append(Opened(context.new_page(), path)))
    print(f"ResNet152, {count} ops: ready in {seconds:.2f} s")
    assert seconds < READY
    assert pages[0].complaints == []
    keep(pages[0], "resnet152")


@thorough
def test_it_answers_in_a_second(resnet152, context):
    path, _ = resnet152
    page = Opened(context.new_page(), path)
    block = next(key for key in page.drawn() if key.endswith("{conv4_*}"))
    frame = "() => new Promise((done) => requestAnimationFrame(done))"

    def toggle():
        page.toggle(block)
        page.page.evaluate(frame)

    def search():
        page.search("")
        assert page.search("conv4_block7_1_conv")
        page.page.evaluate(frame)

    def go():
        page.page.get_by_label("search ops").press("Enter")
        assert "conv4_block7_1_conv" in page.heading
        page.page.evaluate(frame)

    seconds = {act.__name__: best(act) for act in (toggle, search, go)}
    print(", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    assert max(seconds.values()) < ANSWER, seconds


def test_a_graph_of_20000_ops_without_scopes_is_drawn_in_groups(browse):
    nodes = tf.compat.v1.GraphDef()
    float32 = tf.as_dtype(tf.float32).as_datatype_enum
    nodes.node.add(op="Placeholder", name="n0").attr["dtype"].type = float32
    for i in range(1, 20_000):
        node = nodes.node.add(op="Identity", name=f"n{i}", input=[f"n{i - 1}"])
        node.attr["T"].type = float32
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(nodes, name="")
    page = browse(report.view(graph))
    assert 50 < len(page.drawn()) <= 300
    assert page.search("n12345") == ["n12345"]
    page.page.get_by_label("search ops").press("Enter")
    assert page.chosen() == {":n12345"}
