"""What people ask for by mistake: each is refused with a message that helps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from geutil.errors import GeutilError
from geutil.model import ModelError

tf1 = tf.compat.v1
X = tf.ones([1, 3])


def opened():
    module = tf.Module()
    module.w = tf.Variable(np.eye(3, 2, dtype=np.float32), name="w")

    def f(x):
        return {"y": tf.nn.relu(tf.matmul(x, module.w, name="mm"), name="h") + 1}

    module.f = tf.function(f, [tf.TensorSpec([None, 3], name="x")])
    m = geutil_model.open(module.f)
    m.module = module
    return m


def graph():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2], "x")
        tf.identity(x, "y")
    return graph


def open_graph(**ends):
    return geutil_model.open(graph(), **ends)


def handle(m):
    return next(op for op in m.graph.get_operations() if op.type == "VarHandleOp")


OPENING = {
    "a function of Python": (lambda: geutil_model.open(abs), "cannot open a builtins"),
    "a module": (lambda: geutil_model.open(tf.Module()), "cannot open a tensorflow"),
    "a layer": (
        lambda: geutil_model.open(tf.keras.layers.ReLU()),
        "cannot open a keras",
    ),
    "bytes": (lambda: geutil_model.open(b"here"), "cannot open a builtins.bytes"),
    "no such output of an op": (
        lambda: open_graph(outputs=["y:5"]),
        "the graph has no tensor 'y:5'",
    ),
    "a control input": (lambda: open_graph(outputs=["^y"]), r"no output '\^y'"),
    "a number for a tensor": (lambda: open_graph(inputs=[3]), "a tensor, an op or a"),
    "one tensor as two inputs": (
        lambda: open_graph(inputs={"a": "x", "b": "x:0"}),
        "two inputs of the graph are 'x:0'",
    ),
    "no outputs": (lambda: open_graph(outputs=[]), "no outputs"),
    "ends of a function": (
        lambda: geutil_model.open(opened().module.f, inputs=["x"]),
        "inputs= is for graphs only",
    ),
    "a session for a function": (
        lambda: geutil_model.open(opened().module.f, session=3, outputs=["y"]),
        "outputs=, session= is for graphs only",
    ),
}


@pytest.mark.parametrize("case", OPENING)
def test_opening(case):
    ask, message = OPENING[case]
    with pytest.raises(ModelError, match=message):
        ask()


USING = {
    "run in a function": (
        lambda m: tf.function(lambda x: m.run(x=x), autograph=False)(X),
        r"inside tf.function and graphs call model.to_function\(\)",
    ),
    "missing": (lambda m: m.run(), r"inputs \['x'\] are missing"),
    "unknown": (lambda m: m.run(x=1, z=1), "there is no input 'z'; the inputs are"),
    "shape": (lambda m: m.run(x=[1, 2]), r"of shape \(None, 3\), and got list"),
    "text": (lambda m: m.run(x=[["a"] * 3]), "'x' is float32.*got list"),
    "ragged": (lambda m: m.run(x=[[1, 2], [3]]), "'x' is float32.*got list"),
    "too many": (lambda m: m.to_function()(1, 2), "2 values for 1 inputs"),
    "twice": (lambda m: m.to_function()(1, x=1), "by position and by name"),
    "cut nothing": (lambda m: m.cut(outputs=[]), "at least one output"),
    "cut the unknown": (
        lambda m: m.cut(outputs=["zz"]),
        "no input, output, tensor",
    ),
    "cut no inputs": (lambda m: m.cut(inputs=[]), "still depend on its input 'x'"),
    "cut at a handle": (
        lambda m: m.cut(inputs=[handle(m)]),
        "is a resource and cannot be an input",
    ),
    "cut out a handle": (
        lambda m: m.cut(outputs=[handle(m)]),
        "is a resource and cannot be output",
    ),
    "cut one tensor twice": (
        lambda m: m.cut(inputs={"a": "h", "b": "h"}),
        "two inputs are 'h:0'",
    ),
    "cut behind the output": (
        lambda m: m.cut(inputs=["h"], outputs=["mm"]),
        "no output depends on 'h'",
    ),
    "cut without a name": (lambda m: m.cut(outputs={"": "y"}), "needs a name"),
    "cut with a number": (lambda m: m.cut(outputs={3: "y"}), "needs a name"),
    "splice with nothing": (lambda m: m.splice(opened(), {}), "nothing connects"),
    "splice a function": (
        lambda m: m.splice(m.module.f, {"h": "y"}),
        "cannot join a tensorflow.*; open it with geutil.model.open",
    ),
    "splice a name": (lambda m: m.splice(opened(), "h"), "a mapping or pairs"),
    "replace twice": (
        lambda m: m.splice(opened(), [("h", "y"), ("h:0", "y")]),
        "'h:0' is to be replaced twice",
    ),
    "append nothing": (lambda m: m.append(None), "cannot join a builtins.NoneType"),
    "prepend a number": (lambda m: m.prepend(3), "cannot join a builtins.int"),
    "append what does not fit": (
        lambda m: m.append(opened()),
        r"of shape \(None, 2\) cannot be read instead of 'x:0' of shape \(None, 3\)",
    ),
    "rename the unknown": (lambda m: m.rename({"z": "a"}), "there is no input 'z'"),
    "save as something": (lambda m: m.save("here", "onnx"), "unknown format 'onnx'"),
    "a handle as output": (
        lambda m: m.outputs.__setitem__("r", handle(m).outputs[0]),
        "is a resource and cannot be output 'r'",
    ),
    "a number as output": (
        lambda m: m.outputs.__setitem__("r", 3),
        "expected a tf.Tensor of a graph",
    ),
    "another model's output": (
        lambda m: m.outputs.__setitem__("r", opened().outputs["y"]),
        "is in another graph",
    ),
    "no outputs left": (lambda m: m.outputs.__delitem__("y"), "is the only output"),
}


@pytest.mark.parametrize("case", USING)
def test_using(case):
    ask, message = USING[case]
    m = opened()
    before = m.graph.as_graph_def()
    with pytest.raises(GeutilError, match=message):
        ask(m)
    # A refusal leaves everything as it was.
    assert m.graph.as_graph_def() == before
    assert (list(m.inputs), list(m.outputs)) == (["x"], ["y"])
    assert m.run(x=[[1, 2, 3]])["y"].tolist() == [[2, 3]]


def test_ends_of_a_graph_may_be_tensors_and_ops():
    g = graph()
    x, y = g.get_tensor_by_name("x:0"), g.get_operation_by_name("y")
    for inputs, outputs in (([x], [y]), (x, y), ({"a": x}, {"b": y.outputs[0]})):
        m = geutil_model.open(g, inputs=inputs, outputs=outputs)
        (name,), (output,) = m.inputs, m.outputs
        assert m.run(**{name: [1, 2]})[output].tolist() == [1, 2]
