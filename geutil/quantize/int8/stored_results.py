"""Results of the quantized ops of a model, and the tensors of a file that hold them.

Two things must tell a tensor of the file: its name, which the converter gives it after
ops, and how its integers are stored, which is the range that the result is simulated
in. Where several could be meant, none is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import op_types
from geutil.graph.types import MutableIdentityMap, Operation, Tensor
from geutil.quantize.int8.running import file_names
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import (
    Network,
    forwarded_from,
    simulation_of,
)
from geutil.quantize.planning.plan import plan_quantization
from geutil.quantize.spec import QuantizeChoices, Range, nudged, step
from geutil.tflite.names import names_result, sources_of, spellings
from geutil.tflite.old_reading import LiteFile
from geutil.tflite.precision import is_float

Array = np.ndarray[Any, Any]

_BIASES = {
    "BATCH_MATMUL": 2,
    "CONV_2D": 2,
    "DEPTHWISE_CONV_2D": 2,
    "FULLY_CONNECTED": 2,
    "TRANSPOSE_CONV": 3,
}
"""Kernels of layers with weights, and which input is the bias."""
_RELUS = ("RELU", "RELU6")
_TAILS = ("ADD", "SUB", *_RELUS)
"""Ops of files that compute the end of a kernel of the model, if it is not fused."""
_ACTIVATIONS = int8_kernels.FUSED_ACTIVATIONS.keys()
_SAME_STEP = 1e-4
"""How far the steps of a file and of the simulation are apart at most, relatively."""


@dataclass(frozen=True, eq=False)
class StoredResult:
    """A tensor that quantization changes: what a quantized op makes.

    Attributes:
        op: the op whose kernel makes it.
        tensor: the tensor, before it is rounded.
        members: the ops that the kernel computes, the op among them.
        simulation: the FakeQuant op that rounds it; None if nothing does, as where only
            weights are rounded, or values are handed on.
        stored: the FakeQuant op in whose range it is stored; None if it is a float.
    """

    op: Operation
    tensor: Tensor
    members: tuple[Operation, ...]
    simulation: Operation | None
    stored: Operation | None

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names that the file may give it, those of other parts of the kernel apart."""
        name = self.tensor.op.name
        if self.simulation is None:
            return (name,)
        # `to_int8` calls a FakeQuant op of a scope of its own after the scope.
        rounded = self.simulation.name
        return (name, rounded, rounded.rpartition("/")[0])

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the file may give it."""
        return (*self.own_names, *(op.name for op in self.members))


def stored_results(model: Any) -> list[StoredResult]:
    """Return the results of the quantized ops of a model, in topological order.

    That is what FakeQuant ops round, what ops make of rounded weights, and what ops
    hand on in the range of what they read.

    Args:
        model: a quantized `geutil.model.Model`.

    Cost: linear in ops and edges.
    """
    results = list(model.outputs.values())
    network = Network(model.graph, results)
    plan = plan_quantization(model.graph, results, QuantizeChoices())
    members: dict[Operation, list[Operation]] = {}
    for op in network.ops:
        if op in plan.kernels:
            members.setdefault(plan.kernels[op], []).append(op)
    simulations: MutableIdentityMap[list[Operation]] = MutableIdentityMap()
    for op in network.ops:
        if op.type in FAKE_QUANT and network.is_data(op.inputs[0]):
            earlier = simulations.get(op.inputs[0], [])
            simulations[op.inputs[0]] = [*earlier, op]
    found: list[StoredResult] = []
    for op in network.ops:
        kernel = plan.kernels.get(op, op)
        parts = tuple(members.get(kernel, [op]))
        for tensor in op.outputs:
            if op.type in FAKE_QUANT or not network.is_data(tensor):
                continue
            for simulation in simulations.get(tensor, []):
                found.append(
                    StoredResult(kernel, tensor, parts, simulation, simulation)
                )
            if tensor in simulations:
                continue
            handed_on = _forwarded_range(tensor, network)
            rounded_weights = (
                op in plan.kernels
                and _leaves(tensor, parts, network)
                and any(_has_rounded_weights(part, network) for part in parts)
            )
            if handed_on is not None or rounded_weights:
                found.append(StoredResult(kernel, tensor, parts, None, handed_on))
    return found


def _forwarded_range(tensor: Tensor, network: Network) -> Operation | None:
    """Return the FakeQuant op whose values an op hands on; None for other ops."""
    op = tensor.op
    data = [t for t in op.inputs if network.is_data(t)]
    if op.type not in int8_kernels.PASSING or len(data) != 1:
        return None
    source = forwarded_from(tensor).op
    return source if source.type in FAKE_QUANT else None


def _leaves(tensor: Tensor, parts: Sequence[Operation], network: Network) -> bool:
    """Tell whether a tensor is what a kernel gives, and no step inside of it."""
    inside = set(parts)
    readers = [edge.op for edge in network.readers(tensor)]
    return tensor in network.results or any(op not in inside for op in readers)


def _has_rounded_weights(op: Operation, network: Network) -> bool:
    parameters = (t for t in op.inputs if network.is_parameter(t))
    return any(simulation_of(t) is not None for t in parameters)


def range_of_simulation(op: Operation, values: Mapping[Operation, Array]) -> Range:
    """Return the values that a FakeQuant op rounds to: the lowest and the highest.

    Args:
        op: the FakeQuant op.
        values: the ends of ranges, by the ops that they are read from.
    """
    return nudged(*_ends(op, values), *_form(op))


def step_of_simulation(op: Operation, values: Mapping[Operation, Array]) -> Array:
    """Return the distance of two values that a FakeQuant op rounds to."""
    return step(*_ends(op, values), *_form(op))


def _form(op: Operation) -> tuple[int, bool]:
    return int(op.get_attr("num_bits")), bool(op.get_attr("narrow_range"))


def _ends(op: Operation, values: Mapping[Operation, Array]) -> tuple[Any, Any]:
    if len(op.inputs) == 1:
        return op.get_attr("min"), op.get_attr("max")
    low, high = (values.get(t.op, tf.get_static_value(t)) for t in list(op.inputs)[1:])
    return low, high


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of a file that holds a result.

    Attributes:
        place: its place among the tensors of its subgraph.
        graph: the place of the subgraph.
        name: its name.
        step: the size of a step; 0.0 of floats.
        zero: the integer that stands for 0.
        limits: the smallest and the largest integer of its type.
    """

    place: int
    graph: int
    name: str
    step: float
    zero: int
    limits: tuple[int, int]


