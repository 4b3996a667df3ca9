"""Files joined: one put behind, before or into another, or beside it.

Variables of the two files stay apart: names that both use are changed in one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from geutil.errors import TFLiteError
from geutil.tflite import effects, lookups
from geutil.tflite.arguments import checked
from geutil.tflite.excerpts import DEFAULT_SIGNATURE
from geutil.tflite.lookups import GraphLike, TensorsLike
from geutil.tflite.parts import Contents, LiteGraph, LiteSignature, LiteTensor
from geutil.tflite.surgery import EditPlan, Incoming, copied, share_buffers

F = TypeVar("F", bound=Contents)
Pairs = Mapping[str, str] | None


@checked
def append(
    file: F,
    other: F,
    connect: Mapping[str, str] | None = None,
    *,
    graph: GraphLike = None,
) -> None:
    """Append the main subgraph of another file: it reads the outputs of this one.

    If types, scales or zero points differ, a QUANTIZE or DEQUANTIZE op is inserted.
    Outputs that are not connected stay; so do the other file's inputs. Variables that
    have the same name in both files stay separate. The other file is not changed.

    Args:
        other: the other file.
        connect: a mapping from the names of its inputs to the names of outputs of this
            file, or of inputs to share. If None, those of the same name, or the only
            ones.

    Raises:
        TFLiteError: the ends to connect are ambiguous, or shapes or types do not fit.
            The file is unchanged.

    Cost: linear in both; weights are not copied.

    Example:
        >>> from geutil import tflite
        >>> first, second = tflite.LiteFile(), tflite.LiteFile()
        >>> for m, kind in ((first, "EXP"), (second, "NEG")):
        ...     m.set_outputs([m.add(kind, [m.add_input("x", "float32", [2])])])
        >>> first.append(second)
        >>> [op.kind for op in first.graphs[0].ops]
        ['EXP', 'NEG']
    """
    own = lookups.graph_of(file, graph)
    part = Incoming(file, own, other)
    # The joined file takes an input of both files once.
    ours = (*own.outputs, *(t for t in own.inputs if t not in own.outputs))
    pairs = _pairs(part, connect, part.graph.inputs, ours, ("input", "output"))
    plan = EditPlan(file, own)
    sources = part.fed(pairs)
    plan.ops += part.ops()
    gone = {t for t in pairs.values() if t in own.outputs}
    if not gone:
        raise TFLiteError("connect names no output; use merge for files side by side")
    results = [sources.get(t, t) for t in part.graph.outputs]
    plan.outputs = _in_place_of(own.outputs, gone, results)
    free = [t for t in part.graph.inputs if t not in pairs]
    plan.apply("an append")
    own.inputs = (*own.inputs, *free)
    part.settle()
    effects.leave_description_out(file)
    for signature in lookups.signatures_of(file, own):
        signature.outputs = {
            n: t for n, t in signature.outputs.items() if t not in gone
        }
        part.name_ends(signature, "inputs", free)
        part.name_ends(signature, "outputs", results, part.graph.outputs)


@checked
def prepend(
    file: F,
    other: F,
    connect: Mapping[str, str] | None = None,
    *,
    graph: GraphLike = None,
) -> None:
    """Prepend the main subgraph of another file: this one reads its outputs.

    Args:
        other: the other file; see `append`.
        connect: a mapping from the names of its outputs to inputs of this file.

    Raises:
        TFLiteError: see `append`.

    Cost: linear in both; weights are not copied.

    Example:
        >>> from geutil import tflite
        >>> first, second = tflite.LiteFile(), tflite.LiteFile()
        >>> for m, kind in ((first, "EXP"), (second, "NEG")):
        ...     m.set_outputs([m.add(kind, [m.add_input("x", "float32", [2])])])
        >>> first.prepend(second)
        >>> [op.kind for op in first.graphs[0].ops]
        ['NEG', 'EXP']
    """
    own = lookups.graph_of(file, graph)
    part = Incoming(file, own, other)
    pairs = _pairs(part, connect, part.graph.outputs, own.inputs, ("output", "input"))
    made = {ours: theirs for theirs, ours in pairs.items()}
    # The joined file takes an input of both files once.
    shared = _namesakes(
        part, part.graph.inputs, [t for t in own.inputs if t not in made]
    )
    part.fed(shared if connect is None else {})
    given = [t for t in part.graph.inputs if connect is not None or t not in shared]
    sources = part.feeding(made)
    plan = EditPlan(file, own)
    plan.ops[:0] = part.ops()
    plan.reroute(sources)
    left = [t for t in part.graph.outputs if t not in pairs]
    plan.outputs = (*plan.outputs, *left)
    plan.apply("a prepend")
    own.inputs = _in_place_of(own.inputs, made, given)
    own.drop_tensors([t for t in made if not (t.readers or t in own.outputs)])
    part.settle()
    effects.leave_description_out(file)
    for signature in lookups.signatures_of(file, own):
        signature.inputs = {n: t for n, t in signature.inputs.items() if t not in made}
        part.name_ends(signature, "inputs", given)
        part.name_ends(signature, "outputs", left)


@checked
def splice(file: F, other: F, at: TensorsLike, *, graph: GraphLike = None) -> None:
    """Insert the main subgraph of another file between tensors and their readers.

    Args:
        other: the other file, with as many inputs and outputs; see `append`.
        at: the tensor or tensors. The outputs of the other file replace them for their
            readers, and as outputs.

    Raises:
        TFLiteError: see `append`.

    Cost: linear in both; weights are not copied.

    Example:
        >>> from geutil import tflite
        >>> m, part = tflite.LiteFile(), tflite.LiteFile()
        >>> for one, kind in ((m, "EXP"), (part, "ABS")):
        ...     x = one.add_input("x", "float32", [2])
        ...     one.set_outputs([one.add(kind, [x])])
        >>> m.splice(part, at="x")
        >>> [op.kind for op in m.graphs[0].ops]
        ['ABS', 'EXP']
    """
    own = lookups.graph_of(file, graph)
    tensors = lookups.tensors_of(file, at, own)
    part = Incoming(file, own, other)
    for field in ("inputs", "outputs"):
        ends = getattr(part.graph, field)
        if len(ends) != len(tensors):
            raise TFLiteError(
                f"a file that is put in at {len(tensors)} tensor(s) has as many "
                f"{field}, and this one has {len(ends)}; cut it, or use append"
            )
    behind = max(
        (own.ops.index(t.producer) + 1 for t in tensors if t.producer), default=0
    )
    readers = dict.fromkeys(op for t in tensors for op in t.consumers)
    sources = part.fed(dict(zip(part.graph.inputs, tensors, strict=True)))
    results = [sources.get(t, t) for t in part.graph.outputs]
    fed = part.feeding(dict(zip(tensors, results, strict=True)))
    plan = EditPlan(file, own)
    plan.ops[behind:behind] = part.ops()
    plan.reroute(fed, readers)
    plan.apply("a splice")
    part.settle()
    effects.leave_description_out(file)


def _in_place_of(
    ends: Sequence[LiteTensor], gone: Collection[LiteTensor], new: Iterable[LiteTensor]
) -> tuple[LiteTensor, ...]:
    """Return ends with new ones in the place of the first of those that go."""
    at = next(i for i, t in enumerate(ends) if t in gone)
    before, behind = (
        [t for t in some if t not in gone] for some in (ends[:at], ends[at:])
    )
    return (*before, *new, *behind)


def _pairs(
    part: Incoming,
    connect: Pairs,
    theirs: Sequence[LiteTensor],
    ours: Sequence[LiteTensor],
    words: tuple[str, str],
) -> dict[LiteTensor, LiteTensor]:
    """Return which ends of a part are which of the file."""
    if connect is None:
        return _guessed(part, theirs, ours, words)
    names = lookups.named_ends(part.copy, part.graph, f"{words[0]}s")
    by_name = {**{t.name: t for t in theirs}, **names}
    found: dict[LiteTensor, LiteTensor] = {}
    for name, other in connect.items():
        if name not in by_name:
            raise TFLiteError(
                f"the file that is joined has no {words[0]} '{name}'; its {words[0]}s "
                f"are {', '.join(by_name)}"
            )
        tensor = lookups.tensor_of(part.file, other, part.own)
        if tensor not in ours:
            raise TFLiteError(f"{tensor!r} is no {words[1]} of {part.own!r}")
        found[by_name[name]] = tensor
    if not found:
        raise TFLiteError("connect names no ends; use merge for files side by side")
    return found


def _guessed(
    part: Incoming,
    theirs: Sequence[LiteTensor],
    ours: Sequence[LiteTensor],
    words: tuple[str, str],
) -> dict[LiteTensor, LiteTensor]:
    """Return ends that belong together by their number, or by their names."""
    ends = part.own.outputs if words[1] == "output" else ours
    if len(theirs) == len(ends) == 1:
        return {theirs[0]: ends[0]}
    found = _namesakes(part, theirs, ours)
    met = {*found.values()}
    # Ends that are left over stay ends, if all of one file, or the other, have met.
    whole = len(found) == len(theirs) or met.issuperset(ends)
    if not whole or len(met) < len(found):
        raise TFLiteError(
            f"the file that is joined has the {words[0]}s {[t.name for t in theirs]}, "
            f"and they would have to be {words[1]}s, which are "
            f"{[t.name for t in ends]}; pass connect={{...}}"
        )
    return found


def _namesakes(
    part: Incoming, theirs: Sequence[LiteTensor], ours: Sequence[LiteTensor]
) -> dict[LiteTensor, LiteTensor]:
    """Return the ends of a part that have the names of ends of the file, with these."""
    known: dict[str, LiteTensor] = {}
    for name, t in (*((t.name, t) for t in ours), *lookups.ends(part.file, part.own)):
        if t in ours:
            known.setdefault(name, t)
    names = [(t.name, t) for t in theirs]
    names += [(n, t) for n, t in lookups.ends(part.copy, part.graph) if t in theirs]
    return {t: known[name] for name, t in names if name in known}


@checked
def merge(file: F, others: Mapping[str, F]) -> None:
    """Merge other files into this one, with a signature for each.

    Equal weights are stored once. Variables of different files stay separate.

    Args:
        others: the other files by the names of their signatures here; if one has
            several, they are called `<name>_<its own name>`.

    Raises:
        TFLiteError: a signature of that name exists. The file is unchanged.

    Cost: linear in all of them, and in their weights, which are compared.

    Example:
        >>> from geutil import tflite
        >>> first, second = tflite.LiteFile(), tflite.LiteFile()
        >>> for m, kind in ((first, "EXP"), (second, "NEG")):
        ...     m.set_outputs([m.add(kind, [m.add_input("x", "float32", [2])])])
        >>> first.merge({"negative": second})
        >>> first
        LiteFile(['serving_default', 'negative'], 2 subgraph(s), 2 ops)
    """
    if not others:
        raise TFLiteError("no file to merge is passed")
    effects.check_places_are_free(file, "a merge")
    added: dict[str, LiteSignature] = {}
    # Beside subgraphs with signatures, the file's own needs one as well.
    if not file.signatures:
        added[DEFAULT_SIGNATURE] = _own_signature(DEFAULT_SIGNATURE, file)
    graphs: list[LiteGraph] = []
    # A scratch file holds all so far, so that each copy keeps apart from all.
    joined = type(file)()
    joined.graphs = [*file.graphs]
    unknown = file.unknown
    for key, other in others.items():
        copy = copied(joined, other, every=True)
        signatures = copy.signatures or {key: _own_signature(key, copy)}
        for name, signature in signatures.items():
            new = key if len(signatures) == 1 else f"{key}_{name}"
            if new in {**file.signatures, **added}:
                raise TFLiteError(
                    f"the file has a signature '{new}' already; pass another key"
                )
            added[new] = signature
            signature.key = new
        graphs += copy.graphs
        joined.graphs += copy.graphs
        unknown = unknown or other.unknown
    file.graphs += graphs
    file.signatures.update(added)
    file.unknown = unknown
    effects.leave_description_out(file)
    share_buffers(file)


def _own_signature(key: str, file: Contents) -> LiteSignature:
    """Return a signature of a file's main subgraph, by the names of its tensors."""
    graph = lookups.graph_of(file)
    ends = []
    for tensors in (graph.inputs, graph.outputs):
        named: dict[str, LiteTensor] = {}
        for tensor in tensors:
            named[lookups.free_name(tensor.name, named)] = tensor
        ends.append(named)
    return LiteSignature(key, graph, *ends)
