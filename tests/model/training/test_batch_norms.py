"""Batch norms built without Keras: raw ops and version 1 graphs."""

import itertools
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.batchnorm.training import test_forms as forms
from tests.batchnorm.training.nets import EPSILON, Net, check_close, variable
from tests.model.refusal_tables import not_refused
from tests.model.training.helpers import by_name, is_deterministic, types_of
from tests.thorough import is_quick

v1 = tf.compat.v1
SPEC = tf.TensorSpec([None, 4, 4, 2], name="x")
X = np.random.default_rng(0).normal(size=[3, 4, 4, 2]).astype(np.float32)


class Opened:
    """Norms in training in one graph, opened, and what they are when deployed.

    Args:
        makes: functions that make nets in the default graph.
        run_updates: whether the moving averages move with the results.
    """

    def __init__(self, makes, run_updates=True):
        self.data, self.moving, inputs, deployed = {}, [], {}, {}
        with tf.Graph().as_default() as graph:
            for i, make in enumerate(makes):
                with tf.name_scope(f"net{i}"):
                    net = make()
                    self.data[f"x{i}"], x = net.input()
                    inputs[f"x{i}"] = x.name
                    averages = net.averages()
                    heads, updates = net.trained(x, averages)
                    with tf.control_dependencies(updates if run_updates else []):
                        tf.concat(heads, 0, name="y")
                    deployed[f"y{i}"] = [tf.concat(net.deployed(x, averages), 0)]
                self.moving.append((averages.mean, averages.variance))
            variables = {v.op.name: v for v in v1.global_variables()}
            feeds = {x: self.data[name] for name, x in inputs.items()}
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                values, self.expected = session.run((variables, deployed), feeds)
        outputs = {name: f"net{name[1:]}/y:0" for name in deployed}
        self.model = model.open(graph.as_graph_def(), inputs=inputs, outputs=outputs)
        for name, v in self.model.variables.items():
            v.assign(values[name])

    def check(self, stripped):
        """Check that the results are those of the deployed nets."""
        found = stripped.run(**self.data)
        check_close({name: [y] for name, y in found.items()}, self.expected)


UPDATES = [
    lambda v, s: v1.assign(v, v * 0.9 + s * 0.1),
    lambda v, s: v1.assign_add(v, (s - v) * 0.1),
    lambda v, s: v1.assign_sub(v, (v - s) * 0.1),
    lambda v, s: v1.assign_sub(v, tf.where(tf.size(s) > 0, (v - s) * 0.1, 0.0)),
    lambda v, s: v1.assign(v, v - (v - s) * 0.1),
]


def fused(x, p):
    return v1.nn.fused_batch_norm(x, p.gamma, p.beta, epsilon=EPSILON)


def normalized(x, p, mean, variance):
    y = (x - mean) / tf.sqrt(variance + EPSILON) * p.gamma + p.beta
    return y, mean, variance


def moments(x, p):
    return normalized(x, p, *tf.nn.moments(x, [0, 1, 2]))


def squares(x, p):
    mean = tf.reduce_mean(x, [0, 1, 2])
    of_squares = tf.reduce_mean(tf.square(x), [0, 1, 2])
    return normalized(x, p, mean, of_squares - tf.square(mean))


def deviations(x, p):
    mean = tf.reduce_mean(x, [0, 1, 2])
    return normalized(x, p, mean, tf.reduce_mean(tf.square(x - mean), [0, 1, 2]))


def updated(statistics, update, x, p):
    """Return a norm of statistics in a form, and its updates."""
    y, mean, variance = statistics(x, p)
    pairs = (p.averages.mean, mean), (p.averages.variance, variance)
    return y, [update(*pair) for pair in pairs]


def formed(statistics, update, **options):
    return partial(forms.Formed, partial(updated, statistics, update), **options)


def test_forms_and_updates():
    statistics = fused, moments, squares, deviations
    pairs = itertools.product(statistics, UPDATES)
    if is_quick():
        pairs = zip(itertools.cycle(statistics), UPDATES, strict=False)
    makes = [
        *itertools.starmap(formed, pairs),
        # A variance by sums that are reshaped on the way is not known here.
        *forms.FORMS[1:],
        partial(forms.Formed, forms._moments),
        *(partial(Net, "conv", is_fused, resource=False) for is_fused in (False, True)),
    ]
    opened = Opened(makes)
    before = {name: v.numpy() for name, v in opened.model.variables.items()}
    stripped = opened.model.strip_training()
    opened.check(stripped)
    np.testing.assert_equal(
        {name: v.numpy() for name, v in opened.model.variables.items()}, before
    )
    assert is_deterministic(stripped)
    reasons = [entry.reason for entry in stripped.strip_report.turned]
    assert len(reasons) == len(makes)
    for averages in opened.moving:
        (_,) = (r for r in reasons if all(f"'{v.op.name}'" in r for v in averages))


def test_updates_that_do_not_run_are_refused_unless_given():
    opened = Opened([partial(Net, "conv", True)], run_updates=False)
    m = opened.model
    case = "updates", m.strip_training, "nothing that runs moves a variable"
    assert not_refused(model.ModelError, [case], unchanged=m) == {}
    (name,) = (op.name for op in m.graph.get_operations() if "FusedBatch" in op.type)
    moving = tuple(v.op.name for v in opened.moving[0])
    opened.check(m.strip_training(statistics={name: moving}))
    kept = m.strip_training(keep=[name])
    assert by_name(kept)[name].action == "kept"
    np.testing.assert_array_equal(
        kept.run(**opened.data)["y0"], m.run(**opened.data)["y0"]
    )


def test_moving_averages_that_are_missing_or_two_are_refused():
    def missing(x, p):
        y, updates = updated(moments, UPDATES[0], x, p)
        return y, updates[:1]

    def two(x, p):
        y, mean, variance = moments(x, p)
        pairs = (p.averages.mean, mean), (p.averages.variance, variance)
        other = variable(np.zeros(6), trainable=False)
        return y, [UPDATES[0](*pair) for pair in (*pairs, (other, mean))]

    for form, message in (
        (missing, "towards its variance"),
        (two, "all moving averages of its mean"),
    ):
        with pytest.raises(model.ModelError, match=message):
            Opened([partial(forms.Formed, form)]).model.strip_training()


def test_kept_norms_keep_their_updates():
    m = Opened([formed(moments, UPDATES[0])]).model
    stripped = m.strip_training(keep=["net0"])
    found = [entry.kind for entry in stripped.strip_report.kept]
    assert found == ["batch norm", "side effect", "side effect"]
    types = [op.type for op in stripped.graph.get_operations()]
    assert types.count("AssignVariableOp") == 2


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


def test_a_moving_average_of_something_else_is_refused():
    moving = tf.Variable(tf.zeros(2))

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        largest = tf.reduce_max(x, [0, 1, 2])
        moving.assign(moving * 0.9 + largest * 0.1)
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
    total, moving = tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2))

    @tf.function(input_signature=[SPEC], autograph=False)
    def f(x):
        largest = tf.reduce_max(x, [0, 1, 2])
        total.assign_add(largest)
        moving.assign(moving * 0.9 + tf.reduce_min(x, [0, 1, 2]) * 0.1)
        return {"y": x / largest}

    assert "AssignVariableOp" not in types_of(model.open(f).strip_training())


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
