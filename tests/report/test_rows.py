"""Reports as tables: each line says what it is about, by names that can be found."""

import dataclasses
import html

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, report
from geutil.batchnorm import fold_batch_norms
from geutil.model import BatchEntry, BatchReport, Stripped, StripReport
from geutil.quantize import (
    CalibrationReport,
    Int8Comparison,
    LayerNoise,
    NarrowInput,
    OutputSteps,
)
from geutil.rewrite import RewriteReport, Rewritten
from tests.report.samples import NOISE_BANDS, table_of


def unresolved(page):
    """Return the lines of a page's report that lead to no op of its graphs."""
    names = [name for graph in page.payload["graphs"] for name in graph["names"]]
    scopes = {
        name.rsplit("/", depth)[0]
        for name in names
        for depth in range(1, name.count("/") + 1)
    }
    known = scopes.union(names)
    return [
        row for row in page.payload["report"]["rows"] if not known & set(row["names"])
    ]


def test_every_line_of_an_edit_leads_somewhere(folded, quantized):
    for edited, outcomes in (
        (folded, {"folded"}),
        (quantized, {"quantized", "skipped"}),
    ):
        page = report.diff(edited.before, edited.after, report=edited.report)
        rows = page.payload["report"]["rows"]
        entries = [getattr(edited.report, word, ()) for word in (*outcomes, "refused")]
        assert len(rows) == sum(map(len, entries)) > 5
        assert unresolved(page) == []
        assert {row["outcome"] for row in rows} == outcomes
    page = report.diff(folded.before, folded.after, report=folded.report)
    summary = page.payload["report"]["summary"]
    assert summary == ("7 of 7 batch norm(s) folded, 0 refused",)


@pytest.fixture(scope="module")
def refused_fold():
    """A batch norm whose layer has another reader, and one that can be folded."""
    x = tf.keras.Input([8, 8, 3], name="x")
    layers = tf.keras.layers
    good = layers.BatchNormalization(name="good")(layers.Conv2D(2, 3, name="one")(x))
    alone = layers.BatchNormalization(name="alone")(tf.keras.layers.ReLU()(x))
    network = tf.keras.Model(x, [good, alone])
    opened = model.open(network)
    return network, opened, fold_batch_norms(opened)


def test_refusals_come_first_with_their_reasons(refused_fold):
    network, opened, result = refused_fold
    assert len(result.refused) == 1
    assert len(result.folded) == 1
    page = report.diff(model.open(network), opened, report=result)
    rows = page.payload["report"]["rows"]
    refused = result.refused[0]
    assert rows[0] == {
        "outcome": "refused",
        "good": False,
        "what": f"{refused.keras_layer}: {refused.norm}",
        "detail": f"{refused.op} {refused.reason}",
        "names": (refused.op, refused.norm),
    }
    assert rows[1]["good"]
    assert unresolved(page) == []


def test_skipped_ops_of_a_quantization_come_first(quantized):
    result = quantized.report
    rows = table_of(result)["rows"]
    skipped = rows[: len(result.skipped)]
    named = [(entry.op,) for entry in result.skipped]
    assert [row["names"] for row in skipped] == named
    assert [row["what"] for row in skipped if row["names"][0] not in row["what"]] == []
    assert skipped
    assert len(rows) == len(result.skipped) + len(result.quantized)
    assert not any(row["good"] for row in skipped)
    assert all(row["good"] for row in rows[len(result.skipped) :])


def noise(op, own):
    return LayerNoise(op, "Conv2D", f"{op}/end:0", own, own, 1.0, 0.0, unmatched="lost")


class Result:
    def __str__(self):
        return "two done\n  first\n  second"


