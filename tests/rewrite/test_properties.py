"""Property tests on random graphs, against TensorFlow and against brute force."""

import itertools
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil.rewrite import Any, Op, Rule, match, rewrite
from geutil.rewrite import rules as known
from tests.random_graphs import drawn_graphs
from tests.settings import edges, evaluate
from tests.thorough import examples

EXAMPLES = examples(40, derandomize=True)


def rules():
    """Rules that leave every value as it is: sums of halves are exact."""
    two = Op("AddN", Any("a"), Any("b"))
    three = Op("AddN", Any("a"), Any("b"), Any("c"))
    twice = Op("AddV2", Any("a"), Any("a"))
    lone = Op("AddV2", Op("AddV2", Any("a"), Any("b"), only_consumer=True), Any("c"))
    return {
        "identity": known.identity_elimination(),
        "folding": known.constant_folding(max_ops=3),
        "two": Rule(two, lambda m: m["a"] + m["b"], name="two"),
        "three": Rule(
            three, lambda m: tf.add_n([m["b"] + m["c"], m["a"]]), name="three"
        ),
        "twice": Rule(twice, lambda m: 2.0 * m["a"], name="twice"),
        "lone": Rule(lone, lambda m: tf.add_n([m["a"], m["b"], m["c"]]), name="lone"),
    }


# "lone" and the first two undo each other.
GROUPS = [
    ["identity"],
    ["folding", "identity"],
    ["two", "three", "twice", "identity"],
    ["identity", "twice", "three", "two", "folding"],
    ["lone", "identity", "twice"],
]


@given(drawn_graphs(), st.sampled_from(GROUPS), st.data())
@EXAMPLES
def test_outputs_stay_and_a_second_call_does_nothing(drawn, group, data):
    with tf.Graph().as_default() as graph:
        tensors = drawn.build()
        for t in tensors:
            if data.draw(st.booleans()):
                passed = tf.identity(t)
                ge.reroute_ts(passed, t, cannot_modify=[passed.op])
        results = [tf.identity(t) for t in tensors]
    expected = evaluate(graph, results)
    chosen = [rules()[name] for name in group]
    report = rewrite(graph, chosen, debug=True, keep=results)
    ge.verify(graph)
    for value, wanted in zip(evaluate(graph, results), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    for old, new in report.replaced.items():
        values = evaluate(graph, [old, new])
        np.testing.assert_array_equal(*values)
    before = edges(graph)
    again = rewrite(graph, chosen, keep=results)
    assert not again.rewritten
    assert edges(graph) == before


@dataclass(frozen=True)
class Node:
    """An op of a pattern: what it reads, as nodes or None for anything."""

    kind: str
    inputs: tuple

    def nodes(self):
        return [self, *(n for i in self.inputs if i for n in i.nodes())]


KINDS = {"Neg": 1, "AddV2": 2, "Mul": 2}


@st.composite
def graphs(draw):
    """Draw ops (type, the ops they read); op 0 is a constant."""
    ops = [("Const", ())]
    for i in range(1, draw(st.integers(3, 8))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        earlier = st.integers(max(0, i - 4), i - 1)
        ops.append((kind, tuple(draw(earlier) for _ in range(KINDS[kind]))))
    return ops


@st.composite
def patterns(draw, depth=2):
    kind = draw(st.sampled_from(sorted(KINDS)))
    inputs = [
        draw(patterns(depth - 1)) if depth and draw(st.booleans()) else None
        for _ in range(KINDS[kind])
    ]
    return Node(kind, tuple(inputs))


def build(ops):
    tensors = []
    make = {"Neg": tf.negative, "AddV2": tf.add, "Mul": tf.multiply}
    for i, (kind, reads) in enumerate(ops):
        inputs = [tensors[r] for r in reads]
        t = make[kind](*inputs, name=f"op{i}") if reads else tf.constant(2.0)
        tensors.append(t)
    return tensors


def as_pattern(node, commutative):
    inputs = [as_pattern(i, commutative) if i else Any() for i in node.inputs]
    both_ways = commutative and len(inputs) > 1
    return Op(node.kind, *inputs, commutative=both_ways)


def brute_force(ops, root, commutative):
    """Try every assignment of ops to the nodes; return the roots that fit."""
    nodes = root.nodes()
    place = {id(node): k for k, node in enumerate(nodes)}
    of_kind = [[i for i, (kind, _) in enumerate(ops) if kind == n.kind] for n in nodes]

    def fits(node, assigned):
        reads = ops[assigned[place[id(node)]]][1]
        orders = itertools.permutations(reads) if commutative else [reads]
        return any(
            all(
                wanted is None or assigned[place[id(wanted)]] == read
                for wanted, read in zip(node.inputs, order, strict=True)
            )
            for order in orders
        )

    return sorted(
        {
            assigned[0]
            for assigned in itertools.product(*of_kind)
            if all(fits(node, assigned) for node in nodes)
        }
    )


@given(graphs(), patterns(), st.booleans())
@examples(150, derandomize=True)
def test_matches_are_those_that_brute_force_finds(ops, node, commutative):
    with tf.Graph().as_default() as graph:
        tensors = build(ops)
    index = {t.op: i for i, t in enumerate(tensors)}
    pattern = as_pattern(node, commutative)
    everything = match(graph, pattern, overlaps=True)
    assert [index[m.root] for m in everything] == brute_force(ops, node, commutative)
    for found in everything:
        assert found.ops[0] is found.root
        assert len(set(found.ops)) == len(found.ops)
    # Without overlaps: downstream first, whatever shares no op with those before.
    taken, expected = set(), []
    for found in reversed(everything):
        if taken.isdisjoint(found.ops):
            taken.update(found.ops)
            expected.append(found.root)
    assert [m.root for m in match(graph, pattern)] == expected[::-1]
