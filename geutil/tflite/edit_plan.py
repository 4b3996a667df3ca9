"""Plans of edits, and subgraphs of other files that come in by them.

A plan says which ops a subgraph will have, what each will read, and which tensors it
will give. Only when these can run in some order is anything changed. Tensors of two
files that meet need the same type and steps: where these differ, a QUANTIZE or
DEQUANTIZE op stands between them, or the edit is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from geutil.errors import TFLiteError
from geutil.tflite import effects, looking, resizing
from geutil.tflite.cutting import FilePart, assembled, drop_unused
from geutil.tflite.effects import resource_of
from geutil.tflite.kinds import have_equal_steps
from geutil.tflite.parts import Contents, LiteGraph, LiteOp, LiteSignature, LiteTensor
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
        """Let ops read other tensors, and let the subgraph give them."""
        if consumers is None:
            consumers = dict.fromkeys(op for t in moves for op in t.consumers)
        for op in consumers:
            read = self._reads.get(op, op.inputs)
            self._reads[op] = tuple(t and moves.get(t, t) for t in read)
        if outputs:
            self._ends.update(moves)
            self.outputs = tuple(moves.get(t, t) for t in self.outputs)

    def put(self, new: Iterable[LiteOp], old: Iterable[LiteOp] = ()) -> None:
        """Let new ops run in the place of old ones, or ahead of all others."""
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


def check_alike(new: LiteTensor, old: LiteTensor) -> None:
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
        """Let ends be tensors of the file, like them; return its ops and outputs."""
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
            check_alike(ours, theirs)
        made = dict(zip(self.graph.outputs, given or (), strict=False))
        for theirs, ours in made.items():
            check_alike(theirs, ours)
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
        """Let inputs be tensors of the file; return those that became others."""
        replaced: dict[LiteTensor, LiteTensor] = {}
        for theirs, ours in pairs.items():
            if not _fits(ours, theirs):
                shape = ours.shape or ()
                resizing.set_input_shape(self.copy, theirs, shape, graph=self.graph)
        # The tensors of the file know of the new ops only when the plan is applied.
        self.graph.set_ops([])
        for theirs, ours in pairs.items():
            op = bridge(ours, theirs)
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
            op = bridge(theirs, wanted)
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
        """Give the file the buffers and callees that the part needs."""
        own, gone = self.own, {*self._dropped}
        mine = [t for t in self.graph.tensors if t not in gone]
        taken = {t.name for t in {*own.tensors} - {*mine}}
        for tensor in mine:
            tensor.name = looking.free_name(tensor.name, taken)
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
        """Let a signature name ends that came into the file."""
        ends = getattr(signature, field)
        known = {
            t: name
            for name, t in looking.named_ends(self.copy, self.graph, field).items()
        }
        for tensor, own in zip(tensors, theirs or tensors, strict=True):
            name = looking.free_name(known.get(own, own.name), ends)
            ends[name] = tensor


def _fits(source: LiteTensor, wanted: LiteTensor) -> bool:
    """Tell whether a shape is one of those that another with free sizes allows."""
    mine, other = source.shape or (), wanted.shape or ()
    pairs = [*zip(mine, other, strict=False)]
    if len(mine) != len(other) or any(
        None not in pair and pair[0] != pair[1] for pair in pairs
    ):
        raise TFLiteError(
            f"{source!r} is to be read as {wanted!r}: their shapes are {list(mine)} "
            f"and {list(other)}; call set_batch_size or set_input_shape, or put a "
            "RESHAPE between them"
        )
    return all(b is None or a == b for a, b in pairs)


def bridge(source: LiteTensor, wanted: LiteTensor) -> LiteOp | None:
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
    main = looking.graph_of(other)
    parts = [
        FilePart.whole(graph, looking.signatures_of(other, graph))
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
            free = looking.free_name(plain, names).encode()
        new[kind, container, name] = free
        own.add((kind, container, free))
    for op in copy.ops:
        if op.kind in effects.HANDLES and resource_of(op) in new:
            op.options[effects.HANDLES[op.kind]] = new[resource_of(op)]
