from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.graph.building import snapshot
from tests.reroute.samples import chains, foreign, inputs
from tests.select import tables
from tests.select.tables import check_refused
from tests.settings import evaluate, in_each_setting, names

A, B = np.array([1.0, 2.0]), np.array([3.0, 5.0])


def controls(g):
    return ge.ControlOutputs(g.graph)


def shown(t):
    """Return what a placeholder must keep of the tensor it stands in for."""
    return t.op.type, t.op.name, t.dtype, t.shape.as_list() if t.shape.rank else None


# -- detach_inputs ---------------------------------------------------------------------


@in_each_setting
def test_detach_inputs():
    g = chains()
    view = ge.sgv(g.c.op)
    result = ge.detach_inputs(view)
    assert type(result) is tuple
    returned, placeholders = result
    assert returned is view
    assert [shown(t) for t in placeholders] == [
        ("Placeholder", "geph__a_0", tf.float32, [2])
    ]
    assert view.inputs[0] is placeholders[0]
    assert names(view.inputs) == ["geph__a_0:0"]
    assert names(view.outputs) == ["c:0"]
    # Only the op of the view is cut off.
    assert inputs(g.c, g.both, g.e) == [["geph__a_0:0"], ["a:0", "b:0"], ["c:0"]]
    ge.verify(g.graph)


# What an op reads after `detach_inputs`.
CUT = """
both.op => both: geph__a_0 geph__b_0
ge.sgv(both.op).remap_inputs([1]) => both: a geph__b_0
ge.sgv(both.op).remap_inputs([]) => both: a b
[c.op, e.op] => e: c
[e.op, c.op] => c: geph__a_0
ge.sgv('^[ce]$', graph=graph) => c: geph__a_0
# A passthrough tensor: all who read it read the placeholder.
a => c: geph__a_0
ge.sgv(a) => both: geph__a_0 b
"""


def test_detach_inputs_of(setting):
    def check(call, expected):
        op, read = expected.split(": ")
        g = chains()
        ge.detach_inputs(tables.evaluate(call, g))
        assert tables.shown([*getattr(g, op).op.inputs]) == read

    tables.check_edits(setting, CUT, check)


@in_each_setting
def test_placeholder_names_and_scopes():
    x = tf.constant([1.0, 2.0], name="foo/bar/x")
    parts = tf.unstack(x, name="foo/parts")
    y = tf.negative(x, name="foo/y")
    z = tf.add(parts[0], parts[1], name="z")
    with tf.name_scope("around"):
        _, first = ge.detach_inputs(y.op)
        _, second = ge.detach_inputs(z.op)
    assert names(first) == ["foo/bar/geph__x_0:0"]
    assert names(second) == ["foo/geph__parts_0:0", "foo/geph__parts_1:0"]
    # Again: the name is taken, and a placeholder's name does not grow.
    other = tf.abs(x, name="other")
    _, third = ge.detach_inputs(other.op)
    assert names(third) == ["foo/bar/geph__x_0_1:0"]
    _, fourth = ge.detach_inputs(y.op)
    assert names(fourth) == ["foo/bar/geph__x_0_2:0"]


@in_each_setting
def test_detach_inputs_and_control_inputs():
    g = chains()
    ge.add_control_inputs(g.d.op, [g.a.op, g.b.op])
    ge.detach_inputs(g.d.op)
    assert sorted(names(g.d.op.control_inputs)) == ["a", "b"]
    ge.detach_inputs(g.d.op, control_inputs=True)
    assert names(g.d.op.control_inputs) == []
    assert inputs(g.d)[0][0].startswith("geph__")
    # Those from inside stay.
    ge.add_control_inputs(g.w.op, g.b.op)
    ge.detach_control_inputs([g.a.op, g.w.op])
    assert names(g.w.op.control_inputs) == ["a"]
    ge.detach_inputs([g.a.op, g.w.op], True)
    assert names(g.w.op.control_inputs) == ["a"]
    ge.detach_control_inputs(g.w.op)
    assert names(g.w.op.control_inputs) == []


