"""The order of the ops of a TFLite file, in which interpreters run them.

A flatbuffer lists the places of a subgraph's ops. A file in another order is the same
file with these places permuted: weights, their alignment, signatures and metadata stay
where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from geutil.tflite.old_files import op_kind
from geutil.tflite.run import is_tflite, schema

_OPERATORS = 10
"""The place of the ops in the schema's table of a subgraph."""
_PLACE = np.dtype("<u4")

_STATEFUL = frozenset(
    {
        "ASSIGN_VARIABLE",
        "CALL_ONCE",
        "CUSTOM",
        "DELEGATE",
        "HASHTABLE",
        "HASHTABLE_FIND",
        "HASHTABLE_IMPORT",
        "HASHTABLE_SIZE",
        "MULTINOMIAL",
        "RANDOM_STANDARD_NORMAL",
        "RANDOM_UNIFORM",
        "READ_VARIABLE",
        "STABLEHLO_RNG_BIT_GENERATOR",
    }
)
_CALLS = frozenset(
    {
        "CALL",
        "IF",
        "STABLEHLO_CASE",
        "STABLEHLO_COMPOSITE",
        "STABLEHLO_CUSTOM_CALL",
        "STABLEHLO_REDUCE",
        "STABLEHLO_REDUCE_WINDOW",
        "STABLEHLO_SCATTER",
        "STABLEHLO_SORT",
        "STABLEHLO_WHILE",
        "WHILE",
    }
)
_OUTSIDE = ("RESOURCE", "STRING", "VARIANT")
_FIXED_BY_METADATA = {
    "model_control_dependencies": "its metadata ties ops by their places",
    "OfflineMemoryAllocation": "its metadata holds an arena that was planned offline",
}


@dataclass(frozen=True)
class FileSubgraph:
    """A subgraph of a TFLite file: its ops and what they read and make.

    Attributes:
        index: its place in the file.
        name: its name.
        kinds: the types of the ops, in order, such as "CONV_2D".
        reads: for each op, the tensors that it reads, without inputs left out.
        writes: for each op, the tensors that it makes.
        inputs: the tensors that the subgraph gets.
        outputs: those that it returns.
        names: of the tensors.
        constants: the tensors whose values are in the file.
        variables: the tensors that keep their values from run to run.
        outside: the tensors that are never in the arena: strings and resources.
        stateful: the ops that change or read a state, which keep their order.
    """

    index: int
    name: str
    kinds: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    constants: frozenset[int]
    variables: frozenset[int]
    outside: frozenset[int]
    stateful: tuple[int, ...]

    @property
    def calls(self) -> tuple[int, ...]:
        """The ops that call other subgraphs."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind in _CALLS)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs (earlier, later) of ops that must keep their order.

        The later one reads what the earlier one makes, or both are stateful.
        """
        maker = {t: i for i, made in enumerate(self.writes) for t in made}
        pairs = {
            (maker[t], i): None
            for i, read in enumerate(self.reads)
            for t in read
            if t in maker
        }
        chain = zip(self.stateful, self.stateful[1:], strict=False)
        return [*pairs, *(pair for pair in chain if pair not in pairs)]


def file_subgraphs(blob: bytes) -> list[FileSubgraph]:
    """Return the subgraphs of a TFLite file.

    Raises:
        ValueError: it is no TFLite file.

    Cost: linear in ops and tensors; some 10 us for each.
    """
    model = _model(blob)
    codes = [
        op_kind(model.OperatorCodes(i)) for i in range(model.OperatorCodesLength())
    ]
    filled = [_is_filled(model.Buffers(i)) for i in range(model.BuffersLength())]
    graphs = [
        _subgraph(index, model.Subgraphs(index), codes, filled)
        for index in range(model.SubgraphsLength())
    ]
    return [_with_stateful_calls(graph, graphs) for graph in graphs]


def fixed_order_reason(blob: bytes) -> str | None:
    """Return why the ops of a file must stay where they are; None if they may move.

    Raises:
        ValueError: it is no TFLite file.
    """
    model = _model(blob)
    for i in range(model.MetadataLength()):
        name = (model.Metadata(i).Name() or b"").decode()
        if name in _FIXED_BY_METADATA:
            return _FIXED_BY_METADATA[name]
    return None


