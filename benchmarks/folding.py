"""Batch-norm folding: what it takes, and what a folded network gains at inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from benchmarks.graphs import import_graph
from benchmarks.rows import Row
from benchmarks.timing import Side, compare
from geutil import model
from geutil.batchnorm import FoldReport, fold_batch_norms

LIMIT = 3.0
# Folded, a network must not be slower; what is gained depends on the machine.
NOT_SLOWER = 1.05
PIXELS = 224
_FEWER_PIXELS = 96


def rows(quick: bool) -> Iterator[Row]:
    pixels = _FEWER_PIXELS if quick else PIXELS
    yield from _inference(pixels)
    yield from _time(pixels)


def _inference(pixels: int) -> Iterator[Row]:
    """MobileNetV2 as it is, as Grappler folds it, and folded."""
    network = tf.keras.applications.MobileNetV2(
        weights=None, input_shape=(pixels, pixels, 3)
    )
    original = model.open(network).freeze()
    folded = model.open(network).freeze()
    report = fold_batch_norms(folded)
    assert not report.refused
    for batch in (1, 16):
        data = np.random.default_rng(0).normal(size=(batch, pixels, pixels, 3))
        runs = [
            _runner(opened, data, grappler)
            for opened, grappler in (
                (folded, True),
                (original, False),
                (original, True),
            )
        ]
        ours, plain, by_grappler = (
            seconds * 1e3
            for seconds in compare([Side(lambda _, r=r: r()) for r in runs])
        )
        name = f"MobileNetV2, {batch} x {pixels} px"
        for against, baseline in (
            ("as it is, Grappler off", plain),
            ("as Grappler folds it", by_grappler),
        ):
            yield Row(
                "fold", f"folded against {against}", name, ours, baseline, NOT_SLOWER
            )


def _runner(
    opened: model.Model, data: np.ndarray, grappler: bool
) -> Callable[[], np.ndarray]:
    """Return a function that runs a frozen model in a Session."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = not grappler
    graph_def = opened.graph.as_graph_def()
    (x,), (y,) = opened.inputs.values(), opened.outputs.values()
    graph = import_graph(graph_def)
    session = tf.compat.v1.Session(graph=graph, config=config)
    run = session.make_callable(y.name, [x.name])
    return lambda: run(data)


def _time(pixels: int) -> Iterator[Row]:
    """ResNet152, with variables and frozen."""
    opened = model.open(
        tf.keras.applications.ResNet152(weights=None, input_shape=(pixels, pixels, 3))
    )
    for what, source in (("variables", opened), ("constants", opened.freeze())):
        graph_def = source.graph.as_graph_def()
        sides = [
            Side(fold_batch_norms, lambda g=graph_def: import_graph(g), _folds_all),
            Side(lambda _, g=graph_def: import_graph(g)),
        ]
        ours, baseline = (seconds * 1e3 for seconds in compare(sides))
        note = "baseline: tf.import_graph_def"
        work = f"fold 155 batch norms, {what}"
        yield Row("fold", work, "ResNet152", ours, baseline, LIMIT, note=note)


def _folds_all(report: FoldReport) -> None:
    assert len(report.folded) == 155
    assert not report.refused