@in_each_setting
def test_detach_outputs_and_control_outputs():
    g = chains()
    ge.add_control_inputs(g.w.op, g.b.op)
    ge.add_control_inputs(g.d.op, [g.a.op, g.w.op])
    ge.detach_outputs(g.a.op)
    assert sorted(names(g.w.op.control_inputs)) == ["a", "b"]
    assert ge.detach_control_outputs([g.a.op, g.w.op], controls(g)) is None
    # w waits for a inside the view; d waited outside it.
    assert sorted(names(g.w.op.control_inputs)) == ["a", "b"]
    assert names(g.d.op.control_inputs) == []
    assert inputs(g.c, g.d) == [["geph__a_0:0"], ["b:0"]]
    ge.detach_outputs(g.a.op, control_outputs=controls(g))
    assert names(g.w.op.control_inputs) == ["b"]


# -- detach_outputs --------------------------------------------------------------------


@in_each_setting
def test_detach_outputs():
    g = chains()
    view = ge.sgv(g.c.op)
    result = ge.detach_outputs(view)
    assert type(result) is tuple
    detached, placeholders = result
    assert [shown(t) for t in placeholders] == [
        ("Placeholder", "geph__c_0", tf.float32, [2])
    ]
    assert names(detached.ops) == ["c"]
    assert names(detached.outputs) == ["c:0"]
    assert inputs(g.e, g.c) == [["geph__c_0:0"], ["a:0"]]
    ge.verify(g.graph)


@in_each_setting
def test_readers_inside_keep_reading():
    g = chains()
    # a is read by c, inside, and by both, outside; b by both alone; w by nobody.
    view, placeholders = ge.detach_outputs([g.a.op, g.c.op, g.b.op, g.w.op])
    assert names(view.outputs) == ["a:0", "c:0", "b:0"]
    assert names(placeholders) == ["geph__a_0:0", "geph__c_0:0", "geph__b_0:0"]
    assert inputs(g.c, g.both, g.e, g.d) == [
        ["a:0"],
        ["geph__a_0:0", "geph__b_0:0"],
        ["geph__c_0:0"],
        ["geph__b_0:0"],
    ]
    # What nobody reads gets no placeholder.
    before = snapshot(g.graph)
    view, placeholders = ge.detach_outputs([g.f.op, g.w.op])
    assert (placeholders, names(view.outputs)) == ([], [])
    assert names(view.ops) == ["f", "w"]
    assert snapshot(g.graph) == before


@in_each_setting
def test_placeholders_pair_with_outputs_of_several_dtypes():
    # Old code paired them by the order of the readers: here the reverse order.
    x = tf.constant([1.0, 5.0, 3.0], name="x")
    values, indices = tf.nn.top_k(x, 2, name="top")
    reads_indices = tf.add(indices, 1, name="reads_indices")
    reads_values = tf.add(values, 1.0, name="reads_values")
    view, placeholders = ge.detach_outputs(values.op)
    assert [t.op.name for t in placeholders] == ["geph__top_0", "geph__top_1"]
    assert [t.dtype for t in placeholders] == [tf.float32, tf.int32]
    assert [t.shape.as_list() for t in placeholders] == [[2], [2]]
    assert names(view.outputs) == names([values, indices])
    assert reads_values.op.inputs[0] is placeholders[0]
    assert reads_indices.op.inputs[0] is placeholders[1]
    ge.verify(x.graph)


