"""Parts of TFLite files as files of their own: cut, split, kept subgraphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from geutil.errors import TFLiteError, Words
from geutil.tflite import effects, lookups
from geutil.tflite.arguments import checked
from geutil.tflite.lookups import GraphLike, OpsLike, TensorLike, TensorsLike
from geutil.tflite.parts import (
    Buffer,
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    copied_record,
)

F = TypeVar("F", bound=Contents)

Ends = TensorsLike | Mapping[str, TensorLike]
_Names = dict[LiteTensor, list[str]]
"""The names of ends in a signature; one can be given twice."""
DEFAULT_SIGNATURE = "serving_default"
_FREE_KINDS = {*effects.HANDLES, "CALL_ONCE"}
"""Kinds of which each of two files can have the same op, and mean the same by it."""


@dataclass(frozen=True, eq=False)
class FilePart:
    """A part of a subgraph that becomes a subgraph."""

    graph: LiteGraph
    ops: Sequence[LiteOp]
    inputs: Sequence[LiteTensor]
    outputs: Sequence[LiteTensor]
    name: str
    signatures: Sequence[LiteSignature] = ()

    @classmethod
    def whole(
        cls, graph: LiteGraph, signatures: Sequence[LiteSignature] = ()
    ) -> FilePart:
        """Return the part that is all of a subgraph."""
        ends = [*graph.inputs], [*graph.outputs]
        return cls(graph, graph.ops, *ends, graph.name, signatures)

    @property
    def is_whole(self) -> bool:
        """True if it is all of its subgraph."""
        graph = self.graph
        return (*self.ops,) == graph.ops and self.has_its_ends

    @property
    def has_its_ends(self) -> bool:
        """True if its inputs and outputs are those of its subgraph."""
        graph = self.graph
        ends = (*self.inputs,), (*self.outputs,)
        return ends == (graph.inputs, graph.outputs)


def assembled(file: F, parts: Sequence[FilePart]) -> F:
    """Return a file of parts of a file, and of the subgraphs that they call."""
    new = type(file)()
    new.record, new.unknown = copied_record(file.record), file.unknown
    new.description = file.description
    new.metadata, new.archive = {**file.metadata}, file.archive
    called = effects.called_graphs(op for part in parts for op in part.ops)
    wholes = {part.graph for part in parts if part.is_whole}
    # A subgraph that is a part itself is not written a second time.
    every = [*parts, *(FilePart.whole(g) for g in called if g not in wholes)]
    new.graphs = [LiteGraph(part.name) for part in every]
    pairs = [*zip(every, new.graphs, strict=True)]
    callees = {part.graph: graph for part, graph in pairs if part.is_whole}
    for part, graph in pairs:
        tensors = fill(graph, part, callees)
        for one in part.signatures:
            new.signatures[one.key] = LiteSignature(
                one.key,
                graph,
                {name: tensors[t] for name, t in one.inputs.items()},
                {name: tensors[t] for name, t in one.outputs.items()},
            )
    codes = dict.fromkeys(op.code for op in new.ops)
    new.codes = [code for code in codes if code is not None]
    # Metadata describe the ends of the main subgraph as they were.
    if parts[0].graph is not file.graphs[0] or not parts[0].has_its_ends:
        effects.leave_description_out(new)
    return new


def fill(
    graph: LiteGraph, part: FilePart, callees: Mapping[LiteGraph, LiteGraph]
) -> dict[LiteTensor, LiteTensor]:
    """Fill an empty subgraph with a copy of a part; return the copies of tensors."""
    old = part.graph
    graph.record = copied_record(old.record)
    more = old.tensors if part.is_whole else (*part.inputs, *part.outputs)
    tensors = copied_tensors(old, part.ops, more)
    for t in {*part.inputs} - {*old.inputs}:
        tensors[t].buffer = Buffer()
    graph.read_tensors(tensors.values())
    graph.inputs = tuple(tensors[t] for t in part.inputs)
    graph.outputs = tuple(tensors[t] for t in part.outputs)
    graph.set_ops(copied_op(op, tensors, callees) for op in part.ops)
    return tensors


def copied_tensors(
    graph: LiteGraph, ops: Iterable[LiteOp], more: Iterable[LiteTensor] = ()
) -> dict[LiteTensor, LiteTensor]:
    """Return copies of the tensors of some ops, in the order of the subgraph."""
    used = {t for op in ops for t in (*op.inputs, *op.outputs, *op.intermediates) if t}
    used.update(more)
    # No op reads the scales of blocks, so the ops do not name them.
    used |= {scales for t in used for scales in of_blocks(t)}
    tensors = {t: t.copied() for t in graph.tensors if t in used}
    for t, copy in tensors.items():
        if of_blocks(t) and t.quantization is not None:
            scales, zeros = t.quantization.block_scales, t.quantization.block_zeros
            copy.quantization = replace(
                t.quantization,
                block_scales=None if scales is None else tensors[scales],
                block_zeros=None if zeros is None else tensors[zeros],
            )
    return tensors


def of_blocks(tensor: LiteTensor) -> list[LiteTensor]:
    """Return the tensors that hold the scales and zero points of a tensor's blocks."""
    entry = tensor.quantization
    both = () if entry is None else (entry.block_scales, entry.block_zeros)
    return [t for t in both if t is not None]


