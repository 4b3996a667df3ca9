"""Pages of TFLite files, in a browser."""

from __future__ import annotations

import pytest

from geutil import report
from tests import tflite_files
from tests.settings import needs_eager

pytestmark = needs_eager


def legend(opened):
    return opened.page.locator("footer.legend span").all_inner_texts()


@pytest.fixture
def mixed(browse):
    return browse(report.view(tflite_files.mixed().blob, title="a mixed file"))


def test_ops_are_drawn_in_their_scopes(mixed, keep):
    assert {"before", "between", "behind"} <= mixed.drawn()
    mixed.press("open all")
    assert ":between/sine" in mixed.drawn()
    keep(mixed, "tflite_view")


def test_the_details_of_an_op(mixed):
    mixed.search("behind/conv")
    mixed.page.get_by_role("button", name="behind/conv", exact=True).click()
    assert "computes in int8" in mixed.details
    assert "CONV_2D" in mixed.details
    (output,) = mixed.listed("outputs")
    assert output.startswith(":0 int8 [1, 16, 16, 3], scale")
    assert any("3 scales along axis 0" in line for line in mixed.listed("inputs"))
    assert mixed.table()["padding"] == "SAME"


def test_floats_are_coloured_and_listed_first(mixed):
    mixed.press("open all")
    told = legend(mixed)
    assert {"converts", "float", "int8"} <= {text.strip() for text in told}
    colours = mixed.page.evaluate(
        """() => Object.fromEntries(window.geutil.drawings[0].core.nodes()
            .map((node) => [node.id(), node.data('colour')]))"""
    )
    assert colours[":between/sine"] != colours[":behind/conv"]
    assert colours["between"] != colours["behind"]
    first = mixed.page.locator(".report tbody tr").first.inner_text()
    assert "float32" in first
    assert "between/sine" in first


def test_subgraphs_are_opened_from_the_ops_that_run_them(browse):
    opened = browse(report.view(tflite_files.flow().blob))
    opened.search("while")
    opened.page.get_by_role("button", name="while", exact=True).click()
    opened.page.get_by_role("button", name="while_body", exact=True).click()
    opened.press("open all")
    assert any(key.endswith("in_loop") for key in opened.drawn())


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_file_beside_its_graph(browse, keep, is_turned):
    sample = tflite_files.int8()
    sides = (sample.blob, sample.model) if is_turned else (sample.model, sample.blob)
    opened = browse(report.diff(*sides, labels=("one", "other")))
    file = 0 if is_turned else 1
    for side in (0, 1):
        opened.press("open all", side)
    keep(opened, "tflite_diff")
    relu = next(key for key in opened.drawn(file) if key.endswith("stem_relu_1/Relu6"))
    scope = relu[1:].partition("/")[0]
    opened.search(f"{scope}/stem_1/convolution_fold")
    link = f"{scope}/stem_1/convolution_fold"
    results = opened.page.locator(".results")
    # The file's weights are called so, too; those of the graph stand on its side.
    results.get_by_role("button", name=link, exact=True).nth(
        -1 if is_turned else 0
    ).click()
    assert "fused in this comparison" in opened.details
    # What is one op in the file is chosen there.
    assert opened.chosen(file) == {relu}
    listed = opened.listed(f'in "{("one", "other")[file]}"')
    assert listed == [f"{relu[1:]} CONV_2D, int8"]
    assert {"added", "removed", "fused", "int8"} <= {t.strip() for t in legend(opened)}


def test_lines_of_the_report_lead_to_the_ops(browse):
    sample = tflite_files.mixed()
    opened = browse(report.diff(sample.model, sample.blob))
    opened.turn_to("report")
    opened.page.locator(".report tbody tr button.link").first.click()
    assert opened.marked(1) == {":between/sine"}
    assert opened.marked(0) == {":between/sine"}