STRIPPED = (
    Stripped("removed", "dropout", "a/dropout", "its input passes"),
    Stripped("kept", "dropout", "b/<b>", "its rate is fed"),
)
MODELS = (
    BatchEntry("a", "a.pb", "done", files={"a.tflite": 10}),
    BatchEntry("b", "b.pb", "failed", "no op", "fold"),
)
RANGES = {"a/quant": (-1.0, 1.0), "b/quant": (np.zeros(3), np.ones(3))}
STEPS = (
    OutputSteps(
        "close", 0.5, (90, 10), 4, 4, 9.0, (OutputSteps("part", 0.5, (10,), 0, 0),)
    ),
    OutputSteps("far", 0.5, (50, 0, 0, 50), 4, 1),
)
NARROW = NarrowInput("cat", "ConcatV2", "few", 0.4, 255, ("cat",))
FLOAT = ("ADD 'add/one'", "MUL 'scale/two'")
NOISE = (noise("a", 35.0), noise("b", float("inf")), noise("c", 12.0))
REPORTS = [
    StripReport(STRIPPED),
    BatchReport("out", "fold,tflite", MODELS, ("a worker died",)),
    CalibrationReport(RANGES, 2, "min_max", narrow=(NARROW,)),
    Int8Comparison(STEPS, 4, FLOAT, FLOAT[1:]),
    Int8Comparison(STEPS[:1], 3, (), (), NOISE),
    RewriteReport((Rewritten("relu6", "a/Relu6", ("a/Relu6",), ("a/Relu",)),)),
    Result(),
]
# A line that is good begins with +. Refusals and noise come first, as do new ops.
TOLD = f"""
Training
  1 removed, 0 turned, 1 kept; 0 ops dropped
+ removed | dropout a/dropout | its input passes | a/dropout
- kept | dropout b/<b> | its rate is fed | b/<b>
Models
  1 of 2 model(s) done, 1 failed: fold,tflite
  a worker died
- failed | b | failed: at 'fold': no op |
+ done | a | done: a.tflite 10 bytes |
Ranges
  2 range(s) set, min_max of 2 batch(es)
- too narrow | few | {NARROW} | few cat
+ set | a/quant | -1 to 1 | a/quant
+ set | b/quant | 0 to 1, 3 channels | b/quant
Steps
  4 sample(s), 3 step(s) apart at most, 2 float op(s)
+ 1 step(s) | close | within 1 step: 100.0000%, same largest: 4 of 4 (step 0.5) |
+ 0 step(s) | close, part | within 1 step: 100.0000%, same largest: 0 of 0 (step 0.5) |
- 3 step(s) | far | within 1 step: 50.0000%, same largest: 1 of 4 (step 0.5) |
+ float | ADD 'add/one' |  | add/one
- float | MUL 'scale/two' | though it is quantized in the model | scale/two
Noise of layers
  3 sample(s), 1 step(s) apart at most, 0 float op(s)
  close: 1 step(s) apart at most
  3 layer(s); 'c' (Conv2D) adds most noise: 12.0 dB by itself
- 10 to 20 dB | c | Conv2D: {NOISE[2]} | c c/end
+ 30 to 40 dB | a | Conv2D: {NOISE[0]} | a a/end
+ exact | b | Conv2D: {NOISE[1]} | b b/end
Rewrites
  1 rewritten, 0 refused
+ rewritten | a/Relu6 | relu6: 'a/Relu6' -> 'a/Relu' | a/Relu a/Relu6
Result
  two done
+  | first |  |
+  | second |  |
"""


def told(result):
    """Return the lines of a report; the table of a notebook has each, escaped."""
    found = table_of(result)
    lines = [found["title"], *(f"  {line}" for line in found["summary"])]
    for row in found["rows"]:
        cells = (row["outcome"], row["what"], row["detail"])
        line = " | ".join((*cells, " ".join(row["names"]))).rstrip()
        lines.append(f"{'+' if row['good'] else '-'} {line}")
        if hasattr(result, "_repr_html_"):
            table = result._repr_html_()
            assert [cell for cell in cells if html.escape(cell) not in table] == []
    return lines


def test_lines_of_each_kind_of_report():
    found = [line for result in REPORTS for line in told(result)]
    assert found == TOLD.strip().splitlines()
    assert table_of("")["rows"] == ()


def band_of(layer):
    (row,) = table_of(Int8Comparison(STEPS[:1], 3, (), (), (layer,)))["rows"]
    return row["outcome"]


def test_bands_of_noise():
    bands = {
        "below 10 dB": [float("-inf"), -3.0, 9.9],
        "10 to 20 dB": [10.0],
        "20 to 30 dB": [29.9],
        "40 dB and more": [40.0, 95.0],
        "exact": [float("inf")],
    }
    found = {
        band: [own for own in values if band_of(noise("a", own)) == band]
        for band, values in bands.items()
    }
    assert found == bands
    assert found.keys() < set(NOISE_BANDS)
    # Layers that are all zeros are not called exact.
    silent = dataclasses.replace(noise("a", float("inf")), silent=True)
    assert band_of(silent) == "all zeros"
    assert str(silent).startswith("own zeros, accumulated zeros")