def with_op_order(blob: bytes, orders: Mapping[int, Sequence[int]]) -> bytes:
    """Return a file whose ops run in another order.

    Args:
        blob: the file.
        orders: for subgraphs by their places, the ops by their present places.

    Raises:
        ValueError: it is no TFLite file; an order leaves out an op, or runs one before
            another whose result or state it needs.

    Cost: a copy of the file, and linear in its ops.
    """
    changed = np.frombuffer(blob, np.uint8).copy()
    model = _model(blob)
    graphs = file_subgraphs(blob)
    for index, order in orders.items():
        _check(graphs[index], order)
        table = model.Subgraphs(index)._tab
        field = table.Offset(_OPERATORS)
        if not field:
            continue
        start = table.Vector(field)
        places = changed[start : start + _PLACE.itemsize * len(order)].view(_PLACE)
        # Each place counts from where it stands.
        stands = np.arange(len(order), dtype=np.int64) * _PLACE.itemsize
        targets = places.astype(np.int64) + stands
        places[:] = targets[np.asarray(order, np.int64)] - stands
    return changed.tobytes()


def _check(graph: FileSubgraph, order: Sequence[int]) -> None:
    if sorted(order) != list(range(len(graph.kinds))):
        raise ValueError(
            f"the order of subgraph {graph.index} has to hold each of its "
            f"{len(graph.kinds)} ops once"
        )
    step = {i: place for place, i in enumerate(order)}
    for earlier, later in graph.edges:
        if step[earlier] > step[later]:
            raise ValueError(
                f"op {later} ({graph.kinds[later]}) of subgraph {graph.index} cannot "
                f"run before op {earlier} ({graph.kinds[earlier]}), whose result or "
                "state it needs"
            )


def _model(blob: bytes) -> Any:
    if not is_tflite(blob):
        raise ValueError("these bytes are no TFLite file")
    return schema().Model.GetRootAs(blob, 0)


def _is_filled(buffer: Any) -> bool:
    # Files above 2 GB hold the values behind the flatbuffer.
    return buffer.DataLength() > 0 or buffer.Offset() > 1


def _subgraph(
    index: int, graph: Any, codes: Sequence[str], filled: Sequence[bool]
) -> FileSubgraph:
    ops = [graph.Operators(i) for i in range(graph.OperatorsLength())]
    tensors = [graph.Tensors(i) for i in range(graph.TensorsLength())]
    kinds = tuple(codes[op.OpcodeIndex()] for op in ops)
    reads = tuple(_places(op.InputsAsNumpy(), op.InputsLength()) for op in ops)
    variables = frozenset(i for i, t in enumerate(tensors) if t.IsVariable())
    outside = {getattr(schema().TensorType, name) for name in _OUTSIDE}
    builtin = schema().BuiltinOperator
    return FileSubgraph(
        index=index,
        name=(graph.Name() or b"").decode(),
        kinds=kinds,
        reads=reads,
        writes=tuple(_places(op.OutputsAsNumpy(), op.OutputsLength()) for op in ops),
        inputs=_places(graph.InputsAsNumpy(), graph.InputsLength()),
        outputs=_places(graph.OutputsAsNumpy(), graph.OutputsLength()),
        names=tuple((t.Name() or b"").decode() for t in tensors),
        constants=frozenset(i for i, t in enumerate(tensors) if filled[t.Buffer()]),
        variables=variables,
        outside=frozenset(i for i, t in enumerate(tensors) if t.Type() in outside),
        stateful=tuple(
            i
            for i, kind in enumerate(kinds)
            if kind in _STATEFUL
            # Custom ops are called by their own names.
            or not hasattr(builtin, kind)
            or variables.intersection(reads[i])
        ),
    )


def _with_stateful_calls(
    graph: FileSubgraph, graphs: Sequence[FileSubgraph]
) -> FileSubgraph:
    """Count calls as stateful, too, if any subgraph that may be called is."""
    if not any(other.stateful for other in graphs[1:]):
        return graph
    stateful = {*graph.stateful, *graph.calls}
    return replace(graph, stateful=tuple(sorted(stateful)))


def _places(values: Any, count: int) -> tuple[int, ...]:
    # Without any the schema gives 0 in place of an array.
    return tuple(int(v) for v in values if v >= 0) if count else ()
