"""Steps on a GPU that is not there: its memory, by TensorFlow's registry and rules.

The peaks of an H100 are in docs/measured.md; `tests/memory/test_buffers.py` compares
chunks with those of TensorFlow's own allocator.
"""

import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, PlanError, SelectionError
from geutil.gradients import Budget, checkpointed, explain, gradients, last_report, plan
from geutil.memory import (
    Node,
    Program,
    largest_batch,
    predict,
    predict_by_device,
    simulate,
    step_program,
    worst_case,
)
from geutil.memory.bounds import simulate_side_by_side, worst_of
from geutil.memory.buffers import ALIGNMENT
from geutil.memory.program import Allocator, Device
from geutil.memory.step_prediction import executed_step
from geutil.sizes import size_text
from tests.processes import run_python

GPU = "GPU:0"
v1 = tf.compat.v1


def in_graph(make):
    with tf.Graph().as_default():
        return make()


def conv_step(checkpoints=None, batch=8, device=None, layers=6):
    """Return the fetches of a step of convolutions, channels last."""

    def make():
        x = v1.placeholder(tf.float32, [batch, 32, 32, 16])
        filters = [
            v1.get_variable(f"w{i}", [3, 3, 16, 16], use_resource=True)
            for i in range(layers)
        ]
        y = x
        for w in filters:
            y = tf.tanh(tf.nn.conv2d(y, w, 1, "SAME"))
        loss = tf.reduce_mean(tf.square(y))
        if checkpoints is None:
            return tf.gradients(loss, filters)
        return gradients(loss, filters, checkpoints=checkpoints, device=device)

    return in_graph(make)


def executed_types(fetches, device):
    step = executed_step(fetches, None, None, True, None, device)
    return Counter(op.type for op in step.ops)


def test_shapes_and_integers_are_in_the_memory_of_the_host():
    def make():
        x = v1.placeholder(tf.float32, [1000, 250])
        rows = tf.argsort(v1.placeholder(tf.int32, [1_000_000]))
        return [tf.tanh(x), tf.add(rows, rows)]

    fetches = in_graph(make)
    # On the CPU the sorted integers and their sum count, of 4 MB each.
    assert predict(fetches, grappler=False).peak > 9_000_000
    on_gpu = in_graph(lambda: [tf.add(v1.placeholder(tf.int32, [10**6]), 1)])
    assert predict(on_gpu, device=GPU, grappler=False).peak == 0


def test_what_the_host_makes_counts_once_it_is_sent():
    def make():
        with tf.device("/CPU:0"):
            x = tf.random.stateless_uniform([1000, 1000], [1, 2])
            unread = tf.reduce_sum(tf.sort(x))
        return tf.tanh(x), unread

    y, unread = in_graph(make)
    assert predict(y, device=GPU, grappler=False).peak == 4_000_000
    assert predict(unread, device=GPU, grappler=False).peak == 0


