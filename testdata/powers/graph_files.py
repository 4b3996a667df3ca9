"""Samples of SavedModels, graphs and TFLite files that hide an op where few look."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from testdata.powers.common import FileSample, written

tf1 = tf.compat.v1
_DELEGATE = "interpreters need a delegate for ops of TensorFlow"
_LIBRARY = "it needs a library of ops that is not there"


def _version_1(
    change: Callable[[Any, Any], dict[str, Any]], run: Any = None
) -> FileSample:
    """Return a SavedModel of version 1, made with options that a function gives."""

    def write(folder: Path, marker: Path) -> Path:
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [], name="x")
            v = tf1.get_variable("v", initializer=1.0, use_resource=False)
            ends = tf1.saved_model.predict_signature_def({"x": x}, {"y": x * v})
            wrote = tf.io.write_file(str(marker), "x")
            options = {"saver": tf1.train.Saver()} | change(session.graph, wrote)
            session.run(tf1.global_variables_initializer())
            builder = tf1.saved_model.Builder(str(folder / "net"))
            builder.add_meta_graph_and_variables(
                session, ["serve"], {"serving_default": ends}, **options
            )
            builder.save()
        return folder / "net"

    return FileSample("write files", write, run or _load_1)


def _load_1(path: Path, marker: Path) -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.saved_model.load(session, ["serve"], str(path))


def _run_collection(path: Path, marker: Path) -> None:
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        tf1.saved_model.load(session, ["serve"], str(path))
        session.run(graph.get_collection("hidden"))


def _restoring(graph: Any, wrote: Any) -> dict[str, Any]:
    graph.get_operation_by_name("save/restore_all")._add_control_input(wrote)
    return {}


def _saving(graph: Any, wrote: Any) -> dict[str, Any]:
    graph.get_operation_by_name("save/control_dependency")._add_control_input(wrote)
    return {}


def _save_again(path: Path, marker: Path) -> None:
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        loaded = tf1.saved_model.load(session, ["serve"], str(path))
        target = {loaded.saver_def.filename_tensor_name: str(marker) + "_saved"}
        session.run(loaded.saver_def.save_tensor_name, target)
        del graph


def _collected(graph: Any, wrote: Any) -> dict[str, Any]:
    graph.add_to_collection("hidden", wrote)
    return {}


def _legacy(graph: Any, wrote: Any) -> dict[str, Any]:
    return {"legacy_init_op": wrote}


def _module(**functions: Any) -> Any:
    module = tf.Module()
    for name, function in functions.items():
        setattr(module, name, function)
    spec = [tf.TensorSpec([], name="x")]
    module.f = tf.function(lambda x: {"y": 2 * x}, input_signature=spec)
    return module


def _save(module: Any, folder: Path, **options: Any) -> Path:
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(folder), {"serving_default": signature}, **options)
    return folder


def _writing(marker: Path) -> Any:
    return tf.function(
        lambda: written(str(marker), tf.constant(1.0)), input_signature=[]
    )


def _object(folder: Path, marker: Path) -> Path:
    child = tf.Module()
    child.hidden = _writing(marker)
    return _save(_module(child=child), folder / "net")


def _run_object(path: Path, marker: Path) -> None:
    tf.saved_model.load(str(path)).child.hidden()


class _Resource(tf.saved_model.experimental.TrackableResource):
    """A resource whose making writes the marker."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._marker = marker

    def _create_resource(self) -> Any:
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.string, value_dtype=tf.int64, shared_name="resource"
        )

    def _initialize(self) -> None:
        tf.io.write_file(self._marker, "x")

    def _destroy_resource(self) -> None:
        pass


def _resource(folder: Path, marker: Path) -> Path:
    return _save(_module(resource=_Resource(str(marker))), folder / "net")


def _load_2(path: Path, marker: Path) -> None:
    tf.saved_model.load(str(path))


def _gradient(folder: Path, marker: Path) -> Path:
    @tf.custom_gradient
    def twice(x: Any) -> Any:
        return 2 * x, lambda slope: written(str(marker), slope)

    module = tf.Module()
    module.f = tf.function(
        lambda x: {"y": twice(x)}, input_signature=[tf.TensorSpec([], name="x")]
    )
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    return _save(module, folder / "net", options=options)


