"""Each sample of a model that does more is told, and does what is told."""

import shutil

import pytest
import tensorflow as tf

from geutil.model import powers
from testdata.powers import FILES, HIDDEN, NOT_RUN, PREPARED, SAMPLES, save
from tests.settings import needs_eager
from tests.thorough import some

pytestmark = needs_eager


@pytest.fixture
def marker(tmp_path):
    folder = tmp_path / "marked"
    folder.mkdir()
    return folder / "marker"


def run(folder):
    loaded = tf.saved_model.load(str(folder))
    return loaded.signatures["serving_default"](x=tf.constant(1.0))


def test_there_are_many():
    assert len({*SAMPLES, *HIDDEN, *FILES}) >= 120
    assert all(sample.why for sample in FILES.values() if sample.run is None)
    assert {*NOT_RUN, *PREPARED} <= set(SAMPLES)


# Their paths come through a queue, a dataset, a graph or a resource.
NO_PATH = {
    *("ImportEvent", "DatasetFromGraph", "WholeFileReaderV2", "TextLineReaderV2"),
    *("TFRecordDataset", "TFRecordReaderV2", "FixedLengthRecordReaderV2"),
}


def prepared(name, marker):
    if name in PREPARED:
        PREPARED[name](marker)
    else:
        marker.write_text("a,1\n")


@pytest.mark.parametrize("name", SAMPLES)
def test_an_op_is_told_and_does_what_is_told(tmp_path, marker, name):
    kind, sample = SAMPLES[name]
    folder = tmp_path / "net"
    save(sample, folder, marker)
    found = powers(folder)
    told = [entry for entry in found.dangers if entry.kind == kind]
    # Of some ops TensorFlow writes the second version.
    assert any(entry.type.startswith(name) for entry in told)
    assert name in NO_PATH or all(
        entry.detail for entry in told if entry.type.startswith(name)
    )
    assert "signature 'serving_default'" in {r for entry in told for r in entry.by}
    assert not list(marker.parent.iterdir())
    if name in NOT_RUN:
        return
    if kind not in ("read files", "list folders"):
        run(folder)
        assert list(marker.parent.iterdir())
        return
    with pytest.raises(tf.errors.OpError):
        run(folder)
    prepared(name, marker)
    run(folder)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_ops_are_told(tmp_path, marker, name):
    folder = tmp_path / "net"
    save(HIDDEN[name], folder, marker)
    found = powers(folder)
    assert found.kinds == ("write files",)
    assert all(entry.type == "WriteFile" for entry in found.entries)
    places = {entry.place for entry in found.entries}
    assert all(place.startswith("function '") for place in places)
    details = {entry.detail for entry in found.entries}
    assert details == ({""} if name == "computed path" else {f"'{marker}'"})
    run(folder)
    assert list(marker.parent.iterdir())


@pytest.mark.parametrize("name", some(FILES, 24))
def test_a_file_is_told_and_does_what_is_told(tmp_path, marker, name):
    sample = FILES[name]
    path = sample.write(tmp_path, marker)
    # Some run as they are made.
    shutil.rmtree(marker.parent)
    marker.parent.mkdir()
    found = powers(path)
    told = [entry for entry in found.dangers if entry.kind == sample.kind]
    assert told
    assert all(entry.name and entry.type and entry.place for entry in told)
    assert not list(marker.parent.iterdir())
    if sample.run is None:
        return
    if sample.kind not in ("read files", "list folders"):
        sample.run(path, marker)
        assert list(marker.parent.iterdir())
        return
    # Keras packs errors of files into those of types.
    with pytest.raises((tf.errors.OpError, ValueError, TypeError, OSError)):
        sample.run(path, marker)
    sample.prepare(marker)
    sample.run(path, marker)
