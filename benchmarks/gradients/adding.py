"""What sums ahead of time save where many ops read one large tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.rows import Row
from geutil.gradients import gradients
from geutil.gradients.tape import TapeEngine
from geutil.memory import measure

FAN, BLOCK = "fan", "dense block"
NETWORKS = (FAN, BLOCK)
SIDE = 4096
"""A square of floats of that side holds 64 MiB."""
BRANCHES = 64
LAYERS, GROWTH = 16, 64

Take = Callable[[tf.Tensor, list[tf.Tensor]], list[Any]]

LATE = TapeEngine(min_aggregate_bytes=2**62)
PLAIN, AT_THE_END, TAPE = "tf.gradients", "tape, sums at the end", "tape"
MEMORY, BOTH = "memory", "tape and memory"
# What the tape does for "memory" without sums ahead of time.
LATE_BOTH = "tape and memory, sums at the end"
WAYS: dict[str, Take] = {
    PLAIN: tf.gradients,
    AT_THE_END: partial(gradients, checkpoints=None, engine=LATE),
    TAPE: partial(gradients, checkpoints=None, engine="tape"),
    MEMORY: partial(gradients, checkpoints="memory"),
    LATE_BOTH: partial(gradients, checkpoints="memory", engine=LATE),
    BOTH: partial(gradients, checkpoints="memory", engine="tape"),
}


def fan(x: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the sum of many branches off one tensor, and what to differentiate by."""
    rng = np.random.default_rng(0)
    ends = [
        tf.reduce_sum(tf.square(tf.matmul(x, _normal(rng, SIDE, 1))))
        for _ in range(BRANCHES)
    ]
    return tf.add_n(ends), [x]


def dense_block(x: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the end of layers that each read what all before them made."""
    rng = np.random.default_rng(0)
    x = tf.identity(x)
    features, weights = [x], []
    for _ in range(LAYERS):
        joined = tf.concat(features, 1)
        weights.append(_normal(rng, joined.shape[1], GROWTH))
        features.append(tf.nn.relu(tf.matmul(joined, weights[-1])))
    return tf.reduce_sum(tf.square(tf.concat(features[1:], 1))), [x, *weights]


def _normal(rng: np.random.Generator, *shape: int) -> tf.Tensor:
    return tf.constant(rng.normal(size=shape, scale=shape[0] ** -0.5), tf.float32)


NETS = {FAN: fan, BLOCK: dense_block}
# What is measured, against what, and the largest ratio. In the block sums ahead of time
# save little by themselves, and much with "memory"; LATE_BOTH shows that it is they.
COMPARED = {FAN: (TAPE, AT_THE_END, 0.25), BLOCK: (BOTH, MEMORY, 0.5)}


def peak(network: str, way: str, grappler: bool) -> float:
    """Return the peak of forward and backward pass in MB, in a process of its own."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [SIDE, SIDE])
        y, xs = NETS[network](x)
        used = [tf.reduce_sum(g) for g in WAYS[way](y, xs)]
    value = np.full([SIDE, SIDE], 1 / SIDE, np.float32)
    return measure((graph, used, {x: value}), steps=1, grappler=grappler).peak / 1e6


def adding_rows(network: str) -> Iterator[Row]:
    """Measure one of `NETWORKS`, as TensorFlow runs it and without Grappler."""
    for grappler in (True, False):
        yield _row(network, grappler)


def _row(network: str, grappler: bool) -> Row:
    ours, baseline, limit = COMPARED[network]
    ways = WAYS if network == BLOCK else (PLAIN, AT_THE_END, TAPE)
    found = {way: peak(network, way, grappler) for way in ways}
    others = [f"{way} {found[way]:,.0f}" for way in ways if way not in (ours, baseline)]
    return Row(
        family="gradients",
        work=f"peak, {ours} against {baseline}",
        graph=network + ("" if grappler else ", Grappler off"),
        ours=found[ours],
        baseline=found[baseline],
        limit=limit,
        unit="MB",
        note=", ".join(others),
    )
