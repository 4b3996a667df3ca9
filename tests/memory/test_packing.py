"""Memory of kernels beside TensorFlow's allocator, against that of the process.

Each op runs in a process where malloc gives large blocks back at once, so that what the
process grows by is what the op's kernel wrote to.
"""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from geutil.memory.kernels import cpu
from tests.processes import run_python
from tests.thorough import chosen, thorough

needs_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="Eigen's blocks are those of AVX, and Linux tells what a process holds",
)
TOLERANCE = 0.6e6
"""Bytes for stacks of threads and buffers of some KB."""
CHILD = """
import ctypes, json, sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from tests.memory.test_packing import built, status
libc = ctypes.CDLL(None)
libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD

cases, threads = json.loads(sys.argv[1])
for case in cases:
    with tf.Graph().as_default() as graph:
        op, fed = built(case)
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1,
        intra_op_parallelism_threads=threads,
    )
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        feeds = {}
        for tensor in fed:
            # A Session takes arrays on 64 bytes as they are.
            dtype, count = tensor.dtype.as_numpy_dtype, tensor.shape.num_elements()
            room = np.zeros(count * tensor.dtype.size + 64, np.uint8)
            room = room[-room.ctypes.data % 64 :][: count * tensor.dtype.size]
            feeds[tensor] = room.view(dtype).reshape(tensor.shape)
            feeds[tensor][...] = 1
        grown = []
        for _ in range(4):
            libc.malloc_trim(0)
            before = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            session.run(op, feeds)
            grown.append(status("VmHWM") - before)
    print(json.dumps(min(grown[1:])), flush=True)
"""
CASES = [
    ("MatMul", [1024, 1024], [1024, 1024], False, False),
    ("MatMul", [16, 2048], [1000, 2048], False, True),
    ("MatMul", [16, 2048], [2048, 1000], False, False),
    ("MatMul", [64, 10000], [64, 64], True, False),
    ("MatMul", [16384, 64], [16384, 64], True, False),
    ("BatchMatMulV2", [2, 1024, 256], [2, 256, 1024], False, False),
    ("Conv2D", [8, 17, 17, 192], [1, 7, 192, 192], 1),
    ("Conv2D", [16, 7, 7, 512], [3, 3, 512, 512], 1),
    ("Conv2D", [8, 56, 56, 64], [1, 1, 64, 128], 1),
    ("Conv2DBackpropFilter", [8, 14, 14, 256], [3, 3, 256, 256], 1),
    ("Conv2DBackpropFilter", [8, 25, 25, 288], [1, 1, 288, 64], 1),
    ("Conv2DBackpropInput", [8, 7, 7, 512], [3, 3, 512, 512], 1),
    ("Conv2DBackpropInput", [8, 16, 16, 64], [3, 3, 64, 128], 2),
    ("Conv3DBackpropFilterV2", [1, 16, 24, 24, 16], [3, 3, 3, 16, 32], 1),
    ("Conv2D", [8, 28, 28, 64], [3, 3, 64, 64], 1, "half"),
    ("Einsum", [4, 128, 8, 64], [4, 128, 8, 64], "aecd,abcd->acbe"),
    ("SoftmaxCrossEntropyWithLogits", [1024, 1000], [1024, 1000]),
    ("LRN", [4, 28, 28, 64]),
]


def built(case):
    """Return an op of a case in the default graph, and what it is fed."""
    kind, *shapes = case
    options = [shapes.pop() for _ in range(len(shapes)) if not _is_list(shapes[-1])]
    dtype = "float32"
    if options and options[0] == "half":
        dtype = options.pop(0)
    options.reverse()
    fed = [tf.compat.v1.placeholder(dtype, shape) for shape in shapes]
    if kind == "MatMul":
        a, b = options
        return tf.raw_ops.MatMul(
            a=fed[0], b=fed[1], transpose_a=a, transpose_b=b
        ).op, fed
    if kind == "BatchMatMulV2":
        return tf.raw_ops.BatchMatMulV2(x=fed[0], y=fed[1]).op, fed
    if kind == "Einsum":
        return tf.raw_ops.Einsum(inputs=fed, equation=options[0]).op, fed
    if kind == "SoftmaxCrossEntropyWithLogits":
        return tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=fed[0], labels=fed[1])[
            0
        ].op, fed
    if kind == "LRN":
        return tf.raw_ops.LRN(input=fed[0]).op, fed
    x, w = fed
    steps = [1, *[options[0]] * (len(shapes[0]) - 2), 1]
    forward = tf.raw_ops.Conv3D if "3D" in kind else tf.raw_ops.Conv2D
    y = forward(input=x, filter=w, strides=steps, padding="SAME")
    if kind in ("Conv2D", "Conv3D"):
        return y.op, fed
    slope = tf.compat.v1.placeholder(dtype, y.shape)
    common = {"out_backprop": slope, "strides": steps, "padding": "SAME"}
    if kind.endswith("Input"):
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shapes[0], filter=w, **common
        ).op, [w, slope]
    make = getattr(tf.raw_ops, kind)
    return make(input=x, filter_sizes=shapes[1], **common).op, [x, slope]


