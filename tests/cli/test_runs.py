"""Models in other formats, and models that are run on data."""

import json

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.interpreter import new_interpreter
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = [needs_eager]


@pytest.fixture(scope="module")
def place(folder, tmp_path_factory):
    """Return a directory with a model of Keras, what else it computes, and data."""
    place = tmp_path_factory.mktemp("running")
    tf.keras.utils.set_random_seed(1)
    network = tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 3], name="image"),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(5, name="last"),
        ]
    )
    for name in ("net.keras", "net.h5"):
        network.save(place / name)
    with np.load(folder / "data.npz") as archive:
        images = archive["image"]
    np.savez(place / "data.npz", image=images)
    np.save(place / "expected.npy", network(images).numpy())
    return place


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return a directory with a model that TensorFlow Lite has no kernels for."""
    place = tmp_path_factory.mktemp("words")

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def network(x):
        text = tf.strings.as_string(x)
        return {"file": text, "empty": x[:0], "total": tf.reduce_sum(x)}

    model.open(network).save(place / "net")
    samples = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.savez(place / "data.npz", x=samples)
    return place


SOURCES = ["net.keras", "net.h5"]
TARGETS = ["net", "net.pb", "net.pbtxt", "net.tflite"]


@pytest.mark.parametrize(("source", "target"), crossed(SOURCES, TARGETS, together=1))
def test_what_is_converted_computes_the_same_and_is_read(
    geutil, place, tmp_path, source, target
):
    file = tmp_path / target
    said = geutil("convert", place / source, "-o", file)
    assert (said.code, said.err) == (0, "")
    assert "largest difference from what was read: " in said.out
    out = tmp_path / "out.npz"
    data = ["--data", place / "data.npz"]
    geutil.done("run", file, *data, "-o", out)
    with np.load(out) as archive:
        (found,) = (archive[name] for name in archive.files)
    expected = np.load(place / "expected.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for read in (place / source, file)[: 1 + (target != "net.tflite")]:
        assert len(geutil.json("ops", read, "--type", "Conv2D")) == 1
        found = geutil.json("inspect", read, "--scopes")
        assert len(found["scopes"]) > 1
        assert found["bytes_total"] > 1000
        geutil.done("diff", read, read)
        geutil.done("check", place / source, read, "--samples", "1")


def test_layers_are_written_of_layers(geutil, place, tmp_path):
    for source in SOURCES:
        target = tmp_path / f"{source}.keras"
        said = geutil.json("convert", place / source, "-o", target)
        assert said["written"]["format"] == "keras"
        with np.load(place / "data.npz") as archive:
            found = tf.keras.models.load_model(target)(archive["image"])
        np.testing.assert_array_equal(found, np.load(place / "expected.npy"))


def test_ops_that_tensorflow_lite_lacks(geutil, words, tmp_path):
    target = tmp_path / "net.tflite"
    said = geutil("convert", words / "net", "-o", target, "--tf-ops")
    assert (said.code, said.err) == (0, "")
    assert b"FlexAsString" in target.read_bytes()
    said = geutil("run", target, "--data", words / "data.npz")
    assert said.code == 1
    assert "has ops of TensorFlow (" in said.err


def test_what_outputs_hold(geutil, place, folder):
    ((row,),) = geutil.tables("run", place / "net.keras", "--data", place / "data.npz")
    assert list(row) == ["name", "dtype", "shape", "min", "max", "mean"]
    name, dtype, shape, *numbers = row.values()
    expected = np.load(place / "expected.npy")
    assert (name, dtype, shape) == ("last", "float32", "[6,5]")
    wanted = [expected.min(), expected.max(), expected.mean()]
    assert [float(n) for n in numbers] == pytest.approx(wanted, rel=1e-5)
    parts = ["--batch", "4", "--json"]
    told = geutil("run", place / "net.keras", "--data", place / "data.npz", *parts)
    (entry,) = json.loads(told.out)["outputs"]
    assert [entry[key] for key in ("min", "max", "mean")] == pytest.approx(
        wanted, rel=1e-5
    )
    assert entry["shape"] == [6, 5]


def test_strings_nothing_and_totals(geutil, words, tmp_path):
    target, data = tmp_path / "out.npz", ["--data", words / "data.npz"]
    (told,) = geutil.tables("run", words / "net", *data, "-o", target)
    rows = {name: others for name, *others in (row.values() for row in told)}
    assert rows["file"] == ["string", "[6,4]", "-", "-", "-"]
    assert rows["empty"] == ["float32", "[0,4]", "-", "-", "-"]
    assert rows["total"] == ["float32", "[]", "276", "276", "276"]
    with np.load(target) as archive:
        assert archive["file"][0, 1] == b"1.000000"
    batches = geutil("run", words / "net", *data, "--batch", "4")
    assert batches.code == 1
    assert "with --batch 6" in batches.err


def test_numbers_that_are_not_finite_are_counted(geutil, tmp_path):
    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def network(x):
        return {"root": tf.sqrt(x), "ratio": 1 / x, "same": x}

    model.open(network).save(tmp_path / "net")
    np.savez(tmp_path / "x.npz", x=np.float32([[-1, 0, 4], [-4, 9, 1]]))
    call = ["run", tmp_path / "net", "--data", tmp_path / "x.npz"]
    line = (
        "not finite: output 'ratio' holds 1 infinite of 6 values; output 'root' holds "
        "2 NaN of 6 values"
    )
    assert geutil(*call).out.splitlines()[4:] == [line]
    told = geutil.json(*call, "--against", tmp_path / "net")
    counts = {each["name"]: (each["nan"], each["infinite"]) for each in told["outputs"]}
    assert counts == {"ratio": (0, 1), "root": (2, 0), "same": (0, 0)}
    assert [each["motion"]["nan"] for each in told["differences"]] == [0, 2, 0]
    # Two networks that are broken alike are equal.
    said = geutil("check", tmp_path / "net", tmp_path / "net", *call[2:])
    assert said.code == 0
    *_, ratio, root, same = said.out.splitlines()
    assert ratio.endswith("over 2 samples; holds 1 infinite")
    assert root.endswith("holds 2 NaN")
    assert "holds" not in same


def test_outputs_are_compared(geutil, place, folder, tmp_path):
    data = ["--data", place / "data.npz"]
    first, other = place / "net.keras", tmp_path / "other"
    m = model.open(str(first))
    with m.graph.as_default():
        m.outputs["last"] = m.outputs["last"] + 0.25
    m.save(other)
    assert geutil.json("check", first, other, code=1)["equal"] is False
    geutil.done("run", first, *data, "--against", first)
    said = geutil("run", first, *data, "--against", other)
    assert said.code == 1
    assert "last: largest difference 0.25 absolute" in said.out
    assert "of sample" not in said.out
    assert "over 6 samples" in said.out
    told = geutil.json("run", first, *data, "--against", other, code=1)
    assert told["equal"] is False
    assert told["differences"][0]["absolute"] == pytest.approx(0.25, rel=1e-5)
    near = ["--against", other, "--atol"]
    geutil.done("run", first, *data, *near, "0.26")
    assert geutil("run", first, *data, *near, "0.24").code == 1


def test_a_file_is_run_in_the_steps_of_its_own(geutil, place, tmp_path):
    file, out = tmp_path / "q.tflite", tmp_path / "out.npz"
    data = ["--data", place / "data.npz"]
    geutil.done("quantize", place / "net.keras", "-o", file, *data)
    said = geutil("run", file, *data, "-o", out, "--against", place / "net.keras")
    assert said.code == 1
    assert "(too much)" in said.out
    near = ["--against", place / "net.keras", "--atol", "0.05"]
    geutil.done("run", file, *data, *near)
    # By hand, one sample at a time: integers in, integers out.
    interpreter = new_interpreter(file.read_bytes())
    interpreter.allocate_tensors()
    (taken,), (given,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    with np.load(out) as found, np.load(place / "data.npz") as archive:
        for image, row in zip(archive["image"], found["last"], strict=True):
            scale, zero = taken["quantization"]
            stored = np.clip(np.round(image / scale) + zero, -128, 127)
            interpreter.set_tensor(taken["index"], stored[None].astype(np.int8))
            interpreter.invoke()
            scale, zero = given["quantization"]
            levels = interpreter.get_tensor(given["index"])[0].astype(np.float32)
            np.testing.assert_allclose(row, (levels - zero) * scale, rtol=1e-6)


def test_a_model_of_one_batch_size(geutil, place, tmp_path):
    data = ["--data", place / "data.npz"]
    for size, code in (("2", 0), ("4", 1)):
        fixed = tmp_path / f"fixed{size}"
        geutil.done("batch-size", place / "net.keras", size, "-o", fixed)
        for name in (fixed, tmp_path / f"fixed{size}.tflite"):
            if name is not fixed:
                geutil.done("convert", fixed, "-o", name)
            said = geutil("run", name, *data, "--against", place / "net.keras")
            assert said.code == code, said
            assert ("a multiple of 4 samples" in said.err) is bool(code)


def test_names_that_python_cannot_call(geutil, tmp_path):
    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def network(x):
        return {"a": x + 1.0, "b": x * 3.0}

    renamed = model.open(network).rename({"x": "in/x"}, {"a": "to/a", "b": "in"})
    renamed.save(tmp_path / "net.pb", "graph_def")
    file, data = tmp_path / "net.tflite", tmp_path / "data.npz"
    said = geutil("convert", tmp_path / "net.pb", "-o", file)
    assert "largest difference from what was read: 0, on 2" in said.out
    np.savez(data, **{"in/x": np.ones([3, 2], np.float32)})
    against = ["--against", tmp_path / "net.pb", "--json"]
    said = geutil.done("run", file, "--data", data, *against)
    told = json.loads(said)
    means = {entry["name"]: entry["mean"] for entry in told["outputs"]}
    assert means == {"to/a": 2.0, "in": 3.0}
    assert [each["absolute"] for each in told["differences"]] == [0.0, 0.0]
    # Files of geutil.quantize have other names, which mean the same.
    options = ["--scheme", "float16", "--force"]
    geutil.done("quantize", tmp_path / "net.pb", "-o", file, *options)
    said = geutil.done("run", file, "--data", data, *against)
    told = json.loads(said)
    means = {entry["name"]: entry["mean"] for entry in told["outputs"]}
    assert means == {"to_a": 2.0, "in_": 3.0}
