"""Reports beside the allocator of a GPU, where there is one.

Each check for a card runs on the CPU as well, with small steps and the same allocator.
"""

import pytest
import tensorflow as tf

from benchmarks.chunks import SIZES, row_in_a_child
from geutil.gradients import Budget, explain
from geutil.memory import measure, predict, worst_case
from tests.thorough import chosen

CPU = "CPU:0"
ON_BOTH = [CPU, pytest.param("GPU:0", marks=pytest.mark.gpu)]
SMALL = {"layers": 12, "rows": 4096, "width": 256}
WAYS = ("plain", "memory", "speed", "50%", "25%")
CPU_WAYS = ("plain", "memory", "memory, offload")


def assert_as_reported(row, peak, first):
    assert row.measured <= peak * row.reported
    assert row.first <= first * row.reported
    assert row.measured <= row.worst
    # The step ran, and had something to hold.
    assert row.measured > 0.5 * row.reported > 0 and row.seconds > 0


@pytest.mark.parametrize("way", chosen(CPU_WAYS, "memory, offload"))
def test_the_row_of_a_step_runs_on_the_cpu(way, monkeypatch):
    # oneDNN's kernels keep memory of their own.
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    row = row_in_a_child("chain", way, SMALL)
    assert row.device == CPU
    # Steps of a few MB, whose first call adds the regions of memory that grows.
    assert_as_reported(row, peak=1.15, first=1.5)
    assert row.plans == 1 and row.away == 0


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("network", SIZES)
def test_the_card_holds_what_the_report_says(network, way, optimizer):
    row = row_in_a_child(network, way, SIZES[network], optimizer)
    assert row.device == "GPU:0"
    assert_as_reported(row, peak=1.05, first=1.10)


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["chain", "encoder", "ResNet50"])
def test_offloading_holds_what_the_report_says(network):
    row = row_in_a_child(network, "memory, offload", SIZES[network])
    assert_as_reported(row, peak=1.05, first=1.10)
    without = row_in_a_child(network, "memory", SIZES[network])
    # It says so where nothing was sent.
    assert not row.away or row.measured <= 0.95 * without.measured


def chain_of(layers, device):
    with tf.device(device):
        weights = [tf.Variable(tf.ones([256, 256]) / 256) for _ in range(layers)]

    def loss_of(x):
        for w in weights:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x)

    return weights, loss_of


@pytest.mark.parametrize("device", ON_BOTH)
def test_measure_tells_what_is_predicted(device):
    weights, loss_of = chain_of(8, device)

    @tf.function(autograph=False)
    def step(x):
        with tf.device(device):
            return tf.gradients(loss_of(x), weights)

    x = tf.ones([2048, 256])
    measured = measure(step, [x])
    graph = step.get_concrete_function(x).graph
    timeline = predict(graph.outputs, device=device)
    worst = worst_case(graph.outputs, device=device).peak
    if device == CPU:
        # The order in which the ops run depends on addresses.
        assert 0.9 * timeline.peak < measured.peak <= worst
    else:
        assert 0.9 * timeline.resident < measured.allocator_peak
        assert measured.allocator_peak <= min(1.05 * timeline.resident, worst)


@pytest.mark.parametrize("device", ON_BOTH)
def test_ops_are_timed_for_a_budget(device):
    weights, loss_of = chain_of(12, device)

    @tf.function(autograph=False)
    def step(x):
        with tf.device(device):
            loss = loss_of(x)
        budget = Budget("60%", measured=True)
        report = explain(loss, weights, checkpoints=budget, device=device)
        assert report.resident <= report.budget
        # To compute tanh again takes less than a product, on any device.
        assert 0 <= report.extra_time < 0.5
        return loss

    step.get_concrete_function(tf.TensorSpec([1024, 256]))
