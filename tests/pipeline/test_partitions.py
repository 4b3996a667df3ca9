"""Partitions of real networks and of chains: where each op goes, and what crosses."""

import re
from functools import partial
from itertools import combinations, pairwise, product

import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import (
    ArgumentTypeError,
    PlanError,
    PredictionError,
    SelectionError,
    TransformError,
)
from geutil.gradients import pipelined
from geutil.pipeline.stage_memory import StageMemory
from geutil.select import get_backward_walk_ops
from geutil.transform import Partition, PartitionStage, partition, place
from tests.gradients.networks import small_step, trace_forward
from tests.thorough import chosen

v1 = tf.compat.v1
DEVICES = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]


def chain(sizes):
    """Return the result of matrix products, each of so many columns."""
    x = v1.placeholder(tf.float32, [8, sizes[0]])
    for i, (rows, columns) in enumerate(pairwise(sizes)):
        x = tf.matmul(x, tf.ones([rows, columns]), name=f"product_{i}")
    return x


@pytest.mark.parametrize(
    "case",
    chosen(
        product(["ResNet50", "U-Net", "encoder"], ["memory", "time"]),
        ("U-Net", "memory"),
        ("encoder", "time"),
    ),
)
def test_stages_of_networks(case):
    name, balance = case
    forward = trace_forward(small_step(name))
    found = partition(forward.loss, DEVICES, balance, micro_batches=2)
    stage_of = {op: i for i, s in enumerate(found.stages) for op in s.ops}
    assert sum(len(s.ops) for s in found.stages) == len(stage_of)
    assert forward.loss.op in stage_of
    for op, stage in stage_of.items():
        before = [*(t.op for t in op.inputs), *op.control_inputs]
        assert all(stage_of[one] <= stage for one in before)
    for op, stage in stage_of.items():
        for t in op.inputs:
            if t.dtype == tf.resource:
                assert stage_of[t.op] == stage
    for i, stage in enumerate(found.stages):
        crossing = {
            id(t): t.shape.num_elements() * t.dtype.size
            for op in stage_of
            for t in op.inputs
            if stage_of[t.op] <= i < stage_of[op]
        }
        assert stage.sent_bytes == sum(crossing.values())
        assert {id(t) for t in stage.sent} == set(crossing)
    assert found.largest >= found.bound
    found.apply()
    assert all(op.device == DEVICES[stage] for op, stage in stage_of.items())


def test_of_a_graph_the_loss_is_found():
    with tf.Graph().as_default() as graph:
        y, *_ = layers([60, 300, 20, 200])
    for balance in ("memory", "time"):
        loss, whole = (partition(given, DEVICES, balance) for given in (y, graph))
        assert [s.ops for s in whole.stages] == [s.ops for s in loss.stages]
        assert whole.largest == loss.largest


def test_a_step_is_cut_while_a_function_is_traced():
    """AutoGraph would convert the search, which takes long and fails."""
    found = {}

    def trace(x, autograph):
        y = tf.tanh(tf.tanh(x) @ tf.ones([8, 50])) @ tf.ones([50, 8])
        told = [partition(y, DEVICES[:2], balance) for balance in ("memory", "time")]
        told.append(place(y.op, DEVICES[0]))
        found[autograph] = list(map(str, told))
        return y

    for autograph in (False, True):
        step = tf.function(partial(trace, autograph=autograph), autograph=autograph)
        step.get_concrete_function(tf.TensorSpec([4, 8]))
    assert found[True] == found[False]


def test_open_dimensions_are_told():
    with tf.Graph().as_default():
        loss, _, x = layers([50] * 5, None)
        with pytest.raises(PredictionError, match="shapes"):
            partition(loss, DEVICES)
        small, large = (
            partition(loss, DEVICES, shapes={x.ref(): [rows, 40]}).largest
            for rows in (100, 1000)
        )
    assert 5 * small < large < 10 * small


