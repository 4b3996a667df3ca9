"""Activations that frameworks write out as several ops, and TFLite runs as one.

They are told by what they compute: a group of elementwise ops with one tensor going in
and one coming out is run on numbers, and compared with the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.graph.identity import IdentitySet, MutableIdentityMap
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import SCALINGS
from geutil.select.networks.origins import scalar_value

Array = np.ndarray[Any, Any]

_erf = np.vectorize(math.erf)
_GRID = np.linspace(-8.0, 8.0, 401)
_MOST_OPS = 16
_NEAR = 1e-4
"""The tanh form of gelu is told from the erf form; float32 constants are not exact."""

_UNARY: dict[str, Callable[[Array], Array]] = {
    "Erf": _erf,
    "Erfc": lambda x: 1.0 - _erf(x),
    "Identity": lambda x: x,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0.0),
    "Relu6": lambda x: np.clip(x, 0.0, 6.0),
    "Square": np.square,
    "Tanh": np.tanh,
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Pow": np.power,
    "RealDiv": np.divide,
    "Sub": np.subtract,
}


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], ...]] = {
    "hard_swish": (lambda x: x * np.clip(x + 3, 0, 6) / 6,),
    "gelu": (lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))), _gelu_tanh),
}
_VALUES = {
    name: [function(_GRID) for function in functions]
    for name, functions in _FUNCTIONS.items()
}
# Without one of these no group is looked at.
_HINTS = frozenset(("Relu6", "Relu", "Erf", "Erfc", "Tanh", "Minimum", "Maximum"))


@dataclass(frozen=True, eq=False)
class Composite:
    """An activation that is written out.

    Attributes:
        name: the activation.
        source: the tensor that goes in.
        ops: its ops, the last one first.
    """

    name: str
    source: Tensor
    ops: tuple[Operation, ...]

    @property
    def end(self) -> Operation:
        """The op whose result is the activation's."""
        return self.ops[0]


def find_composites(
    ops: Iterable[Operation], readers: Callable[[Tensor], list[Operation]]
) -> list[Composite]:
    """Return the activations that are written out, in the order of their last ops.

    Args:
        ops: the ops to look at, in topological order.
        readers: who reads a tensor.

    Cost: linear in ops and edges.
    """
    place = {op: index for index, op in enumerate(ops)}
    found = (
        _ending_in(op, place, readers)
        for op in place
        if op.type in SCALINGS and op.inputs
    )
    return [composite for composite in found if composite is not None]


def _ending_in(
    end: Operation,
    place: Mapping[Operation, int],
    readers: Callable[[Tensor], list[Operation]],
) -> Composite | None:
    """Grow a group backwards from its end until one tensor alone goes in."""
    group: list[Operation] = []
    frontier: IdentitySet = IdentitySet(end.outputs)
    while len(group) < _MOST_OPS:
        (*_, latest) = sorted(frontier, key=lambda t: place.get(t.op, -1))
        op = latest.op
        if op not in place or not _is_elementwise(op):
            return None
        group.append(op)
        entering = [t for t in op.inputs if scalar_value(t) is None]
        rest = (t for t in frontier if t is not latest)
        frontier = IdentitySet((*rest, *entering))
        if not frontier:
            return None
        if len(frontier) == 1 and any(op.type in _HINTS for op in group):
            (source,) = frontier
            name = _name(group, source)
            if name and _closed(group, readers):
                return Composite(name, source, tuple(group))
    return None


def _is_elementwise(op: Operation) -> bool:
    return op.type in _UNARY or op.type in _BINARY


def _closed(
    group: list[Operation], readers: Callable[[Tensor], list[Operation]]
) -> bool:
    """Tell whether only the last op is read from outside."""
    members = frozenset(group)
    inner = group[1:]
    return all(r in members for op in inner for r in readers(op.outputs[0]))


def _name(group: list[Operation], source: Tensor) -> str:
    """Return the activation that a group computes, or ""."""
    values: MutableIdentityMap[Array] = MutableIdentityMap([(source, _GRID)])
    with np.errstate(all="ignore"):
        for op in reversed(group):
            operands = [_operand(t, values) for t in op.inputs]
            function: Any = _UNARY.get(op.type) or _BINARY[op.type]
            values[op.outputs[0]] = function(*operands)
    result = values[group[0].outputs[0]]
    for name, wanted in _VALUES.items():
        if any(np.allclose(result, w, rtol=0, atol=_NEAR) for w in wanted):
            return name
    return ""


def _operand(tensor: Tensor, values: Mapping[Any, Array]) -> Array:
    return (
        values[tensor] if tensor in values else np.asarray(scalar_value(tensor), float)
    )