def _is_list(value):
    return isinstance(value, list)


def grown(cases, onednn, threads):
    """Return the bytes that a process grows by for each op."""
    environment = {
        **os.environ,
        "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    child = run_python(
        "-c", CHILD, json.dumps([cases, threads]), environment=environment
    )
    assert child.returncode == 0, child.stderr.decode()[-2000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


@needs_linux
@pytest.mark.parametrize("threads", chosen([1, 2], 2))
def test_an_op_takes_what_it_is_said_to(threads, monkeypatch):
    monkeypatch.setattr(cpu, "threads_of_ops", lambda: threads)
    wrong = {}
    for case, taken in zip(CASES, grown(CASES, False, threads), strict=True):
        with tf.Graph().as_default():
            op, _ = built(case)
        results = sum(t.dtype.size * t.shape.num_elements() for t in op.outputs)
        said = results + cpu.temporary_bytes(op, False) + cpu.packed_bytes(op, False)
        if abs(said - taken) > TOLERANCE + 0.05 * taken:
            wrong[str(case)] = said, taken
    assert wrong == {}


ONEDNN_CASES = [
    ("Conv2D", [16, 7, 7, 512], [3, 3, 512, 512], 1),
    ("Conv2DBackpropFilter", [8, 14, 14, 256], [3, 3, 256, 512], 1),
    ("Conv2DBackpropInput", [8, 7, 7, 512], [3, 3, 512, 512], 1),
    ("MatMul", [16, 2048], [2048, 1000], False, False),
    ("BatchMatMulV2", [2, 1024, 256], [2, 256, 1024], False, False),
    ("SoftmaxCrossEntropyWithLogits", [1024, 1000], [1024, 1000]),
]


@needs_linux
@thorough
def test_onednn_takes_filters_in_its_own_order():
    wrong = {}
    # Results come from memory that TensorFlow keeps from step to step.
    for case, taken in zip(ONEDNN_CASES, grown(ONEDNN_CASES, True, 2), strict=True):
        with tf.Graph().as_default():
            op, _ = built(case)
        said = cpu.packed_bytes(op, True)
        if abs(said - taken) > TOLERANCE + 0.05 * taken:
            wrong[str(case)] = said, taken
    assert wrong == {}


STEP = """
import ctypes, gc, json
from pathlib import Path
import tensorflow as tf
from geutil.gradients import gradients, last_report
from geutil.memory import predict
from tests.memory.test_packing import status
libc = ctypes.CDLL(None)
libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD
tf.config.threading.set_inter_op_parallelism_threads(1)
shapes = [[3, 3, 16, 64], [3, 3, 64, 256], [1, 7, 256, 128], [5, 5, 128, 64]]
weights = [tf.Variable(tf.ones(shape)) for shape in shapes]
biases = [tf.Variable(tf.ones(shape[-1:])) for shape in shapes]

@tf.function(autograph=False)
def step(x):
    y = x
    for w, b in zip(weights, biases):
        y = tf.tanh(tf.nn.bias_add(tf.nn.conv2d(y, w, 1, "SAME"), b))
    slopes = gradients(tf.reduce_sum(y), weights + biases, checkpoints="memory")
    return tf.add_n([tf.nn.l2_loss(slope) for slope in slopes])

x = tf.ones([4, 16, 16, 16])
traced = step.get_concrete_function(x)
grown = []
for _ in range(4):
    gc.collect()
    libc.malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    traced(x)
    grown.append(status("VmHWM") - before)
timeline, report = predict(traced.graph.outputs), last_report()
print(timeline.peak, timeline.resident, report.peak, report.resident, min(grown[1:]))
"""


def status(key):
    """Return a size of this process in bytes, by the kernel's name of it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


@needs_linux
def test_a_process_grows_by_what_is_predicted_to_be_resident():
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    child = run_python("-c", STEP, environment=environment)
    assert child.returncode == 0, child.stderr.decode()[-2000:]
    peak, resident, planned, planned_resident, grown = map(int, child.stdout.split())
    assert peak != resident
    assert planned != planned_resident
    assert 1 / 1.1 < grown / resident < 1.1, (peak, resident, grown)
    assert planned_resident < 1.05 * resident
