import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

import geutil as ge
from geutil.errors import ModelError
from geutil.graph.protos import MetaGraphDef, SavedModel
from geutil.model.files.proto_files import (
    read_graph_def,
    read_saved_model,
    select_meta_graph,
)
from geutil.model.sources.saved_model_folders import load_saved_model
from tests.model.samples import frozen_graph_def


@pytest.fixture(scope="module")
def graph_def():
    return frozen_graph_def()


def test_a_graph_def_is_read_in_both_forms(tmp_path, graph_def):
    (tmp_path / "a.pb").write_bytes(graph_def.SerializeToString())
    (tmp_path / "a.pbtxt").write_text(text_format.MessageToString(graph_def))
    assert read_graph_def(tmp_path / "a.pb") == graph_def
    assert read_graph_def(str(tmp_path / "a.pbtxt")) == graph_def


def test_a_saved_model_is_read_in_both_forms(tmp_path, models):
    saved_model = read_saved_model(models / "lookup")
    data = (models / "lookup" / "saved_model.pb").read_bytes()
    assert saved_model == SavedModel.FromString(data)
    text = text_format.MessageToString(saved_model)
    (tmp_path / "saved_model.pbtxt").write_text(text)
    assert read_saved_model(tmp_path) == saved_model


def meta_graph(graph_def, *tags):
    proto = MetaGraphDef(graph_def=graph_def)
    proto.meta_info_def.tags.extend(tags)
    return proto


def saved_model(*tag_lists):
    return SavedModel(
        saved_model_schema_version=1,
        meta_graphs=[meta_graph(tf.compat.v1.GraphDef(), *tags) for tags in tag_lists],
    )


def binary(proto):
    return proto.SerializeToString()


def text(proto):
    return text_format.MessageToString(proto).encode()


# What the file holds, its name, and what the message says.
WRONG_GRAPH_DEFS = {
    "empty": (lambda g: b"", "a.pb", "is empty"),
    "empty text": (lambda g: b"", "a.pbtxt", "is empty"),
    "truncated": (lambda g: binary(g)[:-5], "a.pb", "truncated"),
    "noise": (lambda g: b"\xff" * 64, "a.pb", "no whole GraphDef"),
    "SavedModel": (
        lambda g: binary(SavedModel(saved_model_schema_version=1, meta_graphs=[])),
        "a.pb",
        "a SavedModel, no GraphDef: pass the directory",
    ),
    "MetaGraph": (
        lambda g: binary(meta_graph(g, "serve")),
        "a.pb",
        "a MetaGraphDef, no GraphDef: import it with",
    ),
    "text": (text, "a.pb", "GraphDef in text form: name it .pbtxt"),
    "MetaGraph text": (
        lambda g: text(meta_graph(g)),
        "a.pbtxt",
        "a MetaGraphDef, no GraphDef",
    ),
    "binary": (binary, "a.pbtxt", "is no text"),
    "no proto": (lambda g: b"hello: there", "a.pbtxt", "no GraphDef in text form"),
    "zip": (lambda g: b"PK\x03\x04abcdef", "a.pb", "zip archive"),
    "HDF5": (lambda g: b"\x89HDF\r\n", "a.pb", "HDF5"),
    "TFLite": (lambda g: b"\x1c\0\0\0TFL3....", "a.pb", "TensorFlow Lite"),
    "gzip": (lambda g: gzip.compress(binary(g)), "a.pb", "gzip"),
}


def test_what_is_no_graph_def_is_named(tmp_path, graph_def):
    for case, (make, name, message) in WRONG_GRAPH_DEFS.items():
        file = tmp_path / name
        file.write_bytes(make(graph_def))
        with pytest.raises(ModelError, match=message) as caught:
            read_graph_def(file)
        assert str(file) in str(caught.value), case


def test_paths_that_hold_no_graph_def(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_graph_def(tmp_path / "missing.pb")
    with pytest.raises(ModelError, match="is a directory"):
        read_graph_def(tmp_path)


def test_paths_that_hold_no_saved_model(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_saved_model(tmp_path / "missing")
    with pytest.raises(ModelError, match="it holds nothing"):
        read_saved_model(tmp_path)
    (tmp_path / "model.h5").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"holds no saved_model\.pb.*model\.h5"):
        read_saved_model(tmp_path)
    with pytest.raises(ModelError, match="is a file; a SavedModel is a directory"):
        read_saved_model(tmp_path / "model.h5")
    (tmp_path / "saved_model.cpb").write_bytes(b"x")
    with pytest.raises(ModelError, match="in chunks"):
        read_saved_model(tmp_path)


WRONG_SAVED_MODELS = {
    "empty file": (lambda g: b"", "is empty"),
    "no graph": (lambda g: binary(saved_model()), "holds no graph"),
    "truncated": (lambda g: binary(saved_model(["serve"]))[:-2], "truncated"),
    "GraphDef": (binary, "holds a GraphDef, no SavedModel: read it with"),
    "MetaGraph": (lambda g: binary(meta_graph(g)), "a MetaGraphDef, no SavedModel"),
}


def test_what_is_no_saved_model_is_named(tmp_path, graph_def):
    for make, message in WRONG_SAVED_MODELS.values():
        (tmp_path / "saved_model.pb").write_bytes(make(graph_def))
        with pytest.raises(ModelError, match=message):
            read_saved_model(tmp_path)


def test_select_meta_graph():
    for tag_lists, tags, chosen in (
        ([["serve"], ["train"]], None, 0),
        ([["train"], ["serve", "tpu"], ["serve"]], None, 2),
        ([["train"]], None, 0),
        ([[]], None, 0),
        ([["serve"], ["train"]], ["train"], 1),
        ([["serve"], ["serve", "tpu"]], ["tpu", "serve"], 1),
        ([["serve"], ["train"]], "train", 1),
        ([["serve"], []], [], 1),
    ):
        proto = saved_model(*tag_lists)
        found = select_meta_graph(proto, tags)
        assert found is proto.meta_graphs[chosen], (tag_lists, tags)


def test_select_meta_graph_lists_the_known_tags():
    for tag_lists, tags, message in (
        ([["serve"]], ["train"], r"no MetaGraph with the tags \['train'\].*'serve'"),
        ([["serve", "tpu"]], ["serve"], r"\['serve', 'tpu'\]"),
        ([["a"], ["b"]], None, r"several MetaGraphs.*\['a'\], \['b'\]"),
    ):
        with pytest.raises(ModelError, match=message):
            select_meta_graph(saved_model(*tag_lists), tags)


# -- loading: what was saved, damaged and not ------------------------------------------

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
    with pytest.raises(ModelError, match=r"TensorFlow refuses .*rank 2") as caught:
        ge.model.open(file)
    assert isinstance(caught.value.__cause__, ValueError)
