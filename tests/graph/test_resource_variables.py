"""Variables made in bulk are those that TensorFlow makes; one counts the steps."""

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import verify
from geutil.graph.resource_variables import variable_outside, variables_outside
from geutil.quantize import quantize
from tests.settings import needs_eager

v1 = tf.compat.v1
WANTED = [
    (name, np.full(shape, index + 1, np.float32))
    for index, (name, shape) in enumerate(
        [("a/min", ()), ("a/max", ()), ("b/min", (3,)), ("b/max", (3,)), ("a/min", ())]
    )
]
NAMES = ["a/min", "a/max", "b/min", "b/max", "a/min_1"]


def _nodes(graph):
    return {node.name: node for node in graph.as_graph_def().node}


@pytest.mark.parametrize("devices", [[""] * 5, ["", *["/device:CPU:0", "/task:1"] * 2]])
def test_they_are_those_that_are_made_one_by_one(devices):
    bulk, single = tf.Graph(), tf.Graph()
    made = variables_outside(bulk, WANTED, devices)
    expected = [
        variable_outside(single, value, name, device)
        for (name, value), device in zip(WANTED, devices, strict=True)
    ]
    assert [v.device for v in made] == devices
    assert [v.op.name for v in made] == NAMES
    nodes, others = _nodes(bulk), _nodes(single)
    assert nodes.keys() == others.keys()
    for name, node in nodes.items():
        assert node == others[name], name
    for one, other in zip(made, expected, strict=True):
        assert (one.name, one.shape, one.dtype) == (
            other.name,
            other.shape,
            other.dtype,
        )
        assert (one.trainable, one.device) == (other.trainable, other.device)
        with bulk.as_default():
            definition = one.to_proto()
        with single.as_default():
            assert definition == other.to_proto()
    verify(bulk)


def test_collections_are_in_order():
    graph = tf.Graph()
    with graph.as_default():
        first = v1.get_variable("first", ())
        made = variables_outside(graph, WANTED)
        v1.get_variable("last", ())
    held = graph.get_collection("variables")
    assert held[0] is first
    assert [v.op.name for v in held] == ["first", *NAMES, "last"]
    assert all(a is b for a, b in zip(held[1:-1], made, strict=True))
    assert [v.op.name for v in graph.get_collection("trainable_variables")] == [
        "first",
        "last",
    ]


def test_they_are_initialized_assigned_saved_and_restored(tmp_path):
    graph = tf.Graph()
    with graph.as_default():
        made = variables_outside(graph, WANTED)
        saver = v1.train.Saver()
        changed = [v.assign_add(v) for v in made]
        start = v1.global_variables_initializer()
        missing = v1.report_uninitialized_variables()
    with v1.Session(graph=graph) as session:
        assert len(session.run(missing)) == len(WANTED)
        session.run(start)
        assert len(session.run(missing)) == 0
        for value, (_, expected) in zip(session.run(made), WANTED, strict=True):
            np.testing.assert_array_equal(value, expected)
        path = saver.save(session, str(tmp_path / "c"))
        session.run(changed)
        np.testing.assert_array_equal(session.run(made[2]), WANTED[2][1] * 2)
        saver.restore(session, path)
        np.testing.assert_array_equal(session.run(made[2]), WANTED[2][1])


@needs_eager
@pytest.mark.parametrize("jit", [False, True])
def test_traces_share_a_variable(jit):
    variable, other = (
        tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)
    )
    kernel, reports = tf.Variable(tf.eye(2)), []

    @tf.function(jit_compile=jit, reduce_retracing=False)
    def step(x):
        y = tf.nn.relu(x @ kernel)
        graph = v1.get_default_graph()
        reports.append(quantize(graph, quant_delay=2, step=variable))
        result = reports[-1].tensor(y)
        z = tf.nn.relu(result @ kernel)
        count = len(graph.get_operations())
        with pytest.raises(TransformError, match="counts its steps in"):
            quantize(graph, quant_delay=2, step=other)
        assert len(graph.get_operations()) == count
        return result, z

    for rows in (1, 5, 1):
        step(tf.zeros([rows, 2]))
    assert len(reports) == 2
    assert all(report.step is variable for report in reports)
    assert (int(variable), int(other)) == (3, 0)
