"""Files of SavedModels and GraphDefs: read, and inspected; indexes of checkpoints.

Only functions that parse a proto import TensorFlow. Inspections build no graph and read
no weights; they need TensorFlow for text forms alone. The index of a checkpoint is a
table of sorted keys, as LevelDB writes them: blocks of entries, each of them with a
checksum, a block that lists the blocks, and a footer that says where that one lies.
TensorFlow writes them uncompressed. The values of tensors lie in other files, the
shards, which are not read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from geutil.errors import ModelError, Words
from geutil.formats import SAVED_MODEL_FILES, foreign_kind, is_tflite_file
from geutil.graph.op_types import CALLS
from geutil.model.files import keras_files, wire
from geutil.model.files.inspection import (
    FunctionInfo,
    Inspection,
    SignatureInfo,
    TensorInfo,
    VariableInfo,
)
from geutil.model.files.wire import (
    GRAPH_DEF,
    META_GRAPH,
    SAVED_MODEL,
    Buffer,
    Span,
    message_class,
)

if TYPE_CHECKING:
    from geutil.graph.protos import GraphDef, MetaGraphDef, SavedModel

_FOOTER = 48
"""Bytes at the end of a LevelDB table: two handles of up to 20, and the magic."""
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = 5
"""Bytes behind each block: its type, and a CRC of 32 bits."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")
_PLAIN = 0
"""The type of a block that is not compressed."""
_SLICE = b"\0"
"""Begins the keys of parts of variables, which are listed whole as well."""


@dataclass(frozen=True)
class CheckpointEntry:
    """One tensor that a checkpoint holds."""

    name: str
    dtype: str | None  # The name of its type; None for one that is not known here.
    shape: tuple[int, ...]


def variables_prefix(folder: Path) -> Path:
    """Return the prefix of the checkpoint's files in a SavedModel's directory."""
    return folder / "variables" / "variables"


def has_checkpoint(prefix: Path) -> bool:
    """Return whether there is any file of the checkpoint."""
    return prefix.parent.is_dir() and any(prefix.parent.glob(prefix.name + ".*"))


def checked_index(prefix: Path) -> Path:
    """Return the index of a checkpoint whose files are all there."""
    index = prefix.with_name(prefix.name + ".index")
    if not index.is_file():
        raise ModelError(f"'{index}' is missing: the variables have no index")
    with index.open("rb") as file:
        size = file.seek(0, 2)
        if size < _FOOTER:
            raise ModelError(f"'{index}' is truncated: it has {size} bytes")
        file.seek(size - _FOOTER)
        _block_of_blocks(file.read(_FOOTER), size, index)
    _check_shards(prefix)
    return index


def entries(prefix: Path) -> list[CheckpointEntry]:
    """Return the entries of the index, by name."""
    index = checked_index(prefix)
    entry_class = message_class("BundleEntryProto")
    found = []
    try:
        with wire.mapped(index) as data:
            footer = data[len(data) - _FOOTER :]
            start, length = _block_of_blocks(footer, len(data), index)
            for _, handle in _pairs(_block(data, start, length)):
                at, end = wire.varint(handle, 0, len(handle))
                size, _ = wire.varint(handle, end, len(handle))
                for key, value in _pairs(_block(data, at, size)):
                    # The empty key is that of the header.
                    if key and not key.startswith(_SLICE):
                        entry = wire.parsed(entry_class, value)
                        found.append(_entry(key.decode(), entry))
    except (ModelError, UnicodeDecodeError) as error:
        raise ModelError(f"'{index}' is damaged: {error}") from error
    return found


def _entry(name: str, entry: Any) -> CheckpointEntry:
    dims = tuple(dim.size for dim in entry.shape.dim)
    return CheckpointEntry(name, wire.type_name(entry.dtype), dims)


