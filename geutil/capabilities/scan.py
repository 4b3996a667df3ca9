"""The capabilities of a model, read from its files, of whatever kind they are."""

from __future__ import annotations

import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from geutil.capabilities import capability_kinds
from geutil.capabilities.capability_kinds import (
    LOADED,
    MAIN,
    POWERS,
    RUN,
    Found,
    KnownString,
    Power,
    Powers,
    ScannedBody,
    ScannedNode,
    bodies_of,
    is_memory_cache,
    items,
    power_of_node,
    powers_of_config,
    powers_of_metadata,
    powers_of_text,
)
from geutil.errors import ModelError
from geutil.formats import is_tflite_file
from geutil.graph.walks import closure, data_inputs, node_name, topological_order, walk
from geutil.model.files import proto_files, wire
from geutil.model.files.keras_files import (
    KERAS_SUFFIXES,
    Hdf5File,
    configurations,
    read_hdf5,
)
from geutil.model.files.proto_files import PathLike
from geutil.model.files.wire import (
    META_GRAPH,
    Buffer,
    Span,
    message_class,
)

if TYPE_CHECKING:
    from geutil.tflite import LiteOp

_CONFIG = "config.json"
_WEIGHTS = (".h5", ".hdf5")
_EXPANSION, _FLOOR = 100, 1 << 28
"""How many times its size, and how many bytes, an entry expands to that is a bomb."""
_HEADER, _MARK = struct.Struct("<4s5H3L2H"), b"PK\x03\x04"
_STREAMED = 8
"""The flag of entries whose sizes stand behind them."""
_CUSTOM_KERNELS = frozenset(
    ("AudioSpectrogram", "Mfcc", "NumericVerify", "TFLite_Detection_PostProcess")
)
"""Custom ops that TFLite's own interpreter has kernels of."""
_FLEX = "Flex"
"""Begins the kinds of ops of TensorFlow in TFLite files."""
_FOREIGN = frozenset(
    ("DELEGATE", "PLACEHOLDER_FOR_GREATER_OP_CODES", "STABLEHLO_CUSTOM_CALL")
)
"""Ops of TFLite that others run."""


def _powers_of_keras(file: Path, *, values: bool = True) -> tuple[list[Power], int]:
    """Return the capabilities of a `.keras` or HDF5 file, and its number of layers."""
    config, training = configurations(file)
    is_archive = file.suffix == ".keras"
    place = _CONFIG if is_archive else "its configuration"
    entries = list(powers_of_config(config, place))
    entries += powers_of_config(training, "its training configuration")
    if is_archive:
        entries += _in_entries(file, values=values)
    else:
        entries += _in_links(read_hdf5(file), file.name)
    return entries, sum(1 for item, _ in items(config) if "class_name" in item)


def _in_entries(file: Path, *, values: bool) -> Iterator[Power]:
    """Yield the oddities of an archive's entries, and links in its weights."""
    with zipfile.ZipFile(file) as archive, wire.mapped(file) as buffer:
        infos = archive.infolist()
        problems = [(info, _problem(info, buffer)) for info in infos]
    weights = []
    counts = Counter(info.filename for info in infos)
    for info, found in problems:
        problem = found
        if counts[info.filename] > 1:
            problem = "which is there more than once: readers differ in which counts"
        if problem:
            detail = f"'{info.filename}', {problem}"
            yield Power(
                capability_kinds.WRITE,
                info.filename,
                "entry",
                file.name,
                LOADED,
                (),
                detail,
            )
        elif info.filename.endswith(_WEIGHTS) and not info.is_dir():
            weights.append(info.filename)
    if weights and values:
        yield from _in_links(read_hdf5(file, tuple(weights)), file.name)