def drop_unused(
    file: Contents, graph: LiteGraph, tensors: Iterable[LiteTensor]
) -> None:
    """Leave those tensors out that nothing uses any more."""
    used = {*graph.inputs, *graph.outputs, *(t for _, t in lookups.ends(file, graph))}
    used |= {t for op in graph.ops for t in op.intermediates if t}
    used |= {t for t in graph.tensors if t.readers or t.makers}
    used |= {scales for t in used for scales in of_blocks(t)}
    graph.drop_tensors([t for t in tensors if t not in used])


def copied_op(
    op: LiteOp,
    tensors: Mapping[LiteTensor, LiteTensor],
    callees: Mapping[LiteGraph, LiteGraph],
) -> LiteOp:
    """Return a copy of an op between other tensors that calls other subgraphs."""
    new = op.copied(tensors)

    def callee(value: Any) -> Any:
        return callees[value] if isinstance(value, LiteGraph) else value

    if op.subgraphs:
        new.options = {
            option: [*map(callee, value)] if isinstance(value, list) else callee(value)
            for option, value in op.options.items()
        }
    return new


def _signature(
    file: Contents, key: str, part: FilePart, chosen: _Names
) -> LiteSignature:
    """Return the signature of a part, whose ends are called as asked, or as before."""
    known: _Names = {}
    for one in sorted(
        lookups.signatures_of(file, part.graph), key=lambda s: s.key != key
    ):
        names: _Names = {}
        for name, t in (*one.inputs.items(), *one.outputs.items()):
            names.setdefault(t, []).append(name)
        # The signature that is asked for is met first, and its names win.
        known = {**names, **known}
    both: list[dict[str, LiteTensor]] = []
    for ends in (part.inputs, part.outputs):
        named: dict[str, LiteTensor] = {}
        for t in ends:
            for name in chosen.get(t) or known.get(t) or [t.name]:
                if not name or named.setdefault(name, t) is not t:
                    raise TFLiteError(
                        f"{named.get(name, t)!r} and {t!r} would both be called "
                        f"'{name}'",
                        remedy=Words("pass a mapping from names to tensors"),
                    )
        both.append(named)
    return LiteSignature(key, part.graph, *both)


@checked
def cut(
    file: F,
    inputs: Ends | None = None,
    outputs: Ends | None = None,
    *,
    ops: OpsLike | None = None,
    graph: GraphLike = None,
) -> F:
    """Return the part of a subgraph between tensors, or of some ops, as a new file.

    Variables and tables are included with the ops that write to them, subgraphs with
    those that call them. Metadata that describe inputs or outputs that change are
    dropped. Weights are not copied.

    Args:
        inputs: the tensors that become inputs, or their names, or a mapping from
            the name of each in the signature; if None, those of the subgraph that the
            outputs need.
        outputs: the tensors that become outputs, in the same forms; those of the
            subgraph if None.
        ops: the ops to take, instead of both: ops, tensors that they compute, indices,
            a slice or a range. Ops that compute their weights are included.
        graph: the subgraph, as in `add_input`; it becomes the main one.

    Raises:
        TFLiteError: the outputs still depend on an input that is not cut off, or do
            not depend on a given one; metadata refer to ops by index.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.cut(inputs="a").find()
        (<LiteOp EXP -> 'b'>,)
        >>> m.cut(ops=range(1)).find()
        (<LiteOp NEG -> 'a'>,)
    """
    effects.check_places_are_free(file, "a cut")
    own = lookups.graph_of(file, graph)
    names: _Names = {}
    given = None if inputs is None else _named(file, inputs, own, names)
    results = None if outputs is None else _named(file, outputs, own, names)
    return assembled(file, [_part(file, own, given, results, ops, names)])


