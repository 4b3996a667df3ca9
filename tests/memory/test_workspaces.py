"""Memory that kernels take for themselves, against TensorFlow's own records of it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph.fetched_subgraph import uses_onednn
from geutil.memory import workspaces
from geutil.memory.workspaces import runs_in_onednn, temporary_bytes
from tests.memory.tracing import trace
from tests.processes import check_in_a_process

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
@pytest.mark.parametrize("name", STEPS)
def test_kernels_take_what_they_are_said_to(name, dtype):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(dtype, IMAGES)
        made = []

        def weights(*shape):
            made.append(
                tf.compat.v1.placeholder_with_default(tf.ones(shape, dtype), shape)
            )
            return made[-1]

        y = STEPS[name](x, weights)
        slopes = tf.gradients(y * y, [x, *made])
    stats = trace(graph, slopes, {x: np.ones(IMAGES)}, grappler=False)
    taken = {n.node_name: n.memory_stats.temp_memory_size for n in stats}
    compared = [op for op in graph.get_operations() if op.type in KINDS]
    assert compared
    for op in compared:
        if op.type != "MirrorPadGrad" and runs_in_onednn(op):
            assert temporary_bytes(op) == 0
            assert taken[op.name] < ONEDNN_TAKES
        else:
            assert temporary_bytes(op) == taken[op.name]


@pytest.mark.parametrize(
    ("told", "takes"),
    [
        ("vendor\t: A\nflags\t\t: fpu avx2 avx512f sse\n", True),
        ("flags\t\t: fpu avx_ne_convert\n", True),
        ("flags\t\t: fpu avx avx2 avx512f_not\n", False),
        ("Features\t: fp asimd bf16\n", True),
        (None, True),
    ],
)
def test_kernels_of_bfloat16_are_those_of_some_processors(
    told, takes, tmp_path, monkeypatch
):
    file = tmp_path / "cpuinfo"
    if told is not None:
        file.write_text(told)
    monkeypatch.setattr(workspaces, "_PROCESSORS", file)
    assert workspaces._takes_bfloat16.__wrapped__() is takes


@pytest.mark.skipif(not uses_onednn(), reason="this is such a process")
def test_kernels_without_onednn():
    check_in_a_process([__file__], {"TF_ENABLE_ONEDNN_OPTS": "0"})
