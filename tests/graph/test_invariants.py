"""Each invariant, broken on purpose."""

import itertools
from types import SimpleNamespace

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil.graph import invariants
from geutil.graph.invariants import CHECKS
from tests.graph import building
from tests.random_graphs import drawn_graphs
from tests.thorough import examples

PROPERTY = examples(80, derandomize=True)


@pytest.fixture
def ops():
    return [t.op for t in building.line()]


def told(checked):
    """Return what is broken in a graph or among ops: the invariant, op and reason."""
    return [(v.invariant, v.op, v.reason) for v in ge.find_violations(checked)]


class Stub(SimpleNamespace):
    __eq__, __hash__ = object.__eq__, object.__hash__

    def get_operations(self):
        return self.ops

    def get_attr(self, name):
        raise ValueError(name)


def stub(graph, name, inputs=(), control_inputs=(), types=None):
    """Return an op that TensorFlow would not let a test make, of one float output.

    It has what an op has that the checks read, and nothing else.
    """
    op = Stub(name=name, graph=graph, type="Stub", _id=len(graph.ops))
    graph.ops.append(op)
    readers = []
    t = {"op": op, "name": f"{name}:0", "graph": graph, "dtype": tf.float32}
    op.outputs = [Stub(**t, readers=readers, consumers=lambda: readers)]
    op.inputs, op.control_inputs, op._control_outputs = inputs, control_inputs, []
    op._input_types = types or [t.dtype for t in inputs]
    op.node_def = SimpleNamespace(attr={})
    op._get_control_flow_context = lambda: None
    for t in inputs:
        t.readers.append(op)
    for other in control_inputs:
        other._control_outputs.append(op)
    return op


def set_function(op, attribute, name):
    """Make an attribute name a function, past the checks of `Operation._set_attr`."""
    value = tf.compat.v1.AttrValue()
    value.func.name = name
    op._set_attr(attribute, value)


# -- clean graphs ----------------------------------------------------------------------


def test_a_clean_graph_passes(ops):
    ge.verify(ops[0].graph)
    # As in verify([*view.ops, *other_view.ops]).
    ge.verify([*ops, *ops])
    ge.verify([])
    ge.verify(tf.Graph())
    assert ge.find_violations(ops[0].graph) == []


def test_ops_that_are_listed_twice_hide_no_cycle():
    with tf.Graph().as_default():
        a = tf.constant(1.0, name="a")
        b = tf.add(a, a, name="b")
        c = tf.negative(b, name="c")
    b.op._update_input(1, c)  # b reads a and c; c reads b
    listed = [a.op, a.op, b.op, c.op]
    assert "acyclic" in [v.invariant for v in ge.find_violations(listed)]


def test_a_graph_with_everything_in_it(control_flow_v1):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        old = tf.compat.v1.Variable(1.0, use_resource=False)
        new = tf.compat.v1.Variable(1.0, use_resource=True)
        with tf.control_dependencies([tf.compat.v1.assign(old, x), new.assign(x)]):
            y = tf.compat.v1.cond(x > 0.0, lambda: x + old, lambda: x - new)
        z = tf.compat.v1.while_loop(lambda a: a < 9.0, lambda a: a + y, [x])
        tf.gradients(z, x)
        function = tf.function(lambda t: t * 2.0, autograph=False)
        function(y)
        with graph.colocate_with(y.op):
            tf.identity(y)
    assert ge.find_violations(graph) == []
    # And that of a function, while it is traced and later.
    found = []

    @tf.function(autograph=False)
    def traced(x):
        found.append(ge.find_violations(function(x).graph))

    concrete = traced.get_concrete_function(tf.TensorSpec([], tf.float32))
    assert [*found, ge.find_violations(concrete.graph)] == [[], []]


# -- cycles ----------------------------------------------------------------------------


