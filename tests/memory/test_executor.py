"""Programs small enough for their memory to be worked out by hand, and random ones."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PredictionError
from geutil.memory import Node, Program, execution_order, simulate
from tests.memory.refusals import refused
from tests.thorough import examples


def chain(count, **changes):
    """Return a chain of nodes with outputs of 100 bytes, the last one fetched."""
    nodes = [
        Node(f"n{i}", "Op", [i - 1] if i else [], [i], **changes) for i in range(count)
    ]
    return Program(nodes, [100] * count, [count - 1])


def in_place():
    """Return a chain of five nodes, each of which may take over its input's buffer."""
    nodes = [
        Node(f"n{i}", "Op", [i - 1] if i else [], [i], reuses=[(0, 0)] if i else [])
        for i in range(5)
    ]
    return Program(nodes, [100] * 5, [4])


X = Node("x", "Op", [], [0])
HELD = {
    "a chain holds two tensors": (chain(5), [100, 200, 200, 200, 200]),
    "a chain in place holds one": (in_place(), [100] * 5),
    # z is the last reader of both.
    "what another node will read is not reused": (
        Program(
            [
                X,
                Node("y", "Op", [0], [1], reuses=[(0, 0)]),
                Node("z", "Op", [0, 1], [2], reuses=[(0, 0), (0, 1)]),
            ],
            [100] * 3,
            [2],
        ),
        [100, 200, 200],
    ),
    "a node that reads a tensor twice does not reuse it": (
        Program([X, Node("y", "Mul", [0, 0], [1], reuses=[(0, 0)])], [100, 100], [1]),
        [100, 200],
    ),
    "a buffer of another size is not reused": (
        Program([X, Node("y", "Op", [0], [1], reuses=[(0, 0)])], [100, 60], [1]),
        [100, 160],
    ),
    "what nobody reads is freed at once": (
        Program(
            [Node("x", "Op", [], [0, 1]), Node("y", "Op", [0], [2])], [100, 50, 1], [2]
        ),
        [150, 101],
    ),
    "what is fetched is held to the end": (
        Program(
            [X, Node("y", "Op", [0], [1]), Node("z", "Op", [1], [2])],
            [100, 10, 1],
            [0, 2],
        ),
        [100, 110, 111],
    ),
    "an empty program holds nothing": (Program([], []), []),
}


def test_what_is_held_by_hand():
    found = {name: simulate(program).held for name, (program, _) in HELD.items()}
    assert found == {name: held for name, (_, held) in HELD.items()}
    assert simulate(Program([], [])).timeline().at_peak == ()


def test_temporary_bytes_count_while_the_node_runs():
    timeline = simulate(chain(3, temporary=40)).timeline()
    assert [m.bytes for m in timeline.moments] == [140, 240, 240]
    assert [(t.name, t.bytes) for t in timeline.at_peak] == [
        ("n0:0", 100),
        ("n1:0", 100),
        ("n1 (temporary)", 40),
    ]


def test_packed_bytes_are_resident_and_no_part_of_the_peak():
    program = chain(3)
    packed = [500, 0, -30]
    nodes = [n.changed(packed=p) for n, p in zip(program.nodes, packed, strict=True)]
    run = simulate(Program(nodes, program.sizes, program.fetched))
    assert (run.held, run.peak, run.resident) == ([100, 200, 200], 200, 600)
    timeline = run.timeline()
    assert (timeline.peak, timeline.resident) == (200, 600)
    assert simulate(Program([], [])).resident == 0


def variable_step():
    """Return a read of a variable of 100 bytes, two products with it and its update."""
    nodes = [
        Node("read", "ReadVariableOp", [], [0]),
        Node("change", "MatMul", [0], [1]),
        Node("update", "AssignSubVariableOp", [1], [2], updates=[0]),
        Node("product", "MatMul", [0], [3]),
        Node("other", "Op", [3], [4]),
    ]
    return Program(nodes, [0, 10, 100, 1, 1], [4])


def test_a_variable_that_is_changed_before_it_was_read_has_two_buffers():
    run = simulate(variable_step(), [0, 1, 2, 3, 4])
    # The old one is let go by the product.
    assert run.held == [0, 10, 110, 101, 2]
    assert run.alive(3) == [2, 3]
    assert run.timeline().at_peak[0].name == "update:0"
    # What was read is changed where it is.
    assert simulate(variable_step(), [0, 1, 3, 4, 2]).held == [0, 10, 11, 12, 11]


def test_two_reads_of_a_variable_are_one_buffer():
    nodes = [
        Node("a", "ReadVariableOp", [], [0]),
        Node("b", "ReadVariableOp", [], [1]),
        Node("late", "ReadVariableOp", [], [2]),
        Node("update", "AssignSubVariableOp", [], [3], updates=[0, 1, 2]),
        Node("x", "Op", [0], [4]),
        Node("y", "Op", [1], [5]),
        Node("z", "Op", [2], [6]),
    ]
    program = Program(nodes, [0, 0, 0, 100, 1, 1, 1])
    run = simulate(program, [0, 1, 3, 4, 5, 2, 6])
    assert run.held == [0, 0, 100, 101, 101, 0, 1]


def test_orders_that_are_none_are_refused():
    waiting = Program([X, Node("y", "Op", controls=[0])], [1])
    cycle = Program([Node("x", "Op", [1], [0]), Node("y", "Op", [0], [1])], [1, 1])
    for program, order, reason in (
        (chain(3), [0, 1], "leaves out 'n2'"),
        (chain(3), [0, 1, 1, 2], "names 'n1' twice"),
        (chain(3), [0, 2, 1], "'n2' before what it reads, 'n1'"),
        (waiting, [1, 0], "'y' before 'x', which it waits for"),
        (cycle, None, "'x' never becomes ready"),
    ):
        with refused(PredictionError, reason):
            simulate(program, order)


