"""The worst case, against all schedules of small programs and against real runs."""

import random

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import ArgumentTypeError, MissingExtraError, PredictionError
from geutil.memory import Node, Program, execution_order, predict, simulate, worst_case
from tests.memory.refusals import refused
from tests.memory.test_executor import awaited, chain, programs, random_program
from tests.memory.tracing import traced_peaks
from tests.thorough import examples, length


def fullest_state(program, threads):
    """Return the most that any schedule holds, by going through all of them.

    An independent reckoning: buffers are followed along each history of starts and
    ends, since what may be taken over depends on it.
    """
    nodes, sizes = program.nodes, program.sizes
    maker = {t: i for i, node in enumerate(nodes) for t in node.outputs}
    behind = awaited(program)
    most = 0
    met = set()

    def holders(owner, tensor, ended):
        """Return who still holds a buffer: reading places, and the caller."""
        held = 0
        for t, b in owner.items():
            if b == tensor:
                held += t in program.fetched
                held += sum(
                    list(node.inputs).count(t)
                    for i, node in enumerate(nodes)
                    if i not in ended
                )
        return held

    def held(owner, running, ended):
        buffers = {
            b
            for t, b in owner.items()
            if holders(owner, b, ended) or maker[t] in running
        }
        total = sum(sizes[b] for b in buffers)
        return total + sum(nodes[i].temporary for i in running)

    def visit(owner, running, ended):
        nonlocal most
        key = (tuple(sorted(owner.items())), running, ended)
        if key in met:
            return
        met.add(key)
        most = max(most, held(owner, running, ended))
        for i in running:
            visit(owner, running - {i}, ended | {i})
        if threads is not None and len(running) == threads:
            return
        for i, node in enumerate(nodes):
            if i in running or i in ended or not behind[i] <= ended:
                continue
            now = dict(owner)
            shared = []
            for out, place in node.aliases:
                now[node.outputs[out]] = owner[node.inputs[place]]
                shared.append(owner[node.inputs[place]])
            for out, place in node.reuses:
                tensor, taken = node.outputs[out], owner[node.inputs[place]]
                free = holders(owner, taken, ended) == 1 and taken not in shared
                if tensor not in now and free and sizes[tensor] == sizes[taken]:
                    now[tensor] = taken
                    shared.append(taken)
            for tensor in node.outputs:
                now.setdefault(tensor, tensor)
            visit(now, running | {i}, ended)

    visit({}, frozenset(), frozenset())
    return most


@pytest.mark.parametrize("threads", [1, 2, None])
def test_all_schedules_of_small_programs(threads):
    exact = 0
    seeds = range(50)
    for seed in seeds:
        rng = random.Random(seed)
        program = random_program(rng, rng.randrange(3, 7))
        worst = worst_case(program, threads=threads)
        most = fullest_state(program, threads)
        assert worst.reached <= most <= worst.peak, seed
        exact += worst.peak == most
    # Where several nodes may be the last to read, the bound need not be reached.
    assert exact > 0.8 * len(seeds)


@given(programs(), st.integers(0, 9))
@examples(150)
def test_no_order_of_one_thread_holds_more(program, seed):
    order = execution_order(program, seed)
    assert simulate(program, order).peak <= worst_case(program).peak


def test_a_chain_is_exact():
    worst = worst_case(chain(50))
    assert (worst.reached, worst.peak) == (200, 200)
    assert worst.is_exact
    assert [t.bytes for t in worst.tensors] == [100, 100]
    assert len(worst.running) == 1


def test_more_threads_hold_more():
    nodes = [Node("x", "Op", [], [0])]
    nodes += [Node(f"y{i}", "Op", [0], [i + 1]) for i in range(4)]
    nodes += [Node(f"z{i}", "Op", [i + 1], []) for i in range(4)]
    ends = [Node("end", "Op", controls=range(5, 9))]
    program = Program([*nodes, *ends], [0] + [100] * 4)
    # Nothing says that z runs before the next y.
    assert worst_case(program, threads=1).peak == 400
    together = [n.changed(temporary=50) if n.name[0] == "z" else n for n in nodes]
    program = Program([*together, *ends], [0] + [100] * 4)
    peaks = [worst_case(program, threads=n).peak for n in (1, 2, 4, None)]
    assert peaks == [450, 500, 600, 600]


