"""Saving models: all of one is written, or what was there stays whole."""

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.model import ModelError
from geutil.writing import written_atomically
from tests.model import small_models
from tests.processes import run_python

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def opened():
    function, w, b = small_models.affine()
    m = model.open(function)
    m.keep = (function, w, b)
    return m


def test_an_edited_signature_that_is_not_the_opened_one(tmp_path):
    small_models.save_two_signatures(tmp_path / "m")
    m = model.open(tmp_path / "m", signature="encode")
    decode = m.signatures["decode"]
    decode.outputs["x"] = decode.inputs["code"]
    m.save(tmp_path / "out")
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    code = tf.constant([[3.0, 4.0]])
    np.testing.assert_array_equal(loaded.signatures["decode"](code=code)["x"], code)


def test_a_resource_without_an_owner_is_named(tmp_path):
    handle = tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def function(x):
        size = tf.raw_ops.LookupTableSizeV2(table_handle=handle)
        return {"y": x + tf.cast(size, tf.float32)}

    m = model.open(function)
    with pytest.raises(ModelError, match=r"no object in memory owns"):
        m.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_model_can_be_saved_over_the_one_it_was_opened_from(tmp_path):
    small_models.save_two_signatures(tmp_path / "m")
    for _ in range(2):
        m = model.open(tmp_path / "m", signature="encode")
        with m.graph.as_default():
            m.outputs["code"] = m.outputs["code"] * 2.0
        m.save(tmp_path / "m", overwrite=True)
    code = model.open(tmp_path / "m", signature="encode").run(x=[[1.0, 0.0, 0.0]])
    assert code["code"].tolist() == [[16.0, 0.0]]


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


def test_signatures_and_outputs_keep_their_order(ordered):
    # A SavedModel holds a map of outputs, which has no order.
    outputs = ["a", *(f"o_{i}" for i in range(11)), "z"]
    expected = dict.fromkeys(("u", "c", "v", "a"), outputs)
    m = model.open(ordered, signature="v")
    for method, change in ORDERS.items():
        found = change(m).signatures
        ends = {name: list(found[name].outputs) for name in found}
        assert list(ends.items()) == list(expected.items()), method


def test_a_signature_that_is_renamed_keeps_its_place(ordered):
    renamed = model.open(ordered, signature="c").rename(signature="first")
    assert list(renamed.signatures) == ["u", "first", "v", "a"]
    assert renamed.signatures["first"] is renamed


ROW = np.float32([[1, 2, 3]])


def affine(scale, size=3):
    module = tf.Module()
    module.w = tf.Variable(np.full([3, size], scale, np.float32), name="w")
    spec = tf.TensorSpec([None, 3], name="x")
    module.f = tf.function(lambda x: {"y": x @ module.w}, [spec])
    return module


@pytest.fixture
def new():
    return model.open(affine(2.0).f)


@pytest.fixture(params=["directory", "nothing"])
def old(request, tmp_path):
    """What is at the path before: a model, or nothing."""
    path = tmp_path / "here" / "model"
    path.parent.mkdir()
    if request.param == "directory":
        model.open(affine(1.0).f).save(path)
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


def test_a_writer_that_fails(old, new, monkeypatch):
    before = contents(old.parent)
    for error in (None, KeyboardInterrupt, MemoryError, OSError):

        def failing(*args, error=error, **kwargs):
            try:
                half_a_save(*args, **kwargs)
            except tf.errors.OpError:
                if error is None:
                    raise
                raise error("stopped") from None

        monkeypatch.setattr(tf.saved_model, "save", failing)
        with pytest.raises((ModelError, error or ModelError)):
            new.save(old, overwrite=True)
        assert contents(old.parent) == before, error


def test_what_stands_there_is_replaced_whole(old, new):
    if old.is_dir():
        (old / "variables" / "left").write_text("over")
    new.save(old, overwrite=True)
    np.testing.assert_array_equal(model.open(old).run(x=ROW)["y"], [[12.0] * 3])
    assert not (old / "variables" / "left").exists()
    assert [p.name for p in old.parent.iterdir()] == ["model"]


def test_formats_are_overwritten_alike(tmp_path, new):
    for format in ("saved_model", "graph_def", "pbtxt"):
        path = tmp_path / format / "model"
        path.parent.mkdir()
        model.open(affine(1.0).f).save(path, format=format)
        before = contents(tmp_path)
        with pytest.raises(ModelError, match="exists; pass overwrite=True"):
            new.save(path, format=format)
        assert contents(tmp_path) == before
        new.save(path, format=format, overwrite=True)
        assert [p.name for p in path.parent.iterdir()] == ["model"]
        assert path.is_dir() == (format == "saved_model")


def full(path):
    path.mkdir()
    (path / "photo").write_text("of a cat")


def single(path):
    path.write_text("a file")


def absent(path):
    assert not path.exists()


REFUSED = [
    (full, "model", "saved_model", "holds something else than a model"),
    (full, "model", "graph_def", "is a directory, and is not replaced by a file"),
    (Path.mkdir, "model", "tflite", "is a directory, and is not replaced by a file"),
    (single, "model", "saved_model", "is a file, and is not replaced by a directory"),
    (single, "m.keras", "saved_model", r"a \.keras file.*\.pb, \.pbtxt, \.tflite file"),
    (single, "m.H5", "tflite", r"a \.h5 file.*SavedModel directory, or a \.pb"),
    (single, "m.onnx", "graph_def", r"a \.onnx file, which geutil does not write"),
    (single, "m.tflite", "saved_model", "format 'tflite', and 'saved_model' would"),
    # Refused before any work, where nothing stands.
    (absent, "m.keras", "saved_model", r"a \.keras file"),
    *(
        (absent, name, "saved_model", "which geutil does not write")
        for name in ("m.tar.gz", "m.GGUF", "m.pt2", "m.yaml", "m.txt")
    ),
]


