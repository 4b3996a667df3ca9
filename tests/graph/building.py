"""Graphs that several L0 tests use."""

from dataclasses import dataclass

import tensorflow as tf

from tests import settings


def chain(length: int) -> tf.Graph:
    """Return a graph of ops n0 to n(length-1), each reading the one before.

    Imported in bulk: op by op, 100,000 take half a minute.
    """
    graph_def = tf.compat.v1.GraphDef()
    for i in range(length):
        node = graph_def.node.add(name=f"n{i}", op="Identity" if i else "Placeholder")
        node.attr["T" if i else "dtype"].type = tf.float32.as_datatype_enum
        if i:
            node.input.append(f"n{i - 1}")
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
    return graph


def line(length: int = 5) -> list[tf.Tensor]:
    """Return the results of a graph of negations in a row, op0 to op(length-1)."""
    with tf.Graph().as_default():
        tensors = [tf.constant(1.0, name="op0")]
        for i in range(1, length):
            tensors.append(tf.negative(tensors[-1], name=f"op{i}"))
    return tensors


@dataclass(frozen=True)
class Loops:
    """Loop 1 doubles `x` three times; loop 2 adds `x` to that three times: 11."""

    graph: tf.Graph
    x: tf.Tensor
    inside1: tf.Tensor
    inside2: tf.Tensor
    result1: tf.Tensor
    out: tf.Tensor
    other: tf.Tensor


def two_loops() -> Loops:
    """Build the loops; control flow v2 must be off."""
    inside = {}

    def doubled(i, value):
        inside[1] = tf.multiply(value, 2.0, name="double")
        return i + 1, inside[1]

    def increased(i, value):
        inside[2] = tf.add(value, x, name="increase")
        return i + 1, inside[2]

    def goes_on(i, value):
        return i < 3

    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        while_loop = tf.compat.v1.while_loop
        _, result1 = while_loop(goes_on, doubled, [0, x], name="loop1")
        _, result2 = while_loop(goes_on, increased, [0, result1], name="loop2")
        out = tf.identity(result2, name="out")
        other = tf.negative(x, name="other")
    return Loops(graph, x, inside[1], inside[2], result1, out, other)


def serialized(graph: tf.Graph) -> bytes:
    """Return the graph as bytes, to compare two states."""
    return graph.as_graph_def().SerializeToString(deterministic=True)


def snapshot(graph: tf.Graph) -> tuple[object, bytes]:
    """Return everything about a graph that a refused edit must leave alone."""
    return settings.edges(graph), serialized(graph)


def op_edges(graph: tf.Graph) -> list[tuple[str, str]]:
    """Return (producer, consumer) names of all data and control edges."""
    return [
        (producer.name, op.name)
        for op in graph.get_operations()
        for producer in [*(t.op for t in op.inputs), *op.control_inputs]
    ]
