"""Small graphs, and a check that looking at one leaves no trace in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import tensorflow as tf

from tests import settings
from tests.graph.building import serialized


@contextmanager
def looking() -> Iterator[None]:
    """Fail when the block adds an op to the default graph, or changes an edge."""
    graph = settings.default_graph()
    count, before = len(graph.get_operations()), serialized(graph)
    yield
    assert len(graph.get_operations()) == count
    assert serialized(graph) == before


def diamond() -> SimpleNamespace:
    """Make a and b, which read x; c, which reads both; d, which reads c.

    Apart from them stands w, which waits for a.
    """
    x = tf.constant([1.0, 2.0], name="x")
    a = tf.negative(x, name="a")
    b = tf.square(x, name="b")
    c = tf.subtract(a, b, name="c")
    d = tf.exp(c, name="d")
    with tf.control_dependencies([a]):
        w = tf.constant([5.0, 6.0], name="w")
    return SimpleNamespace(graph=x.graph, x=x, a=a, b=b, c=c, d=d, w=w)


def other_graph() -> SimpleNamespace:
    """Make a diamond in another graph than the default one."""
    with tf.Graph().as_default():
        return diamond()


def many_readers(count: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Make a tensor with `count` readers, named after the order they are made in."""
    source = tf.constant(1.0, name="source")
    return source, [tf.negative(source, name=f"reader{i}") for i in range(count)]
