"""Values that TFLite's converter stores wrong, and what to give it instead.

With TensorFlow 2.21 the converter goes wrong with these:

- The zero point of a range such as (-1, 1), where it is in the middle between two
  integers. FakeQuant ops round it in float32, the converter in float64, and they may
  end up at different ones. A range that was nudged as FakeQuant ops do has none such.
- A bias with the same value in all channels is stored with the scale of the first one,
  and comes out wrong in all others. A last channel that is larger by a float32 rounding
  error keeps the converter from that.
- A bias is stored as an integer of 32 bits, in steps of the input's step times the
  weights' step. For weights that are all zero, or nearly, the steps are so small that
  it overflows. Larger steps of the weights store them as well, since the bias outweighs
  them by far.
- A bias of zeros is dropped, and with it what a transposed convolution takes an
  activation in by: both compute in float. A bias that rounds to zero is kept.
- A sum with zeros, or a product with ones, is dropped, and the FakeQuant ops before and
  behind it meet: the ranges of two tensors are one's then, which may contradict that of
  a concat. With a number that is next to zero, or to one, it is kept.
- Layers that read the same data, and whose weights have the same values, become one. If
  what they make is to be stored in two ranges, that one computes in float. Weights of
  which one's range is wider by a float32 rounding error are not the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.op_types import BIAS_ADDITIONS, SCALINGS, SHIFTS
from geutil.quantize.arithmetic import Range, nudged, step
from geutil.quantize.copying import values_of
from geutil.quantize.finding.kernels import FAKE_QUANT, PASSING
from geutil.select.networks.layers import Layer, layer_of
from geutil.select.networks.origins import Origins

Array = np.ndarray[Any, Any]
Values = dict[Operation, Array]

_MOST_STEPS = 2.0**30
"""Of 32 bits, half of what is above zero."""
_NEXT_TO_ZERO = 1e-30
_TINY = 1e-12
_ROUNDING = 2.0**-20


@dataclass(frozen=True, eq=False)
class _Bias:
    tensor: Tensor
    layer: Layer


def mended(graph: Graph, constants: Mapping[Operation, Array]) -> Values:
    """Return other values for ops whose own values the converter stores wrong.

    Args:
        graph: a FuncGraph that is quantized.
        constants: the values of ranges and variables, by the ops that read them.

    Cost: linear in ops and edges; one run of what biases depend on.
    """
    found = _nudged_ranges(graph, constants)
    biases = list(_biases(graph))
    values = values_of([bias.tensor for bias in biases], constants.get)
    for bias, value in zip(biases, values, strict=True):
        if bias.layer.transposed and not value.any():
            found[bias.tensor.op] = np.full_like(value, _NEXT_TO_ZERO)
        elif _is_uniform(value):
            found[bias.tensor.op] = _not_uniform(value)
        _widen(bias.layer, value, constants, found)
    _told_apart(graph, constants, found)
    _kept(graph, constants, found)
    found |= _divisors_of_one(graph, constants)
    return found


def nudge(node: Any, op: Operation) -> None:
    """Nudge the fixed range of a FakeQuant op in the node of its copy."""
    if op.type == "FakeQuantWithMinMaxArgs":
        low, high = (op.get_attr(name) for name in ("min", "max"))
        ends = _nudged(op, low, high)
        node.attr["min"].f, node.attr["max"].f = (float(end) for end in ends)


def _nudged_ranges(graph: Graph, constants: Mapping[Operation, Array]) -> Values:
    found: Values = {}
    for op in graph.get_operations():
        ends = [t.op for t in op.inputs][1:] if op.type in FAKE_QUANT else []
        # Symmetric ranges have their zero point at an integer.
        if len(ends) != 2 or op.get_attr("narrow_range"):
            continue
        if all(end in constants for end in ends):
            nudged_ends = _nudged(op, *(constants[end] for end in ends))
            found.update(zip(ends, map(np.asarray, nudged_ends), strict=True))
    return found


def _nudged(op: Operation, low: Any, high: Any) -> Range:
    return nudged(low, high, op.get_attr("num_bits"), op.get_attr("narrow_range"))


def _biases(graph: Graph) -> Iterator[_Bias]:
    origins = Origins(graph)
    for op in graph.get_operations():
        if op.type not in BIAS_ADDITIONS or len(op.inputs) != 2:
            continue
        first, second = op.inputs
        for bias, data in ((second, first), (first, second)):
            if not origins.is_parameter(bias) or len(bias.op.outputs) != 1:
                continue
            layer = layer_of(_source(data).op, origins)
            if layer is not None:
                yield _Bias(bias, layer)


def _told_apart(
    graph: Graph, constants: Mapping[Operation, Array], found: Values
) -> None:
    """Widen ranges of weights by a rounding error where layers would become one."""
    by_data: MutableIdentityMap[list[Operation]] = MutableIdentityMap()
    origins = Origins(graph)
    for op in graph.get_operations():
        layer = layer_of(op, origins)
        simulation = None if layer is None else _source(layer.kernel).op
        if layer is None or simulation is None or simulation.type not in FAKE_QUANT:
            continue
        data = op.inputs[layer.data]
        same = by_data[data] = by_data.get(data, [])
        if simulation not in same:
            same.append(simulation)
    for simulations in by_data.values():
        if len(simulations) > 1:
            _widen_equal(simulations, constants, found)


def _widen_equal(
    simulations: Sequence[Operation],
    constants: Mapping[Operation, Array],
    found: Values,
) -> None:
    values = values_of([op.inputs[0] for op in simulations], constants.get)
    for index, op in enumerate(simulations):
        ends = [t.op for t in op.inputs][1:]
        count = sum(np.array_equal(values[index], v) for v in values[:index])
        if count and all(end in constants for end in ends):
            for end in ends:
                wider = np.float32(1 + count * _ROUNDING)
                found[end] = np.asarray(found.get(end, constants[end]) * wider)


def _kept(graph: Graph, constants: Mapping[Operation, Array], found: Values) -> None:
    """Change parameters of sums and products that would be dropped."""
    simulations = list(_simulated_operands(graph, constants))
    held = [op.inputs[0] for op, _ in simulations]
    values = values_of(held, lambda op: found.get(op, constants.get(op)))
    for (op, neutral), value in zip(simulations, values, strict=True):
        if not value.size or not np.all(value == neutral):
            continue
        low, high = (t.op for t in list(op.inputs)[1:])
        if neutral:
            for end in (low, high):
                wider = found.get(end, constants[end]) * np.float32(1 + _ROUNDING)
                found[end] = np.asarray(wider)
        else:
            found[op.inputs[0].op] = np.full_like(value, _TINY)
            found[low], found[high] = (
                np.full_like(constants[low], end) for end in (-_TINY, _TINY)
            )


def _divisors_of_one(graph: Graph, constants: Mapping[Operation, Array]) -> Values:
    """Return other values for divisors, which are not simulated, that are all one."""
    origins = Origins(graph)
    divisors = [op.inputs[1] for op in graph.get_operations() if op.type == "RealDiv"]
    read = [t for t in divisors if origins.is_parameter(t) and len(t.op.outputs) == 1]
    values = values_of(read, constants.get)
    return {
        t.op: np.asarray(value * np.float32(1 + _ROUNDING))
        for t, value in zip(read, values, strict=True)
        if value.dtype == np.float32 and value.size and np.all(value == 1)
    }


def _simulated_operands(
    graph: Graph, constants: Mapping[Operation, Array]
) -> Iterator[tuple[Operation, int]]:
    """Yield what quantizes parameters of sums and products, and the neutral number."""
    origins = Origins(graph)
    seen: set[Operation] = set()
    for op in graph.get_operations():
        if op.type not in SHIFTS | SCALINGS:
            continue
        for t in op.inputs:
            simulation = _source(t).op
            if simulation in seen or simulation.type != "FakeQuantWithMinMaxVars":
                continue
            ends = [end.op for end in list(simulation.inputs)[1:]]
            known = all(end in constants for end in ends)
            if known and origins.is_parameter(simulation.inputs[0]):
                seen.add(simulation)
                yield simulation, int(op.type in SCALINGS)


def _source(tensor: Tensor) -> Tensor:
    """Return where values come from that other ops only hand on."""
    while tensor.op.type in PASSING:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_uniform(bias: Array) -> bool:
    return bias.size > 1 and bias.flat[0] != 0 and bool(np.all(bias == bias.flat[0]))


def _not_uniform(bias: Array) -> Array:
    changed = bias.copy()
    changed.flat[-1] = np.nextafter(bias.flat[-1], np.inf, dtype=bias.dtype)
    return changed


def _widen(
    layer: Layer, bias: Array, constants: Mapping[Operation, Array], found: Values
) -> None:
    """Widen the range of weights for a bias that would overflow."""
    simulation = _source(layer.kernel).op
    data = _step(_source(layer.op.inputs[layer.data]).op, constants)
    if data is None or simulation.type not in FAKE_QUANT:
        return
    ends = [t.op for t in simulation.inputs][1:]
    if not ends or any(end not in constants for end in ends):
        return
    low, high = (found.get(end, constants[end]) for end in ends)
    magnitude = np.abs(bias.reshape(-1)) if bias.size == low.size else np.abs(bias)
    least = (magnitude if low.ndim else magnitude.max()) / (data * _MOST_STEPS)
    least = np.broadcast_to(least, low.shape) if low.ndim else least
    half = least * (2 ** (simulation.get_attr("num_bits") - 1) - 1)
    too_small = _width(simulation, low, high) < least
    if np.any(too_small):
        found[ends[0]] = np.where(too_small, -half, low).astype(np.float32)
        found[ends[1]] = np.where(too_small, half, high).astype(np.float32)


def _step(simulation: Operation, constants: Mapping[Operation, Array]) -> Any:
    """Return the step of what a FakeQuant op makes; None if it is not known."""
    if simulation.type == "FakeQuantWithMinMaxArgs":
        low, high = simulation.get_attr("min"), simulation.get_attr("max")
    elif simulation.type == "FakeQuantWithMinMaxVars":
        ends = [t.op for t in simulation.inputs][1:]
        if any(end not in constants for end in ends):
            return None
        low, high = (constants[end] for end in ends)
    else:
        return None
    width = _width(simulation, low, high)
    return width if width > 0 else None


def _width(simulation: Operation, low: Any, high: Any) -> Array:
    bits, narrow = (simulation.get_attr(name) for name in ("num_bits", "narrow_range"))
    return step(low, high, int(bits), bool(narrow))
