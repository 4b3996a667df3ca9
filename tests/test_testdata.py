"""The files of `testdata/`: they load, they hold what they should, geutil copes."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

import geutil as ge
from testdata import layered, make
from tests import settings

tf1 = tf.compat.v1

X = np.array([3.0, -1.5], np.float32)
IMAGES = np.random.RandomState(0).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
ROWS = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]], np.float32)
CODES = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)

# What to feed, and what comes out by arithmetic of our own. None: see the test.
RUNS = {
    "conv_bn_relu6.pbtxt": [({"image": IMAGES}, {"logits": None})],
    "while_v1.pbtxt": [
        ({"x": X, "count": 3}, {"power": 8 * X, "sum": 15 * X}),
        ({"x": X, "count": 0}, {"power": X, "sum": X}),
    ],
    "while_v1.meta.pbtxt": [({"x": X, "count": 2}, {"power": 4 * X, "sum": 7 * X})],
    "cond_v1.pbtxt": [
        ({"x": X, "flag": True}, {"y": 3 * X}),
        ({"x": X, "flag": False}, {"y": X - 1}),
    ],
    "functions.pbtxt": [
        ({"x": X, "count": 2}, {"scaled": X / 2 + 1, "repeated": X / 4 + 1.5}),
        ({"x": X, "count": 0}, {"scaled": X / 2 + 1, "repeated": X}),
    ],
    # On devices that no test has.
    "devices.pbtxt": [],
}
LOOP = {"Enter", "Merge", "Switch", "LoopCond", "NextIteration", "Exit"}
MACHINERY = {
    "conv_bn_relu6.pbtxt": {"DepthwiseConv2dNative", "FusedBatchNormV3", "Relu6"},
    "while_v1.pbtxt": LOOP,
    "while_v1.meta.pbtxt": LOOP,
    "cond_v1.pbtxt": {"Switch", "Merge"},
    "functions.pbtxt": {"PartitionedCall", "StatelessWhile"},
}
SIGNATURES = [
    ("one_signature", "serving_default", "x", ROWS, "y"),
    ("two_signatures", "encode", "x", ROWS, "code"),
    ("two_signatures", "decode", "code", CODES, "x"),
]
eager = pytest.mark.skipif(settings.V1, reason="needs eager execution")


def read(name):
    message = tf1.MetaGraphDef() if ".meta." in name else tf1.GraphDef()
    return text_format.Parse((make.HERE / name).read_text(), message)


def load(name):
    """Return a new graph of the file."""
    proto = read(name)
    with tf.Graph().as_default() as graph:
        if ".meta." in name:
            tf1.train.import_meta_graph(proto)
        else:
            tf.import_graph_def(proto, name="")
    return graph


def copied(graph):
    """Return a copy of all of `graph` in another graph, and what became what."""
    other = tf.Graph()
    _, info = ge.copy(graph, other)
    ge.verify(other)
    return other, info


def run(graph, feed, fetches):
    tensors = [graph.get_tensor_by_name(f"{name}:0") for name in fetches]
    return settings.evaluate(
        graph, tensors, {f"{name}:0": value for name, value in feed.items()}
    )


def called(nodes):
    """Yield the attribute values that name functions, keyed by node and attribute."""
    for node in nodes:
        for key, value in node.attr.items():
            if value.HasField("func"):
                yield (node.name, key), value.func


def nodes_but_for_function_names(graph):
    """Return the nodes by name. A copy of a loop may have a body of its own."""
    nodes = {node.name: node for node in graph.as_graph_def().node}
    for _, function in called(nodes.values()):
        function.name = ""
    return nodes


def bodies(graph):
    """Return the nodes of each function that an op of the graph calls."""
    graph_def = graph.as_graph_def()
    library = {f.signature.name: f for f in graph_def.library.function}
    return {key: library[f.name].node_def for key, f in called(graph_def.node)}


def types(graph):
    return {op.type for op in graph.get_operations()}


@pytest.mark.parametrize("name", make.GRAPHS)
def test_graphs_and_their_copies(name):
    assert make.GRAPHS[name]() == read(name)
    graph = load(name)
    ge.verify(graph)
    other, _ = copied(graph)
    assert nodes_but_for_function_names(graph) == nodes_but_for_function_names(other)
    assert MACHINERY.get(name, set()) <= types(graph)
    _, info = ge.copy(graph, dst_scope="copy")
    ge.verify(graph)
    for feed, results in RUNS[name]:
        before, after = run(graph, feed, results), run(other, feed, results)
        # The placeholders of a copy are fed as the originals are.
        feed_ = {f"copy/{key}": value for key, value in feed.items()}
        beside = run(graph, feed_, [f"copy/{key}" for key in results])
        for value, *copies, expected in zip(
            before, after, beside, results.values(), strict=True
        ):
            for value_ in copies:
                np.testing.assert_array_equal(value_, value)
            if expected is not None:
                np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_conv_bn_relu6_is_frozen_and_random():
    graph = load("conv_bn_relu6.pbtxt")
    assert not any("Var" in op_type for op_type in types(graph))
    for block in ("conv", "depthwise"):
        names = ("gamma", "beta", "moving_mean", "moving_variance")
        values = run(graph, {}, [f"{block}/batch_norm/{name}" for name in names])
        for value in values:
            # All different, so that mixing up channels or statistics shows.
            assert len(set(value.tolist())) == value.size
        assert (values[-1] > 0).all()


def test_conv_bn_relu6_clips_on_both_sides():
    graph = load("conv_bn_relu6.pbtxt")
    (value,) = run(graph, {"image": 10 * IMAGES}, ["conv/Relu6"])
    assert value.min() == 0
    assert value.max() == 6
    assert ((value > 0) & (value < 6)).any()


def test_while_v1_meta_graph_can_be_differentiated_and_so_can_its_copy():
    assert read("while_v1.meta.pbtxt").graph_def == read("while_v1.pbtxt")
    graph = load("while_v1.meta.pbtxt")
    other, _ = copied(graph)
    for g in (graph, other):
        assert len(g.get_collection(tf1.GraphKeys.WHILE_CONTEXT)) == 1
        power, x = g.get_tensor_by_name("power:0"), g.get_tensor_by_name("x:0")
        with g.as_default():
            (gradient,) = tf.gradients(power, x)
        ge.verify(g)
        (value,) = settings.evaluate(g, [gradient], {"x:0": X, "count:0": 3})
        np.testing.assert_array_equal(value, [8, 8])


def test_function_bodies_come_along():
    graph = load("functions.pbtxt")
    other, _ = copied(graph)
    assert len(bodies(graph)) == 3
    assert bodies(other) == bodies(graph)
    # The body of the loop calls a function, which an op of the graph calls too.
    assert {f.name for _, f in called(bodies(other)["loop", "body"])} == {"scale"}


def test_devices_colocation_and_control_inputs_survive():
    other, _ = copied(load("devices.pbtxt"))
    op = other.get_operation_by_name
    assert op("product").device == "/job:worker/task:1/device:GPU:0"
    assert op("weights").device == "/job:ps/task:0/device:CPU:0"
    assert op("norm").colocation_groups() == [b"loc:@weights"]
    controls = {
        name: {c.name for c in op(name).control_inputs} for name in ("result", "done")
    }
    assert controls == {
        "result": {"norm_is_finite"},
        "done": {"norm_is_finite", "product"},
    }


@eager
@pytest.mark.parametrize("folder", make.SAVED_MODELS)
def test_signatures_compute_and_share_a_variable(folder):
    reader = tf.train.load_checkpoint(str(make.HERE / folder / "variables/variables"))
    shapes = reader.get_variable_to_shape_map()
    assert [shape for shape in shapes.values() if shape] == [[3, 2]]
    loaded = tf.saved_model.load(str(make.HERE / folder))
    weight = loaded.weight.numpy()
    for times in (1, 0):
        loaded.weight.assign(times * weight)
        for owner, key, argument, value, result in SIGNATURES:
            if owner == folder:
                signature = loaded.signatures[key]
                ge.verify(signature.graph)
                (variable,) = signature.variables
                assert variable is loaded.weight
                expected = times * value @ (weight.T if key == "decode" else weight)
                outputs = signature(**{argument: tf.constant(value)})
                np.testing.assert_allclose(outputs[result], expected, rtol=1e-5)


@pytest.mark.parametrize(("folder", "key", "argument", "value", "result"), SIGNATURES)
def test_copy_of_saved_model_computes_the_same(folder, key, argument, value, result):
    path = make.HERE / folder
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        meta_graph = tf1.saved_model.load(session, ["serve"], str(path))
        signature = meta_graph.signature_def[key]
        x, y = signature.inputs[argument].name, signature.outputs[result].name
        before = session.run(y, {x: value})
    ge.verify(graph)
    other, _ = copied(graph)
    saver = meta_graph.saver_def
    with tf1.Session(graph=other) as session:
        # The copy has variables of its own, and the means to restore them.
        session.run(
            saver.restore_op_name,
            {saver.filename_tensor_name: str(path / "variables/variables")},
        )
        after = session.run(y, {x: value})
    np.testing.assert_array_equal(after, before)


def stored_files():
    files = make.HERE.rglob("*")
    return [f for f in files if f.is_file() and f.suffix not in (".py", ".pyc")]


def test_no_file_tells_where_it_was_made():
    home = re.escape(str(Path.home())).encode()
    here = re.escape(str(make.HERE.parent)).encode()
    path = re.compile(
        rb"/(work|tmp|root|home|usr|Users)\b|[A-Z]:\\\\|" + home + b"|" + here
    )
    assert not [f for f in stored_files() if path.search(f.read_bytes())]


def test_files_are_small():
    assert max(f.stat().st_size for f in stored_files()) < 100_000


def test_every_file_is_made_here():
    made = {*make.GRAPHS, *make.SAVED_MODELS, layered.HERE.name, "README.md"}
    assert {f.relative_to(make.HERE).parts[0] for f in stored_files()} == made
