"""Kinds of capabilities: the table of ops, reports, ops and layers of each kind.

`ops.tsv` has a line for each op of TensorFlow 2.16 to 2.21: its one power, the
attributes that hold functions it calls, and the evidence: the attribute or input that
names a file or an address, the flag that says that an op has state, or the work of its
kernel. An op that the table lacks is reported as unknown: no op is harmless by default.
Tests walk TensorFlow's registry, and run those that read or write files in an empty
folder.

Graphs and functions are read as protos; no graph is built. The configuration of a Keras
model, in JSON, names classes and functions; Keras imports, makes and calls them. Layers
that only compute are known by the module that they come from; the rest is reported.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from geutil.graph.walks import closure, data_inputs, node_name, tree
from geutil.lazy import Shown
from geutil.model.files import wire
from geutil.model.files.wire import Buffer, Span, message_class

COMPUTE = "compute"
KEEP_STATE = "keep state"
READ = "read files"
WRITE = "write files"
LIST = "list folders"
PRINT = "print"
CONNECT = "open connections"
CODE = "run code"
PROCESS = "control the process"
SHARED = "reach shared resources"
DEVICE = "reach devices"
CLOCK = "read the clock"
RANDOM = "draw random numbers"
UNKNOWN = "unknown"

HARMLESS = frozenset((COMPUTE, KEEP_STATE))
"""Kinds that every model has, reported of none."""
TOLERATED = frozenset((CLOCK, RANDOM))
"""Kinds reported as harmless: random numbers, the clock."""
POWERS = (
    *(CODE, WRITE, READ, LIST, CONNECT, PROCESS, SHARED, DEVICE, PRINT, UNKNOWN),
    *(RANDOM, CLOCK),
)
"""The other kinds, in the order of reports: the gravest first."""
_TABLE = Path(__file__).with_name("ops.tsv")


class OpEntry(NamedTuple):
    """A line of the table.

    Attributes:
        functions: the attributes that hold functions which it calls.
    """

    power: str
    functions: tuple[str, ...]
    evidence: str


@cache
def table() -> dict[str, OpEntry]:
    """Return the entry of each op."""
    entries = {}
    for line in _TABLE.read_text().splitlines()[1:]:
        name, power, functions, evidence = line.split("\t")
        listed = tuple(filter(None, functions.split(",")))
        entries[name] = OpEntry(power, listed, evidence)
    return entries


LOADED, RUN = "loaded", "run"
# Lines of a printed report; the rest is counted.
_SHOWN = 20


@dataclass(frozen=True)
class Power:
    """One op or layer of a model that does more than compute.

    Attributes:
        kind: the capability, such as "write files"; "unknown" for an op that geutil
            does not know, such as one of a custom library or a newer TensorFlow.
        name: the op, or the layer, by name.
        type: the type of the op, or the class of the layer.
        place: its location: "the graph", the name of a function, or a file.
        when: "loaded" if it happens while the model is loaded, else "run".
        by: its triggers: signatures, and functions of the saved object. Empty if
            nothing in the file runs it.
        detail: the path, address, stream or code that decides its effect, if the file
            contains it.
    """

    kind: str
    name: str
    type: str
    place: str
    when: str = RUN
    by: tuple[str, ...] = ()
    detail: str = ""

    @property
    def is_tolerated(self) -> bool:
        """True if it is reported but harmless: random numbers, the clock."""
        return self.kind in TOLERATED

    def __str__(self) -> str:
        what = f" {self.detail}" if self.detail else ""
        where = "" if self.place == MAIN else f" in {self.place}"
        by = f" by {', '.join(self.by)}" if self.by else ""
        when = "when loaded" if self.when == LOADED else "when run"
        never = "" if self.by or self.when == LOADED else ", which nothing runs"
        return f"{self.kind}{what}: {self.type} '{self.name}'{where}, {when}{by}{never}"


MAIN = "the graph"


@dataclass(frozen=True)
class Powers(Shown):
    """The capabilities of a model beyond computing and keeping its own state.

    Attributes:
        path: the model.
        entries: the capabilities, most severe first. Reading the model's own variables
            and assets, as every loader does, is left out.
        ops: the number of ops examined, including those of functions.

    Example:
        >>> from geutil.model import powers
        >>> print(powers("testdata/two_signatures"))
        it computes and keeps its own state, and no more (54 ops)
    """

    path: Path
    entries: tuple[Power, ...]
    ops: int

    @property
    def dangers(self) -> tuple[Power, ...]:
        """The entries other than random numbers and the clock, which are harmless."""
        return tuple(entry for entry in self.entries if not entry.is_tolerated)

    @property
    def computes_only(self) -> bool:
        """True if it only computes and keeps its own state."""
        return not self.dangers

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of capabilities, each once, most severe first."""
        found = {entry.kind for entry in self.entries}
        return tuple(kind for kind in POWERS if kind in found)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.computes_only:
            yield f"it computes and keeps its own state, and no more ({self.ops} ops)"
        else:
            counts = Counter(entry.kind for entry in self.dangers)
            listed = ", ".join(f"{k} ({counts[k]})" for k in self.kinds if k in counts)
            yield f"it can do more than compute: {listed}"
        shown = self.entries[:_SHOWN]
        yield from (f"  {entry}" for entry in shown)
        if len(self.entries) > len(shown):
            yield f"  and {len(self.entries) - len(shown)} more"


