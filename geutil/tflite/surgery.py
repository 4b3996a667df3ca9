"""Edits of TFLite files in place: reroute, swap, bypass, insert, replace, strip.

A plan says which ops a subgraph will have, what each will read, and which tensors it
will give. Only when these can run in some order is anything changed. Tensors of two
files that meet need the same type and steps: where these differ, a QUANTIZE or
DEQUANTIZE op stands between them, or the edit is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from geutil.errors import TFLiteError
from geutil.tflite import declarations, effects, input_shapes, lookups
from geutil.tflite.arguments import checked
from geutil.tflite.effects import resource_of
from geutil.tflite.excerpts import FilePart, assembled, drop_unused
from geutil.tflite.kinds import RUNTIME, have_equal_steps
from geutil.tflite.lookups import GraphLike, OpLike, OpsLike, TensorLike, TensorsLike
from geutil.tflite.parts import (
    Buffer,
    Code,
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    changed_sizes,
    check_free,
)
from geutil.tflite.type_changes import conversion, move_ends
from geutil.tflite.verify import check_fits

F = TypeVar("F", bound=Contents)


class EditPlan:
    """A subgraph as it will be; it is as it was until `apply`."""

    def __init__(self, file: Contents, graph: LiteGraph) -> None:
        self.graph = graph
        self._file = file
        self.ops = [*graph.ops]
        self.outputs = graph.outputs
        self._reads: dict[LiteOp, tuple[LiteTensor | None, ...]] = {}
        self._ends: dict[LiteTensor, LiteTensor] = {}

    def reroute(
        self,
        moves: Mapping[LiteTensor, LiteTensor],
        consumers: Iterable[LiteOp] | None = None,
        *,
        outputs: bool = True,
    ) -> None:
        """Plan other inputs of ops, and other outputs of the subgraph."""
        if consumers is None:
            consumers = dict.fromkeys(op for t in moves for op in t.consumers)
        for op in consumers:
            read = self._reads.get(op, op.inputs)
            self._reads[op] = tuple(t and moves.get(t, t) for t in read)
        if outputs:
            self._ends.update(moves)
            self.outputs = tuple(moves.get(t, t) for t in self.outputs)

    def put(self, new: Iterable[LiteOp], old: Iterable[LiteOp] = ()) -> None:
        """Plan new ops in the place of old ones, or ahead of all others."""
        gone = {*old}
        at = next((i for i, op in enumerate(self.ops) if op in gone), 0)
        self.ops[at:at] = new
        self.ops = [op for op in self.ops if op not in gone]

    def apply(self, edit: str) -> None:
        """Check the plan, and change the subgraph."""
        effects.check_places_are_free(self._file, edit)
        graph, kept = self.graph, {*self.ops}
        for op in self.ops:
            if op.graph is None:
                check_fits(op)
            elif op in self._reads:
                # A constant of the same shape can ask for another result.
                check_fits(op, self._reads[op])
        removed = [op for op in graph.ops if op not in kept]
        self._check_made(removed, edit)
        ordered = tuple(effects.in_order(self.ops, self._reads))
        for op, read in self._reads.items():
            if op in kept:
                op.inputs = read
        if ordered != graph.ops:
            graph.set_ops(ordered)
        move_ends(self._file, graph, "outputs", self._ends)
        graph.outputs = self.outputs
        touched = {t for op in removed for t in (*op.inputs, *op.outputs) if t}
        touched |= {t for op in self._reads for t in op.reads}
        touched.update(self._ends)
        drop_unused(self._file, graph, touched)

    def _check_made(self, removed: Sequence[LiteOp], edit: str) -> None:
        made = {t for op in self.ops for t in op.outputs}
        lost = {t for op in removed for t in op.outputs} - made
        reads = ((op, t) for op in self.ops for t in self._reads.get(op, op.inputs))
        faults = [f"{op!r} still reads {t!r}" for op, t in reads if t in lost]
        ends = (t for t in self.outputs if t in lost)
        faults += [f"{t!r} is an output of the file" for t in ends]
        for fault in faults:
            raise TFLiteError(
                f"{edit}: {fault}; reroute it to another tensor first, or bypass the "
                "op that makes it"
            )


def _check_alike(new: LiteTensor, old: LiteTensor) -> None:
    """Refuse to put a tensor in the place of one that it differs from."""
    for field, remedy in (
        ("dtype", "insert a QUANTIZE, DEQUANTIZE or CAST"),
        ("shape", "insert a RESHAPE"),
        ("quantization", "insert a QUANTIZE"),
    ):
        mine, other = getattr(new, field), getattr(old, field)
        if mine != other:
            raise TFLiteError(
                f"{new!r} cannot replace {old!r}: their {field}s are {mine} and "
                f"{other}; {remedy} between them"
            )


_REQUANTIZED = {
    "int16": ("int8", "int16"),
    "int8": ("int8", "int16", "uint8"),
    "uint8": ("int8", "uint8"),
}
"""The types that the kernel of QUANTIZE makes of integers: kernels/quantize.cc."""


class Incoming:
    """A copy of a subgraph, or of a file's main one, that comes into a file."""

    def __init__(
        self, file: Contents, own: LiteGraph, other: Contents | LiteGraph
    ) -> None:
        self.file, self.own = file, own
        if isinstance(other, Contents):
            self.copy = copied(file, other)
        else:
            alone = Contents()
            alone.graphs = [other]
            self.copy = assembled(alone, [FilePart.whole(other)])
        self.graph = self.copy.graphs[0]
        self._ops = self.graph.ops
        self._bridges: tuple[list[LiteOp], list[LiteOp]] = [], []
        self._dropped: list[LiteTensor] = []

    def replace(
        self,
        taken: Sequence[LiteTensor],
        given: Sequence[LiteTensor] | None = None,
    ) -> tuple[list[LiteOp], list[LiteTensor]]:
        """Replace ends by tensors of the file, like them; return ops and outputs."""
        for mine, its, word in (
            (taken, self.graph.inputs, "inputs"),
            (given, self.graph.outputs, "outputs"),
        ):
            if mine is not None and len(mine) != len(its):
                raise TFLiteError(
                    f"{self.graph!r} has {len(its)} {word}, and they would have to fit "
                    f"{[t.name for t in mine]}"
                )
        for ours, theirs in zip(taken, self.graph.inputs, strict=True):
            _check_alike(ours, theirs)
        made = dict(zip(self.graph.outputs, given or (), strict=False))
        for theirs, ours in made.items():
            _check_alike(theirs, ours)
            # An output that is an input or a constant has no op to make another.
            if theirs.producer is None:
                raise TFLiteError(
                    f"no op of {self.graph!r} makes its output {theirs!r}"
                )
        made |= self.fed(dict(zip(self.graph.inputs, taken, strict=True)))
        for op in self._ops:
            op.inputs = [t and made.get(t, t) for t in op.inputs]
            op.outputs = [made.get(t, t) for t in op.outputs]
        self._dropped += made
        return self.ops(), [made.get(t, t) for t in self.graph.outputs]

    def fed(
        self, pairs: Mapping[LiteTensor, LiteTensor]
    ) -> dict[LiteTensor, LiteTensor]:
        """Replace inputs by tensors of the file; return those that became others."""
        replaced: dict[LiteTensor, LiteTensor] = {}
        for theirs, ours in pairs.items():
            if not _fits(ours, theirs):
                shape = ours.shape or ()
                input_shapes.set_input_shape(self.copy, theirs, shape, graph=self.graph)
        # The tensors of the file know of the new ops only when the plan is applied.
        self.graph.set_ops([])
        for theirs, ours in pairs.items():
            op = _bridge(ours, theirs)
            if op is None:
                replaced[theirs] = ours
            else:
                self._bridges[0].append(op)
        for op in self._ops:
            op.inputs = [t and replaced.get(t, t) for t in op.inputs]
        self._dropped += replaced
        return replaced

    def feeding(
        self, pairs: Mapping[LiteTensor, LiteTensor]
    ) -> dict[LiteTensor, LiteTensor]:
        """Return the tensors that take the places of the file's, paired with ours."""
        taken: dict[LiteTensor, LiteTensor] = {}
        for ours, theirs in pairs.items():
            if not _fits(theirs, ours):
                raise TFLiteError(
                    f"{theirs!r} is to be read as {ours!r}, whose shape is fixed; call "
                    "set_batch_size or set_input_shape on one of the files"
                )
            wanted = self.graph.add_tensor(ours.copied())
            op = _bridge(theirs, wanted)
            if op is None:
                taken[ours] = theirs
                self._dropped.append(wanted)
            else:
                self._bridges[1].append(op)
                taken[ours] = wanted
        return taken

    def ops(self) -> list[LiteOp]:
        """Return the ops of the part and those between it and the file."""
        return [*self._bridges[0], *self._ops, *self._bridges[1]]

    def settle(self) -> None:
        """Add the tensors and callees of the part to the file."""
        own, gone = self.own, {*self._dropped}
        mine = [t for t in self.graph.tensors if t not in gone]
        taken = {t.name for t in {*own.tensors} - {*mine}}
        for tensor in mine:
            tensor.name = lookups.free_name(tensor.name, taken)
            taken.add(tensor.name)
            own.add_tensor(tensor)
        self.file.graphs += self.copy.graphs[1:]
        self.file.unknown = self.file.unknown or self.copy.unknown

    def name_ends(
        self,
        signature: LiteSignature,
        field: str,
        tensors: Sequence[LiteTensor],
        theirs: Sequence[LiteTensor] | None = None,
    ) -> None:
        """Add ends that came into the file to a signature."""
        ends = getattr(signature, field)
        known = {
            t: name
            for name, t in lookups.named_ends(self.copy, self.graph, field).items()
        }
        for tensor, own in zip(tensors, theirs or tensors, strict=True):
            name = lookups.free_name(known.get(own, own.name), ends)
            ends[name] = tensor


