"""Saving that fails half way: what was there stays whole, and nothing else is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from geutil.model import ModelError
from tests.processes import run_python

X = np.float32([[1, 2, 3]])


def affine(scale, size=3):
    module = tf.Module()
    module.w = tf.Variable(np.full([3, size], scale, np.float32), name="w")
    spec = tf.TensorSpec([None, 3], name="x")
    module.f = tf.function(lambda x: {"y": x @ module.w}, [spec])
    return module


@pytest.fixture
def new():
    return geutil_model.open(affine(2.0).f)


@pytest.fixture(params=["directory", "nothing"])
def old(request, tmp_path):
    """What is at the path before: a model, or nothing."""
    path = tmp_path / "here" / "model"
    path.parent.mkdir()
    if request.param == "directory":
        geutil_model.open(affine(1.0).f).save(path)
    return path


def contents(folder):
    """Return all that is below a folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def half_a_save(obj, export_dir, *args, **kwargs):
    Path(export_dir).mkdir(parents=True)
    (Path(export_dir) / "saved_model.pb").write_bytes(b"half")
    raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, MemoryError, OSError])
def test_a_writer_that_fails(old, new, monkeypatch, error):
    def failing(*args, **kwargs):
        try:
            half_a_save(*args, **kwargs)
        except tf.errors.OpError:
            if error is None:
                raise
            raise error("stopped") from None

    before = contents(old.parent)
    monkeypatch.setattr(tf.saved_model, "save", failing)
    with pytest.raises((ModelError, error or ModelError)):
        new.save(old, overwrite=True)
    assert contents(old.parent) == before


def test_what_stands_there_is_replaced_whole(old, new):
    if old.is_dir():
        (old / "variables" / "left").write_text("over")
    new.save(old, overwrite=True)
    np.testing.assert_array_equal(geutil_model.open(old).run(x=X)["y"], [[12.0] * 3])
    assert not (old / "variables" / "left").exists()
    assert [p.name for p in old.parent.iterdir()] == ["model"]


def test_what_stands_there_is_not_touched_without_leave(old, new):
    before = contents(old.parent)
    if not before:
        return
    with pytest.raises(ModelError, match="overwrite=True"):
        new.save(old)
    assert contents(old.parent) == before