def _differentiate(path: Path, marker: Path) -> None:
    loaded = tf.saved_model.load(str(path))
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.f(x)["y"]
    tape.gradient(y, x)


def _text(folder: Path, marker: Path) -> Path:
    from google.protobuf import text_format

    path = _object(folder, marker)
    proto = _proto(path)
    (path / "saved_model.pb").unlink()
    text = text_format.MessageToString(proto)
    (path / "saved_model.pbtxt").write_text(text)
    return path


def _proto(path: Path) -> Any:
    data = (path / "saved_model.pb").read_bytes()
    return saved_model_pb2.SavedModel.FromString(data)


def _second(folder: Path, marker: Path) -> Path:
    """Hide the op in a second MetaGraph, with tags of its own."""
    hidden = _proto(_object(folder / "hidden", marker))
    path = _save(_module(), folder / "net")
    proto = _proto(path)
    other = proto.meta_graphs.add()
    other.CopyFrom(hidden.meta_graphs[0])
    other.meta_info_def.tags[:] = ["other"]
    (path / "saved_model.pb").write_bytes(proto.SerializeToString())
    return path


def _run_second(path: Path, marker: Path) -> None:
    proto = _proto(path)
    graph = proto.meta_graphs[1].graph_def
    function = next(f for f in graph.library.function if "WriteFile" in str(f))
    with tf.Graph().as_default() as built, tf1.Session() as session:
        tf1.import_graph_def(graph, name="")
        node = built.create_op(
            "StatefulPartitionedCall",
            [],
            [tf.float32],
            attrs={"Tin": _types([]), "Tout": _types([1]), "f": _function(function)},
        )
        session.run(node.outputs[0])


def _types(listed: list[int]) -> Any:
    value = tf1.AttrValue()
    value.list.type[:] = listed
    return value


def _function(definition: Any) -> Any:
    value = tf1.AttrValue()
    value.func.name = definition.signature.name
    return value


def _graph(suffix: str) -> FileSample:
    def write(folder: Path, marker: Path) -> Path:
        with tf.Graph().as_default() as graph:
            written(str(marker), tf1.placeholder(tf.float32, [], name="x"))
        path = folder / f"a{suffix}"
        tf1.train.write_graph(graph, str(folder), path.name, as_text=suffix != ".pb")
        return path

    def run(path: Path, marker: Path) -> None:
        from google.protobuf import text_format

        graph_def = tf1.GraphDef()
        if path.suffix == ".pb":
            graph_def.ParseFromString(path.read_bytes())
        else:
            text_format.Parse(path.read_text(), graph_def)
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.import_graph_def(graph_def, name="")
            session.run("WriteFile")

    return FileSample("write files", write, run)


def _checkpoint(folder: Path, marker: Path) -> Path:
    with tf.Graph().as_default() as graph:
        tf.io.write_file(str(marker), "x")
        tf1.train.export_meta_graph(str(folder / "a.meta"), graph=graph)
    return folder / "a.meta"


def _run_checkpoint(path: Path, marker: Path) -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.train.import_meta_graph(str(path))
        session.run("WriteFile")


def _unknown(folder: Path, marker: Path) -> Path:
    graph_def = tf1.GraphDef()
    graph_def.node.add(name="mine", op="MyOwnOp")
    (folder / "a.pb").write_bytes(graph_def.SerializeToString())
    return folder / "a.pb"


def _metadata(folder: Path, marker: Path) -> Path:
    """Write layers into the objects of a SavedModel, as Keras did before 2.5."""
    from tf_keras.protobuf import saved_metadata_pb2

    from testdata.powers.keras_files import KERAS_FILES

    path = KERAS_FILES["Lambda beside a SavedModel"].write(folder, marker)
    file = path / "keras_metadata.pb"
    saved = saved_metadata_pb2.SavedMetadata.FromString(file.read_bytes())
    proto = _proto(path)
    objects = proto.meta_graphs[0].object_graph_def.nodes
    for node in saved.nodes:
        objects[node.node_id].user_object.metadata = node.metadata
    (path / "saved_model.pb").write_bytes(proto.SerializeToString())
    file.unlink()
    return path


