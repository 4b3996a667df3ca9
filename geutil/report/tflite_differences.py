"""Differences between a TFLite file and the graph that it was converted from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geutil.graph.op_types import PLACEHOLDERS, VALUE_BLIND
from geutil.graph.types import Operation
from geutil.graph.walks import walk_by_identity
from geutil.report.graphs import Subject, called_functions
from geutil.report.page import Row, Rows
from geutil.report.tflite_nodes import FileSubject, listed_lines, precision_lines
from geutil.tflite.kinds import TYPE_CHANGES, computes_in_float, is_quantized
from geutil.tflite.matches import Ends, Matching, is_step, match
from geutil.tflite.op_names import UniqueNames, file_names

SAME, ADDED, REMOVED, FUSED = 0, 1, 2, 5
"""The fate of an op, as the viewer numbers it."""


@dataclass(frozen=True)
class FileOpMatch:
    """An op of a TFLite file, and the ops of the graph that it computes.

    Attributes:
        op: its name: that of the graph's op whose result it computes, if there is one.
        op_type: its type, such as "CONV_2D".
        precision: the type that it computes in, such as "int8".
        named: the ops of the graph that it computes and that the file names it after,
            beginning with that of its result.
        placed: those that it computes and that only their inputs identify. Ops that
            return their input, unchanged or quantized, are in neither.
    """

    op: str
    op_type: str
    precision: str
    named: tuple[str, ...]
    placed: tuple[str, ...]

    @property
    def is_added(self) -> bool:
        """True if it is not known to compute any op of the graph."""
        return not (self.named or self.placed)

    @property
    def is_float(self) -> bool:
        """True if it computes in floats."""
        return computes_in_float(self.precision)


@dataclass(frozen=True)
class FileDifference:
    """The differences between a TFLite file and the graph that it was converted from.

    Attributes:
        ops: the ops of the file in order, then those of branches and loops: all that
            `inspect` counts, except those of other signatures.
        missing: the ops of the graph without a known counterpart in the file, with
            their types. Ops that depend on no input are left out: the file holds their
            results.
        common: the number of ops of the graph that the file computes.
    """

    ops: tuple[FileOpMatch, ...]
    missing: tuple[tuple[str, str], ...]
    common: int

    @property
    def added(self) -> tuple[FileOpMatch, ...]:
        """The ops of the file that compute no op of the graph."""
        return tuple(op for op in self.ops if op.is_added)

    @property
    def in_float(self) -> tuple[FileOpMatch, ...]:
        """The ops of the file that compute in floats."""
        return tuple(op for op in self.ops if op.is_float)

    @property
    def is_mixed(self) -> bool:
        """True if some ops of the file compute in floats, and some in integers."""
        return bool(self.in_float) and any(
            is_quantized(op.precision) for op in self.ops
        )

    @property
    def is_empty(self) -> bool:
        """True if the file computes the whole graph, and otherwise only conversions."""
        own = [op for op in self.added if op.op_type not in TYPE_CHANGES]
        return not (own or self.missing)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the text; of each kind of op only the first few."""
        yield self.summary
        yield "; ".join(precision_lines(op.precision for op in self.ops))
        floats = self.in_float if self.is_mixed else ()
        yield from listed_lines(
            [f"- {name} ({kind})" for name, kind in self.missing],
            [f"+ {op.op} ({op.op_type}, {op.precision})" for op in self.added],
            [f"! {op.op} ({op.op_type}) computes in {op.precision}" for op in floats],
            [
                f"= {op.op} ({op.op_type}): {', '.join((*op.named, *op.placed))}"
                for op in self.ops
                if not op.is_added
            ],
        )

    @property
    def summary(self) -> str:
        """The counts, in a line."""
        return (
            f"{len(self.ops)} op(s) of the file compute {self.common} of the graph; "
            f"{len(self.added)} stand(s) for none of the graph, "
            f"{len(self.missing)} of the graph not found in the file"
        )


@dataclass(frozen=True)
class FilePair:
    """A graph, the subgraph of the file that computes it, and their matching."""

    graph: Subject
    subject: FileSubject
    matching: Matching
    scope: str  # ahead of the names of the file's ops
    scopes: tuple[str, ...]  # that the file's names may have ahead of the graph's


def pairs_of_file(graph: Subject, file: FileSubject) -> list[FilePair]:
    """Return a graph matched to a file, then the bodies of their loops and branches."""
    bodies = {body.label: body for body in graph.bodies}
    matched_labels = set()

    def called_by(pair: FilePair) -> Iterator[FilePair]:
        ops = pair.graph.drawn_ops()
        for at, result in pair.matching.results.items():
            called = file.bodies_of(pair.subject.nodes[at])
            names = called_functions(ops[result]) if called else []
            for name, body in zip(names, called, strict=False):
                if name in bodies and body.label not in matched_labels:
                    matched_labels.add(body.label)
                    inner = tuple(f"{s}{ops[result].name}/" for s in pair.scopes)
                    scopes = (*inner, "")
                    yield _pair(bodies[name], body, f"{body.label}/", scopes)

    return list(walk_by_identity([_pair(graph, file, "", ("",))], called_by))


