"""Memory that kernels take for themselves, against TensorFlow's own records of it.

`tests/gradients/test_processes.py` runs it again with oneDNN off.
"""

import numpy as np
import pytest
import tensorflow as tf

from geutil.memory.kernels import cpu
from geutil.memory.kernels.cpu import runs_in_onednn, temporary_bytes
from tests.memory.tracing import trace

IMAGES = [4, 32, 32, 16]
EXPLICIT = [[0, 0], [2, 2], [2, 2], [0, 0]]
STEPS = {
    "convolution": lambda x, w: tf.nn.conv2d(x, w(3, 3, 16, 20), 1, "SAME"),
    "one by one": lambda x, w: tf.nn.conv2d(x, w(1, 1, 16, 64), 1, "SAME"),
    "strided": lambda x, w: tf.nn.conv2d(x, w(5, 5, 16, 4), 2, "SAME"),
    "large": lambda x, w: tf.nn.conv2d(x, w(3, 3, 16, 256), 1, "SAME"),
    "explicit": lambda x, w: tf.nn.conv2d(x, w(3, 3, 16, 20), 1, EXPLICIT),
    "transposed": lambda x, w: tf.nn.conv2d_transpose(
        x, w(3, 3, 8, 16), [4, 64, 64, 8], 2
    ),
    "depthwise": lambda x, w: tf.nn.depthwise_conv2d(
        x, w(3, 3, 16, 2), [1] * 4, "SAME"
    ),
    "pool": lambda x, w: tf.nn.max_pool2d(x * w(16), 2, 2, "SAME"),
    "mirrored": lambda x, w: tf.pad(
        x * w(16), [[0, 0], [1, 1], [1, 1], [0, 0]], "SYMMETRIC"
    ),
}
KINDS = (
    "Conv2DBackpropFilter",
    "Conv2DBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
    "MaxPoolGrad",
    "MirrorPadGrad",
)
ONEDNN_TAKES = 200_000
"""Bytes that are left out of each of its kernels."""


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16], ids=str)
def test_kernels_take_what_they_are_said_to(dtype, graph):
    slopes, compared = [], []
    x = tf.compat.v1.placeholder(dtype, IMAGES)
    for name, step in STEPS.items():
        made = []

        def weights(*shape, made=made):
            value = tf.ones(shape, dtype)
            made.append(tf.compat.v1.placeholder_with_default(value, shape))
            return made[-1]

        with tf.name_scope(name.replace(" ", "_")):
            y = step(x, weights)
            slopes += tf.gradients(y * y, [x, *made])
        ops = graph.get_operations()
        own = [op for op in ops if op.type in KINDS and op not in compared]
        assert own, name
        compared += own
    stats = trace(graph, slopes, {x: np.ones(IMAGES)}, grappler=False)
    taken = {n.node_name: n.memory_stats.temp_memory_size for n in stats}
    wrong = {}
    for op in compared:
        said = temporary_bytes(op)
        if op.type != "MirrorPadGrad" and runs_in_onednn(op):
            is_right = said == 0 and taken[op.name] < ONEDNN_TAKES
        else:
            is_right = said == taken[op.name]
        if not is_right:
            wrong[op.name] = said, taken[op.name]
    assert wrong == {}


def test_kernels_of_bfloat16_are_those_of_some_processors(tmp_path, monkeypatch):
    told = {
        "vendor\t: A\nflags\t\t: fpu avx2 avx512f sse\n": True,
        "flags\t\t: fpu avx_ne_convert\n": True,
        "flags\t\t: fpu avx avx2 avx512f_not\n": False,
        "Features\t: fp asimd bf16\n": True,
    }
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu, "_PROCESSORS", file)
    takes = cpu._takes_bfloat16.__wrapped__
    assert takes() is True
    found = {text: (file.write_text(text), takes())[1] for text in told}
    assert found == told
