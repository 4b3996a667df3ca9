"""Ops with capabilities in graphs and functions, read as protos; no graph is built."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from geutil.capabilities import power_kinds
from geutil.capabilities.power_kinds import MAIN, OpEntry
from geutil.graph.walks import closure, data_inputs, node_name
from geutil.model.files import wire
from geutil.model.files.wire import Buffer, Span, message_class

_UNKNOWN = OpEntry(power_kinds.UNKNOWN, (), "")
_ATTRIBUTES = {
    # The attribute that decides, and the kind for each beginning of its value.
    "PrintV2": ("output_stream", {b"file://": power_kinds.WRITE}, power_kinds.PRINT),
    "DecodeProtoV2": (
        "descriptor_source",
        {b"local://": power_kinds.COMPUTE, b"bytes://": power_kinds.COMPUTE},
        power_kinds.READ,
    ),
    "EncodeProto": (
        "descriptor_source",
        {b"local://": power_kinds.COMPUTE, b"bytes://": power_kinds.COMPUTE},
        power_kinds.READ,
    ),
}
_FILE_ATTRIBUTES = {
    # Without a file the op does what it says here.
    "FixedUnigramCandidateSampler": ("vocab_file", power_kinds.RANDOM),
}
_URLS = re.compile(r"Debug(Identity|NanCount|NumericSummary)")
_FILE_INPUTS = {
    # The inputs that name files, or hold what is written, by their number.
    op: number
    for number, ops in {
        0: (
            "CSVDataset CSVDatasetV2 FixedLengthRecordDataset "
            "FixedLengthRecordDatasetV2 GenerateVocabRemapping LMDBDataset "
            "ListSnapshotChunksDataset LoadAndRemapMatrix LoadDataset "
            "MatchingFiles MatchingFilesDataset ReadFile RemoteCall Restore "
            "RestoreSlice RestoreV2 RpcClient RpcServer Save SaveSlices SaveV2 "
            "SnapshotChunkDataset SnapshotDatasetReader TFRecordDataset "
            "TFRecordDatasetV2 TextLineDataset WriteFile"
        ),
        1: (
            "CacheDataset CacheDatasetV2 CreateSummaryDbWriter "
            "CreateSummaryFileWriter DatasetToTFRecord DistributedSave "
            "InitializeTableFromTextFile InitializeTableFromTextFileV2 "
            "MergeV2Checkpoints RegisterDataset RegisterDatasetV2 SaveDataset "
            "SaveDatasetV2 SnapshotDataset SnapshotDatasetV2 SqlDataset"
        ),
        3: (
            "DataServiceDataset DataServiceDatasetV2 DataServiceDatasetV3 "
            "DataServiceDatasetV4"
        ),
    }.items()
    for op in ops.split()
}
_STRING = 7
"""The number of the type of strings."""
_TOO_LONG = (b"", b"/..")
"""The value of strings that were left out, being long: no known value or path."""
_CACHES = ("CacheDataset", "CacheDatasetV2")
_DETAILS = ("token", "vocab_file", "filename", "file_pattern", "log_dir")
_PASSING = frozenset(("Identity", "Snapshot", "StopGradient", "PlaceholderWithDefault"))


@dataclass(frozen=True)
class Found:
    """An op with a power.

    Attributes:
        detail: the detail that decides, where an attribute tells it.
    """

    node: Any
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class KnownString:
    """The known facts of a string that an op reads.

    Attributes:
        text: its value, where it is a constant.
        argument: the number of the argument of the function that it is; or None.
        nodes: the names of the nodes that it comes from, each passed on by the last.
    """

    text: str | None = None
    argument: int | None = None
    nodes: tuple[str, ...] = ()


class ScannedNode(NamedTuple):
    """The part of a node that is kept to follow edges.

    Attributes:
        op: its type.
        input: the names of its inputs.
        strings: the values of a constant of strings.
    """

    op: str
    input: tuple[str, ...]
    strings: tuple[bytes, ...]


def _edges_of(node: Any) -> ScannedNode:
    op = sys.intern(node.op)
    strings: tuple[bytes, ...] = ()
    if op == "Const" and "value" in node.attr:
        tensor = node.attr["value"].tensor
        strings = tuple(tensor.string_val)
        if tensor.dtype == _STRING and not strings:
            strings = _TOO_LONG
    return ScannedNode(op, tuple(map(sys.intern, node.input)), strings)


@dataclass
class ScannedBody:
    """A graph, or the body of a function, with the findings in it.

    Attributes:
        place: how reports call it.
        buffer: the file.
        span: where it lies.
        proto: the name of its proto.
        nodes_field: the field of its nodes.
        arguments: the names of the arguments of a function.
        found: the ops with capabilities.
        calls: the nodes that call functions, with the names of these.
        count: how many nodes it has.
        gradients: the functions of its library that are gradients of ops or functions.
    """

    place: str
    buffer: Buffer
    span: Span
    proto: str
    nodes_field: str
    arguments: tuple[str, ...] = ()
    found: list[Found] = field(default_factory=list)
    calls: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)
    count: int = 0
    gradients: list[str] = field(default_factory=list)

    def elements(self) -> Iterator[Any]:
        """Yield its nodes, without the long values in them."""
        return (node for node, _ in self.elements_and_sizes())

    def elements_and_sizes(self) -> Iterator[tuple[Any, int]]:
        """Yield its nodes, and how many bytes the values take that were left out."""
        kind = message_class(self.proto)
        return wire.elements(self.buffer, self.span, kind, self.nodes_field)

    @cached_property
    def nodes(self) -> Mapping[str, ScannedNode]:
        """Its nodes by name: read when they are asked for, since most never are."""
        return {sys.intern(node.name): _edges_of(node) for node in self.elements()}

    def cone(self, roots: Iterable[str]) -> dict[str, None]:
        """Return the names of all nodes that some depend on, with these."""

        def known(names: Iterable[str]) -> list[str]:
            return [name for name in names if name in self.nodes]

        return closure(
            known(roots), lambda name: known(map(node_name, self.nodes[name].input))
        )

    def value(self, tensor: str) -> KnownString:
        """Return the known facts of a string by the name of its tensor."""
        passed: dict[str, None] = {}
        text = argument = None
        while argument is None:
            name = node_name(tensor)
            node = self.nodes.get(name)
            if name in self.arguments:
                argument = self.arguments.index(name)
            # A damaged or hostile graph can have a circle.
            elif node is None or name in passed:
                break
            else:
                passed[name] = None
                if len(node.strings) == 1:
                    text = node.strings[0].decode(errors="replace")
                before = self._passed_on(node)
                if before is None:
                    break
                tensor = before
        return KnownString(text, argument, tuple(passed))

    def _passed_on(self, node: ScannedNode) -> str | None:
        """Return the tensor whose value a node passes on; None if it computes one."""
        if node.op == "ReadVariableOp":
            # TensorFlow keeps the path of an asset in a variable that is set once.
            sources = self._assigned.get(node_name(node.input[0]), [])
            return sources[0] if len(sources) == 1 else None
        return node.input[0] if node.op in _PASSING and node.input else None

    @cached_property
    def _assigned(self) -> dict[str, list[str]]:
        """The values assigned to each variable, by the name of its handle."""
        sources: dict[str, list[str]] = {}
        for node in self.nodes.values():
            if node.op == "AssignVariableOp" and len(node.input) > 1:
                handle, value = node.input[0], node.input[1]
                sources.setdefault(node_name(handle), []).append(value)
        return sources

    def detail(self, found: Found) -> tuple[str, KnownString]:
        """Return the input that decides an op's effect, in words and as it is read."""
        index = _FILE_INPUTS.get(found.node.op)
        inputs = data_inputs(found.node.input)
        if found.detail or index is None or index >= len(inputs):
            return found.detail, KnownString()
        value = self.value(inputs[index])
        return ("" if value.text is None else f"'{value.text}'"), value