def file_tensors(
    model: Any,
    results: Sequence[StoredResult],
    file: LiteFile,
    values: Mapping[Operation, Array],
    constant: Callable[[int, int], Array],
) -> list[FileTensor | str]:
    """Return for each result the tensor of a file that holds it, or why none does.

    Args:
        model: the model.
        results: the results of its quantized ops.
        file: the file that was made from it, with one signature.
        values: the ends of ranges, by the ops that they are read from.
        constant: returns the values of a constant of the file, by its place and that of
            the subgraph.

    Cost: linear in results, and in tensors and ops of the file.
    """
    names = _Names(model, file, constant)
    named = [names.candidates(result) for result in results]
    chosen = [
        names.likeliest(
            result, [at for at in places if _fits(result, at, names, values)]
        )
        for result, places in zip(results, named, strict=True)
    ]
    # An Identity of a result may be in the same tensor: that is no other value.
    sources = [id(list(_same_values(result.tensor))[-1]) for result in results]
    claims = Counter(
        at
        for at, _ in {
            (at, source)
            for fits, source in zip(chosen, sources, strict=True)
            for at in fits
        }
    )
    return [
        _told(names, len(places), fits, claims)
        for places, fits in zip(named, chosen, strict=True)
    ]


class _Names:
    """The tensors that a file computes, by the names of the ops that they can be of."""

    def __init__(
        self, model: Any, file: LiteFile, constant: Callable[[int, int], Array]
    ) -> None:
        # Constants share the names of ops, so that only what ops make counts.
        self._constant = constant
        (signature,) = file.signatures
        self.place = signature.graph
        self.graph = file.graphs[signature.graph]
        self.makers = {at: op for op in self.graph.ops for at in op.outputs if at >= 0}
        self._by_name: dict[str, list[int]] = {}
        for at in dict.fromkeys((*self.graph.inputs, *self.makers)):
            sources = sources_of(self.graph.tensors[at].name)
            if sources and not names_result(sources[0]):
                for name in spellings(sources[0]):
                    self._by_name.setdefault(name, []).append(at)
        self._ends: MutableIdentityMap[int] = MutableIdentityMap()
        for tensors, places in (
            (model.inputs, signature.inputs),
            (model.outputs, signature.outputs),
        ):
            for name, file_name in file_names(list(tensors)).items():
                for tensor in _same_values(tensors[name]):
                    self._ends[tensor] = places[file_name]

    def candidates(self, result: StoredResult) -> list[int]:
        """Return the tensors that bear a name of a result, or are the same end."""
        end = self._ends.get(result.tensor)
        named = (at for name in result.names for at in self._by_name.get(name, ()))
        return list(dict.fromkeys((*(() if end is None else (end,)), *named)))

    def likeliest(self, result: StoredResult, fits: list[int]) -> list[int]:
        """Return which of the tensors of a result are most surely it."""
        end = self._ends.get(result.tensor)
        if end is not None and end in fits:
            return [end]
        if result.stored is None:
            # Of integers their steps tell how far a kernel goes.
            fits = [at for at in fits if self._is_whole(result, at)]
        fits = [at for at in fits if self._is_of_output(result.tensor, at)]
        fits = [at for at in fits if not self._is_other_activation(result, at)]
        own = {*result.own_names}
        exact = [at for at in fits if own & {*self._spelled(at)}] or fits
        return [at for at in exact if not self._is_reshaped(at, exact)]

    def _is_of_output(self, tensor: Tensor, at: int) -> bool:
        """Tell whether a tensor is that output of its op, where both have as many."""
        maker, count = self.makers.get(at), len(tensor.op.outputs)
        if maker is None or count == 1 or len(maker.outputs) != count:
            return True
        return maker.outputs.index(at) == tensor.value_index

    def _is_other_activation(self, result: StoredResult, at: int) -> bool:
        """Tell whether another activation makes a tensor: 'Relu6' may be a 'Relu'."""
        maker = self.makers.get(at)
        kinds = {op.type.upper() for op in result.members} & {"RELU", "RELU6"}
        return bool(kinds) and maker is not None and maker.type in {*_RELUS} - kinds

    def _is_reshaped(self, at: int, others: Sequence[int]) -> bool:
        """Tell whether a tensor is another one as it is."""
        maker = self.makers.get(at)
        return (
            maker is not None and maker.type == "RESHAPE" and maker.inputs[0] in others
        )

    def _is_whole(self, result: StoredResult, at: int) -> bool:
        """Tell whether the op that makes a tensor ends a kernel, and computes no more.

        A layer may have taken in a bias that the kernel has not, or left one out.
        """
        maker = self.makers.get(at)
        if maker is None or maker.type not in (*_BIASES, *_TAILS):
            return False
        kinds = {op.type for op in result.members}
        fused = maker.options.get("fusedActivationFunction", "NONE") != "NONE"
        if (fused or maker.type in _RELUS) != bool(kinds & _ACTIVATIONS):
            return False
        adds = bool(kinds & op_types.SHIFTS)
        if maker.type in _TAILS:
            return adds or maker.type in _RELUS
        slot = _BIASES[maker.type]
        bias = maker.inputs[slot] if slot < len(maker.inputs) else -1
        if adds or bias < 0:
            return adds == (bias >= 0)
        return not np.any(self._constant(bias, self.place))

    def _spelled(self, at: int) -> Iterator[str]:
        return spellings(sources_of(self.graph.tensors[at].name)[0])