def _part(
    file: Contents,
    graph: LiteGraph,
    given: list[LiteTensor] | None,
    results: list[LiteTensor] | None,
    ops: OpsLike | None = None,
    names: _Names | None = None,
) -> FilePart:
    """Return the part of a subgraph that a cut takes."""
    chosen: list[LiteOp] = []
    if ops is not None:
        chosen = lookups.ops_of(file, ops, graph)
        if given is None:
            # Constants that are computed for the ops come along.
            free = _free_ops(graph)
            taken, _ = lookups.boundary_of(chosen, graph)
            given = [t for t in taken if t.producer not in free]
        if results is None:
            results = lookups.boundary_of(chosen, graph)[1]
    results = [*graph.outputs] if results is None else results
    if not results:
        raise TFLiteError(
            "a file needs at least one output",
            remedy=f"name one {Words('in outputs=')}",
        )
    stops = [] if given is None else given
    needed = _with_state(lookups.behind(results, stops), graph, stops)
    kept = [op for op in graph.ops if op in needed]
    read = {t for op in kept for t in op.inputs} | {*results}
    if ops is not None:
        _check_inside(kept, chosen, graph)
    if given is None:
        given = [t for t in graph.inputs if t in read]
    _check_ends(graph, given, read)
    key = next((s.key for s in lookups.signatures_of(file, graph)), None)
    if key is None and names:
        key = DEFAULT_SIGNATURE
    part = FilePart(graph, kept, given, results, graph.name)
    if key is None:
        return part
    return replace(part, signatures=[_signature(file, key, part, names or {})])


def _named(
    file: Contents, ends: Ends, graph: LiteGraph, names: _Names
) -> list[LiteTensor]:
    """Return the tensors that are named as ends; note the names of a mapping."""
    if not isinstance(ends, Mapping):
        return lookups.tensors_of(file, ends, graph)
    for name, item in ends.items():
        known = names.setdefault(lookups.tensor_of(file, item, graph), [])
        known += [name] if name else []
    return lookups.tensors_of(file, ends.values(), graph)


def _check_inside(
    kept: Iterable[LiteOp], chosen: Sequence[LiteOp], graph: LiteGraph
) -> None:
    """Refuse a part that needs the state which an op outside of it writes."""
    free = {*chosen} | _free_ops(graph)
    for op in kept:
        if op not in free:
            raise TFLiteError(
                f"the selected ops read a variable or table that needs {op!r}, which "
                "is not among them",
                remedy=f"add it to {Words('ops=')}",
            )


def _free_ops(graph: LiteGraph) -> set[LiteOp]:
    """Return the ops that any part can have a copy of: constants, handles, set-up."""
    return lookups.constant_ops(graph) | {
        op for op in graph.ops if op.kind in _FREE_KINDS
    }


def _with_state(
    needed: Iterable[LiteOp], graph: LiteGraph, stops: Collection[LiteTensor]
) -> set[LiteOp]:
    """Return ops with those that write to the state that they read."""
    found = {*needed}
    writers = [op for op in graph.ops if effects.has_effect(op)]
    # A writer reads values whose makers can read further state.
    while True:
        about = {one for op in found for one in effects.resources(op)}
        more = [
            op
            for op in writers
            if op not in found
            and (effects.writes_state(op) or op.kind == "CALL_ONCE")
            and about & effects.resources(op)
        ]
        if not more:
            return found
        found.update(more)
        found.update(lookups.behind((t for op in more for t in op.reads), stops))


def _check_ends(
    graph: LiteGraph, given: Sequence[LiteTensor], read: Collection[LiteTensor | None]
) -> None:
    """Refuse inputs that are missing, and inputs that nothing needs."""
    stated = {*given}
    missing = [t for t in graph.inputs if t in read and t not in stated]
    if missing:
        raise TFLiteError(
            "the outputs, or variables that they read, still need "
            f"{', '.join(map(repr, missing))}",
            remedy=f"name {_them(missing)} {Words('in inputs=')}, too, or cut further "
            "behind",
        )
    idle = [t for t in given if t not in read]
    if idle:
        raise TFLiteError(
            f"the outputs do not need {', '.join(map(repr, idle))}",
            remedy=f"leave {_them(idle)} out",
        )
    for t in given:
        if t.dtype in ("resource", "variant"):
            raise TFLiteError(
                f"{t!r} is a handle and cannot be an input; cut behind it"
            )


def _them(tensors: Sequence[LiteTensor]) -> str:
    return "it" if len(tensors) == 1 else "them"


@checked
def split(file: F, at: TensorsLike, *, graph: GraphLike = None) -> tuple[F, F]:
    """Return two new files: the ops before some tensors, and those after.

    The first outputs these tensors and the outputs that do not depend on them; the
    second reads them, and the other inputs that it needs. Later ops that write to a
    variable of the first stay with it.

    Args:
        at: the tensors, or their names.

    Raises:
        TFLiteError: the later ops read other tensors of the first part, which the
            message names; or one part is empty.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> [half.find() for half in m.split("a")]
        [(<LiteOp NEG -> 'a'>,), (<LiteOp EXP -> 'b'>,)]
    """
    effects.check_places_are_free(file, "a split")
    own = lookups.graph_of(file, graph)
    places = lookups.tensors_of(file, at, own)
    behind = {*lookups.ahead(places)}
    late = [t for t in own.outputs if t.producer in behind and t not in places]
    early = [t for t in own.outputs if t not in late]
    for t in {*places} & {*early}:
        early.remove(t)  # What a file gives twice, its half does, too.
    first = _with_state(lookups.behind([*places, *early]), own, ())
    second = _with_state(lookups.behind(late, places), own, places)
    if not first or not second:
        side = "ahead of" if not first else "behind"
        raise TFLiteError(
            f"the outputs need no op {side} {', '.join(t.label for t in places)}: "
            "nothing is split"
        )
    _check_apart(own, places, first, second)
    # Inputs of the file that both read are inputs of both.
    read = {t for op in second for t in op.inputs}
    given = [t for t in dict.fromkeys((*places, *own.inputs)) if t in read]
    halves = (None, [*places, *early]), (given, late)
    one, other = (assembled(file, [_part(file, own, *ends)]) for ends in halves)
    return one, other


