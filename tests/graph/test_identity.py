import pytest
import tensorflow as tf

from geutil.graph.types import (
    IdentityMap,
    IdentitySet,
    MutableIdentityMap,
    dereference,
    index_by_identity,
    unique,
)
from tests import settings


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


def test_dereference():
    with tf.Graph().as_default():
        x = tf.constant(1.0)
    assert dereference(x.ref()) is x
    assert dereference(x) is x
    assert dereference("key") == "key"


def test_map_tells_equal_keys_apart():
    a, b = Alike(), Alike()
    numbers = IdentityMap([(a, 1), (b, 2)])
    assert (numbers[a], numbers[b], len(numbers)) == (1, 2, 2)
    assert Alike() not in numbers


def test_map_never_compares_or_hashes_its_keys():
    a, b = Unhashable(), Unhashable()
    numbers = MutableIdentityMap([(a, 1)])
    numbers[b] = 2
    assert a in numbers
    assert Unhashable() not in numbers
    assert numbers.get(b) == 2
    assert [key is k for key, k in zip(numbers, (a, b), strict=True)] == [True] * 2


def test_map_keeps_the_order_of_insertion_and_overwrites_in_place():
    a, b = Alike(), Alike()
    numbers = MutableIdentityMap([(a, 1), (b, 2)])
    numbers[a] = 3
    assert list(numbers.values()) == [3, 2]
    assert next(iter(numbers)) is a


def test_map_takes_many_at_once():
    a, b, c = Alike(), Alike(), Alike()
    numbers = MutableIdentityMap([(a, 1), (b, 2)])
    numbers.update(pair for pair in [(b, 3), (c, 4)])
    assert list(numbers.values()) == [1, 3, 4]
    assert (numbers[b], numbers[c]) == (3, 4)


def test_map_keeps_its_keys_alive():
    numbers = IdentityMap((Alike(), i) for i in range(100))
    assert len(numbers) == 100


def test_missing_key_is_named():
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
    with pytest.raises(KeyError, match="x:0"):
        IdentityMap()[x]


def test_map_of_tensors_adds_no_ops(setting):
    def body():
        graph = settings.default_graph()
        x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        count = len(graph.get_operations())
        found = MutableIdentityMap([(x, "x")])
        found[y.ref()] = "y"
        assert (found[x], found[x.ref()], found[y]) == ("x", "x", "y")
        assert x in found
        assert repr(found) == f"MutableIdentityMap({{{x.name}: x, {y.name}: y}})"
        assert len(graph.get_operations()) == count

    setting.run(body)


def test_maps_of_tensors_compare_without_adding_ops(setting):
    def body():
        graph = settings.default_graph()
        x, y = tf.constant(1.0), tf.constant(2.0)
        count = len(graph.get_operations())
        assert IdentityMap([(x, 1)]) == IdentityMap([(x, 1)])
        assert IdentityMap([(x, 1)]) != IdentityMap([(y, 1)])
        assert len(graph.get_operations()) == count

    setting.run(body)


def test_set_tells_equal_elements_apart():
    a, b = Alike(), Alike()
    found = IdentitySet([a, b, a])
    found.add(b)
    assert len(found) == 2
    assert [e is o for e, o in zip(found, (a, b), strict=True)] == [True, True]
    assert Alike() not in found


def test_set_takes_references(setting):
    def body():
        x, y = tf.constant(1.0), tf.constant(2.0)
        found = IdentitySet([x.ref()])
        found.add(y.ref())
        assert x in found
        assert y in found
        assert y.ref() in found
        assert [e.name for e in found] == [x.name, y.name]

    setting.run(body)


def test_unique_keeps_the_first_of_each():
    a, b, c = Alike(), Alike(), Alike()
    found = unique([c, a, c, b, a])
    assert [id(e) for e in found] == [id(c), id(a), id(b)]


def test_unique_takes_elements_made_on_the_fly():
    assert len(unique(Alike() for _ in range(100))) == 100


def test_index_is_that_of_the_first():
    a, b = Alike(), Alike()
    assert index_by_identity([b, a, b]) == {id(b): 0, id(a): 1}
