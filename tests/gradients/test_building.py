"""Building takes work in proportion to the graph, and no recursion."""

import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import by_name, gradients, last_report
from tests.call_counts import count_calls
from tests.thorough import thorough


def chain_of(count):
    """Return a chain of `count` ops made in bulk, and its ends."""
    definition = tf.compat.v1.GraphDef()
    node = definition.node.add(name="op0", op="Placeholder")
    node.attr["dtype"].type = tf.float32.as_datatype_enum
    node.attr["shape"].shape.dim.add(size=1024)
    for i in range(1, count):
        op_type = "Exp" if i % 100 else "Sin"
        node = definition.node.add(name=f"op{i}", op=op_type, input=[f"op{i - 1}"])
        node.attr["T"].type = tf.float32.as_datatype_enum
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(definition, name="")
    first, last = (graph.get_tensor_by_name(f"op{i}:0") for i in (0, count - 1))
    return graph, first, last


def calls(count):
    graph, x, y = chain_of(count)
    with graph.as_default():
        made, _ = count_calls(lambda: gradients(y, x, checkpoints=by_name("50$")))
    assert len(last_report().recomputed) >= 0.98 * count - 200
    ge.verify(graph)
    return made


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=thorough)])
def test_the_work_is_linear(count):
    assert calls(4 * count) <= 6 * calls(count)