def scan(body: ScannedBody) -> None:
    """Note the ops with capabilities in a body, and its calls.

    Cost: linear in the nodes; memory for a few of them at a time.
    """
    known = power_kinds.table()
    for node, left_out in body.elements_and_sizes():
        body.count += 1
        entry = known.get(node.op, _UNKNOWN)
        if entry.functions or entry is _UNKNOWN:
            called = tuple(_called(node, entry))
            if called:
                body.calls.append((node, called))
        if entry.power in power_kinds.HARMLESS:
            continue
        kind, detail = power_of_node(node, left_out)
        if kind not in power_kinds.HARMLESS:
            body.found.append(Found(node, kind, detail))


def _called(node: Any, entry: OpEntry) -> Iterator[str]:
    """Yield the functions that a node calls; of an unknown op all that it names."""
    names = entry.functions or tuple(node.attr)
    for name in names:
        if name in node.attr:
            value = node.attr[name]
            if value.HasField("func"):
                yield value.func.name
            yield from (func.name for func in value.list.func)


def power_of_node(node: Any, left_out: int = 0) -> tuple[str, str]:
    """Return the power of a node, and the attribute that decides, as text."""
    power = power_kinds.table().get(node.op, _UNKNOWN).power
    is_decided = node.op in _ATTRIBUTES or node.op in _FILE_ATTRIBUTES
    # The value that decides was too long to be read: assume the worst.
    if left_out and (is_decided or _URLS.match(node.op)):
        grave = power_kinds.WRITE if node.op == "PrintV2" else power
        return grave, f"a value of {left_out:,} bytes"
    if node.op in _ATTRIBUTES:
        name, kinds, otherwise = _ATTRIBUTES[node.op]
        text = node.attr[name].s if name in node.attr else b""
        for beginning, kind in kinds.items():
            if text.startswith(beginning):
                return kind, f"'{text.decode(errors='replace')}'"
        return otherwise, f"'{text.decode(errors='replace')}'" if text else ""
    if node.op in _FILE_ATTRIBUTES:
        name, otherwise = _FILE_ATTRIBUTES[node.op]
        if not (node.attr[name].s if name in node.attr else b""):
            return otherwise, ""
    if _URLS.match(node.op):
        urls = node.attr["debug_urls"].list.s if "debug_urls" in node.attr else []
        if not urls:
            return power_kinds.COMPUTE, ""
        text = ", ".join(f"'{url.decode(errors='replace')}'" for url in urls)
        is_file = all(url.startswith(b"file://") for url in urls)
        return power_kinds.WRITE if is_file else power_kinds.CONNECT, text
    for name in _DETAILS:
        if name in node.attr and node.attr[name].s:
            return power, f"{name} '{node.attr[name].s.decode(errors='replace')}'"
    return power, ""


