"""Pages by keys alone, and for those who hear them: an audit by axe-core."""

import types
from pathlib import Path

import pytest

from geutil import report
from geutil.model import Stripped, StripReport
from tests.report import samples
from tests.report.test_bits_page import plan
from tests.thorough import crossed

AXE = Path(__file__).resolve().parents[2] / "web/node_modules/axe-core/axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SCHEMES = ("light", "dark")
VIEWS = crossed((1400, 360), SCHEMES, together=1)


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


def test_ops_side_by_side_are_reached_by_keys(browse):
    branches = [("Tanh", f"branch{at}", "x") for at in range(3)]
    last = ("ClipByValue", "last", "branch0", "branch1", "branch2")
    graph = samples.wired([("Placeholder", "x"), *branches, last])
    page = browse(report.view(graph))
    focus(page)
    reached = set()
    press(page, "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft")
    for _ in range(3):
        reached.add(chosen(page))
        press(page, "ArrowRight")
    assert reached == {":branch0", ":branch1", ":branch2"}
    press(page, "ArrowDown")
    assert chosen(page) == ":last"


def test_scopes_are_opened_entered_left_and_closed(nested):
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
    nested.press("open all")
    focus(nested)
    press(nested, "ArrowDown")
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


def test_a_slash_opens_the_search_and_arrows_go_from_tab_to_tab(browse):
    graph = samples.nested()
    page = browse(report.diff(graph, graph, report="one\ntwo"))
    focus(page)
    press(page, "/")
    page.page.keyboard.type("joined")
    assert page.page.get_by_label("search ops").input_value() == "joined"
    assert page.page.get_by_label("search ops").is_visible()
    page.page.get_by_role("tab", name="report").focus()
    press(page, "ArrowRight")
    selected = page.page.locator("[role=tab][aria-selected=true]")
    assert selected.inner_text() == "search"
    press(page, "ArrowLeft", "ArrowLeft")
    assert selected.inner_text() == "changes"


def faults(page, within="html"):
    if not page.page.evaluate("'axe' in window"):
        page.page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.page.evaluate(
        """([part, tags]) => axe.run(part, {
          runOnly: { type: 'tag', values: tags }, resultTypes: ['violations'] })""",
        [within, RULES],
    )
    assert len(result["passes"]) > (15 if within == "html" else 5)
    return [
        (fault["id"], node["html"][:120], node["failureSummary"][:300])
        for fault in result["violations"]
        for node in fault["nodes"]
    ]


def audit(opened, keep, name, scheme, width):
    """Assert that an audit finds nothing in some colours, and nothing is too wide."""
    opened.show_in(scheme, width)
    keep(opened, f"audit_{name}_{scheme}_{width}")
    assert faults(opened) == [], name
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert opened.page.evaluate(overflow) <= 0, name


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_a_comparison_is_used_by_keys_alone(compared, width, scheme):
    page = compared
    page.show_in(scheme, width)
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


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_audit_of_a_comparison_finds_nothing(browse, width, scheme, keep):
    """Ops are added, removed, rewired and altered; a line of the report is good."""
    entries = (
        Stripped("removed", "dropout", "joined", "its input passes"),
        Stripped("kept", "input", "x", "it is read"),
    )
    graphs = (samples.nested(), samples.skipping())
    page = browse(report.diff(*graphs, report=StripReport(entries)))
    page.turn_to("report")
    audit(page, keep, "comparison", scheme, width)
    page.turn_to("changes")
    assert faults(page, "aside") == []
    page.go("joined", "anything")
    assert faults(page, "aside") == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_audit_of_other_pages_finds_nothing(
    browse, steps, flow, width, scheme, keep
):
    pages = {
        "memory": report.memory(steps.plain, steps.saving, report=steps.report),
        "functions": report.view(flow),
    }
    for name, page in pages.items():
        audit(browse(page), keep, name, scheme, width)


def test_the_audit_of_a_page_without_scripts_finds_nothing(tabs, tmp_path):
    _, new_tab = tabs
    tab = new_tab()
    path = report.bits(plan()).save(tmp_path / "bits.html")
    tab.goto(path.as_uri())
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(20, 24, 29)'"
    for scheme in SCHEMES:
        tab.emulate_media(color_scheme=scheme)
        assert faults(types.SimpleNamespace(page=tab)) == []
        assert tab.evaluate(dark) == (scheme == "dark")
    tab.close()


def test_a_page_with_a_fault_fails_the_audit(nested):
    nested.page.evaluate(
        """document.querySelector('main').append(
             Object.assign(document.createElement('button'), { className: 'bad' }))"""
    )
    assert [name for name, *_ in faults(nested, "main")] == ["button-name"]
