"""Inspections of SavedModels and GraphDefs: no graph is built, no weights are read.

No TensorFlow is needed, but for text forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geutil.errors import ModelError
from geutil.formats import is_tflite_file
from geutil.graph.op_types import CALLS
from geutil.model.files import keras_files, proto_files, wire
from geutil.model.files.inspection import (
    FunctionInfo,
    Inspection,
    SignatureInfo,
    TensorInfo,
    VariableInfo,
)
from geutil.model.files.proto_files import PathLike
from geutil.model.files.wire import GRAPH_DEF, SAVED_MODEL, Buffer, Span, message_class

_CONSTANT = "Const"
_WRAPPER = 8
"""Ops that a function has at most which calls another one for a signature."""
_KNOWN = "serving_default"
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The entry of a checkpoint that says which object has which variable."""
_INTERNAL = "__saved_model_"
"""Begins the names of signatures that TensorFlow keeps for its loader."""


def inspect_graphs(
    source: Path, tags: Iterable[str] | None, *, is_directory: bool
) -> Inspection:
    """Return an inspection of a SavedModel, or of a file with a GraphDef."""
    # Some nodes are in memory at a time; text forms are parsed whole.
    return _inspect_directory(source, tags) if is_directory else _inspect_file(source)


def _inspect_file(file: Path) -> Inspection:
    partial_inspection = Inspection(GRAPH_DEF, file, bytes_total=file.stat().st_size)
    if file.suffix in (".pbtxt", ".txt"):
        data = proto_files.read_graph_def(file).SerializeToString()
        return _with_graph(partial_inspection, data, (0, len(data)))
    with wire.mapped(file) as buffer:
        proto_files.check_binary(buffer, file, GRAPH_DEF)
        return _told(file, _with_graph, partial_inspection, buffer, (0, len(buffer)))


def _inspect_directory(folder: Path, tags: Iterable[str] | None) -> Inspection:
    file = proto_files.saved_model_file(folder)
    prefix = proto_files.variables_prefix(folder)
    partial_inspection = Inspection(
        SAVED_MODEL,
        folder,
        bytes_total=_bytes(folder.rglob("*")),
        bytes_variables=_bytes(prefix.parent.glob("*")),
    )
    if file.suffix == ".pbtxt":
        data = proto_files.read_saved_model(folder).SerializeToString()
        return _told(file, _with_saved_model, partial_inspection, data, tags)
    with wire.mapped(file) as buffer:
        proto_files.check_binary(buffer, file, SAVED_MODEL)
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
    places = wire.spans(buffer, (0, len(buffer)), "SavedModel.meta_graphs")
    meta_graph_class = message_class("MetaGraphDef")
    slim = message_class("SavedModel")()
    for place in places:
        # Everything but the graph and the objects: tags, signatures, assets.
        slim.meta_graphs.append(wire.message(buffer, place, meta_graph_class, 1, 5, 6))
    chosen = proto_files.select_meta_graph(slim, tags)
    place = next(
        place
        for place, meta_graph in zip(places, slim.meta_graphs, strict=True)
        if meta_graph is chosen
    )
    signatures = {
        name: chosen.signature_def[name]
        for name in sorted(chosen.signature_def)
        if not name.startswith(_INTERNAL)
    }
    partial_inspection = replace(
        partial_inspection,
        tags=tuple(chosen.meta_info_def.tags),
        version=chosen.meta_info_def.tensorflow_version,
        signatures={name: _signature(proto) for name, proto in signatures.items()},
        assets=tuple(asset.filename for asset in chosen.asset_file_def),
        variables=_variables(partial_inspection.path, buffer, place),
    )
    for graph in wire.spans(buffer, place, "MetaGraphDef.graph_def"):
        calls = _CountedCalls()
        partial_inspection = _with_graph(partial_inspection, buffer, graph, calls)
        aliases = _aliases(signatures, calls)
        partial_inspection = replace(partial_inspection, aliases=aliases)
    return partial_inspection


@dataclass
class _CountedCalls:
    """The known facts of the calls in a graph: enough to tell equal signatures."""

    # The nodes of the main graph that call functions, by name.
    nodes: dict[str, Any] = field(default_factory=dict)
    # The ops of small functions, with their arguments by number: functions of which
    # this is equal compute the same.
    wrappers: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def note_function(self, signature: Any, nodes: list[Any], ret: Any) -> None:
        """Note the ops of a function, if they are few."""
        numbers = {arg.name: f"#{i}" for i, arg in enumerate(signature.input_arg)}
        body = tuple(
            (
                node.name,
                node.op,
                tuple(numbers.get(name, name) for name in node.input),
                tuple(sorted((k, v.SerializeToString()) for k, v in node.attr.items())),
            )
            for node in nodes
        )
        results = tuple(ret[arg.name] for arg in signature.output_arg)
        given = tuple(numbers.get(name, name) for name in results)
        self.wrappers[signature.name] = (len(numbers), body, given)

    def computed(self, signature: Any) -> tuple[Any, ...] | None:
        """Return a key of a signature's computation; None if it is no call."""
        names = {_op_name(signature.inputs[key].name): key for key in signature.inputs}
        found = []
        for key in sorted(signature.outputs):
            tensor = signature.outputs[key].name
            node = self.nodes.get(_op_name(tensor))
            if node is None:
                return None
            callee = node.attr["func" if "func" in node.attr else "f"].func.name
            given = tuple(f"input {names[n]}" if n in names else n for n in node.input)
            function = self.wrappers.get(callee, (callee,))
            found.append((key, tensor.partition(":")[2], node.op, function, given))
        return tuple(found)


def _op_name(tensor: str) -> str:
    return tensor.partition(":")[0]


