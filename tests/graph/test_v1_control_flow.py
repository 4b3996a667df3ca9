"""Reading across the frame of a version 1 while loop."""

import pytest
import tensorflow as tf

import geutil as ge
from tests import settings
from tests.graph.building import snapshot


def enters_of(loops, name):
    return [
        op
        for op in loops.graph.get_operations()
        if op.type == "Enter" and op.name.startswith(f"{name}/")
    ]


def refused(loops, message, new, old, *readers):
    before = snapshot(loops.graph)
    with pytest.raises(ge.RerouteError, match=message):
        ge.reroute_ts(new, old, can_modify=readers)
    assert snapshot(loops.graph) == before


def test_no_reader_reads_across_a_frame(loops):
    inside1, inside2 = loops.inside1, loops.inside2
    refused(
        loops,
        r"'loop1/double' reads in while loop 'loop1/while_context' but 'x:0' lives "
        r"outside every while loop: bring it in through an Enter op",
        *(loops.x, inside1.op.inputs[0], inside1.op),
    )
    refused(
        loops,
        r"'other' reads outside every while loop but 'loop1/double:0' lives in while "
        r"loop 'loop1/while_context'",
        *(inside1, loops.x, loops.other.op),
    )
    refused(
        loops,
        r"'loop2/increase' reads in while loop 'loop2/while_context' but "
        r"'loop1/double:0' lives in while loop 'loop1/while_context'",
        *(inside1, inside2.op.inputs[0], inside2.op),
    )
    # TensorFlow refuses to run this: "Mismatched parent frames".
    entering = [op for op in enters_of(loops, "loop2") if op.inputs[0] is loops.result1]
    refused(
        loops,
        "'loop1/double:0' lives in while loop 'loop1/while_context'",
        *(inside1, loops.result1, *entering),
    )
    refused(
        loops,
        r"reads in while loop 'loop1/while_context' but 'x:0' lives outside",
        *(loops.x, loops.result1.op.inputs[0], loops.result1.op),
    )


def test_an_enter_reads_from_outside(loops):
    types = {op.type for op in loops.graph.get_operations()}
    assert {"Enter", "Merge", "Switch", "NextIteration", "Exit"} <= types
    assert settings.evaluate(loops.graph, [loops.out]) == [11.0]
    with loops.graph.as_default():
        two = tf.constant(2.0, name="two")
    assert ge.reroute_ts(two, loops.x, can_modify=enters_of(loops, "loop1")) == 1
    assert settings.evaluate(loops.graph, [loops.out]) == [2.0 * 8 + 3]
    # The result of a loop lives outside.
    assert ge.reroute_ts(loops.result1, loops.x, can_modify=[loops.other.op]) == 1
    assert settings.evaluate(loops.graph, [loops.other]) == [-16.0]


def test_reading_inside_one_body_is_allowed(loops):
    adds = loops.inside2.op
    assert ge.reroute_ts(adds.inputs[0], adds.inputs[1], can_modify=[adds]) == 1
    # Each round doubles, in the second loop too.
    assert settings.evaluate(loops.graph, [loops.out]) == [64.0]


def test_an_op_outside_may_not_wait_for_a_body(loops):
    # TensorFlow fails to run this: "Retval[0] has already been set".
    before = snapshot(loops.graph)
    with pytest.raises(ge.RerouteError, match="loop1"):
        ge.add_control_inputs(loops.other.op, loops.inside1.op)
    assert snapshot(loops.graph) == before
    # A body may wait inside itself.
    counter = loops.graph.get_operation_by_name("loop1/Identity")
    ge.add_control_inputs(loops.inside1.op, counter)
    assert settings.evaluate(loops.graph, [loops.out]) == [11.0]


def test_nested_loops(control_flow_v1):
    inside = {}

    def inner(i, value):
        inside["inner"] = tf.multiply(value, 2.0, name="double")
        return i + 1, inside["inner"]

    def outer(i, value):
        inside["outer"] = tf.add(value, 1.0, name="increase")
        _, result = tf.compat.v1.while_loop(
            lambda i, v: i < 2, inner, [0, inside["outer"]], name="inner"
        )
        return i + 1, result

    with tf.Graph().as_default() as graph:
        _, result = tf.compat.v1.while_loop(
            lambda i, v: i < 2, outer, [0, tf.constant(0.0)], name="outer"
        )
    assert settings.evaluate(graph, [result]) == [20.0]
    assert ge.find_violations(graph) == []
    for new, reader in (("outer", "inner"), ("inner", "outer")):
        op = inside[reader].op
        with pytest.raises(ge.RerouteError, match="'outer/inner/while_context'"):
            ge.reroute_ts(inside[new], op.inputs[0], can_modify=[op])


def test_a_conditional_is_no_frame(control_flow_v1):
    made = {}

    def branch():
        made["t"] = tf.negative(made["x"], name="branch")
        return made["t"]

    with tf.Graph().as_default() as graph:
        made["x"] = tf.constant(3.0, name="x")
        made["y"] = tf.constant(4.0, name="y")
        result = tf.compat.v1.cond(tf.constant(True), branch, lambda: made["x"])
    op = made["t"].op
    assert op.inputs[0].op.type == "Switch"
    assert ge.reroute_ts(made["y"], op.inputs[0], can_modify=[op]) == 1
    assert settings.evaluate(graph, [result]) == [-4.0]


def test_functional_loops_are_left_alone(control_flow_v2):
    with tf.Graph().as_default() as graph:
        x, y = tf.constant(1.0), tf.constant(2.0)
        result = tf.while_loop(lambda v: v < 9.0, lambda v: [2.0 * v], [x])[0]
    assert any("While" in op.type for op in graph.get_operations())
    ge.reroute_ts(y, x)
    assert settings.evaluate(graph, [result]) == [16.0]