def test_cheap_nodes_run_first_and_the_last_of_the_others_is_not_handed_on():
    def fan(*cheap):
        ready = [
            Node(f"n{i}", "Op", [0], cheap=is_cheap) for i, is_cheap in enumerate(cheap)
        ]
        return Program([X, *ready], [1])

    assert execution_order(fan(False, False, False)) == [0, 3, 2, 1]
    assert execution_order(fan(False, True, False)) == [0, 2, 3, 1]
    assert execution_order(fan(True, True, False)) == [0, 1, 2, 3]

    # Few edges have one order, and many have several.
    def orders(count):
        program = fan(*[False] * count)
        return {tuple(execution_order(program, seed)) for seed in range(5)}

    assert len(orders(8)) == 1
    assert len(orders(9)) > 1


def random_program(rng, count):
    """Return a program whose nodes read, wait for and share anything before."""
    nodes, sizes = [], []
    for i in range(count):
        inputs = [rng.randrange(len(sizes)) for _ in range(rng.randrange(4)) if sizes]
        outputs = list(range(len(sizes), len(sizes) + rng.randrange(3)))
        sizes += [rng.choice([0, 10, 20]) for _ in outputs]
        pairs = [(o, j) for o in range(len(outputs)) for j in range(len(inputs))]
        rng.shuffle(pairs)
        aliases = pairs[:1] if rng.random() < 0.3 else []
        controls = [rng.randrange(i)] if i and rng.random() < 0.2 else []
        reuses = pairs if rng.random() < 0.5 else []
        temporary, cheap = rng.choice([0, 0, 7]), rng.random() < 0.3
        edges = inputs, outputs, controls, aliases, reuses
        nodes.append(Node(f"n{i}", "Op", *edges, temporary, cheap=cheap))
    fetched = [t for t in range(len(sizes)) if rng.random() < 0.2]
    return Program(nodes, sizes, fetched)


@st.composite
def programs(draw):
    """Draw a random program."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    return random_program(rng, draw(st.integers(1, 25)))


def naive(program, order):
    """Return the bytes held at each step, and behind it: by looking at everything."""
    reads = Counter(t for node in program.nodes for t in node.inputs)
    reads.update(program.fetched)
    buffers = []  # Lists of [bytes, tensors]: who shares the buffer.
    held, left = [], [0]

    def holders(buffer):
        return sum(reads[t] for t in buffer[1])

    def of(tensor):
        return next(b for b in buffers if tensor in b[1])

    for i in order:
        node = program.nodes[i]
        shared = {}
        for out, place in node.aliases:
            shared[node.outputs[out]] = of(node.inputs[place])
        for out, place in node.reuses:
            tensor, buffer = node.outputs[out], of(node.inputs[place])
            taken = any(b is buffer for b in shared.values())
            if tensor in shared or program.sizes[tensor] != buffer[0]:
                continue
            if holders(buffer) == 1 and not taken:
                shared[tensor] = buffer
        for tensor in node.outputs:
            if tensor in shared:
                shared[tensor][1].append(tensor)
            else:
                buffers.append([program.sizes[tensor], [tensor]])
        held.append(sum(b[0] for b in buffers) + node.temporary)
        for tensor in node.inputs:
            reads[tensor] -= 1
        buffers = [b for b in buffers if holders(b)]
        left.append(sum(b[0] for b in buffers))
    return held, left


@given(programs())
@examples(300)
def test_random_programs_hold_what_the_naive_reference_says(program):
    run = simulate(program)
    assert sorted(run.order) == list(range(len(program.nodes)))
    assert list(run.held) == naive(program, run.order)[0]
    # The executor's order is one that the check of given orders takes.
    assert simulate(program, run.order).held == run.held
    for step, i in enumerate(run.order):
        live = sum(program.sizes[t] for t in run.alive(step))
        assert live + program.nodes[i].temporary == run.held[step]


def awaited(program):
    """Return the nodes that each node of a program waits for."""
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    return [{*(maker[t] for t in n.inputs), *n.controls} for n in program.nodes]


class CountingList(list):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, key):
        CountingList.reads += 1
        return super().__getitem__(key)


def test_the_work_is_linear():
    def reads(count):
        program = chain(count, reuses=[])
        CountingList.reads = 0
        lists = CountingList(program.nodes), CountingList(program.sizes)
        simulate(Program(*lists, program.fetched))
        return CountingList.reads

    assert reads(10_000) <= 10 * reads(1_000) + 100


def test_a_device_holds_what_it_makes_and_what_arrives():
    nodes = [
        Node("a", "Op", [], [0]),
        Node("b", "Op", [0], [1]),
        Node("c", "Op", [0, 1], [2]),
        Node("d", "Op", [1, 2], [3]),
        Node("e", "Op", [0, 3], [4]),
    ]
    program = Program(nodes, [1, 10, 100, 1000, 10000], [4])
    sizes = program.sizes.__getitem__
    # a and e here: d's result arrives, and a's is kept for e.
    run = simulate(program.held_on({0, 4}, received=sizes))
    assert run.peak == 1 + 1000 + 10000
    # b, c and d: a's result is received once, for both of its readers.
    run = simulate(program.held_on({1, 2, 3}, received=sizes))
    held = dict(
        zip((run.program.nodes[i].name for i in run.order), run.held, strict=True)
    )
    assert (held["b"], held["c"], held["d"]) == (11, 111, 1110)
    # What is sent is gone for the device, whatever waits for it elsewhere.
    assert simulate(program.held_on({0}, received=sizes)).peak == 1
    everything = simulate(program.held_on(range(5), received=sizes))
    assert everything.held == simulate(program).held
