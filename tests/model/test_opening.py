from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from parameterized import parameterized

import geutil as ge
from geutil import model
from tests.model import small_models
from tests.settings import evaluate

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def function():
    return small_models.affine()


def frozen_graph_def():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2], "images/x")
        tf.nn.softmax(x * 3.0, name="scores")
    return graph


def test_a_function_with_a_signature(function):
    f, w, b = function
    m = model.open(f)
    assert list(m.inputs) == ["x"]
    assert list(m.outputs) == ["y"]
    assert m.signature == "serving_default"
    np.testing.assert_array_equal(m.run(x=X)["y"], f(X)["y"])
    assert m.variables["w"] is w
    assert m.variables["b"] is b
    assert not m.variables["b"].trainable


def test_a_concrete_function_and_a_signature_name(function):
    f, *_ = function
    concrete = f.get_concrete_function()
    m = model.open(concrete, signature="predict")
    assert m.signature == "predict"
    assert list(m.signatures) == ["predict"]
    np.testing.assert_array_equal(m.run(x=X)["y"], f(X)["y"])


def test_positional_results_are_called_as_tensorflow_calls_them():
    f = tf.function(lambda a, b: (a + b, [a - b]))
    spec = tf.TensorSpec([2])
    m = model.open(f.get_concrete_function(spec, spec))
    assert list(m.inputs) == ["a", "b"]
    assert list(m.outputs) == ["output_0", "output_1"]
    result = m.run(a=[3.0, 4.0], b=[1.0, 2.0])
    np.testing.assert_array_equal(result["output_0"], [4.0, 6.0])
    np.testing.assert_array_equal(result["output_1"], [2.0, 2.0])


def test_outputs_keep_the_order_of_the_dictionary():
    f = tf.function(lambda x: {"z": x, "a": 2 * x}, [tf.TensorSpec([], name="x")])
    m = model.open(f)
    assert list(m.run(x=1.0).items()) == [("z", 1.0), ("a", 2.0)]


def test_names_in_a_file_of_version_1_are_counted(tmp_path):
    # The file holds maps, which each process reads in an order of its own.
    v1 = tf.compat.v1
    predict = v1.saved_model.signature_def_utils.predict_signature_def
    graph = tf.Graph()
    with graph.as_default(), v1.Session(graph=graph) as session:
        inputs = {f"input_{i}": v1.placeholder(tf.float32, []) for i in range(12)}
        outputs = {f"output_{i}": 2.0 * t for i, t in enumerate(inputs.values())}
        builder = v1.saved_model.Builder(str(tmp_path / "counted"))
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": predict(inputs, outputs)}
        )
        builder.save()
    m = model.open(tmp_path / "counted")
    assert list(m.inputs) == list(inputs)
    assert list(m.outputs) == list(outputs)


def test_a_graph_def_takes_placeholders_and_ends():
    graph = frozen_graph_def()
    for source in (graph, graph.as_graph_def()):
        m = model.open(source)
        assert list(m.inputs) == ["images/x"]
        assert list(m.outputs) == ["scores"]
        result = m.run(**{"images/x": X})["scores"]
        (expected,) = evaluate(graph, ["scores:0"], {"images/x:0": X})
        np.testing.assert_array_equal(result, expected)


def test_the_graph_def_is_not_changed():
    graph_def = small_models.version_1_graph(use_resource=False)[0].as_graph_def()
    before = graph_def.SerializeToString(deterministic=True)
    model.open(graph_def)
    assert graph_def.SerializeToString(deterministic=True) == before


def test_ends_of_a_graph_can_be_named():
    m = model.open(
        frozen_graph_def(), inputs={"x": "images/x"}, outputs={"logits": "mul:0"}
    )
    np.testing.assert_array_equal(m.run(x=X)["logits"], X * 3)


@parameterized.expand(["pb", "pbtxt"])
def test_a_file_with_a_graph(suffix):
    import tempfile

    graph = frozen_graph_def()
    with tempfile.TemporaryDirectory() as folder:
        name = f"graph.{suffix}"
        tf.io.write_graph(graph, folder, name, as_text=suffix == "pbtxt")
        m = model.open(f"{folder}/{name}")
    (expected,) = evaluate(graph, ["scores:0"], {"images/x:0": X})
    np.testing.assert_array_equal(m.run(**{"images/x": X})["scores"], expected)