def _load_old(path: Path, marker: Path) -> None:
    from testdata.powers.keras_files import KERAS_FILES

    run = KERAS_FILES["Lambda beside a SavedModel"].run
    if run is not None:
        run(path, marker)


def _asset(lead: Callable[[Path, Path], str | None]) -> FileSample:
    """Return a SavedModel whose vocabulary is the marker, however it leads there."""

    def write(folder: Path, marker: Path) -> Path:
        words = folder / "words.txt"
        words.write_text("a\n")
        file = tf.lookup.TextFileInitializer(
            str(words), tf.string, 0, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        table = tf.lookup.StaticHashTable(_whole_lines(file), -1)
        path = _save(_module(table=table), folder / "net")
        name = lead(path / "assets", marker)
        if name is not None:
            proto = _proto(path)
            proto.meta_graphs[0].asset_file_def[0].filename = name
            (path / "saved_model.pb").write_bytes(proto.SerializeToString())
            shutil.rmtree(path / "assets")
        return path

    return FileSample("read files", write, _load_2)


def _whole_lines(file: Any) -> Any:
    return tf.lookup.TextFileInitializer(
        file._filename,
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )


def _above(assets: Path, marker: Path) -> str:
    return "../../" + str(marker.relative_to(assets.parents[1]))


def _absolute(assets: Path, marker: Path) -> str:
    return str(marker)


def _link(assets: Path, marker: Path) -> None:
    (asset,) = assets.iterdir()
    asset.unlink()
    asset.symlink_to(marker)


def _flex(change: Callable[[bytes], bytes] | None = None) -> FileSample:
    """Return a TFLite file with an op of TensorFlow."""

    def write(folder: Path, marker: Path) -> Path:
        function = tf.function(
            lambda x: {"y": tf.io.read_file(x)},
            input_signature=[tf.TensorSpec([], tf.string, "x")],
        ).get_concrete_function()
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
        converter.target_spec.supported_ops = [tf.lite.OpsSet.SELECT_TF_OPS]
        data = converter.convert()
        (folder / "a.tflite").write_bytes(change(data) if change else data)
        return folder / "a.tflite"

    return FileSample("read files", write, None, _DELEGATE)


def _renamed(data: bytes) -> bytes:
    """Call the op otherwise: its options name what runs."""
    return data.replace(b"FlexReadFile", b"FlexIdentity")


def _custom_op(folder: Path, marker: Path) -> Path:
    path = _flex().write(folder, marker)
    data = path.read_bytes().replace(b"FlexReadFile", b"MyOwnOpOfOne")
    path.write_bytes(data)
    return path


GRAPH_FILES: dict[str, FileSample] = {
    "main op": _version_1(lambda _, wrote: {"main_op": wrote}),
    "legacy init op": _version_1(_legacy),
    "restore op": _version_1(_restoring),
    "save op": _version_1(_saving, _save_again),
    "collection": _version_1(_collected, _run_collection),
    "function of an object": FileSample("write files", _object, _run_object),
    "making of a resource": FileSample("write files", _resource, _load_2),
    "gradient": FileSample("write files", _gradient, _differentiate),
    "text form": FileSample("write files", _text, _run_object),
    "second MetaGraph": FileSample("write files", _second, _run_second),
    "Lambda in the objects": FileSample("run code", _metadata, _load_old),
    "GraphDef": _graph(".pb"),
    "GraphDef as text": _graph(".pbtxt"),
    "MetaGraph": FileSample("write files", _checkpoint, _run_checkpoint),
    "op of a library": FileSample("unknown", _unknown, None, _LIBRARY),
    "asset above the model": _asset(_above),
    "absolute asset": _asset(_absolute),
    "asset that is a link": _asset(_link),
    "op of TensorFlow in TFLite": _flex(),
    "op of TensorFlow by a false name": _flex(_renamed),
    "op of a library in TFLite": FileSample("unknown", _custom_op, None, _LIBRARY),
}
"""What is hidden in SavedModels, graphs and TFLite files."""
