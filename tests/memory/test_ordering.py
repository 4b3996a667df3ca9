"""Whoever obeys the dependencies of a plan holds no more than it says."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from geutil.memory import Node, Program, simulate
from geutil.memory.lifetimes import buffers_of
from geutil.memory.onednn import fused_groups, with_groups_fused
from geutil.memory.ordering import order_dependencies, plan_order, with_controls
from tests.memory.test_simulation import programs
from tests.thorough import length


def queued(program):
    return program.with_queues([""] * len(program.nodes))


def any_order(program, rng):
    """Return one of all orders of a program."""
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    left = {
        i: {*(maker[t] for t in node.inputs), *node.controls}
        for i, node in enumerate(program.nodes)
    }
    order = []
    while left:
        ready = [i for i, behind in left.items() if behind.issubset(order)]
        order.append(rng.choice(ready))
        del left[order[-1]]
    return order


@given(programs(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_order_holds_what_the_plan_holds(program, rng):
    """With nothing small, in any order, up to what a node takes over by chance."""
    program = queued(program)
    plan = plan_order(program)
    found = order_dependencies(program, plan.simulation.order, bound=0)
    ordered = with_controls(program, found.waits)
    assert not found.unordered
    # The edges agree with the plan, and what does nothing with memory may run anywhere.
    simulate(ordered, plan.simulation.order)
    assert simulate(ordered, any_order(ordered, rng)).peak <= plan.peak


@given(programs(), st.integers(0, 30), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_order_stays_within_a_limit(program, tenths, rng):
    program = queued(program)
    run = plan_order(program).simulation
    limit = run.peak + run.peak * tenths // 10
    found = order_dependencies(program, run.order, bound=0, limit=limit)
    ordered = with_controls(program, found.waits)
    simulate(ordered, run.order)
    assert simulate(ordered, any_order(ordered, rng)).peak <= limit


def fan(width, size=100):
    """Return a program with many products of one tensor, each summed at once."""
    nodes = [Node("x", "Op", [], [0])]
    sizes = [size]
    for i in range(width):
        nodes.append(Node(f"product{i}", "Op", [0], [len(sizes)]))
        nodes.append(Node(f"sum{i}", "Op", [len(sizes)], [len(sizes) + 1]))
        sizes += [size, 1]
    return queued(Program(nodes, sizes, range(2, len(sizes), 2)))


def test_each_large_node_waits_for_the_end_of_the_last_one():
    program = fan(3)
    order = [0, 1, 2, 3, 4, 5, 6]
    assert order_dependencies(program, order, 10).waits == [(3, [2]), (5, [4])]


def test_room_lets_nodes_run_beside_each_other():
    program = fan(4)
    order = range(9)
    tight, wide = (order_dependencies(program, order, 10, limit=n) for n in (208, 310))
    assert tight.waits == [(3, [2]), (5, [4]), (7, [6])]
    assert wide.waits == [(5, [2]), (7, [2, 4])]
    assert not order_dependencies(program, order, 10, limit=1000).waits


def test_what_is_small_is_left_alone_until_it_adds_up():
    program = fan(9, size=10)
    order = range(len(program.nodes))
    assert not order_dependencies(program, order, 1000).waits
    waits = order_dependencies(program, order, 9).waits
    assert waits == [(i, [i - 1]) for i in range(3, 19, 2)]


def test_loose_nodes_are_awaited_in_portions():
    nodes = [Node("x", "Op", [], [0])]
    nodes += [Node(f"small{i}", "Op", [], [i + 1]) for i in range(4)]
    nodes += [Node("use", "Op", [i + 1 for i in range(4)], [5])]
    nodes += [Node("large", "Op", [0], [6])]
    program = queued(Program(nodes, [100, 4, 4, 4, 4, 0, 100], [6]))
    assert order_dependencies(program, range(7), 50).waits == []
    # All that is small is behind the node that reads it.
    assert order_dependencies(program, range(7), 10).waits == [(6, [5])]


def test_who_cannot_wait_is_told_of_and_awaited_itself():
    found = order_dependencies(fan(3), range(7), 10, can_wait=lambda i: i != 3)
    assert found.unordered == [(3, [2])]
    assert found.waits == [(5, [2, 4])]


def test_what_it_reads_waits_for_who_cannot():
    """As for a product of a product, which Grappler is to join."""
    nodes = [
        Node("x", "Op", [], [0]),
        Node("first", "Op", [0], [1]),
        Node("sum", "Op", [1], [2]),
        Node("factor", "Op", [0], [3]),
        Node("product", "Op", [3], [4]),
    ]
    program = queued(Program(nodes, [100, 100, 1, 20, 100], [2, 4]))
    found = order_dependencies(program, range(5), 30, can_wait=lambda i: i != 4)
    assert found.waits == [(3, [2])]
    assert not found.unordered


@given(programs(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_where_some_cannot_wait_the_rest_holds_or_it_is_told(program, rng):
    program = queued(program)
    plan = plan_order(program)
    unable = {i for i in range(len(program.nodes)) if rng.random() < 0.4}
    found = order_dependencies(
        program, plan.simulation.order, bound=0, can_wait=lambda i: i not in unable
    )
    assert not unable.intersection(i for i, _ in found.waits)
    ordered = with_controls(program, found.waits)
    simulate(ordered, plan.simulation.order)
    told = with_controls(ordered, found.unordered)
    assert simulate(told, any_order(told, rng)).peak <= plan.peak


def test_who_may_not_be_awaited_is_not():
    found = order_dependencies(fan(2), range(5), 10, may_await=lambda i, j: j > 2)
    assert found.waits == []
    assert found.unordered == [(3, [2])]


def test_queues_do_not_wait_for_each_other():
    program = fan(4)
    queues = ["", *("a" if i // 2 % 2 else "b" for i in range(8))]
    queues[-1] = None
    waits = order_dependencies(program.with_queues(queues), range(9), 10).waits
    for i, awaited in waits:
        assert {queues[i]} == {queues[j] for j in awaited}


def test_long_programs_are_linear():
    count = length(30_000)
    program = fan(count)
    rng = random.Random(0)
    order = list(range(len(program.nodes)))
    waits = order_dependencies(program, order, 10).waits
    assert len(waits) == count - 1
    assert rng.choice(waits)[1]


def test_ops_that_run_as_one():
    nodes = [
        Node("x", "Op", [], [0]),
        Node("pad", "Pad", [0], [1]),
        Node("conv", "Conv2D", [1, 0], [2]),
        Node("bias", "BiasAdd", [2, 0], [3]),
        Node("relu", "Relu", [3], [4]),
        Node("dy", "Op", [4], [5]),
        Node("dbias", "BiasAddGrad", [5], [6]),
        Node("dw", "Conv2DBackpropFilter", [1, 0, 5], [7]),
    ]
    program = Program(nodes, [8] * 8, [6, 7])
    groups = fused_groups(program)
    # What the filter gradient reads, too, is no part of the convolution.
    assert groups == [[0], [1], [2, 3, 4], [5], [7, 6]]
    fused = with_groups_fused(program, groups)
    assert [node.name for node in fused.nodes] == ["x", "pad", "conv", "dy", "dw"]
    assert list(fused.nodes[2].outputs) == [4]
    assert sorted(fused.nodes[4].outputs) == [6, 7]
    assert {b.tensor for b in buffers_of(fused)} == {0, 1, 4, 5, 6, 7}


def updates(count, size=10):
    """Return a step whose small updates could all begin before it holds the most.

    Each makes two small tensors of what it is given, and ends with what they make.
    """
    nodes, sizes = [Node("x", "Op", [], [0])], [1000]
    for i in range(5):
        nodes.append(Node(f"large{i}", "Op", [i], [i + 1]))
        sizes.append(1000)
    for i in range(count):
        first = len(sizes)
        nodes.append(Node(f"left{i}", "Op", [], [first]))
        nodes.append(Node(f"right{i}", "Op", [], [first + 1]))
        nodes.append(Node(f"end{i}", "Op", [first, first + 1], [first + 2]))
        sizes += [size, size, 0]
    return queued(Program(nodes, sizes, []))


@given(st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_little_is_made_ahead_of_the_plan(rng):
    program = updates(50)
    order = range(len(program.nodes))
    peak = simulate(program, order).peak
    assert peak == 2000
    found = order_dependencies(program, order, peak // 100, limit=peak + peak // 50)
    ordered = with_controls(program, found.waits)
    simulate(ordered, order)
    # Two parts of fifty ahead, and as much room as the limit gives.
    assert simulate(ordered, any_order(ordered, rng)).peak <= 1.08 * peak


def test_without_a_limit_what_is_small_runs_ahead():
    program = updates(100)
    order = range(len(program.nodes))
    assert not any(
        program.nodes[i].name.startswith(("left", "right"))
        for i, _ in order_dependencies(program, order, 20).waits
    )
