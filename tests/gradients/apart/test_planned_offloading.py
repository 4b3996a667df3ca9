"""Plans whose results wait on another device instead of being computed again."""

import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, PlanError, SelectionError
from geutil.gradients import (
    Budget,
    Plan,
    checkpointed,
    explain,
    gradients,
    last_report,
    plan,
    plan_curve,
)
from tests.gradients.apart.test_two_devices import FIRST, SECOND, chain, pytestmark
from tests.gradients.checking import trace_network
from tests.gradients.networks import residual, with_skips
from tests.memory.tracing import run_traced

__all__ = ["pytestmark"]

v1 = tf.compat.v1
FAST, SLOW = 1e12, 1e3
TRAVELLING = {"offload": True, "bandwidth": FAST, "offload_device": SECOND}


NETWORKS = {
    "residual": lambda: residual(24, 16, 4 * ("swish",)),
    "forked": lambda: with_skips(24),
}
IMAGES = np.random.default_rng(0).normal(size=[8, 24, 24, 3]).astype("f")


def network(name):
    with tf.device(FIRST):
        return NETWORKS[name]()


def in_function(how, net):
    return trace_network(net, how, IMAGES.shape, device=FIRST)


@pytest.fixture(scope="module", params=NETWORKS)
def net(request):
    return network(request.param)


@pytest.fixture(scope="module")
def found(net):
    return in_function(lambda loss, xs: plan(loss, xs, "55%", **TRAVELLING), net)[0]


def test_where_transfers_are_fast_results_travel(net, found):
    assert found.away and found.offload_device == SECOND
    assert found.peak <= found.budget
    assert found.bound == 0
    assert f"results sent to {SECOND}" in str(found)

    def others(loss, xs):
        without = plan(loss, xs, found.budget, measured=True)
        slow = plan(loss, xs, "70%", **TRAVELLING | {"bandwidth": SLOW})
        budgets = [Budget("70%", **TRAVELLING), Budget("55%")]
        return without, slow, plan_curve(loss, xs, budgets)

    (without, slow, curve), _ = in_function(others, net)
    # The times are measured anew, and those of what runs again differ by far.
    assert found.extra_time < 0.5 * without.extra_time
    assert not slow.away and slow.bursts and not slow.offload_device
    assert not curve.unmet and any(p.away for p in curve.plans)


def test_a_loaded_plan_serves_the_step_traced_anew(net, found, tmp_path):
    loaded = Plan.load(found.save(tmp_path / "plan.json"))
    assert loaded == found
    slopes, ours = in_function(
        lambda loss, xs: gradients(loss, xs, checkpoints=loaded), net
    )
    report = last_report(ours.graph)
    assert len(report.offloaded) == len(found.away)
    assert report.extra_time == found.extra_time
    _, plain = in_function(tf.gradients, net)
    for slope, wanted in zip(ours(IMAGES), plain(IMAGES), strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-6)
    assert slopes
    # All that crosses back waits for its turn.
    returned = 0
    for op in ours.graph.get_operations():
        for t in op.inputs:
            if t.op.device.endswith(SECOND[1:]) and not op.device.endswith(SECOND[1:]):
                # A plain op there would be sent at once.
                assert t.op.type == "PlaceholderWithDefault"
                assert [c.type for c in t.op.control_inputs] == ["NoOp"]
                returned += 1
    assert returned >= len(found.away)


def built_and_traced(build):
    """Return what a Session yields, and its own records of the run."""
    with tf.Graph().as_default() as graph, tf.device(FIRST):
        fetches = build()
        config = v1.ConfigProto(device_count={"CPU": 2})
        # TensorFlow would compute the gradient of the mean ahead, and hold it for good.
        config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
        # The first run settles what kernels choose.
        return run_traced(graph, fetches, {}, grappler=False, before=1, config=config)


def records_of(metadata, device):
    """Return TensorFlow's records of the ops of a device, in the order they ended."""
    for stats in metadata.step_stats.dev_stats:
        if stats.device.endswith(device[1:]):
            return sorted(
                stats.node_stats,
                key=lambda n: n.all_start_micros + n.all_end_rel_micros,
            )
    raise AssertionError(device)


def end_of(record):
    return record.all_start_micros + record.all_end_rel_micros


