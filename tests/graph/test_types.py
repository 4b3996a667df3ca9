"""Scopes, names, shapes, trees, and maps and sets by identity."""

import collections
import itertools
from typing import NamedTuple

import pytest
import tensorflow as tf

from geutil.graph.types import (
    IdentityMap,
    IdentitySet,
    MutableIdentityMap,
    absolute_unique_name,
    absolute_unique_names,
    collections_of_elements,
    dereference,
    flatten,
    index_by_identity,
    is_in_scope,
    is_leaf,
    known_collection_names,
    map_leaves,
    refine_shapes,
    same_static_shape,
    scope_basename,
    scope_dirname,
    scope_finalize,
    unique,
)
from tests import settings
from tests.settings import in_each_setting

FINALIZED = {"": "", "a": "a/", "a/": "a/", "a/b": "a/b/", "a/b/": "a/b/"}
IN_SCOPE = {
    **dict.fromkeys([("a", None), ("a", ""), ("a", "a"), ("a", "a/")], True),
    **dict.fromkeys([("a/b", "a"), ("a/b/c", "a/b/")], True),
    **dict.fromkeys([("ab", "a"), ("a", "a/b"), ("b/a", "a")], False),
}
PARTED = {
    "": ("", ""),
    "x": ("", "x"),
    "a/x": ("a/", "x"),
    "a/b/x": ("a/b/", "x"),
    "a/b/": ("a/b/", ""),
    "a/x:0": ("a/", "x:0"),
}


def test_scopes():
    assert {scope: scope_finalize(scope) for scope in FINALIZED} == FINALIZED
    assert {case: is_in_scope(*case) for case in IN_SCOPE} == IN_SCOPE
    parted = {name: (scope_dirname(name), scope_basename(name)) for name in PARTED}
    assert parted == PARTED


def test_unique_names_are_reserved():
    with tf.Graph().as_default() as graph, tf.name_scope("outer"):
        names = absolute_unique_names(graph, ["x", "a/y", "x", "x"])
        assert names == ["x", "a/y", "x_1", "x_2"]
        more = [absolute_unique_name(graph, "a/y") for _ in range(2)]
        assert more == ["a/y_1", "a/y_2"]
        tf.constant(1.0, name="z")
        # It steps aside for ops that exist.
        assert absolute_unique_name(graph, "outer/z") == "outer/z_1"
        # The scope is put back, after a refusal too.
        with pytest.raises(AttributeError):
            absolute_unique_name(graph, None)
        assert tf.constant(1.0, name="x").op.name == "outer/x"


SHAPES = {
    "unknown": None,
    "scalar": [],
    "vector": [3],
    "partly": [None, 3],
    "empty": [0, 2],
}


def placeholders(*shapes):
    with tf.Graph().as_default():
        return [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]


def test_same_static_shape():
    for first, second in itertools.product(SHAPES, repeat=2):
        a, b = placeholders(SHAPES[first], SHAPES[second])
        assert same_static_shape(a, b) is (first == second), (first, second)


def test_refine_shapes():
    for target, source, dims in (
        (None, [2, 3], [2, 3]),
        ([None, 3], [2, None], [2, 3]),
        ([2, 3], None, [2, 3]),
        ([2], [2], [2]),
    ):
        a, b = placeholders(target, source)
        assert a.shape.rank == (None if target is None else len(target))
        refine_shapes([(b.op, a.op)])
        assert a.shape.as_list() == dims


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


@in_each_setting
def test_tensors_and_ops_are_leaves():
    graph = settings.default_graph()
    t = tf.constant([1.0, 2.0], name="t")
    with tf.init_scope():
        eager = [tf.constant(value) for value in (1.0, [1.0, 2.0])]
    assert all(map(is_leaf, eager))
    assert [id(leaf) for leaf in flatten(eager)] == list(map(id, eager))
    count = len(graph.get_operations())
    leaves = flatten({"t": t, "op": [t.op]})
    assert leaves[0] is t
    assert leaves[1] is t.op
    seen = []
    map_leaves([t, (t.op,)], seen.append)
    assert [leaf.name for leaf in seen] == [t.name, t.op.name]
    assert len(graph.get_operations()) == count


class Alike:
    """Objects that are all equal and all hash alike: only identity tells them apart."""

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


class Unhashable:
    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("compared by ==")


def test_map_never_compares_or_hashes_its_keys():
    a, b = Unhashable(), Unhashable()
    numbers = MutableIdentityMap([(a, 1)])
    numbers[b] = 2
    assert a in numbers
    assert Unhashable() not in numbers
    assert numbers.get(b) == 2
    assert [key is k for key, k in zip(numbers, (a, b), strict=True)] == [True] * 2


def test_equal_elements_are_told_apart():
    a, b, c = Alike(), Alike(), Alike()
    found = IdentitySet([a, b, a])
    found.add(b)
    assert [id(e) for e in found] == [id(a), id(b)]
    assert c not in found
    # Each first one stays.
    assert [id(e) for e in unique([c, a, c, b, a])] == [id(c), id(a), id(b)]
    assert index_by_identity([b, a, b]) == {id(b): 0, id(a): 1}


def test_map_tells_equal_keys_apart_and_overwrites_in_place():
    a, b = Alike(), Alike()
    numbers = MutableIdentityMap([(a, 1), (b, 2)])
    assert (numbers[a], numbers[b], len(numbers)) == (1, 2, 2)
    assert Alike() not in numbers
    numbers[a] = 3
    assert list(numbers.values()) == [3, 2]
    assert next(iter(numbers)) is a
    numbers.update(pair for pair in [(b, 5), (Alike(), 4)])
    assert list(numbers.values()) == [3, 5, 4]


def test_missing_key_is_named():
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
    with pytest.raises(KeyError, match="x:0"):
        IdentityMap()[x]


@in_each_setting
def test_map_of_tensors_adds_no_ops():
    graph = settings.default_graph()
    x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
    count = len(graph.get_operations())
    found = MutableIdentityMap([(x, "x")])
    found[y.ref()] = "y"
    assert (found[x], found[x.ref()], found[y]) == ("x", "x", "y")
    assert dereference(x.ref()) is dereference(x) is x
    assert dereference("key") == "key"
    assert x in found
    assert found == IdentityMap([(x, "x"), (y, "y")])
    assert found != IdentityMap([(x, "x"), (y, "x")])
    elements = IdentitySet([x.ref()])
    elements.add(y.ref())
    assert x in elements
    assert y in elements
    assert y.ref() in elements
    assert [e.name for e in elements] == [x.name, y.name]
    assert repr(found) == f"MutableIdentityMap({{{x.name}: x, {y.name}: y}})"
    assert len(graph.get_operations()) == count


def test_collections_of_ops_and_tensors():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        y = tf.constant(2.0, name="y")
        graph.add_to_collection("first", x)
        graph.add_to_collection("second", x.op)
        graph.add_to_collections(["first", "third"], y)
        # Other objects are left out.
        variable = tf.compat.v1.Variable(1.0)
        graph.add_to_collection("third", "text")
    assert variable in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    found = collections_of_elements(graph)
    assert {e.name: sorted(names) for e, names in found.items()} == {
        "x:0": ["first"],
        "x": ["second"],
        "y:0": ["first", "third"],
    }


def test_known_collection_names():
    known = known_collection_names()
    keys = tf.compat.v1.GraphKeys
    assert {keys.GLOBAL_VARIABLES, keys.UPDATE_OPS, keys.LOSSES} <= known
    assert "mine" not in known
    assert all(isinstance(name, str) for name in known)
