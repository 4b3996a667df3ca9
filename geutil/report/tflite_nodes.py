"""TFLite files as graphs to draw: a node for each op, input and constant.

A file alone needs no TensorFlow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geutil import tflite
from geutil.errors import ModelError
from geutil.formats import TFLITE_SUFFIX
from geutil.model.files.inspection import read_tflite
from geutil.report.page import Page, Row, Rows, payload_of
from geutil.tflite import LiteFile, LiteGraph, LiteOp, LiteSignature, LiteTensor
from geutil.tflite.kinds import (
    by_count,
    computes_in_float,
    is_quantized,
    precision_of,
)
from geutil.tflite.op_names import UniqueNames, op_names, sources_of

_INPUT, _CONSTANT, _VARIABLE = "INPUT", "CONST", "VARIABLE"
NO_OPS = (_INPUT, _CONSTANT, _VARIABLE)
"""Types of nodes that are drawn though they are no ops of the file."""
# Characters of a value, and lines of a list, that a page prints.
_LETTERS, _LINES = 200, 20


@dataclass(frozen=True)
class Read:
    """A tensor that a node reads."""

    place: int
    output: int
    name: str


@dataclass(frozen=True, eq=False)
class FileNode:
    """An op of a TFLite file, an input or a constant, as ops of graphs are drawn."""

    name: str
    type: str
    inputs: tuple[Read, ...]
    tensors: tuple[LiteTensor, ...]
    attributes: Mapping[str, str]
    op: LiteOp | None = None
    control_inputs: tuple[FileNode, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The type and shape of each output, such as "int8 [1, 8]"."""
        return tuple(map(str, self.tensors))

    @property
    def quantizations(self) -> tuple[str, ...]:
        """The quantization of each output; "" without one."""
        return tuple(str(t.quantization or "") for t in self.tensors)

    @property
    def precision(self) -> str:
        """The type that it computes in; "" of inputs and constants."""
        return "" if self.op is None else precision_of(self.op)


@dataclass(frozen=True)
class FileSubject:
    """A subgraph of a TFLite file to draw."""

    label: str
    graph: LiteGraph
    nodes: tuple[FileNode, ...]
    ends: Mapping[int, str]
    outputs: Mapping[str, LiteTensor]
    bodies: tuple[FileSubject, ...] = ()

    def drawn_ops(self) -> list[FileNode]:
        """Return the nodes to draw, in order."""
        return list(self.nodes)

    def bodies_of(self, node: FileNode) -> list[FileSubject]:
        """Return the subgraphs of the file that a node calls."""
        called = () if node.op is None else node.op.subgraphs
        if not called:
            return []
        every = {one.graph: one for one in (self, *self.bodies)}
        return [every[graph] for graph in called]

    def empty(self) -> FileSubject:
        """Return a subject of its name that has nothing to draw."""
        return replace(self, nodes=(), ends={}, outputs={}, bodies=())

    def data(self) -> list[dict[str, Any]]:
        """Return the subgraphs as the viewer takes them."""
        every = (self, *self.bodies)
        labels = {one.graph: one.label for one in every}
        return [_columns(one, labels) for one in every]


def is_file(value: object) -> bool:
    """Return whether a value is a TFLite file: its path, or its bytes."""
    if isinstance(value, bytes | bytearray):
        return True
    if not isinstance(value, str | os.PathLike):
        return False
    return Path(value).suffix.lower() == TFLITE_SUFFIX


def file_subject(
    value: Any, label: str = "", signature: str | None = None
) -> FileSubject:
    """Return the subject of a TFLite file."""
    content, name = _content(value)
    signatures = {one.graph: one for one in reversed(content.signatures.values())}
    labels = {g: g.name or f"subgraph {i}" for i, g in enumerate(content.graphs)}
    labels[content.graphs[0]] = content.graphs[0].name or name
    named = content.signatures.get(signature or "")
    first = content.graphs[0] if named is None else named.graph
    unique = UniqueNames()
    subject, *bodies = (
        _subject(graph, unique.name(labels[graph]), signatures.get(graph))
        for graph in (first, *(g for g in content.graphs if g is not first))
    )
    return replace(subject, label=label or subject.label, bodies=tuple(bodies))


