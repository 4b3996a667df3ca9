"""Large graphs: drawn in groups, laid out in steps with frames between."""

import pytest
import tensorflow as tf

from geutil import model, report
from tests.report import samples
from tests.report.browsing import SIZE, Opened
from tests.thorough import thorough

WATCHED = """
if (typeof document !== 'undefined') {
  // The worker gets no job before a test lets it.
  window.held = null;
  window.workers = { begun: 0, ended: 0 };
  window.Worker = class extends Worker {
    constructor(...given) { super(...given); window.workers.begun += 1; }
    terminate() { super.terminate(); window.workers.ended += 1; }
    postMessage(job) {
      const post = () => super.postMessage(job);
      window.held ? window.held.push(post) : post();
    }
  };
}
"""
COUNTED = """
if (typeof document !== 'undefined') {
  // After three steps it has to wait for a frame; what is done until then is counted.
  let now = 0;
  performance.now = () => (now += 4);
  const work = window.work = { count: 0, most: 0, frames: 0 };
  for (const [kind, name] of
       [[Map, 'get'], [Map, 'set'], [Set, 'add'], [Array, 'push']]) {
    const call = kind.prototype[name];
    kind.prototype[name] = function (...given) {
      work.count += 1;
      return call.apply(this, given);
    };
  }
  window.requestAnimationFrame = (act) => setTimeout(() => {
    work.most = Math.max(work.most, work.count);
    work.count = 0;
    work.frames += 1;
    act();
  });
}
"""


@pytest.fixture
def launch(chromium, tmp_path):
    """Return what opens a page in which a script has run before its own."""
    contexts, pages = [], []

    def open_page(page, script="", policy="worker-src blob:;"):
        contexts.append(chromium.new_context(viewport=SIZE))
        contexts[-1].set_offline(True)
        contexts[-1].set_default_timeout(300_000)
        contexts[-1].add_init_script(script)
        assert "worker-src blob:;" in page.html
        path = tmp_path / "page.html"
        text = page.html.replace("worker-src blob:;", policy)
        path.write_text(text, encoding="utf-8")
        pages.append(Opened(contexts[-1].new_page(), path))
        pages[-1].wait()
        return pages[-1]

    yield open_page
    for context in contexts:
        context.close()
    for page in pages:
        # A browser complains where a page forbids itself to have workers.
        assert [c for c in page.complaints if "Creating a worker" not in c] == []


@thorough
def test_the_page_of_resnet152(launch, keep):
    network = tf.keras.applications.ResNet152(weights=None, input_shape=(64, 64, 3))
    opened = model.open(network)
    assert len(opened.graph.get_operations()) > 5000
    page = launch(report.view(opened, title="ResNet152"))
    keep(page, "resnet152")
    block = next(key for key in page.drawn() if key.endswith("{conv4_*}"))
    before = page.drawn()
    page.toggle(block)
    assert before < page.drawn() | {block}
    page.go("conv4_block7_1_conv")
    assert "conv4_block7_1_conv" in page.heading


def test_a_large_graph_without_scopes_is_drawn_in_groups(browse):
    chain = [("Identity", f"n{i}", f"n{i - 1}") for i in range(1, 4_000)]
    graph = samples.wired([("Placeholder", "n0"), *chain])
    page = browse(report.view(graph))
    assert 50 < len(page.drawn()) <= 300
    assert page.search("n3654") == ["n3654"]
    page.page.get_by_label("search ops").press("Enter")
    assert page.chosen() == {":n3654"}


def layered_graph(blocks, layers=10, ops=20):
    """Return a graph of blocks behind one another, in which chains lie side by side."""
    nodes, start = [("Placeholder", "input")], "input"
    for block in range(blocks):
        for layer in range(layers):
            last = start
            for at in range(ops):
                name = f"block{block}/layer{layer}/op{at}"
                nodes.append(("Tanh", name, last))
                last = name
        start = last
    return samples.wired(nodes)


@pytest.fixture(scope="module")
def large():
    return report.view(layered_graph(4), title="800 ops")


@pytest.mark.parametrize("policy", ["worker-src blob:;", "worker-src 'none';"])
def test_work_between_two_frames_does_not_grow_with_the_graph(launch, large, policy):
    """Where workers are forbidden, it is laid out on the page, scope by scope."""
    most = []
    for page, blocks in ((report.view(layered_graph(2)), 2), (large, 4)):
        opened = launch(page, COUNTED, policy)
        assert opened.page.evaluate(
            "Object.assign(work, { count: 0, most: 0, frames: 0 })"
        )
        opened.press("open all")
        opened.wait()
        most.append(opened.page.evaluate("work.most"))
        assert opened.page.evaluate("work.frames") > blocks * 4
        assert len(opened.drawn()) > blocks * 200
        assert len(opened.page.workers) == (policy == "worker-src blob:;")
    # One pass over all that is drawn is quick; a stage of its layout takes far more.
    assert min(most) > 100
    assert most[1] - most[0] < 1.5 * 400


def test_all_of_it_is_laid_out_in_a_worker_with_a_bar(launch, large, keep):
    page = launch(large, WATCHED)
    page.page.evaluate("held = []")
    page.press("open all")
    bar = page.page.get_by_label("drawing", exact=True)
    bar.wait_for()
    keep(page, "opening")
    seen = [page.page.evaluate("document.querySelector('progress').value")]
    while page.page.locator("body[data-busy]").count():
        # Each scope that is laid out moves the bar on.
        page.page.evaluate("held.splice(0).forEach((post) => post())")
        page.until(
            "(before) => held.length || !document.body.dataset.busy"
            " || document.querySelector('progress').value > before",
            seen[-1],
        )
        seen.append(page.page.evaluate("document.querySelector('progress').value"))
    assert len(set(seen)) > 2
    assert seen == sorted(seen)
    assert page.page.evaluate("window.workers") == {"begun": 1, "ended": 0}
    assert bar.is_hidden()
    assert len(page.drawn()) > 800
    page.press("fit")
    keep(page, "opened")


def test_a_stop_leaves_all_as_it_was(launch, large):
    page = launch(large, WATCHED)
    before = page.drawn()
    page.page.evaluate("held = []")
    page.press("open all")
    page.until("held.length > 0")
    page.page.get_by_role("button", name="stop").click()
    assert page.drawn() == before
    assert page.page.evaluate("window.workers") == {"begun": 1, "ended": 1}
    assert page.page.get_by_role("button", name="stop").is_hidden()
    # It goes on from there.
    page.page.evaluate("held = null")
    page.toggle("block0")
    assert page.open_scopes() == {"block0"}