def test_a_graph_with_a_session_has_its_values():
    graph, y = small_models.version_1_graph(use_resource=True)
    session = tf.compat.v1.Session(graph=graph)
    with graph.as_default():
        session.run(tf.compat.v1.global_variables_initializer())
    expected = session.run(y, {"in/x:0": [[1.0, 2.0, 3.0]]})
    m = model.open(graph, outputs=["y"], session=session)
    session.close()
    np.testing.assert_array_equal(m.run(**{"in/x": [[1, 2, 3]]})["y"], expected)
    assert [n for n, v in m.variables.items() if not v.trainable] == ["n"]


def test_variables_of_a_graph_without_values_are_named():
    graph, _ = small_models.version_1_graph(use_resource=False)
    m = model.open(graph.as_graph_def(), outputs=["y"])
    with pytest.raises(model.ModelError, match=r"'w'.*no value.*restore"):
        m.run(**{"in/x": [[1.0, 2.0, 3.0]]})


def test_a_checkpoint_gives_the_values(tmp_path):
    graph, y = small_models.version_1_graph(use_resource=False)
    prefix = str(tmp_path / "model.ckpt")
    with graph.as_default(), tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        expected = session.run(y, {"in/x:0": [[1.0, 2.0, 3.0]]})
        # By parts, as the graph has them: a Saver joins them.
        values = {v.op.name: session.run(v) for v in tf.compat.v1.global_variables()}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable(n, initializer=v) for n, v in values.items()
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(variables).save(session, prefix)
    m = model.open(graph.as_graph_def(), outputs=["y"])
    assert m.restore(prefix) == []
    np.testing.assert_array_equal(m.run(**{"in/x": [[1, 2, 3]]})["y"], expected)


def test_a_keras_model_by_its_names():
    tf.keras.utils.set_random_seed(1)
    a = tf.keras.Input([4], name="a")
    b = tf.keras.Input([4], name="b")
    one = tf.keras.layers.Dense(3, name="one")(a)
    two = tf.keras.layers.Dense(2, name="two")(b)
    net = tf.keras.Model({"a": a, "b": b}, [one, two])
    m = model.open(net)
    assert list(m.inputs) == ["a", "b"]
    assert list(m.outputs) == ["one", "two"]
    assert "one/kernel" in m.variables
    values = {k: np.random.default_rng(0).normal(size=(2, 4)) for k in "ab"}
    values = {k: v.astype(np.float32) for k, v in values.items()}
    for found, expected in zip(m.run(**values).values(), net(values), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_keras_file(tmp_path):
    net = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2)])
    net.save(tmp_path / "net.keras")
    m = model.open(tmp_path / "net.keras")
    x = np.ones((1, 3), np.float32)
    (found,) = m.run(**dict.fromkeys(m.inputs, x)).values()
    np.testing.assert_array_equal(found, net(x))


def test_a_built_subclass_of_keras_model():
    class Net(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    net = Net()
    with pytest.raises(model.ModelError, match=r"does not say what inputs"):
        model.open(net)
    x = np.ones((1, 3), np.float32)
    expected = net(x)
    (found,) = model.open(net).run(inputs=x).values()
    np.testing.assert_array_equal(found, expected)


def test_a_saved_model_with_two_signatures(tmp_path):
    module = small_models.save_two_signatures(tmp_path / "m")
    with pytest.raises(model.ModelError, match=r"several signatures.*decode.*encode"):
        model.open(tmp_path / "m")
    m = model.open(tmp_path / "m", signature="encode")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    code = m.run(x=x)["code"]
    np.testing.assert_array_equal(code, module.encode(x)["code"])
    other = m.signatures["decode"]
    np.testing.assert_array_equal(other.run(code=code)["x"], module.decode(code)["x"])
    m.variables["weight"].assign(np.zeros((3, 2)))
    assert not other.run(code=code)["x"].any()


@parameterized.expand([("ref", False), ("resource", True)])
def test_a_saved_model_of_version_1(_, use_resource):
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        vocabulary = pathlib.Path(folder) / "words.txt"
        vocabulary.write_text("a\nb\nc\n")
        path = pathlib.Path(folder) / "saved"
        expected = small_models.save_version_1(path, use_resource, vocabulary)
        vocabulary.unlink()
        m = model.open(path)
        assert [p.name for p in m.assets] == ["words.txt"]
        found = m.run(x=[[1.0, 2.0, 3.0]])["y"]
        ids = m.signatures["ids"].run(words=["b", "zzz", "c"])["ids"]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(ids, [1, 3, 2])
    assert set(m.variables) == {"w", "p/part_0", "p/part_1", "n"}
    assert not m.variables["n"].trainable
    assert m.variables["w"].trainable


def test_a_loop_of_version_1():
    graph = tf.Graph()
    with small_models.control_flow_v1(), graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [], "x")
        loop = tf.compat.v1.while_loop(lambda a: a < 100.0, lambda a: a * 2, [x])
        tf.identity(loop, name="y")
    assert "Enter" in {op.type for op in graph.get_operations()}
    m = model.open(graph.as_graph_def())
    assert float(m.run(x=3.0)["y"]) == 192.0