def _fits(source: LiteTensor, wanted: LiteTensor) -> bool:
    """Return whether a shape is one of those that another with free sizes allows."""
    mine, other = source.shape or (), wanted.shape or ()
    if len(mine) != len(other) or changed_sizes(mine, other):
        raise TFLiteError(
            f"{source!r} is to be read as {wanted!r}: their shapes are {list(mine)} "
            f"and {list(other)}; call set_batch_size or set_input_shape, or put a "
            "RESHAPE between them"
        )
    return all(b is None or a == b for a, b in zip(mine, other, strict=True))


def _bridge(source: LiteTensor, wanted: LiteTensor) -> LiteOp | None:
    """Return the op that makes a tensor of another one; None if they are alike."""
    one, two = source.quantization, wanted.quantization
    if source.dtype == wanted.dtype and (
        one == two or have_equal_steps(source, wanted)
    ):
        return None
    # DEQUANTIZE widens float16, which has no steps, as well.
    small = ("float32", "float16")
    if wanted.dtype == "float32" and (one is not None or source.dtype in small):
        return conversion(source, wanted)
    if source.dtype == "float32" and two is not None and wanted.dtype in _REQUANTIZED:
        return conversion(source, wanted)
    makes = _REQUANTIZED.get(source.dtype, ())
    if one is not None and two is not None and wanted.dtype in makes:
        return conversion(source, wanted)
    raise TFLiteError(
        f"{source!r} ({one or 'no steps'}) is to be read as {wanted!r} "
        f"({two or 'no steps'}), and no QUANTIZE or DEQUANTIZE makes one of the other; "
        "insert a CAST, or set_io_type of one of the files"
    )


