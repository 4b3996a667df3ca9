"""The page about memory, in a browser."""

import dataclasses
import re

import pytest

from geutil import report
from geutil.errors import ArgumentTypeError
from geutil.gradients import Plan, PlanCurve
from geutil.memory import LiveTensor
from tests.report.browsing import numbers
from tests.report.samples import MB, timeline

PHASES = ("forward", "recompute", "backward", "update", "bookkeeping")


@pytest.fixture
def trained(browse, steps):
    page = report.memory(
        steps.plain, steps.saving, title="A training step", report=steps.report
    )
    return browse(page)


def sizes_in(text):
    """Return the sizes that a text names, in bytes."""
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    found = re.findall(r"([\d.]+) (B|kB|MB|GB)\b", text)
    return [float(number) * units[unit] for number, unit in found]


def test_the_curve_of_plans_is_drawn(browse, steps, keep):
    plans = tuple(
        Plan(
            *(budget, budget - 1, 40_000_000, extra, extra / 2, (("Tanh", 3),)),
            *(((0, 1),), (), (), 2, ""),
            loops=loops,
        )
        for budget, extra, loops in (
            (30_000_000, 0.05, ()),
            (20_000_000, 0.125, (0, 2, 1)),
        )
    )
    curve = PlanCurve(40_000_000, 39_000_000, plans, (1_000_000,))
    told = dataclasses.replace(steps.report, budget=20_000_000)
    page = browse(report.memory(steps.plain, steps.saving, report=told, curve=curve))
    keep(page, "plans")
    rows = page.page.locator(".plans tbody tr")
    assert rows.count() == 2
    assert "12.5 %" in rows.nth(1).inner_text()
    assert "6.3 %" in rows.nth(1).inner_text()
    assert "3 Tanh" in rows.nth(0).inner_text()
    assert "loops" not in rows.nth(0).inner_text()
    assert "2 ops; loops: 2" in rows.nth(1).inner_text()
    assert rows.nth(1).get_attribute("class") == "chosen"
    assert "no plan was found for 1.0 MB" in page.page.locator(".plans").inner_text()
    # The points and the line between them, in the colour of plans.
    assert page.dots(".plans canvas")[0][224, 122, 31] > 200


def test_what_is_no_curve_is_refused(steps):
    with pytest.raises(ArgumentTypeError, match="plan_curve"):
        report.memory(steps.plain, curve=[1, 2])


def test_the_peaks_are_told_and_drawn(trained, steps, keep):
    headline = trained.page.locator(".answers div").first.inner_text()
    plain, saving = sizes_in(headline)[:2]
    assert plain == pytest.approx(steps.plain.peak, rel=1e-3)
    assert saving == pytest.approx(steps.saving.peak, rel=1e-3)
    ratio = float(re.search(r"ratio ([\d.]+)", headline)[1])
    assert ratio == pytest.approx(steps.saving.peak / steps.plain.peak, abs=0.005)
    # The colours of the two, at full strength: more than the marks of the peaks.
    (colours,) = trained.dots(".chart canvas")
    assert colours[51, 101, 138] > 200
    assert colours[224, 122, 31] > 200
    keep(trained, "memory")
    first = trained.page.locator("main .legend").first
    assert first.locator("span").all_inner_texts() == ["plain", "checkpoints"]
    for line, text in zip(
        (steps.plain, steps.saving),
        trained.page.locator(".held").all_inner_texts(),
        strict=True,
    ):
        assert f"{len(line.at_peak)} tensors alive at the peak" in text
        for tensor in line.at_peak[:5]:
            assert tensor.name in text
        assert line.moments[line.peak_index].op in text
    rows = trained.page.locator(".report tr")
    assert rows.count() == len(steps.report.kept) + len(steps.report.recomputed)
    assert steps.report.kept[0].name in rows.first.inner_text()


def test_smaller_ones_are_listed_on_request(browse):
    held = [LiveTensor(f"held{i}:0", "MatMul", (40 - i) * MB) for i in range(40)]
    page = browse(report.memory(timeline([1, 820], held)))
    rows = page.page.locator(".held tr")
    assert rows.count() == 25
    page.page.get_by_role("button", name="15 smaller").click()
    assert rows.count() == 40
    assert "held39:0" in rows.last.inner_text()
    assert "1.0 MB" in rows.last.inner_text()


def test_strips_count_the_phases(trained, steps):
    for line, text in zip(
        (steps.plain, steps.saving),
        trained.page.locator(".strip .dim").all_inner_texts(),
        strict=True,
    ):
        counted = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)(?:,|$)", text)}
        phases = [moment.phase for moment in line.moments]
        expected = {name: phases.count(name) for name in PHASES}
        assert counted == {name: count for name, count in expected.items() if count}
        assert f"{len(line.moments)} ops in order of execution" in text


def test_strips_have_the_colours_of_the_legend(trained):
    legend = trained.page.locator("main .phases")
    assert legend.locator("span").all_inner_texts() == list(PHASES)
    marks = legend.locator("i").evaluate_all(
        "(marks) => marks.map((one) => one.style.background)"
    )
    forward, recompute, backward, update, bookkeeping = map(numbers, marks)
    plain, saving = trained.dots(".strip canvas")
    assert {forward, backward, update} <= set(plain)
    assert recompute not in plain
    assert {forward, recompute, backward, update} <= set(saving)
    # Constants, shapes and control take no time, and have a place among the ops alone.
    assert bookkeeping not in plain
    trained.page.get_by_label("horizontal axis").select_option("ops")
    assert bookkeeping in trained.dots(".strip canvas")[0]


def test_the_curve_is_read_under_the_pointer(browse):
    sizes = [1, 2, 9, 4, 5]
    page = browse(report.memory(timeline(sizes), timeline([1, 3])))
    reading = page.page.locator(".reading")
    assert "Move over the curve" in reading.inner_text()
    area = page.page.locator(".chart .u-over").bounding_box()
    middle = area["y"] + area["height"] / 2
    for place, size in enumerate(sizes):
        share = (place + 0.5) / len(sizes)
        x = area["x"] + 1 + share * (area["width"] - 2)
        page.page.mouse.move(x, middle)
        page.until(
            "(text) => document.querySelector('.reading').textContent.includes(text)",
            f"op {place}: {size}.0 MB, forward, op{place}",
        )
    assert "checkpoints" not in reading.inner_text()


def test_one_timeline_has_one_curve(browse, steps):
    page = browse(report.memory(steps.plain))
    assert page.page.locator(".strip").count() == 1
    assert page.page.locator(".held").count() == 1
    assert "ratio" not in page.page.locator(".answers").inner_text()
    # So has a step without ops.
    page = browse(report.memory(timeline([])))
    assert "step: 0 B" in page.page.locator(".answers").inner_text()
    # Without times there is one axis, that of the ops.
    assert page.page.get_by_label("horizontal axis").is_hidden()