def _pair(
    graph: Subject, file: FileSubject, scope: str, scopes: tuple[str, ...]
) -> FilePair:
    matching = _matched(_ends_of(graph, file, scopes), file)
    return FilePair(graph, file, matching, scope, scopes)


def _matched(graph: Ends, file: FileSubject) -> Matching:
    """Return the matching of a graph and a file by the places of the file's nodes."""
    at_inputs = {
        text.partition(" ")[2]: at
        for at, text in file.ends.items()
        if file.nodes[at].op is None
    }
    inputs = {name: file.nodes[at].tensors[0] for name, at in at_inputs.items()}
    found = match(graph, file.graph, inputs, file.outputs)
    first = len(file.nodes) - len(file.graph.ops)
    places = {op.name: place for place, op in enumerate(graph.ops)}
    ends = {
        at_inputs[name]: places[op.name]
        for name, op in graph.inputs.items()
        if name in at_inputs
    }
    nodes = {p: tuple(first + at for at in ats) for p, ats in found.nodes.items()}
    for at, place in ends.items():
        nodes[place] = (at, *nodes[place])
    return Matching(
        {**ends, **{first + at: place for at, place in found.results.items()}},
        {
            **{at: (place,) for at, place in ends.items()},
            **{first + at: named for at, named in found.named.items()},
        },
        {first + at: placed for at, placed in found.placed.items()},
        nodes,
        found.constant,
    )


def _ends_of(subject: Subject, file: FileSubject, scopes: tuple[str, ...]) -> Ends:
    """Return a graph with its ends by the names that the file has for them."""
    ops = subject.drawn_ops()
    by_name = {op.name: op for op in ops}
    named: dict[str, dict[str, Operation]] = {"input": {}, "output": {}}
    for op_name, text in subject.ends.items():
        role, _, name = text.partition(" ")
        if op_name in by_name and role in named and _is_data(by_name[op_name]):
            named[role][name] = by_name[op_name]
    # A bare graph tells no ends: its placeholders are the inputs.
    if not named["input"]:
        holders = [op for op in ops if op.type in PLACEHOLDERS and _is_data(op)]
        named["input"] = {op.name: op for op in holders}
    inputs = [
        text.removeprefix("input ")
        for text in file.ends.values()
        if text.startswith("input ")
    ]
    return Ends(
        ops,
        _by_file_names(named["input"], inputs),
        _by_file_names(named["output"], list(file.outputs)),
        scopes,
    )


def _by_file_names(
    named: dict[str, Operation], theirs: Sequence[str]
) -> dict[str, Operation]:
    """Return ends of a graph by their names in a file; in order if none is known."""
    file_name_of = file_names([*named])
    ours = {file_name_of[name]: op for name, op in named.items()}
    if len(named) == len(theirs) and not {*ours, *named} & {*theirs}:
        # Keras calls what it converts "output_0" and so on.
        return dict(zip(theirs, named.values(), strict=True))
    return {**named, **ours}


def _is_data(op: Operation) -> bool:
    return op.outputs[0].dtype.name != "resource"


def difference_of_file(graph: Subject, file: FileSubject) -> FileDifference:
    """Return the difference of a file and the graph that it was converted from."""
    ops: list[FileOpMatch] = []
    missing: list[tuple[str, str]] = []
    common = 0
    pairs = pairs_of_file(graph, file)
    for pair in pairs:
        drawn = pair.graph.drawn_ops()
        names = node_names(pair)
        for at, node in enumerate(pair.subject.nodes):
            if node.op is not None:
                named, placed = (
                    tuple(
                        drawn[p].name for p in of.get(at, ()) if not is_step(drawn[p])
                    )
                    for of in (pair.matching.named, pair.matching.placed)
                )
                name = f"{pair.scope}{names[at]}"
                ops.append(FileOpMatch(name, node.type, node.precision, named, placed))
        lost = [drawn[place] for place in _lost(pair)]
        missing += [(f"{pair.scope}{op.name}", op.type) for op in lost]
        common += sum(map(bool, pair.matching.nodes.values()))
    # The file may call bodies that the graph has no counterpart of.
    paired = {id(pair.subject) for pair in pairs}
    for body in _called_in(file):
        if id(body) not in paired:
            ops += [
                FileOpMatch(f"{body.label}/{n.name}", n.type, n.precision, (), ())
                for n in body.nodes
                if n.op is not None
            ]
    return FileDifference(tuple(ops), tuple(missing), common)


def _called_in(file: FileSubject) -> list[FileSubject]:
    """Return the subgraphs that a subgraph calls: those of its branches and loops."""

    def called_by(one: FileSubject) -> list[FileSubject]:
        return [body for node in one.nodes for body in file.bodies_of(node)]

    return list(walk_by_identity(called_by(file), called_by))


