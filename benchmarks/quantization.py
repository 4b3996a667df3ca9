"""Quantization: what it takes to insert FakeQuant ops into a large network."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from benchmarks.graphs import import_graph
from benchmarks.rows import Row
from benchmarks.timing import Side, compare
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import QuantizeReport, quantize

LIMIT = 3.0
# Ten times the layers may take twelve times the time.
GROWTH = 1.2
PIXELS = 224
_FEWER_PIXELS = 96


def rows(quick: bool) -> Iterator[Row]:
    yield from _networks(_FEWER_PIXELS if quick else PIXELS)
    yield from _chains(100 if quick else 1000)


def _networks(pixels: int) -> Iterator[Row]:
    """ResNet152 with its norms folded, against one import of its graph."""
    network = tf.keras.applications.ResNet152(
        weights=None, input_shape=(pixels, pixels, 3)
    )
    folded = model.open(network)
    fold_batch_norms(folded)
    graph_def = folded.graph.as_graph_def()
    for what, is_training in (("ranges read", False), ("ranges learnt", True)):
        sides = [
            Side(
                lambda m, t=is_training: quantize(m, is_training=t),
                folded.cut,
                _is_whole,
            ),
            Side(lambda _: import_graph(graph_def)),
        ]
        ours, baseline = (seconds * 1e3 for seconds in compare(sides))
        note = "baseline: tf.import_graph_def"
        yield Row(
            "quantize", f"insert, {what}", "ResNet152", ours, baseline, LIMIT, note=note
        )


def _chains(layers: int) -> Iterator[Row]:
    """A chain of convolutions, against ten times one of a tenth of the layers."""
    graph_defs = [_chain(layers), _chain(10 * layers)]
    sides = [
        Side(
            lambda g: quantize(g, is_training=False),
            lambda g=graph_def: import_graph(g),
            _is_whole,
        )
        for graph_def in graph_defs
    ]
    short, long = (seconds * 1e3 for seconds in compare(sides))
    yield Row(
        "quantize",
        f"{10 * layers} layers against 10 x {layers}",
        "chain",
        long,
        10 * short,
        GROWTH,
    )


def _chain(layers: int) -> tf.compat.v1.GraphDef:
    kernel = np.full((1, 1, 2, 2), 0.5, np.float32)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4, 4, 2], "x")
        for index in range(layers):
            with tf.name_scope(f"layer{index}"):
                x = tf.nn.relu(tf.nn.conv2d(x, tf.constant(kernel), 1, "SAME"))
    return graph.as_graph_def()


def _is_whole(report: QuantizeReport) -> None:
    assert report.coverage == 1.0
    assert not report.skipped
