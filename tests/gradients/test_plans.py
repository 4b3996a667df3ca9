"""Plans that are saved, loaded, and used for the same step traced anew."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, PlanError
from geutil.gradients import (
    Budget,
    Plan,
    checkpointed,
    explain,
    gradients,
    last_report,
    plan,
)
from tests.gradients.checking import trace_network
from tests.gradients.networks import residual
from tests.processes import run_python

v1 = tf.compat.v1


BATCH = 16
IMAGES = np.random.default_rng(0).normal(size=[BATCH, 16, 16, 3]).astype("f")


network = partial(residual, 16, activations=3 * ("relu",))


def in_graph(how, net=None, batch=BATCH):
    """Return what `how` makes of a loss and variables in a new function."""
    return trace_network(net or network(), how, [batch, 16, 16, 3])


@pytest.fixture(scope="module")
def found():
    return in_graph(lambda loss, xs: plan(loss, xs, "45%"))[0]


def test_a_plan_is_what_the_budget_leads_to(found):
    assert found.peak <= found.budget == int(0.45 * found.plain_peak)
    assert found.bursts and 0 < found.extra_time < 1
    assert "more time" in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.budget = 1

    report, _ = in_graph(lambda loss, xs: explain(loss, xs, checkpoints=Budget(0.45)))
    planned, _ = in_graph(lambda loss, xs: explain(loss, xs, checkpoints=found))
    assert planned.mode.startswith("plan for")
    assert (planned.peak, planned.extra_time) == (report.peak, report.extra_time)
    assert planned.peak == found.peak
    assert [(op.op_type, op.segment) for op in planned.recomputed] == [
        (op.op_type, op.segment) for op in report.recomputed
    ]
    assert planned.budget == report.budget == found.budget


def assert_plain(ours, net):
    """Check that a function yields the gradients that TensorFlow does."""
    _, plain = in_graph(tf.gradients, net)
    for slope, wanted in zip(ours(IMAGES), plain(IMAGES), strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-6)


def test_a_loaded_plan_serves_a_step_that_is_traced_anew(found, tmp_path):
    loaded = Plan.load(found.save(tmp_path / "plan.json"))
    assert loaded == found
    # A network of its own, with other names.
    with tf.name_scope("elsewhere"):
        net = network()
    _, ours = in_graph(lambda loss, xs: gradients(loss, xs, checkpoints=loaded), net)
    assert last_report(ours.graph).mode.startswith("plan for")
    assert_plain(ours, net)


def test_gradients_of_any_activation_are_those_that_were_planned():
    net = residual(16, 8, ("swish", "gelu", "relu6", "mish"))
    made = in_graph(lambda loss, xs: plan(loss, xs, "70%"), net)[0]
    _, ours = in_graph(lambda loss, xs: gradients(loss, xs, checkpoints=made), net)
    assert last_report(ours.graph).extra_time == made.extra_time > 0
    assert_plain(ours, net)


def test_a_graph_of_version_1_takes_its_own_plan_and_no_other(found, graph):
    net = network()
    x = v1.placeholder(tf.float32, IMAGES.shape, name="images")
    loss = tf.reduce_mean(tf.square(net(x, training=True)))
    xs = [v.value for v in net.trainable_variables]
    before = len(graph.get_operations())
    with pytest.raises(PlanError, match=r"call geutil\.gradients\.plan again"):
        gradients(loss, xs, checkpoints=found)
    assert len(graph.get_operations()) == before
    # The forward pass of a function has other ops: variables are captured.
    own = plan(loss, xs, "45%")
    slopes = gradients(loss, xs, checkpoints=own, order=False)
    wanted = tf.gradients(loss, xs)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        pairs = session.run([slopes, wanted], {x: IMAGES})
    assert last_report(graph).recomputed
    for slope, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(slope, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"net": {"width": 12}}, "types, shapes or edges"),
        ({"batch": BATCH // 2}, "types, shapes or edges"),
        ({"net": {"activations": 3 * ("swish",)}}, "ops, this one has"),
        ({"first": 1}, r"call geutil.gradients.plan again"),
    ],
    ids=str,
)
def test_another_step_is_refused(found, changed, reason):
    def refused(loss, xs):
        with pytest.raises(PlanError, match=reason):
            explain(loss, xs[changed.get("first", 0) :], checkpoints=found)
        return loss

    net = network(**changed.get("net", {}))
    in_graph(refused, net, changed.get("batch", BATCH))


def test_what_is_no_plan_is_refused(found, tmp_path):
    path = tmp_path / "plan.json"
    document = json.loads(found.save(path).read_text())
    changes = [
        {"format": 99},
        {"bursts": [[10**9]]},
        {"stages": [[0, 10**6]]},
        {"away": [10**9]},
        {"unknown": 1},
        {"bursts": 3},
    ]
    for text in ("no json", *(json.dumps(document | change) for change in changes)):
        path.write_text(text)
        with pytest.raises(PlanError, match="holds no plan"):
            pytest.fail(f"{Plan.load(path)} of {text}")
    with pytest.raises(ArgumentTypeError, match="pass budget="):
        checkpointed(network(), found)
    with pytest.raises(ArgumentTypeError, match="not both"):
        checkpointed(network(), "speed", budget=0.5)


def test_the_fingerprint_knows_attributes_and_constants():
    def of(stride, factor):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, [2, 8, 8, 3])
            w = tf.ones([3, 3, 3, 4])
            y = factor * tf.nn.conv2d(x, w, stride, "SAME")[:, :4, :4]
            return plan(tf.reduce_sum(y), [w], 10**9).fingerprint

    assert of(1, 2.0) == of(1, 2.0)
    assert len({of(1, 2.0), of(2, 2.0), of(1, 3.0)}) == 3


def test_ops_are_numbered_alike_in_another_process(found):
    """There strings have other hashes, and sets another order."""
    code = (
        "from tests.gradients.test_plans import *\n"
        "in_graph(lambda loss, xs: explain(loss, xs, checkpoints=Plan(**%r)))"
    )
    done = run_python("-c", code % vars(found))
    assert done.returncode == 0, done.stderr.decode()