def test_a_cycle_is_named_in_the_direction_of_its_edges(ops):
    ops[1]._update_input(0, ops[3].outputs[0])
    before = building.serialized(ops[0].graph)
    (violation,) = ge.find_violations(ops[0].graph)
    assert building.serialized(ops[0].graph) == before
    with pytest.raises(ge.VerificationError) as caught:
        ge.verify(ops[0].graph)
    assert caught.value.violations == (violation,)
    assert str(caught.value) == (
        "1 invariant broken:\n"
        "  [acyclic] 'op1': is on the cycle op1 -> op2 -> op3 -> op1"
    )


def test_a_cycle_counts_only_when_all_of_it_is_among_the_ops(ops):
    ops[1]._update_input(0, ops[3].outputs[0])
    assert ge.find_violations([ops[0], ops[1], ops[2], ops[4]]) == []
    assert len(ge.find_violations(op for op in ops[1:4])) == 1


def test_a_loop_with_a_cycle_that_is_not_its_back_edge(loops):
    op = loops.inside1.op
    op._update_input(0, op.outputs[0])
    assert [found[:2] for found in told(loops.graph)] == [("acyclic", "loop1/double")]


def names_on_cycle(violation):
    return violation.reason.removeprefix("is on the cycle ").split(" -> ")


@PROPERTY
@given(drawn_graphs(), st.data())
def test_cycles_against_networkx(drawn, data):
    """Each knot is named once: ops that all lead to each other."""
    with tf.Graph().as_default() as graph:
        ops = [t.op for t in drawn.build()]
    places = [(op, k) for op in ops for k in range(len(op.inputs))]
    if places:
        for op, k in data.draw(st.lists(st.sampled_from(places), max_size=4)):
            op._update_input(k, data.draw(st.sampled_from(ops)).outputs[0])
    pairs = st.tuples(st.sampled_from(ops), st.sampled_from(ops))
    for op, waits in data.draw(st.lists(pairs, max_size=4)):
        op._add_control_input(waits)
    digraph = nx.DiGraph(building.op_edges(graph))
    knots = [
        knot
        for knot in nx.strongly_connected_components(digraph)
        if len(knot) > 1 or digraph.has_edge(*[*knot] * 2)
    ]
    found = [v for v in ge.find_violations(graph) if v.invariant == "acyclic"]
    assert len(found) == len(knots)
    assert all(sum(v.op in knot for v in found) == 1 for knot in knots)
    for violation in found:
        cycle = names_on_cycle(violation)
        assert cycle[0] == cycle[-1] == violation.op
        assert len(set(cycle)) == len(cycle) - 1
        assert all(digraph.has_edge(*e) for e in itertools.pairwise(cycle))


# -- the other invariants --------------------------------------------------------------


def test_inputs_of_the_wrong_type(ops):
    with ops[0].graph.as_default():
        integer = tf.constant(1, name="integer")
    ops[2]._update_input(0, integer)
    reason = "Neg takes (float32) but reads (int32)"
    # A subset is checked alone.
    for checked in (ops[0].graph, [ops[2]]):
        assert told(checked) == [("inputs", "op2", reason)]
    assert ge.find_violations([op for op in ops if op is not ops[2]]) == []


def test_reference_and_value_of_one_type_agree():
    with tf.Graph().as_default() as graph:
        variable = tf.compat.v1.Variable(1.0, use_resource=False)
        x = tf.constant(1.0)
        y = tf.negative(x)
    y.op._update_input(0, variable.op.outputs[0])
    assert ge.find_violations(graph) == []


def test_colocation_with_an_op_that_does_not_exist(ops):
    value = tf.compat.v1.AttrValue()
    value.list.s.extend([b"loc:@gone", b"loc:@op1", b"not_a_location"])
    ops[3]._set_attr("_class", value)
    reason = "is colocated with 'gone', which does not exist"
    # With a subset of the ops, those outside it exist all the same.
    for checked in (ops[0].graph, [ops[3]]):
        assert told(checked) == [("colocation", "op3", reason)]


def test_a_function_that_the_graph_does_not_hold():
    function = tf.function(lambda t: t * 2.0, autograph=False)
    with tf.Graph().as_default() as graph:
        function(tf.constant(1.0))
    (op,) = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert ge.find_violations(graph) == []
    set_function(op, "f", "no_such_function")
    reason = "calls 'no_such_function', which the graph does not hold"
    assert told(graph) == [("functions", op.name, reason)]


