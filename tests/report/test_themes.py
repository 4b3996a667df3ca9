"""Light and dark, what the colours mean, and what chooses among changes."""

import pytest

from geutil import report
from tests.report import samples
from tests.report.browsing import hexadecimal, numbers
from tests.report.test_diff_page import changes
from tests.report.vision import apart, nearest

DARK, LIGHT = (20, 24, 29), (255, 255, 255)
SCHEMES = ("light", "dark")


def background(page):
    return numbers(
        page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    )


def canvas(page):
    """Return the colour that most of the canvas has."""
    counts = page.dots()[0]
    return max(counts, key=lambda colour: counts[colour])


def test_colours_follow_the_system_until_a_person_says_otherwise(compared):
    for scheme, colour in (("light", LIGHT), ("dark", DARK), ("light", LIGHT)):
        compared.show_in(scheme)
        assert background(compared) == canvas(compared) == colour
    compared.page.get_by_role("button", name="dark colours").click()
    assert background(compared) == canvas(compared) == DARK
    compared.show_in("dark")
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


def test_the_contrast_is_told_as_it_is_defined():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_legend_has_every_colour_and_all_stand_out_from_the_page(compared, scheme):
    """Of what is on the canvas, into which an audit cannot look."""
    compared.show_in(scheme)
    compared.press("open all")
    page = background(compared)
    text = numbers(compared.page.evaluate("getComputedStyle(document.body).color"))
    marks = compared.page.locator("footer.legend i").evaluate_all(
        """(all) => all.map((one) => {
          const { backgroundColor, borderTopColor } = getComputedStyle(one);
          return [one.className, backgroundColor, borderTopColor];
        })"""
    )
    fills = [numbers(f) for kind, f, _ in marks if kind not in ("bordered", "line")]
    borders = [numbers(border) for kind, _, border in marks if kind == "bordered"]
    assert len(fills) >= 9
    assert min(contrast(text, fill) for fill in fills) >= 4.5
    assert len(borders) >= 7
    assert min(contrast(border, page) for border in borders) >= 3
    told = {numbers(colour) for _, *colours in marks for colour in colours}
    drawn = {colour for colour, count in compared.dots()[0].items() if count > 200}
    assert len(drawn & told) >= 4
    if scheme == "light":
        looks = [
            *compared.colours("fill").values(),
            *compared.colours("border").values(),
        ]
        assert len(set(looks)) > 4
        assert set(map(hexadecimal, looks)) <= told


def test_colours_are_as_far_apart_as_the_formula_has_it():
    """By pairs of the table of Sharma, Wu and Dalal 2005."""
    for one, other, difference in (
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
    ):
        assert apart(one, other) == pytest.approx(difference, abs=1e-4)


def fills(page):
    """Return the colours of the legend that ops and scopes are filled with."""
    colours = page.page.locator("footer.legend i").evaluate_all(
        """(all) => all.filter((one) => !one.className).map(
          (one) => getComputedStyle(one).backgroundColor)"""
    )
    return list(map(numbers, colours))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fills_are_told_apart_by_all_eyes(browse, steps, scheme):
    """By kind, by noise with closed scopes among them, and by what is held.

    Two colours that differ by 2 are told apart side by side; across a page it takes
    more.
    """
    kinds = report.diff(samples.nested(), samples.without_tanh())
    held = report.view(samples.training_graph(None), report=steps.plain)
    bands = report.view(samples.nested())
    (graph,) = bands.payload["graphs"]
    graph |= {"noises": [0] * len(graph["names"]), "noiseNames": samples.NOISE_BANDS}
    for page, count in ((kinds, 9), (bands, len(samples.NOISE_BANDS) + 2), (held, 5)):
        opened = browse(page)
        opened.show_in(scheme)
        colours = fills(opened)
        assert len(set(colours)) == count
        assert nearest(colours)[0] >= 7


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