def peak_on(metadata, device):
    """Return the most bytes of results alive on a device, by TensorFlow's records.

    A result lives from its op to the last that reads it in the graph that TensorFlow
    ran; one that has the buffer of an input is that input.
    """
    (partition,) = (
        graph
        for graph in metadata.partition_graphs
        if all(node.device.endswith(device[1:]) for node in graph.node)
    )
    inputs = {
        node.name: [
            (name.split(":")[0], int([*name.split(":"), "0"][1]))
            for name in node.input
            if not name.startswith("^")
        ]
        for node in partition.node
    }
    records = [r for r in records_of(metadata, device) if r.node_name in inputs]
    last_read = {
        source: place
        for place, record in enumerate(records)
        for source in inputs[record.node_name]
    }
    # Of each buffer the size, the pointer, and when it comes and goes.
    buffers, sizes, pointers, begins, ends = {}, {}, {}, {}, {}
    for place, record in enumerate(records):
        read = [buffers[s] for s in inputs[record.node_name] if s in buffers]
        for output in record.output:
            about = output.tensor_description.allocation_description
            key = (record.node_name, output.slot)
            same = [b for b in read if pointers[b] == about.ptr and about.ptr]
            buffer = buffers[key] = same[0] if same else key
            if not same:
                sizes[key], pointers[key] = about.requested_bytes, about.ptr
                begins[key] = ends[key] = place
            ends[buffer] = max(ends[buffer], last_read.get(key, place))
    changes = collections.Counter()
    for buffer, size in sizes.items():
        changes[begins[buffer]] += size
        changes[ends[buffer] + 1] -= size
    return max(itertools.accumulate(changes[p] for p in range(len(records))))


def in_session(how, name):
    def build():
        net = network(name)
        loss = tf.reduce_mean(tf.square(net(tf.constant(IMAGES), training=True)))
        return how(loss, [v.value for v in net.trainable_variables])

    return built_and_traced(build)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_device_holds_less(name):
    budget = Budget("55%", **TRAVELLING)
    ours, traced = in_session(
        lambda loss, xs: gradients(loss, xs, checkpoints=budget, holds_gradients=True),
        name,
    )
    plain, plainly = in_session(tf.gradients, name)
    for slope, wanted in zip(ours, plain, strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-6)
    variables = sum(slope.nbytes for slope in plain)
    least, most = (peak_on(metadata, FIRST) for metadata in (traced, plainly))
    assert least - variables < 0.65 * most


def test_nothing_comes_back_before_its_turn():
    """Also of kept tensors that `offload=True` sends."""
    gates = {}

    def build():
        x = tf.constant(IMAGES[0, :, :, 0])
        kept, y = chain(x)
        (slope,) = gradients(
            y,
            [x],
            checkpoints=kept,
            min_checkpoint_size=0,
            offload=True,
            offload_device=SECOND,
            prefetch=0,
        )
        for op in slope.graph.get_operations():
            if op.name.endswith("/wait"):
                (gates[op.name],) = (gate.name for gate in op.control_inputs)
        return slope

    _, metadata = built_and_traced(build)
    here, there = (
        {r.node_name: end_of(r) for r in records_of(metadata, device)}
        for device in (FIRST, SECOND)
    )
    assert len(gates) >= 3
    for wait, gate in gates.items():
        name = wait.removesuffix("/wait")
        assert here[gate] <= there[wait] <= here[f"{name}/back"]
        assert there[f"{name}/away"] <= there[wait]


def test_devices_that_make_no_sense_are_refused():
    def refused(loss, xs):
        for change, reason in (
            ({"offload_device": FIRST}, "runs on /device:CPU:0"),
            ({"bandwidth": None}, "pass bandwidth="),
        ):
            with pytest.raises(PlanError, match=reason):
                plan(loss, xs, "55%", **TRAVELLING | change)

    in_function(refused, network("residual"))


def test_options_that_exclude_each_other_are_refused(found):
    budget = Budget("55%", **TRAVELLING)
    x = tf.constant(1.0)
    for checkpoints in (budget, found):
        with pytest.raises(SelectionError, match="the plan says what is offloaded"):
            explain(x, x, checkpoints=checkpoints, offload=True)
        with pytest.raises(SelectionError, match="are not halved"):
            explain(x, x, checkpoints=checkpoints, encode="bfloat16")
    for bandwidth in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentTypeError, match="positive number of bytes"):
            Budget("55%", offload=True, bandwidth=bandwidth)


def test_xla_has_one_device(found, caplog):
    net = network("residual")
    budget = Budget("60%", **TRAVELLING)

    def train(x, checkpoints):
        loss = tf.reduce_mean(tf.square(net(x, training=True)))
        return gradients(
            loss, net.trainable_variables[0].value, checkpoints=checkpoints
        )

    compiled = tf.function(train, jit_compile=True, autograph=False)
    compiled.get_concrete_function(tf.TensorSpec(IMAGES.shape), budget)
    assert "nothing is offloaded" in caplog.text
    assert not last_report().offloaded


def test_keras_fits_with_results_that_travel():
    def fitted(wrap):
        with tf.device(FIRST):
            net = wrap(network("residual"))
            net.compile("sgd", "mse")
            net.fit(IMAGES, np.zeros([8, 10]), batch_size=8, verbose=0)
        return net.get_weights()

    plain = fitted(lambda net: net)
    budget = Budget("55%", **TRAVELLING)
    ours = fitted(lambda net: checkpointed(net, budget=budget))
    assert last_report().offloaded
    for found, wanted in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
