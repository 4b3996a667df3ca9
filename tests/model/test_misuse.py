"""What people ask for by mistake: each is refused with a message that helps."""

from functools import partial

import numpy as np
import tensorflow as tf

from geutil import model
from geutil.errors import GeutilError
from geutil.model import ModelError
from tests.model.refusal_tables import not_refused

tf1 = tf.compat.v1
X = tf.ones([1, 3])


def opened():
    module = tf.Module()
    module.w = tf.Variable(np.eye(3, 2, dtype=np.float32), name="w")

    def f(x):
        return {"y": tf.nn.relu(tf.matmul(x, module.w, name="mm"), name="h") + 1}

    module.f = tf.function(f, [tf.TensorSpec([None, 3], name="x")])
    m = model.open(module.f)
    m.module = module
    return m


def graph():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2], "x")
        tf.identity(x, "y")
    return graph


def without_ends():
    with tf.Graph().as_default() as graph:
        tf1.placeholder(tf.float32, [2], "x")
    return graph


def handle(m):
    return next(op for op in m.graph.get_operations() if op.type == "VarHandleOp")


OPENING = {
    "cannot open a builtins.builtin": lambda: model.open(abs),
    "cannot open a tensorflow": lambda: model.open(tf.Module()),
    "cannot open a keras": lambda: model.open(tf.keras.layers.ReLU()),
    "cannot open a builtins.bytes": lambda: model.open(b"here"),
    "cannot open a builtins.int; pass a SavedModel directory": lambda: model.open(3),
    "has no input signature": lambda: model.open(tf.function(lambda x: x)),
    "/does/not/exist.*not exist": lambda: model.open("/does/not/exist"),
    "exist": lambda: model.open("/does/not/exist.pb"),
    "output": lambda: model.open(without_ends()),
    r"'nothing'.*\bx\b": lambda: model.open(graph(), inputs=["nothing"]),
    r"'nothing'.*\by\b": lambda: model.open(graph(), outputs=["nothing"]),
    "the graph has no tensor 'y:5'": lambda: model.open(graph(), outputs=["y:5"]),
    r"no output '\^y'": lambda: model.open(graph(), outputs=["^y"]),
    "a tensor, an op or a": lambda: model.open(graph(), inputs=[3]),
    "two inputs of the graph are 'x:0'": lambda: model.open(
        graph(), inputs={"a": "x", "b": "x:0"}
    ),
    "no outputs": lambda: model.open(graph(), outputs=[]),
    "inputs= is for graphs only": lambda: model.open(opened().module.f, inputs=["x"]),
    "outputs=, session= is for graphs only": lambda: model.open(
        opened().module.f, session=3, outputs=["y"]
    ),
}


def test_opening():
    cases = [(message, ask, message) for message, ask in OPENING.items()]
    assert not_refused(ModelError, cases) == {}


USING = {
    r"inside tf.function and graphs call model.to_function\(\)": lambda m: tf.function(
        lambda x: m.run(x=x), autograph=False
    )(X),
    r"inputs \['x'\] are missing": lambda m: m.run(),
    "there is no input 'z'; the inputs are": lambda m: m.run(x=1, z=1),
    r"of shape \(None, 3\), and got list": lambda m: m.run(x=[1, 2]),
    "'x' is float32.*got list": lambda m: m.run(x=[["a"] * 3]),
    "'x' is float32 of shape.*got list": lambda m: m.run(x=[[1, 2], [3]]),
    "2 values for 1 inputs": lambda m: m.to_function()(1, 2),
    "by position and by name": lambda m: m.to_function()(1, x=1),
    "at least one output": lambda m: m.cut(outputs=[]),
    "no input, output, tensor": lambda m: m.cut(outputs=["zz"]),
    "is a resource and cannot be an input": lambda m: m.cut(inputs=[handle(m)]),
    "is a resource and cannot be output": lambda m: m.cut(outputs=[handle(m)]),
    "two inputs are 'h:0'": lambda m: m.cut(inputs={"a": "h", "b": "h"}),
    "no output depends on 'h'": lambda m: m.cut(inputs=["h"], outputs=["mm"]),
    "needs a name": lambda m: m.cut(outputs={"": "y"}),
    "needs a name(?s:.)*": lambda m: m.cut(outputs={3: "y"}),
    "nothing connects": lambda m: m.splice(opened(), {}),
    "cannot join a tensorflow.*; open it with geutil.model.open": lambda m: m.splice(
        m.module.f, {"h": "y"}
    ),
    "a mapping or pairs": lambda m: m.splice(opened(), "h"),
    "'h:0' is to be replaced twice": lambda m: m.splice(
        opened(), [("h", "y"), ("h:0", "y")]
    ),
    "cannot join a builtins.NoneType": lambda m: m.append(None),
    "cannot join a builtins.int": lambda m: m.prepend(3),
    r"of shape \(None, 2\) cannot be read instead of 'x:0' of shape \(None, 3\)": (
        lambda m: m.append(opened())
    ),
    "unknown format 'onnx'; .*saved_model": lambda m: m.save("here", "onnx"),
    "is a resource and cannot be output 'r'": lambda m: m.outputs.__setitem__(
        "r", handle(m).outputs[0]
    ),
    "expected a tf.Tensor of a graph": lambda m: m.outputs.__setitem__("r", 3),
    "is in another graph": lambda m: m.outputs.__setitem__("r", opened().outputs["y"]),
    "is the only output": lambda m: m.outputs.__delitem__("y"),
}


def test_using():
    m = opened()
    cases = [(message, partial(ask, m), message) for message, ask in USING.items()]
    assert not_refused(GeutilError, cases, unchanged=m) == {}
    assert m.run(x=[[1, 2, 3]])["y"].tolist() == [[2, 3]]


def test_ends_of_a_graph_may_be_tensors_and_ops():
    g = graph()
    x, y = g.get_tensor_by_name("x:0"), g.get_operation_by_name("y")
    for inputs, outputs in (([x], [y]), (x, y), ({"a": x}, {"b": y.outputs[0]})):
        m = model.open(g, inputs=inputs, outputs=outputs)
        (name,), (output,) = m.inputs, m.outputs
        assert m.run(**{name: [1, 2]})[output].tolist() == [1, 2]
