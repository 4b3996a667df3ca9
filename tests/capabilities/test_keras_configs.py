"""What configurations of Keras name, and whether that only computes."""

import json
import tempfile
import zipfile
from pathlib import Path

import keras
import tensorflow as tf
import tf_keras
from google.protobuf.json_format import MessageToDict
from tensorflow.core.protobuf import saved_model_pb2

from geutil.capabilities import powers

TESTDATA = Path(__file__).parents[2] / "testdata"


def told(config):
    # Only the configuration is looked at.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", json.dumps(config))
            archive.writestr("metadata.json", "{}")
        return [(entry.kind, entry.detail) for entry in powers(path).entries]


def function(module, name):
    return {"class_name": "function", "module": module, "config": name}


def test_functions_that_compute():
    for module, name in (
        ("builtins", "relu"),
        ("keras.activations", "gelu"),
        ("keras.src.losses.losses", "mean_squared_error"),
        ("tf_keras.metrics", "mse"),
        ("keras.ops", "mean"),
        ("keras.ops.image", "resize"),
        ("tensorflow.keras.activations", "relu"),
    ):
        assert told(function(module, name)) == [], (module, name)


def test_functions_that_do_more():
    for module, name in (
        ("builtins", "get"),
        ("keras.losses", "deserialize"),
        ("keras.utils", "get_file"),
        ("keras", "device"),
        ("keras.models", "clone_model"),
        ("keras.config", "enable_unsafe_deserialization"),
        ("keras.datasets.mnist", "load_data"),
        ("kerasx.activations", "relu"),
        ("os", "system"),
        ("tensorflow.io", "write_file"),
        (None, "system"),
        (["keras.activations"], "relu"),
        ("os", ["system"]),
    ):
        kinds = [
            (kind, str(name) in detail) for kind, detail in told(function(module, name))
        ]
        assert kinds == [("run code", True)], (module, name)


def test_every_modeling_class_of_keras_computes():
    from keras.src import api_export

    code = {"Lambda", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"}
    for name, found in api_export.REGISTERED_NAMES_TO_OBJS.items():
        module, _, kind = name.rpartition(".")
        if isinstance(found, type) and issubclass(
            found, keras.Layer | keras.losses.Loss | keras.Metric | keras.Optimizer
        ):
            config = {"class_name": kind, "module": module, "config": {}}
            assert bool(told(config)) == (kind in code), name


def test_functions_of_tensorflow_as_layers():
    kinds = {
        None: """
            math.add __operators__.getitem compat.v1.nn.conv2d cast image.decode_png
            io.decode_raw raw_ops.Relu
        """,
        "read files": "io.read_file compat.v1.read_file",
        "write files": "raw_ops.WriteFile",
        "unknown": "raw_ops.Nothing",
        "print": "print",
        "run code": """
            py_function numpy_function compat.v1.py_func load_op_library
            saved_model.load keras.models.load_model io.gfile.remove
        """,
    }
    for kind, symbols in kinds.items():
        for symbol in symbols.split():
            layer = {"class_name": "TFOpLambda", "config": {"function": symbol}}
            assert [k for k, _ in told(layer)] == ([kind] if kind else []), symbol


def test_layers_of_old_hold_nodes():
    for op, kind in (("WriteFile", "write files"), ("Relu", None), ("Mine", "unknown")):
        node = MessageToDict(tf.compat.v1.NodeDef(name="a", op=op))
        layer = {"class_name": "TensorFlowOpLayer", "config": {"node_def": node}}
        assert [k for k, _ in told(layer)] == ([] if kind is None else [kind])


def test_methods_as_layers():
    for symbol, count in (("RaggedTensor", 0), ("io.gfile.GFile", 1)):
        config = {"cls_symbol": symbol, "method_name": "from_row_splits"}
        assert len(told({"class_name": "ClassMethod", "config": config})) == count


def test_what_keras_2_writes_for_ops_is_harmless(tmp_path):
    x = tf_keras.Input([4, 4, 3])
    y = tf.image.resize(tf.nn.relu(x[:, ::2]) * 2.0 + 1.0, [8, 8])
    config = json.loads(tf_keras.Model(x, tf.transpose(y, [0, 3, 1, 2])).to_json())
    assert "TFOpLambda" in json.dumps(config)
    assert told(config) == []


def test_words_in_a_list_are_no_file():
    layer = {"class_name": "StringLookup", "module": "keras.layers"}
    assert told(layer | {"config": {"vocabulary": ["a", "b"]}}) == []
    ((kind, detail),) = told(layer | {"config": {"vocabulary": "/etc/passwd"}})
    assert (kind, detail) == ("read files", "'/etc/passwd', its vocabulary")


def test_metadata_that_cannot_be_looked_through_is_unknown(tmp_path):
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((TESTDATA / "two_signatures" / "saved_model.pb").read_bytes())
    objects = saved.meta_graphs[0].object_graph_def
    # Other objects than layers have other metadata, or none.
    for text, kinds in (("[" * 100_000, ["unknown"]), ("no JSON", []), ("", [])):
        objects.nodes.add().user_object.metadata = text
        (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
        assert [entry.kind for entry in powers(tmp_path).entries] == kinds
        del objects.nodes[-1]
