"""Steps of micro-batches, against TensorFlow's gradients of the whole batch."""

import re
from functools import partial
from graphlib import TopologicalSorter

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import ArgumentTypeError, PlanError, TransformError
from geutil.gradients import pipelined
from geutil.memory import Pipeline, Stage
from geutil.select import get_backward_walk_ops
from geutil.transform import Partition, PartitionStage, partition
from tests.gradients.checking import assert_close
from tests.gradients.wrapped.comparing import dense
from tests.memory.networks import Builder
from tests.processes import run_python
from tests.settings import control_flow
from tests.thorough import crossed, examples, thorough

v1 = tf.compat.v1
DEVICES = [f"/device:CPU:{i}" for i in range(4)]
SCHEDULES = ("1f1b", "gpipe")
COUNT, BATCH = 4, 8


def norm(x, axes):
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def convolutions(weight, x, y):
    for i in range(4):
        kernel = weight(3, 3, x.shape[-1], 6)
        x = tf.nn.relu(norm(tf.nn.conv2d(x, kernel, 1 + i % 2, "SAME"), [1, 2, 3]))
    return tf.reduce_mean(tf.square(tf.reduce_mean(x, [1, 2]) @ weight(6, 3) - y))


def decoder(weight, ids, _):
    embedding = weight(20, 8)
    x = tf.gather(embedding, ids)
    for _ in range(2):
        q, k, v = (tf.tensordot(norm(x, [-1]), weight(8, 8), 1) for _ in range(3))
        x += tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)
        x += tf.tensordot(
            tf.nn.gelu(tf.tensordot(x, weight(8, 16), 1)), weight(16, 8), 1
        )
    logits = tf.tensordot(norm(x, [-1]), tf.transpose(embedding), 1)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)
    return tf.reduce_mean(losses)


NETWORKS = {"convolutions": convolutions, "decoder": decoder}


def inputs_of(name, rows):
    """Return placeholders for a batch of so many rows."""
    if name == "decoder":
        return [v1.placeholder(tf.int32, [rows, 5]), v1.placeholder(tf.float64, [rows])]
    images = v1.placeholder(tf.float64, [rows, 8, 8, 3])
    return [images, v1.placeholder(tf.float64, [rows, 3])]


def values_for(tensors):
    rng = np.random.default_rng(1)
    return {
        t: rng.integers(0, 20, t.shape)
        if t.dtype.is_integer
        else rng.normal(size=t.shape)
        for t in tensors
    }


def run(fetches, feeds):
    """Run a step on four devices of this process."""
    config = v1.ConfigProto(device_count={"CPU": len(DEVICES)})
    with v1.Session(config=config) as session:
        session.run(v1.global_variables_initializer())
        return session.run(fetches, feeds)


assert_same = partial(assert_close, tolerance=1e-12)


def two_layers(x, reduce=tf.reduce_mean):
    w = v1.get_variable("w", [5, 5], x.dtype, use_resource=True)
    return w, reduce(tf.tanh(tf.tanh(x @ w) @ w))


def built(loss, w, inputs, count=COUNT, **options):
    cut = partition(loss, DEVICES[:2], "time")
    return pipelined(loss, w, cut, inputs, count, **options)


