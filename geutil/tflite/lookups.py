"""Queries on TFLite files: tensors and ops by name, filters, walks, boundaries."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from geutil.errors import TFLiteError, Words
from geutil.graph.walks import walk
from geutil.tflite.arguments import checked
from geutil.tflite.effects import keeps_order
from geutil.tflite.parts import Contents, LiteGraph, LiteOp, LiteSignature, LiteTensor

T = TypeVar("T")

TensorLike = LiteTensor | str
TensorsLike = TensorLike | Iterable[TensorLike]
OpLike = LiteOp | str | int
OpsLike = OpLike | slice | range | Iterable[OpLike]
GraphLike = LiteGraph | str | int | None
Regex = str | re.Pattern[str]


def graph_of(file: Contents, graph: GraphLike = None) -> LiteGraph:
    """Return a subgraph of a file: by object, name or place; the main one if None."""
    if not file.graphs:
        raise TFLiteError("the file has no subgraph; begin one with add_input")
    if graph is None:
        return file.graphs[0]
    if isinstance(graph, LiteGraph):
        found = [one for one in file.graphs if one is graph]
    elif isinstance(graph, str):
        found = [one for one in file.graphs if one.name == graph]
    else:
        # A slice would count a negative place from the end.
        found = file.graphs[graph : graph + 1] if graph >= 0 else []
    if len(found) != 1:
        listed = ", ".join(f"'{one.name}'" for one in file.graphs)
        raise TFLiteError(
            f"{graph!r} is the name of {len(found)} subgraphs; there are {listed}; "
            "pass one of m.graphs"
        )
    return found[0]


def check_uncalled(file: Contents, graph: LiteGraph, edit: str) -> None:
    """Refuse an edit of the ends of a subgraph that ops call, which pass it others."""
    for op in file.ops:
        if graph in op.subgraphs:
            raise TFLiteError(
                f"{edit}: {graph!r} is called by {op!r}, whose tensors its ends have "
                "to fit; edit the ends of a subgraph that none calls"
            )


def tensor_of(file: Contents, item: TensorLike, graph: LiteGraph) -> LiteTensor:
    """Return a tensor of a subgraph: itself, by its name, or by that in a signature."""
    if isinstance(item, LiteTensor):
        if not graph.has_tensor(item):
            raise TFLiteError(f"{item!r} is no tensor of {graph!r}")
        return item
    tensors = graph.tensors
    found = [t for t in tensors if t.name == item]
    # A tensor's own name wins over the name that a signature gives an end.
    if not found:
        found = [*dict.fromkeys(t for name, t in ends(file, graph) if name == item)]
    if len(found) > 1:
        raise TFLiteError(
            f"'{item}' is the name of {len(found)} tensors of {graph!r}",
            remedy=Words(
                "pass one of them as an object: it is in m.find_tensors(name=...)"
            ),
        )
    if not found:
        names = [t.name for t in tensors] + [name for name, _ in ends(file, graph)]
        raise TFLiteError(f"{graph!r} has no tensor '{item}'; {_near(item, names)}")
    return found[0]


def tensors_of(
    file: Contents, items: TensorsLike, graph: LiteGraph
) -> list[LiteTensor]:
    """Return one or several tensors of a subgraph, each once."""
    several = [items] if isinstance(items, LiteTensor | str) else items
    return [*dict.fromkeys(tensor_of(file, item, graph) for item in several)]


def signatures_of(file: Contents, graph: LiteGraph) -> list[LiteSignature]:
    """Return the signatures of a subgraph."""
    return [s for s in file.signatures.values() if s.graph is graph]


def signature_of(file: Contents, key: str) -> LiteSignature:
    """Return the signature of a name."""
    if key not in file.signatures:
        raise TFLiteError(
            f"there is no signature '{key}'; there are {[*file.signatures]}"
        )
    return file.signatures[key]


def named_ends(file: Contents, graph: LiteGraph, field: str) -> dict[str, LiteTensor]:
    """Return inputs or outputs by their names in a signature, or their own."""
    for signature in signatures_of(file, graph):
        return dict(getattr(signature, field))
    return {t.name: t for t in getattr(graph, field)}


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return a name, or one like it if it is taken."""
    known = {*taken}
    if name not in known:
        return name
    return next(n for i in range(1, 1 << 30) if (n := f"{name}_{i}") not in known)


def ends(file: Contents, graph: LiteGraph) -> Iterator[tuple[str, LiteTensor]]:
    """Yield the names that signatures have for the ends of a subgraph."""
    for signature in signatures_of(file, graph):
        yield from signature.inputs.items()
        yield from signature.outputs.items()