def _check_apart(
    graph: LiteGraph,
    places: Sequence[LiteTensor],
    first: Collection[LiteOp],
    second: Collection[LiteOp],
) -> None:
    """Refuse halves that both need an op, unless each can have a copy of it."""
    free = _free_ops(graph)
    both = [op for op in graph.ops if op in first and op in second and op not in free]
    if not both:
        return
    made = {t for op in both for t in op.outputs}
    alone = [op for op in graph.ops if op in second and op not in first]
    read = dict.fromkeys(t for op in alone for t in op.reads)
    crossing = [t for t in read if t in made]
    names = ", ".join(t.label for t in places)
    if not crossing:
        raise TFLiteError(
            f"{both[0]!r} reads or writes a state that is needed ahead of {names} and "
            "behind, and two files share none; split where no state is shared"
        )
    raise TFLiteError(
        f"behind {names} the file still reads "
        f"{', '.join(t.label for t in crossing)} from ahead of the split; split "
        "at these, too"
    )


@checked
def clusters(
    file: F,
    parts: Sequence[OpsLike],
    names: Sequence[str] | None = None,
    *,
    graph: GraphLike = None,
) -> F:
    """Return a new file with a subgraph for each cluster of ops.

    `cut(ops=...)` returns a single cluster.

    Args:
        parts: the ops of each, as in `cut`.
        names: the names of the subgraphs and their signatures; "part_0" and so on
            if None.

    Raises:
        TFLiteError: two have the same name, or one cannot be cut.

    Cost: linear in the ops and tensors of the subgraph, times the clusters.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.clusters([range(1), range(1, 2)], ["stem", "head"])
        LiteFile(['stem', 'head'], 2 subgraph(s), 2 ops)
    """
    effects.check_places_are_free(file, "a cut")
    own = lookups.graph_of(file, graph)
    keys = names or [f"part_{i}" for i in range(len(parts))]
    if len({*keys}) != len(parts) or not keys:
        raise TFLiteError(f"{len(parts)} clusters cannot be called {[*keys]}")
    found = [_part(file, own, None, None, ops) for ops in parts]
    return assembled(
        file,
        [
            replace(part, name=key, signatures=[_signature(file, key, part, {})])
            for key, part in zip(keys, found, strict=True)
        ],
    )


@checked
def keep_subgraphs(file: F, *graphs: GraphLike) -> F:
    """Return a new file with some subgraphs, and those that they call.

    Args:
        *graphs: the subgraphs, their names or places; the first of them in the file
            becomes the main one.

    Raises:
        TFLiteError: there is no such subgraph, or metadata refer to ops by index.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> _ = m.add_signature("negate")
        >>> m.keep_subgraphs("main")
        LiteFile(['negate'], 1 subgraph(s), 1 ops)
    """
    return _kept(file, [lookups.graph_of(file, graph) for graph in graphs], None)


def _kept(file: F, wanted: Sequence[LiteGraph], keys: Sequence[str] | None) -> F:
    """Return a file of subgraphs and of some signatures, or all of theirs."""
    effects.check_places_are_free(file, "leaving subgraphs out")
    if not wanted:
        raise TFLiteError("no subgraph is selected; a file needs one")
    parts = (
        (graph, lookups.signatures_of(file, graph))
        for graph in file.graphs
        if graph in wanted
    )
    return assembled(
        file,
        [
            FilePart.whole(graph, [s for s in found if keys is None or s.key in keys])
            for graph, found in parts
        ],
    )


@checked
def keep_signatures(file: F, *keys: str) -> F:
    """Return a new file with some signatures and the subgraphs that they need.

    Raises:
        TFLiteError: there is no such signature, or metadata refer to ops by index.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> _ = m.add_signature("negate")
        >>> m.keep_signatures("negate")
        LiteFile(['negate'], 1 subgraph(s), 1 ops)
    """
    return _kept(file, [lookups.signature_of(file, key).graph for key in keys], keys)