@pytest.mark.parametrize("format", ["saved_model", "graph_def", "pbtxt"])
def test_formats_are_overwritten_alike(tmp_path, new, format):
    path = tmp_path / "model"
    other = geutil_model.open(affine(1.0).f)
    other.save(path, format=format)
    with pytest.raises(ModelError, match="overwrite=True"):
        new.save(path, format=format)
    new.save(path, format=format, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert path.is_dir() == (format == "saved_model")


def full(path):
    path.mkdir()
    (path / "photo").write_text("of a cat")


def single(path):
    path.write_text("a file")


REFUSED = [
    (full, "model", "saved_model", "holds something else than a model"),
    (full, "model", "graph_def", "is a directory, and is not replaced by a file"),
    (Path.mkdir, "model", "tflite", "is a directory, and is not replaced by a file"),
    (single, "model", "saved_model", "is a file, and is not replaced by a directory"),
    (single, "m.keras", "saved_model", r"a \.keras file.*\.pb, \.pbtxt, \.tflite file"),
    (single, "m.H5", "tflite", r"a \.h5 file.*SavedModel directory, or a \.pb"),
    (single, "m.onnx", "graph_def", r"a \.onnx file, which geutil does not write"),
    (single, "m.tflite", "saved_model", "format 'tflite', and 'saved_model' would"),
]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("make", "name", "format", "words"), REFUSED)
def test_nothing_is_replaced_by_another_kind_of_thing(
    new, tmp_path, make, name, format, words, overwrite
):
    make(tmp_path / name)
    before = contents(tmp_path)
    with pytest.raises(ModelError, match=words):
        new.save(tmp_path / name, format, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_what_is_no_part_of_a_saved_model_is_not_lost(new, tmp_path):
    path = new.save(tmp_path / "m")
    assert new.save(path, overwrite=True) == path
    (path / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ModelError, match=r"also holds 'notes\.txt'.*would be lost"):
        new.save(path, overwrite=True)
    assert contents(tmp_path) == before
    (path / "notes.txt").unlink()
    (path / ".DS_Store").write_text("")
    new.save(path, overwrite=True)


@pytest.mark.parametrize("name", ["m.tar.gz", "m.GGUF", "m.pt2", "m.yaml", "m.txt"])
def test_suffixes_of_others_are_refused(new, tmp_path, name):
    with pytest.raises(ModelError, match="which geutil does not write"):
        new.save(tmp_path / name)
    assert contents(tmp_path) == {}


def test_a_suffix_of_another_format_is_refused_before_any_work(new, tmp_path):
    with pytest.raises(ModelError, match=r"a \.keras file"):
        new.save(tmp_path / "m.keras")
    assert contents(tmp_path) == {}
    assert new.save(tmp_path / "net.v2").is_dir()


CHILD = """
import os, resource, signal, sys
import numpy as np
import tensorflow as tf
from geutil import model
from tests.model.test_saving_failures import affine

path, how = sys.argv[1:]
m = model.open(affine(5.0, 300_000).f)
if how == "killed":
    def kill(*args):
        os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = kill  # the first thing that is done with what is written
    m.save(path, overwrite=True)
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        m.save(path, overwrite=True)
    except (model.ModelError, OSError) as error:
        print(type(error).__name__, flush=True)
    else:
        print("saved", flush=True)
"""


def in_a_child(path, how):
    return run_python("-c", CHILD, path, how)


def test_a_file_system_that_is_full(tmp_path):
    path = tmp_path / "model"
    geutil_model.open(affine(1.0).f).save(path)
    before = contents(tmp_path)
    child = in_a_child(path, "full")
    assert child.stdout.strip() in (b"ModelError", b"OSError"), child.stderr
    assert contents(tmp_path) == before


def test_a_process_that_is_killed(tmp_path):
    path = tmp_path / "model"
    geutil_model.open(affine(1.0).f).save(path)
    before = contents(path)
    child = in_a_child(path, "killed")
    assert child.returncode == -9, child.stderr
    assert contents(path) == before
    np.testing.assert_array_equal(geutil_model.open(path).run(x=X)["y"], [[6.0] * 3])
    # The dead leave their work behind; the next save is not in its way.
    geutil_model.open(affine(2.0).f).save(path, overwrite=True)
    np.testing.assert_array_equal(geutil_model.open(path).run(x=X)["y"], [[12.0] * 3])


def test_a_place_that_cannot_be_written(new, tmp_path):
    with pytest.raises(ModelError, match="no directory"):
        new.save(tmp_path / "missing" / "model")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ModelError, match="no directory"):
        new.save(tmp_path / "file" / "model")


def test_a_link_is_replaced_and_not_followed(new, tmp_path):
    target = tmp_path / "target"
    geutil_model.open(affine(1.0).f).save(target)
    before = contents(target)
    (tmp_path / "link").symlink_to(target)
    new.save(tmp_path / "link", overwrite=True)
    assert contents(target) == before
    np.testing.assert_array_equal(
        geutil_model.open(tmp_path / "link").run(x=X)["y"], [[12.0] * 3]
    )


def test_a_relative_path_and_a_string(new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new.save("model") == Path("model")
    assert geutil_model.open("model").run(x=X)["y"].tolist() == [[12.0] * 3]


def test_a_model_is_saved_over_its_own_source_twice(tmp_path):
    path = tmp_path / "model"
    geutil_model.open(affine(1.0).f).save(path)
    for _ in range(2):
        m = geutil_model.open(path)
        m.variables["w"].assign_add(np.ones([3, 3]))
        m.save(path, overwrite=True)
    assert geutil_model.open(path).run(x=X)["y"].tolist() == [[18.0] * 3]
