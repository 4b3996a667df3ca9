"""Batch norms built without Keras: raw ops and version 1 graphs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.model.refusal_tables import not_refused
from tests.model.training.helpers import by_name, is_deterministic, types_of
from tests.thorough import crossed

v1 = tf.compat.v1
SPEC = tf.TensorSpec([None, 4, 4, 2], name="x")
X = np.random.default_rng(0).normal(size=[3, 4, 4, 2]).astype(np.float32)
EPSILON = 1e-3


class Statistics(tf.Module):
    def __init__(self):
        super().__init__()
        self.mean = tf.Variable([0.5, -1.0], trainable=False, name="moving_mean")
        self.variance = tf.Variable([2.0, 0.25], trainable=False, name="moving_var")
        self.scale = tf.Variable([1.5, 0.5], name="scale")
        self.offset = tf.Variable([0.1, 0.2], name="offset")

    def at_inference(self, x=X):
        """Return the definition of a batch norm, in double precision."""
        mean, variance, scale, offset = (
            v.numpy().astype(np.float64)
            for v in (self.mean, self.variance, self.scale, self.offset)
        )
        return (x - mean) / np.sqrt(variance + EPSILON) * scale + offset


def assign(variable, value, momentum=0.9):
    variable.assign(variable * momentum + value * (1 - momentum))


def assign_add(variable, value):
    variable.assign_add((value - variable) * 0.1)


def assign_sub(variable, value):
    variable.assign_sub((variable - value) * 0.1)


def assign_sub_if(variable, value):
    variable.assign_sub(tf.where(tf.size(value) > 0, (variable - value) * 0.1, 0.0))


def assign_difference(variable, value):
    variable.assign(variable - (variable - value) * 0.1)


UPDATES = [assign, assign_add, assign_sub, assign_sub_if, assign_difference]


def fused(s, update, version="FusedBatchNormV3", **options):
    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        none = tf.zeros([0])
        given = {"mean": none, "variance": none, "epsilon": EPSILON, **options}
        y, mean, variance, *_ = getattr(tf.raw_ops, version)(
            x=x, scale=s.scale, offset=s.offset, is_training=True, name="norm", **given
        )
        update(s.mean, mean)
        update(s.variance, variance)
        return {"y": y}

    return f


def averaging(s, _):
    """Return a fused norm that moves the averages itself."""
    options = {"mean": s.mean, "variance": s.variance, "exponential_avg_factor": 0.1}
    return fused(s, lambda variable, value: variable.assign(value), **options)


def moments(x, keepdims):
    return tf.nn.moments(x, [0, 1, 2], keepdims=keepdims)


def squares(x, keepdims):
    mean = tf.reduce_mean(x, [0, 1, 2])
    return mean, tf.reduce_mean(tf.square(x), [0, 1, 2]) - tf.square(mean)


def deviations(x, keepdims):
    mean = tf.reduce_mean(x, [0, 1, 2])
    return mean, tf.reduce_mean(tf.square(x - mean), [0, 1, 2])


def composed(s, update, form=moments, keepdims=False, bessel=False):
    """Return a batch norm of simple ops, with the statistics of a form."""

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        mean, variance = form(x, keepdims)
        flat_mean, flat_variance = tf.reshape(mean, [2]), tf.reshape(variance, [2])
        if bessel:
            n = tf.cast(tf.size(x) // 2, tf.float32)
            flat_variance = flat_variance * (n / (n - 1.0))
        update(s.mean, flat_mean)
        update(s.variance, flat_variance)
        if form is moments:
            y = tf.nn.batch_normalization(x, mean, variance, s.offset, s.scale, EPSILON)
        else:
            y = (x - mean) / tf.sqrt(variance + EPSILON) * s.scale + s.offset
        return {"y": y}

    return f


def check(s, function):
    m = model.open(function)
    stripped = m.strip_training()
    # Single precision, computed in another order than the definition.
    np.testing.assert_allclose(
        stripped.run(x=X)["y"], s.at_inference(), rtol=1e-5, atol=1e-5
    )
    assert is_deterministic(stripped)
    (turned,) = stripped.strip_report.turned
    assert "moving_mean" in turned.reason and "moving_var" in turned.reason
    np.testing.assert_array_equal(s.mean, [0.5, -1.0])
    return stripped


BUILDS = {
    "fused": fused,
    "moments": composed,
    "squares": partial(composed, form=squares),
    "deviations": partial(composed, form=deviations),
}


@pytest.mark.parametrize(("build", "update"), crossed(BUILDS, UPDATES, together=1))
def test_forms(build, update):
    s = Statistics()
    check(s, BUILDS[build](s, update))


@pytest.mark.parametrize(
    "build",
    [
        partial(fused, version="FusedBatchNorm"),
        partial(fused, version="FusedBatchNormV2"),
        averaging,
        partial(composed, bessel=True),
        partial(composed, bessel=True, keepdims=True),
        lambda s, _: composed(s, assign_add, deviations),
    ],
)
def test_versions_and_shapes(build):
    s = Statistics()
    check(s, build(s, assign))


def version_1_graph(use_resource, run_updates):
    """Return a graph and its session, with updates as version 1 layers made them."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 4, 4, 2], name="x")

        def variable(name, value, trainable=True):
            return v1.get_variable(
                name,
                initializer=tf.constant(value),
                trainable=trainable,
                use_resource=use_resource,
            )

        scale, offset = variable("scale", [1.5, 0.5]), variable("offset", [0.1, 0.2])
        moving_mean = variable("a", [0.5, -1.0], False)
        moving_variance = variable("b", [2.0, 0.25], False)
        y, mean, variance = v1.nn.fused_batch_norm(
            x, scale, offset, epsilon=EPSILON, is_training=True, name="bn"
        )
        updates = [
            v1.assign_sub(moving_mean, (moving_mean - mean) * 0.1),
            v1.assign_sub(moving_variance, (moving_variance - variance) * 0.1),
        ]
        with tf.control_dependencies(updates if run_updates else []):
            tf.identity(y, name="y")
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())
    return graph, session