def _lost(pair: FilePair) -> list[int]:
    """Return the places of ops that no node is known to compute."""
    drawn = pair.graph.drawn_ops()
    return sorted(
        place
        for place, nodes in pair.matching.nodes.items()
        if not nodes
        and drawn[place].type not in PLACEHOLDERS
        and drawn[place].type not in VALUE_BLIND
        and not is_step(drawn[place])
    )


def node_names(pair: FilePair) -> list[str]:
    """Return names of nodes: those of the ops whose results they make, where known."""
    drawn = pair.graph.drawn_ops()
    nodes = pair.subject.nodes
    wanted = {at: drawn[op].name for at, op in pair.matching.results.items()}
    unique = UniqueNames()
    # Ops come before constants, which the converter calls after the same ops.
    order = sorted(range(len(nodes)), key=lambda at: (at not in wanted, at))
    names = {at: unique.name(wanted.get(at, nodes[at].name)) for at in order}
    return [names[at] for at in range(len(nodes))]


def named_after(graph: Subject | None, file: FileSubject) -> FileSubject:
    """Return a file whose nodes have the names of the ops that they compute."""
    if graph is None:
        return file
    names = {id(p.subject): node_names(p) for p in pairs_of_file(graph, file)}
    bodies = tuple(_renamed(body, names.get(id(body))) for body in file.bodies)
    return replace(_renamed(file, names.get(id(file))), bodies=bodies)


def _renamed(subject: FileSubject, names: Sequence[str] | None) -> FileSubject:
    if names is None:
        return subject
    nodes = [
        replace(
            node,
            name=name,
            inputs=tuple(
                replace(read, name=f"{names[read.place]}:{read.output}")
                for read in node.inputs
            ),
        )
        for node, name in zip(subject.nodes, names, strict=True)
    ]
    return replace(subject, nodes=tuple(nodes))


Partners = dict[int, list[int]]


def links_of(
    pair: FilePair,
) -> tuple[tuple[list[int], list[int]], tuple[Partners, Partners]]:
    """Return the outcome of the ops of both sides, and those that belong together."""
    of_ops = {place: list(ats) for place, ats in pair.matching.nodes.items() if ats}
    of_nodes = {
        at: list(ops)
        for at in range(len(pair.subject.nodes))
        if (ops := pair.matching.ops_of(at))
    }
    return _statuses(pair), (of_ops, of_nodes)


def page_data(graph: Subject, file: FileSubject) -> list[dict[str, Any]]:
    """Return a graph and a file as the viewer takes them: in pairs, with partners."""
    columns = {one["label"]: one for one in file.data()}
    ours = {one["label"]: one for one in graph.data()}
    graphs: list[dict[str, Any]] = []
    for pair in pairs_of_file(graph, file):
        before, after = ours[pair.graph.label], columns[pair.subject.label]
        status, partners = links_of(pair)
        sides = (before, {**after, "names": node_names(pair)})
        graphs += [
            {**side, "status": status[at], "partners": partners[at]}
            for at, side in enumerate(sides)
        ]
    return graphs


def _statuses(pair: FilePair) -> tuple[list[int], list[int]]:
    """Return the fate of each op of the graph, and of each node of the file."""
    drawn, nodes = pair.graph.drawn_ops(), pair.subject.nodes
    lost = set(_lost(pair))
    of_nodes = []
    for at, node in enumerate(nodes):
        # A node is several ops of the graph, one, or none.
        places = pair.matching.ops_of(at)
        computing = [place for place in places if not is_step(drawn[place])]
        several = FUSED if len(computing) > 1 else SAME
        of_nodes.append(SAME if node.op is None else several if places else ADDED)
    of_ops = [
        REMOVED
        if place in lost
        else max(
            (of_nodes[at] for at in pair.matching.nodes.get(place, ())), default=SAME
        )
        for place in range(len(drawn))
    ]
    return of_ops, of_nodes


def file_rows(difference: FileDifference) -> Rows:
    """Return a comparison with a file as a table."""
    missing = [
        Row(
            "not in the file",
            False,
            name,
            f"{kind}: no op of the file is known to compute it",
            (name,),
        )
        for name, kind in difference.missing
    ]
    rows = [_row(op, difference.is_mixed) for op in difference.ops]
    rows.sort(key=lambda row: row.good)
    return Rows("The file", (difference.summary,), (*missing, *rows))


def _row(op: FileOpMatch, mixed: bool) -> Row:
    parts = (*op.named, *op.placed)
    outcome = (
        "only in the file" if op.is_added else "fused" if len(parts) > 1 else "one op"
    )
    detail = f"{op.op_type} in {op.precision}"
    if parts:
        detail += f", of {', '.join(parts)}"
    return Row(outcome, not (mixed and op.is_float), op.op, detail, (op.op, *parts))


def swapped(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs of graphs with the second of each first."""
    return [graphs[i ^ 1] for i in range(len(graphs))]
