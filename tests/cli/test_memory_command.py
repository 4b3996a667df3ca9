"""`geutil memory`: what a model holds, and what less memory costs."""

import json

import tensorflow as tf

from geutil import model
from geutil.cli import training_step


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
    both, rows = geutil.tables(*large, "--curve", "--html", page)
    assert len(rows) == len(plans) + 1
    assert rows[-1]["peak, bytes"] == "no plan found"
    peaks = [int(row["peak, bytes"]) for row in both]
    assert peaks[1] < 0.8 * peaks[0]
    assert peaks[1] < within["peak"] <= 0.8 * within["plain_peak"]
    text = page.read_text()
    assert '"curve":' in text
    start = text.index('id="payload">') + len('id="payload">')
    drawn = json.loads(text[start : text.index("</script>", start)])["memory"]
    assert [max(line["bytes"]) for line in drawn["timelines"]] == peaks
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


def test_memory_tells_where_a_step_holds_more_than_wanted(geutil, tmp_path):
    """The planner does not know of updates, and the order lets tiny ops run freely."""
    small = chain(2).save(tmp_path / "small")
    over = geutil.json("memory", small, "--batch", "32", "--budget", "80%")
    peak, budget, plain = (over[name] for name in ("peak", "budget", "plain_peak"))
    assert peak > budget
    assert peak > plain
    *_, of_budget, of_plain = over["warnings"]
    assert (
        f"{peak:,} bytes at its peak, more than the budget of {budget:,}" in of_budget
    )
    assert f"{peak:,} bytes at its peak, with plain gradients {plain:,}" in of_plain
    within = geutil.json("memory", small, "--batch", "256", "--budget", "100%")
    assert within["peak"] <= within["plain_peak"] <= within["budget"]
    assert within["warnings"] == []


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
    (rows,) = geutil.tables("memory", net, "--memory", "500KB", "--largest-batch")
    # Some four for each way.
    assert len(steps) <= 24
    plans = [f"a plan, {share}% more time" for share in (10, 20, 40)]
    ways = ["plain", "order alone", "checkpoints", *plans]
    assert [row["gradients"] for row in rows] == ways
    plain, ordered, saving, *planned = (int(row["largest batch"]) for row in rows)
    assert 0 < plain <= ordered < saving
    # Any op as often as pays: more time fits at least as much.
    assert ordered <= planned[0] <= planned[1] <= planned[2]
    assert plain < planned[0] and saving <= planned[2]
    assert all(int(row["with variables, bytes"]) <= 500_000 for row in rows)
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
    ((_, row),) = geutil.tables(*large, "--device", "GPU:0")
    assert row["chunks, bytes"] == str(there["chunks"])
    limit = ("--largest-batch", "--memory", "50MB")
    rows = geutil.json("memory", net, *limit, "--device", "GPU:0")
    batches = [row["largest_batch"] for row in rows]
    assert 0 < batches[0] < batches[2]
    refused = geutil(*large, "--device", "TPU:0")
    assert refused.code == 1
    assert "no device that this TensorFlow has kernels for" in refused.err