def _block_of_blocks(footer: bytes, size: int, index: Path) -> tuple[int, int]:
    """Return where the block lies that lists the blocks."""
    # Nothing protects the footer, as a checksum does the blocks: who believed it would
    # allocate as much as it says.
    if not footer.endswith(_MAGIC):
        raise ModelError(f"'{index}' is no index of a checkpoint, or is truncated")
    at = start = length = 0
    for _ in ("blocks' metadata", "blocks"):
        start, at = wire.varint(footer, at, _FOOTER)
        length, at = wire.varint(footer, at, _FOOTER)
        if start + length + _TRAILER > size:
            raise ModelError(
                f"'{index}' is damaged: it points to {length} bytes at {start}, but "
                f"has {size}"
            )
    return start, length


def _block(data: wire.Buffer, start: int, length: int) -> bytes:
    """Return the contents of a block, checked by its checksum."""
    end = start + length
    if end + _TRAILER > len(data):
        raise ModelError(f"a block of {length} bytes at {start} ends behind the file")
    kind = data[end]
    if kind != _PLAIN:
        raise ModelError(f"the block at {start} is compressed, by type {kind}")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    if stored != _masked(_crc32c(data[start : end + 1])):
        raise ModelError(f"the checksum of the block at {start} is wrong")
    return data[start:end]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block; a key omits the shared prefix."""
    count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (count + 1)
    if end < 0:
        raise ModelError("a block is shorter than the list of its places")
    at, key = 0, b""
    while at < end:
        shared, at = wire.varint(block, at, end)
        fresh, at = wire.varint(block, at, end)
        size, at = wire.varint(block, at, end)
        if shared > len(key) or at + fresh + size > end:
            raise ModelError(f"an entry at {at} is longer than its block")
        key = key[:shared] + block[at : at + fresh]
        at += fresh
        yield key, block[at : at + size]
        at += size


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _crc32c(data: bytes) -> int:
    """Return the checksum of Castagnoli's polynomial (RFC 3720)."""
    table, value = _crc_table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _masked(checksum: int) -> int:
    """Return a checksum as LevelDB stores it."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _check_shards(prefix: Path) -> None:
    numbers_by_count: dict[int, set[int]] = {}
    for path in prefix.parent.glob(prefix.name + ".data-*"):
        match = _SHARD.search(path.name)
        if match:
            numbers_by_count.setdefault(int(match[2]), set()).add(int(match[1]))
    if not numbers_by_count:
        raise ModelError(f"the variables' values are missing: no '{prefix}.data-*'")
    for count, numbers in numbers_by_count.items():
        missing = sorted(set(range(count)) - numbers)
        if missing and len(numbers_by_count) == 1:
            raise ModelError(
                f"'{prefix}.data-{missing[0]:05d}-of-{count:05d}' is missing"
            )


PathLike: TypeAlias = str | os.PathLike[str]

_CHUNKED_FILE = "saved_model.cpb"
_REMEDIES = {
    GRAPH_DEF: "read it with geutil.model.open, as a file of its own",
    META_GRAPH: "import it with tf.compat.v1.train.import_meta_graph and pass the "
    "graph, or write its graph_def to a file of its own",
    SAVED_MODEL: "pass the directory that holds it, with the variables beside it",
}
_PREFERRED_TAG = "serve"


def saved_model_file(path: PathLike) -> Path:
    """Return the file in the directory `path` that holds the SavedModel's proto."""
    folder = Path(path)
    if not folder.exists():
        raise ModelError(f"'{folder}' does not exist")
    if not folder.is_dir():
        raise ModelError(f"'{folder}' is a file; a SavedModel is a directory")
    for name in SAVED_MODEL_FILES:
        if (folder / name).is_file():
            return folder / name
    if (folder / _CHUNKED_FILE).exists():
        raise ModelError(
            f"'{folder}' holds a SavedModel in chunks ({_CHUNKED_FILE}), which geutil "
            f"does not read; accepted: {' or '.join(SAVED_MODEL_FILES)}. Load it with "
            "tf.saved_model.load and save it with its weights as variables"
        )
    raise ModelError(
        f"'{folder}' holds no {' or '.join(SAVED_MODEL_FILES)}, so it is no "
        f"SavedModel; it holds {_listed(sorted(p.name for p in folder.iterdir()))}"
    )


