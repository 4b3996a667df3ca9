"""Results of the quantized ops of a model, and the tensors of a file that hold them.

Two things identify a tensor of the file: its name, which the converter derives from
ops, and how its integers are stored, which must be the range that the result is
simulated in. If several tensors match, none is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geutil.graph import op_types
from geutil.graph.types import MutableIdentityMap, Operation, Tensor
from geutil.quantize.calibration.ranges import format_of_simulation, simulated_ends
from geutil.quantize.joined_inputs import same_values
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import Network, forwarded_from, simulation_of
from geutil.quantize.planning.plan import plan_quantization
from geutil.quantize.spec import QuantizeChoices, Range, nudged, step
from geutil.tflite import LiteFile, LiteTensor
from geutil.tflite.op_names import file_names, names_result, sources_of, spellings
from geutil.tflite.parts import Array
from geutil.tflite.precision import is_float
from geutil.tflite.scales import BIASED

_RELUS = ("RELU", "RELU6")
_TAILS = ("ADD", "SUB", *_RELUS)
"""Ops of files that compute the end of a kernel of the model, if it is not fused."""
_ACTIVATIONS = int8_kernels.FUSED_ACTIVATIONS.keys()
_SAME_STEP = 1e-4
"""How far the steps of a file and of the simulation are apart at most, relatively."""


@dataclass(frozen=True, eq=False)
class StoredResult:
    """A tensor that quantization changes: the result of a quantized op.

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
                and any(
                    simulation_of(t) is not None
                    for part in parts
                    for t in part.inputs
                    if network.is_parameter(t)
                )
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
    """Tell whether a tensor is the result of a kernel, and no step inside of it."""
    inside = set(parts)
    readers = [edge.op for edge in network.readers(tensor)]
    return tensor in network.results or any(op not in inside for op in readers)


def range_of_simulation(op: Operation, values: Mapping[Operation, Array]) -> Range:
    """Return the values that a FakeQuant op rounds to: the lowest and the highest."""
    form = format_of_simulation(op)
    return nudged(*simulated_ends(op, values), form.bits, form.narrow_range)


