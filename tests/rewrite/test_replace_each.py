import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import SelectionError, TransformError
from geutil.graph.edits import Liveness
from geutil.rewrite import Op, Rule, rewrite
from geutil.rewrite.driver import replace_each
from tests.graph.building import snapshot
from tests.settings import edges, evaluate, names

X = np.array([0.25, -1.5], np.float32)


def sine(op):
    return tf.sin(op.inputs[0])


def nested():
    """A chain whose ops wait for others, in scopes and on a device."""
    x, first = tf.constant(X, name="x"), tf.no_op("first")
    with tf.name_scope("scope"), tf.device("/device:CPU:0"):
        with tf.control_dependencies([first]):
            a = tf.exp(x, name="a")
        b = tf.exp(a, name="b")
    tf.negative(b, name="y")
    with tf.control_dependencies([a, b]):
        tf.no_op("last")
    return [a.op, b.op], sine, []


def chained(build, keep=False):
    """Return what makes two ops in a row, which are replaced by what `build` makes."""

    def make():
        a = tf.exp(tf.constant(X), name="a")
        b = tf.exp(a, name="b")
        tf.negative(b, name="y")
        return [b.op, a.op], build, [a] * keep

    return make


CHAINED = {
    "kept": chained(sine, keep=True),
    "wrapped": chained(lambda op: tf.sin(op.outputs[0])),
    # An op that nobody reads any more once its reader is replaced.
    "passed over": chained(lambda op: tf.constant(X)),
    # A replacement by what is replaced in turn.
    "handed on": chained(lambda op: op.inputs[0] if op.name == "b" else sine(op)),
}


def declining():
    """An op that is refused until it reads something else, and one that stays so."""
    a = tf.exp(tf.constant(X), name="a")
    b = tf.exp(a, name="b")
    tf.negative(b, name="y")
    c = tf.exp(tf.constant(X), name="c")
    tf.negative(c, name="z")

    def build(op):
        new = sine(op)
        if op.name == "c" or op.inputs[0].op.type == "Exp":
            return f"'{op.name}' stays"
        return new

    return [c.op, b.op, a.op], build, []


def circular():
    a = tf.exp(tf.constant(X), name="a")
    b = tf.negative(a, name="b")
    b.op.graph.add_to_collection("b", b)
    tf.identity(b, name="y")

    return [a.op], lambda op: tf.sin(op.graph.get_collection("b")[0]), []


def parted():
    """Outputs of which one is replaced, and an op without outputs."""
    x = tf.constant(X, name="x")
    a, b = tf.split(x, 2, name="s")
    tf.add(a, b, name="y")
    old = tf.no_op("old")
    with tf.control_dependencies([old]):
        tf.no_op("last")

    def build(op):
        return tf.no_op("new") if op.name == "old" else [tf.zeros([1]), None]

    return [a.op, old], build, []


@pytest.mark.parametrize(
    "make", [nested, declining, circular, parted, *CHAINED.values()]
)
def test_it_does_what_a_rule_does_that_matches_the_ops(make):
    with tf.Graph().as_default() as graph:
        ops, build, keep = make()
        done = replace_each(graph, ops, build, name="r", keep=keep)
    ge.verify(graph)
    with tf.Graph().as_default() as other:
        ops, build, keep = make()
        wanted = frozenset(ops)
        rule = Rule(Op(lambda op: op in wanted), lambda m: build(m.root), name="r")
        report = rewrite(other, rule, keep=keep)
    assert snapshot(graph) == snapshot(other)
    refused = [(op.name, reason) for op, reason in done.refused.items()]
    assert refused == [(entry.op, entry.reason) for entry in report.refused]
    pairs = [(old.name, new.name) for old, new in done.replaced.items()]
    assert pairs == [(old.name, new.name) for old, new in report.replaced.items()]
    lives = [
        [op.name for op in g.get_operations() if not Liveness(g).is_retired(op)]
        for g in (graph, other)
    ]
    assert lives[0] == lives[1]


def test_consumers_go_first(graph):
    ops, build, _ = nested()
    seen = []
    replace_each(graph, ops, lambda op: seen.append(op) or build(op), name="r")
    assert names(seen) == ["scope/b", "scope/a"]
    y = graph.get_tensor_by_name("y:0")
    np.testing.assert_allclose(evaluate(graph, [y])[0], -np.sin(np.sin(X)), rtol=1e-6)


def test_ops_of_another_graph_are_refused(graph):
    ops, build, _ = nested()
    before = snapshot(graph)
    with tf.Graph().as_default():
        stranger = tf.no_op("stranger")
    with pytest.raises(SelectionError, match="'stranger' belongs to another graph"):
        replace_each(graph, [*ops, stranger], build, name="r")
    assert snapshot(graph) == before


def test_an_error_undoes_everything(graph):
    ops, build, _ = nested()
    before = edges(graph)
    words = r"rule 'r' at 'scope/a' returned 0 tensor\(s\) for 1 output"
    with pytest.raises(TransformError, match=words):
        replace_each(graph, ops, lambda op: build(op) if op is ops[1] else [], name="r")
    after = edges(graph)
    assert {name: after[name] for name in before} == before
    liveness = Liveness(graph)
    made = [op for op in graph.get_operations() if op.name not in before]
    assert made
    assert all(liveness.is_retired(op) for op in made)