def read_saved_model(path: PathLike) -> SavedModel:
    """Read the proto of a SavedModel; variables and assets stay where they are.

    Cost: linear in the file; twice its size in memory for a moment.

    Example:
        >>> saved_model = read_saved_model("testdata/two_signatures")
        >>> list(saved_model.meta_graphs[0].meta_info_def.tags)
        ['serve']
    """
    file = saved_model_file(path)
    saved_model = _read(file, SAVED_MODEL)
    if not saved_model.meta_graphs:
        raise ModelError(f"'{file}' holds no graph: its SavedModel is empty")
    return saved_model


def read_graph_def(path: PathLike) -> GraphDef:
    """Read a GraphDef from a file.

    Cost: linear in the file; twice its size in memory for a moment.

    Example:
        >>> graph_def = read_graph_def("testdata/cond_v1.pbtxt")
        >>> graph_def.node[0].name
        'x'
    """
    file = Path(path)
    if not file.exists():
        raise ModelError(f"'{file}' does not exist")
    if file.is_dir():
        raise ModelError(f"'{file}' is a directory; a GraphDef is a .pb or .pbtxt file")
    return _read(file, GRAPH_DEF)


@contextmanager
def named_in_errors(file: Path) -> Iterator[None]:
    """Name a file in the errors that are raised in this context."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"'{file}': {error}") from error


@contextmanager
def saved_model_bytes(folder: Path) -> Iterator[Buffer]:
    """Map the proto of a SavedModel into memory; a text form is parsed whole."""
    file = saved_model_file(folder)
    if file.suffix == ".pbtxt":
        data = read_saved_model(folder).SerializeToString()
        with named_in_errors(file):
            yield data
        return
    with wire.mapped(file) as buffer:
        check_binary(buffer, file, SAVED_MODEL)
        with named_in_errors(file):
            yield buffer


@contextmanager
def graph_def_bytes(file: Path) -> Iterator[Buffer]:
    """Map a file with a GraphDef into memory; a text form is parsed whole."""
    if file.suffix in (".pbtxt", ".txt"):
        data = read_graph_def(file).SerializeToString()
        with named_in_errors(file):
            yield data
        return
    with wire.mapped(file) as buffer:
        check_binary(buffer, file, GRAPH_DEF)
        with named_in_errors(file):
            yield buffer


def select_meta_graph(
    saved_model: SavedModel, tags: Iterable[str] | None = None
) -> MetaGraphDef:
    """Choose one of the MetaGraphs of a SavedModel, by exactly its tags."""
    # None means the one with the tag "serve" alone, or else the only one there is.
    all_tags = [tuple(m.meta_info_def.tags) for m in saved_model.meta_graphs]
    tag = _PREFERRED_TAG if tags is None else tags
    requested_tags = {tag} if isinstance(tag, str) else set(tag)
    for meta_graph, its_tags in zip(saved_model.meta_graphs, all_tags, strict=True):
        if set(its_tags) == requested_tags:
            return meta_graph
    if tags is None and len(all_tags) == 1:
        return saved_model.meta_graphs[0]
    listed = ", ".join(str(sorted(its_tags)) for its_tags in all_tags) or "none at all"
    if tags is None:
        raise ModelError(
            f"the SavedModel holds several MetaGraphs and none is tagged "
            f"'{_PREFERRED_TAG}' alone; pass the tags of one of them: {listed}"
        )
    raise ModelError(
        f"the SavedModel holds no MetaGraph with the tags {sorted(requested_tags)}; "
        f"it holds {listed}",
        remedy=Words("pass one of these as tags=..."),
    )


def _read(file: Path, expected_kind: str) -> Any:
    data = read_bytes(file)
    if file.suffix in (".pbtxt", ".txt"):
        return _from_text(data, file, expected_kind)
    return _from_binary(data, file, expected_kind)


def read_bytes(file: Path) -> bytes:
    """Return the bytes of `file`."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    if not data:
        raise ModelError(f"'{file}' is empty")
    return data