def assert_whole(step, wholes, whole, plain):
    """Run a step and what it replaces, and compare them."""
    fetches = [step.loss, dense(step.gradients)], [whole, dense(plain)]
    (total, gradients), (wanted, plain) = run(fetches, values_for(wholes))
    np.testing.assert_allclose(total, wanted, rtol=1e-13)
    assert_same(gradients, plain)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    crossed(NETWORKS, SCHEDULES, [True, False], together=1),
)
def test_gradients_are_those_of_the_whole_batch(name, schedule, recompute, graph):
    net = Builder(tf.float64)
    parts, wholes = inputs_of(name, BATCH // COUNT), inputs_of(name, BATCH)
    loss = NETWORKS[name](net.variable, *parts)
    net.again()
    whole = NETWORKS[name](net.variable, *wholes)
    plain = v1.gradients(whole, net.variables)
    cut = partition(loss, DEVICES[:3], "time", micro_batches=COUNT)
    pairs = list(zip(parts, wholes, strict=True))
    how = {"schedule": schedule, "recompute": recompute}
    step = pipelined(loss, net.variables, cut, pairs, COUNT, **how)
    assert_whole(step, wholes, whole, plain)
    assert {op.device for op in step.passes[1, True]} >= {DEVICES[1]}


def test_a_batch_of_any_size_is_split_when_it_is_fed(graph):
    x = v1.placeholder(tf.float64, [None, 5])
    w, loss = two_layers(x)
    plain = v1.gradients(loss, w)
    step = built(loss, w, x)
    rows = np.random.default_rng(0).normal(size=[12, 5])
    plain, gradients = run([plain, step.gradients], {x: rows})
    assert_same(gradients, plain)
    with pytest.raises(tf.errors.InvalidArgumentError, match="pipeline/stage_0"):
        run(step.loss, {x: rows[:10]})


def test_sums_of_losses(graph):
    x = v1.placeholder(tf.float64, [8, 5])
    w, loss = two_layers(x, tf.reduce_sum)
    assert_whole(built(loss, w, x, mean=False), [x], loss, v1.gradients(loss, w))


@st.composite
def networks(draw):
    """Draw layers, the inputs of each, its stage, and how the step runs."""
    stages = draw(st.integers(1, 4))
    layers, stage = [], 0
    for i in range(draw(st.integers(max(2, stages), 9))):
        stage = min(stage + draw(st.integers(0, 2)), stages - 1)
        kind = draw(st.sampled_from(["product", "tanh", "sum"]))
        reads = draw(st.lists(st.integers(0, i), min_size=1, max_size=2))
        layers.append((kind, [i, *reads], stage))
    return stages, layers, draw(st.sampled_from([1, 2, 3, 6])), draw(st.booleans())


@examples(25)
@given(networks(), st.sampled_from(SCHEDULES))
def test_any_partition_of_any_network(drawn, schedule):
    stages, layers, count, recompute = drawn
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [6, 4])
        values, stage_of, xs = [x], {}, []
        rng = np.random.default_rng(0)

        def put(stage):
            for op in graph.get_operations():
                stage_of.setdefault(op, stage)

        put(0)
        for kind, reads, stage in layers:
            read = [values[i] for i in reads]
            if kind == "product":
                xs.append(tf.constant(rng.normal(size=[4, 4])))
                result = (read[0] + read[1]) @ xs[-1]
            else:
                result = tf.tanh(read[-1]) if kind == "tanh" else tf.add_n(read)
            values.append(result)
            put(stage)
        loss = tf.reduce_mean(values[-1] ** 2)
        put(layers[-1][2])
        plain = v1.gradients(loss, xs) if xs else []
        cut = partition_by(stage_of, stages)
        how = {"schedule": schedule, "recompute": recompute}
        step = pipelined(loss, xs, cut, [x], count, **how)
        assert [g is None for g in step.gradients] == [g is None for g in plain]
        found = [[g for g in gs if g is not None] for gs in (plain, step.gradients)]
        plain, gradients = run(found, values_for([x]))
        assert_same(gradients, plain)
        assert_order_is_kept(step, x, count, schedule)


def partition_by(stage_of, stages):
    """Return a partition that somebody made by hand."""
    found = [
        PartitionStage(
            DEVICES[s], tuple(op for op, of in stage_of.items() if of == s), 1.0, (), 0
        )
        for s in range(stages)
    ]
    return Partition(tuple(found), "time", 1.0)