@in_each_setting
def test_remapped_outputs_follow_their_order():
    parts = tf.unstack(tf.constant([[1.0], [2.0]]), name="parts")
    left = tf.negative(parts[0], name="left")
    right = tf.negative(parts[1], name="right")
    with pytest.raises(KeyError), ge.transaction(left.graph):
        # Hidden outputs stay.
        ge.detach_outputs(ge.sgv(parts[0].op).remap_outputs([1]))
        assert inputs(left, right) == [["parts:0"], ["geph__parts_1:0"]]
        raise KeyError
    view = ge.sgv(parts[0].op).remap_outputs([1, 0, 1])
    detached, placeholders = ge.detach_outputs(view)
    assert names(placeholders) == ["geph__parts_1_1:0", "geph__parts_0:0"]
    assert names(detached.outputs) == ["parts:1", "parts:0"]
    assert inputs(left, right) == [["geph__parts_0:0"], ["geph__parts_1_1:0"]]
    # A passthrough tensor.
    view, (placeholder,), outs = ge.detach(ge.sgv(detached.outputs[0]))
    assert placeholder.op.name == "geph__parts_1_2"
    assert outs == []
    assert names(view.passthroughs) == ["geph__parts_1_2:0"]


# -- detach ----------------------------------------------------------------------------


# What c and w wait for after `detach` of a and c: c waited for b, w for a and b.
WAITING = """
{} => b | a b
{'control_inputs': True} => | a b
{'control_outputs': controls} => b | b
{'control_inputs': True, 'control_outputs': controls} => | b
{'control_ios': controls} => | b
"""


def test_detach_control_edges(setting):
    def check(call, expected):
        g = chains()
        ge.add_control_inputs(g.c.op, g.b.op)
        ge.add_control_inputs(g.w.op, g.b.op)
        ge.detach([g.a.op, g.c.op], **tables.evaluate(call, g))
        waiting = [" ".join(sorted(names(t.op.control_inputs))) for t in (g.c, g.w)]
        assert waiting == [part.strip() for part in expected.split("|")], waiting

    tables.check_edits(setting, WAITING, check)


# -- connect ---------------------------------------------------------------------------


def test_connect(setting):
    def body(first):
        g = chains()
        other = tf.abs(g.d, name="other")
        view0, view1 = ge.sgv(g.c.op), ge.sgv(g.f.op)
        result = ge.connect(view0, view1, disconnect_first=first)
        assert result[0] is view0
        assert result[1] is view1
        # Other readers are left alone.
        reads = ["geph__c_0:0"] if first else ["c:0"]
        assert inputs(g.f, g.e, g.c, other) == [["c:0"], reads, ["a:0"], ["d:0"]]
        assert names(view1.inputs) == ["c:0"]
        assert names(view0.inputs) == ["a:0"]
        ge.verify(g.graph)
        return [g.f] if first else [g.f, g.e]

    f, e = setting.run(lambda: body(False))
    np.testing.assert_allclose(f, np.tanh(-A), rtol=1e-6)
    np.testing.assert_allclose(e, np.exp(-A), rtol=1e-6)
    np.testing.assert_array_equal(setting.run(lambda: body(True)), [f])


@in_each_setting
def test_connect_several():
    g = chains()
    view = ge.sgv(g.both.op)
    ge.connect([g.w.op, g.d.op], view)
    assert inputs(g.both) == [["w:0", "d:0"]]
    ge.connect(ge.sgv(g.w.op, g.d.op).remap_outputs([1, 1]), view)
    assert inputs(g.both) == [["d:0", "d:0"]]


def test_connect_undoes_detach(setting):
    def body():
        g = chains()
        before = inputs(g.c, g.d, g.e, g.f, g.both)
        view = ge.sgv([g.c.op, g.d.op])
        returned, ins, outs = ge.detach(view)
        assert returned is view
        assert names(ins) == ["geph__a_0:0", "geph__b_0:0"]
        assert names(outs) == ["geph__c_0:0", "geph__d_0:0"]
        assert names(view.inputs) == names(ins)
        assert names(view.outputs) == ["c:0", "d:0"]
        ge.connect([g.a, g.b], view)
        ge.connect(view, ge.sgv(outs))
        assert inputs(g.c, g.d, g.e, g.f, g.both) == before
        return [g.e, g.f]

    e, f = setting.run(body)
    np.testing.assert_allclose(e, np.exp(-A), rtol=1e-6)
    np.testing.assert_allclose(f, np.tanh(B**2), rtol=1e-6)


# -- bypass ----------------------------------------------------------------------------