def test_a_step_takes_whole_chunks_and_room_for_its_variables():
    def make():
        w = v1.get_variable("w", [1001, 1001], use_resource=True)
        return v1.placeholder(tf.float32, [1001, 1001]) @ w

    timeline = predict(in_graph(make), device=GPU)
    size = 1001 * 1001 * 4
    chunk = -(-size // ALIGNMENT) * ALIGNMENT
    assert (timeline.peak, timeline.resident) == (size, chunk)
    assert (timeline.variable_bytes, timeline.extent) == (size, 2 * chunk)
    assert not timeline.note


def test_grappler_is_asked_for_the_gpu():
    fetches = conv_step()
    assert executed_types(fetches, None)["Transpose"] == 0
    # Channels first, as on a GPU.
    assert executed_types(fetches, GPU)["Transpose"] > 0


def test_the_worst_case_is_one_of_chunks():
    # Chunks of 4 KiB and their gaps: one tensor of 3,072 bytes lies in a free one.
    sizes = [4096, 256, 2304]
    nodes = [
        Node("large", "Op", outputs=[0]),
        Node("wall", "Op", inputs=[0], outputs=[1], controls=[0]),
        Node("small", "Op", outputs=[2], controls=[1]),
    ]
    gpu = Device("GPU", False, Allocator())
    program = Program(nodes, sizes, fetched=[1, 2], device=gpu)
    worst = worst_of(program)
    assert (worst.peak, worst.gaps) == (4096 + 256 + 1792, 1792)
    assert simulate(program).resident == 4096 + 256 <= worst.peak
    assert worst_of(replace(program, device=Device())).gaps == 0


@pytest.mark.parametrize("checkpoints", [None, "memory"])
def test_no_schedule_takes_more_chunks_than_the_worst_case(checkpoints):
    fetches = conv_step(checkpoints, device=GPU)
    worst = worst_case(fetches, device=GPU)
    program = executed_step(fetches, None, None, True, None, GPU).program
    taken = [
        simulate_side_by_side(program, threads, seed).resident
        for threads in (1, 3, 8)
        for seed in range(100, 140)
    ]
    assert max(taken) <= worst.peak <= 1.15 * max(worst.reached, *taken)
    assert predict(fetches, device=GPU).resident <= worst.peak
    assert f"{size_text(worst.gaps)} of it in chunks' gaps" in str(worst)


def test_tensorflows_allocator_hands_out_no_more_than_the_worst_case():
    # The allocator of GPUs, which a CPU can have, and eight ops at once.
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    child = run_python("-c", RUN_ON_CHUNKS, environment=environment)
    assert child.returncode == 0, child.stderr.decode()[-2000:]
    measured, resident, worst = json.loads(child.stdout)
    assert 0.8 * resident < measured <= worst <= 1.3 * resident


RUN_ON_CHUNKS = """
import json
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(8)
from geutil.gradients import gradients, last_report
ws = [tf.Variable(tf.ones([3, 3, c, d]) / 99) for c, d in
      zip((16, 24, 40, 16, 56, 24, 32, 48), (24, 40, 16, 56, 24, 32, 48, 16))]

@tf.function(autograph=False)
def step(x):
    y = x
    for w in ws:
        y = tf.tanh(tf.nn.conv2d(y, w, 1, "SAME"))
    slopes = gradients(tf.reduce_mean(y * y), ws, checkpoints="memory")
    for w, slope in zip(ws, slopes):
        w.assign_sub(0.1 * slope)

traced = step.get_concrete_function(tf.TensorSpec([32, 48, 48, 16]))
report, x, peaks = last_report(traced), tf.ones([32, 48, 48, 16]), []
for _ in range(6):
    tf.config.experimental.reset_memory_stats("CPU:0")
    rest = tf.config.experimental.get_memory_info("CPU:0")["current"]
    traced(x)
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - rest)
# In the first call Grappler computes constants, too.
print(json.dumps([max(peaks[1:]), report.resident, report.worst]))
"""


def test_the_layout_optimizer_of_the_process_is_asked():
    fetches = conv_step()
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    try:
        assert executed_types(fetches, GPU)["Transpose"] == 0
    finally:
        on = options.get("layout_optimizer", True)
        tf.config.optimizer.set_experimental_options({"layout_optimizer": on})


def test_a_planned_step_keeps_its_layout_and_its_report():
    @tf.function(autograph=False)
    def step(x):
        y, filters = x, weights
        for w in filters:
            y = tf.tanh(tf.nn.conv2d(y, w, 1, "SAME"))
        loss = tf.reduce_mean(tf.square(y))
        slopes = gradients(loss, filters, checkpoints="memory", device=GPU)
        for w, slope in zip(filters, slopes, strict=True):
            w.assign_sub(slope)
        return loss

    weights = [tf.Variable(tf.ones([3, 3, 16, 16])) for _ in range(8)]
    traced = step.get_concrete_function(tf.TensorSpec([8, 32, 32, 16]))
    report = last_report(traced)
    fetches = [*traced.graph.outputs, *traced.graph.control_outputs]
    assert executed_types(fetches, None)["Transpose"] == 0
    # Where the step was planned for is where it is predicted.
    timeline = predict(fetches)
    assert timeline.extent is not None
    assert report.peak == pytest.approx(timeline.peak, rel=0.005)
    assert report.resident == pytest.approx(timeline.resident, rel=0.05)
    assert report.worst >= max(report.resident, timeline.resident)
    assert report.peak < 0.7 * report.plain_peak
    # It runs here all the same.
    assert np.isfinite(traced(tf.ones([8, 32, 32, 16])).numpy())


def test_a_budget_is_one_of_chunks():
    def make():
        x = v1.placeholder(tf.float32, [8, 32, 32, 16])
        filters = [tf.ones([3, 3, 16, 16]) for _ in range(10)]
        y = x
        for w in filters:
            y = tf.tanh(tf.nn.conv2d(y, w, 1, "SAME"))
        return tf.reduce_mean(tf.square(y)), filters

    with tf.Graph().as_default():
        loss, filters = make()
        report = explain(loss, filters, checkpoints=Budget("60%"), device=GPU)
        assert report.resident <= 0.6 * report.plain_resident
        found = plan(loss, filters, "60%", device=GPU)
        gradients(loss, filters, checkpoints=found, device=GPU)
        assert last_report().peak == found.peak


def test_checkpointed_layers_are_planned_for_a_gpu():
    w = tf.Variable(tf.ones([64, 64]))

    def block(x):
        for _ in range(6):
            x = tf.tanh(x @ w)
        return x

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(checkpointed(block, device=GPU)(x))
        return tape.gradient(loss, w)

    traced = step.get_concrete_function(tf.TensorSpec([512, 64]))
    assert predict(traced.graph.outputs).extent is not None


@pytest.mark.parametrize("grad", [False, True])
def test_batch_norm_copies_channels_first(grad):
    def make():
        x = v1.placeholder(tf.float32, [8, 16, 16, 32])
        y, *_ = v1.nn.fused_batch_norm(x, tf.ones([32]), tf.zeros([32]))
        return tf.gradients(y, x, v1.placeholder(tf.float32, x.shape)) if grad else y

    program = step_program(in_graph(make))
    size = 8 * 16 * 16 * 32 * 4
    assert max(node.temporary for node in program.nodes) < size
    fetches = in_graph(make)
    peak = predict(fetches, device=GPU, grappler=False).peak
    # An output and two copies; for the gradient three.
    assert peak - (4 if grad else 3) * size < 3_000 + (size if grad else 0)


def test_the_largest_batch_leaves_room_for_fragments():
    found = largest_batch(lambda batch: conv_step(batch=batch), "64MB", device=GPU)
    step = predict(conv_step(batch=found.batch), device=GPU)
    larger = predict(conv_step(batch=found.batch + 1), device=GPU)
    room = 64_000_000 - step.constant_bytes
    assert step.extent <= room < larger.extent
    assert found.batch < largest_batch(lambda b: conv_step(batch=b), "64MB").batch


def test_memory_that_grows_has_no_less_than_is_in_use(monkeypatch):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    for rows in (7, 8, 37, 60):
        timeline = predict(conv_step("memory", rows, GPU, 8), grappler=False)
        assert timeline.extent >= timeline.resident + timeline.variable_bytes
    # TensorFlow takes no other spelling.
    grown = predict(conv_step(batch=8), device=GPU).resident
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "1")
    assert predict(conv_step(batch=8), device=GPU).resident < grown


