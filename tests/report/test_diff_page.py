"""The page of two graphs, in a browser."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

import geutil as ge
from geutil import model, report
from geutil.model import Stripped, StripReport
from geutil.report.differences import ADDED, REMOVED, REWIRED
from tests.report import samples

BEFORE, AFTER = 0, 1


def swapped():
    """Return `nested` with an op replaced, one rewired, and one added."""
    graph = samples.nested()
    with graph.as_default(), tf.name_scope("outer/right/"):
        sigmoid = tf.sigmoid(graph.get_tensor_by_name("outer/left/Relu:0"), name="soft")
    ge.reroute_ts(sigmoid, graph.get_tensor_by_name("outer/right/tanh:0"))
    return graph


def without_tanh():
    """Return what `nested` would be without one op."""
    definition = swapped().as_graph_def()
    kept = [node for node in definition.node if node.name != "outer/right/tanh"]
    del definition.node[:]
    definition.node.extend(kept)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    return graph


@pytest.fixture
def compared(browse):
    return browse(report.diff(samples.nested(), without_tanh(), title="An op swapped"))


@pytest.fixture
def fold(browse, mobilenet_folded):
    edited = mobilenet_folded
    page = report.diff(edited.before, edited.after, report=edited.report)
    return browse(page)


def changes(page):
    """Return the lines of the changes: outcome, name, type."""
    page.turn_to("changes")
    rows = page.page.locator(".changes tr").all_inner_texts()
    return [tuple(re.split(r"\s+", row.strip())) for row in rows]


def test_both_graphs_are_drawn_side_by_side(compared, keep):
    headings = compared.page.locator("section.drawing header strong")
    assert headings.all_inner_texts() == ["before", "after"]
    before, after = compared.page.locator(".canvas").all()
    assert before.bounding_box()["x"] < after.bounding_box()["x"]
    keep(compared, "diff")


def test_changes_are_listed(compared):
    assert changes(compared) == [
        ("removed", "outer/right/tanh", "Tanh"),
        ("added", "outer/right/soft", "Sigmoid"),
        ("rewired", "joined", "AddV2"),
    ]
    counts = compared.page.locator(".changes h2 + p").inner_text()
    assert counts == "1 added, 1 removed, 1 rewired"


def difference_of_files(edited, folder):
    """Return what two models differ in after they are saved and opened."""
    graphs = []
    for name, side in (("before", edited.before), ("after", edited.after)):
        side.save(folder / name)
        graphs.append(model.open(folder / name).graph)
    return report.difference(*graphs)


def test_the_counts_are_those_of_the_difference(fold, mobilenet_folded, keep, tmp_path):
    """Of what is run and saved: what the fold left behind in the graph is no part."""
    found = difference_of_files(mobilenet_folded, tmp_path)
    fold.turn_to("changes")
    assert fold.page.locator(".changes h2 + p").inner_text() == (
        f"{len(found.added)} added, {len(found.removed)} removed, "
        f"{len(found.rewired)} rewired"
    )
    keep(fold, "fold")


def borders(page, side):
    """Return the colours of what is drawn, by key."""
    return page.colours("border", side)


def test_changed_ops_have_the_colours_of_the_legend(compared):
    for side in (BEFORE, AFTER):
        compared.press("open all", side)
    before, after = borders(compared, BEFORE), borders(compared, AFTER)
    plain = before[":outer/left/product"]
    removed, added = before[":outer/right/tanh"], after[":outer/right/soft"]
    rewired = after[":joined"]
    assert len({plain, removed, added, rewired}) == 4
    assert before[":joined"] == rewired
    assert after[":outer/left/product"] == plain
    marks = compared.page.locator("footer.legend i")
    shown = marks.evaluate_all("(all) => all.map((one) => one.style.borderColor)")
    wanted = [f"rgb({', '.join(rgb(c))})" for c in (added, removed, rewired)]
    assert shown[:3] == wanted
    names = compared.page.locator("footer.legend span:has(i)").all_inner_texts()
    assert names[:5] == ["added", "removed", "rewired", "altered", "same"]


def rgb(colour):
    return [str(int(colour[i : i + 2], 16)) for i in (1, 3, 5)]


def test_closed_scopes_say_what_changed_in_them(compared):
    for side in (BEFORE, AFTER):
        compared.press("close all", side)
    before, after = borders(compared, BEFORE), borders(compared, AFTER)
    compared.press("open all", BEFORE)
    compared.press("open all", AFTER)
    assert before["outer"] == borders(compared, BEFORE)[":outer/right/tanh"]
    assert after["outer"] == borders(compared, AFTER)[":outer/right/soft"]


def test_statuses_on_the_page_are_those_of_python(fold, mobilenet_folded, tmp_path):
    found = difference_of_files(mobilenet_folded, tmp_path)
    statuses = fold.page.evaluate(
        "() => window.geutil.drawings.map(({ graph }) => graph.data.status)"
    )
    assert statuses[AFTER].count(ADDED) == len(found.added)
    assert statuses[BEFORE].count(REMOVED) == len(found.removed)
    for side in (BEFORE, AFTER):
        assert statuses[side].count(REWIRED) == len(found.rewired)


def test_a_change_is_chosen_on_both_sides(compared):
    compared.turn_to("changes")
    compared.page.locator(".changes").get_by_role("button", name="joined").click()
    assert compared.chosen(BEFORE) == compared.chosen(AFTER) == {":joined"}
    assert "rewired in this comparison" in compared.details
    assert 'reads in "before"' in compared.details
    assert "outer/right/tanh:0" in compared.details


def test_what_is_on_one_side_is_chosen_there(compared):
    compared.turn_to("changes")
    link = compared.page.locator(".changes").get_by_role("button", name="soft")
    link.click()
    assert compared.chosen(AFTER) == {":outer/right/soft"}
    assert compared.chosen(BEFORE) == set()
    assert "added in this comparison" in compared.details


def test_the_closed_scope_of_the_counterpart_is_chosen(compared):
    for side in (BEFORE, AFTER):
        compared.press("close all", side)
    compared.press("open all", AFTER)
    compared.click(":outer/left/product", AFTER)
    assert compared.chosen(AFTER) == {":outer/left/product"}
    (chosen,) = compared.chosen(BEFORE)
    assert "outer/left/product".startswith(chosen)


def test_scopes_open_and_close_on_both_sides(fold):
    (network,) = fold.open_scopes(BEFORE)
    scope = f"{network}/Conv1_1"
    fold.toggle(scope, AFTER)
    assert scope in fold.open_scopes(BEFORE) & fold.open_scopes(AFTER)
    fold.toggle(scope, BEFORE)
    assert scope not in fold.open_scopes(BEFORE) | fold.open_scopes(AFTER)


def test_the_button_of_a_scope_opens_it_on_both_sides(fold):
    (network,) = fold.open_scopes(BEFORE)
    scope = f"{network}/Conv1_1"
    fold.click(scope)
    fold.page.get_by_role("button", name="open or close").click()
    assert scope in fold.open_scopes(BEFORE) & fold.open_scopes(AFTER)


def test_a_line_of_the_report_rings_its_ops(fold, mobilenet_folded):
    fold.turn_to("report")
    rows = fold.page.locator(".report tr")
    assert rows.count() == 52
    entry = mobilenet_folded.report.folded[0]
    assert entry.norm in rows.first.inner_text()
    rows.first.get_by_role("button").click()
    assert f":{entry.into}" in fold.marked(AFTER)
    assert fold.chosen(AFTER) == {f":{entry.into}"}
    assert fold.heading == entry.into
    assert "in the report" in fold.details
    assert f":{entry.layer}" in fold.marked(BEFORE)


def test_outcomes_of_the_report_are_filtered(browse, mobilenet_quantized, keep):
    edited = mobilenet_quantized
    page = browse(report.diff(edited.before, edited.after, report=edited.report))
    keep(page, "quantize")
    outcome = page.page.get_by_label("outcome")
    quantized = len(edited.report.quantized)
    rows = page.page.locator(".report tr")
    assert f"all ({quantized + len(edited.report.skipped)})" in outcome.inner_text()
    outcome.select_option("quantized")
    assert rows.count() == quantized
    page.page.get_by_label("filter lines").fill("block_16_project")
    texts = rows.all_inner_texts()
    assert 0 < len(texts) < quantized
    assert all("block_16_project" in text for text in texts)


def test_a_line_about_a_function_goes_into_it(browse, flow):
    name = next(name for name in flow.functions if "called" in name)
    (op,) = (
        op.name
        for op in flow.functions[name].graph.get_operations()
        if op.type == "Relu"
    )
    entries = (
        Stripped("removed", "dropout", f"{name}/{op}", "its input passes"),
        Stripped("kept", "input", "x", "it is read"),
    )
    page = browse(report.diff(flow, flow, report=StripReport(entries)))
    picker = page.page.get_by_label("graph", exact=True)
    rows = page.page.locator(".report tr")
    rows.first.get_by_role("button").click()
    assert name in picker.locator("option:checked").inner_text()
    assert page.marked(BEFORE) == page.marked(AFTER) == {f":{op}"}
    rows.last.get_by_role("button").click()
    assert picker.evaluate("(select) => select.selectedIndex") == 0
    assert page.marked(BEFORE) == {":x"}


def test_every_line_of_the_report_goes_somewhere(fold):
    fold.turn_to("report")
    for row in fold.page.locator(".report tr").all()[::9]:
        row.get_by_role("button").click()
        assert fold.marked(BEFORE)
        assert fold.marked(AFTER)
        assert fold.chosen(AFTER) <= fold.marked(AFTER)


def test_a_search_finds_ops_of_both_sides(compared):
    assert compared.search("right") == ["outer/right/tanh", "outer/right/soft"]
    lines = compared.page.locator(".results li").all_inner_texts()
    assert [line.partition(":")[0] for line in lines] == ["before", "after"]


def test_the_same_graph_twice_says_so(browse):
    graph = samples.nested()
    page = browse(report.diff(graph, graph))
    assert "The graphs are the same." in page.page.locator(".changes").inner_text()


def test_of_graphs_only_the_graphs_are_compared(browse, flow):
    page = browse(report.diff(flow.graph, flow.graph))
    page.search("while", "type")
    page.page.get_by_label("search ops").press("Enter")
    assert "type StatelessWhile" in page.details
    called = page.page.locator("section.details p:has-text('calls')")
    assert called.count() == 0


def test_bodies_are_compared(browse, flow, keep):
    name = next(name for name in flow.functions if "body" in name)
    edited = samples.flow()
    graph = edited.functions[name].graph
    (relu,) = (op.outputs[0] for op in graph.get_operations() if op.type == "Relu")
    with graph.as_default():
        ge.reroute_ts(tf.tanh(relu.op.inputs[0], name="squashed"), relu)
    page = browse(report.diff(flow, edited, title="A loop's body edited"))
    picker = page.page.get_by_label("graph", exact=True)
    options = picker.locator("option").all_text_contents()
    assert len(options) == 1 + len(flow.functions)
    changed = [text for text in options if "(0 changes)" not in text]
    assert len(changed) == 1
    assert name in changed[0]
    picker.select_option(changed[0])
    assert ("added", "squashed", "Tanh") in changes(page)
    rewired = [op for outcome, op, _ in changes(page) if outcome == "rewired"]
    assert rewired
    headings = page.page.locator("section.drawing header strong").all_inner_texts()
    assert [text.partition(":")[0] for text in headings] == ["before", "after"]
    keep(page, "bodies")


def test_altered_attributes_are_shown(browse):
    def graph(alpha):
        with tf.Graph().as_default() as made:
            tf.nn.leaky_relu(tf.ones([2], name="x"), alpha=alpha, name="leaky")
        return made

    page = browse(report.diff(graph(0.25), graph(0.5)))
    page.turn_to("changes")
    assert changes(page) == [("altered", "leaky", "LeakyRelu")]
    counts = page.page.locator(".changes h2 + p").inner_text()
    assert counts == "0 added, 0 removed, 0 rewired, 1 altered"
    page.page.locator(".changes").get_by_role("button", name="leaky").click()
    assert 'alpha in "before" 0.25' in page.details
