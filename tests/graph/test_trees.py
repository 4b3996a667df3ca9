import collections
from typing import NamedTuple

import pytest
import tensorflow as tf

from geutil.graph.types import flatten, is_leaf, map_leaves
from tests import settings


class Pair(NamedTuple):
    first: object
    second: object


def ten_times(leaf):
    return 10 * leaf


MAPPED = [
    (1, 10),
    ([1, 2], [10, 20]),
    ((1, (2,)), (10, (20,))),
    ({"b": 1, "a": [2]}, {"b": 10, "a": [20]}),
    (Pair(1, Pair(2, 3)), Pair(10, Pair(20, 30))),
    (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=10, a=20)),
    (collections.defaultdict(list, a=1), collections.defaultdict(list, a=10)),
    ([], []),
    ((), ()),
    ({}, {}),
    ({1: 2}.values(), (20,)),
]


@pytest.mark.parametrize(
    ("tree", "expected"), MAPPED, ids=[type(t).__name__ + str(t) for t, _ in MAPPED]
)
def test_map_keeps_the_structure(tree, expected):
    result = map_leaves(tree, ten_times)
    assert result == expected
    assert type(result) is type(expected)
    if isinstance(expected, dict):
        assert list(result) == list(expected)


@pytest.mark.parametrize(
    ("tree", "leaves"),
    [
        (1, [1]),
        ("text", ["text"]),
        (b"bytes", [b"bytes"]),
        (None, [None]),
        ([], []),
        ({"b": 1, "a": [2, (3, {"c": 4})], "d": []}, [1, 2, 3, 4]),
        (Pair([1], 2), [1, 2]),
        (iter(range(3)), [0, 1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_flatten(tree, leaves):
    assert flatten(tree) == leaves


def test_flatten_does_not_recurse():
    tree = []
    for _ in range(100_000):
        tree = [tree]
    assert flatten([tree, 1]) == [1]


def test_tensors_and_ops_are_leaves(setting):
    def body():
        graph = settings.default_graph()
        t = tf.constant([1.0, 2.0], name="t")
        count = len(graph.get_operations())
        leaves = flatten({"t": t, "op": [t.op]})
        assert leaves[0] is t
        assert leaves[1] is t.op
        seen = []
        map_leaves([t, (t.op,)], seen.append)
        assert [leaf.name for leaf in seen] == [t.name, t.op.name]
        assert len(graph.get_operations()) == count

    setting.run(body)


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0]], ids=["scalar", "vector"])
def test_an_eager_tensor_is_a_leaf(value):
    with tf.init_scope():
        t = tf.constant(value)
    assert is_leaf(t)
    leaves = flatten([t])
    assert len(leaves) == 1
    assert leaves[0] is t
