"""Orders that hold little: valid for any program, and frugal where it is clear."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PredictionError
from geutil.memory import Node, Program, execution_order, simulate
from geutil.memory.schedule import (
    frugal_order,
    negligible_size,
    planned_order,
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