def test_a_refused_call_plans_for_no_device():
    with tf.Graph().as_default():
        x = tf.ones([4096])
        y = tf.tanh(tf.tanh(x))
        with pytest.raises(PlanError):
            gradients(y, x, checkpoints=Budget(1), device=GPU)
        with pytest.raises(SelectionError):
            gradients(y, x, checkpoints="none", device=GPU)
        assert predict(gradients(y, x, checkpoints="memory")).extent is None


def test_times_of_a_gpu_that_is_not_there_are_not_measured():
    with tf.Graph().as_default():
        x = tf.ones([4096])
        y = tf.tanh(tf.tanh(x))
        with pytest.raises(PlanError, match="plan without measured=True"):
            plan(y, x, Budget("90%", measured=True), device=GPU)


def test_a_report_says_that_grappler_turns_images():
    options = tf.config.optimizer.get_experimental_options()
    mixed = {"auto_mixed_precision": True}
    tf.config.optimizer.set_experimental_options(mixed)
    try:
        with tf.Graph().as_default():
            x = tf.ones([8, 32, 32, 16])
            y = tf.tanh(tf.nn.conv2d(x, tf.ones([3, 3, 16, 16]), 1, "SAME"))
            told = explain(y, x, device=GPU).warnings
            assert any("auto_mixed_precision" in warning for warning in told)
            told = explain(y, x).warnings
            assert not any("auto_mixed_precision" in warning for warning in told)
    finally:
        was = options.get("auto_mixed_precision", False)
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": was})


