"""`geutil memory`: what a model holds, and what less memory costs."""

import json

import pytest
import tensorflow as tf

from geutil import model
from geutil.cli import training_step


def _mega(line):
    """Return the size in the second cell of a row, which has its unit."""
    number, unit = line.split("\t")[1].split()
    assert unit == "MB"
    return float(number)


def chain(count):
    """Return a model of layers behind one another, of which some have to be held."""
    stack = [tf.keras.layers.Dense(64, "tanh", name=f"l{i}") for i in range(count)]
    return model.open(tf.keras.Sequential([tf.keras.Input([64], name="x"), *stack]))


def test_memory_tells_what_checkpoints_save_and_what_less_memory_costs(
    geutil, tmp_path, monkeypatch
):
    """The same numbers are in the text and in the page."""
    net, page = chain(6).save(tmp_path / "net"), tmp_path / "net.html"
    large = ("memory", net, "--batch", "4096")
    # One usual budget shows as much as three; both forms have one curve.
    step = training_step.TrainingStep
    curves, curve = [], step.curve

    def once(*arguments):
        if not curves:
            curves.append(curve(*arguments))
        return curves[0]

    monkeypatch.setattr(step, "curve", once)
    monkeypatch.setattr(training_step, "BUDGETS", ("90%", "1%"))
    within = geutil.json(*large, "--budget", "80%", "--curve")
    plans = within["curve"]["plans"]
    assert [p["peak"] <= p["budget"] for p in plans] == [True] * len(plans)
    assert within["budget"] in [p["budget"] for p in plans]
    times = [p["extra_time"] for p in plans]
    assert times == sorted(times) and times[-1] > 0
    rows = geutil.done(*large, "--curve", "--html", page).splitlines()
    assert len(rows) == 2 + len(plans) + 1
    assert "no plan found" in rows[-1]
    peaks = [_mega(line) for line in rows[:2]]
    assert peaks[1] < 0.8 * peaks[0]
    assert 1e6 * peaks[1] < within["peak"] <= 0.8 * within["plain_peak"]
    text = page.read_text()
    assert '"curve":' in text
    start = text.index('id="payload">') + len('id="payload">')
    drawn = json.loads(text[start : text.index("</script>", start)])["memory"]
    held = [max(line["bytes"]) / 1e6 for line in drawn["timelines"]]
    assert held == pytest.approx(peaks, rel=1e-3)
    refused = geutil(*large, "--budget", "1MB")
    assert refused.code == 1
    assert "the least that was found is" in refused.err
    told = geutil.json(*large, "--extra-time", "20%")
    assert told["extra_time"] <= 0.2
    assert told["peak"] < told["plain_peak"]


def test_within_a_budget_as_much_is_kept_as_fits(geutil, tmp_path):
    """The plan that keeps less takes 31 % more time."""
    small = chain(3).save(tmp_path / "small")
    told = geutil.json("memory", small, "--batch", "742", "--budget", "949KB")
    assert told["peak"] <= 949_000 < told["plain_peak"]
    assert 0 < told["extra_time"] < 0.2


def test_memory_tells_how_large_a_batch_fits(geutil, tmp_path, monkeypatch):
    layers = tf.keras.layers
    # They are cheap to compute again.
    cheap = [
        layers.Activation(kind, name=f"a{i}")
        for i, kind in enumerate(("softplus", "tanh", "softplus"))
    ]
    stack = [tf.keras.Input([16, 1, 64], name="x"), layers.Dense(64, name="c")]
    net = model.open(tf.keras.Sequential([*stack, *cheap])).save(tmp_path / "net")
    step = training_step.TrainingStep
    built, steps = step.built, []

    def counting(*arguments, **options):
        steps.append(arguments)
        return built(*arguments, **options)

    monkeypatch.setattr(step, "built", counting)
    said = geutil.done("memory", net, "--memory", "500KB", "--largest-batch")
    # Some four for each way.
    assert len(steps) <= 24
    rows = [line.split("\t") for line in said.splitlines()]
    plans = [f"a plan, {share}% more time" for share in (10, 20, 40)]
    assert [r[0] for r in rows] == ["plain", "order alone", "checkpoints", *plans]
    plain, ordered, saving, *planned = (int(row[1]) for row in rows)
    assert 0 < plain <= ordered < saving
    # Any op as often as pays: more time fits at least as much.
    assert ordered <= planned[0] <= planned[1] <= planned[2]
    assert plain < planned[0] and saving <= planned[2]
    assert all(_mega("\t".join(row[1:])) <= 0.5 for row in rows)
    # What is said of that batch, and of one more: of the step, without the variables.
    variables = (64 * 64 + 64) * 4
    for batch, fits in ((saving, True), (saving + 1, False)):
        peak = geutil.json("memory", net, "--batch", str(batch))["peak"]
        assert (peak + variables <= 500_000) is fits


def test_memory_of_open_sizes(geutil, tmp_path):
    network = tf.keras.Sequential(
        [tf.keras.Input([None, None, 3], name="image"), tf.keras.layers.Conv2D(4, 3)]
    )
    model.open(network).save(tmp_path / "open")
    refused = geutil("memory", tmp_path / "open")
    assert refused.code == 1
    assert "--size image=" in refused.err
    geutil.done("memory", tmp_path / "open", "--size", "image=8,8,3")


def test_memory_is_that_of_a_gpu_that_is_not_there(geutil, tmp_path):
    net = chain(6).save(tmp_path / "net")
    large = ("memory", net, "--batch", "4097")
    here, there = geutil.json(*large), geutil.json(*large, "--device", "GPU:0")
    assert "chunks" not in here
    assert there["peak"] < 0.8 * there["plain_peak"]
    assert there["chunks"] >= there["peak"]
    assert there["plain_chunks"] >= there["plain_peak"]
    cells = geutil.done(*large, "--device", "GPU:0").splitlines()[1].split("\t")
    assert cells[2] == f"{there['chunks'] / 1e6:.4g} MB"
    limit = ("--largest-batch", "--memory", "50MB")
    rows = geutil.json("memory", net, *limit, "--device", "GPU:0")
    batches = [row["largest_batch"] for row in rows]
    assert 0 < batches[0] < batches[2]
    refused = geutil(*large, "--device", "TPU:0")
    assert refused.code == 1
    assert "no device that this TensorFlow has kernels for" in refused.err