def _content(value: Any) -> tuple[LiteFile, str]:
    if not isinstance(value, bytes | bytearray):
        path = Path(os.fspath(value))
        if not path.is_file():
            raise ModelError(f"there is no file '{path}'")
        return read_tflite(path), path.name
    try:
        return tflite.open(bytes(value)), "TFLite file"
    except tflite.BrokenFileError as error:
        raise ModelError(str(error)) from error


def _subject(
    graph: LiteGraph, label: str, signature: LiteSignature | None
) -> FileSubject:
    """Return a subgraph to draw, named by the signature where there is one."""
    inputs = {t: t.name for t in graph.inputs}
    outputs = {t.name: t for t in graph.outputs}
    if signature is not None:
        inputs.update({t: name for name, t in signature.inputs.items()})
        outputs = dict(signature.outputs)
    nodes = _nodes(graph, inputs)
    makers = {t: at for at, node in enumerate(nodes) for t in node.tensors}
    ends = {makers[t]: f"output {name}" for name, t in outputs.items() if t in makers}
    ends |= {makers[t]: f"input {name}" for t, name in inputs.items()}
    return FileSubject(label, graph, nodes, ends, outputs)


def _nodes(graph: LiteGraph, inputs: Mapping[LiteTensor, str]) -> tuple[FileNode, ...]:
    """Return the nodes of a subgraph; ops have their names before others do."""
    names = op_names(graph)
    unique = UniqueNames()
    for name in names:
        unique.name(name)
    nodes = [_end_node(t, _INPUT, unique.name(name)) for t, name in inputs.items()]
    read = dict.fromkeys(t for op in graph.ops for t in op.reads)
    for t in dict.fromkeys((*read, *graph.outputs)):
        if t.producer is None and t not in inputs:
            kind = _VARIABLE if t.is_variable else _CONSTANT
            wanted = next(iter(sources_of(t.name)), kind.lower())
            nodes.append(_end_node(t, kind, unique.name(wanted)))
    sources = {
        t: (at, 0, nodes[at].name) for at, n in enumerate(nodes) for t in n.tensors
    }
    first = len(nodes)
    for at, op in enumerate(graph.ops):
        for output, t in enumerate(op.outputs):
            sources.setdefault(t, (first + at, output, names[at]))
    return (
        *nodes,
        *(_op_node(*one, sources) for one in zip(graph.ops, names, strict=True)),
    )


def _end_node(tensor: LiteTensor, kind: str, name: str) -> FileNode:
    attributes = {"tensor": tensor.name}
    if tensor.stored_bytes:
        attributes["bytes"] = f"{tensor.stored_bytes:,}"
    return FileNode(name, kind, (), (tensor,), attributes)


def _op_node(
    op: LiteOp, name: str, sources: Mapping[LiteTensor, tuple[int, int, str]]
) -> FileNode:
    """Return an op as a node; the name of its first result is told besides."""
    reads = [sources[t] for t in op.reads if t in sources]
    # Calls are drawn as such.
    attributes = {}
    for option, value in sorted(op.options.items()):
        listed = value if isinstance(value, list) else [value]
        if not any(isinstance(one, LiteGraph) for one in listed):
            attributes[option] = shortened(value)
    if op.outputs:
        attributes["tensor"] = shortened(op.result)
    inputs = tuple(Read(place, i, f"{source}:{i}") for place, i, source in reads)
    return FileNode(name, op.kind, inputs, op.outputs, attributes, op)


