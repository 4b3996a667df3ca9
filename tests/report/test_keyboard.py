"""Pages by keys alone, and for those who hear them: an audit by axe-core."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import tensorflow as tf

from geutil import report
from tests.report import samples
from tests.report.test_bits_page import plan
from tests.report.test_diff_page import without_tanh

AXE = Path(__file__).resolve().parents[2] / "web/node_modules/axe-core/axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WIDTHS = (360, 500, 1400)
SCHEMES = ("light", "dark")


@pytest.fixture
def nested(browse):
    return browse(report.view(samples.nested(), title="Some scopes"))


def press(page, *keys):
    for key in keys:
        page.page.keyboard.press(key)
        page.wait()


def focus(page):
    """Go to the drawing by the key Tab alone."""
    for _ in range(30):
        press(page, "Tab")
        if page.page.evaluate("document.activeElement.className") == "canvas":
            return
    raise AssertionError("the drawing cannot be reached")


def chosen(page):
    (key,) = page.chosen()
    return key


def told(page):
    return page.page.locator(".drawing [aria-live]").first.inner_text()


def test_arrows_go_along_edges(nested):
    focus(nested)
    press(nested, "ArrowDown")
    assert chosen(nested) in {":x", "outer"}
    while chosen(nested) != ":x":
        press(nested, "ArrowUp")
    press(nested, "ArrowDown")
    product = chosen(nested)
    edges = {(edge["source"], edge["target"]) for edge in nested.edges()}
    assert (":x", product) in edges
    press(nested, "ArrowUp")
    assert chosen(nested) == ":x"
    assert nested.heading == "x"
    assert told(nested).startswith("x, Placeholder, reads 0, read by 1")


def test_all_ops_are_reached_by_keys(browse):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        branches = [tf.tanh(x, name=f"branch{at}") for at in range(3)]
        tf.add_n(branches, name="sum")
    page = browse(report.view(graph))
    focus(page)
    reached = set()
    press(page, "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft")
    for _ in range(3):
        reached.add(chosen(page))
        press(page, "ArrowRight")
    assert reached == {":branch0", ":branch1", ":branch2"}
    press(page, "ArrowDown")
    assert chosen(page) == ":sum"


def test_enter_opens_and_closes_a_scope(nested):
    nested.press("close all")
    focus(nested)
    press(nested, "ArrowDown", "ArrowDown")
    scope = chosen(nested)
    was_open = scope in nested.open_scopes()
    press(nested, "Enter")
    assert (scope in nested.open_scopes()) != was_open
    assert ("open" if not was_open else "closed") in told(nested)
    press(nested, "Enter")
    assert (scope in nested.open_scopes()) == was_open


def test_into_a_scope_and_out_of_it(nested):
    nested.press("open all")
    focus(nested)
    press(nested, "ArrowDown", "ArrowDown")
    assert chosen(nested) == ":outer/left/product"
    press(nested, "Backspace")
    assert chosen(nested) == "outer/left"
    press(nested, "ArrowDown")
    assert chosen(nested) == ":outer/left/product"
    press(nested, "Backspace", "ArrowUp")
    assert chosen(nested) == ":x"


def zoom(page):
    return page.page.evaluate("window.geutil.drawings[0].viewport.view.zoom")


def test_plus_minus_and_nought_zoom(nested):
    before = zoom(nested)
    focus(nested)
    press(nested, "+", "+")
    assert zoom(nested) == pytest.approx(before * 1.3**2)
    press(nested, "-")
    assert zoom(nested) == pytest.approx(before * 1.3)
    press(nested, "0")
    assert zoom(nested) == pytest.approx(before)
    nested.press("zoom in")
    assert zoom(nested) == pytest.approx(before * 1.3)
    nested.press("zoom out")
    assert zoom(nested) == pytest.approx(before)


def test_escape_leaves_the_drawing_and_the_search(nested):
    focus(nested)
    press(nested, "Escape")
    active = "document.activeElement.textContent"
    assert nested.page.evaluate(active) == "search"
    press(nested, "/")
    nested.page.keyboard.type("tanh")
    press(nested, "Enter")
    assert nested.heading == "outer/right/tanh"
    press(nested, "Escape")
    assert nested.page.evaluate("document.activeElement.className") == "canvas"
    press(nested, "ArrowUp")
    # What it reads lies in a closed scope.
    assert chosen(nested) == "outer/left"


def test_a_slash_opens_the_search_from_another_tab(browse):
    graph = samples.nested()
    page = browse(report.diff(graph, graph))
    focus(page)
    press(page, "/")
    page.page.keyboard.type("joined")
    assert page.page.get_by_label("search ops").input_value() == "joined"
    assert page.page.get_by_label("search ops").is_visible()


def test_arrows_go_from_tab_to_tab(browse):
    graph = samples.nested()
    page = browse(report.diff(graph, graph, report="one\ntwo"))
    page.page.get_by_role("tab", name="report").focus()
    press(page, "ArrowRight")
    selected = page.page.locator("[role=tab][aria-selected=true]")
    assert selected.inner_text() == "search"
    press(page, "ArrowLeft", "ArrowLeft")
    assert selected.inner_text() == "changes"


def test_names_types_and_attributes_are_searched_at_once(nested):
    assert nested.search("matmul", "anything") == ["outer/left/product"]
    assert nested.search("product", "anything") == ["outer/left/product"]
    found = nested.search("transpose_a=false", "anything")
    assert found == ["outer/left/product"]
    assert "transpose_a=False" in nested.page.locator(".results li").inner_text()
    assert nested.search("transpose_a", "attribute") == ["outer/left/product"]
    assert nested.search("transpose_a", "name") == []


def test_a_hit_by_its_name_comes_before_one_by_its_attributes(browse):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2, 2], name="x")
        tf.matmul(x, x, name="first")
        tf.tanh(x, name="transpose_a")
    page = browse(report.view(graph))
    assert page.search("transpose_a", "anything") == ["transpose_a", "first"]


def test_shift_and_enter_go_back(nested):
    results = nested.search("outer", "anything")
    field = nested.page.get_by_label("search ops")
    visited = []
    for key in ("Enter", "Enter", "Shift+Enter", "Shift+Enter"):
        field.press(key)
        visited.append(nested.heading)
    assert visited == [results[0], results[1], results[0], results[-1]]
    count = nested.page.locator(".results .count").inner_text()
    assert count.startswith(f"{len(results)} of {len(results)} found")


def faults(page):
    page.page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.page.evaluate(
        "(tags) => axe.run(document, { runOnly: { type: 'tag', values: tags } })", RULES
    )
    assert len(result["passes"]) > 15
    return [
        (fault["id"], node["html"][:120], node["failureSummary"][:300])
        for fault in result["violations"]
        for node in fault["nodes"]
    ]


@pytest.fixture
def in_scheme():
    pages = []

    def show(page, scheme, width):
        pages.append(page)
        page.page.emulate_media(color_scheme=scheme)
        page.page.set_viewport_size({"width": width, "height": 900})
        return page

    yield show
    for page in pages:
        page.page.emulate_media(color_scheme="light")
        page.page.set_viewport_size({"width": 1400, "height": 900})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_is_used_by_keys_alone(browse, in_scheme, width, scheme):
    page = browse(report.diff(samples.nested(), without_tanh()))
    in_scheme(page, scheme, width)
    focus(page)
    press(page, "ArrowDown", "ArrowUp", "ArrowUp", "ArrowDown")
    assert page.chosen(0) == page.chosen(1) != set()
    press(page, "/")
    page.page.keyboard.type("joined")
    press(page, "Enter", "Escape")
    assert page.chosen(0) == page.chosen(1) == {":joined"}
    for side in (0, 1):
        x, y = page.place(":joined", side)
        box = page.page.locator(".canvas").nth(side).bounding_box()
        assert box["x"] < x < box["x"] + box["width"]
        assert box["y"] < y < box["y"] + box["height"]
    press(page, "ArrowUp")
    assert page.chosen(0) != {":joined"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_audit_of_a_comparison_finds_nothing(
    browse, mobilenet_folded, in_scheme, width, scheme, keep
):
    edited = mobilenet_folded
    page = browse(report.diff(edited.before, edited.after, report=edited.report))
    in_scheme(page, scheme, width)
    keep(page, f"audit_{scheme}_{width}")
    for tab in ("report", "changes"):
        page.turn_to(tab)
        assert faults(page) == []
    page.search("relu", "anything")
    page.page.get_by_label("search ops").press("Enter")
    assert faults(page) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_audit_of_other_pages_finds_nothing(
    browse, steps, flow, in_scheme, scheme, keep
):
    page = browse(report.memory(steps.plain, steps.saving, report=steps.report))
    in_scheme(page, scheme, 1400)
    keep(page, f"audit_memory_{scheme}")
    assert faults(page) == []
    page = browse(report.view(flow))
    in_scheme(page, scheme, 1400)
    assert faults(page) == []
    altered = report.diff(samples.nested(), samples.skipping(), report="one\ntwo")
    assert faults(in_scheme(browse(altered), scheme, 1400)) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_audit_of_a_page_without_scripts_finds_nothing(tabs, scheme, tmp_path):
    _, new_tab = tabs
    tab = new_tab()
    tab.emulate_media(color_scheme=scheme)
    path = report.bits(plan()).save(tmp_path / "bits.html")
    tab.goto(path.as_uri())
    assert faults(types.SimpleNamespace(page=tab)) == []
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(20, 24, 29)'"
    assert tab.evaluate(dark) == (scheme == "dark")
    tab.close()


def test_a_page_with_a_fault_fails_the_audit(nested):
    nested.page.evaluate(
        """document.querySelector('main').append(
             Object.assign(document.createElement('button'), { className: 'bad' }))"""
    )
    assert [name for name, *_ in faults(nested)] == ["button-name"]
