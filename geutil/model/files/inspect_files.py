"""Inspections of SavedModels and GraphDefs: no graph is built, no weights are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import protos
from geutil.graph.protos import FunctionDef, GraphDef, MetaGraphDef, SavedModel
from geutil.model.files import inspection, loading, reading, wire
from geutil.model.files.inspection import Inspection, TensorInfo, VariableInfo
from geutil.model.files.wire import GRAPH_DEF, SAVED_MODEL, Buffer, Span

_NODE, _LIBRARY = 1, 2
_GRAPH = 2
_META_GRAPHS = 2
_OBJECTS = 7
_CONSTANT = "Const"
_INTERNAL = "__saved_model_"
"""Begins the names of signatures that TensorFlow keeps for its loader."""


def inspect_graphs(
    source: Path, tags: Iterable[str] | None, *, is_directory: bool
) -> Inspection:
    """Return an inspection of a SavedModel, or of a file with a GraphDef.

    Raises:
        ModelError: it is damaged, or of another kind.

    Cost: linear in the nodes; memory for some of them at a time. Text forms are parsed
    whole.
    """
    return _inspect_directory(source, tags) if is_directory else _inspect_file(source)


def _inspect_file(file: Path) -> Inspection:
    partial_inspection = Inspection(GRAPH_DEF, file, bytes_total=file.stat().st_size)
    if file.suffix in (".pbtxt", ".txt"):
        data = reading.read_graph_def(file).SerializeToString()
        return _with_graph(partial_inspection, data, (0, len(data)))
    with wire.mapped(file) as buffer:
        reading.check_binary(buffer, file, GRAPH_DEF)
        return _told(file, _with_graph, partial_inspection, buffer, (0, len(buffer)))


def _inspect_directory(folder: Path, tags: Iterable[str] | None) -> Inspection:
    file = reading.saved_model_file(folder)
    prefix = loading.variables_prefix(folder)
    partial_inspection = Inspection(
        SAVED_MODEL,
        folder,
        bytes_total=_bytes(folder.rglob("*")),
        bytes_variables=_bytes(prefix.parent.glob("*")),
    )
    if file.suffix == ".pbtxt":
        data = reading.read_saved_model(folder).SerializeToString()
        return _told(file, _with_saved_model, partial_inspection, data, tags)
    with wire.mapped(file) as buffer:
        reading.check_binary(buffer, file, SAVED_MODEL)
        return _told(file, _with_saved_model, partial_inspection, buffer, tags)


def _told(file: Path, function: Any, *arguments: Any) -> Any:
    """Call a function, and name the file in its errors."""
    try:
        return function(*arguments)
    except ModelError as error:
        raise ModelError(f"'{file}': {error}") from error


def _with_saved_model(
    partial_inspection: Inspection, buffer: Buffer, tags: Iterable[str] | None
) -> Inspection:
    places = wire.spans(buffer, (0, len(buffer)), _META_GRAPHS)
    # Everything of each MetaGraph but its graph and objects: 1 and 3 to 6.
    slim = SavedModel()
    for place in places:
        meta_graph = wire.message(buffer, place, MetaGraphDef, 1, 3, 4, 5, 6)
        slim.meta_graphs.append(meta_graph)
    chosen = reading.select_meta_graph(slim, tags)
    place = next(
        place
        for place, meta_graph in zip(places, slim.meta_graphs, strict=True)
        if meta_graph is chosen
    )
    partial_inspection = replace(
        partial_inspection,
        tags=tuple(chosen.meta_info_def.tags),
        version=chosen.meta_info_def.tensorflow_version,
        signatures={
            name: _signature(chosen.signature_def[name])
            for name in sorted(chosen.signature_def)
            if not name.startswith(_INTERNAL)
        },
        assets=tuple(asset.filename for asset in chosen.asset_file_def),
        variables=_variables(partial_inspection.path, buffer, place),
    )
    for graph in wire.spans(buffer, place, _GRAPH):
        partial_inspection = _with_graph(partial_inspection, buffer, graph)
    return partial_inspection


def _with_graph(
    partial_inspection: Inspection, buffer: Buffer, graph: Span
) -> Inspection:
    """Add the ops, functions and constants of a `GraphDef` to an inspection."""
    ops, constants = _count(wire.elements(buffer, graph, GraphDef, "node"))
    function_ops: Counter[str] = Counter()
    functions = []
    for library in wire.spans(buffer, graph, _LIBRARY):
        for place in wire.spans(buffer, library, _NODE):
            signature = wire.message(buffer, place, FunctionDef, 1).signature
            counts, more = _count(wire.elements(buffer, place, FunctionDef, "node_def"))
            function_ops.update(counts)
            constants += more
            functions.append(
                inspection.FunctionInfo(
                    signature.name,
                    counts.total(),
                    len(signature.input_arg),
                    len(signature.output_arg),
                )
            )
    return replace(
        partial_inspection,
        ops=_ordered(ops),
        function_ops=_ordered(function_ops),
        functions=tuple(functions),
        bytes_constants=constants,
    )


def _count(nodes: Iterable[tuple[Any, int]]) -> tuple[Counter[str], int]:
    """Return how many nodes of each type there are, and the bytes of constants."""
    counts: Counter[str] = Counter()
    constants = 0
    for node, left_out in nodes:
        op = node.op
        counts[op] += 1
        if op == _CONSTANT and "value" in node.attr:
            constants += node.attr["value"].tensor.ByteSize() + left_out
    return counts, constants


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _signature(signature: Any) -> inspection.SignatureInfo:
    def tensors(infos: Any) -> dict[str, TensorInfo]:
        return {
            name: tensor_info(infos[name].dtype, infos[name].tensor_shape)
            for name in sorted(infos)
        }

    return inspection.SignatureInfo(
        tensors(signature.inputs), tensors(signature.outputs)
    )


def tensor_info(dtype: int, shape: Any) -> TensorInfo:
    """Return the type and shape that protos tell."""
    tf_dtype = None
    with suppress(TypeError):
        tf_dtype = tf.dtypes.as_dtype(dtype)
    if shape.unknown_rank:
        return TensorInfo(tf_dtype, None)
    return TensorInfo(
        tf_dtype, tuple(d.size if d.size >= 0 else None for d in shape.dim)
    )


def _variables(folder: Path, buffer: Buffer, place: Span) -> tuple[VariableInfo, ...]:
    """Return the variables of the object graph, or else those of the checkpoint."""
    variables = [
        VariableInfo(
            variable.name,
            tensor_info(variable.dtype, variable.shape),
            variable.trainable,
        )
        for objects in wire.spans(buffer, place, _OBJECTS)
        for node, _ in wire.elements(buffer, objects, protos.SavedObjectGraph, "nodes")
        if node.WhichOneof("kind") == "variable"
        for variable in (node.variable,)
    ]
    prefix = loading.variables_prefix(folder)
    if variables or not loading.has_checkpoint(prefix):
        return tuple(variables)
    return tuple(
        VariableInfo(entry.name, TensorInfo(entry.dtype, entry.shape), None)
        for entry in loading.entries(prefix)
    )


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
