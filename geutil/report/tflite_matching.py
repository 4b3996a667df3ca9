"""Ops of a TFLite file matched to those of the graph that it was converted from.

The converter names the tensors of the file after the ops of the graph: an op that it
made of several is named after several. What is named nowhere is looked for by its
place: an op between those of one op of the file is part of it, if such an op can hold
it: a bias, an activation that the op is said to apply, a scaling of its weights, a
change of layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from geutil.graph import op_types
from geutil.graph.adjacency import topological_sort
from geutil.graph.tflite_names import names_result, sources_of, spellings
from geutil.graph.tflite_reading import FLEX
from geutil.graph.types import Operation
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.report.tflite_nodes import FileNode, FileSubject

_FORWARDS = frozenset(
    ("Identity", "IdentityN", "PreventGradient", "Snapshot", "StopGradient")
)
"""Ops that give what they read; FakeQuant ops do so in steps."""
_LAYOUT = frozenset(
    (
        "BatchToSpaceND",
        "Cast",
        "ConcatV2",
        "ExpandDims",
        "MirrorPad",
        "Pack",
        "Pad",
        "PadV2",
        "Reshape",
        "SpaceToBatchND",
        "Squeeze",
        "StridedSlice",
        "TensorListStack",
        "Transpose",
    )
)
"""Ops that move values, which a kernel may read otherwise instead."""
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
_FORMULAS = frozenset(
    (
        "ELU",
        "GELU",
        "HARD_SWISH",
        "L2_NORMALIZATION",
        "LEAKY_RELU",
        "LOG_SOFTMAX",
        "PRELU",
        "SOFTMAX",
        "STABLEHLO_COMPOSITE",
    )
)
"""Ops of files that each stand for a formula of several ops."""
_IN_FORMULAS = (
    op_types.SHIFTS
    | op_types.SCALINGS
    | {
        "Abs",
        "Erf",
        "Exp",
        "Log",
        "Max",
        "Maximum",
        "Mean",
        "Minimum",
        "Neg",
        "Pow",
        "Relu",
        "Relu6",
        "Rsqrt",
        "Sigmoid",
        "Sqrt",
        "Square",
        "Sum",
        "Tanh",
    }
)
"""Ops that such formulas are made of."""
_CALLED = {
    "AvgPool": "AVERAGE_POOL_2D",
    "BiasAdd": "ADD",
    "ConcatV2": "CONCATENATION",
    "MaxPool": "MAX_POOL_2D",
    "RealDiv": "DIV",
    "Sigmoid": "LOGISTIC",
    "StatelessIf": "IF",
    "StatelessWhile": "WHILE",
}
"""Ops that files call otherwise."""
_MULTIPLIES = {
    "BATCH_MATMUL": ("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum"),
    "CONV_2D": ("Conv2D", "DepthwiseConv2dNative"),
    "CONV_3D": ("Conv3D",),
    "DEPTHWISE_CONV_2D": ("DepthwiseConv2dNative", "Conv2D"),
    "FULLY_CONNECTED": ("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum", "Conv2D"),
    "TRANSPOSE_CONV": ("Conv2DBackpropInput",),
}
"""Products that each kernel can compute: one, whatever else it takes in."""
_TAKES_CONSTANTS = frozenset((*_MULTIPLIES, "ADD", "DIV", "MUL", "SUB"))
"""Kernels with constants that others can be multiplied with, or added to."""
_BOOKKEEPING = ("bool", "int", "uint", "variant")
"""Types of sizes, indices and lists, which the converter computes or does without."""


@dataclass(frozen=True)
class Ends:
    """A graph, or the body of a function, and what its ends are called.

    Attributes:
        ops: its ops.
        inputs: the ops of its inputs by name.
        outputs: the ops that make its outputs by name.
        scopes: what the file puts before the names of its ops, the likeliest first.
    """

    ops: Sequence[Operation]
    inputs: Mapping[str, Operation]
    outputs: Mapping[str, Operation]
    scopes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Matching:
    """Ops of a graph and nodes of a file, by their places.

    Attributes:
        named: for each node, the ops that it is named after, that of its result first.
        placed: for each node, the ops that are part of it by their place alone.
        nodes: for each op that the data reaches, the nodes that it is part of.
        constant: the ops that the data does not reach: the file holds what they give.
    """

    named: Mapping[int, tuple[int, ...]]
    placed: Mapping[int, tuple[int, ...]]
    nodes: Mapping[int, tuple[int, ...]]
    constant: frozenset[int]

    def ops_of(self, node: int) -> tuple[int, ...]:
        """Return all ops that are part of a node."""
        return (*self.named.get(node, ()), *self.placed.get(node, ()))


def match(graph: Ends, subject: FileSubject) -> Matching:
    """Match the ops of a graph to the nodes of a subgraph of a file.

    Args:
        graph: the graph.
        subject: the subgraph.

    Cost: linear in ops and edges.
    """
    return _Matcher(graph, subject).result()


def is_step(op: Operation) -> bool:
    """Tell whether an op gives what it reads, as it is or in steps."""
    return op.type in _FORWARDS or op.type in FAKE_QUANT


class _Matcher:
    """One matching as it is made."""

    def __init__(self, graph: Ends, subject: FileSubject) -> None:
        self._graph = graph
        self._nodes = subject.nodes
        self._subject = subject
        self._ops = list(graph.ops)
        self._places = {op.name: place for place, op in enumerate(self._ops)}
        self._order = [self._places[op.name] for op in topological_sort(self._ops)]
        self._fed = self._reached()
        self._named: dict[int, list[int]] = {}
        self._placed: dict[int, list[int]] = {}
        self._node_of: dict[int, list[int]] = {}

    def result(self) -> Matching:
        """Return the matching: by name first, then by place."""
        for at, node in enumerate(self._nodes):
            if node.op is not None:
                for place in self._named_after(at, node):
                    self._add(self._named, at, place)
        self._match_ends()
        self._match_unnamed()
        self._place_behind()
        self._place_before()
        self._place_behind()
        fed = self._fed
        return Matching(
            {at: tuple(ops) for at, ops in self._named.items()},
            {at: tuple(ops) for at, ops in self._placed.items()},
            {
                place: tuple(self._node_of.get(place, ()))
                for place in self._order
                if fed[place]
            },
            frozenset(place for place in self._order if not fed[place]),
        )

    def _add(self, into: dict[int, list[int]], at: int, place: int) -> None:
        if at not in self._node_of.setdefault(place, []):
            self._node_of[place].append(at)
            into.setdefault(at, []).append(place)

    def _reached(self) -> list[bool]:
        """Return for each op whether the data reaches it, and not parameters alone."""
        fed = [False] * len(self._ops)
        for op in self._graph.inputs.values():
            fed[self._places[op.name]] = True
        for place in self._order:
            fed[place] = fed[place] or any(fed[p] for p in self._producers(place))
        return fed

    def _producers(self, place: int) -> list[int]:
        names = (t.op.name for t in self._ops[place].inputs)
        return [self._places[name] for name in names if name in self._places]

    def _consumers(self, place: int) -> list[int]:
        readers = (op.name for t in self._ops[place].outputs for op in t.consumers())
        return [self._places[name] for name in readers if name in self._places]

    def _named_after(self, at: int, node: FileNode) -> list[int]:
        """Return the ops that the first result of a node is named after."""
        tensor = (
            self._subject.graph.tensors[node.tensors[0]].name if node.tensors else ""
        )
        sources = sources_of(tensor)
        if sources and names_result(sources[0]):
            outputs = self._subject.outputs
            wanted = [name for name, t in outputs.items() if t in node.tensors]
            ops = [self._graph.outputs[n] for n in wanted if n in self._graph.outputs]
            ends = [self._behind(self._places[op.name]) for op in ops]
            # The graph may go on behind what was converted.
            return [place for place in ends if self._can_be(node, place)]
        found = (self._op_called(source) for source in sources)
        return [self._behind(p) for p in found if p is not None and self._fed[p]]

    def _op_called(self, source: str) -> int | None:
        """Return the op that a name of the file stands for."""
        for scope in self._graph.scopes:
            if not source.startswith(scope):
                continue
            for name in spellings(source.removeprefix(scope)):
                if name in self._places:
                    return self._places[name]
                # `to_int8` calls a FakeQuant op of a scope of its own after the scope.
                for own in FAKE_QUANT:
                    if f"{name}/{own}" in self._places:
                        return self._places[f"{name}/{own}"]
        return None

    def _behind(self, place: int) -> int:
        """Return the op whose result an op gives, in steps or as it is."""
        while self._is_forward(place):
            place = self._producers(place)[0]
        return place

    def _is_forward(self, place: int) -> bool:
        op = self._ops[place]
        producers = self._producers(place) if is_step(op) else []
        return bool(producers) and self._fed[producers[0]]

    def _match_ends(self) -> None:
        """Match inputs by their names."""
        names = {text.partition(" ")[2]: at for at, text in self._subject.ends.items()}
        for name, op in self._graph.inputs.items():
            at = names.get(name)
            if at is not None and self._nodes[at].op is None:
                self._add(self._named, at, self._places[op.name])

    def _match_unnamed(self) -> None:
        """Match nodes without names by their type, where what they read is matched."""
        for at, node in enumerate(self._nodes):
            if node.op is None or at in self._named:
                continue
            sources = [p for r in node.inputs for p in self._named.get(r.place, ())]
            for place in self._readers(sources):
                if place not in self._node_of and _is_called(self._ops[place], node):
                    self._add(self._placed, at, place)
                    break

    def _readers(self, places: list[int]) -> Iterator[int]:
        """Yield what reads ops, through ops that give what they read or add a bias."""
        waiting, seen = list(places), set(places)
        while waiting:
            for place in self._consumers(waiting.pop()):
                if place not in seen:
                    seen.add(place)
                    yield place
                    op = self._ops[place]
                    if is_step(op) or op.type in _ARITHMETIC or op.type in _APPLIED:
                        waiting.append(place)

    def _place_behind(self) -> None:
        """Place what forwards a result, or is held by it, with what it forwards."""
        for place in self._order:
            if place in self._node_of or not self._fed[place]:
                continue
            producers = [p for p in self._producers(place) if self._fed[p]]
            at = self._node_of.get(producers[0], [None])[-1] if producers else None
            if at is not None and (self._is_forward(place) or self._holds(at, place)):
                self._add(self._placed, at, place)

    def _place_before(self) -> None:
        """Place what a node reads and can hold with the node, the last ops first."""
        for place in reversed(self._order):
            if place in self._node_of or not self._fed[place]:
                continue
            readers = {
                at for p in self._consumers(place) for at in self._node_of.get(p, ())
            }
            holding = [at for at in sorted(readers) if self._holds(at, place)]
            if holding:
                self._add(self._placed, holding[0], place)

    def _can_be(self, node: FileNode, place: int) -> bool:
        """Tell whether the result of an op can be that of a node."""
        op = self._ops[place]
        return (
            _is_called(op, node)
            or op.type in _LAYOUT
            or self._is_taken_in(node, place)
            or op.type in _APPLIED
            or op.type in _MULTIPLIES.get(node.type, ())
        )

    def _is_taken_in(self, node: FileNode, place: int) -> bool:
        """Tell whether an op is arithmetic that the constants of a node can hold."""
        op = self._ops[place]
        if node.type in _FORMULAS:
            return op.type in _IN_FORMULAS
        if op.type not in _ARITHMETIC or node.type not in _TAKES_CONSTANTS:
            return False
        # Only one of the two may be data: the other is in weights or biases.
        return not all(self._fed[p] for p in self._producers(place))

    def _holds(self, at: int, place: int) -> bool:
        """Tell whether a node can compute an op along with those it is matched to."""
        node, op = self._nodes[at], self._ops[place]
        members = (*self._named.get(at, ()), *self._placed.get(at, ()))
        if node.op is None or not members or op.type in op_types.PLACEHOLDERS:
            return False
        dtypes = [t.dtype.name for t in op.outputs]
        if op.type in _LAYOUT or all(name.startswith(_BOOKKEEPING) for name in dtypes):
            return True
        products = _MULTIPLIES.get(node.type, ())
        if op.type in products:
            return all(self._ops[p].type not in products for p in members)
        applied = node.attributes.get("fusedActivationFunction")
        return self._is_taken_in(node, place) or (
            applied is not None and applied in _APPLIED.get(op.type, ())
        )


def _is_called(op: Operation, node: FileNode) -> bool:
    """Tell whether an op of a file is called as one of a graph is."""
    own = _CALLED.get(op.type, op.type).replace("_", "").lower()
    kind = node.type.removeprefix(FLEX).replace("_", "").lower()
    return own == kind or own.rstrip("0123456789").removesuffix("v") == kind
