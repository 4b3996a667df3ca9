"""Looks at files, against lists that are written out and walks by networkx."""

import networkx as nx
import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from tests.tflite.declared import chain, counter, diamond
from tests.tflite_files import SAMPLES, attention


def test_tensors_are_found_by_name():
    m = chain("NEG", "EXP")
    t = m.graphs[0].tensors[1]
    assert m.tensor("t0") is m.tensor(t) is t
    # By the names of signatures, too, where no tensor has the name.
    assert m.tensor("image").name == "x"
    assert m.tensor("scores").name == "t1"
    with pytest.raises(TFLiteError, match="no tensor 'T'; near it are 't0', 't1'"):
        m.tensor("T")
    with pytest.raises(TFLiteError, match=r"find_tensors\(regex=...\) looks for names"):
        m.tensor("zzzzzz")
    with pytest.raises(TFLiteError, match=r"'t0' float32 \[2, 4\]> is no tensor of"):
        chain("NEG").tensor(t)
    m.tensor("t1").name = "t0"
    with pytest.raises(TFLiteError, match=r"'t0' is the name of 2 tensors"):
        m.tensor("t0")


def test_ops_are_found_by_name_and_place():
    m = diamond()
    assert m.op("left").kind == "FULLY_CONNECTED"
    assert m.op(0) is m.op("stem") is m.op(m.graphs[0].ops[0])
    with pytest.raises(TFLiteError, match=r"no op makes .*'w'"):
        m.op("w")
    with pytest.raises(TFLiteError, match="there is no op 5"):
        m.op(5)
    with pytest.raises(TFLiteError, match="is no op of"):
        m.op(diamond().op("left"))


def test_filters():
    m = diamond()
    assert m.find() == m.graphs[0].ops
    assert m.find("ADD") == m.graphs[0].ops[-1:]
    assert [op.kind for op in m.find(["ABS", "ADD"])] == ["ABS", "ADD"]
    assert m.find(name="left") == (m.op("left"),)
    assert m.find("FULLY_CONNECTED", regex="^r") == (m.op("right"),)
    reading = m.find(where=lambda op: m.tensor("stem") in op.inputs)
    assert reading == (m.op("left"), m.op("right"))
    assert m.find("CONV_2D") == ()
    assert [t.name for t in m.find_tensors(dtype="float16")] == ["half"]
    assert [t.name for t in m.find_tensors(regex="^w")] == ["w", "whole"]
    constants = m.find_tensors(where=lambda t: t.value is not None)
    assert [t.name for t in constants] == ["w", "half"]
    with pytest.raises(TFLiteError, match=r"'.' is no regular expression"):
        m.find(regex="(")


def test_filters_look_into_all_subgraphs_or_one():
    m = counter()
    assert len(m.find("ASSIGN_VARIABLE")) == 2
    (op,) = m.find("ASSIGN_VARIABLE", graph="setup")
    assert op.graph is m.graphs[1]
    assert m.find("ASSIGN_VARIABLE", graph=1) == (op,)


def test_walks_and_boundary_are_those_of_the_graph():
    m = tflite.open(attention().blob)
    main = m.graphs[0]
    edges = nx.DiGraph()
    edges.add_nodes_from(main.ops)
    edges.add_edges_from(
        (op, reader) for op in main.ops for t in op.outputs for reader in t.consumers
    )
    for op in main.ops[::3]:
        (t,) = op.outputs
        assert {*m.ancestors(t)} == nx.ancestors(edges, op) | {op}
        assert {*m.descendants(t)} == nx.descendants(edges, op)
    some = [op for i, op in enumerate(main.ops) if i % 4]
    taken, given = m.boundary(some)
    inside = {*some}
    into = {t for op in main.ops for t in op.outputs if op not in inside}
    assert {*taken} - {*main.inputs} == {
        t for op in some for t in op.inputs if t in into
    }
    assert {*given} == {
        t
        for op in some
        for t in op.outputs
        if t in main.outputs or {*t.consumers} - inside
    }


def test_walks_stop_where_they_are_told():
    m = diamond()
    assert [
        op.outputs[0].name for op in m.ancestors("sum", stop_at=["stem", "left"])
    ] == [
        "whole",
        "right",
        "sum",
    ]
    assert m.descendants("x", stop_at=["left", "right"]) == (
        m.op("stem"),
        m.op("left"),
        m.op("right"),
    )
    assert m.ancestors("x") == m.descendants("sum") == ()


def test_the_longest_chain_is_walked():
    m = chain(*["NEG"] * 3000)
    assert len(m.ancestors("t2999")) == len(m.descendants("x")) == 3000


@pytest.mark.parametrize("name", ["flow", "lstm"])
def test_a_subgraph_is_an_argument(name):
    m = tflite.open(SAMPLES[name]().blob)
    for graph in m.graphs[1:]:
        last = [t for t in graph.outputs if t.makers]
        assert {*m.ancestors(last, graph=graph)} <= {*graph.ops}
    with pytest.raises(TFLiteError, match="is no tensor of"):
        m.ancestors(m.graphs[1].tensors[0])