def is_memory_cache(body: ScannedBody, found: Found) -> bool:
    """Tell whether an op caches a dataset in memory: its file has no name."""
    return found.node.op in _CACHES and body.detail(found)[1].text == ""


def bodies_of(
    buffer: Buffer, graph: Span
) -> tuple[ScannedBody, dict[str, ScannedBody]]:
    """Return the main body of a `GraphDef` and those of its functions, scanned."""
    main = ScannedBody(MAIN, buffer, graph, "GraphDef", "node")
    scan(main)
    functions = {}
    function_class = message_class("FunctionDef")
    for library in wire.spans(buffer, graph, "GraphDef.library"):
        main.gradients += _gradients(buffer, library)
        for place in wire.spans(buffer, library, "FunctionDefLibrary.function"):
            signature = wire.message(buffer, place, function_class, 1).signature
            arguments = tuple(arg.name for arg in signature.input_arg)
            body = ScannedBody(
                f"function '{signature.name}'",
                buffer,
                place,
                "FunctionDef",
                "node_def",
                arguments,
            )
            scan(body)
            functions[signature.name] = body
    return main, functions


def _gradients(buffer: Buffer, library: Span) -> Iterator[str]:
    """Yield the functions that compute gradients of functions, and of types of ops."""
    for entries, number in ((2, 2), (3, 1)):
        for entry in wire.spans(buffer, library, entries):
            for start, end in wire.spans(buffer, entry, number):
                yield buffer[start:end].decode(errors="replace")