def assert_order_is_kept(step, x, count, schedule):
    """Assert by the edges of the graph alone that passes come one after another."""
    ends = [t for t in (step.loss, *step.gradients) if t is not None]
    read = {
        op: [*(t.op for t in op.inputs), *op.control_inputs]
        for op in get_backward_walk_ops(ends, control_inputs=True)
    }
    ops = [*TopologicalSorter(read).static_order()]
    number = {op: i for i, op in enumerate(ops)}
    behind = {}
    for op in ops:
        found = 1 << number[op]
        for before in read[op]:
            found |= behind[before]
        behind[op] = found
    stages = len(step.partition.stages)
    orders = Pipeline([Stage(1, 1)] * stages, count, schedule)
    for s in range(stages):
        ended, ended_at = 0, {}
        for is_backward, m in orders.passes(s):
            kind = "backward" if is_backward else "forward"
            scope = f"pipeline/stage_{s}/{kind}_{m}/"
            own = [op for op in ops if op.name.startswith(scope)]
            first = ended_at.setdefault(m, ended)
            # What is not computed again may run along with the forward pass.
            awaited = ended if step.recomputed[s] else first
            for op in own:
                if behind[op] >> number[x.op] & 1 and op.name != f"{scope}end":
                    assert behind[op] & awaited == awaited, op.name
            ended |= sum(
                1 << number[op] for op in own if behind[op] >> number[x.op] & 1
            )


def test_what_a_step_draws_is_not_drawn_again():
    found = []
    for recompute in (True, False):
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(3)
            net = Builder(tf.float64)
            part, whole = (v1.placeholder(tf.float64, [n, 6]) for n in (2, BATCH))
            x = part
            for _ in range(5):
                x = tf.tanh(v1.nn.dropout(x @ net.variable(6, 6), rate=0.5))
            loss = tf.reduce_mean(x**2)
            cut = partition(loss, DEVICES[:3], "time")
            step = pipelined(
                loss, net.variables, cut, [(part, whole)], COUNT, recompute=recompute
            )
            drawn = [op for op in graph.get_operations() if op.type == "RandomUniform"]
            found.append(run([step.loss, step.gradients], values_for([whole])))
        # Once in the original, and once for each micro-batch, none like another.
        assert len(drawn) == 5 * (1 + COUNT)
        assert len({op.get_attr("seed2") for op in drawn}) == 5 * COUNT
        assert len(step.notes) == 5
        assert "draws anew for each micro-batch" in step.notes[0]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


def test_the_report(graph):
    x = y = v1.placeholder(tf.float32, [8, 1000])
    ws = []
    for i in range(8):
        ws.append(v1.get_variable(f"w{i}", [1000], use_resource=True))
        y = tf.tanh(y) * ws[-1]
    loss = tf.reduce_mean(y)
    found = partition(loss, DEVICES, "time")
    step, all_first = (
        pipelined(loss, ws, found, x, 8, schedule=schedule) for schedule in SCHEDULES
    )
    part = 1000 * 4
    sent = {(s, s + 1): 8 * part for s in range(3)}
    back = {(s + 1, s): 8 * part for s in range(3)}
    assert step.traffic == dict(sorted((sent | back).items()))
    assert step.run.in_flight == (4, 3, 2, 1)
    # With all forward passes first each waits in each stage.
    assert all_first.run.in_flight == (8, 8, 8, 8)
    assert all_first.peaks[2] >= step.peaks[2] + (8 - 2) * part
    assert step.recomputed == (True, True, True, False)
    assert [s.kept for s in step.pipeline.stages[:3]] == [0, part, part]
    assert step.weights == tuple(
        part * sum(op.type == "VarHandleOp" for op in s.ops) for s in found.stages
    )
    # A stage keeps what three or two micro-batches sent, and the sums of its gradients.
    assert step.peaks[1] >= 3 * part + step.weights[1]
    assert 0 < step.run.bubble < 0.5
    lines = str(step).splitlines()
    shares = [float(re.search(r"([\d.]+)% of the comp", s)[1]) for s in lines[1:5]]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert lines[0].startswith("4 stages, 8 micro-batches, 1f1b: bubble ")
    assert "at most 4 micro-batches" in lines[1]
    assert f"weights {step.weights[1] / 1e3:.1f} kB" in lines[2]


def with_constant_batch(x):
    return tf.reduce_mean(tf.reshape(tf.tile(x, [1, 4]), [8, -1]) ** 2)