def test_time_is_balanced():
    with tf.Graph().as_default():
        y = chain([100] * 13)
        found = partition(y, DEVICES, "time")
    products = [[o for o in s.ops if o.type == "MatMul"] for s in found.stages]
    assert [len(ops) for ops in products] == [4, 4, 4]
    # Multiply-adds, and 16 for each element that is read or written.
    product = 8 * 100 * 100 + 16 * (2 * 8 * 100 + 100 * 100)
    assert [s.cost for s in found.stages] == [4 * product] * 3
    assert found.gap == 0
    # A little slack saves traffic.
    with tf.Graph().as_default():
        y = chain([1000, 1000, 1000, 10, 1000, 1000])
        even, slack = (
            partition(y, DEVICES[:2], "time", slack=slack) for slack in (0.0, 0.05)
        )
    assert slack.stages[0].sent_bytes == 8 * 10 * 4
    assert even.stages[0].sent_bytes == 8 * 1000 * 4
    assert even.largest < slack.largest <= 1.05 * even.largest


def test_micro_batches_in_flight_weigh_on_the_first_stages():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1000])
        for _ in range(30):
            x = tf.exp(x)
        one = partition(x, DEVICES[:2], recompute=False)
        many = partition(x, DEVICES[:2], recompute=False, micro_batches=8)
        again = partition(x, DEVICES[:2], micro_batches=8)
    counts = [len(found.stages[0].ops) for found in (one, many, again)]
    # In the first stage two are in flight, and one in the second; what runs again is
    # kept of one only.
    assert counts[1] < counts[0] - 3
    assert abs(counts[2] - counts[0]) <= 1


def layers(widths, rows=32):
    """Return a loss, the variables and the input of uneven layers."""
    x = y = v1.placeholder(tf.float32, [rows, 40])
    ws = []
    for i, width in enumerate(widths):
        shape = [y.shape[1], width]
        ws.append(v1.get_variable(f"w{i}", shape, use_resource=True))
        y = tf.tanh(y @ ws[-1])
    return tf.reduce_mean(y), ws, x


def peak_of(cut, loss, ws, x, **options):
    """Return the largest predicted peak of the step that is built."""
    whole = v1.placeholder(tf.float32, [4 * 32, 40])
    step = pipelined(loss, ws, cut, [(x, whole)], 4, **options)
    return max(p + w for p, w in zip(step.peaks, step.weights, strict=True))


OPTIONS = [{"recompute": False}, {"schedule": "gpipe"}, {}]


@pytest.mark.parametrize("options", chosen(OPTIONS, *OPTIONS[:2]), ids=str)
def test_no_cut_has_a_much_lower_peak(options):
    widths = [60, 300, 20, 200, 200, 10]
    peaks = {}
    for places in [None, *combinations(range(1, 6), 2)]:
        with tf.Graph().as_default():
            loss, ws, x = layers(widths)
            cut = partition(loss, DEVICES, "memory", micro_batches=4, **options)
            bound = cut.bound
            if places is not None:
                cut = cut_before(loss, places)
            peaks[places] = peak_of(cut, loss, ws, x, **options)
    least = min(peaks.values())
    assert bound <= least
    assert peaks[None] <= 1.1 * least
    assert max(peaks.values()) > 1.4 * least


def test_no_stage_holds_less_than_when_it_begins_to_go_backward(monkeypatch):
    """Cuts are ruled out by that without a simulation."""
    peak, seen = StageMemory.peak, []

    def noted(memory, *stage):
        seen.append((memory.least(*stage), peak(memory, *stage)))
        return seen[-1][1]

    monkeypatch.setattr(StageMemory, "peak", noted)
    for options in OPTIONS:
        with tf.Graph().as_default():
            loss, *_ = layers([60, 300, 20, 200, 200, 10])
            partition(loss, DEVICES, "memory", micro_batches=4, **options)
    assert len(seen) > 10
    assert all(least <= found for least, found in seen)


def cut_before(loss, places):
    """Return the partition of `layers` with cuts before some of them."""
    stages = [[] for _ in DEVICES]
    for op in get_backward_walk_ops(loss, control_inputs=True):
        # A layer's ops are those of its variable, its product and its activation.
        number = re.search(r"^w(\d+)|(?:_(\d+))?(?:/|$)", op.name)
        layer = int(number[1] or number[2] or 0)
        if op.name.startswith(("Mean", "Const")):
            layer = 5
        stages[sum(layer >= place for place in places)].append(op)
    parts = [
        PartitionStage(device, tuple(ops), 0.0, (), 0)
        for device, ops in zip(DEVICES, stages, strict=True)
    ]
    return Partition(tuple(parts), "memory", 0.0)


