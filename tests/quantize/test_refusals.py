"""What `quantize` refuses: by name, with the reason, and a graph as it was."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from geutil import model
from geutil.errors import (
    ArgumentTypeError,
    FinalizedGraphError,
    QuantizeError,
    StaleGraphError,
    TransformError,
)
from geutil.graph import verify
from geutil.quantize import Spec, compare_int8, quantize, to_tflite
from tests.quantize.converted import opened, spec
from tests.quantize.tiny import fake_quants, refused, session, state
from tests.settings import edges, needs_eager

v1 = tf.compat.v1
DATA = np.float32(np.random.default_rng(0).normal(size=(4, 5)))


def _graph(dtype=tf.float32, x="x", one="one", two="two"):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(dtype, [None, 5], x)
        weights = [tf.ones([5, 5], dtype, name=f"{name}/ones") for name in (one, two)]
        y = tf.matmul(x, weights[0], name=f"{one}/product")
        y = tf.nn.relu(y, name=f"{one}/relu")
        tf.matmul(y, weights[1], name=f"{two}/product")
    return graph


def _refused(graph, error, match, **options):
    refused(graph, error, match, quantize, graph, **options)


NUMBERS = [
    ("weight_bits=1 ", {"weight_bits": 1}),
    ("weight_bits=17", {"weight_bits": 17}),
    ("activation_bits=1 ", {"activation_bits": 1}),
    ("activation_bits=17", {"activation_bits": 17}),
    ("weight_bits is a whole number, not 8.0", {"weight_bits": 8.0}),
    ("activation_bits is a whole number, not '8'", {"activation_bits": "8"}),
    ("ema_decay=1.0", {"ema_decay": 1.0}),
    ("ema_decay=-0.1", {"ema_decay": -0.1}),
    ("quant_delay is -3; pass 0 or more", {"quant_delay": -3}),
    ("is for training", {"quant_delay": 3, "is_training": False}),
    ("'rleu' is no activation that is known", {"activations": ["relu", "rleu"]}),
]


TYPES = [
    ("quant_delay is a number of steps", {"quant_delay": 2.0}),
    ("quant_delay is a number of steps", {"quant_delay": True}),
    ("quant_delay is a number of steps", {"quant_delay": "3"}),
    ("steps are counted in a resource variable", {"step": 3}),
    ("overrides are for ops, Keras layers, or regular", {"overrides": {3: "skip"}}),
    ("an override is a geutil.quantize.Spec or 'skip'", {"overrides": {"one": "no"}}),
    ("an override is a geutil.quantize.Spec or 'skip'", {"overrides": {"one": 8}}),
]


def test_arguments_out_of_range_and_of_other_types():
    graph = _graph()
    for message, options in NUMBERS:
        _refused(graph, QuantizeError, re.escape(message), **options)
    for message, options in TYPES:
        _refused(graph, ArgumentTypeError, message, **options)
    for value in (None, "model.h5", 3, tf.Graph, [tf.Graph()]):
        with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
            quantize(value)


@needs_eager
@pytest.mark.parametrize("dtype", [tf.float32, tf.int32])
def test_a_step_of_another_type(dtype):
    step = tf.Variable(0, dtype=dtype, name="mine")
    _refused(_graph(), ArgumentTypeError, "int64, and 'mine:0'", step=step)


def test_another_step_than_the_graph_counts_in():
    graph = _graph()
    quantize(graph, scope="one", quant_delay=3)
    with graph.as_default():
        other = v1.get_variable(
            "other", initializer=np.int64(0), use_resource=True, trainable=False
        )
    _refused(graph, TransformError, "counts its steps in", quant_delay=3, step=other)


def test_overrides_for_no_op():
    graph, other = _graph(), _graph().get_operation_by_name("one/relu")
    for key in ("three", re.compile("three"), "^product", other):
        name = getattr(key, "pattern", getattr(key, "name", key))
        message = f"the override '{name}' is for no op that computes with data"
        _refused(graph, QuantizeError, re.escape(message), overrides={key: "skip"})


IMPOSSIBLE = {
    "weights of an input": (
        {"^x$": Spec(weight_bits=4)},
        "asks for weight_bits=4, which cannot be: 'x' (Placeholder) has no weights",
    ),
    "channels of an asymmetric dense layer": (
        {"two/product": Spec(per_channel=True, symmetric_weights=False)},
        "cannot be: 'two/product' (MatMul) has weights that can have one range only",
    ),
    "no kernel": ({"sine": Spec()}, "'sine' (Sin) TFLite has no int8 kernel for Sin"),
    "outside": (
        {"two/product": Spec(activation_bits=4)},
        "'two/product' (MatMul) is outside the scope 'one'",
    ),
    "passed on": (
        {"flat": Spec(range=(0.0, 2.0))},
        "asks for range=(0.0, 2.0), which cannot be: 'flat' (Reshape) hands values on",
    ),
    "both of one kernel": (
        {"one/product": Spec(activation_bits=4), "relu": Spec(activation_bits=5)},
        "'one/product' and 'one/relu' are computed by one kernel, and overrides ask",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_overrides_that_cannot_be_obeyed(case):
    overrides, message = IMPOSSIBLE[case]
    graph = _graph()
    with graph.as_default():
        y = tf.sin(tf.reshape(_logits(graph), [-1, 1], name="flat"), name="sine")
        tf.matmul(y, tf.ones([1, 2]), name="three/product")
    scope = "one" if case == "outside" else None
    _refused(graph, QuantizeError, re.escape(message), overrides=overrides, scope=scope)


EARLIER = {
    "activation_bits": ({"one/relu": Spec(activation_bits=4)}, "own"),
    "range": ({"one/relu": Spec(range=(0.0, 3.0))}, "own"),
    "ema_decay": ({"one/relu": Spec(ema_decay=0.5)}, "own"),
    "weight_bits": ({"one/product": Spec(weight_bits=4)}, "fixed"),
    "per_channel": ({"one/product": Spec(per_channel=True)}, "fixed"),
    "symmetric_weights": ({"one/product": Spec(symmetric_weights=False)}, "fixed"),
}
SAME = {
    "one/relu": Spec(activation_bits=8, range=(0.0, 6.0)),
    "one/product": Spec(weight_bits=8, per_channel=False, symmetric_weights=True),
}


def _with_fake_quants():
    fixed = tf.quantization.fake_quant_with_min_max_args
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 5], "x")
        kernel = fixed(tf.ones([5, 5]), -3.0, 3.0, narrow_range=True, name="fixed")
        y = tf.nn.relu(tf.matmul(x, kernel, name="one/product"), name="one/relu")
        tf.matmul(fixed(y, 0.0, 6.0, name="own"), tf.ones([5, 2]), name="two/product")
    return graph


@pytest.mark.parametrize("field", EARLIER)
def test_overrides_of_what_is_quantized_already(field):
    overrides, name = EARLIER[field]
    message = f"{field}=.* is quantized already, by '{name}'; edit that op instead"
    _refused(_with_fake_quants(), QuantizeError, message, overrides=overrides)


def test_overrides_that_say_what_is_there():
    graph = _with_fake_quants()
    quantize(graph, is_training=False, overrides=SAME)
    assert graph.get_operation_by_name("one/relu").outputs[0].consumers() == [
        graph.get_operation_by_name("own")
    ]


def test_specs_that_cannot_be():
    for options in [
        {"weight_bits": 1},
        {"activation_bits": 17},
        {"range": (1.0, 2.0)},
        {"range": (0.0, 0.0)},
        {"range": (0.0, 1.0, 2.0)},
        {"ema_decay": 1.0},
    ]:
        with pytest.raises(QuantizeError):
            Spec(**options)


def test_graphs_that_ran_or_are_finalized():
    graph = _graph()
    with session(graph) as opened:
        opened.run("two/product:0", {"x:0": DATA})
        for is_training in (True, False):
            message = "live Session"
            _refused(graph, StaleGraphError, message, is_training=is_training)
    graph = _graph()
    graph.finalize()
    for is_training in (True, False):
        _refused(graph, FinalizedGraphError, "finalized", is_training=is_training)


@needs_eager
def test_a_function_that_is_built():
    function = tf.function(lambda x: tf.nn.relu(tf.matmul(x, tf.ones([5, 5]))))
    graph = function.get_concrete_function(tf.TensorSpec([None, 5])).graph
    before = edges(graph)
    with pytest.raises(StaleGraphError, match="is built already"):
        quantize(graph)
    assert edges(graph) == before


def test_variables_of_another_shape_or_graph():
    graph = _graph()
    with graph.as_default():
        wrong = v1.get_variable("wrong", [3], use_resource=True)
    message = r"'two/weights_quant/max' is given with shape \(3,\)"
    variables = {"two/weights_quant/max": wrong}
    _refused(graph, QuantizeError, message, variables=variables)
    message = "'one/weights_quant/min' is given from another graph"
    variables = quantize(_graph()).variables
    _refused(_graph(), QuantizeError, message, variables=variables)


def test_strict_names_what_is_missing():
    graph = _graph()
    _refused(
        graph,
        QuantizeError,
        r"2 op\(s\) with int8 kernels would not be quantized; nothing was changed:"
        r"\s+one/product \(MatMul\): is skipped by an override"
        r"\s+one/relu \(Relu\): is skipped by an override",
        strict=True,
        overrides={"one": "skip"},
    )
    assert quantize(graph, strict=True).coverage == 1.0


# -- what is no error, and is told -----------------------------------------------------


@pytest.mark.parametrize("scope", ["nowhere", "on", "one/relu/more"])
def test_a_scope_that_matches_nothing(scope, caplog):
    graph = _graph()
    before = state(graph)
    report = quantize(graph, scope=scope)
    assert state(graph) == before
    warning = f"no op in the scope '{scope}' can be quantized"
    assert report.warnings == (warning,)
    assert f"warning: {warning}" in str(report)
    assert warning in caplog.text
    assert {e.reason for e in report.skipped} == {f"is outside the scope '{scope}'"}


def test_nothing_and_other_floats_are_no_error():
    report = quantize(tf.Graph())
    assert (report.quantized, report.skipped, report.coverage) == ((), (), 1.0)
    graph = _graph(tf.float64)
    before = state(graph)
    report = quantize(graph)
    assert state(graph) == before
    assert all("computes in float64" in e.reason for e in report.skipped)
    assert report.coverage == 0.0


# -- what to fetch instead -------------------------------------------------------------


def _logits(graph):
    return graph.get_tensor_by_name("two/product:0")


@pytest.mark.parametrize("delay", [None, 3])
def test_a_result_that_nothing_reads(delay):
    graph = _graph()
    logits = _logits(graph)
    report = quantize(graph, quant_delay=delay)
    out = report.tensor(logits)
    assert out is not logits
    (entry,) = [e for e in report.quantized if e.op == "two/product"]
    assert entry.into == out.name
    # A report of a second call tells it as well, and so does any other.
    assert quantize(graph).tensor(logits) is out


def test_weights_inputs_and_tensors_that_are_not_quantized():
    graph = _graph()
    report = quantize(graph)
    product = graph.get_tensor_by_name("one/product:0")
    assert report.tensor(product) is product
    for op in fake_quants(graph):
        assert report.tensor(op.outputs[0]) is op.outputs[0]
    x = graph.get_tensor_by_name("x:0")
    first = graph.get_operation_by_name("one/product")
    assert report.tensor(x) is first.inputs[0]
    assert report.tensor(first.inputs[1].op.inputs[0]) is first.inputs[1]


@needs_eager
@pytest.mark.parametrize(
    "value", [3, "x:0", DATA, tf.constant(1.0)], ids=lambda v: type(v).__name__
)
def test_no_tensor_of_a_graph(value):
    with pytest.raises(ArgumentTypeError, match=r"tf\.Tensor of a graph"):
        quantize(_graph()).tensor(value)


class _Model:
    """Stands in for a model with two signatures."""

    def __init__(self, graphs, name="first"):
        self.graph = graphs[name]
        self.signature = name
        self.outputs = {"y": self.graph.get_operations()[-1].outputs[0]}
        self.signatures = {}
        if name == "first":
            others = {n: _Model(graphs, n) for n in graphs if n != name}
            self.signatures = {name: self, **others}


def test_a_refusal_in_one_signature_leaves_the_others_as_they_were():
    graphs = {"first": _graph(), "second": _graph(x="z", one="three", two="four")}
    model = _Model(graphs)
    with session(graphs["second"]) as opened:
        opened.run("four/product:0", {"z:0": DATA})
        before = edges(graphs["first"])
        with pytest.raises(StaleGraphError):
            quantize(model)
    reads = {
        name: ends for name, ends in edges(graphs["first"]).items() if name in before
    }
    assert reads == before
    # What was made in vain is not taken for quantized the next time.
    report = quantize(model)
    assert {e.signature for e in report.quantized} == {"first", "second"}
    assert report.coverage == 1.0
    for graph in graphs.values():
        verify(graph)
        products = [op for op in graph.get_operations() if op.type == "MatMul"]
        read = [[t.op.type for t in op.inputs] for op in products]
        kinds = ["FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"]
        assert all(types == kinds for types in read)


def test_a_variable_that_cannot_be_made_leaves_a_sound_graph(monkeypatch):
    # Its first value is made before it, and colocated with it.
    def refuse(*_, **__):
        raise MemoryError("no more variables")

    graph = _graph()
    before = edges(graph)
    monkeypatch.setattr(resource_variable_ops, "eager_safe_variable_handle", refuse)
    with pytest.raises(MemoryError):
        quantize(graph)
    after = edges(graph)
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    verify(graph)


class _Streaming(tf.Module):
    """Adds what it was given last."""

    def __init__(self):
        super().__init__()
        self.last = tf.Variable(tf.zeros([1, 4]), trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([1, 4], name="x")])
    def next(self, x):
        y = tf.nn.relu(x + self.last)
        self.last.assign(y)
        return {"y": y @ tf.ones([4, 3])}


@needs_eager
@pytest.mark.parametrize("scheme", ["int8", "weight_only_int8"])
def test_a_state_that_a_file_would_not_keep_is_named(tmp_path, scheme):
    module = _Streaming()
    tf.saved_model.save(module, str(tmp_path), signatures=module.next)
    m = model.open(tmp_path)
    quantize(m, scheme=scheme, is_training=False)
    data = [{"x": np.ones([1, 4], np.float32)}] if scheme == "int8" else None
    with pytest.raises(QuantizeError, match=r"AssignVariableOp.*an input and an"):
        to_tflite(m, representative=data)


@needs_eager
def test_ranges_that_training_writes_are_no_state():
    """Ends of a range that is read again, as in front of a concat, are variables."""
    m = opened(lambda a: tf.concat([a[:, :2], tf.nn.relu(a)], 1), spec(4, 5))
    quantize(m, is_training=True)
    blob = to_tflite(m, representative=[{"a": DATA}])
    assert compare_int8(m, blob, {"a": DATA}).most <= 1
