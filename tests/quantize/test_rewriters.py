"""Training and eval graphs: folded, quantized, and the same the second time."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import (
    ArgumentTypeError,
    FinalizedGraphError,
    FoldError,
    QuantizeError,
    StaleGraphError,
)
from geutil.graph import verify
from geutil.quantize import (
    create_eval_graph,
    create_training_graph,
    experimental_create_eval_graph,
    experimental_create_training_graph,
)
from tests.quantize.tiny import check_fake_quant, close, fake_quants, session, types
from tests.quantize.trained_net import build, norm
from tests.settings import edges, needs_eager
from tests.thorough import crossed

v1 = tf.compat.v1
TRAINING = {
    "plain": create_training_graph,
    "delay": lambda graph=None: create_training_graph(graph, 3),
    "experimental": experimental_create_training_graph,
    "freeze": lambda graph=None: experimental_create_training_graph(
        graph, quant_delay=3, freeze_bn_delay=2
    ),
    "one pass": lambda graph=None: create_training_graph(graph, statistics="one_pass"),
    "one pass, freeze": lambda graph=None: experimental_create_training_graph(
        graph, quant_delay=3, freeze_bn_delay=2, statistics="one_pass"
    ),
}
EVAL = {"eval": create_eval_graph, "experimental eval": experimental_create_eval_graph}
REWRITERS = TRAINING | EVAL
FUNCTIONS = ["plain", "experimental", *EVAL]
NORMS = ["fused", "unfused", "none"]
DATA = np.float32(np.random.default_rng(0).normal(size=(4, 6, 6, 3)) * 2)


def _net(name, norms="fused"):
    graph = tf.Graph()
    with graph.as_default():
        x, logits, updates = build(norms, name in TRAINING)
    return graph, x, logits


def _bytes(graph):
    return graph.as_graph_def(add_shapes=True).SerializeToString(deterministic=True)


LAYERS = ["first/Conv2D", "second/depthwise", "third/Conv2D", "fourth/Conv2D"]


@pytest.mark.parametrize(("name", "norms"), crossed(REWRITERS, NORMS, together=1))
def test_what_is_folded_and_quantized_and_nothing_by_a_second_call(name, norms):
    graph, _, logits = _net(name, norms)
    with graph.as_default():
        report = REWRITERS[name]()
    verify(graph)
    assert report.tensor(logits).op.type in ("FakeQuantWithMinMaxVars", "SelectV2")
    folded, end = ([], "") if norms == "none" else (LAYERS, "_fold")
    assert [f.layer for f in report.folds.folded] == folded
    layers = [e.op for e in report.quantization.quantized if e.weights]
    assert layers == [*(f"{layer}{end}" for layer in LAYERS), "last/logits"]
    assert not report.quantization.skipped
    assert (report.step is None) == (name in [*FUNCTIONS, "one pass"])
    assert report.variables is report.quantization.variables
    text = str(report)
    count = len(folded)
    assert text.startswith(f"{count} of {count} batch norm(s) folded, 0 refused")
    assert "coverage 1.000" in text
    # What normalized by the batch's own statistics may be there, for the averages.
    assert len(fake_quants(graph)) == len(
        {e.weights_range for e in report.quantization.quantized if e.weights}
        | {e.into for e in report.quantization.quantized if e.result}
    )
    before = _bytes(graph)
    variables = len(graph.get_collection("variables"))
    second = REWRITERS[name](graph)
    assert _bytes(graph) == before
    assert len(graph.get_collection("variables")) == variables
    assert second.tensor(logits) is report.tensor(logits)
    assert second.variables == {}
    assert second.folds.folded == ()


def test_delays_and_freezes_share_a_counter():
    graph, x, logits = _net("freeze")
    report = TRAINING["freeze"](graph)
    assert types(graph).count("AssignAddVariableOp") == 1
    with session(graph) as opened:
        for step in range(3):
            assert opened.run(report.step) == step
            opened.run(report.tensor(logits), {x: DATA})


def test_before_the_delay_a_training_graph_is_the_network():
    plain, plain_x, plain_logits = _net("freeze", "unfused")
    with session(plain) as other:
        expected = [other.run(plain_logits, {plain_x: DATA}) for _ in range(4)]
    for statistics in ("exact", "one_pass"):
        graph, x, logits = _net("freeze", "unfused")
        report = experimental_create_training_graph(
            graph, quant_delay=3, statistics=statistics
        )
        with session(graph) as opened:
            for step in range(4):
                value = opened.run(report.tensor(logits), {x: DATA})
                if step + 1 < 3:
                    close(value, expected[step], 1e-5)
        assert np.abs(value - expected[-1]).max() > 1e-3, statistics


@pytest.mark.parametrize("name", ["experimental", "experimental eval"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bits_and_symmetry(name, symmetric):
    graph, _, _ = _net(name)
    report = REWRITERS[name](graph, 4, 6, symmetric=symmetric)
    forms = report.quantization.quantized
    weights = {
        (e.weights.bits, e.weights.symmetric, e.weights.narrow_range)
        for e in forms
        if e.weights
    }
    assert weights == {(4, symmetric, symmetric)}
    assert {(e.result.bits, e.result.symmetric) for e in forms if e.result} == {
        (6, False)
    }
    per_channel = [op for op in fake_quants(graph) if "PerChannel" in op.type]
    assert {op.get_attr("num_bits") for op in per_channel} == {4}


@pytest.mark.parametrize("name", ["experimental", "experimental eval"])
def test_a_scope(name, caplog):
    graph, _, _ = _net(name)
    before = _bytes(graph)
    report = REWRITERS[name](graph, scope="nowhere")
    assert _bytes(graph) == before
    warning = "no op in the scope 'nowhere' can be quantized"
    assert report.quantization.warnings == (warning,)
    assert warning in caplog.text
    assert f"warning: {warning}" in str(report)
    report = REWRITERS[name](graph, scope="third")
    assert [f.layer for f in report.folds.folded] == ["third/Conv2D"]
    refused = {r.norm.partition("/")[0] for r in report.folds.refused}
    assert refused == {"first", "second", "fourth"}
    assert {e.op.partition("/")[0] for e in report.quantization.quantized} == {"third"}
    assert all(name.startswith("third/") for name in report.variables)
    outside = {e.op for e in report.quantization.skipped}
    assert {"first/Relu6", "bypass/sum", "last/logits"} <= outside


CASES = [("fused", False), ("unfused", False), ("unfused", True)]


@pytest.mark.parametrize("kind, is_training", CASES)
def test_a_norm_that_is_the_result(kind, is_training):
    """Its tensor goes on standing for what it did; the report names another.

    A fused norm in training whose statistics alone are read is taken for one that was
    folded before.
    """
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6, 6, 3], "x")
        w = v1.get_variable("w", [3, 3, 3, 4], use_resource=True)
        y = tf.nn.conv2d(x, w, 1, "SAME", name="layer")
        with v1.variable_scope("bn", use_resource=True):
            z = norm(y, kind == "fused", is_training, [])
    report = create_training_graph(graph) if is_training else create_eval_graph(graph)
    assert len(report.folds.folded) == 1
    out = report.tensor(z)
    assert out.op.type == "FakeQuantWithMinMaxVars"
    with session(graph) as opened:
        before, value, plain = opened.run([out.op.inputs[0], out, z], {x: DATA})
        names = ["layer/act_quant/min", "layer/act_quant/max"]
        ends = opened.run([report.variables[name] for name in names])
    check_fake_quant(value, before, *ends)
    if kind == "fused":
        assert out.op.inputs[0].op.name == report.folds.folded[0].into
    else:
        np.testing.assert_array_equal(before, plain)


@needs_eager
def test_in_a_function_that_is_traced():
    @tf.function
    def step(x):
        y = tf.nn.relu(tf.matmul(x, tf.ones([3, 2]), name="dense"))
        first, second = create_eval_graph(), create_eval_graph()
        assert second.tensor(y) is first.tensor(y)
        return y, first.tensor(y)

    x = tf.constant(DATA[0, 0])
    y, quantized = step(x)
    check_fake_quant(quantized, y, 0.0, 6.0)


# -- what is refused -------------------------------------------------------------------


def _refused(call, error, match, graph):
    before = edges(graph)
    count = len(graph.get_collection("variables"))
    with pytest.raises(error, match=match):
        call()
    assert edges(graph) == before
    assert len(graph.get_collection("variables")) == count


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_with_gradients_or_that_ran_or_are_finalized_are_refused(name):
    graph, x, logits = _net(name)

    def call():
        REWRITERS[name](graph)

    with session(graph) as opened:
        opened.run(logits, {x: DATA})
        _refused(call, StaleGraphError, "live Session", graph)
    graph.finalize()
    _refused(call, FinalizedGraphError, "finalized", graph)
    message = "gradients or an optimizer; insert quantization before gradients"
    graph, _, logits = _net(name)
    with graph.as_default():
        loss = tf.reduce_sum(logits**2)
        gradients = tf.gradients(loss, v1.trainable_variables())
    _refused(call, QuantizeError, message, graph)
    with graph.as_default():
        pairs = zip(gradients, v1.trainable_variables(), strict=True)
        v1.train.MomentumOptimizer(0.1, 0.9).apply_gradients(pairs)
    _refused(call, QuantizeError, message, graph)
    for value in ("graph", 3, [], tf.Graph):
        with pytest.raises(ArgumentTypeError, match=r"expected a tf\.Graph"):
            REWRITERS[name](value)


BAD = {
    "weight_bits=1": ({"weight_bits": 1}, QuantizeError),
    "activation_bits=17": ({"activation_bits": 17}, QuantizeError),
    "quant_delay is -1": ({"quant_delay": -1}, QuantizeError),
    "quant_delay is a number of": ({"quant_delay": True}, ArgumentTypeError),
    "freeze_batch_norm_delay is -1": ({"freeze_bn_delay": -1}, FoldError),
    "freeze_batch_norm_delay is a": ({"freeze_bn_delay": "x"}, ArgumentTypeError),
    "statistics is 'float'": ({"statistics": "float"}, FoldError),
    "statistics is 'exact' or": ({"statistics": 1}, ArgumentTypeError),
}


def test_bad_arguments():
    nets = {
        rewriter: _net(name)[0]
        for name, rewriter in (
            ("experimental", experimental_create_training_graph),
            ("experimental eval", experimental_create_eval_graph),
        )
    }
    for message, (options, error) in BAD.items():
        for rewriter, graph in nets.items():
            if options.keys() <= inspect.signature(rewriter).parameters.keys():
                call = functools.partial(rewriter, graph, **options)
                _refused(call, error, message, graph)
    graph = nets[experimental_create_eval_graph]
    call = functools.partial(experimental_create_eval_graph, graph, quant_delay=5)
    _refused(call, QuantizeError, "quant_delay is for training", graph)


def test_norms_in_training_are_refused_in_an_eval_graph():
    with tf.Graph().as_default() as graph:
        build("fused", True)
    report = create_eval_graph(graph)
    assert report.folds.folded == ()
    assert len(report.folds.refused) == 4
    assert all("assume_inference=True" in e.reason for e in report.folds.refused)