def copied(file: F, other: F, *, every: bool = False) -> F:
    """Return a copy of a file whose variables are not those of another one."""
    effects.check_places_are_free(other, "a join")
    effects.check_places_are_free(file, "a join")
    if getattr(other.record, "externalBuffers", None):
        raise TFLiteError(
            "the file that is joined keeps weights in other files; save it whole first"
        )
    main = lookups.graph_of(other)
    parts = [
        FilePart.whole(graph, lookups.signatures_of(other, graph))
        for graph in (other.graphs if every else [main])
    ]
    copy = assembled(other, parts)
    _keep_apart(file, copy)
    return copy


def _keep_apart(file: Contents, copy: Contents) -> None:
    """Rename variables and tables of a file that another one has, too."""
    known, own = (
        {resource_of(op) for op in one.ops if op.kind in effects.HANDLES}
        for one in (file, copy)
    )
    new: dict[effects.Resource, object] = {}
    for kind, container, name in sorted(own & known, key=repr):
        taken = {n for k, c, n in known | own if (k, c) == (kind, container)}
        free: object
        # Hash tables are numbered, and variables have names.
        if isinstance(name, int):
            free = 1 + max(n for n in taken if isinstance(n, int))
        else:
            plain = name.decode() if isinstance(name, bytes) else str(name or "")
            names = {n.decode() if isinstance(n, bytes) else str(n) for n in taken}
            free = lookups.free_name(plain, names).encode()
        new[kind, container, name] = free
        own.add((kind, container, free))
    for op in copy.ops:
        if op.kind in effects.HANDLES and resource_of(op) in new:
            op.options[effects.HANDLES[op.kind]] = new[resource_of(op)]