def _problem(info: zipfile.ZipInfo, buffer: Buffer) -> str:
    """Return the oddity of an entry; "" if nothing is."""
    path = PurePosixPath(info.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in info.filename[:2]:
        return "which lies outside of the archive"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "which is a link"
    if info.file_size > max(_FLOOR, _EXPANSION * info.compress_size):
        return f"which expands to {info.file_size:,} bytes"
    head = buffer[info.header_offset : info.header_offset + _HEADER.size]
    if len(head) < _HEADER.size:
        return "which lies behind the end of the file"
    mark, _, flags, method, _, _, _, packed, size, length, _ = _HEADER.unpack(head)
    start = info.header_offset + _HEADER.size
    name = buffer[start : start + length].split(b"\0")[0]
    sizes = (packed, size) if not flags & _STREAMED else (0, 0)
    is_same = (mark, method) == (_MARK, info.compress_type) and name in (
        info.orig_filename.encode(),
        info.orig_filename.encode("cp437", errors="replace"),
    )
    # Sizes beyond 4 GB stand elsewhere.
    known = (info.compress_size, info.file_size)
    if not is_same or any(
        said not in (0, 0xFFFFFFFF, true)
        for said, true in zip(sizes, known, strict=True)
    ):
        return "whose own header says something else: readers differ in which counts"
    return ""


def _in_links(content: Hdf5File, name: str) -> Iterator[Power]:
    """Yield the links and datasets of an HDF5 file that read other files."""
    for path, kind, source in content.outside:
        yield Power(capability_kinds.READ, path, kind, name, LOADED, (), f"'{source}'")


def _powers_of_tflite(file: Path) -> tuple[list[Power], int]:
    """Return the capabilities of a TFLite file, and how many ops it has.

    TFLite's own kernels compute. Flex ops are TensorFlow's, and have their
    capabilities.
    """
    # Files of Keras need no classes of TFLite, which take 0.1 s to make.
    from geutil.model.files.inspection import read_tflite

    content = read_tflite(file)
    entries = []
    count = 0
    for number, graph in enumerate(content.graphs):
        place = f"subgraph {number}" if number else MAIN
        for index, op in enumerate(graph.ops):
            count += 1
            kind, detail = _power_of_lite(op)
            if kind not in capability_kinds.HARMLESS:
                by = ("whoever runs it",)
                entries.append(Power(kind, str(index), op.kind, place, RUN, by, detail))
    return entries, count


def _power_of_lite(op: LiteOp) -> tuple[str, str]:
    """Return the capability of an op of a TFLite file, and its detail."""
    if not op.is_custom:
        return (
            capability_kinds.UNKNOWN
            if op.kind in _FOREIGN
            else capability_kinds.COMPUTE
        ), ""
    if not op.kind.startswith(_FLEX):
        is_own = op.kind in _CUSTOM_KERNELS
        return (capability_kinds.COMPUTE if is_own else capability_kinds.UNKNOWN), ""
    from flatbuffers import flexbuffers

    try:
        # The name of the op, and its node: the runtime looks at these alone.
        parts = flexbuffers.GetRoot(bytearray(op.custom_options)).AsVector
        data = bytes(parts[1].AsStringBytes)
        node = wire.parsed(message_class("NodeDef"), data)
    except Exception:
        # A damaged file raises any error that its reader comes across.
        return capability_kinds.UNKNOWN, "its options hold no op of TensorFlow"
    kind, detail = power_of_node(node)
    if node.op != op.kind.removeprefix(_FLEX):
        detail = f"op '{node.op}' {detail}".rstrip()
    return kind, detail


def powers(source: PathLike) -> Powers:
    """Report the capabilities of a model beyond computing and keeping its own state.

    A TensorFlow graph is a program: its ops can read and write files, open connections
    and run Python, while it is loaded or when it runs. A table classifies each op of
    TensorFlow; an op that is not in the table is reported as unknown. Function bodies,
    initializers and every MetaGraph are examined. Nothing is run, no graph is built,
    and TensorFlow is imported only for text formats.

    Bugs in kernels (such as writes to wrong memory) and libraries of custom ops are not
    examined: run an untrusted model in a sandboxed process.

    In Keras files the configuration is searched, at any depth, for layers that contain
    code or read files, and for classes and functions of modules that do more than
    compute; so are the links of HDF5 files, also within archives, and the entries of
    archives. In TFLite files custom ops are reported, and TensorFlow ops by the same
    table.

    Args:
        source: the directory of a SavedModel, or a `.pb`, `.pbtxt`, `.meta`, `.keras`,
            `.h5` or `.tflite` file.

    Returns:
        The capabilities, op by op.

    Raises:
        ModelError: there is nothing there, it is damaged, or of another kind.

    Cost: linear in the nodes; memory for some of them at a time. Graphs that contain
    ops with capabilities are held whole, without their long constants. HDF5 is read in
    another process, which takes a third of a second.

    Example:
        >>> from geutil.model import powers
        >>> powers("testdata/two_signatures").computes_only
        True
    """
    return _powers(Path(source))


def powers_without_values(source: PathLike) -> Powers:
    """Report the capabilities of a model whose weights are not read, as `powers` does.

    In HDF5 files of weights within an archive no links are looked for.
    """
    return _powers(Path(source), values=False)


def _powers(path: Path, *, values: bool = True) -> Powers:
    if not path.exists():
        raise ModelError(f"'{path}' does not exist")
    if path.is_dir():
        entries, ops = _powers_of_directory(path)
    elif path.suffix in KERAS_SUFFIXES:
        entries, ops = _powers_of_keras(path, values=values)
    elif is_tflite_file(path):
        entries, ops = _powers_of_tflite(path)
    else:
        entries, ops = _powers_of_file(path)
    # Libraries have their functions in an order that differs from file to file.
    ordered = sorted(
        entries, key=lambda e: (POWERS.index(e.kind), e.when, e.by, e.name, e.place)
    )
    return Powers(path, tuple(ordered), ops)


_INIT, _SAVER = "loading", "saving and restoring variables"
_INIT_SIGNATURE = "__saved_model_init_op"
_INIT_COLLECTIONS = ("legacy_init_op", "saved_model_main_op", "table_initializer")
_AT_LOAD = frozenset(("_initialize", "_create_resource", "_destroy_resource"))
"""The functions of resources that loaders call."""
_TRACE = re.compile(r"\.trace_\d+$")
_WRITES = frozenset(("Save", "SaveSlices", "SaveV2"))
_SAVING = _WRITES | {"MergeV2Checkpoints", "Restore", "RestoreSlice", "RestoreV2"}
_TABLE_FILES = ("InitializeTableFromTextFile", "InitializeTableFromTextFileV2")
_ASSETS = "assets"
_METADATA = "keras_metadata.pb"


def _powers_of_directory(folder: Path) -> tuple[list[Power], int]:
    """Return the capabilities of a SavedModel, and how many ops it has.

    All its MetaGraphs are looked at, whichever would be loaded.
    """
    entries: list[Power] = []
    ops = 0
    with proto_files.saved_model_bytes(folder) as buffer:
        for place in wire.spans(buffer, (0, len(buffer)), "SavedModel.meta_graphs"):
            found, count = _MetaGraph(buffer, place, folder).told()
            entries += found
            ops += count
    metadata = folder / _METADATA
    # An empty file cannot be mapped into memory.
    if metadata.is_file() and metadata.stat().st_size:
        with wire.mapped(metadata) as buffer, proto_files.named_in_errors(metadata):
            entries += powers_of_metadata(buffer)
    return entries, ops


def _powers_of_file(file: Path) -> tuple[list[Power], int]:
    """Return the capabilities of a file with a GraphDef, and how many ops it has.

    MetaGraphs of version 1, as checkpoints have them, are looked at, too.
    """
    if file.suffix == ".meta":
        with wire.mapped(file) as buffer:
            proto_files.check_binary(buffer, file, META_GRAPH)
            with proto_files.named_in_errors(file):
                return _MetaGraph(buffer, (0, len(buffer)), file.parent).told()
    with proto_files.graph_def_bytes(file) as buffer:
        return _of_graph(buffer, (0, len(buffer)))


def _of_graph(buffer: Buffer, span: Span) -> tuple[list[Power], int]:
    main, functions = bodies_of(buffer, span)
    called = _closure(functions, (name for _, names in main.calls for name in names))
    backward = _closure(functions, main.gradients)

    def by(name: str) -> tuple[str, ...]:
        runs = (_CALLERS,) if name in called or not name else ()
        return (*runs, _BACKWARD) if name in backward else runs

    entries = [
        _power(body, found, RUN, by(name))
        for name, body in {"": main, **functions}.items()
        for found in _kept(body, functions)
    ]
    return entries, main.count + sum(body.count for body in functions.values())


_CALLERS = "whoever runs the graph"
_BACKWARD = "whoever differentiates it"


def _kept(body: ScannedBody, functions: dict[str, ScannedBody]) -> Iterator[Found]:
    """Yield the ops of a body to be reported, functions called by name apart."""
    for found in body.found:
        if found.kind == capability_kinds.UNKNOWN and found.node.op in functions:
            continue
        if not is_memory_cache(body, found):
            yield found


def _power(
    body: ScannedBody,
    found: Found,
    when: str,
    by: tuple[str, ...],
    detail: str | None = None,
) -> Power:
    told = body.detail(found)[0] if detail is None else detail
    return Power(found.kind, found.node.name, found.node.op, body.place, when, by, told)


def _closure(
    functions: dict[str, ScannedBody], roots: Iterable[str]
) -> Collection[str]:
    """Return the names of all functions that some call, with these."""
    known = (name for name in roots if name in functions)
    return closure(known, lambda name: _callees(functions[name], functions))


def _callees(body: ScannedBody, functions: dict[str, ScannedBody]) -> Iterator[str]:
    for _, names in body.calls:
        yield from (name for name in names if name in functions)
    # Version 1 calls functions by ops of their names.
    for found in body.found:
        if found.node.op in functions:
            yield found.node.op


class _MetaGraph:
    """A MetaGraph: its graph, functions and objects, and their triggers."""

    def __init__(self, buffer: Buffer, place: Span, folder: Path) -> None:
        kind = message_class("MetaGraphDef")
        self._proto = wire.message(buffer, place, kind, 1, 3, 4, 5, 6)
        self._objects = wire.message(buffer, place, kind, 7).object_graph_def
        self._folder = folder
        self._buffer, self._place = buffer, place
        self._graphs = [
            bodies_of(buffer, graph)
            for graph in wire.spans(buffer, place, "MetaGraphDef.graph_def")
        ]

    def told(self) -> tuple[list[Power], int]:
        """Return its capabilities, and the number of its ops."""
        entries: list[Power] = []
        ops = 0
        for main, functions in self._graphs:
            ops += main.count + sum(body.count for body in functions.values())
            bodies = {"": main, **functions}
            if any(body.found for body in bodies.values()):
                reach = _Reach(self._proto, self._objects, main, functions)
                for name, body in bodies.items():
                    for found in _kept(body, functions):
                        entries += self._entry(reach, name, body, found)
        return [*entries, *self._layers(), *self._assets()], ops

    def _layers(self) -> Iterator[Power]:
        """Yield the capabilities of layers' configurations, as Keras 2 wrote them."""
        buffer = self._buffer
        for objects in wire.spans(buffer, self._place, "MetaGraphDef.object_graph_def"):
            for node in wire.spans(buffer, objects, "SavedObjectGraph.nodes"):
                for user in wire.spans(buffer, node, 4):
                    for start, end in wire.spans(buffer, user, 3):
                        yield from powers_of_text(buffer[start:end], "its objects")

    def _entry(
        self, reach: _Reach, name: str, body: ScannedBody, found: Found
    ) -> Iterator[Power]:
        entries = reach.entries(name, found.node.name)
        # A Saver of the graph's own is run by nothing: only its own code has a use
        # for it. Without a loader the path may be the default, too.
        idle = not entries and not name
        saves = (entries == {_SAVER} or idle) and found.node.op in _SAVING
        if saves and _is_saver(body, found, is_passed=not idle):
            return
        detail, value = body.detail(found)
        if found.node.op in _TABLE_FILES:
            assets = reach.assets(name, value)
            if assets is not None:
                return
        when = LOADED if entries & {_INIT} or self._restores(entries, found) else RUN
        by = tuple(sorted(entries - {_INIT}))
        yield _power(body, found, when, by, detail)

    def _restores(self, entries: set[str], found: Found) -> bool:
        """Return whether an op runs as variables are restored, which loading does."""
        return _SAVER in entries and found.node.op not in _WRITES

    def _assets(self) -> Iterator[Power]:
        """Yield the assets that lie outside of the folder of assets, or lead there."""
        base = self._folder / _ASSETS
        for asset in self._proto.asset_file_def:
            path = base / asset.filename
            outside = not path.resolve().is_relative_to(base.resolve())
            if outside:
                yield Power(
                    capability_kinds.READ,
                    asset.filename,
                    "asset",
                    "the list of assets",
                    LOADED,
                    (),
                    f"'{asset.filename}', which lies outside of the model",
                )


def _is_saver(body: ScannedBody, found: Found, *, is_passed: bool) -> bool:
    """Return whether an op saves or restores at the path that the loader passes.

    All strings that its path is made of are looked at: the first comes from outside,
    and no other leads to another folder; nor does its default, unless it is passed.
    """
    inputs = data_inputs(found.node.input)
    paths = inputs[:2] if found.node.op == "MergeV2Checkpoints" else inputs[:1]
    return bool(paths) and all(_is_within(body, path, is_passed) for path in paths)


def _is_within(body: ScannedBody, path: str, is_passed: bool = True) -> bool:
    """Return whether a path begins with a value from outside, and stays below it."""

    def is_outside(name: str) -> bool:
        return name in body.arguments or _is_fed(body.nodes.get(name))

    def parts(name: str) -> list[str]:
        node = body.nodes.get(name)
        return [] if node is None else list(map(node_name, data_inputs(node.input)))

    def is_known(name: str) -> bool:
        node = body.nodes.get(name)
        if is_outside(name) or node is None:
            return is_outside(name)
        return node.op in _PATH_OPS and all(map(_is_piece, node.strings))

    # In the order of the path; a value from outside is a part as a whole.
    names = topological_order(
        [node_name(path)], lambda name: () if is_outside(name) else parts(name)
    )
    ends = (n for n in names if is_outside(n) or not parts(n))
    if not is_outside(next(ends, "")):
        return False
    return all(map(is_known, names if is_passed else closure(names, parts)))


_PATH_OPS = frozenset(
    (
        *("Const", "Identity", "ShardedFilename", "StringJoin", "Select", "SelectV2"),
        *("StaticRegexFullMatch", "RegexFullMatch", "Pack"),
    )
)


def _is_fed(node: ScannedNode | None) -> bool:
    return node is not None and node.op in ("Placeholder", "PlaceholderWithDefault")


def _is_piece(text: bytes) -> bool:
    """Return whether a string may stand in a path without leading elsewhere."""
    return not text.startswith((b"/", b"~")) and b".." not in text and b":" not in text


class _Reach:
    """The triggers of each op: signatures, functions of objects, loading, saving."""

    def __init__(
        self,
        proto: Any,
        objects: Any,
        main: ScannedBody,
        functions: dict[str, ScannedBody],
    ) -> None:
        self._proto, self._objects = proto, objects
        self._main, self._functions = main, functions

    def entries(self, function: str, node: str) -> set[str]:
        """Return the triggers of an op."""
        if not function:
            return {e for e, cone in self._cones.items() if node in cone}
        return {e for e, names in self._reached.items() if function in names}

    @cached_property
    def _cones(self) -> dict[str, Collection[str]]:
        """The nodes of the graph that run for each entry."""
        roots: dict[str, list[str]] = {}
        for name, signature in self._proto.signature_def.items():
            entry = _INIT if name == _INIT_SIGNATURE else f"signature '{name}'"
            ends = [signature.outputs[key].name for key in signature.outputs]
            roots.setdefault(entry, []).extend(map(node_name, ends))
        for name in _INIT_COLLECTIONS:
            if name in self._proto.collection_def:
                nodes = self._proto.collection_def[name].node_list.value
                roots.setdefault(_INIT, []).extend(map(node_name, nodes))
        for name, collection in self._proto.collection_def.items():
            if name not in _INIT_COLLECTIONS and collection.node_list.value:
                nodes = collection.node_list.value
                roots.setdefault(f"collection '{name}'", []).extend(
                    map(node_name, nodes)
                )
        saver = self._proto.saver_def
        names = (saver.save_tensor_name, saver.restore_op_name)
        roots.setdefault(_SAVER, []).extend(node_name(name) for name in names if name)
        return {entry: self._main.cone(ends) for entry, ends in roots.items()}

    @cached_property
    def _reached(self) -> dict[str, Collection[str]]:
        """The functions that run for each entry."""
        roots: dict[str, list[str]] = {entry: [] for entry in self._cones}
        for node, names in self._main.calls:
            for entry, cone in self._cones.items():
                if node.name in cone:
                    roots[entry] += names
        roots[_BACKWARD] = list(self._main.gradients)
        for entry, listed in self._functions_of_objects():
            roots.setdefault(entry, []).extend(listed)
        return {e: _closure(self._functions, names) for e, names in roots.items()}

    def _functions_of_objects(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the functions that a loaded object has, by their triggers."""
        nodes = self._objects.nodes
        known, paths = range(len(nodes)), {0: ""}
        for number in walk(
            known[:1],
            lambda n: [c.node_id for c in nodes[n].children if c.node_id in known],
        ):
            for child in nodes[number].children:
                path = f"{paths[number]}.{child.local_name}"
                paths.setdefault(child.node_id, path)
        restoring = {
            saveable.restore_function
            for node in nodes
            for saveable in node.saveable_objects.values()
        }
        for number, node in enumerate(nodes):
            names = list(node.function.concrete_functions)
            if node.HasField("bare_concrete_function"):
                names.append(node.bare_concrete_function.concrete_function_name)
            path = _TRACE.sub("", paths.get(number, ""))[1:]
            # The functions of signatures are reached by their nodes as well.
            if names and not path.startswith("signatures."):
                at_load = path.rpartition(".")[2] in _AT_LOAD or number in restoring
                yield (_INIT if at_load else f"function '{path}'"), names

    def assets(self, function: str, value: KnownString) -> list[str] | None:
        """Return the assets that a string names; None if it may be anything else."""
        found: list[list[str] | None] = []

        def passed_by(place: tuple[str, KnownString]) -> list[tuple[str, KnownString]]:
            function, value = place
            at = value.argument
            if at is None:
                # Nodes of a function's body are not those that the asset list names.
                names = () if function else value.nodes
                named = [self._by_node[n] for n in names if n in self._by_node]
                found.append(named or None)
                return []
            bound = list(self._bound(function, at))
            calls = self._callers.get(function, ())
            inputs = [data_inputs(node.input) for _, node in calls]
            found.extend(bound)
            if not (bound or calls) or any(at >= len(each) for each in inputs):
                found.append(None)
                return []
            return [
                (caller, self._body(caller).value(each[at]))
                for (caller, _), each in zip(calls, inputs, strict=True)
            ]

        for _ in walk([(function, value)], passed_by):
            if None in found:
                return None
        listed = [assets for assets in found if assets is not None]
        if not found or len(listed) < len(found):
            return None
        return [name for assets in listed for name in assets]

    def _body(self, function: str) -> ScannedBody:
        """Return the body of a function, or of the main graph by its name, ""."""
        return self._functions[function] if function else self._main

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, ScannedNode]]]:
        """The calls of each function: where they are, and their nodes."""
        calls: dict[str, list[tuple[str, ScannedNode]]] = {}
        for caller in ("", *self._functions):
            for node, names in self._body(caller).calls:
                for name in dict.fromkeys(names):
                    calls.setdefault(name, []).append((caller, node))
        return calls

    @cached_property
    def _by_node(self) -> dict[str, str]:
        """The assets by the nodes that name them."""
        return {
            node_name(asset.tensor_info.name): asset.filename
            for asset in self._proto.asset_file_def
        }

    def _bound(self, function: str, argument: int) -> Iterator[list[str] | None]:
        """Yield the assets that an object passes to a function of its own."""
        concrete = self._objects.concrete_functions
        if function not in concrete:
            return
        bound = list(concrete[function].bound_inputs)
        count = len(self._functions[function].arguments)
        index = argument - (count - len(bound))
        if 0 <= index < len(bound) and 0 <= bound[index] < len(self._objects.nodes):
            node = self._objects.nodes[bound[index]]
            if node.HasField("asset"):
                number = node.asset.asset_file_def_index
                if number < len(self._proto.asset_file_def):
                    yield [self._proto.asset_file_def[number].filename]
                    return
        yield None