@pytest.mark.parametrize(
    "device", ["TPU:0", "the large one", "FPGA:0", "GPU:-1", "GPU:x"]
)
def test_devices_that_are_none_are_refused(device):
    fetches = conv_step()
    with pytest.raises(ArgumentTypeError, match=r"'.*' is no device"):
        predict(fetches, device=device)
    with tf.Graph().as_default() as graph:
        x = tf.ones([4])
        y = tf.tanh(x)
        count = len(graph.get_operations())
        with pytest.raises(ArgumentTypeError, match="is no device"):
            gradients(y, x, checkpoints="memory", device=device)
        assert len(graph.get_operations()) == count


def test_the_sum_over_several_gpus_is_said_to_be_one():
    def make():
        with tf.device("/GPU:1"):
            x = tf.random.stateless_uniform([100, 100], [1, 2])
        with tf.device("/CPU:0"):
            y = tf.square(x)
            least = tf.reduce_min(tf.sort(y))
        return tf.tanh(y), least

    fetches = in_graph(make)
    assert "sum over 2 devices" in predict(fetches, device=GPU, grappler=False).note
    assert "sum over 2 devices" in predict(fetches, grappler=False).note
    rows = predict_by_device(fetches, default=GPU, grappler=False).devices
    assert [row.device[-5:] for row in rows] == ["CPU:0", "GPU:0", "GPU:1"]
    # The host's memory is the host's: it receives, squares and sorts 40,000 bytes.
    assert rows[0].peak >= 120_000
    assert predict(fetches, device=GPU, grappler=False).peak < 240_000


def test_transfers_to_a_gpu_that_is_not_there_are_not_timed():
    with tf.Graph().as_default():
        x = y = tf.ones([256, 256])
        for _ in range(24):
            y = tf.tanh(tf.matmul(y, tf.ones([256, 256])))
        with pytest.raises(PlanError, match=r"GPU:0 is not in this machine.*bandwidth"):
            plan(y, x, Budget("60%", offload=True), device=GPU)
        fast = Budget("60%", offload=True, bandwidth=1e12)
        assert plan(y, x, fast, device=GPU).away


def test_planning_starts_no_device():
    # What starts TensorFlow's devices takes the memory of a GPU.
    child = run_python("-c", IDLE)
    assert child.returncode == 0, child.stderr.decode()[-2000:]


IDLE = """
import tensorflow as tf
from tests.processes import run_python
from geutil.gradients import gradients
from geutil.memory import predict
with tf.Graph().as_default():
    x = y = tf.compat.v1.placeholder(tf.float32, [64, 64])
    for _ in range(6):
        y = tf.tanh(y)
    predict(gradients(y, x, checkpoints="memory", device="GPU:0"))
# Refused once the devices have started.
tf.config.threading.set_inter_op_parallelism_threads(1)
"""