def op_of(file: Contents, item: OpLike, graph: LiteGraph) -> LiteOp:
    """Return an op of a subgraph: itself, by a tensor that it makes, or its place."""
    if isinstance(item, LiteOp):
        if item.graph is not graph:
            raise TFLiteError(f"{item!r} is no op of {graph!r}")
        return item
    if isinstance(item, int):
        if not 0 <= item < len(graph.ops):
            raise TFLiteError(f"there is no op {item}: {graph!r}")
        return graph.ops[item]
    tensor = tensor_of(file, item, graph)
    if tensor.producer is None:
        raise TFLiteError(f"no op makes {tensor!r}; name a tensor that one makes")
    return tensor.producer


def ops_of(file: Contents, items: OpsLike, graph: LiteGraph) -> list[LiteOp]:
    """Return some ops of a subgraph in the order in which they run, each once."""
    if isinstance(items, slice):
        items = graph.ops[items]
    several = [items] if isinstance(items, LiteOp | str | int) else [*items]
    if not several:
        raise TFLiteError(f"no op of {graph!r} is selected")
    chosen = {op_of(file, item, graph) for item in several}
    return [op for op in graph.ops if op in chosen]


@checked
def find(
    file: Contents,
    kind: str | Iterable[str] | None = None,
    *,
    name: str | None = None,
    regex: str | re.Pattern[str] | None = None,
    where: Callable[[LiteOp], Any] | None = None,
    graph: GraphLike = None,
) -> tuple[LiteOp, ...]:
    """Return the ops that meet all given conditions, in execution order.

    Args:
        kind: their kind, or several kinds.
        name: the name of a tensor that they compute.
        regex: a regular expression that is searched in these names.
        where: a predicate.
        graph: a subgraph, as in `add_input`; all if None.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> y = m.add("NEG", [m.add("NEG", [x], name="a/neg")], name="b/neg")
        >>> m.find("NEG", regex="^b/")
        (<LiteOp NEG -> 'b/neg'>,)
    """
    kinds = {kind} if isinstance(kind, str) else None if kind is None else {*kind}
    named = _name_test(name, regex)
    return tuple(
        op
        for own in _chosen(file, graph)
        for op in own.ops
        if (kinds is None or op.kind in kinds)
        and (named is None or any(named(t.name) for t in op.outputs))
        and (where is None or where(op))
    )


@checked
def find_tensors(
    file: Contents,
    *,
    name: str | None = None,
    regex: str | re.Pattern[str] | None = None,
    dtype: str | None = None,
    where: Callable[[LiteTensor], Any] | None = None,
    graph: GraphLike = None,
) -> tuple[LiteTensor, ...]:
    """Return the tensors that meet all given conditions; see `find`.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.find_tensors(regex="^[ab]$", where=lambda t: t.readers)
        (<LiteTensor 'a' float32 [4]>,)
    """
    named = _name_test(name, regex)
    return tuple(
        t
        for own in _chosen(file, graph)
        for t in own.tensors
        if (named is None or named(t.name))
        and (dtype is None or t.dtype == dtype)
        and (where is None or where(t))
    )


def _chosen(file: Contents, graph: GraphLike) -> Sequence[LiteGraph]:
    return file.graphs if graph is None else [graph_of(file, graph)]


def _name_test(name: str | None, regex: Regex | None) -> Callable[[str], bool] | None:
    if name is None and regex is None:
        return None
    try:
        pattern = None if regex is None else re.compile(regex)
    except re.error as error:
        raise TFLiteError(f"'{regex}' is no regular expression: {error}") from error
    return lambda text: (
        (name is None or text == name)
        and (pattern is None or pattern.search(text) is not None)
    )


def behind(
    tensors: Iterable[LiteTensor], stops: Iterable[LiteTensor] = ()
) -> list[LiteOp]:
    """Return the ops that tensors are computed by; no further back than `stops`."""
    ends_at = {*stops}

    def makers(read: Iterable[LiteTensor | None]) -> list[LiteOp]:
        return [op for t in read if t and t not in ends_at for op in t.makers]

    return [*walk(makers(tensors), lambda op: makers(op.inputs))]


def ahead(
    tensors: Iterable[LiteTensor], stops: Iterable[LiteTensor] = ()
) -> list[LiteOp]:
    """Return the ops that depend on tensors; no further ahead than `stops`."""
    ends_at = {*stops}
    first = (op for t in tensors for op in t.consumers)
    return [
        *walk(
            first,
            lambda op: (r for t in op.outputs if t not in ends_at for r in t.consumers),
        )
    ]