Replacement = str | LiteOp | LiteGraph | Contents


@checked
def reroute(
    file: Contents,
    old: TensorLike,
    new: TensorLike,
    *,
    consumers: OpsLike | None = None,
    graph: GraphLike = None,
) -> None:
    """Make the readers of a tensor read another one of its type and shape.

    Args:
        old: the tensor that is read.
        new: the tensor to read instead.
        consumers: the ops to change; all, and the outputs, if None.

    Raises:
        TFLiteError: the two differ in type, shape or quantization, there would be a
            cycle, or metadata refer to ops by index. Nothing has changed.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.reroute("a", "x")
        >>> m.op("b").inputs
        (<LiteTensor 'x' float32 [4]>,)
    """
    own = lookups.graph_of(file, graph)
    before = lookups.tensor_of(file, old, own)
    after = lookups.tensor_of(file, new, own)
    _check_alike(after, before)
    plan = EditPlan(file, own)
    chosen = _readers(file, consumers, before, own)
    plan.reroute({before: after}, chosen, outputs=chosen is None)
    plan.apply("a reroute")


def _readers(
    file: Contents, consumers: OpsLike | None, tensor: LiteTensor, graph: LiteGraph
) -> list[LiteOp] | None:
    """Return chosen readers of a tensor; None for all, and the outputs."""
    if consumers is None:
        return None
    chosen = lookups.ops_of(file, consumers, graph)
    for op in chosen:
        if op not in tensor.readers:
            raise TFLiteError(f"{op!r} does not read {tensor!r}")
    return chosen


@checked
def swap(
    file: Contents, one: TensorLike, other: TensorLike, *, graph: GraphLike = None
) -> None:
    """Swap the readers of two tensors, as two calls of `reroute` at once.

    Raises:
        TFLiteError: see `reroute`. Nothing has changed.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> one, other = (m.add(kind, [x], name=kind) for kind in ("NEG", "EXP"))
        >>> m.set_outputs([m.add("SUB", [one, other], name="y")])
        >>> m.swap("NEG", "EXP")
        >>> [t.name for t in m.op("y").inputs]
        ['EXP', 'NEG']
    """
    own = lookups.graph_of(file, graph)
    a, b = (lookups.tensor_of(file, item, own) for item in (one, other))
    _check_alike(a, b)
    plan = EditPlan(file, own)
    plan.reroute({a: b, b: a})
    plan.apply("a swap")


