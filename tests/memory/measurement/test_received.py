"""Tensors that a device has received, from records made by hand; meters on request."""

import io
import json

import pytest
import tensorflow as tf

from geutil.errors import MeasurementError
from geutil.memory.measurement import cluster
from geutil.memory.measurement.child import complete_trace, unrecorded_transfers
from geutil.memory.measurement.trace import timelines_by_device

ONE, TWO = (f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2))
SIZE = 400


def node(part, name, op, inputs, device, **attributes):
    made = part.node.add(name=name, op=op, input=inputs, device=device)
    for key, value in attributes.items():
        made.attr[key].s = value.encode()


def ran(devices, name, start, end, *, made=SIZE, at=0, kept=None, label=""):
    """Add a record: a result at an address, allocated until `kept` if that is told."""
    stats = devices.node_stats.add(node_name=name, timeline_label=label)
    stats.all_start_micros, stats.all_end_rel_micros = start, end - start
    stats.all_start_nanos = 1000 * start
    description = stats.output.add(slot=0).tensor_description
    description.dtype = tf.float32.as_datatype_enum
    description.shape.dim.add(size=made // 4)
    description.allocation_description.allocated_bytes = made
    description.allocation_description.ptr = at
    if kept is not None:
        records = stats.memory.add(allocator_name="cpu").allocation_records
        records.add(alloc_micros=start, alloc_bytes=made)
        records.add(alloc_micros=kept, alloc_bytes=-made)


def step(in_place):
    """A tensor goes to another task, where two ops in a row read it.

    Args:
        in_place: whether the first of them writes into it; else it writes into a
            tensor that was made there.
    """
    metadata = tf.compat.v1.RunMetadata()
    first = metadata.partition_graphs.add()
    node(first, "x", "Exp", [], ONE)
    node(first, "x_S0", "_Send", ["x"], ONE, tensor_name="edge_x")
    second = metadata.partition_graphs.add()
    node(second, "x_S1", "_Recv", [], TWO, tensor_name="edge_x")
    node(second, "other", "Exp", [], TWO)
    node(second, "y", "Mul", ["x_S1", "other"], TWO)
    node(second, "z", "Sum", ["y"], TWO)
    sender = metadata.step_stats.dev_stats.add(device=ONE)
    ran(sender, "x", 10, 20, at=1000, kept=35)
    receiver = metadata.step_stats.dev_stats.add(device=TWO)
    label = f"[400B] [1Mb/s] edge_x from {ONE} to {TWO}"
    ran(receiver, "RecvTensor", 11, 30, made=0, label=label)
    ran(receiver, "other", 12, 14, at=5000, kept=52 if in_place else 62)
    ran(receiver, "y", 40, 50, at=7000 if in_place else 5000)
    ran(receiver, "z", 55, 60, made=4, at=9000, kept=70)
    ran(receiver, "late", 65, 66, made=8, at=9100, kept=67)
    return metadata


@pytest.mark.parametrize("in_place", [True, False])
def test_a_received_tensor_is_held_by_both_sides(in_place):
    timelines = timelines_by_device(step(in_place), {"late": "Exp"}, {})
    assert list(timelines) == [ONE, TWO]
    assert timelines[ONE].peak == SIZE
    levels = {moment.op: moment.bytes for moment in timelines[TWO].moments}
    # It has come behind the other one, and both are there while they are multiplied.
    assert levels["x:0 (received)"] == levels["y"] == 2 * SIZE
    # Whichever the product lies in is left; the received one is free, or is it.
    assert levels["z"] == SIZE + 4
    assert levels["late"] == 8 + 4
    names = {live.name for live in timelines[TWO].at_peak}
    assert names == {"x:0 (received)", "other:0"}


def looped(sent, times):
    """A tensor that is sent in each of so many rounds of a loop, and to the caller."""
    metadata = step(False)
    part = metadata.partition_graphs[1]
    for name in ("round", "other_S1", "out"):
        node(part, name, "_Recv", [], TWO, tensor_name=f"edge_{name}")
        part.node[-1].attr["send_device"].s = ONE.encode()
        part.node[-1].attr["client_terminated"].b = name == "out"
    node(part, "merge", "Merge", ["round", "y"], TWO)
    node(part, "next", "Exp", ["round"], TWO)
    node(part, "back", "_Send", ["other_S1"], TWO)
    node(part, "seen", "Exp", ["out"], TWO)
    receiver = metadata.step_stats.dev_stats[1]
    for i in range(times):
        ran(receiver, "next", 80 + i, 81 + i)
    for i in range(times + 1):
        ran(receiver, "merge", 80 + i, 81 + i)
    ran(receiver, "seen", 90, 91)
    for edge, times_sent in sent.items():
        label = f"[400B] [1Mb/s] edge_{edge} from {ONE} to {TWO}"
        for i in range(times_sent):
            ran(receiver, "RecvTensor", 80 + i, 80 + i, made=0, label=label)
    return metadata


def test_transfers_without_a_record_are_found():
    """One record for each execution of a reader; a send has none, so one at least."""
    for rounds, back, expected in (
        (3, 1, []),
        # The last one carries that the loop is over.
        (4, 1, []),
        (2, 1, ["edge_round"]),
        (3, 0, ["edge_other_S1"]),
        (0, 0, ["edge_other_S1", "edge_round"]),
    ):
        metadata = looped({"round": rounds, "other_S1": back}, 3)
        assert unrecorded_transfers(metadata) == expected, (rounds, back)
    # A loop of no rounds sends nothing.
    assert unrecorded_transfers(looped({"other_S1": 1}, 0)) == []
    # Devices of one process share what is sent.
    metadata = looped({}, 3)
    for made in metadata.partition_graphs[1].node:
        if "send_device" in made.attr:
            made.attr["send_device"].s = TWO.replace("CPU:0", "CPU:1").encode()
    assert unrecorded_transfers(metadata) == []


def test_steps_are_traced_until_one_is_complete():
    traces = [looped({"round": i, "other_S1": 1}, 3) for i in range(5)]
    left = iter(traces)
    assert complete_trace(lambda: next(left)) is traces[3]
    with pytest.raises(MeasurementError, match=r"\(of the last one edge_round\)"):
        complete_trace(lambda: looped({"other_S1": 1}, 3))


def test_variables_count_on_their_device():
    metadata = step(True)
    node(metadata.partition_graphs[1], "v", "VarHandleOp", [], TWO)
    timelines = timelines_by_device(metadata, {}, {"v": 120, "elsewhere": 7})
    assert [timelines[name].variable_bytes for name in (ONE, TWO)] == [0, 120]


def test_meters_are_started_and_read_on_request():
    answers = io.StringIO()
    requests = [f"{cluster.READ}\n", f"{cluster.START_RESIDENT}\n", f"{cluster.READ}\n"]
    cluster.answer(requests, answers)
    lines = answers.getvalue().splitlines()
    assert all(line.startswith(cluster.READY) for line in lines)
    found = [json.loads(line.removeprefix(cluster.READY)) for line in lines]
    assert found[:3] == [[], [None, None], []]
    allocator, resident = found[3]
    assert allocator is None
    assert resident is None or resident >= 0