def test_reading_across_frames(loops):
    (entering,) = [
        op
        for op in loops.result1.consumers()
        if op.type == "Enter" and op.name.startswith("loop2/")
    ]
    inside, x = loops.inside1, loops.x
    wrong = [
        (loops.other.op, inside, "'loop1/double:0' lives in while loop 'loop1/while_"),
        (loops.inside2.op, x, "'x:0' lives outside every while loop"),
        (entering, inside, "'loop1/double:0' lives in while loop"),
    ]
    for op, t, words in wrong:
        before = op.inputs[0]
        op._update_input(0, t)
        ((*found, reason),) = told(loops.graph)
        assert found == ["frames", op.name]
        assert words in reason
        op._update_input(0, before)
    loops.other.op._add_control_input(loops.inside1.op)
    assert [found[:2] for found in told(loops.graph)] == [("frames", "other")]


def test_membership():
    here, there = Stub(ops=[]), Stub(ops=[])
    stranger = stub(there, "stranger")
    stub(here, "reads", stranger.outputs)
    stub(here, "waits", control_inputs=[stranger])
    assert told(here.ops) == [
        ("membership", "reads", "reads 'stranger:0' of another graph"),
        ("membership", "waits", "waits for 'stranger' of another graph"),
    ]


def test_names():
    graph = Stub(ops=[])
    for name in ("a", "b", "a", "c", "a"):
        stub(graph, name)
    assert told(graph.ops) == [("names", "a", "names 3 ops")]


def test_too_few_inputs():
    graph = Stub(ops=[])
    stub(graph, "op", stub(graph, "first").outputs, types=[tf.float32, tf.int32])
    reason = "Stub takes (float32, int32) but reads (float32)"
    assert told(graph.ops) == [("inputs", "op", reason)]


# -- the report ------------------------------------------------------------------------


def test_several_violations_come_together(ops):
    with ops[0].graph.as_default():
        integer = tf.constant(1, name="integer")
    ops[4]._update_input(0, integer)
    value = tf.compat.v1.AttrValue()
    value.list.s.append(b"loc:@gone")
    ops[0]._set_attr("_class", value)
    ops[1]._update_input(0, ops[2].outputs[0])
    with pytest.raises(ge.VerificationError) as caught:
        ge.verify(ops[0].graph)
    assert [(v.invariant, v.op) for v in caught.value.violations] == [
        ("acyclic", "op1"),
        ("inputs", "op4"),
        ("colocation", "op0"),
    ]
    header, *lines = str(caught.value).splitlines()
    assert header == "3 invariants broken:"
    assert lines == [f"  {violation}" for violation in caught.value.violations]
    assert isinstance(caught.value, ValueError)


def test_a_long_report_is_cut_short():
    graph = Stub(ops=[])
    for i in range(50):
        stub(graph, f"op{i // 2}")
    with pytest.raises(ge.VerificationError) as caught:
        ge.verify(graph.ops)
    assert len(caught.value.violations) == 25
    lines = str(caught.value).splitlines()
    assert lines[0] == "25 invariants broken:"
    assert len(lines) == 12
    assert lines[-1] == "  and 15 more"


def test_the_table_of_the_module_lists_every_check():
    table = invariants.__doc__
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    assert len(rows) == len(CHECKS)


# -- a hundred thousand ops in a row ---------------------------------------------------


def test_a_long_chain_is_verified_without_recursion(chain, chain_ops):
    assert ge.find_violations(chain) == []


def test_a_cycle_around_a_long_chain_is_found(chain, chain_ops):
    root = chain_ops[1].inputs[0]
    chain_ops[1]._update_input(0, chain_ops[-1].outputs[0])
    try:
        half = len(chain_ops) // 2
        ((*found, _),) = told(chain_ops[half:] + chain_ops[:half])
    finally:
        chain_ops[1]._update_input(0, root)
    assert found == ["acyclic", chain_ops[1].name]
