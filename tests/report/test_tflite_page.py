"""Pages of TFLite files, in a browser."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, report
from geutil.quantize import Spec, calibrate, compare_int8, quantize, to_int8
from tests import tflite_files
from tests.report.samples import NOISE_BANDS, noise_band
from tests.settings import needs_eager

pytestmark = needs_eager


def legend(opened):
    return opened.page.locator("footer.legend span").all_inner_texts()


@pytest.fixture
def mixed(browse):
    return browse(report.view(tflite_files.mixed().blob, title="a mixed file"))


def test_the_details_of_an_op(mixed):
    mixed.go("behind/conv")
    assert "computes in int8" in mixed.details
    assert "CONV_2D" in mixed.details
    (output,) = mixed.listed("outputs")
    assert output.startswith(":0 int8 [1, 16, 16, 3], scale")
    assert any("3 scales along axis 0" in line for line in mixed.listed("inputs"))
    assert mixed.table()["padding"] == "SAME"


def test_floats_are_coloured_and_listed_first(mixed, keep):
    assert {"before", "between", "behind"} <= mixed.drawn()
    mixed.press("open all")
    keep(mixed, "tflite_view")
    told = legend(mixed)
    assert {"converts", "float", "int8"} <= {text.strip() for text in told}
    colours = mixed.colours("fill")
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


@pytest.fixture(scope="module")
def noise():
    """A network of three layers, one of them with weights of two bits."""
    draw = np.random.default_rng(4).normal
    kernels = [
        draw(size=(3, 3, a, b)).astype(np.float32) for a, b in ((3, 6), (6, 6), (6, 4))
    ]

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 3], name="x")])
    def body(x):
        for name, kernel in zip(("first", "coarse", "last"), kernels, strict=True):
            x = tf.nn.conv2d(x, kernel, 1, "SAME", name=f"{name}/conv")
            x = tf.nn.relu(x, name=f"{name}/relu")
        return {"y": tf.nn.max_pool2d(x, 2, 2, "SAME", name="pooled/pool")}

    m = model.open(body)
    quantize(m, is_training=False, overrides={"coarse": Spec(weight_bits=2)})
    data = {"x": draw(size=(2, 8, 8, 3)).astype(np.float32)}
    calibrate(m, data)
    sample = tflite_files.Sample(m, to_int8(m))
    return sample, data, compare_int8(m, sample.blob, data, layers=True)


def test_noise_is_a_column_of_both_graphs(noise):
    sample, _, comparison = noise
    page = report.diff(sample.model, sample.blob, report=comparison)
    graph, file = page.payload["graphs"][:2]
    for layer in comparison.layers:
        band = noise_band(layer)
        assert graph["noises"][graph["names"].index(layer.op)] == band
        end = layer.tensor.rpartition(":")[0]
        assert graph["noises"][graph["names"].index(end)] == band
        if not layer.unmatched:
            (place,) = (
                at
                for at, attributes in enumerate(file["attributes"])
                if attributes.get("tensor") == layer.file_tensor
            )
            assert file["noises"][place] == band
    weights = [place for place in graph["parameters"] if graph["noises"][place] >= 0]
    assert weights == []
    assert not any(file["noises"][place] >= 0 for place in file["parameters"])
    assert tuple(graph["noiseNames"]) == NOISE_BANDS


def test_pages_without_layers_have_no_column(noise):
    sample, data, comparison = noise
    plain = compare_int8(sample.model, sample.blob, data)
    for page in (report.view(sample.model, report=plain), report.view(sample.blob)):
        assert not any("noises" in graph for graph in page.payload["graphs"])
    turned = report.diff(sample.blob, sample.model, report=comparison)
    assert all("noises" in graph for graph in turned.payload["graphs"][:2])


def test_layers_are_coloured_by_their_noise(browse, keep, noise):
    sample, _, comparison = noise
    opened = browse(report.view(sample.model, title="noise", report=comparison))
    opened.press("open all")
    keep(opened, "noise_view")
    assert {"below 10 dB", "30 to 40 dB", "not quantized"} <= {
        text.strip() for text in legend(opened)
    }
    colours = opened.colours("fill")
    drawn = {
        layer.op: colours[f":{layer.op}"]
        for layer in comparison.layers
        if f":{layer.op}" in colours
    }
    assert set(drawn) == {layer.op for layer in comparison.layers}
    bands = {layer.op: noise_band(layer) for layer in comparison.layers}
    pairs = {(bands[op], colour) for op, colour in drawn.items()}
    assert len(pairs) == len({band for band, _ in pairs}) > 1
    worst = min(comparison.layers, key=lambda layer: layer.own)
    assert worst.op == "coarse/conv"
    # A closed scope has the colour of the noisiest op in it.
    assert drawn["coarse/conv"] != drawn["first/conv"]
    opened.press("close all")
    closed = opened.colours("fill")["coarse"]
    assert closed == drawn["coarse/conv"]
    first = opened.page.locator(".report tbody tr").first
    assert worst.op in first.inner_text()
    assert NOISE_BANDS[noise_band(worst)] in first.inner_text()
    first.locator("button.link").click()
    assert worst.op in opened.heading
    assert f"noise of its own {NOISE_BANDS[noise_band(worst)]}" in opened.details
