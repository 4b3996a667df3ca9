"""Ops of a TFLite file matched to those of the graph that it was converted from.

The ops of a file are matched in their order. Each reads what ops before it make,
whose counterparts in the graph are known; so its own is one that reads these, through
nothing but ops that kernels take in. Where that leaves several, the names of the file's
tensors decide: the converter calls them after ops of the graph; failing that, the order
of the ops. The ops that a kernel takes in are added in the end. Tables say, by types,
which ops of graphs each op of a file can compute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from geutil.graph import op_types
from geutil.graph.adjacency import topological_sort
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import walk
from geutil.tflite.kinds import CONVERSIONS
from geutil.tflite.op_names import called, names_result, sources_of
from geutil.tflite.parts import FLEX, LiteGraph, LiteOp, LiteTensor, changed_sizes
from geutil.tflite.schema import words

_FORWARDS = frozenset(
    ("Identity", "IdentityN", "PreventGradient", "Snapshot", "StopGradient")
)
"""Ops that give what they read; FakeQuant ops do so in steps."""
_MOVES = words(
    "BatchToSpaceND Cast ExpandDims MirrorPad Pad PadV2 Reshape SpaceToBatchND "
    "Squeeze StridedSlice TensorListStack Transpose"
)
"""Ops that move values, which a kernel may read otherwise instead."""
_LAYOUT = _MOVES | {"ConcatV2", "Pack"}
"""The same with those that move the values of several tensors."""
_ARITHMETIC = op_types.SHIFTS | op_types.SCALINGS | op_types.FUSED_NORMS
"""Ops that kernels take into weights and biases, where they read a constant."""
_APPLIED = {
    "Relu": ("RELU",),
    "Relu6": ("RELU6",),
    "Tanh": ("TANH",),
    "Minimum": ("RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"),
    "Maximum": ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"),
}
"""Activations as options of kernels."""
_CLIPS = frozenset(_APPLIED) - {"Tanh"}
"""Those that the range of integers can be."""
_FORMULAS = words(
    "ELU GELU HARD_SWISH L2_NORMALIZATION LEAKY_RELU LOG_SOFTMAX PRELU SOFTMAX "
    "STABLEHLO_COMPOSITE"
)
"""Ops of files that each stand for a formula of several ops."""
_IN_FORMULAS = words(
    "Abs Erf Erfc Exp Log Max Maximum Mean Minimum Neg Pow Relu Relu6 Rsqrt "
    "Sigmoid Sqrt Square Sum Tanh"
) | (op_types.SHIFTS | op_types.SCALINGS)
"""Ops that such formulas are made of."""
_PRODUCTS = {
    "BATCH_MATMUL": op_types.MATRIX_PRODUCTS,
    # Keras calls a compiled function for convolutions by groups.
    "CONV_2D": ("Conv2D", "DepthwiseConv2dNative", *sorted(op_types.CALLS)),
    "CONV_3D": ("Conv3D",),
    "DEPTHWISE_CONV_2D": ("DepthwiseConv2dNative", "Conv2D"),
    "FULLY_CONNECTED": (*sorted(op_types.MATRIX_PRODUCTS), "Conv2D"),
    "TRANSPOSE_CONV": ("Conv2DBackpropInput",),
}
"""Products that each kernel can compute: one, whatever else it takes in."""
_EVERY_PRODUCT = frozenset(kind for kinds in _PRODUCTS.values() for kind in kinds)
_TAKES_CONSTANTS = frozenset((*_PRODUCTS, "ADD", "DIV", "MUL", "SUB"))
"""Kernels with constants that others can be multiplied with, or added to."""


def _rows(text: str) -> list[list[str]]:
    return [row.split() for row in text.split(",")]


_CALLED = {
    kind: tuple(types)
    for kind, *types in _rows(
        """
        ADD BiasAdd Sub, ADD_N AddN, AVERAGE_POOL_2D AvgPool Mean,
        CONCATENATION ConcatV2, DIV RealDiv, GATHER ResourceGather,
        IF StatelessIf, LOGISTIC Sigmoid, MAXIMUM Relu, MAX_POOL_2D MaxPool,
        MINIMUM Relu6, MUL Neg RealDiv, REDUCE_ALL All, REDUCE_ANY Any, REDUCE_MAX Max,
        REDUCE_MIN Min, REDUCE_PROD Prod, RELU Maximum, RELU6 Minimum Maximum,
        RELU_0_TO_1 Minimum Maximum, RELU_N1_TO_1 Minimum Maximum,
        RESHAPE ExpandDims Squeeze StridedSlice Transpose,
        SELECT_V2 Select, SPLIT_V Split, STRIDED_SLICE Slice,
        WHILE StatelessWhile LoopCond
        """
    )
}
"""Ops that files call otherwise, by what they call them."""
_WRITTEN_OUT = {
    **dict.fromkeys(op_types.FUSED_NORMS, ("ADD", "MUL", "SUB")),
    "OneHot": ("SELECT_V2",),
    "SquaredDifference": ("MUL", "SQUARE", "SUB"),
    "Einsum": ("BATCH_MATMUL", "FULLY_CONNECTED", "MUL", "RESHAPE", "TRANSPOSE"),
}
"""Ops that files hold as several, and of which types."""
_MOVERS = ("RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE")
"""Ops of files that move values, from before which others can come behind."""
_BOOKKEEPING = ("bool", "int", "uint", "variant", "resource")
"""Types of sizes, indices and lists, which the converter computes or does without."""


def is_step(op: Operation) -> bool:
    """Return whether an op forwards its input, as it is or in steps."""
    return op.type in _FORWARDS or op.type in op_types.FAKE_QUANT


def _is_bookkeeping(dtype: str) -> bool:
    """Return whether values of a type are sizes, indices or lists, and no data."""
    return dtype.startswith(_BOOKKEEPING)


def _is_product(op: Operation) -> bool:
    """Return whether an op is a product that a kernel computes whole."""
    return op.type in _EVERY_PRODUCT


def _is_written_out(op: Operation) -> bool:
    """Return whether files can hold an op as several."""
    return op.type in _WRITTEN_OUT


def _is_one_of(kind: str, op: Operation) -> bool:
    """Return whether a type of the file is one of several that an op is written as."""
    return kind in _WRITTEN_OUT.get(op.type, ())


def _is_called(kind: str, op: Operation) -> bool:
    """Return whether an op of a file is called as one of a graph is."""
    own = op.type.replace("_", "").lower()
    theirs = kind.removeprefix(FLEX).replace("_", "").lower()
    return own == theirs or own.rstrip("0123456789").removesuffix("v") == theirs


def _computes(kind: str, op: Operation) -> bool:
    """Return whether an op of a file can compute one of a graph."""
    if op.type in op_types.PLACEHOLDERS:
        return False
    if kind in CONVERSIONS:
        return is_step(op) or op.type in _CLIPS
    if _is_one_of(kind, op):
        return True
    if kind in _PRODUCTS:
        return op.type in _PRODUCTS[kind]
    in_formula = kind in _FORMULAS and op.type in _IN_FORMULAS
    return op.type in _CALLED.get(kind, ()) or _is_called(kind, op) or in_formula


_FARTHEST = 64
"""How many ops are looked at for one of the file: what a kernel takes in is few."""
# So few ops of one type and one input are compared, so that a walk stays linear.
_ALIKE = 8
Value = tuple[int, int]
"""An op by its place, and which of its outputs."""


class _DataFlow:
    """The data of a graph, from its inputs; results of parameters alone are none.

    Attributes:
        ops: the ops.
        places: the places of the ops by their names.
        order: the places in topological order.
        fed: for each op whether it makes data.
        reads: for each op the data that it reads.
        readers: for each op those that read it.
        twins: the ops that compute again what another does, and that one: converters
            make one of them. Who reads a twin is taken to read the other.
        twin_counts: how many twins an op has.

    Args:
        ops: the ops of the graph.
        inputs: those of them that are its inputs.
    """

    def __init__(self, ops: Sequence[Operation], inputs: Sequence[Operation]) -> None:
        """Find the readers and the twins of ops in one walk."""
        self.ops = list(ops)
        self.places = {op.name: place for place, op in enumerate(self.ops)}
        self.order = [self.places[op.name] for op in topological_sort(self.ops)]
        self.fed = [False] * len(self.ops)
        for op in inputs:
            self.fed[self.places[op.name]] = True
        self.reads: list[list[Value]] = [[] for _ in self.ops]
        self.readers: list[list[int]] = [[] for _ in self.ops]
        self.twins: dict[int, int] = {}
        self._alike: dict[tuple[str, ...], list[int]] = {}
        self._forwarded: dict[Value, Tensor] = {}
        self._base = list(range(len(self.ops)))
        for place in self.order:
            self._note(place)
        self.twin_counts = Counter(self.twins.values())
        self._read_times = [
            sum(not self.tells_sizes(p) for p in readers) for readers in self.readers
        ]

    def _note(self, place: int) -> None:
        """Record the reads of an op, once those of the ops before it are known."""
        op = self.ops[place]
        read = [
            self._forwarded.get((self.places.get(t.op.name, -1), t.value_index), t)
            for t in op.inputs
        ]
        names = (op.type, *(t.name for t in read))
        if op.type == "IdentityN":
            # Each of its results is one of what it reads, and no other.
            self._forwarded.update(((place, i), t) for i, t in enumerate(read))
            del read[1:]
        if op.type in _MOVES:
            # Sizes that the data has make no data of a constant.
            read = read if self._is_fed(read[0]) else []
        read = [t for t in read if self._is_fed(t)]
        data = [t for t in read if not _is_bookkeeping(t.dtype.name)] or read
        self.fed[place] = self.fed[place] or bool(data)
        self.reads[place] = [(self.places[t.op.name], t.value_index) for t in data]
        if data and self._is_twin(place, names):
            return
        for source in dict.fromkeys(p for p, _ in self.reads[place]):
            self.readers[source].append(place)
        if is_step(op) and data:
            self._base[place] = self._base[self.reads[place][0][0]]

    def _is_twin(self, place: int, names: tuple[str, ...]) -> bool:
        """Record an op that repeats an earlier one; return whether it does."""
        op, alike = self.ops[place], self._alike.setdefault(names, [])
        for other in alike if not op.op_def.is_stateful else ():
            ours = self.ops[other]
            if dict(ours.node_def.attr) == dict(op.node_def.attr):
                self.twins[place] = other
                self._base[place] = self._base[other]
                self._forwarded.update(
                    ((place, i), t) for i, t in enumerate(ours.outputs)
                )
                return True
        # Of more than a few that differ no twin is looked for.
        if len(alike) < _ALIKE:
            alike.append(place)
        return False

    def _is_fed(self, tensor: Tensor) -> bool:
        place = self.places.get(tensor.op.name)
        return place is not None and self.fed[place]

    def base(self, place: int) -> int:
        """Return the op whose result an op gives, in steps or as it is."""
        return self._base[place]

    def reads_one(self, place: int) -> bool:
        """Return whether an op reads the data of one op, and of parameters else."""
        return len({source for source, _ in self.reads[place]}) == 1

    def tells_sizes(self, place: int) -> bool:
        """Return whether an op makes nothing but sizes, indices or lists."""
        return all(_is_bookkeeping(t.dtype.name) for t in self.ops[place].outputs)

    def is_read_besides(self, source: int, place: int) -> bool:
        """Return whether others than one op read another, for more than its shape."""
        return self._read_times[source] > int(not self.tells_sizes(place))

    def is_taken_through(self, place: int) -> bool:
        """Return whether a kernel of a file, behind or before an op, can take it in."""
        op = self.ops[place]
        taken = (_MOVES, _ARITHMETIC, _APPLIED)
        return op.type not in op_types.PLACEHOLDERS and (
            is_step(op)
            or (any(op.type in kinds for kinds in taken) and self.reads_one(place))
        )

    def consumers(self, place: int) -> list[int]:
        """Return the ops that read an op, as data or otherwise."""
        names = (op.name for t in self.ops[place].outputs for op in t.consumers())
        return [self.places[name] for name in names if name in self.places]

    def ahead_of(self, place: int) -> Iterator[int]:
        """Return an op, and those ahead of it through ops that kernels take in."""
        return islice(
            walk(
                [place],
                lambda p: (
                    [q for q, _ in self.reads[p]] if self.is_taken_through(p) else ()
                ),
            ),
            _FARTHEST,
        )


class _OpParts:
    """The parts of each op of a file."""

    def __init__(self, flow: _DataFlow, file: LiteGraph) -> None:
        self.nodes: dict[int, list[int]] = {}
        self.ops: dict[int, list[int]] = {}
        self._flow = flow
        self._file = file
        self._makers = {t: at for at, op in enumerate(file.ops) for t in op.outputs}
        self._behind: dict[int, list[int]] = {}
        self._moved: dict[int, int] = {}
        self._applying: set[int] = set()

    def add(self, at: int, place: int) -> None:
        """Make an op of the graph a part of one of the file."""
        nodes = self.nodes.setdefault(place, [])
        if at not in nodes:
            nodes.append(at)
            self.ops.setdefault(at, []).append(place)
        if self._flow.ops[place].type in _APPLIED:
            self._applying.add(at)

    def are_between(self, place: int) -> bool:
        """Return whether an op of the file computes an op, more than moving values."""
        nodes = self.nodes.get(place, ())
        return not is_step(self._flow.ops[place]) and any(
            self._file.ops[at].kind not in _MOVERS for at in nodes
        )

    def complete(self) -> None:
        """Add the ops that each op of the file takes in."""
        self._add_behind(alone=True)
        self._add_before()
        self._add_behind(alone=False)
        for twin, first in self._flow.twins.items():
            nodes = self.nodes.get(first, [])
            if len(nodes) > 1 and self.ops[nodes[-1]][0] == first:
                # The file has the twin as well.
                at = nodes.pop()
                self.nodes[twin], self.ops[at][0] = [at], twin
            else:
                for at in nodes:
                    self.add(at, twin)

    def _open(self) -> list[int]:
        flow = self._flow
        left = (p for p in flow.order if p not in self.nodes and flow.fed[p])
        return [place for place in left if place not in flow.twins]

    def _add_behind(self, *, alone: bool) -> None:
        """Add ops that forward a result, or that it holds, to the op that makes it."""
        flow = self._flow
        for place in self._open():
            step = is_step(flow.ops[place])
            computes = not (step or flow.tells_sizes(place))
            for source, _ in flow.reads[place]:
                if alone and computes and flow.is_read_besides(source, place):
                    continue
                at, moved = next(iter(self.nodes.get(source, ())[-1:]), None), []
                while at is not None and not (step or self._holds(at, place, True)):
                    moved.append(at)
                    at = self._moved_by(at)
                if at is not None:
                    self.add(at, place)
                    if alone and computes:
                        self._behind.setdefault(at, []).append(place)
                        self._moved.update(dict.fromkeys(moved, at))
                    break

    def _moved_by(self, at: int) -> int | None:
        """Return the op of the file whose result another one only moves."""
        op = self._file.ops[at]
        makers = [self._makers[t] for t in op.reads if t in self._makers]
        known = op.kind in _MOVERS and bool(makers) and makers[0] in self.ops
        return makers[0] if known else None

    def _add_before(self) -> None:
        """Add the ops that an op of the file reads and can hold, the last first."""
        for place in reversed(self._open()):
            readers = {
                at for p in self._flow.consumers(place) for at in self.nodes.get(p, ())
            }
            holding = [at for at in sorted(readers) if self._holds(at, place, False)]
            if holding:
                self.add(holding[0], place)

    def _holds(self, at: int, place: int, behind: bool) -> bool:
        """Return whether an op of the file can compute one along with its others."""
        node, op = self._file.ops[at], self._flow.ops[place]
        if op.type in op_types.PLACEHOLDERS:
            return False
        if op.type in _LAYOUT or self._flow.tells_sizes(place):
            return True
        if node.kind in _FORMULAS:
            return op.type in _IN_FORMULAS
        if op.type in _ARITHMETIC:
            # An activation ends what weights and biases can be.
            ended = behind and at in self._applying
            takes = node.kind in _TAKES_CONSTANTS and not ended
            return takes and self._flow.reads_one(place)
        applied = node.options.get("fused_activation_function")
        return behind and (
            applied in _APPLIED.get(op.type, ())
            or (op.type in _CLIPS and _is_in_integers(node))
        )

    def result_of(self, at: int) -> int:
        """Return the op whose result an op of the file makes."""
        at = self._moved.get(at, at)
        ops, core = self._flow.ops, self.ops[at][0]
        behind = self._behind.get(at, [])
        last = [p for p in behind if ops[p].type not in _LAYOUT]
        if not last and not self.has_shape(self._file.ops[at], core):
            last = [p for p in behind if self.has_shape(self._file.ops[at], p)]
        return last[-1] if last else core

    def has_shape(self, op: LiteOp, place: int) -> bool:
        """Return whether the first results of two ops have shapes that can be one."""
        ours = self._flow.ops[place].outputs
        theirs = op.outputs[0].shape if op.outputs else None
        if not ours or ours[0].shape.rank is None or theirs is None:
            return True
        sizes = ours[0].shape.as_list()
        return len(sizes) == len(theirs) and not changed_sizes(sizes, theirs)


def _is_in_integers(node: LiteOp) -> bool:
    return any(t.quantization is not None for t in node.outputs)


@dataclass(frozen=True)
class Ends:
    """A graph, or the body of a function, and the names of its ends."""

    ops: Sequence[Operation]
    inputs: Mapping[str, Operation]
    outputs: Mapping[str, Operation]
    scopes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Matching:
    """Ops of a graph and of a file, by their places.

    Attributes:
        results: for each op of the file the op of the graph whose result it makes.
        named: for each op of the file, the ops of the graph that are part of it and
            that it is named after, that of its result first.
        placed: for each op of the file, those that are part of it and that it does not
            name.
        nodes: for each op that the data reaches, the ops of the file it is part of.
        constant: the ops that the data does not reach: the file holds what they give.
    """

    results: Mapping[int, int]
    named: Mapping[int, tuple[int, ...]]
    placed: Mapping[int, tuple[int, ...]]
    nodes: Mapping[int, tuple[int, ...]]
    constant: frozenset[int]

    def ops_of(self, node: int) -> tuple[int, ...]:
        """Return all ops that are part of one of the file."""
        return (*self.named.get(node, ()), *self.placed.get(node, ()))


def match(
    graph: Ends,
    file: LiteGraph,
    inputs: Mapping[str, LiteTensor],
    outputs: Mapping[str, LiteTensor],
) -> Matching:
    """Match the ops of a graph to those of a subgraph of a file."""
    return _Matcher(graph, file, inputs, outputs).result()


@dataclass(frozen=True)
class _Given:
    """The data that an op of a file reads, in terms of the graph."""

    values: tuple[frozenset[Value], ...]
    every: frozenset[Value]
    loose: bool


class _Matcher:
    """One matching as it is made."""

    def __init__(
        self,
        graph: Ends,
        file: LiteGraph,
        inputs: Mapping[str, LiteTensor],
        outputs: Mapping[str, LiteTensor],
    ) -> None:
        self._graph = graph
        self._file = file
        self._flow = _DataFlow(graph.ops, [*graph.inputs.values()])
        self._parts = _OpParts(self._flow, file)
        self._outputs = {t: name for name, t in outputs.items()}
        # Those in front are dropped once they are matched for good.
        self._waiting = [deque(readers) for readers in self._flow.readers]
        self._named: dict[int, Sequence[int]] = {}
        self._loose: set[LiteTensor] = set()
        places = self._flow.places
        named = {
            inputs[name]: (places[op.name], 0)
            for name, op in graph.inputs.items()
            if name in inputs
        }
        holders = [op for op in graph.ops if op.type in op_types.PLACEHOLDERS]
        others = {(places[op.name], 0) for op in holders} - {*named.values()}
        self._values: dict[LiteTensor, frozenset[Value]] = {
            t: frozenset([named[t]]) if t in named else _few(others)
            for t in file.inputs
        }

    def result(self) -> Matching:
        """Return the matching."""
        for at, op in enumerate(self._file.ops):
            self._match_op(at, op)
        self._parts.complete()
        rank = {place: i for i, place in enumerate(self._flow.order)}
        results = {at: self._parts.result_of(at) for at in self._parts.ops}
        named, placed = {}, {}
        for at, parts in self._parts.ops.items():
            own = [p for p in self._named[at] if p in {*parts}]
            first = [p for p in own if p == results[at]]
            named[at] = (*first, *(p for p in own if p != results[at]))
            placed[at] = tuple(sorted({*parts} - {*own}, key=rank.__getitem__))
        fed, nodes = self._flow.fed, self._parts.nodes
        return Matching(
            results,
            named,
            placed,
            {p: tuple(nodes.get(p, ())) for p in self._flow.order if fed[p]},
            frozenset(p for p in self._flow.order if not fed[p]),
        )

    def _match_op(self, at: int, op: LiteOp) -> None:
        """Match an op of the file to one of the graph, and note its results."""
        given, hints = self._given(op), self._hints(op)
        core = self._core(op, given, hints)
        self._named[at] = hints
        loose, others, own = given.loose, given.every, range(0)
        if core is None:
            loose = loose or op.kind not in CONVERSIONS
        else:
            self._parts.add(at, core)
            ours = self._flow.ops[core]
            if not is_step(ours):
                loose = op.kind in _FORMULAS
                own = range(len(ours.outputs))
                whole = not (loose or self._is_one_of_several(op, core))
                others = frozenset() if whole else _few(given.every)
        outputs = op.outputs
        # Results of constants alone are constants.
        for i, t in enumerate(outputs if given.every else ()):
            made = [i] if len(own) == len(outputs) else own
            self._values[t] = others | {(core, k) for k in made if core is not None}
            if loose:
                self._loose.add(t)

    def _given(self, op: LiteOp) -> _Given:
        data = [t for t in op.reads if t in self._values]
        real = [
            t
            for t in data
            if t.quantization is not None or not _is_bookkeeping(t.dtype)
        ]
        loose = op.kind in _FORMULAS or any(t in self._loose for t in data)
        every = frozenset(value for t in data for value in self._values[t])
        return _Given(tuple(self._values[t] for t in real or data), every, loose)

    def _hints(self, op: LiteOp) -> list[int]:
        """Return the ops that the results of an op of the file are named after."""
        found: dict[int, None] = {}
        for t in op.outputs:
            sources = sources_of(t.name)
            if t in self._outputs and (not sources or names_result(sources[0])):
                end = self._graph.outputs.get(self._outputs[t])
                ahead = self._flow.ahead_of(self._flow.places[end.name]) if end else ()
                # The graph may go on behind what was converted.
                if end and any(self._can_compute(op, p) for p in ahead):
                    found[self._flow.places[end.name]] = None
                continue
            places = (self._op_called(source) for source in sources)
            found.update((p, None) for p in places if p is not None)
        fed = [place for place in found if self._flow.fed[place]]
        if op.kind in CONVERSIONS:
            twins = self._flow.twins
            return [twins.get(place, place) for place in fed]
        return list(dict.fromkeys(map(self._flow.base, fed)))

    def _op_called(self, source: str) -> int | None:
        """Return the op that a name of the file stands for."""
        for scope in self._graph.scopes:
            if source.startswith(scope):
                place = called(source.removeprefix(scope), self._flow.places)
                if place is not None:
                    return place
        return None

    def _core(self, op: LiteOp, given: _Given, hints: Sequence[int]) -> int | None:
        """Return the op of the graph that an op of the file computes, if one is known.

        Those that the file names it after come first, then the nearest; an op that the
        file holds as several comes where it is named, or where nothing else is left.
        """
        named = [p for hint in hints for p in self._flow.ahead_of(hint)]
        found = self._first(op, named, given, hints)
        if found is None:
            parts = (p for p in hints if self._must_be_one_of(op, p, given))
            found = next(parts, None)
        if found is None and op.kind not in CONVERSIONS:
            found = self._first(op, self._behind(given), given, ())
        if found is None:
            left = (*sorted(place for place, _ in given.every), *named)
            ops = self._flow.ops
            found = next((p for p in left if _is_one_of(op.kind, ops[p])), None)
        return found

    def _first(
        self, op: LiteOp, places: Iterable[int], given: _Given, hints: Sequence[int]
    ) -> int | None:
        """Return the first op with the same input as one of the file."""
        other = None
        for place in places:
            if not (self._can_compute(op, place) and self._is_free(place)):
                continue
            # Of sizes, and of what goes into bodies, the converter computes so much
            # itself that names must do.
            told = place in hints and (op.subgraphs or self._flow.tells_sizes(place))
            if not (told or self._reads_all(place, given)):
                continue
            whole = _is_called(op.kind, self._flow.ops[place])
            partly = op.kind in _FORMULAS and not whole
            if self._parts.has_shape(op, place) and not partly:
                return place
            other = place if other is None else other
        return other

    def _can_compute(self, op: LiteOp, place: int) -> bool:
        fed = self._flow.fed[place]
        return fed and _computes(op.kind, self._flow.ops[place])

    def _is_free(self, place: int) -> bool:
        """Return whether no other op of the file computes one of the graph."""
        times = len(self._parts.nodes.get(place, ()))
        several = _is_written_out(self._flow.ops[place])
        return several or times <= self._flow.twin_counts[place]

    def _is_one_of_several(self, op: LiteOp, place: int) -> bool:
        """Return whether an op of the file is one of several that compute another."""
        several = _is_written_out(self._flow.ops[place])
        return several or not self._can_compute(op, place)

    def _must_be_one_of(self, op: LiteOp, place: int, given: _Given) -> bool:
        """Return whether an op is named after one that the file holds as several."""
        ours = self._flow.ops[place]
        made = place in self._parts.nodes and place in {p for p, _ in given.every}
        if made and (op.kind in _MOVERS or self._can_compute(op, place)):
            return True
        whole = _is_product(ours) or self._flow.is_taken_through(place)
        converts = op.kind in CONVERSIONS
        return not (whole or converts or self._can_compute(op, place))

    def _behind(self, given: _Given) -> Iterator[int]:
        """Yield readers of values, through ops that kernels take in, nearest first."""
        waiting = deque(sorted({place for place, _ in given.every}))
        seen = set(waiting)
        while waiting and len(seen) <= _FARTHEST:
            readers = self._waiting[waiting.popleft()]
            while readers and self._is_done(readers[0]):
                readers.popleft()
            for place in islice(readers, _FARTHEST):
                if place not in seen:
                    seen.add(place)
                    yield place
                    if given.loose or self._flow.is_taken_through(place):
                        waiting.append(place)

    def _is_done(self, place: int) -> bool:
        """Return whether no op of the file that is still to come can be for an op."""
        return not (self._is_free(place) or self._flow.is_taken_through(place))

    def _reads_all(self, place: int, given: _Given) -> bool:
        """Return whether an op reads exactly the given values."""
        flow, hit = self._flow, set[Value]()

        def behind(value: Value) -> Sequence[Value]:
            return () if value in given.every else flow.reads[value[0]]

        for count, value in enumerate(walk(flow.reads[place], behind)):
            source = value[0]
            if value in given.every:
                hit.add(value)
                continue
            taken = flow.is_taken_through(source) or given.loose
            stops = not flow.reads[source] or self._parts.are_between(source)
            if stops or not taken or count >= _FARTHEST:
                return False
        return all(hit & values for values in given.values)


def _few(values: set[Value] | frozenset[Value]) -> frozenset[Value]:
    """Return as many values as are looked at."""
    return frozenset(sorted(values)[:_FARTHEST])
