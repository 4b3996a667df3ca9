import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ModelError
from geutil.model.files.loading import load_graph_def, load_saved_model

INDEX = "variables/variables.index"
DATA = "variables/variables.data-00000-of-00001"


@pytest.fixture
def copy(models, tmp_path):
    return Path(shutil.copytree(models / "lookup", tmp_path / "lookup"))


def test_a_saved_model_computes_what_it_was_saved_with(models):
    with pytest.raises(ModelError, match=r"\['train'\]; it holds \['serve'\]"):
        load_saved_model(models / "lookup", ["train"])
    loaded = load_saved_model(models / "lookup", ["serve"])
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (y,) = loaded.signatures["project"](tf.constant(x)).values()
    np.testing.assert_array_equal(y, x @ np.eye(4, 3) + [1, 2, 3])
    (rows,) = loaded.signatures["look_up"](tf.constant(["dog", "cat"])).values()
    np.testing.assert_array_equal(rows, np.eye(4, 3)[[1, 0]])


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def point_away(index):
    """Let the index's last 48 bytes say that its blocks are 32 GiB long."""
    data = bytearray(index.read_bytes())
    data[-48:-8] = b"\0\1\0\xff\xff\xff\xff\x7f".ljust(40, b"\0")
    index.write_bytes(data)


DAMAGE = {
    "no index": (lambda p: (p / INDEX).unlink(), r"variables\.index' is missing"),
    "no values": (lambda p: (p / DATA).unlink(), "values are missing"),
    "neither": (lambda p: shutil.rmtree(p / "variables"), "is missing"),
    "a shard of two": (
        lambda p: (p / DATA).rename(p / DATA.replace("of-00001", "of-00002")),
        "data-00001-of-00002' is missing",
    ),
    "empty index": (lambda p: cut(p / INDEX, 0), "truncated: it has 0 bytes"),
    "truncated index": (lambda p: cut(p / INDEX, 100), "no index .* or is truncated"),
    "changed index": (lambda p: flip(p / INDEX, 3), "damaged"),
    "index that points elsewhere": (
        lambda p: point_away(p / INDEX),
        "points to 34359738367 bytes at 0",
    ),
    "truncated values": (lambda p: cut(p / DATA, 9), "cannot be loaded"),
    "changed values": (lambda p: flip(p / DATA, 3), "cannot be loaded: .*[Cc]hecksum"),
    "no asset": (
        lambda p: (p / "assets" / "vocabulary.txt").unlink(),
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_to_the_files_is_refused(copy, case):
    damage, message = DAMAGE[case]
    damage(copy)
    with pytest.raises(ModelError, match=message) as caught:
        load_saved_model(copy)
    # An error of TensorFlow is the cause.
    cause = caught.value.__cause__
    assert cause is not None or "cannot be loaded" not in message
    assert not isinstance(cause, ModelError)
    assert cause is None or str(cause) in str(caught.value)


def test_a_graph_that_cannot_be_imported_is_refused_before_loading(copy):
    file = copy / "saved_model.pb"
    file.write_bytes(file.read_bytes().replace(b"MatMul", b"MatMil"))
    with pytest.raises(ModelError, match=r"'serve': function .*\(MatMil\)"):
        load_saved_model(copy)


def test_what_the_importer_refuses_is_refused(tmp_path):
    file = tmp_path / "a.pbtxt"
    file.write_text(
        """
        node { name: "a" op: "Placeholder"
          attr { key: "dtype" value { type: DT_FLOAT } }
          attr { key: "shape" value { shape { dim { size: 3 } } } } }
        node { name: "b" op: "MatMul" input: "a" input: "a"
          attr { key: "T" value { type: DT_FLOAT } } }
        """
    )
    with pytest.raises(ModelError, match=r"cannot be imported: .*rank 2") as caught:
        load_graph_def(file)
    assert isinstance(caught.value.__cause__, ValueError)
