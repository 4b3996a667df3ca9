import tensorflow as tf

import geutil as ge
from tests.select import tables
from tests.select.samples import diamond, looking, other_graph
from tests.settings import in_each_setting, names


def by_name(found):
    return {op.name: names(outputs) for op, outputs in found.items()}


@in_each_setting
def test_control_outputs():
    other = other_graph()
    g = diamond()
    assert ge.ControlOutputs(g.graph).graph is g.graph
    with looking():
        assert by_name(ge.ControlOutputs(g.graph).get_all()) == {"a": ["w"]}
    with tf.control_dependencies([g.a]):
        for i in range(25):
            tf.constant(1.0, name=f"late{i}")
    controls = ge.ControlOutputs(g.graph)
    with looking():
        expected = ["w", *(f"late{i}" for i in range(25))]
        assert names(controls.get(g.a.op)) == expected
        assert list(controls.get(g.b.op)) == []
        # An op of another graph has none in this one.
        assert names(other.w.op.control_inputs) == ["a"]
        assert list(controls.get(other.a.op)) == []
    # Look-ups are never out of date.
    ge.add_control_inputs(g.d.op, g.a.op)
    assert names(controls.get(g.a.op)) == ["d", *expected]
    with looking():
        assert controls.update() is controls
    ge.remove_control_inputs(g.w.op, g.a.op)
    assert names(controls.get(g.a.op)) == ["d", *expected[1:]]
    with tf.control_dependencies([g.b]):
        tf.constant(1.0, name="new")
    assert by_name(controls.get_all()) == {"a": ["d", *expected[1:]], "b": ["new"]}


@in_each_setting
def test_check_cios():
    g = diamond()
    controls = ge.ControlOutputs(g.graph)
    with looking():
        for inputs in ({}, {"control_inputs": False}, {"control_inputs": True}):
            both = inputs.get("control_inputs", False)
            assert ge.check_cios(**inputs) == (both, None)
            found = ge.check_cios(**inputs, control_outputs=controls)
            assert found == (both, controls)
            found = ge.check_cios(**inputs, control_ios=controls)
            assert found == (True, controls)


REFUSED = """
ge.ControlOutputs(None) => ArgumentTypeError: tf.Graph
ge.ControlOutputs('graph') => ArgumentTypeError: tf.Graph
ge.ControlOutputs(1) => ArgumentTypeError: tf.Graph
controls.get('a') => ArgumentTypeError: tf.Operation
controls.get(None) => ArgumentTypeError: tf.Operation
controls.get(a) => ArgumentTypeError: tf.Operation
ge.check_cios(control_outputs=True)
    => ArgumentTypeError: control_outputs; bool; geutil.ControlOutputs(graph)
ge.check_cios(control_outputs=graph) => ArgumentTypeError: control_outputs; Graph
ge.check_cios(control_ios=[controls]) => ArgumentTypeError: control_ios; list
ge.check_cios(control_ios=controls, control_outputs=controls)
    => SelectionError: control_ios; control_outputs; not both
"""


@in_each_setting
def test_refusals():
    tables.check_refusals(REFUSED, diamond())