def test_bypass(setting):
    def body():
        g = chains()
        inner = tf.abs(g.c, name="inner")
        view = ge.sgv([g.c.op, inner.op]).remap_outputs([0])
        result = ge.bypass(view)
        assert type(result) is tuple
        returned, placeholders = result
        assert returned is view
        assert names(placeholders) == ["geph__a_0:0"]
        assert names(view.inputs) == ["geph__a_0:0"]
        # c was read inside, by inner, and outside, by e.
        assert inputs(g.e, inner, g.c) == [["a:0"], ["c:0"], ["geph__a_0:0"]]
        ge.verify(g.graph)
        return [g.e]

    def several():
        g = chains()
        view = ge.sgv([g.c.op, g.d.op]).remap_inputs([1, 0])
        ge.bypass(view)
        assert inputs(g.e, g.f) == [["b:0"], ["a:0"]]
        assert inputs(g.c, g.d) == [["geph__a_0:0"], ["geph__b_0:0"]]
        assert names(view.inputs) == ["geph__b_0:0", "geph__a_0:0"]
        return [g.e, g.f]

    np.testing.assert_allclose(setting.run(body)[0], np.exp(A), rtol=1e-6)
    e, f = setting.run(several)
    np.testing.assert_allclose(e, np.exp(B), rtol=1e-6)
    np.testing.assert_allclose(f, np.tanh(A), rtol=1e-6)


# -- refusals --------------------------------------------------------------------------

SINGLE = {
    "detach_control_inputs": ge.detach_control_inputs,
    "detach_control_outputs": lambda v: ge.detach_control_outputs(
        v, ge.ControlOutputs(tf.compat.v1.get_default_graph())
    ),
    "detach_inputs": ge.detach_inputs,
    "detach_outputs": ge.detach_outputs,
    "detach": ge.detach,
    "bypass": ge.bypass,
}
NO_VIEW = """
edit('c') => SelectionError: 'c'; graph=
edit(1) => ArgumentTypeError: int
edit(None) => ArgumentTypeError: NoneType
edit([c.op, 1.0]) => ArgumentTypeError: float
edit([c.op, other.c.op]) => SelectionError: 'c'; geutil.copy
edit([c.op, other.c]) => SelectionError: geutil.copy
"""
EMPTY = """
edit([]) => RerouteError: empty; select
edit(ge.SubGraphView()) => RerouteError: empty; select
"""
WRONG_CONTROLS = """
ge.detach_control_outputs(a.op, None)
    => ArgumentTypeError: NoneType; geutil.ControlOutputs(graph)
ge.detach_control_outputs(a.op, graph)
    => ArgumentTypeError: geutil.ControlOutputs(graph)
ge.detach_outputs(a.op, True) => ArgumentTypeError: bool; geutil.ControlOutputs(graph)
ge.detach_outputs(a.op, control_outputs=graph)
    => ArgumentTypeError: geutil.ControlOutputs(graph)
ge.detach(c.op, control_ios=True)
    => ArgumentTypeError: control_ios; geutil.ControlOutputs(graph)
ge.detach(c.op, control_outputs=True) => ArgumentTypeError: control_outputs
ge.detach(c.op, control_outputs=controls, control_ios=controls)
    => SelectionError: not both
"""
# `disconnect_first` or not.
CONNECT = """
connect(c.op, other.f.op) => SelectionError: geutil.copy
connect(other.c.op, f.op) => SelectionError: geutil.copy
connect(c.op, both.op) => RerouteError: c:0; a:0, b:0
connect([c.op, d.op], f.op) => RerouteError: c:0, d:0
connect(c.op, whole.op) => RerouteError: 'c:0'; dtypes differ; tf.cast
connect(wide.op, f.op) => RerouteError: shapes differ
connect(c.op, 1) => ArgumentTypeError: int
connect('c', f.op) => SelectionError: graph=
connect(c.op, c.op) => CycleError: c -> c
connect(e.op, c.op) => CycleError: c -> e -> c
connect(g.op, e.op) => CycleError: e -> g -> e
"""
BYPASS = """
ge.bypass(kept(ge.sgv(both.op))) => RerouteError: a:0, b:0; both:0; remap
ge.bypass(kept(ge.sgv(w.op))) => RerouteError: w:0; remap
ge.bypass(kept(ge.sgv(cast.op)))
    => RerouteError: 'b:0'; 'cast:0'; dtypes differ; tf.cast
ge.bypass(kept(ge.sgv(sum.op).remap_inputs([0])))
    => RerouteError: 'sum:0'; shapes differ
"""


