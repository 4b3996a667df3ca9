from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.model import small_models

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def opened():
    function, w, b = small_models.affine()
    m = model.open(function)
    m.keep = (function, w, b)
    return m


def test_variables_stay_variables(opened, tmp_path):
    assert opened.save(tmp_path / "m") == tmp_path / "m"
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    assert [v.name for v in loaded.variables] == ["w:0", "b:0"]
    assert [v.name for v in loaded.trainable_variables] == ["w:0"]
    assert [v.trainable for v in loaded.variables] == [True, False]
    f = loaded.signatures["serving_default"]
    np.testing.assert_array_equal(f(x=tf.constant(X))["y"], opened.run(x=X)["y"])
    loaded.variables[0].assign([0.0, 0.0])
    np.testing.assert_array_equal(f(x=tf.constant(X))["y"], [[1, -1], [1, -1]])


def test_edits_are_saved(opened, tmp_path):
    with opened.graph.as_default():
        opened.outputs["y"] = tf.negative(opened.outputs["y"])
    opened.save(tmp_path / "m")
    f = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    np.testing.assert_array_equal(f(x=tf.constant(X))["y"], opened.run(x=X)["y"])


def test_untouched_signatures_are_kept(tmp_path):
    module = small_models.save_two_signatures(tmp_path / "m")
    m = model.open(tmp_path / "m", signature="encode")
    with m.graph.as_default():
        m.outputs["code"] = m.outputs["code"] * 2.0
    m.save(tmp_path / "out")
    assert set(m.opened_signatures()) == {"encode"}
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    x = tf.constant(np.arange(6).reshape(2, 3), tf.float32)
    code = module.encode(x)["code"]
    encode, decode = loaded.signatures["encode"], loaded.signatures["decode"]
    np.testing.assert_array_equal(encode(x=x)["code"], code * 2)
    np.testing.assert_array_equal(decode(code=code)["x"], module.decode(code)["x"])
    (weight,) = loaded.variables
    weight.assign(tf.zeros_like(weight))
    assert not encode(x=x)["code"].numpy().any()
    assert not decode(code=code)["x"].numpy().any()


def test_an_edited_signature_that_is_not_the_opened_one(tmp_path):
    small_models.save_two_signatures(tmp_path / "m")
    m = model.open(tmp_path / "m", signature="encode")
    decode = m.signatures["decode"]
    decode.outputs["x"] = decode.inputs["code"]
    m.save(tmp_path / "out")
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    code = tf.constant([[3.0, 4.0]])
    np.testing.assert_array_equal(loaded.signatures["decode"](code=code)["x"], code)


def test_tables_and_assets(tmp_path):
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\nc\n")
    initializer = tf.lookup.TextFileInitializer(
        str(vocabulary), tf.string, -2, tf.int64, -1
    )
    table = tf.lookup.StaticHashTable(initializer, -1)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "words")])
    def look_up(words):
        return {"ids": table.lookup(words)}

    module = tf.Module()
    module.table, module.look_up = table, look_up
    tf.saved_model.save(module, str(tmp_path / "m"), {"serving_default": look_up})
    for number, source in enumerate((tmp_path / "m", look_up)):
        m = model.open(source)
        assert m.run(words=["c", "x"])["ids"].tolist() == [2, -1]
        out = m.save(tmp_path / f"out{number}")
        assert [p.name for p in (out / "assets").iterdir()] == ["words.txt"]
    vocabulary.unlink()
    for number in range(2):
        loaded = tf.saved_model.load(str(tmp_path / f"out{number}"))
        ids = loaded.signatures["serving_default"](words=tf.constant(["c", "x"]))["ids"]
        assert ids.numpy().tolist() == [2, -1]