def what_is(file: Path) -> str:
    """Return the kind of a file, if it is known: for messages."""
    with file.open("rb") as opened:
        kind = foreign_kind(opened.read(16))
    return kind or f"a file, and its suffix '{file.suffix}' says no format"


def check_binary(buffer: Buffer, file: Path, expected_kind: str) -> None:
    """Check which proto a file holds, by the look of it."""
    foreign = foreign_kind(buffer[:16])
    if foreign:
        raise ModelError(f"'{file}' is {foreign}, no {expected_kind}")
    try:
        kind = wire.binary_kind(buffer)
    except ModelError as error:
        hint = wire.text_kind(buffer[:4096].decode(errors="replace"))
        if hint:
            raise ModelError(
                f"'{file}' is a {hint} in text form: name it .pbtxt"
            ) from error
        raise ModelError(f"'{file}' holds no whole {expected_kind}: {error}") from error
    _check_kind(kind, expected_kind, file)


def _check_kind(actual_kind: str | None, expected_kind: str, file: Path) -> None:
    if actual_kind == expected_kind:
        return
    if actual_kind is None:
        raise ModelError(
            f"'{file}' holds no {expected_kind}, nor another proto of a model"
        )
    raise ModelError(
        f"'{file}' holds a {actual_kind}, no {expected_kind}: {_REMEDIES[actual_kind]}"
    )


def _from_binary(data: bytes, file: Path, expected_kind: str) -> Any:
    from geutil.graph import protos

    check_binary(data, file, expected_kind)
    try:
        return getattr(protos, expected_kind).FromString(data)
    except protos.PARSE_ERRORS as error:
        raise ModelError(
            f"'{file}' holds no whole {expected_kind}, it is truncated or damaged: "
            f"{error}"
        ) from error


def _from_text(data: bytes, file: Path, expected_kind: str) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"'{file}' is no text: {error}") from error
    kind = wire.text_kind(text)
    if kind is not None:
        _check_kind(kind, expected_kind, file)
    from geutil.graph import protos

    try:
        return protos.parse_text(text, getattr(protos, expected_kind)())
    except protos.PARSE_ERRORS as error:
        raise ModelError(
            f"'{file}' holds no {expected_kind} in text form: {error}"
        ) from error


def _listed(names: list[str], shown: int = 8) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "nothing") + more


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
    with graph_def_bytes(file) as buffer:
        return _with_graph(partial_inspection, buffer, (0, len(buffer)))


def _inspect_directory(folder: Path, tags: Iterable[str] | None) -> Inspection:
    prefix = variables_prefix(folder)
    partial_inspection = Inspection(
        SAVED_MODEL,
        folder,
        bytes_total=_bytes(folder.rglob("*")),
        bytes_variables=_bytes(prefix.parent.glob("*")),
    )
    with saved_model_bytes(folder) as buffer:
        return _with_saved_model(partial_inspection, buffer, tags)


def _with_saved_model(
    partial_inspection: Inspection, buffer: Buffer, tags: Iterable[str] | None
) -> Inspection:
    places = wire.spans(buffer, (0, len(buffer)), "SavedModel.meta_graphs")
    meta_graph_class = message_class("MetaGraphDef")
    slim = message_class("SavedModel")()
    for place in places:
        # Everything but the graph and the objects: tags, signatures, assets.
        slim.meta_graphs.append(wire.message(buffer, place, meta_graph_class, 1, 5, 6))
    chosen = select_meta_graph(slim, tags)
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
    prefix = variables_prefix(folder)
    if variables or not has_checkpoint(prefix):
        return tuple(variables)
    return tuple(
        VariableInfo(entry.name, TensorInfo(entry.dtype, entry.shape), None)
        for entry in entries(prefix)
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
