"""Norms whose result somebody holds: fetched, returned, or kept by name."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import func_graph

import geutil as ge
from geutil.batchnorm import FoldReport, fold_batch_norms
from geutil.errors import ArgumentTypeError, FoldError, SelectionError
from tests.batchnorm.checking import needed
from tests.settings import default_graph, edges, evaluate, in_each_setting, needs_eager

X = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(3, 3, 3, 4)).astype(np.float32)
PLACEHOLDER = "PlaceholderWithDefault"
MEAN, VARIANCE, BETA, GAMMA = np.float32(
    [[0.5, -1, 2, 0.1], [0.5, 1, 2, 3], [1, 2, -1, 0.3], [2, 0.5, -1, 1]]
)


def given(array):
    shape = [None, *array.shape[1:]]
    return tf.compat.v1.placeholder_with_default(array, shape)


def convolved(x, name="conv"):
    return tf.nn.conv2d(x, KERNEL, 1, "SAME", name=name)


def with_sum(y):
    variance = tf.convert_to_tensor(VARIANCE)
    return tf.nn.batch_normalization(y, MEAN, variance, BETA, GAMMA, 1e-3, "norm")


def with_add(y):
    scale = tf.math.rsqrt(tf.convert_to_tensor(VARIANCE) + 1e-3)
    return tf.raw_ops.Add(x=(y - MEAN) * scale, y=tf.constant(BETA), name="norm/add")


def with_bias_add(y):
    scale = tf.math.rsqrt(tf.convert_to_tensor(VARIANCE) + 1e-3)
    return tf.nn.bias_add((y - MEAN) * scale, BETA, name="norm/add")


def with_difference(y):
    variance = tf.convert_to_tensor(VARIANCE)
    return tf.nn.batch_normalization(y, MEAN, variance, None, GAMMA, 1e-3, "norm")


def with_subtraction(y):
    scale = tf.math.rsqrt(tf.convert_to_tensor(VARIANCE) + 1e-3)
    return tf.subtract(y * scale, MEAN * scale, name="norm/sub")


def fused(y):
    z, *_ = tf.compat.v1.nn.fused_batch_norm(
        y, GAMMA, BETA, MEAN, VARIANCE, 1e-3, is_training=False, name="norm"
    )
    return z


SUMS = [with_sum, with_add, with_bias_add, with_difference, with_subtraction]


def computed(norm, data=X):
    """Compute a norm behind a convolution, unfolded, in a graph of its own."""
    with tf.Graph().as_default() as graph:
        y = norm(convolved(given(data)))
    return evaluate(graph, [y])[0]


def behind(tensor):
    """Return the types of the ops that a tensor needs, each as often as it is there."""
    return sorted(op.type for op in needed(tensor) if op.type != "Const")


def test_results_that_are_sums_stay_and_compute_the_folded_layer(setting):
    def body():
        graph = default_graph()
        results = [norm(convolved(given(X))) for norm in SUMS]
        plain = fused(convolved(given(X)))
        *sums, of_fused = fold_batch_norms(graph, strict=True).folded
        assert {e.into for e in sums} == {z.op.name for z in results}
        for z in (*results, plain):
            assert behind(z) == sorted([z.op.type, "Conv2D", PLACEHOLDER])
        # A fused norm stays as it was, and the report names what to fetch.
        into = graph.get_operation_by_name(of_fused.into).outputs[0]
        assert behind(into) == ["BiasAdd", "Conv2D", PLACEHOLDER]
        ge.verify(graph)
        before = edges(graph)
        again = fold_batch_norms(graph)
        assert (again.folded, again.refused) == ((), ())
        assert edges(graph) == before
        return [plain, *results, into]

    plain, *results = setting.run(body)
    np.testing.assert_array_equal(plain, computed(fused))
    for norm, result in zip((*SUMS, fused), results, strict=True):
        wanted = computed(norm)
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_kept_and_read_stays_and_the_rest_is_replaced(setting):
    def body():
        results = [with_sum(convolved(given(X))) for _ in range(3)]
        read = [tf.nn.relu(z) for z in results]
        keep = [results[0].op, results[1]]
        report = fold_batch_norms(default_graph(), keep=keep)
        into = {entry.into for entry in report.folded}
        assert into == {y.op.inputs[0].op.name for y in read}
        same = [y.op.inputs[0] is z for y, z in zip(read, results, strict=True)]
        assert same == [True, True, False]
        for y, addition in zip(read, ("AddV2", "AddV2", "BiasAdd"), strict=True):
            assert behind(y) == [addition, "Conv2D", PLACEHOLDER, "Relu"]
        return read

    expected = np.maximum(computed(with_sum), 0)
    for result in setting.run(body):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@in_each_setting
def test_the_bias_has_the_shape_that_the_sum_needs():
    x = given(np.zeros([1, 3, 6, 6], np.float32))
    y = tf.nn.conv2d(x, KERNEL, 1, "SAME", data_format="NCHW")
    shaped = [tf.constant(v.reshape(4, 1, 1)) for v in (MEAN, VARIANCE, BETA, GAMMA)]
    z = tf.nn.batch_normalization(y, *shaped, 1e-3, "norm")
    fold_batch_norms(default_graph(), strict=True)
    data, bias = z.op.inputs
    assert (data.op.type, bias.op.type) == ("Conv2D", "Const")
    assert bias.shape == [4, 1, 1]
    shift = BETA - MEAN * GAMMA / np.sqrt(VARIANCE + 1e-3)
    value = tf.get_static_value(bias).reshape(-1)
    np.testing.assert_allclose(value, shift, rtol=1e-6)


@needs_eager
@pytest.mark.parametrize("norm", [with_sum, with_subtraction])
def test_variables_are_read_by_the_sum_that_stays(norm, monkeypatch):
    variables = {name: tf.Variable(globals()[name]) for name in ("MEAN", "VARIANCE")}
    for name, v in variables.items():
        monkeypatch.setitem(globals(), name, v)

    def f(x, fold):
        z = norm(convolved(x))
        if fold:
            fold_batch_norms(default_graph(), strict=True)
        return z

    compiled = tf.function(f, autograph=False)
    folded, plain = compiled(X, True), compiled(X, False)
    np.testing.assert_allclose(folded, plain, rtol=1e-5, atol=1e-5)
    variables["MEAN"].assign_add([1.0, 2.0, 3.0, 4.0])
    folded, plain_ = compiled(X, True), compiled(X, False)
    assert np.abs(plain_ - plain).max() > 0.1
    np.testing.assert_allclose(folded, plain_, rtol=1e-5, atol=1e-5)


def biased(x):
    return tf.nn.bias_add(convolved(x), np.float32([1, -2, 3, 0.5]))


def test_a_bias_before_the_norm_goes_into_the_sum_where_it_can_be(setting):
    def direct():
        z = with_sum(biased(given(X)))
        fold_batch_norms(default_graph(), strict=True)
        assert behind(z) == ["AddV2", "Conv2D", PLACEHOLDER]
        return [z]

    # Else it is added where it was, before what stands between.
    def body(keep):
        z = with_sum(tf.identity(biased(given(X))))
        report = fold_batch_norms(default_graph(), keep=[z] if keep else [])
        if keep:
            (entry,) = report.refused
            assert "is in keep" in entry.reason
            assert not report.folded
        else:
            (entry,) = report.folded
            into = default_graph().get_operation_by_name(entry.into).outputs[0]
            assert behind(into) == ["BiasAdd", "Conv2D", "Identity", PLACEHOLDER]
            return [z, into]
        return [z]

    (kept,) = setting.run(lambda: body(True))
    (result,) = setting.run(direct)
    np.testing.assert_allclose(result, kept, rtol=1e-5, atol=1e-5)
    old, new = setting.run(lambda: body(False))
    np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_behind_the_norm(setting, with_bias):
    kernel = np.random.default_rng(2).normal(size=(1, 1, 3, 4)).astype(np.float32)
    norm = [tf_values[:3] for tf_values in (MEAN, VARIANCE, BETA, GAMMA)]

    def built():
        y = tf.abs(given(X))
        y = tf.nn.batch_normalization(y, *map(tf.convert_to_tensor, norm), 1e-3)
        y = tf.nn.conv2d(y, kernel, 1, "VALID", name="conv")
        return tf.nn.bias_add(y, [1.0, 2.0, 3.0, 4.0]) if with_bias else y

    def body():
        z = built()
        (entry,) = fold_batch_norms(default_graph(), strict=True).folded
        into = default_graph().get_operation_by_name(entry.into).outputs[0]
        assert behind(into) == ["Abs", "BiasAdd", "Conv2D", PLACEHOLDER]
        # A layer without a bias cannot add one, and stays as it was.
        assert (into is z) == with_bias
        return [into]

    (result,) = setting.run(body)
    with tf.Graph().as_default() as graph:
        z = built()
    (expected,) = evaluate(graph, [z])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_what_waits_and_is_waited_for_stays(setting):
    def made(norm, held):
        awaited = [tf.no_op(name=f"awaited_{i}") for i in range(2)]
        with tf.control_dependencies(awaited[:1]):
            y = convolved(given(X))
        with tf.control_dependencies(awaited[1:]):
            z = norm(y)
        with tf.control_dependencies([z]):
            late = tf.no_op(name="late")
        return awaited, late, z if held else tf.nn.relu(z)

    def body():
        cases = [made(norm, held) for norm in (*SUMS, fused) for held in (True, False)]
        report = fold_batch_norms(default_graph(), strict=True)
        layers = {
            e.norm: default_graph().get_operation_by_name(e.into) for e in report.folded
        }
        assert len(layers) == len(cases)
        for awaited, late, _ in cases:
            before = needed(late, controls=True)
            (into,) = [op for op in layers.values() if op in before]
            assert {*awaited} <= {*needed(into, controls=True)}
        ge.verify(default_graph())
        return [end for *_, end in cases]

    results = iter(setting.run(body))
    for norm in (*SUMS, fused):
        expected = computed(norm)
        for wanted in (expected, np.maximum(expected, 0)):
            np.testing.assert_allclose(next(results), wanted, rtol=1e-5, atol=1e-5)


@in_each_setting
def test_a_fused_norm_in_keep_is_refused_and_nothing_changes():
    y = convolved(given(X))
    z = fused(y)
    graph = default_graph()
    with tf.Graph().as_default():
        other = tf.constant(1.0, name="other")
    before = edges(graph)
    with pytest.raises(SelectionError, match=r"'other:0'.*another graph"):
        fold_batch_norms(graph, keep=[other])
    with pytest.raises(ArgumentTypeError, match=r"Keras layers, not .*float"):
        fold_batch_norms(graph, keep=[1.0])
    # So is a norm behind what is kept.
    assert [e.op for e in fold_batch_norms(graph, keep=[y]).refused] == [y.op.name]
    report = fold_batch_norms(graph, keep=[z])
    assert not report.folded
    (entry,) = report.refused
    assert (entry.norm, entry.op) == ("norm", z.op.name)
    assert "is in keep" in entry.reason
    with pytest.raises(FoldError, match="is in keep"):
        fold_batch_norms(graph, keep=[z], strict=True)
    assert edges(graph) == before


def func_graph_of(body):
    """Return a FuncGraph that has its results, and of which no function was built."""
    spec = tf.TensorSpec([None, 6, 6, 3], name="x")
    return func_graph.func_graph_from_py_func("f", body, (spec,), {})


def value_of(graph):
    """Compute what a FuncGraph returns, without geutil."""
    with tf.Graph().as_default() as plain:
        name = graph.outputs[0].name
        results = tf.import_graph_def(
            graph.as_graph_def(), {"x": given(X)}, return_elements=[name], name=""
        )
    return evaluate(plain, results)[0]


@needs_eager
@pytest.mark.parametrize("norm", [with_sum, fused])
@pytest.mark.parametrize("wrapped", [False, True])
def test_results_of_a_func_graph_are_folded(norm, wrapped):
    def body(x):
        z = norm(convolved(x))
        return tf.identity(z) if wrapped else z

    graph = func_graph_of(body)
    (old,) = graph.outputs
    report = fold_batch_norms(graph, strict=True)
    (new,) = graph.outputs
    assert len(report.folded) == 1
    assert {"FusedBatchNormV3", "Rsqrt", "Mul"}.isdisjoint(behind(new))
    if norm is with_sum:
        assert new is old
    np.testing.assert_allclose(value_of(graph), computed(norm), rtol=1e-5, atol=1e-5)


@needs_eager
def test_a_failure_puts_the_results_back(monkeypatch):
    def body(x):
        y = fused(convolved(x))
        return y, tf.nn.l2_normalize(fused(tf.abs(x @ tf.ones([3, 4]))))

    graph = func_graph_of(body)
    before, old = edges(graph), list(graph.outputs)

    def fail(self, *entries):
        # The report of a graph is made when its batch norms are folded.
        now = edges(graph)
        assert {name: now[name] for name in before} != before
        raise RuntimeError("later")

    monkeypatch.setattr(FoldReport, "__init__", fail)
    with pytest.raises(RuntimeError, match="later"):
        fold_batch_norms(graph)
    assert all(a is b for a, b in zip(graph.outputs, old, strict=True))
    after = edges(graph)
    assert {name: after[name] for name in before} == before
