"""The order that holds little: valid for any program, and frugal where it is clear."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geutil.errors import PredictionError
from geutil.memory import Node, Program, execution_order, simulate
from geutil.memory.scheduling import frugal_order
from tests.memory.test_simulation import chain, programs


def names(program):
    return [program.nodes[i].name for i in frugal_order(program)]


def with_late_nodes(program, roots):
    """Return a program in which some nodes are late, with all that depends on them."""
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    nodes = []
    for i, node in enumerate(program.nodes):
        behind = [*(maker[t] for t in node.inputs), *node.controls]
        late = i in roots or any(nodes[j].late for j in behind)
        nodes.append(node.changed(late=late))
    return Program(nodes, program.sizes, program.fetched)


@given(programs(), st.sets(st.integers(0, 24)))
@settings(max_examples=300, deadline=None)
def test_random_programs(program, roots):
    program = with_late_nodes(program, roots)
    order = frugal_order(program)
    # Raises for what is no order.
    simulate(program, order)
    early = [i for i in execution_order(program) if not program.nodes[i].late]
    assert order[: len(early)] == early
    assert frugal_order(program) == order


@given(programs(), st.sets(st.integers(0, 24)))
@settings(max_examples=100, deadline=None)
def test_nothing_that_frees_is_put_off(program, roots):
    """At each step of a late node that holds more, none was ready that holds less."""
    program = with_late_nodes(program, roots)
    order = frugal_order(program)
    first = sum(not node.late for node in program.nodes)
    small = max(program.sizes, default=0) // 8

    def growth(ran):
        """Return what is held more after the last node that ran than before it."""
        return held_after(program, ran) - held_after(program, ran[:-1])

    for step in range(first, len(order)):
        ran = order[:step]
        if growth([*ran, order[step]]) > small:
            for i in ready(program, ran):
                assert growth([*ran, i]) > small, program.nodes[i].name


def ready(program, ran):
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    for i, node in enumerate(program.nodes):
        behind = {*(maker[t] for t in node.inputs), *node.controls}
        if i not in ran and behind <= set(ran):
            yield i


def held_after(program, ran):
    """Return what is held once some nodes ran, all that read them still to come."""
    reads = [0] * len(program.sizes)
    for i, node in enumerate(program.nodes):
        if i not in ran:
            for t in node.inputs:
                reads[t] += 1
    for t in program.fetched:
        reads[t] += 1
    owner = sharing(program, ran)
    return sum(
        program.sizes[buffer]
        for buffer in set(owner.values())
        if any(reads[t] for t, b in owner.items() if b == buffer)
    )


def sharing(program, ran):
    """Return whose buffer each tensor has, by the rules of `simulate`."""
    reads = [0] * len(program.sizes)
    for node in program.nodes:
        for t in node.inputs:
            reads[t] += 1
    for t in program.fetched:
        reads[t] += 1
    owner = {}
    for i in ran:
        node = program.nodes[i]
        shared = {}
        for out, place in node.aliases:
            shared[node.outputs[out]] = owner[node.inputs[place]]
        for out, place in node.reuses:
            tensor, buffer = node.outputs[out], owner[node.inputs[place]]
            holders = sum(reads[t] for t, b in owner.items() if b == buffer)
            if (
                tensor not in shared
                and holders == 1
                and program.sizes[buffer] == program.sizes[tensor]
                and buffer not in shared.values()
            ):
                shared[tensor] = buffer
        for tensor in node.outputs:
            owner[tensor] = shared.get(tensor, tensor)
        for t in node.inputs:
            reads[t] -= 1
    return owner


def test_what_frees_runs_before_what_makes():
    nodes = [
        Node("x", "Op", [], [0]),
        Node("make", "Op", [0], [1], late=True),
        Node("more", "Op", [1], [2], late=True),
        Node("reduce", "Op", [0, 1], [3], late=True),
    ]
    assert names(Program(nodes, [100, 100, 100, 1], [2])) == [
        *("x", "make", "reduce", "more")
    ]


def test_the_longer_way_comes_first_and_holds_less():
    nodes = [
        Node("x", "Op", [], [0]),
        Node("short", "Op", [0], [1], late=True),
        Node("long", "Op", [0], [2], late=True),
        Node("on", "Op", [2], [3], late=True),
        Node("sum", "Op", [3], [4], late=True),
        Node("both", "Op", [1, 4], [5], late=True),
    ]
    program = Program(nodes, [100, 100, 100, 100, 1, 1], [0, 5])
    assert names(program) == ["x", "long", "on", "sum", "short", "both"]
    assert simulate(program, frugal_order(program)).peak == 300
    assert simulate(program, [0, 1, 2, 3, 4, 5]).peak == 400


def test_a_cycle_is_refused():
    nodes = [
        Node("x", "Op", [], [0], controls=[1], late=True),
        Node("y", "Op", [0], [1], late=True),
    ]
    with pytest.raises(PredictionError, match="waits for itself"):
        frugal_order(Program(nodes, [1, 1], [1]))


def test_long_chains_in_place():
    program = chain(100_000, late=True, reuses=[(0, 0)])
    nodes = [program.nodes[0].changed(reuses=()), *program.nodes[1:]]
    program = Program(nodes, program.sizes, program.fetched)
    assert frugal_order(program) == list(range(100_000))
