"""Ops of TFLite files and the ops of graphs that each can compute, by their types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from geutil.graph import op_types
from geutil.graph.adjacency import topological_sort
from geutil.graph.op_types import PLACEHOLDERS
from geutil.graph.types import Operation, Tensor
from geutil.graph.walks import walk
from geutil.tflite.parts import FLEX
from geutil.tflite.schema import words

_FORWARDS = frozenset(
    ("Identity", "IdentityN", "PreventGradient", "Snapshot", "StopGradient")
)
"""Ops that give what they read; FakeQuant ops do so in steps."""
MOVES = words(
    "BatchToSpaceND Cast ExpandDims MirrorPad Pad PadV2 Reshape SpaceToBatchND "
    "Squeeze StridedSlice TensorListStack Transpose"
)
"""Ops that move values, which a kernel may read otherwise instead."""
LAYOUT = MOVES | {"ConcatV2", "Pack"}
"""The same with those that move the values of several tensors."""
ARITHMETIC = op_types.SHIFTS | op_types.SCALINGS | op_types.FUSED_NORMS
"""Ops that kernels take into weights and biases, where they read a constant."""
APPLIED = {
    "Relu": ("RELU",),
    "Relu6": ("RELU6",),
    "Tanh": ("TANH",),
    "Minimum": ("RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"),
    "Maximum": ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"),
}
"""Activations as options of kernels."""
CLIPS = frozenset(APPLIED) - {"Tanh"}
"""Those that the range of integers can be."""
FORMULAS = words(
    "ELU GELU HARD_SWISH L2_NORMALIZATION LEAKY_RELU LOG_SOFTMAX PRELU SOFTMAX "
    "STABLEHLO_COMPOSITE"
)
"""Ops of files that each stand for a formula of several ops."""
IN_FORMULAS = words(
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
TAKES_CONSTANTS = frozenset((*_PRODUCTS, "ADD", "DIV", "MUL", "SUB"))
"""Kernels with constants that others can be multiplied with, or added to."""


def _rows(text: str) -> list[list[str]]:
    return [row.split() for row in text.split(",")]


_CALLED = {
    kind: tuple(types)
    for kind, *types in _rows(
        """
        ADD BiasAdd Sub, ADD_N AddN, AVERAGE_POOL_2D AvgPool Mean,
        CONCATENATION ConcatV2, DIV RealDiv, GATHER GatherV2 ResourceGather,
        IF StatelessIf, LOGISTIC Sigmoid, MAXIMUM Relu, MAX_POOL_2D MaxPool,
        MINIMUM Relu6, MUL Neg RealDiv, REDUCE_ALL All, REDUCE_ANY Any, REDUCE_MAX Max,
        REDUCE_MIN Min, REDUCE_PROD Prod, RELU Maximum, RELU6 Minimum Maximum,
        RELU_0_TO_1 Minimum Maximum, RELU_N1_TO_1 Minimum Maximum,
        RESHAPE ExpandDims Squeeze StridedSlice Transpose, SELECT SelectV2,
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
MOVERS = ("RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE")
"""Ops of files that move values, from before which others can come behind."""
CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")
_BOOKKEEPING = ("bool", "int", "uint", "variant", "resource")
"""Types of sizes, indices and lists, which the converter computes or does without."""


def is_step(op: Operation) -> bool:
    """Tell whether an op forwards its input, as it is or in steps."""
    return op.type in _FORWARDS or op.type in op_types.FAKE_QUANT


def is_bookkeeping(dtype: str) -> bool:
    """Tell whether values of a type are sizes, indices or lists, and no data."""
    return dtype.startswith(_BOOKKEEPING)


def is_product(op: Operation) -> bool:
    """Tell whether an op is a product that a kernel computes whole."""
    return op.type in _EVERY_PRODUCT


def is_written_out(op: Operation) -> bool:
    """Tell whether files can hold an op as several."""
    return op.type in _WRITTEN_OUT


def is_one_of(kind: str, op: Operation) -> bool:
    """Tell whether a type of the file is one of several that an op is written as."""
    return kind in _WRITTEN_OUT.get(op.type, ())


def is_called(kind: str, op: Operation) -> bool:
    """Tell whether an op of a file is called as one of a graph is."""
    own = op.type.replace("_", "").lower()
    theirs = kind.removeprefix(FLEX).replace("_", "").lower()
    return own == theirs or own.rstrip("0123456789").removesuffix("v") == theirs


def can_compute(kind: str, op: Operation) -> bool:
    """Tell whether an op of a file can compute one of a graph."""
    if op.type in op_types.PLACEHOLDERS:
        return False
    if kind in CONVERSIONS:
        return is_step(op) or op.type in CLIPS
    if is_one_of(kind, op):
        return True
    if kind in _PRODUCTS:
        return op.type in _PRODUCTS[kind]
    in_formula = kind in FORMULAS and op.type in IN_FORMULAS
    return op.type in _CALLED.get(kind, ()) or is_called(kind, op) or in_formula


FARTHEST = 64
"""How many ops are looked at for one of the file: what a kernel takes in is few."""
# So few ops of one type and one input are compared, so that a walk stays linear.
_ALIKE = 8
Value = tuple[int, int]
"""An op by its place, and which of its outputs."""


class DataFlow:
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
        """Note the reads of an op, once those of the ops before it are known."""
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
        if op.type in MOVES:
            # Sizes that the data has make no data of a constant.
            read = read if self._is_fed(read[0]) else []
        read = [t for t in read if self._is_fed(t)]
        data = [t for t in read if not is_bookkeeping(t.dtype.name)] or read
        self.fed[place] = self.fed[place] or bool(data)
        self.reads[place] = [(self.places[t.op.name], t.value_index) for t in data]
        if data and self._is_twin(place, names):
            return
        for source in dict.fromkeys(p for p, _ in self.reads[place]):
            self.readers[source].append(place)
        if is_step(op) and data:
            self._base[place] = self._base[self.reads[place][0][0]]

    def _is_twin(self, place: int, names: tuple[str, ...]) -> bool:
        """Note an op that repeats an earlier one, and tell if it does."""
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
        """Tell whether an op reads the data of one op, and of parameters else."""
        return len({source for source, _ in self.reads[place]}) == 1

    def tells_sizes(self, place: int) -> bool:
        """Tell whether an op makes nothing but sizes, indices or lists."""
        return all(is_bookkeeping(t.dtype.name) for t in self.ops[place].outputs)

    def is_read_besides(self, source: int, place: int) -> bool:
        """Tell whether others than one op read another, for more than its shape."""
        return self._read_times[source] > int(not self.tells_sizes(place))

    def is_taken_through(self, place: int) -> bool:
        """Tell whether a kernel of a file, behind or before an op, can take it in."""
        op = self.ops[place]
        taken = (MOVES, ARITHMETIC, APPLIED)
        return op.type not in PLACEHOLDERS and (
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
            FARTHEST,
        )
