import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil import model, report
from geutil.errors import ArgumentTypeError
from tests.random_graphs import drawn_graphs
from tests.report import samples
from tests.thorough import examples

# As the viewer numbers them.
SAME, ADDED, REMOVED, REWIRED, ALTERED = range(5)


def edges(graph):
    """Return the type of each op, and what it reads and waits for."""
    return {
        op.name: (
            op.type,
            [t.name for t in op.inputs],
            sorted(c.name for c in op.control_inputs),
        )
        for op in graph.get_operations()
    }


def check(before, after):
    """Compare with a recomputation from plain dictionaries."""
    ours, theirs = edges(before), edges(after)
    found = report.difference(before, after)
    assert {name for name, _ in found.added} == set(theirs) - set(ours)
    assert {name for name, _ in found.removed} == set(ours) - set(theirs)
    both = set(ours) & set(theirs)
    changed = {name for name in both if ours[name] != theirs[name]}
    assert {entry.op for entry in found.rewired} == changed
    assert found.common == len(both) - len(changed)
    assert found.is_empty == (ours == theirs)
    for entry in found.rewired:
        assert entry.before != entry.after or ours[entry.op][0] != entry.op_type
    return found


@examples(40)
@given(drawn=drawn_graphs(), data=st.data())
def test_rewired_ops_are_those_whose_edges_differ(drawn, data):
    with tf.Graph().as_default() as before:
        drawn.build()
    with tf.Graph().as_default() as after:
        tensors = drawn.build()
        sources = st.sampled_from(range(len(tensors)))
        old, new = data.draw(sources), data.draw(sources)
        waits = ge.ControlOutputs(after)
        downstream = ge.get_forward_walk_ops(tensors[old].op, control_outputs=waits)
        if tensors[new].op not in downstream:
            ge.reroute_ts(tensors[new], tensors[old])
        if data.draw(st.booleans()):
            tf.tanh(tensors[new], name="more")
    check(before, after)
    check(after, before)


@examples(40)
@given(one=drawn_graphs(), other=drawn_graphs())
def test_statuses_are_the_difference_op_by_op(one, other):
    graphs = tf.Graph(), tf.Graph()
    for drawn, graph in zip((one, other), graphs, strict=True):
        with graph.as_default():
            drawn.build()
    found = check(*graphs)
    before, after = (graph.get_operations() for graph in graphs)
    sides = report.diff(*graphs).payload["graphs"]
    ours, theirs = (side["status"] for side in sides)

    def of(ops, numbers, status):
        return {op.name for op, n in zip(ops, numbers, strict=True) if n == status}

    assert of(before, ours, REMOVED) == {name for name, _ in found.removed}
    assert of(after, theirs, ADDED) == {name for name, _ in found.added}
    rewired = {entry.op for entry in found.rewired}
    assert of(before, ours, REWIRED) == of(after, theirs, REWIRED) == rewired
    assert len(of(before, ours, SAME)) == len(of(after, theirs, SAME)) == found.common


def test_an_op_of_another_type_is_rewired():
    def graph(make):
        with tf.Graph().as_default() as made:
            make(tf.ones([2], name="x"), name="op")
        return made

    found = check(graph(tf.tanh), graph(tf.exp))
    assert [(entry.op, entry.op_type) for entry in found.rewired] == [("op", "Exp")]


def test_a_control_edge_is_a_difference():
    def graph(waits):
        with tf.Graph().as_default() as made:
            x = tf.ones([2], name="x")
            with tf.control_dependencies([x.op] if waits else []):
                tf.no_op(name="last")
        return made

    found = check(graph(False), graph(True))
    assert found.rewired[0].before == ()
    assert found.rewired[0].after == ("^x",)


def test_the_text_names_the_first_of_many():
    with tf.Graph().as_default() as graph:
        for i in range(25):
            tf.no_op(name=f"op{i}")
    text = str(report.difference(tf.Graph(), graph))
    assert text.startswith("0 op(s) the same, 25 added, 0 removed, 0 rewired\n")
    assert "+ op19 (NoOp)" in text
    assert "op20" not in text
    assert "and 5 more" in text


def test_a_page_carries_the_statuses_of_what_is_saved(folded, tmp_path):
    """Those of the models, without what the fold left behind in the graph."""
    files = []
    for name, side in (("before", folded.before), ("after", folded.after)):
        side.save(tmp_path / name)
        files.append(model.open(tmp_path / name).graph)
    found = report.difference(*files)
    assert not found.altered
    graphs = report.diff(folded.before, folded.after).payload["graphs"]
    assert graphs[1]["status"].count(ADDED) == len(found.added) > 0
    assert graphs[0]["status"].count(REMOVED) == len(found.removed)
    assert graphs[1]["status"].count(REWIRED) == len(found.rewired) > 0
    assert graphs[0]["status"].count(REWIRED) == len(found.rewired)


def test_the_same_graph_twice_has_no_difference(flow):
    graph = samples.nested()
    assert report.difference(graph, graph).is_empty
    for data in report.diff(graph, graph).payload["graphs"]:
        assert set(data["status"]) == {SAME}
    # Functions have other numbers at the end of their names.
    graphs = report.diff(flow, samples.flow()).payload["graphs"]
    assert len(graphs) == 2 * (1 + len(flow.functions))
    for before, after in zip(graphs[::2], graphs[1::2], strict=True):
        assert before["names"] == after["names"]
        assert set(before["status"]) == set(after["status"]) == {SAME}
    assert report.difference(strided(1, 2.0), strided(1, 2.0)).is_empty


def test_bodies_of_functions_are_compared(flow, tmp_path):
    """The file opened twice is the same; an op replaced in a loop's body is not."""
    flow.save(tmp_path / "flow")
    first, second = (model.open(tmp_path / "flow", inline=False) for _ in range(2))
    assert report.difference(first, second).is_empty
    samples.squash(second)
    found = report.difference(first, second)
    (body,) = (name for name in second.functions if "body" in name)
    assert found.added == ((f"{body}/squashed", "Tanh"),)
    assert [entry.op.startswith(f"{body}/") for entry in found.rewired] == [True]


def test_what_is_no_graph_is_refused():
    with pytest.raises(ArgumentTypeError, match="Model"):
        report.difference(samples.nested(), "net")


def strided(strides, value):
    """Return a convolution with some strides, and a constant."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1, 8, 8, 1], "x")
        kernel = tf.constant(value, shape=[3, 3, 1, 1], name="kernel")
        tf.nn.conv2d(x, kernel, strides, "SAME", name="conv")
        tf.Variable(1.0, name="v")
    return graph


def test_other_attributes_and_constants_are_told():
    found = report.difference(strided(1, 2.0), strided(2, 3.0))
    assert [(a.op, a.attributes) for a in found.altered] == [
        ("kernel", ("value",)),
        ("conv", ("strides",)),
    ]
    assert not found.is_empty
    assert not (found.added or found.removed or found.rewired)
    assert str(found).splitlines()[1:] == [
        "! kernel (Const): value",
        "! conv (Conv2D): strides",
    ]
    ours, theirs = strided(1, 2.0), strided(2, 3.0)
    for graph in report.diff(ours, theirs).payload["graphs"]:
        assert graph["status"].count(ALTERED) == 2