def _aliases(signatures: Mapping[str, Any], calls: _CountedCalls) -> dict[str, str]:
    """Return the signatures that are the same as another, and which one."""
    first: dict[Any, str] = {}
    aliases = {}
    # The name that users know replaces the others.
    for name in sorted(signatures, key=lambda name: (name != _KNOWN, name)):
        proto = signatures[name]
        computed = calls.computed(proto)
        if computed is not None:
            info = str(_signature(proto))
            known = first.setdefault((info, computed), name)
            if known != name:
                aliases[name] = known
    return aliases


def _with_graph(
    partial_inspection: Inspection,
    buffer: Buffer,
    graph: Span,
    calls: _CountedCalls | None = None,
) -> Inspection:
    """Add the ops, functions and constants of a `GraphDef` to an inspection."""
    known = _CountedCalls() if calls is None else calls
    graph_class, function_class = map(message_class, (GRAPH_DEF, "FunctionDef"))
    ops, constants = _count(wire.elements(buffer, graph, graph_class, "node"), known)
    function_ops: Counter[str] = Counter()
    functions = []
    for library in wire.spans(buffer, graph, "GraphDef.library"):
        for place in wire.spans(buffer, library, "FunctionDefLibrary.function"):
            head = wire.message(buffer, place, function_class, 1, 4)
            signature = head.signature
            nodes = wire.elements(buffer, place, function_class, "node_def")
            small: list[Any] = []
            counts, more = _count(_kept(nodes, small))
            if len(small) <= _WRAPPER:
                known.note_function(signature, small, head.ret)
            function_ops.update(counts)
            constants += more
            functions.append(
                FunctionInfo(
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


def _kept(
    nodes: Iterable[tuple[Any, int]], first: list[Any]
) -> Iterable[tuple[Any, int]]:
    """Pass nodes on, and keep the first: one more than a wrapper has."""
    for node, left_out in nodes:
        if len(first) <= _WRAPPER:
            # One that has lost a long value is like no other.
            first += [node] * (_WRAPPER + 1 if left_out else 1)
        yield node, left_out


def _count(
    nodes: Iterable[tuple[Any, int]], calls: _CountedCalls | None = None
) -> tuple[Counter[str], int]:
    """Return how many nodes of each type there are, and the bytes of constants."""
    counts: Counter[str] = Counter()
    constants = 0
    for node, left_out in nodes:
        op = node.op
        counts[op] += 1
        if op == _CONSTANT and "value" in node.attr:
            constants += node.attr["value"].tensor.ByteSize() + left_out
        elif calls is not None and op in CALLS:
            calls.nodes[node.name] = node
    return counts, constants


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _signature(signature: Any) -> SignatureInfo:
    def tensors(infos: Any) -> dict[str, TensorInfo]:
        return {
            name: _tensor_info(infos[name].dtype, infos[name].tensor_shape)
            for name in sorted(infos)
        }

    return SignatureInfo(tensors(signature.inputs), tensors(signature.outputs))


def _tensor_info(dtype: int, shape: Any) -> TensorInfo:
    """Return the type and shape that protos tell."""
    name = wire.type_name(dtype)
    if shape.unknown_rank:
        return TensorInfo(name, None)
    return TensorInfo(name, tuple(d.size if d.size >= 0 else None for d in shape.dim))


def _variables(folder: Path, buffer: Buffer, place: Span) -> tuple[VariableInfo, ...]:
    """Return the variables of the object graph, or else those of the checkpoint."""
    graph_class = message_class("SavedObjectGraph")
    variables = [
        VariableInfo(
            variable.name,
            _tensor_info(variable.dtype, variable.shape),
            variable.trainable,
        )
        for objects in wire.spans(buffer, place, "MetaGraphDef.object_graph_def")
        for node, _ in wire.elements(buffer, objects, graph_class, "nodes")
        if node.HasField("variable")
        for variable in (node.variable,)
    ]
    prefix = proto_files.variables_prefix(folder)
    if variables or not proto_files.has_checkpoint(prefix):
        return tuple(variables)
    return tuple(
        VariableInfo(entry.name, TensorInfo(entry.dtype, entry.shape), None)
        for entry in proto_files.entries(prefix)
        if entry.name != _OBJECT_GRAPH
    )


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def inspect(path: PathLike, *, tags: Iterable[str] | None = None) -> Inspection:
    """Describe a model: signatures, ops, functions, variables, sizes.

    This reads only its files: it builds no graph, creates no object, executes nothing,
    and does not read the values of variables and large constants.

    Args:
        path: the directory of a SavedModel, a `.pb` or `.pbtxt` file with a GraphDef, a
            `.keras` or `.h5` file, or a `.tflite` file, which gives a
            `TFLiteInspection`.
        tags: exactly the tags of the MetaGraph of a SavedModel; None means "serve", or
            the only one there is.

    Raises:
        ModelError: there is nothing there, it is damaged, or of another kind.

    Cost: linear in the nodes; memory for some of them at a time. TensorFlow is needed
    only for text formats, which it parses as a whole.

    Example:
        >>> found = inspect("testdata/two_signatures")
        >>> print(found.signatures["encode"].inputs["x"], found.variables[0].tensor)
        float32 [n,3] float32 [3,2]
        >>> found.ops["VarHandleOp"]
        1
    """
    source = Path(path)
    if not source.exists():
        raise ModelError(f"'{source}' does not exist")
    is_directory = source.is_dir()
    if not is_directory and source.suffix in keras_files.KERAS_SUFFIXES:
        return keras_files.inspect_keras(source)
    if not is_directory and is_tflite_file(source):
        # Other files need no classes of TFLite, which take 0.1 s to make.
        from geutil.model.files.inspection import inspect_tflite

        return inspect_tflite(source)
    return inspect_graphs(source, tags, is_directory=is_directory)
