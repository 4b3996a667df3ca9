"""The backward pass runs in the planned order, with any number of threads."""

import itertools

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import gradients, last_report
from geutil.gradients.turns import SCOPE, queues
from tests.gradients.checking import assert_close, run
from tests.settings import slow

v1 = tf.compat.v1
pytestmark = slow
WIDTH = 512


def normalized(h, name):
    """Return a batch norm made of simple ops, whose gradient has several ways."""
    with tf.name_scope(name):
        mean, variance = tf.nn.moments(h, [0])
        return tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)


def network(x, layers=4):
    kept = []
    for i in range(layers):
        x = tf.nn.relu6(normalized(tf.tanh(tf.sin(x)), f"norm{i}"))
        kept.append(x)
    return tf.reduce_sum(tf.sin(x)), kept


def stand_ins(graph):
    return [op for op in graph.get_operations() if op.name.startswith(f"{SCOPE}/")]


def test_values_and_validity():
    with tf.Graph().as_default() as graph:
        start = np.random.default_rng(0).normal(size=[64, WIDTH]).astype("float32")
        x = tf.constant(start)
        z, kept = network(x)
        plain = tf.gradients(z, x)
        ours = gradients(z, x, checkpoints=kept)
        assert stand_ins(graph)
        ge.verify(graph)
        assert_close(*run(graph, [ours, plain]))
        assert_close(*run(graph, [ours, plain], optimize=True))


def test_large_ops_of_the_backward_pass_are_in_one_line():
    """Any two of them are ordered by edges, so threads cannot change their order."""
    with tf.Graph().as_default() as graph:
        x = tf.identity(tf.ones([64, WIDTH]))
        z, kept = network(x)
        before = len(graph.get_operations())
        (ours,) = gradients(z, x, checkpoints=kept)
    edges = nx.DiGraph()
    for op in graph.get_operations():
        for p in (*(t.op for t in op.inputs), *op.control_inputs):
            edges.add_edge(p, op)
    behind = {ours.op, *nx.ancestors(edges, ours.op)}
    seeds = [op for op in graph.get_operations()[before:] if op.type == "Identity"][:1]
    ahead = nx.descendants(edges, seeds[0])
    ops = [op for op in nx.topological_sort(edges) if op in behind and op in ahead]
    taking_turns = {op for op, _ in queues(ops)}
    large = [
        op
        for op in ops
        if op in taking_turns
        and not op.name.startswith("recomputed/")
        and any(t.shape.num_elements() == 64 * WIDTH for t in op.outputs)
    ]
    assert len(large) > 15
    for earlier, later in itertools.pairwise(large):
        assert nx.has_path(edges, earlier, later), (earlier.name, later.name)


def traced_peak(session, fetch, feed):
    metadata = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    session.run(fetch, feed, options=options, run_metadata=metadata)
    records = sorted(
        (record.alloc_micros, record.alloc_bytes)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for record in memory.allocation_records
    )
    return np.cumsum([size for _, size in records]).max()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_step_holds_what_was_predicted(threads):
    """The first step runs everything in another order, unless it is held to one."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2048, WIDTH])
        z, kept = network(x)
        (ours,) = gradients(z, x, checkpoints=kept)
        fetch = tf.reduce_sum(ours)
        config = v1.ConfigProto(
            inter_op_parallelism_threads=threads, use_per_session_threads=True
        )
        feed = {x: np.ones([2048, WIDTH], np.float32)}
        with v1.Session(graph=graph, config=config) as session:
            peak = traced_peak(session, fetch, feed)
    # A buffer may be taken in the same microsecond in which another is freed.
    assert peak <= last_report().peak + 2048 * WIDTH * 4


def test_ops_of_several_devices_do_not_wait_for_each_other():
    with tf.Graph().as_default() as graph:
        x = tf.ones([64, WIDTH])
        losses = []
        for place in ("/device:CPU:0", "/device:CPU:1"):
            with tf.device(place):
                losses.append(network(tf.identity(x), 2))
        kept = [t for _, tensors in losses for t in tensors]
        gradients([z for z, _ in losses], x, checkpoints=kept)
        for op in stand_ins(graph):
            places = {c.device for c in (*op.control_inputs, *op.inputs[0].consumers())}
            assert len(places - {""}) < 2, op.name


def test_weight_gradients_do_not_wait_for_sums_over_towers():
    with tf.Graph().as_default() as graph:
        w = tf.ones([WIDTH, WIDTH])
        losses = []
        for place in ("/device:CPU:0", "/device:CPU:1"):
            with tf.device(place):
                h = tf.tanh(tf.matmul(tf.tanh(tf.matmul(tf.ones([64, WIDTH]), w)), w))
                losses.append((tf.reduce_sum(tf.sin(h)), h))
        gradients([z for z, _ in losses], w, checkpoints=[h for _, h in losses])
        both = {
            op
            for op in graph.get_operations()
            if len({t.op.device for t in op.inputs} - {""}) > 1
        }
        assert both
        waited = {c for op in stand_ins(graph) for c in op.control_inputs}
        assert not waited & both
