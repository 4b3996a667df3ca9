"""Models that version 1 wrote, in a process with its behaviour."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from tests.model.body_samples import gradients
from tests.model.networks import fresh, version_1
from tests.model.networks.version_1 import IMAGES, WORDS
from tests.processes import run_python

PARTS = ["net/weights/part_0", "net/weights/part_1"]
TRAINED = ["net/beta", "net/gamma", "net/kernel", *PARTS]
MOVING = ["net/mean", "net/variance"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("version_1")
    child = run_python("-m", version_1.__name__, folder)
    assert child.returncode == 0, child.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def m(folder):
    """The SavedModel with ref variables, opened; nobody changes it."""
    return geutil_model.open(folder / "ref")


@pytest.fixture
def no_garbage_collection():
    """Functions of graphs that are not needed any more stay known to TensorFlow."""
    gc.disable()
    yield
    gc.enable()


kinds = pytest.mark.parametrize("kind", ["resource", "ref"])


def expected(folder, kind):
    return dict(np.load(folder / f"{kind}.npz"))


def loops(m):
    return [op for op in m.graph.get_operations() if op.type == "NextIteration"]


def run(signature, **inputs):
    return "run", signature, inputs


@kinds
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_saved_model_is_opened_and_saved(folder, kind, tmp_path):
    m = geutil_model.open(folder / kind)
    assert list(m.signatures) == ["ids", "serving_default"]
    assert loops(m)
    values = expected(folder, kind)
    scores = m.run(images=IMAGES)["scores"]
    np.testing.assert_allclose(scores, values["scores"], rtol=1e-5, atol=1e-6)
    loaded = tf.saved_model.load(str(folder / kind)).signatures["serving_default"]
    of_tensorflow = loaded(images=tf.constant(IMAGES))["scores"]
    np.testing.assert_array_equal(scores, of_tensorflow)
    ids = m.signatures["ids"].run(words=WORDS)["ids"]
    np.testing.assert_array_equal(ids, values["ids"])
    m.save(tmp_path / "saved")
    found, ids, variables = fresh.do(
        tmp_path / "saved",
        [
            run("serving_default", images=IMAGES),
            run("ids", words=WORDS),
            ("variables",),
        ],
    )
    np.testing.assert_array_equal(found["scores"], scores)
    np.testing.assert_array_equal(ids["ids"], values["ids"])
    assert {n: t for n, (_, t) in variables.items()} == {
        **dict.fromkeys(TRAINED, True),
        **dict.fromkeys(MOVING, False),
    }


def test_parts_are_cut_and_spliced_around_a_loop(m, folder, tmp_path):
    head = m.cut(outputs={"flat": "net/flat"})
    tail = m.cut(inputs={"flat": "net/flat"})
    assert sorted(head.variables) == sorted({*TRAINED[:3], *MOVING})
    assert sorted(tail.variables) == PARTS
    assert loops(head) and not loops(tail)
    words = geutil_model.open(folder / "ref", signature="ids").cut()
    assert not words.variables
    assert [p.name for p in words.assets] == ["ref.txt"]
    spec = tf.TensorSpec([None, 8, 8, 3], tf.uint8, "bytes")
    scale = tf.function(
        lambda bytes: {"images": tf.cast(bytes, tf.float32) / 9}, [spec]
    )
    scores = tf.TensorSpec([None, 6], name="scores")
    label = tf.function(lambda scores: {"label": tf.argmax(scores, -1)}, [scores])
    merged = m.prepend(geutil_model.open(scale)).append(geutil_model.open(label))
    parts = {"head": head, "tail": tail, "words": words, "merged": merged}
    for name, part in parts.items():
        part.save(tmp_path / name)
    pixels = np.abs(IMAGES * 9).astype(np.uint8)
    (flat,), (ids,), (labels,) = fresh.do_all(
        (tmp_path / "head", [run("serving_default", images=IMAGES)]),
        (tmp_path / "words", [run("ids", words=WORDS)]),
        (tmp_path / "merged", [run("serving_default", bytes=pixels)]),
    )
    np.testing.assert_array_equal(
        fresh.run(tmp_path / "tail", flat)["scores"], m.run(images=IMAGES)["scores"]
    )
    assert ids["ids"].tolist() == [1, 3, 2]
    wanted = m.run(images=pixels.astype(np.float32) / 9)["scores"].argmax(-1)
    np.testing.assert_array_equal(labels["label"], wanted)


def test_two_copies_of_a_loop_are_spliced(m):
    """The frames of loops must be kept apart."""
    spec = tf.TensorSpec([None, 6], name="scores")
    back = tf.function(
        lambda scores: {"images": tf.reshape(tf.tile(scores, [1, 32]), [-1, 8, 8, 3])},
        [spec],
    )
    chain = m.prepend(geutil_model.open(back)).prepend(m)
    first = m.run(images=IMAGES)["scores"]
    second = m.run(images=np.tile(first, [1, 32]).reshape(-1, 8, 8, 3))["scores"]
    np.testing.assert_array_equal(chain.run(images=IMAGES)["scores"], second)
    assert len(loops(chain)) == 2 * len(loops(m))


@kinds
def test_a_frozen_graph_and_a_graph_with_its_checkpoint(folder, kind):
    values = expected(folder, kind)["scores"]
    frozen = geutil_model.open(
        folder / f"{kind}_frozen.pb",
        inputs={"images": "in/images:0"},
        outputs={"scores": "net/scores:0"},
    )
    assert not frozen.variables and loops(frozen)
    found = frozen.run(images=IMAGES)["scores"]
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)
    m = geutil_model.open(
        folder / f"{kind}_raw.pb",
        inputs={"images": "in/images"},
        outputs={"scores": "net/scores"},
    )
    with pytest.raises(geutil_model.ModelError, match=r"have no value.*restore"):
        m.run(images=IMAGES)
    # The checkpoint has the whole of which these are the parts.
    assert m.restore(folder / f"{kind}.ckpt") == PARTS
    whole = tf.train.load_variable(str(folder / f"{kind}.ckpt"), "net/weights")
    for name, value in zip(PARTS, np.split(whole, 2, axis=1), strict=True):
        m.variables[name].assign(value)
    found = m.run(images=IMAGES)["scores"]
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)


def test_a_graph_brings_the_file_of_its_table_along(folder, tmp_path):
    raw = tf.compat.v1.GraphDef.FromString((folder / "ref_raw.pb").read_bytes())
    file = tmp_path / "words.txt"
    file.write_text("a\nb\nc\n")
    for node in raw.node:
        value = node.attr["value"].tensor if node.op == "Const" else None
        if value is not None and value.string_val == [str(folder / "ref.txt").encode()]:
            value.string_val[0] = str(file).encode()
    ends = {
        "inputs": {"words": "words:0"},
        "outputs": {"ids": "hash_table_Lookup/SelectV2:0"},
    }
    m = geutil_model.open(raw, **ends)
    assert m.assets == (file,)
    m.cut().save(tmp_path / "saved")
    file.unlink()
    outputs = fresh.run(tmp_path / "saved", {"words": WORDS})
    assert outputs["ids"].tolist() == [1, 3, 2]
    # Without the file the rest can still be opened, and the table cannot.
    assert geutil_model.open(raw, outputs=["net/scores"]).variables
    with pytest.raises(geutil_model.ModelError, match=r"words\.txt"):
        geutil_model.open(raw, **ends)


def test_a_loop_is_not_differentiated(m):
    """TensorFlow needs what the Python of version 1 knew of the loop."""
    f = m.to_function()
    with (
        tf.GradientTape(),
        pytest.raises(
            geutil_model.ModelError, match="cannot differentiate the loop of version 1"
        ),
    ):
        f(IMAGES)
    assert f(IMAGES)["scores"].shape == (2, 6)
    tail = m.cut(inputs=["net/flat"]).to_function()
    part = m.variables["net/weights/part_0"]
    x = np.ones([2, 64], np.float32)
    _, slope = gradients(lambda x: tail(x)["scores"], x, [part])
    np.testing.assert_allclose(slope, np.full([64, 3], 2.0))
