"""Addends with steps so large that TFLite's ADD ends the process.

A mask adds -1e9, say, to the logits that shall have no share in a softmax, and the sum
ends at the low end of its range. What an addend says beyond that end, less the other
addend, makes no difference. TFLite (TensorFlow 2.21) aborts in ADD, and in SUB, where
the steps of an input are 2^19 times those of the result, and overflows in MUL where the
product of two steps is about as far from that of the result. So such ranges are cut off
where no result tells. Files that would still end the process are not run; see
`running`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.graph import adjacency, op_types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.spec import step, with_zero
from geutil.tflite.schema import words

Array = np.ndarray[Any, Any]

_SUMS = op_types.ADDITIONS | {"Sub"}
_FAR = 2.0**16
"""Steps of an input that are so many times those of the result are cut off."""
_MOVES = frozenset(
    words(
        "BroadcastTo ExpandDims Identity Reshape Slice Squeeze StridedSlice Tile "
        "Transpose"
    )
)
"""Ops that move the values of their first input, or repeat them."""


@dataclass(eq=False)
class _Site:
    """A FakeQuant op with one range for all channels."""

    op: Operation
    low: float
    high: float
    step: float

    @classmethod
    def of(cls, op: Operation, constants: Mapping[Operation, Array]) -> _Site | None:
        """Return the site of an op; None if it is no FakeQuant of known range."""
        ends = _ends(op)
        if len(ends) != 2 or any(end not in constants for end in ends):
            return None
        low, high = (constants[end] for end in ends)
        if np.ndim(low):
            return None
        low, high = with_zero(low, high)
        bits, narrow = op.get_attr("num_bits"), op.get_attr("narrow_range")
        width = float(step(low, high, int(bits), bool(narrow)))
        return cls(op, float(low), float(high), width) if width > 0 else None


def cut_off(
    graph: Graph, constants: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return other ends for ranges of addends that reach too far."""
    changed_ends: dict[Operation, Array] = {}
    value_by_end = dict(constants)
    ops = adjacency.topological_sort(graph.get_operations())
    # Several FakeQuant ops may share a range; it changes for all of them.
    ops_by_ends: dict[tuple[Operation, ...], list[Operation]] = {}
    for op in ops:
        if _Site.of(op, value_by_end) is not None:
            ops_by_ends.setdefault(_ends(op), []).append(op)
    # What a sum is added to is cut off before the sum's own addends.
    for op in reversed(ops):
        sharing_ops = ops_by_ends.get(_ends(op), ())
        if sharing_ops and sharing_ops[0] is op:
            ends = _shortened(sharing_ops, value_by_end)
            changed_ends |= ends
            value_by_end |= ends
    return changed_ends


def _ends(op: Operation) -> tuple[Operation, ...]:
    """Return the ops that a FakeQuant op reads its range from."""
    return tuple(t.op for t in op.inputs[1:]) if op.type in FAKE_QUANT else ()


def _shortened(
    together: Sequence[Operation], value_by_end: Mapping[Operation, Array]
) -> dict[Operation, Array]:
    """Return the ends of a range that all of its readers allow to be cut off."""
    site = _Site.of(together[0], value_by_end)
    if site is None:
        return {}
    same, reaches = frozenset(together), []
    for reader, index in _readers(together):
        if reader in same:
            continue
        tell = _reach_of_factor if reader.type == "Mul" else _reach_of_addend
        reach = tell(site, reader, index, value_by_end)
        if reach is None:
            return {}
        reaches.append(reach)
    if not reaches:
        return {}
    low = max(site.low, min(low for low, _ in reaches))
    high = min(site.high, max(high for _, high in reaches))
    if site.op.get_attr("narrow_range"):
        high = max(high, -low)
        low = -high
    if (low, high) == (site.low, site.high):
        return {}
    values = (np.float32(low), np.float32(high))
    return dict(zip(_ends(site.op), map(np.asarray, values), strict=True))


def _reach_of_addend(
    site: _Site, op: Operation, index: int, value_by_end: Mapping[Operation, Array]
) -> tuple[float, float] | None:
    """Return between which values an addend makes a difference."""
    if op.type not in _SUMS or len(op.inputs) != 2:
        return None
    other = _Site.of(_source(op.inputs[1 - index]), value_by_end)
    results = list(_sites(_readers([op]), value_by_end))
    if other is None or not results or None in results:
        return None
    sums = [site for site in results if site is not None]
    if site.step < _FAR * min(each.step for each in sums):
        return None
    low, high = min(s.low for s in sums), max(s.high for s in sums)
    if op.type != "Sub":
        return low - other.high, high - other.low
    if index == 0:
        return low + other.low, high + other.high
    return other.low - high, other.high - low


def _reach_of_factor(
    site: _Site, op: Operation, index: int, value_by_end: Mapping[Operation, Array]
) -> tuple[float, float] | None:
    """Return between which values a factor of what was cut off makes a difference.

    The other factor begins at 0; its first step already reaches the end of the product.
    """
    other = _Site.of(_source(op.inputs[1 - index]), value_by_end)
    results = list(_sites(_readers([op]), value_by_end))
    if other is None or other.low < 0 or len(results) != 1 or results[0] is None:
        return None
    product = results[0]
    if site.step * other.step < _FAR * product.step:
        return None
    return product.low / other.step, product.high / other.step


def _sites(
    readers: Iterable[tuple[Operation, int]], value_by_end: Mapping[Operation, Array]
) -> Iterator[_Site | None]:
    return (_Site.of(reader, value_by_end) for reader, _ in readers)


def _readers(ops: Sequence[Operation]) -> list[tuple[Operation, int]]:
    """Return the ops that read the results of some, seen through moves."""
    readers = []
    waiting = list(ops)
    visited = set(ops)
    for op in waiting:
        for tensor in op.outputs:
            for reader in dict.fromkeys(tensor.consumers()):
                moves = reader.type in _MOVES and reader.inputs[0] is tensor
                if moves and reader.outputs[0].consumers():
                    if reader not in visited:
                        visited.add(reader)
                        waiting.append(reader)
                elif reader.type not in op_types.VALUE_BLIND:
                    inputs = enumerate(reader.inputs)
                    readers += [(reader, place) for place, t in inputs if t is tensor]
    return readers


def _source(tensor: Tensor) -> Operation:
    """Return the op that makes the values of a tensor, seen through moves."""
    while tensor.op.type in _MOVES:
        tensor = tensor.op.inputs[0]
    return tensor.op
