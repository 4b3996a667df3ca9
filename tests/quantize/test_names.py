"""Ranges have the same names in training and evaluation, and checkpoints carry them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from geutil.graph import verify
from geutil.quantize import create_eval_graph, experimental_create_training_graph
from tests.quantize.tiny import close, of_ranges, session, types
from tests.quantize.trained_net import build
from tests.thorough import crossed

v1 = tf.compat.v1
NORMS = ["fused", "unfused", "none"]
RESOURCE = {"resource": True, "ref": False}
STEPS = [
    np.float32(np.random.default_rng(seed).normal(size=(8, 6, 6, 3)) * 2)
    for seed in range(6)
]


@pytest.fixture
def resource(request):
    """Let `get_variable` make variables of a kind."""
    before = v1.resource_variables_enabled()
    switch = {True: v1.enable_resource_variables, False: v1.disable_resource_variables}
    switch[RESOURCE[request.param]]()
    yield request.param
    switch[before]()


class Graphs:
    """The network quantized for training, and for evaluation."""

    def __init__(self, norms, freeze=None, delay=0):
        self.train, self.eval = tf.Graph(), tf.Graph()
        with self.train.as_default():
            self.x, logits, updates = build(norms, True)
            self.trained = experimental_create_training_graph(
                quant_delay=delay, freeze_bn_delay=freeze
            )
            self.out = self.trained.tensor(logits)
            loss = tf.reduce_mean((self.out - tf.constant([1.0, -1.0, 0.0])) ** 2)
            minimize = v1.train.GradientDescentOptimizer(0.002).minimize(loss)
            self.step = tf.group(minimize, *updates)
            self.saver = v1.train.Saver()
        with self.eval.as_default():
            self.eval_x, logits, _ = build(norms, False)
            self.evaluated = create_eval_graph()
            self.eval_out = self.evaluated.tensor(logits)
            self.eval_saver = v1.train.Saver()
        verify(self.train)
        verify(self.eval)


def _check_names(graphs, norms):
    trained, evaluated = graphs.trained.variables, graphs.evaluated.variables
    assert {n: v.shape for n, v in of_ranges(trained).items()} == {
        n: v.shape for n, v in evaluated.items()
    }
    names = [
        "x/input_quant",
        "first/weights_quant",
        "first/act_quant",
        "second/weights_quant",
        "second/act_quant",
        "third/weights_quant",
        "third/conv_quant",
        "bypass/act_quant",
        "fourth/weights_quant",
        "fourth/act_quant",
        "last/reduce_quant",
        "last/weights_quant",
        "last/act_quant",
    ]
    ends = [f"{n}/{e}" for n, e in itertools.product(names, ("min", "max"))]
    assert sorted(evaluated) == sorted(ends)
    counts = [f"{n}/learnt" for n in names if not n.endswith("weights_quant")]
    assert sorted(trained) == sorted([*ends, *counts])
    for report in (graphs.trained, graphs.evaluated):
        assert report.quantization.coverage == 1.0
        assert not report.folds.refused
        assert len(report.folds.folded) == (0 if norms == "none" else 4)
    for graph, ranges in ((graphs.train, trained), (graphs.eval, evaluated)):
        listed = {v.op.name: v for v in graph.get_collection("variables")}
        assert all(listed[name] is v for name, v in ranges.items())
    # An eval graph assigns nothing.
    initializers = {v.initializer.name for v in graphs.eval.get_collection("variables")}
    assigns = [
        op for op in graphs.eval.get_operations() if op.type.startswith("Assign")
    ]
    saved = {op.name for op in assigns if op.name.startswith("save/")}
    assert {op.name for op in assigns} - saved == initializers


def test_ranges_without_a_delay_have_the_same_names_and_shapes():
    _check_names(Graphs("fused"), "fused")


@pytest.mark.parametrize(
    ("resource", "norms"),
    crossed(RESOURCE, NORMS, together=1),
    indirect=["resource"],
)
def test_a_checkpoint_is_restored_by_name(resource, norms, tmp_path):
    """The train graph with frozen norms, and ranges as a step left them."""
    graphs = Graphs(norms, freeze=2, delay=3)
    assert ("VariableV2" in types(graphs.train)) == (resource == "ref")
    _check_names(graphs, norms)
    with session(graphs.train) as opened:
        for x in STEPS:
            opened.run(graphs.step, {graphs.x: x})
        # Ranges move, weights do not.
        expected = opened.run(graphs.out, {graphs.x: STEPS[0]})
        kept = opened.run(of_ranges(graphs.trained.variables))
        path = graphs.saver.save(opened, str(tmp_path / "model"))
    with session(graphs.eval) as opened:
        graphs.eval_saver.restore(opened, path)
        restored = opened.run(dict(graphs.evaluated.variables))
        actual = opened.run(graphs.eval_out, {graphs.eval_x: STEPS[0]})
    assert restored.keys() == kept.keys()
    for name, value in kept.items():
        np.testing.assert_array_equal(restored[name], value)
    close(actual, expected)
    low, high = kept["last/act_quant/min"], kept["last/act_quant/max"]
    # They were learnt, and the logits use some of the levels.
    assert (low, high) != (-6.0, 6.0)
    assert len(np.unique(expected)) > 8