def test_inlining_can_be_left_out():
    inner = tf.function(lambda x: x * 2)
    f = tf.function(lambda x: {"y": inner(x)}, [tf.TensorSpec([], name="x")])
    types = {
        inline: {op.type for op in model.open(f, inline=inline).graph.get_operations()}
        for inline in (True, False)
    }
    assert "PartitionedCall" not in types[True]
    assert "PartitionedCall" in types[False]
    assert float(model.open(f, inline=False).run(x=2.0)["y"]) == 4.0


def test_calls_that_are_not_inlined_are_told():
    inner = tf.function(lambda x: x * 2, jit_compile=True)
    f = tf.function(lambda x: {"y": inner(x)}, [tf.TensorSpec([], name="x")])
    (kept,) = model.open(f).kept_calls
    assert "XLA" in kept.reason


REFUSED = [
    ("no_model", lambda: 3, r"cannot open a builtins.int; pass a SavedModel directory"),
    ("no_signature", lambda: tf.function(lambda x: x), r"has no input signature"),
    ("missing", lambda: "/does/not/exist", r"/does/not/exist.*not exist"),
    ("missing_file", lambda: "/does/not/exist.pb", r"exist"),
]


@parameterized.expand(REFUSED)
def test_what_cannot_be_opened(_, source, message):
    with pytest.raises(model.ModelError, match=message):
        model.open(source())


def test_an_unknown_signature(tmp_path):
    small_models.save_two_signatures(tmp_path / "m")
    with pytest.raises(model.ModelError, match=r"no signature 'x'.*decode.*encode"):
        model.open(tmp_path / "m", signature="x")


def test_an_unknown_op_is_named():
    graph_def = frozen_graph_def().as_graph_def()
    graph_def.node[-1].op = "NoSuchOp"
    with pytest.raises(model.ModelError, match=r"NoSuchOp"):
        model.open(graph_def)


@parameterized.expand([("inputs",), ("outputs",)])
def test_an_unknown_end(kind):
    with pytest.raises(model.ModelError, match=r"'nothing'.*(images/x|scores)"):
        model.open(frozen_graph_def(), **{kind: ["nothing"]})


def test_eager_execution_is_needed():
    with tf.Graph().as_default(), pytest.raises(model.ModelError, match="eager"):
        model.open(frozen_graph_def())


def test_opened_graphs_verify(function):
    ge.verify(model.open(function[0]).graph)


def test_colocation_that_is_no_text_is_forgotten():
    graph_def = frozen_graph_def().as_graph_def()
    graph_def.node[-1].attr["_class"].list.s.append(b"loc:@\xff")
    m = model.open(graph_def)
    assert list(m.outputs) == ["scores"]


@pytest.mark.parametrize("signatures", [object(), {"encode": object()}])
def test_signatures_that_are_none_are_refused(tmp_path, monkeypatch, signatures):
    """As a damaged file may have them."""
    small_models.save_two_signatures(tmp_path / "m")
    loaded = tf.Module()
    loaded.signatures = signatures
    monkeypatch.setattr(
        "geutil.model.files.loading.load_saved_model", lambda *_: loaded
    )
    with pytest.raises(model.ModelError, match="the file is damaged"):
        model.open(tmp_path / "m", signature="encode")
