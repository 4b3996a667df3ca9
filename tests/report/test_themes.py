"""Light and dark, what the colours mean, and what chooses among changes."""

from __future__ import annotations

import re

import pytest

from geutil import report
from tests.report import samples
from tests.report.test_diff_page import changes, without_tanh

DARK, LIGHT = (20, 24, 29), (255, 255, 255)
COLOURS = """() => {
  const { viewport } = window.geutil.drawings[0];
  viewport.onPaint();
  const { width, height } = viewport.canvas;
  const pen = new OffscreenCanvas(width, height).getContext('2d');
  pen.drawImage(viewport.canvas, 0, 0);
  const { data } = pen.getImageData(0, 0, width, height);
  const seen = {};
  for (let i = 0; i < data.length; i += 4) {
    const key = data.slice(i, i + 3).join();
    seen[key] = (seen[key] ?? 0) + 1;
  }
  return seen;
}"""
SHAPES = "(all) => all.map((one) => getComputedStyle(one).backgroundColor)"


@pytest.fixture
def compared(browse):
    page = browse(report.diff(samples.nested(), without_tanh()))
    yield page
    page.page.emulate_media(color_scheme="light")


def background(page):
    text = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return tuple(map(int, re.findall(r"\d+", text)))


def drawn_colours(page):
    """Return the colours on the canvas, with how many dots each has."""
    counts = page.page.evaluate(COLOURS)
    return {tuple(map(int, key.split(","))): count for key, count in counts.items()}


def canvas(page):
    """Return the colour that most of the canvas has."""
    counts = drawn_colours(page)
    return max(counts, key=lambda colour: counts[colour])


def test_colours_follow_the_system(compared):
    assert background(compared) == canvas(compared) == LIGHT
    compared.page.emulate_media(color_scheme="dark")
    assert background(compared) == canvas(compared) == DARK
    compared.page.emulate_media(color_scheme="light")
    assert background(compared) == canvas(compared) == LIGHT


def test_one_switch_changes_them(compared):
    compared.page.get_by_role("button", name="dark colours").click()
    assert background(compared) == canvas(compared) == DARK
    # What a person said counts for more than the system.
    compared.page.emulate_media(color_scheme="dark")
    compared.page.get_by_role("button", name="light colours").click()
    assert background(compared) == canvas(compared) == LIGHT


def luminance(colour):
    """Return the relative luminance as WCAG 2 defines it."""
    parts = [part / 255 for part in colour]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


FRAMES = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"""


def show_in(compared, scheme):
    """Switch the scheme, and wait until the legend has been made anew."""
    compared.page.emulate_media(color_scheme=scheme)
    compared.page.evaluate(FRAMES)


def numbers(text):
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def test_the_contrast_is_told_as_it_is_defined():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_and_lines_stand_out_from_what_is_behind(compared, scheme):
    """Of what is on the canvas, into which an audit cannot look."""
    show_in(compared, scheme)
    page = background(compared)
    text = numbers(compared.page.evaluate("getComputedStyle(document.body).color"))
    marks = compared.page.locator("footer.legend i:not(.bordered):not(.line)")
    fills = [numbers(colour) for colour in marks.evaluate_all(SHAPES)]
    assert len(fills) >= 9
    assert min(contrast(text, fill) for fill in fills) >= 4.5
    borders = compared.page.locator("footer.legend i.bordered").evaluate_all(
        "(all) => all.map((one) => getComputedStyle(one).borderTopColor)"
    )
    assert len(borders) >= 7
    assert min(contrast(numbers(colour), page) for colour in borders) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_legend_has_every_colour_of_a_comparison(compared, scheme):
    show_in(compared, scheme)
    compared.press("open all")
    marks = compared.page.locator("footer.legend i")
    told = {
        numbers(colour)
        for colour in marks.evaluate_all(
            """(all) => all.flatMap((one) => {
              const { backgroundColor, borderTopColor } = getComputedStyle(one);
              return [backgroundColor, borderTopColor];
            })"""
        )
    }
    drawn = {colour for colour, count in drawn_colours(compared).items() if count > 200}
    assert len(drawn & told) >= 4
    if scheme == "light":
        looks = [
            *compared.colours("fill").values(),
            *compared.colours("border").values(),
        ]
        wanted = {tuple(bytes.fromhex(colour[1:])) for colour in looks}
        assert len(wanted) > 4
        assert wanted <= told


def test_the_legend_of_curves(browse, steps):
    page = browse(report.memory(steps.plain, steps.saving))
    first = page.page.locator("main .legend").first
    assert first.locator("span").all_inner_texts() == ["plain", "saving"]


def test_changes_are_filtered(compared):
    assert len(changes(compared)) == 3
    kind = compared.page.get_by_label("kind of change")
    assert "all (3)" in kind.inner_text()
    kind.select_option("added")
    assert changes(compared) == [("added", "outer/right/soft", "Sigmoid")]
    kind.select_option("")
    words = compared.page.get_by_label("filter changes")
    words.fill("TANH")
    assert changes(compared) == [("removed", "outer/right/tanh", "Tanh")]
    words.fill("addv2")
    assert changes(compared) == [("rewired", "joined", "AddV2")]
    words.fill("nowhere")
    assert changes(compared) == []
    assert "No line" in compared.page.locator(".changes").inner_text()