def boundary_of(
    ops: Sequence[LiteOp], graph: LiteGraph
) -> tuple[list[LiteTensor], list[LiteTensor]]:
    """Return the tensors that ops read from outside and those that they give."""
    inside = {*ops}
    taken = dict.fromkeys(
        t
        for op in ops
        for t in op.inputs
        if t and not (t.is_variable or is_constant(t, graph) or t.producer in inside)
    )
    given = {*graph.outputs}
    out = dict.fromkeys(
        t
        for op in ops
        for t in op.outputs
        if t in given or any(reader not in inside for reader in t.readers)
    )
    return [*taken], [*out]


def is_constant(tensor: LiteTensor, graph: LiteGraph) -> bool:
    """Return whether the values of a tensor are in the file, for no run to change."""
    return not (tensor.makers or tensor.is_variable or tensor in {*graph.inputs})


def constant_ops(graph: LiteGraph) -> set[LiteOp]:
    """Return the ops that compute from constants alone, as DEQUANTIZE of weights."""
    given = {*graph.inputs}
    constant: set[LiteOp] = set()
    for op in graph.ops:
        if not op.subgraphs and not keeps_order(op):
            read = op.reads
            if read and all(
                t.producer in constant if t.makers else t not in given for t in read
            ):
                constant.add(op)
    return constant


def _near(name: str, names: Iterable[str]) -> str:
    listed = [*dict.fromkeys(n for n in names if n)]
    inside = [n for n in listed if name.lower() in n.lower()] if name else []
    alike = inside[:5] or difflib.get_close_matches(name, listed, 5, 0.5)
    if not alike:
        return f"{Words('m.find_tensors(regex=...)')} looks for names"
    return f"near it are {', '.join(map(repr, alike))}"


@checked
def tensor(file: Contents, name: TensorLike, *, graph: GraphLike = None) -> LiteTensor:
    """Return a tensor of a subgraph by its name, its own or that in a signature.

    Raises:
        TFLiteError: there is none, or there are several; the message lists similar
            names.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> _ = m.add_input("x", "float32", [4])
        >>> m.tensor("x")
        <LiteTensor 'x' float32 [4]>
    """
    return tensor_of(file, name, graph_of(file, graph))


@checked
def op(file: Contents, op: OpLike, *, graph: GraphLike = None) -> LiteOp:
    """Return the op that computes the tensor of a name, or the op at an index.

    Raises:
        TFLiteError: there is none.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.op("a"), m.op(1)
        (<LiteOp NEG -> 'a'>, <LiteOp EXP -> 'b'>)
    """
    return op_of(file, op, graph_of(file, graph))


@checked
def ancestors(
    file: Contents,
    tensors: TensorsLike,
    *,
    stop_at: TensorsLike = (),
    graph: GraphLike = None,
) -> tuple[LiteOp, ...]:
    """Return the ops that tensors depend on, in execution order.

    Args:
        tensors: one or several tensors, or their names.
        stop_at: tensors at which the walk stops.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> y = m.add("EXP", [m.add("NEG", [x], name="a")], name="b")
        >>> [op.kind for op in m.ancestors("b", stop_at="a")]
        ['EXP']
    """
    own = graph_of(file, graph)
    found = {*behind(*(tensors_of(file, some, own) for some in (tensors, stop_at)))}
    return tuple(op for op in own.ops if op in found)


@checked
def descendants(
    file: Contents,
    tensors: TensorsLike,
    *,
    stop_at: TensorsLike = (),
    graph: GraphLike = None,
) -> tuple[LiteOp, ...]:
    """Return the ops that depend on tensors, as `ancestors` does.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.descendants("a")
        (<LiteOp EXP -> 'b'>,)
    """
    own = graph_of(file, graph)
    found = {*ahead(*(tensors_of(file, some, own) for some in (tensors, stop_at)))}
    return tuple(op for op in own.ops if op in found)


@checked
def boundary(
    file: Contents, ops: OpsLike, *, graph: GraphLike = None
) -> tuple[list[LiteTensor], list[LiteTensor]]:
    """Return the tensors that ops read from outside, and those they pass outside.

    Constants and variables are left out.

    Args:
        ops: ops, tensors that they compute, indices, a slice or a range of these.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.boundary("a")
        ([<LiteTensor 'x' float32 [4]>], [<LiteTensor 'a' float32 [4]>])
    """
    own = graph_of(file, graph)
    return boundary_of(ops_of(file, ops, own), own)
