"""The page of the stages of a pipeline: what it is given, and in a browser."""

import json

import pytest

from geutil import model, report
from geutil.errors import ArgumentTypeError, ModelError, ReportError
from geutil.quantize import compare_int8
from tests import tflite_files
from tests.report import samples
from tests.report.test_keyboard import VIEWS, audit

LABELS = ("original", "folded", "quantized", "int8 file")


@pytest.fixture(scope="module")
def stages():
    quantized, blob = tflite_files.int8().model, tflite_files.int8().blob
    original, folded = model.open(tflite_files.network()), tflite_files.floats().model
    noise = compare_int8(quantized, blob, tflite_files.IMAGE, layers=True)
    return dict(zip(LABELS, (original, folded, quantized, blob), strict=True)), noise


@pytest.fixture(scope="module")
def page(stages):
    named, noise = stages
    return report.pipeline(named, noise=noise)


@pytest.fixture
def opened(browse, page):
    return browse(page)


def comparison(page, first, second):
    (found,) = (
        c
        for c in page.payload["pipeline"]["comparisons"]
        if c["stages"] == [first, second]
    )
    return found


def headings(page):
    return page.page.locator("section.drawing header strong").all_inner_texts()


def test_changes_are_those_of_a_comparison(stages, page):
    named, _ = stages
    values = list(named.values())
    for first, second in ((0, 1), (0, 2), (1, 2)):
        told = report.difference(values[first], values[second])
        counts = comparison(page, first, second)["counts"]
        assert counts["added"] == len(told.added) > 0
        assert counts["removed"] == len(told.removed)
        assert counts["rewired"] == len(told.rewired)
        assert counts["altered"] == len(told.altered)
    told = report.difference(values[2], values[3])
    counts = comparison(page, 2, 3)["counts"]
    assert counts["added"] == len(told.added)
    assert counts["removed"] == len(told.missing)
    assert counts["fused"] == sum(len(op.named + op.placed) > 1 for op in told.ops) > 0


def test_each_graph_is_stored_once(page, flow):
    assert len(page.payload["graphs"]) == len(LABELS)
    page = report.pipeline({"one": flow, "again": flow, "third": samples.flow()})
    assert len(page.payload["graphs"]) <= 2 * (1 + len(flow.functions))
    (sheets, *_) = (c["sheets"] for c in page.payload["pipeline"]["comparisons"])
    assert len(sheets) == 1 + len(flow.functions)
    for sheet in sheets:
        first, second = sheet["graphs"]
        assert first == second >= 0
        # The viewer reads 0 as "same".
        assert {*sheet["status"][0]} == {"0"}


def test_a_function_without_counterpart_stands_beside_nothing(flow):
    graph = samples.nested()
    page = report.pipeline({"flow": flow, "graph": graph, "again": flow})
    (main, *functions) = comparison(page, 0, 1)["sheets"]
    assert main["graphs"] == [0, 1]
    assert [sheet["graphs"][1] for sheet in functions] == [-1] * len(flow.functions)
    assert all(set(sheet["status"][0]) == {"2"} for sheet in functions)
    (_, *functions) = comparison(page, 1, 2)["sheets"]
    assert [sheet["graphs"][0] for sheet in functions] == [-1] * len(flow.functions)


def test_sizes_and_noise_of_each_stage(stages, page):
    named, _ = stages
    told = page.payload["pipeline"]["stages"]
    assert told[3]["sizes"] == {"file": len(named["int8 file"])}
    weights = sum(w.size * w.itemsize for w in tflite_files.network().get_weights())
    assert told[0]["sizes"]["variables"] == weights
    assert told[0]["ops"] == len(named["original"].reached_ops())
    graphs = page.payload["graphs"]
    assert ["noises" in graph for graph in graphs] == [False, False, True, True]
    for graph in graphs[2:]:
        assert any(band >= 0 for band in graph["noises"])


def test_files_are_named_after_the_graph_before(page):
    file, quantized = (page.payload["graphs"][at] for at in (3, 2))
    assert len({*file["names"]}) == len(file["names"])
    partners = comparison(page, 2, 3)["sheets"][0]["partners"][1]
    for at, ops in partners.items():
        assert file["names"][at] in [quantized["names"][op] for op in ops]
    json.dumps(page.payload)