def step_of_simulation(op: Operation, values: Mapping[Operation, Array]) -> Array:
    """Return the distance of two values that a FakeQuant op rounds to."""
    form = format_of_simulation(op)
    return step(*simulated_ends(op, values), form.bits, form.narrow_range)


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of a file that holds a result."""

    tensor: LiteTensor
    step: float
    zero: int
    limits: tuple[int, int]


def file_tensors(
    model: Any,
    results: Sequence[StoredResult],
    file: LiteFile,
    values: Mapping[Operation, Array],
) -> list[FileTensor | str]:
    """Return for each result the tensor of a file that holds it, or why none does."""
    names = _Names(model, file)
    named = [names.candidates(result) for result in results]
    chosen = [
        names.likeliest(result, [t for t in tensors if _fits(result, t, values)])
        for result, tensors in zip(results, named, strict=True)
    ]
    # An Identity of a result may be in the same tensor: that is no other value.
    sources = [id(list(same_values(result.tensor))[-1]) for result in results]
    claims = Counter(
        tensor
        for tensor, _ in {
            (tensor, source)
            for fits, source in zip(chosen, sources, strict=True)
            for tensor in fits
        }
    )
    return [
        _told(len(tensors), fits, claims)
        for tensors, fits in zip(named, chosen, strict=True)
    ]


class _Names:
    """The tensors that a file computes, by the names of the ops that they can be of."""

    def __init__(self, model: Any, file: LiteFile) -> None:
        # Constants share the names of ops, so that only what ops make counts.
        (signature,) = file.signatures.values()
        graph = signature.graph
        self._by_name: dict[str, list[LiteTensor]] = {}
        made = (tensor for op in graph.ops for tensor in op.outputs)
        for tensor in dict.fromkeys((*graph.inputs, *made)):
            sources = sources_of(tensor.name)
            if sources and not names_result(sources[0]):
                for name in spellings(sources[0]):
                    self._by_name.setdefault(name, []).append(tensor)
        self._ends: MutableIdentityMap[LiteTensor] = MutableIdentityMap()
        for tensors, ends in (
            (model.inputs, signature.inputs),
            (model.outputs, signature.outputs),
        ):
            for name, file_name in file_names(list(tensors)).items():
                for tensor in same_values(tensors[name]):
                    self._ends[tensor] = ends[file_name]

    def candidates(self, result: StoredResult) -> list[LiteTensor]:
        """Return the tensors that bear a name of a result, or are the same end."""
        end = self._ends.get(result.tensor)
        named = (t for name in result.names for t in self._by_name.get(name, ()))
        return list(dict.fromkeys((*(() if end is None else (end,)), *named)))

    def likeliest(
        self, result: StoredResult, fits: list[LiteTensor]
    ) -> list[LiteTensor]:
        """Return which of the tensors of a result are most surely it."""
        end = self._ends.get(result.tensor)
        if end is not None and end in fits:
            return [end]
        if result.stored is None:
            # Of integers their steps tell how far a kernel goes.
            fits = [t for t in fits if _is_whole(result, t)]
        fits = [t for t in fits if _is_of_output(result.tensor, t)]
        # Another activation makes a tensor: 'Relu6' may be a 'Relu'.
        kinds = {op.type.upper() for op in result.members} & {*_RELUS}
        others = {*_RELUS} - kinds if kinds else set()
        fits = [t for t in fits if t.producer is None or t.producer.kind not in others]
        own = {*result.own_names}
        exact = [t for t in fits if own & {*spellings(sources_of(t.name)[0])}] or fits
        # Not those that are another one as it is.
        return [
            t
            for t in exact
            if (maker := t.producer) is None
            or maker.kind != "RESHAPE"
            or maker.inputs[0] not in exact
        ]


def _is_of_output(tensor: Tensor, found: LiteTensor) -> bool:
    """Tell whether a tensor is that output of its op, where both have as many."""
    maker, count = found.producer, len(tensor.op.outputs)
    if maker is None or count == 1 or len(maker.outputs) != count:
        return True
    return maker.outputs.index(found) == tensor.value_index


def _is_whole(result: StoredResult, tensor: LiteTensor) -> bool:
    """Tell whether the op that makes a tensor ends a kernel, and computes no more."""
    maker = tensor.producer
    if maker is None or maker.kind not in (*BIASED, "BATCH_MATMUL", *_TAILS):
        return False
    kinds = {op.type for op in result.members}
    fused = maker.options.get("fused_activation_function", "NONE") != "NONE"
    # A kernel that ends on the other side of the activation holds other values.
    if (fused or maker.kind in _RELUS) != bool(kinds & _ACTIVATIONS):
        return False
    adds = bool(kinds & op_types.SHIFTS)
    if maker.kind in _TAILS:
        return adds or maker.kind in _RELUS
    *_, slot = BIASED.get(maker.kind, (-1,))
    bias = maker.inputs[slot] if 0 <= slot < len(maker.inputs) else None
    if adds or bias is None:
        return adds == (bias is not None)
    # The converter gives zeros to layers that have no bias.
    return bias.value is not None and not np.any(bias.value)


def _fits(
    result: StoredResult, tensor: LiteTensor, values: Mapping[Operation, Array]
) -> bool:
    """Tell whether a tensor has the shape and the steps of a result."""
    shape = result.tensor.shape
    if shape.rank is None or tensor.shape is None or shape.rank != len(tensor.shape):
        return False
    sizes = zip(shape.as_list(), tensor.shape, strict=True)
    if any(a != b for a, b in sizes if a is not None and b is not None):
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
    named: int, fits: Sequence[LiteTensor], claims: Mapping[LiteTensor, int]
) -> FileTensor | str:
    """Return the tensor that is a result, if it is one alone; else what is wrong."""
    if not named:
        return "no tensor of the file is named after it"
    if not fits:
        return f"none of {named} tensor(s) of its name has its range and shape"
    if len(fits) > 1:
        return f"{len(fits)} tensors of the file can be it"
    (tensor,) = fits
    if claims[tensor] > 1:
        return f"'{tensor.name}' of the file can be another op's"
    if tensor.quantization is None:
        return FileTensor(tensor, 0.0, 0, (0, 0))
    (scale,), (zero,) = tensor.quantization.scales, tensor.quantization.zero_points
    limits = np.iinfo(tensor.dtype)
    return FileTensor(tensor, scale, zero, (int(limits.min), int(limits.max)))