@pytest.mark.parametrize("use_resource", [False, True])
def test_version_1(use_resource):
    graph, session = version_1_graph(use_resource, run_updates=True)
    m = model.open(graph, session=session, outputs=["y"])
    stripped = m.strip_training()
    expected = Statistics().at_inference()
    np.testing.assert_allclose(stripped.run(x=X)["y"], expected, rtol=1e-5, atol=1e-5)
    assert is_deterministic(stripped)


def test_updates_that_do_not_run_are_refused_unless_given():
    graph, session = version_1_graph(True, run_updates=False)
    m = model.open(graph, session=session, outputs=["y"])
    case = "updates", m.strip_training, "nothing that runs moves a variable"
    assert not_refused(model.ModelError, [case], unchanged=m) == {}
    (name,) = (op.name for op in m.graph.get_operations() if "FusedBatch" in op.type)
    stripped = m.strip_training(statistics={name: ("a", "b")})
    expected = Statistics().at_inference()
    np.testing.assert_allclose(stripped.run(x=X)["y"], expected, rtol=1e-5, atol=1e-5)
    kept = m.strip_training(keep=[name])
    assert by_name(kept)[name].action == "kept"
    np.testing.assert_array_equal(kept.run(x=X)["y"], m.run(x=X)["y"])


def test_a_refusal_lists_all_norms():
    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        for i in range(3):
            with tf.name_scope(f"bn{i}"):
                mean, variance = tf.nn.moments(x, [0, 1, 2])
                x = (x - mean) / tf.sqrt(variance + EPSILON)
        return {"y": x}

    with pytest.raises(model.ModelError) as caught:
        model.open(f).strip_training()
    for i in range(3):
        assert f"'bn{i}/moments/variance'" in str(caught.value)
    assert "keep=" in str(caught.value) and "statistics=" in str(caught.value)


def test_moving_averages_that_are_missing_or_two_are_refused():
    s, other = Statistics(), Statistics()

    def update_mean(v, value):
        if v is s.mean:
            assign(v, value)

    def update_another(v, value):
        assign(v, value)
        if v is s.mean:
            assign(other.mean, value)

    for update, message in (
        (update_mean, "towards its variance"),
        (update_another, "all moving averages of its mean"),
    ):
        with pytest.raises(model.ModelError, match=message):
            model.open(composed(s, update)).strip_training()


def test_a_moving_average_of_something_else_is_refused():
    s = Statistics()

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        largest = tf.reduce_max(x, [0, 1, 2])
        assign(s.mean, largest)
        return {"y": x / largest}

    m = model.open(f)
    with pytest.raises(
        model.ModelError, match="no statistic of a batch norm"
    ) as caught:
        m.strip_training()
    name = str(caught.value).split("'")[1]
    kept = m.strip_training(keep=[name])
    assert "AssignVariableOp" in types_of(kept)


def test_sums_and_averages_of_what_no_output_needs_go():
    s = Statistics()

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        largest = tf.reduce_max(x, [0, 1, 2])
        s.mean.assign(s.mean + largest)
        assign(s.variance, tf.reduce_min(x, [0, 1, 2]))
        return {"y": x / largest}

    assert "AssignVariableOp" not in types_of(model.open(f).strip_training())


def test_kept_norms_keep_their_updates():
    m = model.open(composed(Statistics(), assign))
    stripped = m.strip_training(keep=["moments"])
    found = [entry.kind for entry in stripped.strip_report.kept]
    assert found == ["batch norm", "side effect", "side effect"]
    types = [op.type for op in stripped.graph.get_operations()]
    assert types.count("AssignVariableOp") == 2


def test_norms_of_single_examples_and_of_weights_stay():
    w = tf.Variable(
        np.random.default_rng(0).normal(size=[1, 1, 2, 3]), dtype=tf.float32
    )

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        results = {}
        for axes in ([3], [1, 2], [1, 2, 3]):
            mean, variance = tf.nn.moments(x, axes, keepdims=True)
            y = (x - mean) / tf.sqrt(variance + EPSILON)
            results["".join(map(str, axes))] = y
        mean, variance = tf.nn.moments(w, [0, 1, 2])
        y = tf.nn.conv2d(x, (w - mean) / tf.sqrt(variance), 1, "SAME")
        return {**results, "weights": y}

    stripped = model.open(f).strip_training()
    assert not stripped.strip_report.entries
    results = stripped.run(x=X)
    for name, value in f(X).items():
        np.testing.assert_array_equal(results[name], value, err_msg=name)