@in_each_setting
def test_refusals():
    other = foreign(chains)
    g = chains()
    for name, edit in SINGLE.items():
        tables.check_refusals(NO_VIEW, g, edit=edit, other=other)
        if "control" not in name:
            tables.check_refusals(EMPTY, g, edit=edit)
    tables.check_refusals(WRONG_CONTROLS, g)


@in_each_setting
def test_connect_refuses():
    other = foreign(chains)
    g = chains()
    g.g = tf.abs(g.e, name="g")
    tf.negative(g.g, name="h")
    tf.negative(g.wide, name="wide_tail")
    for first in (False, True):

        def connect(view0, view1, first=first):
            ge.connect(view0, view1, first)

        tables.check_refusals(CONNECT, g, connect=connect, other=other)


@in_each_setting
def test_bypass_refuses():
    g = chains()
    g.cast = tf.cast(g.b, tf.int32, name="cast")
    g.sum = tf.reduce_sum(g.b, name="sum")
    tf.identity(g.cast), tf.identity(g.sum)
    views = []

    def kept(view):
        views.append((view, names(view.inputs)))
        return view

    tables.check_refusals(BYPASS, g, kept=kept)
    assert len(views) == 4
    assert all(names(view.inputs) == before for view, before in views)
    # c makes what e reads, e what tail reads. Crossed: e would read itself.
    tail = tf.abs(g.e, name="tail")
    tf.negative(tail, name="end")
    view = ge.sgv([g.c.op, tail.op]).remap_inputs([1, 0])
    error = check_refused(g.graph, lambda: ge.bypass(view), ge.CycleError, ["e"])
    assert error.cycle == ("e", "e")
    assert names(view.inputs) == ["e:0", "a:0"]


# -- version 1 while loops -------------------------------------------------------------


def loop():
    """Make a loop that counts to 5, and what reads it."""
    start = tf.constant(0, name="start")
    result = tf.compat.v1.while_loop(lambda i: i < 5, lambda i: i + 1, [start])
    return tf.negative(result, name="result")


IN_A_LOOP = """
edit(ge.sgv(add)) => RerouteError: while/; while_context; detach the loop as a whole
edit(ge.sgv(next_iteration))
    => RerouteError: while/; while_context; detach the loop as a whole
edit(ge.sgv(switch)) => RerouteError: while/; while_context; detach the loop as a whole
"""


def test_an_op_in_a_loop_is_not_detached(graph, control_flow_v1):
    loop()
    ops = {
        "add": graph.get_operation_by_name("while/add"),
        "next_iteration": graph.get_operation_by_name("while/NextIteration"),
        "switch": graph.get_operation_by_name("while/Switch"),
    }
    g = SimpleNamespace(graph=graph, **ops)
    bypass = lambda view: ge.bypass(view.remap([0], [0]))  # noqa: E731
    for edit in (ge.detach_inputs, ge.detach_outputs, ge.detach, bypass):
        tables.check_refusals(IN_A_LOOP, g, edit=edit)


def test_a_loop_is_detached_as_a_whole(graph, control_flow_v1):
    result = loop()
    view = ge.sgv_scope("while", graph)
    exit_of_loop = result.op.inputs[0]
    _, (start,), (end,) = ge.detach(view)
    assert names(result.op.inputs) == [end.name]
    ge.verify(graph)
    assert evaluate(graph, [exit_of_loop], {start: 2}) == [5]
    assert evaluate(graph, [exit_of_loop], {start: 9}) == [9]
    assert evaluate(graph, [result], {end: 3}) == [-3]