def test_nothing_is_replaced_by_another_kind_of_thing(new, tmp_path):
    for i, (make, name, format, words) in enumerate(REFUSED):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        make(folder / name)
        before = contents(folder)
        for overwrite in (False, True):
            with pytest.raises(ModelError, match=words):
                new.save(folder / name, format, overwrite=overwrite)
            assert contents(folder) == before, name
    assert new.save(tmp_path / "net.v2").is_dir()


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


CHILD = """
import os, resource, signal, sys
from pathlib import Path
from geutil import model
from tests.model.test_file_writers import affine, contents

path = Path(sys.argv[1])
m = model.open(affine(5.0, 300_000).f)
before = contents(path.parent)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
try:
    m.save(path, overwrite=True)
except (model.ModelError, OSError):
    print("refused", contents(path.parent) == before, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
# The first thing that is done with what is written.
os.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
m.save(path, overwrite=True)
"""


def test_a_file_system_that_is_full_and_a_process_that_is_killed(tmp_path):
    path = tmp_path / "model"
    model.open(affine(1.0).f).save(path)
    before = contents(path)
    child = run_python("-c", CHILD, path)
    assert child.stdout.strip() == b"refused True", child.stderr
    assert child.returncode == -9, child.stderr
    assert contents(path) == before
    np.testing.assert_array_equal(model.open(path).run(x=ROW)["y"], [[6.0] * 3])
    # The dead leave their work behind; the next save clears it away.
    model.open(affine(2.0).f).save(path, overwrite=True)
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(model.open(path).run(x=ROW)["y"], [[12.0] * 3])


def test_a_place_that_cannot_be_written(new, tmp_path):
    with pytest.raises(ModelError, match="no directory"):
        new.save(tmp_path / "missing" / "model")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ModelError, match="no directory"):
        new.save(tmp_path / "file" / "model")


def test_a_link_is_replaced_and_not_followed(new, tmp_path):
    target = tmp_path / "target"
    model.open(affine(1.0).f).save(target)
    before = contents(target)
    (tmp_path / "link").symlink_to(target)
    new.save(tmp_path / "link", overwrite=True)
    assert contents(target) == before
    np.testing.assert_array_equal(
        model.open(tmp_path / "link").run(x=ROW)["y"], [[12.0] * 3]
    )


def test_a_relative_path_and_a_string(new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new.save("model") == Path("model")
    assert model.open("model").run(x=ROW)["y"].tolist() == [[12.0] * 3]


# -- writing by replacing --------------------------------------------------------------


def write_directory(new, text):
    (new / "sub").mkdir(parents=True)
    (new / "sub" / "file").write_text(text)


def test_without_a_swap_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr("geutil.writing._exchanged", lambda *_: False)
    path = tmp_path / "out"
    write_directory(path, "old")
    with written_atomically(path, overwrite=True) as new:
        write_directory(new, "new")
    whole = {"out": None, "out/sub": None, "out/sub/file": b"new"}
    assert contents(tmp_path) == whole
    # One that fails puts the old back.
    with (
        pytest.raises(FileNotFoundError),
        written_atomically(path, overwrite=True) as new,
    ):
        new.mkdir()
        new.rmdir()
    assert contents(tmp_path) == whole


KILLED = """
import os, pathlib, signal
from geutil.writing import written_atomically
path = pathlib.Path({!r})
with written_atomically(path, overwrite=True) as new:
    new.mkdir()
    (new / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path):
    """The hidden folder of a process that was killed while it wrote."""
    write_directory(tmp_path / "out", "old")
    done = run_python("-c", KILLED.format(str(tmp_path / "out")))
    assert done.returncode == -signal.SIGKILL
    assert contents(tmp_path / "out") == {"sub": None, "sub/file": b"old"}
    (hidden,) = tmp_path.glob(".out.*")
    return hidden


def test_a_folder_that_was_never_locked_is_cleared_later(tmp_path):
    contents = (), ("out.lock.new",), ("out.lock.new", "out")
    cases = list(itertools.product(contents, (-1000.0, 1e6)))
    for number, (content, age) in enumerate(cases):
        hidden = tmp_path / f".out.abcdefg{number}"
        hidden.mkdir()
        for name in content:
            (hidden / name).write_text("")
        then = time.time() + age
        os.utime(hidden, (then, then))
    with written_atomically(tmp_path / "out", overwrite=False) as new:
        new.write_text("new")
    # What is in use, or holds something, stays.
    stays = [age > 0 or "out" in content for content, age in cases]
    found = [(tmp_path / f".out.abcdefg{i}").exists() for i in range(len(cases))]
    assert found == stays


def test_what_a_living_writer_or_a_crash_between_renames_left_stays(left, tmp_path):
    path = tmp_path / "out"
    (left / "out.old").write_text("old")
    with written_atomically(path, overwrite=True) as slow:
        write_directory(slow, "slow")
        with written_atomically(path, overwrite=True) as fast:
            write_directory(fast, "fast")
        assert contents(path) == {"sub": None, "sub/file": b"fast"}
    assert contents(path) == {"sub": None, "sub/file": b"slow"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [left.name, "out"]
    assert (left / "out.old").read_text() == "old"
