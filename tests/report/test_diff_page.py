"""The page of two graphs, in a browser."""

import re

import tensorflow as tf

from geutil import report
from geutil.model import Stripped, StripReport
from tests.report import samples
from tests.report.browsing import hexadecimal, numbers

BEFORE, AFTER = 0, 1


def changes(page):
    """Return the lines of the changes: outcome, name, type."""
    page.turn_to("changes")
    rows = page.page.locator(".changes tr").all_inner_texts()
    return [tuple(re.split(r"\s+", row.strip())) for row in rows]


def counts(page):
    return page.page.locator(".changes h2 + p").inner_text()


def press_on_both(page, button):
    for side in (BEFORE, AFTER):
        page.press(button, side)


def test_both_graphs_are_drawn_side_by_side_and_changes_are_listed(compared, keep):
    headings = compared.page.locator("section.drawing header strong")
    assert headings.all_inner_texts() == ["before", "after"]
    before, after = compared.page.locator(".canvas").all()
    assert before.bounding_box()["x"] < after.bounding_box()["x"]
    assert changes(compared) == [
        ("removed", "outer/right/tanh", "Tanh"),
        ("added", "outer/right/soft", "Sigmoid"),
        ("rewired", "joined", "AddV2"),
    ]
    assert counts(compared) == "1 added, 1 removed, 1 rewired"
    assert compared.search("right") == ["outer/right/tanh", "outer/right/soft"]
    lines = compared.page.locator(".results li").all_inner_texts()
    assert [line.partition(":")[0] for line in lines] == ["before", "after"]
    keep(compared, "diff")


def test_changed_ops_and_scopes_have_the_colours_of_the_legend(compared):
    press_on_both(compared, "close all")
    closed = [compared.colours("border", side)["outer"] for side in (BEFORE, AFTER)]
    press_on_both(compared, "open all")
    before, after = (compared.colours("border", side) for side in (BEFORE, AFTER))
    plain = before[":outer/left/product"]
    removed, added = before[":outer/right/tanh"], after[":outer/right/soft"]
    rewired = after[":joined"]
    assert len({plain, removed, added, rewired}) == 4
    assert before[":joined"] == rewired
    assert after[":outer/left/product"] == plain
    # A closed scope has the colour of the change in it.
    assert closed == [removed, added]
    marks = compared.page.locator("footer.legend i")
    shown = marks.evaluate_all("(all) => all.map((one) => one.style.borderColor)")
    wanted = [hexadecimal(colour) for colour in (added, removed, rewired)]
    assert [numbers(colour) for colour in shown[:3]] == wanted
    names = compared.page.locator("footer.legend span:has(i)").all_inner_texts()
    assert names[:5] == ["added", "removed", "rewired", "altered", "same"]


def test_a_change_is_chosen_on_both_sides_or_where_it_is(compared):
    compared.turn_to("changes")
    lines = compared.page.locator(".changes")
    lines.get_by_role("button", name="joined").click()
    assert compared.chosen(BEFORE) == compared.chosen(AFTER) == {":joined"}
    assert "rewired in this comparison" in compared.details
    assert 'reads in "before"' in compared.details
    assert "outer/right/tanh:0" in compared.details
    lines.get_by_role("button", name="soft").click()
    assert compared.chosen(AFTER) == {":outer/right/soft"}
    assert compared.chosen(BEFORE) == set()
    assert "added in this comparison" in compared.details
    # Of a counterpart that is not drawn it is the closed scope.
    press_on_both(compared, "close all")
    compared.press("open all", AFTER)
    compared.click(":outer/left/product", AFTER)
    assert compared.chosen(AFTER) == {":outer/left/product"}
    (chosen,) = compared.chosen(BEFORE)
    assert "outer/left/product".startswith(chosen)


def test_scopes_open_and_close_on_both_sides(fold):
    (network,) = fold.open_scopes(BEFORE)
    scope = f"{network}/stem_1"
    fold.toggle(scope, AFTER)
    assert scope in fold.open_scopes(BEFORE) & fold.open_scopes(AFTER)
    fold.toggle(scope, BEFORE)
    assert scope not in fold.open_scopes(BEFORE) | fold.open_scopes(AFTER)
    fold.click(scope)
    fold.page.get_by_role("button", name="open or close").click()
    assert scope in fold.open_scopes(BEFORE) & fold.open_scopes(AFTER)


def test_a_line_of_the_report_rings_its_ops(fold, folded, keep):
    fold.turn_to("report")
    rows = fold.page.locator(".report tr")
    assert rows.count() == len(folded.report.folded) == 7
    for row, entry in zip(rows.all(), folded.report.folded, strict=True):
        assert entry.norm in row.inner_text()
        row.get_by_role("button").click()
        assert f":{entry.into}" in fold.marked(AFTER)
        assert fold.chosen(AFTER) == {f":{entry.into}"}
        assert fold.heading == entry.into
        assert "in the report" in fold.details
        assert f":{entry.layer}" in fold.marked(BEFORE)
    keep(fold, "fold")


def test_outcomes_of_the_report_are_filtered(browse, quantized, keep):
    page = report.diff(quantized.before, quantized.after, report=quantized.report)
    page = browse(page)
    keep(page, "quantize")
    outcome = page.page.get_by_label("outcome")
    count = len(quantized.report.quantized)
    rows = page.page.locator(".report tr")
    assert f"all ({count + len(quantized.report.skipped)})" in outcome.inner_text()
    outcome.select_option("quantized")
    assert rows.count() == count
    page.page.get_by_label("filter lines").fill("second_project")
    texts = rows.all_inner_texts()
    assert 0 < len(texts) < count
    assert all("second_project" in text for text in texts)


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


def test_of_graphs_only_the_graphs_are_compared(browse, flow):
    """The same graph twice says so."""
    page = browse(report.diff(flow.graph, flow.graph))
    page.turn_to("changes")
    assert "The graphs are the same." in page.page.locator(".changes").inner_text()
    page.go("while", "type")
    assert "type StatelessWhile" in page.details
    called = page.page.locator("section.details p:has-text('calls')")
    assert called.count() == 0


def test_bodies_are_compared(browse, flow, keep):
    edited = samples.flow()
    name = samples.squash(edited)
    page = browse(report.diff(flow, edited, title="A loop's body edited"))
    picker = page.page.get_by_label("graph", exact=True)
    options = picker.locator("option").all_text_contents()
    assert len(options) == 1 + len(flow.functions)
    (changed,) = [text for text in options if "(0 changes)" not in text]
    assert name in changed
    picker.select_option(changed)
    assert ("added", "squashed", "Tanh") in changes(page)
    assert "rewired" in {outcome for outcome, *_ in changes(page)}
    headings = page.page.locator("section.drawing header strong").all_inner_texts()
    assert [text.partition(":")[0] for text in headings] == ["before", "after"]
    keep(page, "bodies")


def test_altered_attributes_are_shown(browse):
    def graph(alpha):
        with tf.Graph().as_default() as made:
            tf.nn.leaky_relu(tf.ones([2], name="x"), alpha=alpha, name="leaky")
        return made

    page = browse(report.diff(graph(0.25), graph(0.5)))
    assert changes(page) == [("altered", "leaky", "LeakyRelu")]
    assert counts(page) == "0 added, 0 removed, 0 rewired, 1 altered"
    page.page.locator(".changes").get_by_role("button", name="leaky").click()
    assert 'alpha in "before" 0.25' in page.details
