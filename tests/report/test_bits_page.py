"""The page of a plan of bits: every layer, every point, nothing from elsewhere."""

import re
from xml.etree import ElementTree

import pytest

from geutil import report
from geutil.errors import ArgumentTypeError
from geutil.quantize import BitOption, BitPlan, CurvePoint, LayerBits
from tests.report.samples import table_of

NASTY = "</table><script>alert(1)</script>"


def plan(noises=(0.04, 0.01, 0.001), scores=None):
    """Return a plan of two layers, with a curve of three sizes."""
    first = (BitOption(4, 50, 0.01, 0.03), BitOption(8, 100, 0.0, 0.001))
    second = (BitOption(4, 10, 0.002, 0.004), BitOption(8, 20, 0.0001, 0.001))
    layers = (
        LayerBits(("a", "b"), "MatMul", 100, 4, first),
        LayerBits((NASTY,), "Conv2D", 20, 8, second),
    )
    curve = tuple(
        CurvePoint(size, noise, noise / 2)
        for size, noise in zip((60, 70, 120), noises, strict=True)
    )
    left = (("deep", f"has no kernel {NASTY}"),)
    return BitPlan(
        *("int8", "70 bytes", layers, left, 70, 120, noises[1], 0.005, 0.001),
        *("min_max", 2, curve, scores),
    )


def test_the_page_is_whole_and_loads_nothing():
    page = report.bits(plan(scores=(0.9, 0.8)), title=NASTY)
    text = page.html
    assert page.title == NASTY
    assert "<script" not in text
    assert not re.search(r"https?://|src=|url\(", text.replace('href="data:,"', ""))
    assert "default-src 'none'" in text
    for shown in ("20.0 dB", "70 bytes of weights", "58.3%", "metric: 0.8", "deep"):
        assert shown in text


def test_every_layer_and_option_is_in_the_table():
    text = report.bits(plan()).html
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.S)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    first = ["a, b", "MatMul", "100", "4", "50", "20.0 / 15.2", "no noise / 30.0"]
    assert cells[1] == first
    assert cells[2][1:] == ["Conv2D", "20", "8", "20", "27.0 / 24.0", "40.0 / 30.0"]
    assert len(cells) == 3


def drawing(text):
    return ElementTree.fromstring(re.search(r"<svg.*?</svg>", text, re.S).group())


def test_the_curve_is_drawn_to_scale():
    """Larger sizes further right, less noise further up, in proportion."""
    svg = drawing(report.bits(plan()).html)
    points = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter("circle")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert (x1 - x0) / (x2 - x0) == pytest.approx(10 / 60, abs=0.01)
    # 14, 20 and 30 dB.
    assert (y1 - y0) / (y2 - y0) == pytest.approx((20 - 13.98) / (30 - 13.98), abs=0.01)
    assert x2 > x1 > x0
    assert y2 < y1 < y0
    assert [c.get("class") for c in svg.iter("circle")] == ["point", "chosen", "point"]
    lines = [line.get("points").split() for line in svg.iter("polyline")]
    assert [len(line) for line in lines] == [3, 3]
    _, _, width, height = map(float, svg.get("viewBox").split())
    assert all(0 < x < width and 0 < y < height for x, y in points)
    # It takes up the frame, but for a twentieth at each end.
    grid = next(line for line in svg.iter("line") if line.get("y1") == line.get("y2"))
    frame = float(grid.get("x2")) - float(grid.get("x1"))
    assert (x2 - x0) / frame == pytest.approx(1 / 1.1, abs=0.01)


def test_points_without_noise_are_told_apart():
    for noises, drawn in (((0.0, 0.0, 0.0), 0), ((0.1, 0.1, 0.0), 2), ((0.1,) * 3, 3)):
        text = report.bits(plan(noises)).html
        assert text.count("<circle") == drawn
        assert ("No choice makes any noise" in text) is (drawn == 0)


def test_what_is_no_plan_is_refused():
    with pytest.raises(
        ArgumentTypeError, match=r"BitPlan is drawn, not a builtins.str; .*choose_bits"
    ):
        report.bits("plan")


def test_a_notebook_lists_the_layers():
    rows = table_of(plan())["rows"]
    assert [row["outcome"] for row in rows] == ["float", "4 bits", "8 bits"]
    assert [row["good"] for row in rows] == [False, True, True]
    shown = plan()._repr_html_()
    assert "70 bytes of weights" in shown
    assert "<script" not in shown


def test_long_names_fit_any_width(tabs, tmp_path):
    op = "functional_1/sep0_1/separable_conv2d/depthwise"
    options = (BitOption(4, 72, 0.01, 0.03), BitOption(8, 144, 0.001, 0.004))
    layer = LayerBits((op,), "DepthwiseConv2dNative", 144, 4, options)
    page = report.bits(BitPlan("int8", "", (layer,), (), 72, 144, 0.1, 0.1, 0))
    path = page.save(tmp_path / "bits.html")
    _, new_tab = tabs
    tab = new_tab()
    tab.goto(path.as_uri())
    for width in (390, 1280):
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        # Three lines at most, where a phone showed one letter a line.
        name = tab.get_by_role("cell", name=op).bounding_box()
        assert name["height"] < 80
    tab.close()
