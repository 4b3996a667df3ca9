"""Quantization: what it takes to insert FakeQuant ops into a large network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.graphs import import_graph
from benchmarks.rows import Row
from benchmarks.timing import Side, compare
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import QuantizeReport, create_training_graph, quantize

Call = Callable[[tf.Tensor], tf.Tensor]

LIMIT = 3.0
# Ten times the layers may take twelve times the time.
GROWTH = 1.2
PIXELS = 224
_FEWER_PIXELS = 96


# A training step with FakeQuant against one without.
STEP_LIMIT = 1.35
BATCH = 32


def rows(quick: bool) -> Iterator[Row]:
    yield from _networks(_FEWER_PIXELS if quick else PIXELS)
    yield from _chains(100 if quick else 1000)
    yield from _steps(4 if quick else BATCH)


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


def _steps(batch: int) -> Iterator[Row]:
    """A training step of MobileNetV2 with FakeQuant, against one without."""
    tf.keras.utils.set_random_seed(0)
    network = tf.keras.applications.MobileNetV2(
        weights=None,
        input_shape=(_FEWER_PIXELS, _FEWER_PIXELS, 3),
        classes=10,
        classifier_activation=None,
    )
    images = tf.random.normal([batch, _FEWER_PIXELS, _FEWER_PIXELS, 3])
    labels = tf.random.uniform([batch], 0, 10, tf.int32)
    variables = [v.value for v in network.trainable_variables]
    ways = {
        "without FakeQuant": lambda x: network(x, training=True),
        "norms folded for inference": _opened(network),
        "norms folded for training": _rewritten(network, "exact"),
        "norms folded in one pass": _rewritten(network, "one_pass"),
    }
    steps = [_step(way, variables) for way in ways.values()]
    sides = [Side(lambda _, s=s: s(images, labels).numpy()) for s in steps]
    plain, *ours = (seconds * 1e3 for seconds in compare(sides))
    for what, time in zip(list(ways)[1:], ours, strict=True):
        note = "baseline: the float step, norms in training"
        yield Row(
            "quantize",
            f"step, {what}",
            "MobileNetV2",
            time,
            plain,
            STEP_LIMIT,
            note=note,
        )


def _opened(network: Any) -> Call:
    opened = model.open(network)
    fold_batch_norms(opened)
    quantize(opened)
    function = opened.to_function()
    return lambda x: next(iter(function(x).values()))


def _rewritten(network: Any, statistics: str) -> Call:
    def call(x: tf.Tensor) -> tf.Tensor:
        logits = network(x, training=True)
        report = create_training_graph(logits.graph, statistics=statistics)
        return report.tensor(logits)

    return call


def _step(call: Call, variables: list[tf.Variable]) -> Any:
    @tf.function(autograph=False)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, call(images))
        loss = tf.reduce_mean(losses)
        gradients = tf.gradients(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(1e-4 * gradient)
        return loss

    return step


def _is_whole(report: QuantizeReport) -> None:
    assert report.coverage == 1.0
    assert not report.skipped
