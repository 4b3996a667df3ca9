"""Each sample of a model that does more is told, and does what is told."""

import contextlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.model import powers
from testdata.powers import FILES, HIDDEN, NOT_RUN, PREPARED, SAMPLES
from tests.settings import needs_eager
from tests.thorough import chosen

pytestmark = needs_eager
READ = "read files", "list folders"


def markers(folder, samples):
    """Return the path of a marker for each sample, in a folder of its own."""
    made = {name: folder / "marked" / name.replace(" ", "_") for name in samples}
    for path in made.values():
        path.mkdir(parents=True)
    return {name: path / "marker" for name, path in made.items()}


def marked(marker):
    return bool(list(marker.parent.iterdir()))


# Their paths come through a queue, a dataset, a graph or a resource.
NO_PATH = {
    *("ImportEvent", "DatasetFromGraph", "WholeFileReaderV2", "TextLineReaderV2"),
    *("TFRecordDataset", "TFRecordReaderV2", "FixedLengthRecordReaderV2"),
}


def test_ops_are_told_and_do_what_is_told(tmp_path):
    """One model has a signature for each of them."""
    places = markers(tmp_path, SAMPLES)

    def function(name):
        def call(x):
            # Resources have names of ops, and none is shared.
            with tf.name_scope(name):
                return {"y": SAMPLES[name][1](str(places[name]), x)}

        return tf.function(call, [tf.TensorSpec([], name="x")], autograph=False)

    module = tf.Module()
    module.functions = {name: function(name) for name in SAMPLES}
    tf.saved_model.save(module, str(tmp_path / "net"), module.functions)
    entries = powers(tmp_path / "net").dangers
    assert not any(map(marked, places.values()))
    wrong = []
    for name, (kind, _) in SAMPLES.items():
        # Of some ops TensorFlow writes the second version.
        told = [e for e in entries if f"signature '{name}'" in e.by]
        told = [e for e in told if e.kind == kind and e.type.startswith(name)]
        if not told or (name not in NO_PATH and not all(e.detail for e in told)):
            wrong.append(f"{name} is not told: {told}")
    read = [name for name, (kind, _) in SAMPLES.items() if kind in READ]
    read = [name for name in read if name not in NOT_RUN]
    loaded = tf.saved_model.load(str(tmp_path / "net")).signatures
    for name in read:
        with contextlib.suppress(tf.errors.OpError):
            loaded[name](x=tf.constant(1.0))
            wrong.append(f"{name} needs no marker")
        PREPARED.get(name, lambda marker: marker.write_text("a,1\n"))(places[name])
    # A kernel may have looked for its files as it was made.
    loaded = tf.saved_model.load(str(tmp_path / "net")).signatures
    for name in SAMPLES.keys() - NOT_RUN.keys():
        loaded[name](x=tf.constant(1.0))
        if not marked(places[name]):
            wrong.append(f"{name} wrote nothing")
    assert wrong == []


def test_hidden_ops_are_told_and_cut_off(tmp_path):
    """No result of a body needs them."""
    places = markers(tmp_path, HIDDEN)
    module = tf.Module()
    module.f = tf.function(
        lambda x: {name: HIDDEN[name](str(places[name]), x) for name in HIDDEN},
        input_signature=[tf.TensorSpec([], name="x")],
        autograph=False,
    )
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(tmp_path / "net"), {"serving_default": signature})
    found = powers(tmp_path / "net")
    assert found.kinds == ("write files",)
    assert {entry.type for entry in found.entries} == {"WriteFile"}
    assert all(entry.place.startswith("function '") for entry in found.entries)
    details = {f"'{places[name]}'" for name in HIDDEN if name != "computed path"}
    assert {entry.detail for entry in found.entries} == {*details, ""}
    opened = model.open(tmp_path / "net")
    less = opened.without_powers()
    assert [e.action for e in less.strip_report.entries] == ["removed"] * len(HIDDEN)
    less.save(tmp_path / "less")
    assert powers(tmp_path / "less").computes_only
    loaded = tf.saved_model.load(tmp_path / "less").signatures["serving_default"]
    expected = {n: y.numpy() for n, y in loaded(x=tf.constant(2.0)).items()}
    np.testing.assert_equal(less.run(x=2.0), expected)
    assert [name for name in HIDDEN if marked(places[name])] == []
    # The original is as it was: it writes, and gives the same.
    np.testing.assert_equal(opened.run(x=2.0), expected)
    assert [name for name in HIDDEN if not marked(places[name])] == []


# Of each way one; `test_powers.py` and `test_keras_configs.py` have some more.
QUICK = [
    *("Lambda", "Lambda in a Sequential", "lambda as activation", "build_config"),
    *("function from elsewhere", "class of one's own", "TFSMLayer", "two headers"),
    *("vocabulary of TextVectorization", "external link in HDF5", "raw op as a layer"),
    *("making of a resource", "save op", "GraphDef", "asset above the model"),
    *("op of a library", "op of a library in TFLite"),
]


@pytest.mark.parametrize("name", chosen(FILES, *QUICK))
def test_a_file_is_told_and_does_what_is_told(tmp_path, name):
    sample = FILES[name]
    (marker,) = markers(tmp_path, ["file"]).values()
    path = sample.write(tmp_path, marker)
    # Some run as they are made.
    shutil.rmtree(marker.parent)
    marker.parent.mkdir()
    found = powers(path)
    told = [entry for entry in found.dangers if entry.kind == sample.kind]
    assert told
    assert all(entry.name and entry.type and entry.place for entry in told)
    assert not marked(marker)
    if sample.run is None:
        return
    if sample.kind in READ:
        # Keras packs errors of files into those of types.
        with pytest.raises((tf.errors.OpError, ValueError, TypeError, OSError)):
            sample.run(path, marker)
        sample.prepare(marker)
    sample.run(path, marker)
    assert sample.kind in READ or marked(marker)
