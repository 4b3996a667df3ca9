"""Orders that hold little, and dependencies that keep any schedule to their memory."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PredictionError
from geutil.memory import Node, Program, execution_order, simulate
from geutil.memory.buffers import buffers_of
from geutil.memory.kernels.onednn import fused_groups, with_groups_fused
from geutil.memory.schedule import (
    frugal_order,
    negligible_size,
    order_dependencies,
    plan_order,
    planned_order,
    with_controls,
)
from tests.memory.test_executor import awaited, chain, naive, programs
from tests.thorough import examples, length


def names(program):
    return [program.nodes[i].name for i in frugal_order(program)]


@given(programs())
@examples(300)
def test_the_plan_is_the_best_of_what_is_tried(program):
    order = frugal_order(program)
    assert order == frugal_order(program)
    # Raises for what is no order.
    peaks = [simulate(program, o).peak for o in (order, execution_order(program))]
    assert planned_order(program).peak == min(peaks)


def test_the_fewest_resident_bytes_decide():
    """A kernel that packs much runs before a large tensor; the peaks are the same."""
    x = Node("x", "Relu", outputs=[0])
    packs = Node("packs", "MatMul", inputs=[0], outputs=[1], packed=500)
    large = Node("large", "Tile", inputs=[0], outputs=[2])
    both = Node("both", "Concat", inputs=[1, 2], outputs=[3])
    program = Program([x, packs, large, both], sizes=[10, 10, 100, 10])
    late, early = simulate(program, [0, 2, 1, 3]), simulate(program, [0, 1, 2, 3])
    assert (late.peak, early.peak) == (120, 120)
    assert (late.resident, early.resident) == (620, 520)
    assert planned_order(program).resident == 520


def test_readers_of_a_view_can_read_what_it_shows():
    x = Node("x", "Relu", outputs=[0])
    view = Node("view", "Reshape", inputs=[0], outputs=[1], aliases=[(0, 0)])
    again = Node("again", "Reshape", inputs=[1], outputs=[2], aliases=[(0, 0)])
    y = Node("y", "Exp", inputs=[2, 0], outputs=[3], controls=[1])
    program = Program([x, view, again, y], sizes=[100, 100, 100, 8])
    without, shown, place = program.without_views(())
    assert [(n.name, list(n.inputs)) for n in without.nodes] == [
        ("x", []),
        ("y", [0, 0]),
    ]
    assert (shown, place) == ({1: 0, 2: 0}, {0: 0, 3: 1})
    assert list(without.nodes[1].controls) == [0]
    assert simulate(without).peak == simulate(program).peak == 108
    kept, shown, _ = program.without_views([1])
    assert [n.name for n in kept.nodes] == ["x", "view", "y"]
    assert shown == {2: 1}


@given(programs())
@examples(100)
def test_nothing_that_frees_is_put_off(program):
    """Before a node that holds more, whatever holds less has run if it could.

    Unless what the node makes is used up by those behind it, of what is there already.
    """
    order = frugal_order(program)
    small = negligible_size(program)

    def growth(ran):
        """Return what is held more after the last node that ran than before it."""
        *_, before, behind = naive(program, ran)[1]
        return behind - before

    for step in range(len(order)):
        ran = order[:step]
        bursts = (used_up(program, order[:n], order[n]) for n in range(step + 1))
        if any(order[step] in burst for burst in bursts):
            continue
        if growth([*ran, order[step]]) > small:
            for i in ready(program, ran):
                assert growth([*ran, i]) > small, program.nodes[i].name


def used_up(program, ran, i):
    """Return a node and all that it leads to if that can run once it has."""
    done = [*ran, i]
    behind = {i}
    while True:
        more = [j for j in ready(program, done) if reads(program, j, behind)]
        if not more:
            break
        done += more
        behind.update(more)
    made = {t for j in behind for t in program.nodes[j].outputs if program.sizes[t]}
    if made & set(program.fetched):
        return set()
    closed = all(
        not made.intersection(node.inputs) or j in behind
        for j, node in enumerate(program.nodes)
    )
    return behind if closed else set()


def reads(program, j, behind):
    made = {t for i in behind for t in program.nodes[i].outputs if program.sizes[t]}
    return bool(made.intersection(program.nodes[j].inputs))


def ready(program, ran):
    for i, behind in enumerate(awaited(program)):
        if i not in ran and behind <= set(ran):
            yield i


def test_the_longer_way_comes_first_and_holds_less():
    nodes = [
        Node("x", "Op", [], [0]),
        Node("short", "Op", [0], [1]),
        Node("long", "Op", [0], [2]),
        Node("on", "Op", [2], [3]),
        Node("sum", "Op", [3], [4]),
        Node("both", "Op", [1, 4], [5]),
    ]
    program = Program(nodes, [100, 100, 100, 100, 1, 1], [0, 5])
    assert names(program) == ["x", "long", "on", "sum", "short", "both"]
    assert simulate(program, frugal_order(program)).peak == 300
    assert simulate(program, [0, 1, 2, 3, 4, 5]).peak == 400


def test_what_is_used_up_at_once_runs_in_one_burst():
    """Filter gradients, each with an update in two branches, all ready at once."""
    nodes = [Node("x", "Op", [], [0])]
    sizes, count = [100], 4
    for i in range(count):
        gradient, square, mean = len(sizes), len(sizes) + 1, len(sizes) + 2
        sizes += [100, 100, 100]
        nodes += [
            Node(f"gradient{i}", "Op", [0], [gradient]),
            Node(f"square{i}", "Op", [gradient], [square]),
            Node(f"assign{i}/square", "Op", [square]),
            Node(f"mean{i}", "Op", [gradient], [mean]),
            Node(f"assign{i}/mean", "Op", [mean]),
        ]
    # All updates are awaited in the end.
    updates = [i for i, node in enumerate(nodes) if node.name.startswith("assign")]
    nodes.append(Node("step", "NoOp", controls=updates))
    program = Program(nodes, sizes, [0])
    order = names(program)
    places = [order.index(f"gradient{i}") for i in range(count)]
    assert sorted(places) == [1, 6, 11, 16]
    assert simulate(program, frugal_order(program)).peak == 300


def test_a_node_that_waits_for_itself_is_refused():
    cycle = Program([Node("x", "Op", [1], [0]), Node("y", "Op", [0], [1])], [1, 1])
    with pytest.raises(PredictionError, match="waits for itself"):
        frugal_order(cycle)


def test_long_chains_in_place():
    count = length(100_000)
    program = chain(count, reuses=[(0, 0)])
    nodes = [program.nodes[0].changed(reuses=()), *program.nodes[1:]]
    program = Program(nodes, program.sizes, program.fetched)
    assert frugal_order(program) == list(range(count))


def test_around_a_known_order_an_update_waits_for_what_reads_the_old_value():
    """A gradient is held meanwhile, which is no more than a second buffer."""
    nodes = [
        Node("variable", "ReadVariableOp", outputs=[0]),
        Node("slope", "Exp", outputs=[1]),
        Node("update", "AssignSubVariableOp", [1], [2], updates=[0]),
        Node("other", "Exp", outputs=[3]),
        Node("reader", "MatMul", [0, 3], [4]),
    ]
    program = Program(nodes, sizes=[0, 80, 80, 8, 8], fetched=[4])
    order = frugal_order(program, {1: 0, 3: 1, 4: 2})
    assert [nodes[i].name for i in order].index("reader") < order.index(2)
    hasty = [0, 1, 2, 3, 4]
    assert simulate(program, order).peak == 80 + 8 + 8
    assert simulate(program, hasty).peak == 80 + 80


@given(programs(), st.data())
@examples(100)
def test_random_programs_around_a_known_order(program, data):
    order = execution_order(program)
    known = {i: place for place, i in enumerate(order) if data.draw(st.booleans())}
    if known:
        # Raises for what is no order.
        found = frugal_order(program, known)
        simulate(program, found)
        assert [i for i in found if i in known] == [i for i in order if i in known]


def queued(program):
    return program.with_queues([""] * len(program.nodes))


def any_order(program, rng):
    """Return one of all orders of a program."""
    edges = nx.DiGraph()
    edges.add_nodes_from(range(len(program.nodes)))
    edges.add_edges_from((j, i) for i, of in enumerate(awaited(program)) for j in of)
    rank = rng.sample(range(len(edges)), len(edges))
    return list(nx.lexicographical_topological_sort(edges, rank.__getitem__))


@given(programs(), st.integers(0, 30), st.randoms(use_true_random=False))
@examples(300)
def test_any_order_stays_within_a_limit(program, tenths, rng):
    """With nothing small, in any order, up to what a node takes over by chance."""
    program = queued(program)
    run = plan_order(program).simulation
    limit = run.peak + run.peak * tenths // 10
    for options in ({}, {"limit": limit}):
        found = order_dependencies(program, run.order, bound=0, **options)
        assert not found.unordered
        ordered = with_controls(program, found.waits)
        # The edges agree with the plan, and what does nothing with memory may run
        # anywhere.
        simulate(ordered, run.order)
        most = options.get("limit", run.peak)
        assert simulate(ordered, any_order(ordered, rng)).peak <= most


def fan(width, size=100):
    """Return a program with many products of one tensor, each summed at once."""
    nodes = [Node("x", "Op", [], [0])]
    sizes = [size]
    for i in range(width):
        nodes.append(Node(f"product{i}", "Op", [0], [len(sizes)]))
        nodes.append(Node(f"sum{i}", "Op", [len(sizes)], [len(sizes) + 1]))
        sizes += [size, 1]
    return queued(Program(nodes, sizes, range(2, len(sizes), 2)))


def waits(program, bound, **options):
    order = range(len(program.nodes))
    return order_dependencies(program, order, bound, **options).waits


def test_each_large_node_waits_for_the_end_of_the_last_one():
    assert waits(fan(3), 10) == [(3, [2]), (5, [4])]
    # Room lets nodes run beside each other.
    assert waits(fan(4), 10, limit=208) == [(3, [2]), (5, [4]), (7, [6])]
    assert waits(fan(4), 10, limit=310) == [(5, [2]), (7, [2, 4])]
    assert not waits(fan(4), 10, limit=1000)
    # Small ones are left alone until they add up.
    assert not waits(fan(9, size=10), 1000)
    assert waits(fan(9, size=10), 9) == [(i, [i - 1]) for i in range(3, 19, 2)]


def test_loose_nodes_are_awaited_in_portions():
    nodes = [Node("x", "Op", [], [0])]
    nodes += [Node(f"small{i}", "Op", [], [i + 1]) for i in range(4)]
    nodes += [Node("use", "Op", [i + 1 for i in range(4)], [5])]
    nodes += [Node("large", "Op", [0], [6])]
    program = queued(Program(nodes, [100, 4, 4, 4, 4, 0, 100], [6]))
    assert waits(program, 50) == []
    # All that is small is behind the node that reads it.
    assert waits(program, 10) == [(6, [5])]


def test_who_cannot_wait_or_be_awaited_is_told_of():
    found = order_dependencies(fan(3), range(7), 10, can_wait=lambda i: i != 3)
    assert found.unordered == [(3, [2])]
    assert found.waits == [(5, [2, 4])]
    found = order_dependencies(fan(2), range(5), 10, may_await=lambda i, j: j > 2)
    assert (found.waits, found.unordered) == ([], [(3, [2])])


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
@examples(200)
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


def test_queues_do_not_wait_for_each_other():
    program = fan(4)
    queues = ["", *("a" if i // 2 % 2 else "b" for i in range(8))]
    queues[-1] = None
    for i, behind in waits(program.with_queues(queues), 10):
        assert {queues[i]} == {queues[j] for j in behind}


def test_long_programs_are_linear():
    count = length(30_000)
    found = waits(fan(count), 10)
    assert len(found) == count - 1
    assert all(behind for _, behind in found)


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
@examples(20)
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
    # Without a limit, what is small runs ahead.
    program = updates(100)
    names = [program.nodes[i].name for i, _ in waits(program, 20)]
    assert not any(name.startswith(("left", "right")) for name in names)