_UNKNOWN = OpEntry(UNKNOWN, (), "")
_ATTRIBUTES = {
    # The attribute that decides, and the kind for each beginning of its value.
    "PrintV2": ("output_stream", {b"file://": WRITE}, PRINT),
    "DecodeProtoV2": (
        "descriptor_source",
        {b"local://": COMPUTE, b"bytes://": COMPUTE},
        READ,
    ),
    "EncodeProto": (
        "descriptor_source",
        {b"local://": COMPUTE, b"bytes://": COMPUTE},
        READ,
    ),
}
_FILE_ATTRIBUTES = {
    # Without a file the op does what it says here.
    "FixedUnigramCandidateSampler": ("vocab_file", RANDOM),
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
    known = table()
    for node, left_out in body.elements_and_sizes():
        body.count += 1
        entry = known.get(node.op, _UNKNOWN)
        if entry.functions or entry is _UNKNOWN:
            called = tuple(_called(node, entry))
            if called:
                body.calls.append((node, called))
        if entry.power in HARMLESS:
            continue
        kind, detail = power_of_node(node, left_out)
        if kind not in HARMLESS:
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
    power = table().get(node.op, _UNKNOWN).power
    is_decided = node.op in _ATTRIBUTES or node.op in _FILE_ATTRIBUTES
    # The value that decides was too long to be read: assume the worst.
    if left_out and (is_decided or _URLS.match(node.op)):
        grave = WRITE if node.op == "PrintV2" else power
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
            return COMPUTE, ""
        text = ", ".join(f"'{url.decode(errors='replace')}'" for url in urls)
        is_file = all(url.startswith(b"file://") for url in urls)
        return WRITE if is_file else CONNECT, text
    for name in _DETAILS:
        if name in node.attr and node.attr[name].s:
            return power, f"{name} '{node.attr[name].s.decode(errors='replace')}'"
    return power, ""


def is_memory_cache(body: ScannedBody, found: Found) -> bool:
    """Return whether an op caches a dataset in memory: its file has no name."""
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


_CODE_CLASSES = frozenset(
    (
        *("Lambda", "__lambda__", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
        *("TFSMLayer", "InstanceMethod"),
    )
)
"""Classes that hold code, or load it from elsewhere, when they are deserialized."""
_FUNCTION, _TYPE = "function", "__typespec__"
_PACKAGES = (
    *("tensorflow.python.keras", "tensorflow.keras", "keras._legacy"),
    *("keras.src.legacy", "keras.api", "keras.src"),
    *("tf_keras.api", "tf_keras.src", "keras", "tf_keras"),
)
"""Where modules of Keras are found; the longer ones first."""
_CLASSES = frozenset(
    (
        *("", "activations", "applications", "constraints", "distillation"),
        *("dtype_policies", "engine", "experimental", "feature_column"),
        *("initializers", "layers", "losses", "metrics", "mixed_precision", "models"),
        *("ops", "optimizers", "premade_models", "quantizers", "random"),
        "regularizers",
    )
)
"""Modules of Keras whose classes compute."""
_LAYERS_ELSEWHERE = ("FeatureSpace", "Feature", "Cross")
"""Classes of other modules of Keras, `keras.utils`, that compute."""
_FUNCTIONS = frozenset(
    (
        *("activations", "constraints", "initializers", "layers", "losses", "metrics"),
        *("ops", "optimizers", "quantizers", "random", "regularizers"),
    )
)
"""Modules of Keras whose functions compute, but for those of the next table."""
_BUILDERS = frozenset(("deserialize", "get"))
"""Functions of these modules that make objects of a configuration, which is data."""
_SYMBOLS = frozenset(
    (
        *("", "__operators__", "bitwise", "dtypes", "experimental.numpy", "image"),
        *("keras.activations", "keras.backend", "keras.losses", "keras.metrics"),
        *("linalg", "math", "nn", "quantization", "ragged", "random", "sets", "shape"),
        *("signal", "sparse", "strings"),
    )
)
"""Modules of TensorFlow whose functions are ops, reported by the table of these."""
_OP_LAYERS = ("TFOpLambda", "SlicingOpLambda")
_METHODS_OF = ("RaggedTensor", "SparseTensor", "TensorShape")
_FILES = ("vocabulary", "vocabulary_file", "idf_weights")
"""Arguments that are lists, or paths of files that the layer reads."""


def items(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all dictionaries of a configuration, with the path to each."""

    def inner(place: tuple[Any, str]) -> list[tuple[Any, str]]:
        item, path = place
        if isinstance(item, dict):
            return [(value, f"{path}.{key}"[-200:]) for key, value in item.items()]
        return [(value, path) for value in item] if isinstance(item, list) else []

    places = tree([(config, "")], inner)
    return (place for place in places if isinstance(place[0], dict))


def powers_of_config(config: Any, place: str) -> Iterator[Power]:
    """Yield the capabilities of classes and functions in a configuration."""
    for item, path in items(config):
        kind = item.get("class_name")
        if not isinstance(kind, str):
            continue
        inner = item.get("config")
        name = item.get("name")
        if isinstance(inner, dict):
            name = inner.get("name", name)
        elif kind == _FUNCTION:
            name = inner
        where = f"{place}, at {path[1:]}" if path else place
        for power, when, detail in _told(item, kind, inner):
            by = ("Keras",) if when == LOADED else ("whoever runs it",)
            yield Power(power, str(name or kind), kind, where, when, by, detail)


def _told(
    item: dict[str, Any], kind: str, inner: Any
) -> Iterator[tuple[str, str, str]]:
    """Yield the capabilities of one object, when they come to bear, and details."""
    module = item.get("module")
    if kind in _CODE_CLASSES:
        yield CODE, LOADED, ""
    elif kind == _FUNCTION:
        detail = _odd_function(module, inner)
        if detail:
            yield CODE, LOADED, detail
    elif kind == _TYPE:
        if not str(item.get("spec_name")).endswith("Spec"):
            yield CODE, LOADED, f"'{item.get('spec_name')}' is no type"
    elif module is not None:
        known = _CLASSES | {"utils"} if kind in _LAYERS_ELSEWHERE else _CLASSES
        if not _is_within(module, known):
            yield (
                CODE,
                LOADED,
                f"module '{module}', which Keras would import",
            )
    elif item.get("registered_name") not in (None, kind):
        detail = f"a class of its own, '{item['registered_name']}'"
        yield UNKNOWN, LOADED, detail
    if isinstance(inner, dict):
        yield from _of_arguments(kind, inner)


def _of_arguments(kind: str, inner: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the capabilities that follow from the arguments of a layer."""
    for key in _FILES:
        if isinstance(inner.get(key), str) and inner[key]:
            yield READ, LOADED, f"'{inner[key]}', its {key}"
    if kind in _OP_LAYERS:
        symbol = str(inner.get("function"))
        power = _power_of_symbol(symbol)
        if power not in HARMLESS:
            yield power, RUN, f"'{symbol}'"
    elif kind == "ClassMethod":
        symbol = str(inner.get("cls_symbol"))
        if symbol.rpartition(".")[2] not in _METHODS_OF:
            yield CODE, RUN, f"'{symbol}.{inner.get('method_name')}'"
    elif kind == "TensorFlowOpLayer":
        node = inner.get("node_def")
        op = str(node.get("op")) if isinstance(node, dict) else ""
        power = _power_of_op(op)
        if power not in HARMLESS:
            yield power, RUN, f"op '{op}'"


def _odd_function(module: Any, name: Any) -> str:
    """Return why a function may do more than compute; "" if it does not."""
    if module == "builtins":
        # Keras looks these up among its activations, losses and their like.
        return "" if str(name) not in _BUILDERS else f"'{name}' of Keras"
    if not _is_within(module, _FUNCTIONS) or str(name) in _BUILDERS:
        return f"'{name}' of module '{module}'"
    return ""


def _is_within(module: Any, known: frozenset[str]) -> bool:
    """Return whether a module is one of Keras that is known."""
    if module == "builtins":
        return True
    for package in _PACKAGES:
        if module == package or str(module).startswith(f"{package}."):
            return str(module)[len(package) + 1 :].partition(".")[0] in known
    return False


def _power_of_symbol(symbol: str) -> str:
    """Return the capability of a public function of TensorFlow, by its name."""
    space, _, name = symbol.rpartition(".")
    for prefix in ("compat.v1", "compat.v2"):
        if space == prefix or space.startswith(f"{prefix}."):
            space = space[len(prefix) + 1 :]
    power = _by_plain_name().get(_plain(name))
    if space == "raw_ops":
        return power or UNKNOWN
    if power is not None and power not in HARMLESS:
        return power
    is_decoding = space == "io" and name.startswith(("decode_", "parse_"))
    if name.startswith("load_") or not (space in _SYMBOLS or is_decoding):
        return CODE
    # Python's own functions have no op of their name.
    return CODE if "py_func" in name or "numpy_f" in name else COMPUTE


def _power_of_op(op: str) -> str:
    entry = table().get(op)
    return UNKNOWN if entry is None else entry.power


@cache
def _by_plain_name() -> dict[str, str]:
    """Return the power of each op by its name in lower case, as functions have it."""
    return {_plain(op): entry.power for op, entry in table().items()}


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def powers_of_metadata(buffer: Buffer) -> Iterator[Power]:
    """Yield the capabilities of layers whose configuration stands beside a SavedModel.

    Keras 2 makes layers of it when it loads the SavedModel.
    """
    for span in wire.spans(buffer, (0, len(buffer)), 1):
        for start, end in wire.spans(buffer, span, 5):
            yield from powers_of_text(buffer[start:end], "keras_metadata.pb")


def powers_of_text(text: bytes, place: str) -> Iterator[Power]:
    """Yield the capabilities of the configuration that a text holds, if it is JSON.

    Other objects have other metadata, which nobody builds from.
    """
    try:
        config = json.loads(text)
    except RecursionError:
        detail = "nested too deeply to be looked at"
        found = (place, "layer", place, LOADED, ("Keras",), detail)
        yield Power(UNKNOWN, *found)
    except ValueError:
        return
    else:
        yield from powers_of_config(config, place)