@pytest.fixture
def no_garbage_collection():
    """Functions of graphs that are not needed any more stay known to TensorFlow."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_version_1_models_become_models_of_version_2(tmp_path):
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\nc\n")
    expected = small_models.save_version_1(tmp_path / "m", False, vocabulary)
    vocabulary.unlink()
    model.open(tmp_path / "m").save(tmp_path / "out")
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    x = tf.constant([[1.0, 2.0, 3.0]])
    found = loaded.signatures["serving_default"](x=x)["y"]
    np.testing.assert_array_equal(found, expected)
    ids = loaded.signatures["ids"](words=tf.constant(["b", "zzz"]))["ids"]
    assert ids.numpy().tolist() == [1, 3]
    assert {v.name for v in loaded.trainable_variables} == {
        "w:0",
        "p/part_0:0",
        "p/part_1:0",
    }


def test_a_resource_without_an_owner_is_named(tmp_path):
    handle = tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        size = tf.raw_ops.LookupTableSizeV2(table_handle=handle)
        return {"y": x + tf.cast(size, tf.float32)}

    m = model.open(function)
    with pytest.raises(model.ModelError, match=r"no object in memory owns"):
        m.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_unknown_format(opened, tmp_path):
    with pytest.raises(model.ModelError, match=r"unknown format 'onnx'; .*saved_model"):
        opened.save(tmp_path / "m", "onnx")


def test_what_exists_is_kept(opened, tmp_path):
    opened.save(tmp_path / "m")
    before = sorted(p.stat().st_mtime_ns for p in (tmp_path / "m").rglob("*"))
    with pytest.raises(model.ModelError, match="exists; pass overwrite=True"):
        opened.save(tmp_path / "m")
    assert sorted(p.stat().st_mtime_ns for p in (tmp_path / "m").rglob("*")) == before
    opened.save(tmp_path / "m", overwrite=True)


def test_a_model_can_be_saved_over_the_one_it_was_opened_from(tmp_path):
    small_models.save_two_signatures(tmp_path / "m")
    for _ in range(2):
        m = model.open(tmp_path / "m", signature="encode")
        with m.graph.as_default():
            m.outputs["code"] = m.outputs["code"] * 2.0
        m.save(tmp_path / "m", overwrite=True)
    code = model.open(tmp_path / "m", signature="encode").run(x=[[1.0, 0.0, 0.0]])
    assert code["code"].tolist() == [[8.0, 0.0]]


def test_a_failure_leaves_nothing(opened, tmp_path, monkeypatch):
    def fail(_root, path, **_):
        tf.io.gfile.makedirs(path)
        raise OSError(28, "No space left on device")

    opened.save(tmp_path / "m")
    monkeypatch.setattr(tf.saved_model, "save", fail)
    with pytest.raises(OSError, match="No space"):
        opened.save(tmp_path / "m", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert tf.saved_model.load(str(tmp_path / "m")).signatures


ORDERS = {
    "replace_op": lambda m: m.replace_op("Relu", "Relu6"),
    "set_batch_size": lambda m: m.set_batch_size(2),
    "freeze": lambda m: m.freeze(),
    "thaw": lambda m: m.freeze().thaw("w"),
    "strip_training": lambda m: m.strip_training(),
    "rename": lambda m: m.rename(outputs={"z": "y"}).rename(outputs={"y": "z"}),
}


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """A SavedModel whose signatures and outputs are in no alphabetical order."""
    module = tf.Module()
    module.w = tf.Variable([1.0, -2.0], name="w")

    def function(scale):
        def call(x):
            y = tf.nn.relu(x * module.w) * scale
            names = ("z", "a", *(f"o_{i}" for i in range(11)))
            return {name: y * i for i, name in enumerate(names)}

        return tf.function(call, [tf.TensorSpec([None, 2], name="x")], autograph=False)

    signatures = {n: function(i + 1.0) for i, n in enumerate(("u", "c", "v", "a"))}
    path = tmp_path_factory.mktemp("ordered") / "m"
    tf.saved_model.save(module, str(path), signatures)
    return path


@pytest.mark.parametrize("signature", ["u", "v"])
@pytest.mark.parametrize("method", ORDERS)
def test_signatures_and_outputs_keep_their_order(ordered, method, signature):
    m = model.open(ordered, signature=signature)
    changed = ORDERS[method](m)
    assert list(changed.signatures) == ["u", "c", "v", "a"]
    # A SavedModel holds a map of outputs, which has no order.
    outputs = ["a", *(f"o_{i}" for i in range(11)), "z"]
    for name in changed.signatures:
        assert list(changed.signatures[name].outputs) == outputs


def test_a_signature_that_is_renamed_keeps_its_place(ordered):
    renamed = model.open(ordered, signature="c").rename(signature="first")
    assert list(renamed.signatures) == ["u", "first", "v", "a"]
    assert renamed.signatures["first"] is renamed