def _same_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and those that it is in steps or as it is."""
    yield tensor
    while tensor.op.type in ("Identity", *FAKE_QUANT):
        tensor = tensor.op.inputs[0]
        yield tensor


def _fits(
    result: StoredResult, at: int, names: _Names, values: Mapping[Operation, Array]
) -> bool:
    """Tell whether a tensor has the shape and the steps of a result."""
    tensor = names.graph.tensors[at]
    shape = result.tensor.shape
    if shape.rank is None or tensor.shape is None:
        return False
    if shape.rank is not None:
        sizes = list(zip(shape.as_list(), tensor.shape, strict=False))
        if shape.rank != len(tensor.shape) or any(
            a != b for a, b in sizes if a is not None and b is not None
        ):
            return False
    if result.stored is None:
        return is_float(tensor.dtype)
    steps = tensor.quantization
    if steps is None or len(steps.scales) != 1:
        return False
    wanted = step_of_simulation(result.stored, values)
    if wanted.ndim:
        return False
    return abs(steps.scales[0] / float(wanted) - 1.0) < _SAME_STEP


def _told(
    names: _Names, named: int, fits: Sequence[int], claims: Mapping[int, int]
) -> FileTensor | str:
    """Return the tensor that is a result, if it is one alone; else what is wrong."""
    if not named:
        return "no tensor of the file is named after it"
    if not fits:
        return f"none of {named} tensor(s) of its name has its range and shape"
    if len(fits) > 1:
        return f"{len(fits)} tensors of the file can be it"
    (place,) = fits
    tensor = names.graph.tensors[place]
    if claims[place] > 1:
        return f"'{tensor.name}' of the file can be another op's"
    if tensor.quantization is None:
        return FileTensor(place, names.place, tensor.name, 0.0, 0, (0, 0))
    (scale,), (zero,) = tensor.quantization.scales, tensor.quantization.zero_points
    limits = np.iinfo(tensor.dtype)
    ends = int(limits.min), int(limits.max)
    return FileTensor(place, names.place, tensor.name, float(scale), int(zero), ends)