def test_a_variable_that_changes_while_it_is_read_has_two_buffers():
    read = Node("read", "ReadVariableOp", [], [0])
    use = Node("use", "Op", [0], [1])
    change = Node("change", "AssignSubVariableOp", [], [2], updates=[0])
    late = Node("late", "ReadVariableOp", [], [3], controls=[2])
    reader = Node("reader", "Op", [3], [])
    program = Program([read, use, change, late, reader], [0, 10, 100, 0], [1])
    assert worst_case(program).peak == 110
    waits = program.nodes[2].changed(controls=[1])
    ordered = Program([read, use, waits, late, reader], [0, 10, 100, 0], [1])
    assert worst_case(ordered).peak == 10


def test_threads_are_a_number_from_1_up(graph):
    y = tf.ones([2]) * 2.0
    for threads in (0, -1, 1.5, True, "2"):
        with refused(ArgumentTypeError, "from 1 up", threads):
            worst_case(y, threads=threads)


def test_a_node_that_waits_for_itself_is_refused():
    cycle = Program([Node("x", "Op", [1], [0]), Node("y", "Op", [0], [1])], [1, 1])
    for function in (worst_case, execution_order, simulate):
        with refused(PredictionError, "waits for itself", function):
            function(cycle)


def test_without_a_solver_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.graph.python", None)
    with pytest.raises(MissingExtraError, match=r"geutil\[plan\]"):
        worst_case(chain(3))


def test_it_is_exact_where_each_tensor_has_one_reader():
    """A heaviest closure of starts and ends then is a state that is reached."""
    for seed in range(60):
        rng = random.Random(seed)
        count = rng.randrange(2, 7)
        unread, nodes = [], []
        for i in range(count):
            read = [unread.pop(rng.randrange(len(unread))) for _ in unread[:2]]
            read = read[: rng.randrange(3)]
            controls = [j for j in range(i) if rng.random() < 0.2]
            temporary = rng.choice([0, rng.randrange(20)])
            nodes.append(Node(f"n{i}", "Op", read, [i], controls, temporary=temporary))
            unread.append(i)
        program = Program(nodes, [rng.randrange(1, 20) for _ in nodes], unread[:1])
        worst = worst_case(program, threads=None)
        most = fullest_state(program, None)
        assert (worst.reached, worst.peak) == (most, most), seed


@pytest.mark.parametrize("threads", [1, 4])
def test_no_run_holds_more(threads, graph):
    x = tf.compat.v1.placeholder(tf.float32, [256, 256], name="x")
    factors = [x * (i + 1.0) for i in range(6)]
    y = tf.add_n([tf.reduce_sum(tf.sin(x @ tf.cos(f))) for f in factors])
    worst = worst_case(y, threads=threads)
    assert predict(y).peak <= worst.peak
    feeds = {x: np.ones([256, 256], np.float32)}
    assert max(traced_peaks(graph, y, feeds, threads=threads)) <= worst.peak
    text = str(worst)
    assert text.startswith("at most ")
    assert ("4 ops at once" in text) == (threads == 4)
    assert "MatMul" in text


def test_long_programs_have_a_worst_case():
    """10,000 nodes, or fewer, deeper than Python's stack."""
    rng = random.Random(0)
    nodes = [Node("n0", "Op", [], [0])]
    for i in range(1, length(20_000) // 2):
        inputs = [max(0, i - 1 - rng.randrange(40)) for _ in range(2)]
        nodes.append(Node(f"n{i}", "Op", inputs, [i]))
    worst = worst_case(Program(nodes, [rng.randrange(1000) for _ in nodes]))
    assert worst.peak >= worst.reached > 0