def test_refusals(stages):
    named, noise = stages
    graph = samples.nested()
    with pytest.raises(ReportError, match="at least two"):
        report.pipeline({"one": graph})
    with pytest.raises(ReportError, match="called 'a'"):
        report.pipeline([("a", graph), ("a", graph)])
    for wrong in ([graph, graph], "ab", 3, {"": graph, "b": graph}):
        with pytest.raises(ArgumentTypeError, match="by name"):
            report.pipeline(wrong)
    with pytest.raises(ArgumentTypeError, match="a Model"):
        report.pipeline({"a": graph, "b": 3})
    with pytest.raises(ModelError, match="no file"):
        report.pipeline({"a": graph, "b": "nowhere.tflite"})
    both = {"a": graph, "b": graph}
    with pytest.raises(ArgumentTypeError, match="Int8Comparison"):
        report.pipeline(both, noise="loud")
    with pytest.raises(ReportError, match="no stage"):
        report.pipeline(both, noise=noise)
    quiet = type(noise)(noise.outputs, noise.samples, noise.float_ops)
    with pytest.raises(ReportError, match="layers=True"):
        report.pipeline(named, noise=quiet)


def test_the_strip_tells_of_each_stage(opened, keep):
    cards = opened.page.locator(".stages li").all_inner_texts()
    assert [card.splitlines()[0] for card in cards] == list(LABELS)
    assert "added" in cards[1] and "fused" in cards[3]
    assert headings(opened) == ["original", "folded"]
    keep(opened, "pipeline")


def test_both_panes_open_the_same_scopes_and_counts_agree(opened, page):
    """A file is no single closed box beside an open graph; its ends are no ops."""
    for _ in range(2):
        opened.page.keyboard.press("]")
    assert headings(opened) == ["quantized", "int8 file"]
    assert opened.open_scopes(0) == opened.open_scopes(1) != set()
    stage, nodes = page.payload["pipeline"]["stages"][3], page.payload["graphs"][3]
    ends = len(nodes["names"]) - stage["ops"]
    assert 0 < stage["ops"] < len(nodes["names"])
    told = f"{stage['ops']} ops, {ends} inputs and constants"
    assert told in opened.page.locator(".stages li").nth(3).inner_text()
    header = opened.page.locator("section.drawing header .dim").nth(1)
    assert header.inner_text() == told
    # Closed scopes say in words what became of their ops.
    lines = [line for text in opened.colours("lines", 1).values() for line in text]
    assert any(line.endswith(" fused") for line in lines)


def test_keys_step_along_and_any_two_are_shown(opened):
    opened.page.keyboard.press("]")
    assert headings(opened) == ["folded", "quantized"]
    for _ in range(3):
        opened.page.keyboard.press("]")
    assert headings(opened) == ["quantized", "int8 file"]
    opened.page.keyboard.press("[")
    assert headings(opened) == ["folded", "quantized"]
    pressed = opened.page.locator(".stages li button[aria-pressed='true'] strong")
    assert pressed.all_inner_texts() == ["folded", "quantized"]
    opened.page.locator(".stages li button").first.click()
    assert headings(opened) == ["original", "folded"]
    opened.page.get_by_label("right stage").select_option("int8 file")
    assert headings(opened) == ["original", "int8 file"]
    opened.page.get_by_label("left stage").select_option("int8 file")
    assert headings(opened) == ["quantized", "int8 file"]


def test_what_is_chosen_stays_chosen(opened):
    (name,) = opened.search("head_1/MatMul")[:1] or [""]
    opened.page.locator(".results button.link").first.click()
    assert opened.chosen(0) == opened.chosen(1) == {f":{name}"}
    opened.page.keyboard.press("Escape")
    opened.page.locator(".canvas").first.focus()
    for _ in range(2):
        opened.page.keyboard.press("]")
    assert headings(opened) == ["quantized", "int8 file"]
    assert opened.chosen(0) == {f":{name}"}
    (at_file,) = opened.chosen(1)
    assert "head" in at_file
    for _ in range(2):
        opened.page.keyboard.press("[")
    assert opened.chosen(0) == opened.chosen(1) == {f":{name}"}
    assert "stages=1-2" in opened.page.url


def test_a_line_of_noise_goes_to_its_stage(opened, keep):
    opened.turn_to("report")
    opened.page.keyboard.press("]")
    opened.page.keyboard.press("]")
    opened.page.locator(".report tr button").first.click()
    assert opened.marked(0)
    opened.press("open all")
    legend = opened.page.locator("footer.legend").inner_text()
    assert "not quantized" in legend
    keep(opened, "pipeline-noise")


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_an_audit_finds_nothing(opened, scheme, width, keep):
    audit(opened, keep, "pipeline", scheme, width)