@checked
def bypass(
    file: Contents,
    op: OpLike,
    read: TensorLike | None = None,
    *,
    graph: GraphLike = None,
) -> None:
    """Bypass an op: the readers of its result read its input.

    Args:
        op: the op, or the name of the tensor that it computes.
        read: the input to read; if None, the only one that is not a constant.

    Raises:
        TFLiteError: input and result differ in type, shape or quantization, or it has
            several results. Nothing has changed.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
        >>> m.bypass("a")
        >>> m.find()
        (<LiteOp EXP -> 'b'>,)
    """
    own = lookups.graph_of(file, graph)
    passed = lookups.op_of(file, op, own)
    if len(passed.outputs) != 1:
        raise TFLiteError(
            f"{passed!r} makes {len(passed.outputs)} tensors, and a bypass is for ops "
            "that make one; reroute each of them"
        )
    if read is None:
        fed = [t for t in passed.inputs if t and not lookups.is_constant(t, own)]
        if len(fed) != 1:
            raise TFLiteError(
                f"{passed!r} reads {len(fed)} tensors that are no constants; name the "
                "one that its readers shall read"
            )
        after = fed[0]
    else:
        after = lookups.tensor_of(file, read, own)
        if after not in passed.inputs:
            raise TFLiteError(f"{passed!r} does not read {after!r}")
    _check_alike(after, passed.outputs[0])
    plan = EditPlan(file, own)
    plan.reroute({passed.outputs[0]: after})
    plan.put((), [passed])
    plan.apply("a bypass")


@checked
def remove(file: Contents, ops: OpsLike, *, graph: GraphLike = None) -> None:
    """Remove ops whose results nothing else reads.

    Raises:
        TFLiteError: something reads them. Nothing has changed.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> y = m.add("NEG", [x], name="unread")
        >>> m.remove("unread")
        >>> m.find()
        ()
    """
    own = lookups.graph_of(file, graph)
    plan = EditPlan(file, own)
    plan.put((), lookups.ops_of(file, ops, own))
    plan.apply("removing ops")


@checked
def insert(
    file: Contents,
    tensor: TensorLike,
    by: Replacement,
    *,
    consumers: OpsLike | None = None,
    name: str | None = None,
    graph: GraphLike = None,
    **options: Any,
) -> LiteTensor:
    """Insert an op or a part between a tensor and its readers.

    Args:
        tensor: the tensor.
        by: the kind of an op that reads it and returns a tensor like it; an op in no
            subgraph that reads it; or a file or subgraph with one input and one output.
        consumers: the readers to redirect; all, and the outputs, if None.
        name: the name of the new tensor.
        **options: the options of the kind.

    Returns:
        The tensor that the readers read now.

    Raises:
        TFLiteError: the new tensor differs in type, shape or quantization, or metadata
            refer to ops by index. Nothing has changed.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("NEG", [x], name="a")])
        >>> m.insert("a", "RELU")
        <LiteTensor 'a/relu' float32 [4]>
    """
    own = lookups.graph_of(file, graph)
    before = lookups.tensor_of(file, tensor, own)
    chosen = _readers(file, consumers, before, own)
    plan, part = EditPlan(file, own), None
    if isinstance(by, str):
        after = before.copied()
        after.buffer, after.is_variable = Buffer(), False
        ops = [declarations.new_op(by, [before], [after], options)]
    elif isinstance(by, LiteOp):
        if options:
            raise TFLiteError("options are for a kind; an op has its own")
        check_free(by)
        if before not in by.inputs or len(by.outputs) != 1:
            raise TFLiteError(f"{by!r} has to read {before!r} and make one tensor")
        after, ops = by.outputs[0], [by]
    else:
        part = Incoming(file, own, by)
        ops, given = part.replace([before])
        if len(given) != 1:
            raise TFLiteError(f"the part gives {len(given)} tensors, and one is needed")
        after = given[0]
    _check_alike(after, before)
    if name is not None or not isinstance(by, LiteOp):
        after.name = lookups.free_name(
            name or f"{before.name}/{by.lower() if isinstance(by, str) else 'part'}",
            (t.name for t in own.tensors),
        )
    plan.reroute({before: after}, chosen, outputs=chosen is None)
    # An op that reads the tensor itself is not among the readers that move.
    readers = [op for op in plan.ops if op in (chosen or before.readers)]
    at = plan.ops.index(readers[0]) if readers else len(plan.ops)
    plan.ops[at:at] = ops
    plan.apply("an insertion")
    if part is not None:
        part.settle()
    return after