def with_a_counter(x, use_resource=True):
    v = v1.get_variable("count", [], use_resource=use_resource)
    with tf.control_dependencies([v.assign_add(tf.reduce_sum(x))]):
        return tf.reduce_mean(tf.tanh(x))


def with_labels_left_out(x):
    return tf.reduce_mean(x - tf.ones([8, 5]))


REFUSED = [
    (with_constant_batch, 4, r"'Reshape' \(Reshape\) makes a first axis of 8"),
    (with_a_counter, 4, "may change state, which would happen once for each"),
    (partial(with_a_counter, use_resource=False), 4, "changes a variable of version 1"),
    (with_labels_left_out, 4, "build the graph for one micro-batch"),
    (with_labels_left_out, 8, r"'sub' \(Sub\) makes a first axis of 8"),
    (tf.tanh, 4, "a loss is one number; pass tf.reduce_mean"),
    (tf.reduce_mean, 3, "which 3 micro-batches do not divide"),
    (lambda x: tf.constant(1.0) * 2, 4, "depends on none of"),
]


@pytest.mark.parametrize(("make", "count", "message"), REFUSED)
def test_refused_forward_passes(make, count, message, graph):
    x = v1.placeholder(tf.float32, [8, 5], name="x")
    loss = make(x)
    cut = partition(loss, DEVICES[:1], "time")
    before = graph.as_graph_def(add_shapes=False)
    with pytest.raises(TransformError, match=message):
        pipelined(loss, [], cut, x, count)
    assert graph.as_graph_def(add_shapes=False) == before


def test_a_loop_of_version_1_is_refused():
    with control_flow(1), tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8, 5], name="x")
        _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), [0, x])
        loss = tf.reduce_mean(y)
        ops = get_backward_walk_ops([loss], control_inputs=True)
        cut = partition_by(dict.fromkeys(ops, 0), 1)
        with pytest.raises(TransformError, match="loop or conditional of version 1"):
            pipelined(loss, [], cut, x, 4)


def test_refused_arguments(graph):
    x = v1.placeholder(tf.float32, [8, 5], name="x")
    part = v1.placeholder(tf.float32, [3, 5], name="part")
    w, loss = two_layers(x)
    with pytest.raises(PlanError, match="'pipe' is no schedule"):
        built(loss, w, x, schedule="pipe")
    with pytest.raises(PlanError, match="micro_batches is 1 or more"):
        built(loss, w, x, 0)
    with pytest.raises(ArgumentTypeError, match="inputs are tensors"):
        built(loss, w, ["x"])
    with pytest.raises(TransformError, match=r"'part:0' .* is no part of 'x:0'"):
        built(loss, w, [(part, x)])
    with pytest.raises(TransformError, match="one number and has no batch"):
        built(loss, w, [loss])
    with pytest.raises(TransformError, match="'x' is, or leads to, a tensor"):
        built(loss, [w, x], x)
    with pytest.raises(TransformError, match="is behind the loss and in no stage"):
        other = partition(tf.reduce_mean(x), DEVICES[:1])
        pipelined(loss, w, other, x, COUNT)


def test_norms_in_training_are_told(graph):
    x = v1.placeholder(tf.float32, [8, 4, 4, 3])
    ones = tf.ones([3])
    y, *_ = v1.nn.fused_batch_norm(x, ones, ones, name="norm")
    step = built(tf.reduce_mean(tf.tanh(y)), [ones], x)
    assert step.notes == ("'norm': its statistics are of each micro-batch",)
    assert "  'norm': its statistics" in str(step)


@thorough
def test_two_processes_send_what_the_report_says():
    done = run_python("-m", "benchmarks.pipelines", "--quick", "--processes")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.decode().splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["gpipe"] * 2 + ["1f1b"] * 2
    for _, _, measured, simulated, received, predicted in rows:
        assert float(measured) > 0
        assert float(simulated) > 0
        # There and back, 64 rows of 64 numbers.
        assert int(received) == int(predicted) == 2 * 64 * 64 * 4
