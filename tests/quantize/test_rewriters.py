"""Training and eval graphs: folded, quantized, and the same the second time."""

import inspect
import itertools

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
from tests.quantize.tiny import (
    check_fake_quant,
    close,
    fake_quants,
    of_ranges,
    refused,
    session,
    types,
)
from tests.quantize.trained_net import build, norm
from tests.settings import needs_eager
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
def test_a_scope(name):
    graph, _, _ = _net(name)
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_with_gradients_or_that_ran_or_are_finalized_are_refused(name):
    graph, x, logits = _net(name)

    def call():
        REWRITERS[name](graph)

    with session(graph) as opened:
        opened.run(logits, {x: DATA})
        refused(graph, StaleGraphError, "live Session", call)
    graph.finalize()
    refused(graph, FinalizedGraphError, "finalized", call)
    message = "gradients or an optimizer; insert quantization before gradients"
    graph, _, logits = _net(name)
    with graph.as_default():
        loss = tf.reduce_sum(logits**2)
        gradients = tf.gradients(loss, v1.trainable_variables())
    refused(graph, QuantizeError, message, call)
    with graph.as_default():
        pairs = zip(gradients, v1.trainable_variables(), strict=True)
        v1.train.MomentumOptimizer(0.1, 0.9).apply_gradients(pairs)
    refused(graph, QuantizeError, message, call)
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
                refused(graph, error, message, rewriter, graph, **options)
    graph = nets[experimental_create_eval_graph]
    call = experimental_create_eval_graph
    message = "quant_delay is for training"
    refused(graph, QuantizeError, message, call, graph, quant_delay=5)


# -- names of ranges in training and evaluation ----------------------------------------

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
    ("resource", "norms"), crossed(RESOURCE, NORMS, together=1), indirect=["resource"]
)
def test_a_checkpoint_is_restored_by_name(resource, norms, tmp_path):
    """The train graph with frozen norms, and ranges as a step left them."""
    graphs = Graphs(norms, freeze=2, delay=3)
    assert ("VariableV2" in types(graphs.train)) == (resource == "ref")
    # Delays and freezes share a counter.
    assert types(graphs.train).count("AssignAddVariableOp") == 1
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_behind_the_last_layer_are_quantized(name):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6, 6, 3], "x")
        y = tf.nn.relu6(tf.nn.conv2d(x, tf.ones([1, 1, 3, 2]), 1, "SAME"))
        tf.add(tf.multiply(2.0, y, "twice"), tf.multiply(3.0, y, "thrice"), "sum")
        difference = tf.subtract(y, v1.placeholder(tf.float32, y.shape), "difference")
        loss = tf.reduce_mean(tf.multiply(difference, difference, "square"))
    report = REWRITERS[name](graph).quantization
    quantized = {entry.op for entry in report.quantized}
    assert {"twice", "thrice", "sum"} <= quantized
    left = {entry.op for entry in report.skipped}
    assert {"difference", "square", loss.op.name} <= left