@checked
def replace(
    file: Contents,
    ops: OpsLike,
    by: Replacement,
    *,
    inputs: TensorsLike | None = None,
    graph: GraphLike = None,
    **options: Any,
) -> tuple[LiteOp, ...]:
    """Replace ops by other ops, or by part of a file.

    Args:
        ops: the ops: objects, tensors that they compute, indices, a slice or a range.
        by: the kind of the op that replaces each of them; an op in no subgraph that
            replaces all; or a file or subgraph, whose inputs and outputs replace
            theirs, in the order of `boundary`.
        inputs: the tensors that the part reads, in the order of its inputs; those of
            the boundary if None.
        **options: the options of the kind.

    Returns:
        The new ops.

    Raises:
        TFLiteError: inputs or outputs differ in number, type, shape or quantization, or
            metadata refer to ops by index. Nothing has changed.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> m.set_outputs([m.add("RELU6", [x], name="y")])
        >>> m.replace("y", "RELU")
        (<LiteOp RELU -> 'y'>,)
    """
    own = lookups.graph_of(file, graph)
    chosen = lookups.ops_of(file, ops, own)
    plan = EditPlan(file, own)
    if isinstance(by, str):
        new = [declarations.new_op(by, op.inputs, op.outputs, options) for op in chosen]
        for op, other in zip(chosen, new, strict=True):
            plan.put([other], [op])
        plan.apply("a replacement")
        return (*new,)
    if options:
        raise TFLiteError("options are for a kind; ops and parts have their own")
    part = None
    taken, given = lookups.boundary_of(chosen, own)
    if inputs is not None:
        taken = lookups.tensors_of(file, inputs, own)
    if isinstance(by, LiteOp):
        check_free(by)
        for t in by.inputs:
            if t and not own.has_tensor(t) and t.makers:
                raise TFLiteError(f"{by!r} reads {t!r}, which is in another subgraph")
        new = [by]
        made = {*by.outputs}
        missing = [t for t in given if t not in made]
        if missing:
            moves = dict(zip(given, by.outputs, strict=False))
            # Only an op that makes none of the tensors itself is paired by place.
            if len(given) != len(by.outputs) or made & {*given}:
                raise TFLiteError(
                    f"{by!r} does not make {', '.join(map(repr, missing))}, which is "
                    "read behind the ops"
                )
            for old, after in moves.items():
                _check_alike(after, old)
            plan.reroute(moves)
    else:
        part = Incoming(file, own, by)
        new, _ = part.replace(taken, given)
    plan.put(new, chosen)
    plan.apply("a replacement")
    if part is not None:
        part.settle()
    return (*new,)


