"""What two threads hold, by hand and against simulation with one thread."""

import numpy as np
import pytest

from geutil.gradients.planning.threads import peak_of_two_threads
from geutil.memory.program import Node, Program
from geutil.memory.simulation import simulate


def test_two_branches_run_at_once():
    nodes = [
        Node("a", "Relu", outputs=[0]),
        Node("b", "Relu", [0], [1]),
        Node("c", "Relu", [0], [2]),
        Node("d", "Relu", [1], [3]),
        Node("e", "Relu", [2], [4]),
        Node("f", "AddN", [3, 4], [5]),
    ]
    sizes = [1, 100, 100, 10, 10, 1]
    # b and c, then d beside what b made and e beside what c made.
    assert peak_of_two_threads(Program(nodes, sizes, [5])) == 220
    # With one thread: b; then c beside what d made of it.
    assert simulate(Program(nodes, sizes, [5])).peak < 220


def test_a_chain_holds_what_one_thread_holds():
    nodes = [Node("x", "Relu", outputs=[0])]
    nodes += [Node(f"n{i}", "Relu", [i - 1], [i]) for i in range(1, 20)]
    sizes = list(np.random.default_rng(0).integers(1, 100, 20))
    program = Program(nodes, sizes, [19])
    assert peak_of_two_threads(program) == simulate(program).peak


def test_a_buffer_is_taken_over():
    nodes = [
        Node("x", "Relu", outputs=[0]),
        Node("y", "Relu", [0], [1], reuses=[(0, 0)]),
        Node("z", "Reshape", [1], [2], aliases=[(0, 0)], cheap=True),
    ]
    assert peak_of_two_threads(Program(nodes, [100, 100, 100], [2])) == 100


def test_a_buffer_that_somebody_else_reads_is_not():
    nodes = [
        Node("x", "Relu", outputs=[0]),
        Node("y", "Relu", [0], [1], reuses=[(0, 0)]),
        Node("z", "Relu", [0, 1], [2]),
    ]
    assert peak_of_two_threads(Program(nodes, [100, 100, 1], [2])) == 201


def test_temporary_bytes_count_while_the_node_runs():
    nodes = [Node("x", "Relu", outputs=[0], temporary=50), Node("y", "Relu", [0], [1])]
    assert peak_of_two_threads(Program(nodes, [10, 10], [1])) == 60


@pytest.mark.parametrize("seed", range(20))
def test_at_least_what_any_node_and_the_results_need(seed):
    random = np.random.default_rng(seed)
    count = 30
    nodes = [Node("n0", "Relu", outputs=[0])]
    for i in range(1, count):
        reads = sorted({int(random.integers(i)) for _ in range(2)})
        nodes.append(Node(f"n{i}", "Relu", reads, [i]))
    sizes = [int(n) for n in random.integers(1, 100, count)]
    program = Program(nodes, sizes, range(count - 5, count))
    peak = peak_of_two_threads(program)
    for node in nodes:
        assert peak >= sum(sizes[t] for t in (*node.inputs, *node.outputs))
    assert sum(sizes[-5:]) <= peak <= sum(sizes)