def shortened(value: object) -> str:
    """Return a value as text, or its beginning if it is long.

    Example:
        >>> shortened("abc")
        'abc'
    """
    text = str(value)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def altered_options(op: Any, other: Any) -> tuple[str, ...]:
    """Return the options in which two ops of TFLite files differ, and "outputs"."""
    given = {*op.attributes, *other.attributes}
    options = sorted(
        name for name in given if op.attributes.get(name) != other.attributes.get(name)
    )
    ours = (op.outputs, op.quantizations)
    changed = ours != (other.outputs, other.quantizations)
    return (*options, *(("outputs",) if changed else ()))


def _columns(subject: FileSubject, labels: Mapping[LiteGraph, str]) -> dict[str, Any]:
    """Return a subgraph as the viewer takes it: `GraphData` in web/src/payload.ts."""
    nodes = subject.nodes
    kinds = numbered(n.type for n in nodes)
    precisions = numbered(n.precision for n in nodes if n.precision)
    called = {
        at: [labels[graph] for graph in node.op.subgraphs]
        for at, node in enumerate(nodes)
        if node.op is not None and node.op.subgraphs
    }
    return {
        "label": subject.label,
        "names": [node.name for node in nodes],
        "types": [kinds[node.type] for node in nodes],
        "typeNames": list(kinds),
        "inputs": [
            [number for r in node.inputs for number in (r.place, r.output)]
            for node in nodes
        ],
        "controls": [[] for _ in nodes],
        "outputs": [list(node.outputs) for node in nodes],
        "quantizations": [list(node.quantizations) for node in nodes],
        "devices": [0 for _ in nodes],
        "deviceNames": [""],
        "attributes": [dict(node.attributes) for node in nodes],
        "parameters": [
            at for at, node in enumerate(nodes) if node.type in (_CONSTANT, _VARIABLE)
        ],
        "ends": dict(subject.ends),
        "calls": called,
        "leftOut": 0,
        "precisions": [precisions.get(node.precision, -1) for node in nodes],
        "precisionNames": list(precisions),
    }


def numbered(words: Iterable[str]) -> dict[str, int]:
    """Return each word once, with its number."""
    return {word: i for i, word in enumerate(dict.fromkeys(words))}


def precision_rows(subject: FileSubject) -> Rows:
    """Return the ops of a file as a table, floats first, with the precision of each."""
    every = (subject, *subject.bodies)
    listed = [
        (one, node, "" if one is subject else f"{one.label}/")
        for one in every
        for node in one.nodes
        if node.op is not None
    ]
    listed.sort(key=lambda entry: not computes_in_float(entry[1].precision))
    mixed = any(is_quantized(node.precision) for _, node, _ in listed)
    rows = tuple(
        Row(
            node.precision,
            not (mixed and computes_in_float(node.precision)),
            f"{scope}{node.name}",
            f"{node.type} -> {', '.join(node.outputs)}",
            (f"{scope}{node.name}",),
        )
        for _, node, scope in listed
    )
    told = precision_lines(node.precision for _, node, _ in listed)
    return Rows("Types that ops compute in", tuple(told), rows)


def view_file(value: Any, title: str) -> Page:
    """Draw a TFLite file; see `geutil.report.view`."""
    return page_of_file(file_subject(value), title)


def page_of_file(drawn: FileSubject, title: str) -> Page:
    """Return the page of a file."""
    rows = precision_rows(drawn)
    return Page(title, payload_of("view", title, drawn.data(), rows))


def precision_lines(precisions: Iterable[str]) -> list[str]:
    """Return a line for each type that ops compute in, by their number."""
    counts = by_count(Counter(precisions))
    return [f"{n} op(s) in {precision}" for precision, n in counts.items()]


def listed_lines(*groups: Sequence[str]) -> Iterator[str]:
    """Yield the lines of each kind of change; of many only the first few."""
    for lines in groups:
        yield from lines[:_LINES]
        if len(lines) > _LINES:
            yield f"  and {len(lines) - _LINES} more (all of them with --json)"