@checked
def strip(
    file: Contents,
    *,
    unused: bool = True,
    buffers: bool = True,
    names: bool = False,
    metadata: bool | str | Iterable[str] = False,
) -> None:
    """Remove everything that the outputs of the file do not depend on.

    Args:
        unused: whether to remove ops that no output needs and that change no state,
            unused tensors and buffers, and subgraphs that nothing calls.
        buffers: whether to store tensors with equal bytes in one buffer.
        names: whether to remove the names of inner tensors and of subgraphs.
        metadata: whether to remove all metadata but the runtime version, with the
            description and the attached files; or the names of those to remove.

    Raises:
        TFLiteError: there are no such metadata, or others refer to ops by index.

    Cost: linear in ops and tensors; `buffers` reads the weights of equal size.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [4])
        >>> y = m.add("EXP", [x], name="unread")
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> m.strip()
        >>> m.find()
        (<LiteOp NEG -> 'y'>,)
    """
    lookups.graph_of(file)
    dropped = _chosen_metadata(file, metadata)
    dead = {graph: _dead_ops(graph) for graph in file.graphs} if unused else {}
    fixed = [n for n in effects.FIXED_BY_METADATA if n in file.metadata]
    if any(dead.values()) and not {*fixed} <= {*dropped}:
        raise TFLiteError(
            f"the metadata '{fixed[0]}' {effects.FIXED_BY_METADATA[fixed[0]]}, and "
            "there are ops that nothing needs",
            remedy=f"leave it out, too: {effects.without(fixed[0])}, or pass "
            "unused=False",
        )
    for name in dropped:
        del file.metadata[name]
    if metadata is True:
        file.description, file.archive = "", None
    for graph, ops in dead.items():
        if ops:
            graph.set_ops(op for op in graph.ops if op not in ops)
    if unused:
        # Subgraphs that nothing calls and no signature names.
        roots = [lookups.graph_of(file), *(s.graph for s in file.signatures.values())]
        kept = {*roots, *effects.called_graphs(op for g in roots for op in g.ops)}
        file.graphs = [graph for graph in file.graphs if graph in kept]
        for graph in file.graphs:
            # Places of tensors are in the metadata of an arena, too.
            if not {*fixed} - {*dropped}:
                drop_unused(file, graph, graph.tensors)
        file.kept, file.buffers = {0}, file.buffers[:1]
        # The writer adds those of ops that have another kind or version now.
        used = {id(Code.of(op)) for op in file.ops}
        file.codes = [code for code in file.codes if id(code) in used]
    if buffers:
        share_buffers(file)
    for graph in file.graphs if names else ():
        graph.name = ""
        for t in {*graph.tensors} - {*graph.inputs, *graph.outputs}:
            t.name = ""


def _chosen_metadata(file: Contents, metadata: object) -> list[str]:
    """Return the names of the metadata to leave out."""
    if isinstance(metadata, bool):
        return [n for n in file.metadata if n != RUNTIME] if metadata else []
    if isinstance(metadata, str) or not isinstance(metadata, Iterable):
        metadata = [metadata]
    chosen = [str(name) for name in metadata]
    for name in chosen:
        if name not in file.metadata:
            raise TFLiteError(
                f"there is no metadata '{name}'; there are {[*file.metadata]}"
            )
    return chosen


def _dead_ops(graph: LiteGraph) -> set[LiteOp]:
    """Return the ops that no output needs and that change no state."""
    lasting = [op for op in graph.ops if effects.has_effect(op)]
    read = (*graph.outputs, *(t for op in lasting for t in op.reads))
    return {*graph.ops} - {*lasting, *lookups.behind(read)}


def share_buffers(file: Contents) -> None:
    """Store tensors with the same bytes in one buffer."""
    sizes: dict[int, dict[int, Buffer]] = {}
    for t in file.tensors:
        if t.buffer.size:
            sizes.setdefault(t.buffer.size, {})[id(t.buffer)] = t.buffer
    first: dict[int, Buffer] = {}
    for alike in sizes.values():
        if len(alike) > 1:
            known: dict[bytes, Buffer] = {}
            for key, buffer in alike.items():
                data: Any = buffer.data
                digest = hashlib.sha256(data).digest()
                first[key] = known.setdefault(digest, buffer)
    for t in file.tensors:
        t.buffer = first.get(id(t.buffer), t.buffer)
