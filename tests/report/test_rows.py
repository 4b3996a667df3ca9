"""Reports as tables: each line says what it is about, by names that can be found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, report
from geutil.batchnorm import fold_batch_norms
from geutil.model import BatchEntry, BatchReport, Stripped, StripReport
from geutil.quantize import CalibrationReport, Int8Comparison, LayerNoise, OutputSteps
from geutil.report.rows import NOISE_BANDS, Row, noise_band, rows_of
from geutil.transform.rewrite import Any, Op, Rule, rewrite


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
        assert len(rows) == len(rows_of(edited.report).rows) > 5
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
    rows = rows_of(result).rows
    refused = result.refused[0]
    assert rows[0] == Row(
        "refused",
        False,
        f"{refused.keras_layer}: {refused.norm}",
        f"{refused.op} {refused.reason}",
        (refused.op, refused.norm),
    )
    assert rows[1].good
    page = report.diff(model.open(network), opened, report=result)
    assert unresolved(page) == []


def test_skipped_ops_of_a_quantization_come_first(quantized):
    result = quantized.report
    rows = rows_of(result).rows
    skipped = rows[: len(result.skipped)]
    assert [row.names for row in skipped] == [(entry.op,) for entry in result.skipped]
    assert [row.what for row in skipped if row.names[0] not in row.what] == []
    assert skipped
    assert len(rows) == len(result.skipped) + len(result.quantized)
    assert not any(row.good for row in skipped)
    assert all(row.good for row in rows[len(result.skipped) :])


def test_what_a_strip_kept_is_no_success():
    entries = (
        Stripped("removed", "dropout", "a/dropout", "its input passes"),
        Stripped("kept", "dropout", "b/dropout", "its rate is fed"),
    )
    rows = rows_of(StripReport(entries)).rows
    assert [row.good for row in rows] == [True, False]
    assert rows[1].detail == "its rate is fed"
    assert rows[0].names == ("a/dropout",)


def test_models_that_are_not_done_come_first():
    entries = (
        BatchEntry("a", "a.pb", "done", files={"a.tflite": 10}),
        BatchEntry("b", "b.pb", "failed", "no op", "fold"),
    )
    rows = rows_of(BatchReport("out", "fold,tflite", entries, ("a worker died",)))
    assert [(row.what, row.good) for row in rows.rows] == [("b", False), ("a", True)]
    assert rows.summary[1] == "a worker died"


def test_rewrites_name_the_new_ops_first():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.identity(tf.tanh(tf.tanh(x, name="inner"), name="outer"), name="y")
    twice = Op("Tanh", Op("Tanh", Any("x")))
    rule = Rule(twice, lambda match: tf.sigmoid(match["x"]), name="once")
    result = rewrite(graph, [rule])
    (row,) = rows_of(result).rows
    assert row.outcome == "rewritten"
    assert graph.get_operation_by_name(row.names[0]).type == "Sigmoid"
    assert row.names[0] in result.rewritten[0].new_ops
    assert unresolved(report.view(graph, report=result)) == []


def test_gradients_say_what_is_kept_and_what_runs_again(steps):
    rows = rows_of(steps.report)
    outcomes = [row.outcome for row in rows.rows]
    assert outcomes.count("kept") == len(steps.report.kept) > 0
    assert outcomes.count("recomputed") == len(steps.report.recomputed) > 0
    assert rows.summary


def test_ranges_of_a_calibration():
    ranges = {"a/quant": (-1.0, 1.0), "b/quant": (np.zeros(3), np.ones(3))}
    rows = rows_of(CalibrationReport(ranges, 2, "min_max"))
    assert rows.summary == ("2 range(s) set, min_max of 2 batch(es)",)
    assert [row.names for row in rows.rows] == [("a/quant",), ("b/quant",)]
    assert [row.detail for row in rows.rows] == ["-1 to 1", "0 to 1, 3 channels"]


def noise(op, own):
    return LayerNoise(op, "Conv2D", f"{op}/end:0", own, own, 1.0, 0.0, unmatched="lost")


OUTPUTS = (OutputSteps("y", 0.5, (3, 0, 1), 1, 1),)


def test_the_noisiest_layers_come_first():
    layers = noise("a", 35.0), noise("b", float("inf")), noise("c", 12.0)
    rows = rows_of(Int8Comparison(OUTPUTS, 3, (), (), layers))
    assert rows.title == "Noise of layers"
    assert rows.summary == (
        "3 sample(s), 2 step(s) apart at most, 0 float op(s)",
        "y: 2 step(s) apart at most",
        "3 layer(s); 'c' (Conv2D) adds most noise: 12.0 dB by itself",
    )
    assert [row.what for row in rows.rows] == ["c", "a", "b"]
    assert [row.outcome for row in rows.rows] == [
        "10 to 20 dB",
        "30 to 40 dB",
        "exact",
    ]
    assert [row.good for row in rows.rows] == [False, True, True]
    assert rows.rows[0].names == ("c", "c/end")
    assert rows.rows[0].detail == f"Conv2D: {layers[2]}"


def test_bands_of_noise():
    bands = {
        "below 10 dB": [float("-inf"), -3.0, 9.9],
        "10 to 20 dB": [10.0],
        "20 to 30 dB": [29.9],
        "40 dB and more": [40.0, 95.0],
        "exact": [float("inf")],
    }
    found = {
        band: [
            own for own in values if NOISE_BANDS[noise_band(noise("a", own))] == band
        ]
        for band, values in bands.items()
    }
    assert found == bands
    # Layers that are all zeros are not called exact.
    silent = dataclasses.replace(noise("a", float("inf")), silent=True)
    assert NOISE_BANDS[noise_band(silent)] == "all zeros"
    assert str(silent).startswith("own zeros, accumulated zeros")


def test_other_things_are_listed_line_by_line():
    class Result:
        def __str__(self):
            return "two done\n  first\n  second"

    rows = rows_of(Result())
    assert rows.title == "Result"
    assert rows.summary == ("two done",)
    assert [row.what for row in rows.rows] == ["first", "second"]
    assert rows_of("").rows == ()