def test_what_changes_state_elsewhere_is_told():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8, 4])
        v = v1.get_variable("v", [8, 4], use_resource=True)
        y = tf.exp(x * v)
        v.assign_add(y, name="count")
        found = partition(tf.reduce_mean(y), DEVICES[:1], "time")
    assert [op.type for op in found.unplaced] == ["AssignAddVariableOp"]
    assert "no device: 'count" in str(found)


def test_gradients_follow():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [8, 100], name="x")
        y = x
        for i in range(4):
            y = tf.exp(y, name=f"layer{i}")
        partition(y, DEVICES[:2], "time").apply()
        v1.gradients(y, x, colocate_gradients_with_ops=True)
    forward = [op for op in graph.get_operations() if op.name.startswith("layer")]
    assert {op.device for op in forward} == set(DEVICES[:2])
    for op in forward:
        (gradient,) = (
            other
            for other in graph.get_operations()
            if other.type == "Mul"
            and f"loc:@{op.name}".encode() in other.colocation_groups()
        )
        assert gradient.name.startswith(f"gradients/{op.name}_grad")


def test_refusals(graph):
    v1.get_variable("w", [3], use_resource=True)
    with pytest.raises(SelectionError, match="pass the loss"):
        partition(graph, DEVICES)
    y = chain([10] * 4)
    with pytest.raises(ArgumentTypeError, match="a list of names"):
        partition(y, "/cpu:0")
    with pytest.raises(ArgumentTypeError, match="micro_batches"):
        partition(y, DEVICES, micro_batches=0)
    with pytest.raises(SelectionError, match="'memory' or 'time'"):
        partition(y, DEVICES, "ops")
    with pytest.raises(PlanError, match="'pipe' is no schedule"):
        partition(y, DEVICES, schedule="pipe")
    with pytest.raises(PlanError, match="ask for 1 to"):
        partition(y, ["/cpu:0"] * 99)
    with tf.device("/device:CPU:7"):
        z = tf.identity(y, name="elsewhere")
    found = partition(z, DEVICES)
    with pytest.raises(TransformError, match="'elsewhere' is on"):
        found.apply()
    with pytest.raises(KeyError), ge.transaction(graph):
        partition(y, DEVICES[:2]).apply()
        assert y.op.device == DEVICES[1]
        raise KeyError
    assert y.op.device == ""


def test_placed_ops_are_there_and_what_crosses_is_told():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8, 4], name="x")
        y = tf.exp(x, name="y")
        z = tf.add(y, y, name="z")
        tf.negative(z, name="reader")
        tf.identity(y, name="other")
    placed = place([y.op, z.op], DEVICES[1])
    assert {op.device for op in placed.ops} == {DEVICES[1]}
    assert [t.name for t in placed.received] == ["x:0"]
    assert [t.name for t in placed.sent] == ["y:0", "z:0"]
    assert (placed.received_bytes, placed.sent_bytes) == (128, 256)
    assert "they receive 128 B: 'x:0'" in str(placed)
    assert x.op.device == ""
    # Devices go back with the transaction.
    with pytest.raises(KeyError), ge.transaction(x.graph):
        place(x.op, DEVICES[0])
        assert x.op.device == DEVICES[0]
        raise KeyError
    assert x.op.device == ""
    # The ops that were moved before are on that device.
    assert place(x.op, DEVICES[1]).sent == ()


def test_what_reads_a_variable_stays_with_it():
    with tf.Graph().as_default() as graph:
        v = v1.get_variable("v", [3], use_resource=True)
        y = tf.exp(v.read_value(), name="y")
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    placed = place([*reads, y.op], DEVICES[1])
    assert list(placed.left) == reads
    assert placed.ops == (y.op,)
    assert "stays: it reads a variable" in str(placed)
    own = [op for op in graph.get_operations() if op.name.startswith("v")]
    assert place([*own, *reads], DEVICES[1]).left == ()


def test_a_part_of_a_colocated_group_is_refused():
    with tf.Graph().as_default():
        x = tf.ones([2], name="x")
        with v1.colocate_with(x):
            y = tf.exp(x, name="y")
    for moved in (x.op, y.op):
        with pytest.raises(TransformError, match="is colocated with"):
            place(moved, DEVICES[1])
    assert (x.op.device, y.op.device) == ("", "")
    assert len(place([x.op, y.op], DEVICES[1]).ops) == 2
    with pytest.raises(ArgumentTypeError, match="a device is a text"):
        place(x.op, 1)
