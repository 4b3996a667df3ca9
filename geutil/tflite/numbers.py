"""Numbers in TFLite files: constants read and written in float, and their steps.

A constant of integers stands for numbers in steps. It is read as these numbers and
written as these, in the steps that the file has. Where steps change, all that depends
on them follows: the tensors of kernels that rescale nothing, constants among these, and
biases, whose scale is that of the input times that of the weights.

A sparse tensor stores the values of its blocks along a tree. Each level of the tree is
one dimension, in the order in which the file goes through them: a dense level has all
indices of its dimension below each node, a sparse one those that the file lists, in
rows that it counts (CSR). The leaves are the values in their order.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from geutil.errors import ArgumentTypeError, TFLiteError
from geutil.graph.walks import walk
from geutil.tflite import effects, lookups
from geutil.tflite.arguments import checked
from geutil.tflite.kinds import (
    BIASED,
    FIXED_SCALE,
    ONE_SCALE,
    STEPPED,
    bias_steps,
    faults_of_steps,
    integers_of,
    layer_inputs,
    numbers_of,
)
from geutil.tflite.lookups import GraphLike, TensorLike
from geutil.tflite.parts import (
    Array,
    Contents,
    LiteGraph,
    LiteOp,
    LiteTensor,
    Quantization,
    stored,
)
from geutil.tflite.schema import DTYPES, PACKED_BITS, schema


def dense(tensor: LiteTensor) -> Array | None:
    """Return the values of a constant, whether it is stored sparse or not."""
    data = tensor.buffer.data
    if 0 in tensor.sizes:
        return np.zeros(tensor.sizes, DTYPES.get(tensor.dtype, np.int8))
    if data is None or not data.size:
        return None
    if tensor.dtype == "string":
        # They lie behind their count and the places of their ends.
        raw = data.tobytes()
        ends = np.frombuffer(
            raw, np.int32, int(np.frombuffer(raw, np.int32, 1)[0]) + 1, 4
        )
        texts = [raw[start:end] for start, end in pairwise(ends.tolist())]
        return np.array(texts, object).reshape(tensor.sizes)
    if not tensor.is_sparse:
        return tensor.value
    return _filled_in(tensor, data)


def _filled_in(tensor: LiteTensor, data: Array) -> Array:
    if tensor.dtype not in DTYPES or tensor.dtype in PACKED_BITS:
        raise TFLiteError(f"{tensor.label} is sparse, and of type {tensor.dtype}")
    stored = data.view(DTYPES[tensor.dtype])
    parameters = tensor.record.sparsity
    order = np.asarray(parameters.traversalOrder).tolist()
    blocks = () if parameters.blockMap is None else parameters.blockMap
    blocked = np.asarray(blocks).tolist()
    levels = parameters.dimMetadata
    rank = len(tensor.sizes)
    if len(order) != len(levels) or len(order) != rank + len(blocked):
        raise TFLiteError(
            f"{tensor.label} is sparse in {len(levels)} dimensions, and has {rank} "
            f"and blocks in {len(blocked)}"
        )
    # By the dimension, those of blocks last: the index of each value along it.
    places: dict[int, Array] = {}
    count = 1
    for dimension, level in zip(order, levels, strict=True):
        parents, indices = _below(level, count)
        places = {key: place[parents] for key, place in places.items()}
        places[dimension] = indices
        count = indices.size
    if count != stored.size:
        raise TFLiteError(
            f"{tensor.label} is sparse and has {stored.size} values for {count} places"
        )
    for inner, dimension in enumerate(blocked, rank):
        size = int(levels[order.index(inner)].denseSize)
        places[dimension] = places[dimension] * size + places[inner]
    result = np.zeros(tensor.sizes, stored.dtype)
    try:
        result[tuple(places[dimension] for dimension in range(rank))] = stored
    except IndexError as error:
        raise TFLiteError(f"{tensor.label} is sparse outside its shape") from error
    return result


def _below(level: Any, count: int) -> tuple[Array, Array]:
    """Return for each node of the next level its parent, and its index below that."""
    if level.format == schema().DimensionType.DENSE:
        indices = np.arange(int(level.denseSize))
        return np.repeat(np.arange(count), indices.size), np.tile(indices, count)
    ends = np.asarray(level.arraySegments.values, np.int64)
    parents = np.repeat(np.arange(count), np.diff(ends))
    return parents, np.asarray(level.arrayIndices.values, np.int64)


@dataclass(frozen=True)
class Stored:
    """The report of numbers that were stored in a file's steps.

    Attributes:
        clipped: by the name of the constant, how many numbers were out of its range.
        tensors: the tensors whose steps or values changed.
    """

    clipped: Mapping[str, int]
    tensors: tuple[LiteTensor, ...]

    def __str__(self) -> str:
        lost = ", ".join(f"{count} of '{name}'" for name, count in self.clipped.items())
        changed = f"{len(self.tensors)} tensor{'s' * (len(self.tensors) != 1)} changed"
        return f"{changed}; clipped: {lost}" if lost else f"{changed}; none clipped"


class Constants(MutableMapping[str, Array]):
    """The constants of a file by the names of their tensors, as numbers.

    Integers with steps are given as the float32 numbers that they stand for; zeros that
    the file leaves out are there. Numbers are stored in the type and the steps that the
    file has; `LiteTensor.value` gives and takes the integers themselves.
    """

    def __init__(self, graphs: Sequence[LiteGraph]) -> None:
        self._graphs = graphs

    def _tensors(self) -> Iterator[LiteTensor]:
        for graph in self._graphs:
            ends = {*graph.inputs}
            for t in graph.tensors:
                is_data = t.buffer.size and not t.makers and not t.is_variable
                if is_data and t not in ends and t.dtype in (*DTYPES, *PACKED_BITS):
                    yield t

    def tensor(self, name: str) -> LiteTensor:
        """Return the tensor of a constant.

        Raises:
            TFLiteError: several subgraphs have a constant of that name.
            KeyError: there is none.
        """
        found = [t for t in self._tensors() if t.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise TFLiteError(
                f"the file has {len(found)} constants '{name}'; read and write the "
                "`value` of one of these tensors, or rename them"
            )
        near = difflib.get_close_matches(name, [*self], 3, 0.5)
        raise KeyError(f"no constant '{name}'; near names: {near}")

    def __getitem__(self, name: str) -> Array:
        return numbers(self.tensor(name))

    def __setitem__(self, name: str, value: Array) -> None:
        report = self.write(name, value)
        if report.clipped:
            warnings.warn(str(report), stacklevel=2)

    def write(self, name: str, value: Array) -> Stored:
        """Store numbers in a constant, in its own type and steps.

        Args:
            name: the name of its tensor.
            value: the numbers, in its shape.

        Returns:
            A report of how many were out of range, and clipped.

        Raises:
            TFLiteError: the shape is another, there are numbers that are not finite, or
                zeros are left out of the file.
            KeyError: there is no constant of that name.
        """
        tensor = self.tensor(name)
        for op in tensor.consumers:
            # It would be stored with its zeros, which the kernel refuses.
            if tensor.is_sparse and op.kind == "DENSIFY":
                raise TFLiteError(
                    f"constant '{name}' is stored without its zeros, which {op!r} "
                    "fills in; call dequantize() first: it stores them, too"
                )
        array = np.asarray(value)
        if array.shape != tensor.sizes:
            raise TFLiteError(
                f"constant '{name}' has the shape {list(tensor.sizes)}, and the value "
                f"{list(array.shape)}; use `replace` where the shape is to change"
            )
        made, clipped = _stored(tensor, array)
        tensor.value = made
        return Stored({name: clipped} if clipped else {}, (tensor,))

    def __delitem__(self, name: str) -> None:
        raise TFLiteError(f"constant '{name}' cannot be left out; remove its op")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(t.name for t in self._tensors()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def numbers(tensor: LiteTensor) -> Array:
    """Return the numbers of a constant."""
    value = dense(tensor) if tensor.is_sparse else tensor.value
    if value is None:
        raise TFLiteError(f"{tensor.label} has no values in the file")
    steps = tensor.quantization
    if steps is not None and np.issubdtype(value.dtype, np.integer):
        return numbers_of(value, steps)
    return value.astype(np.float32) if tensor.dtype == "float16" else value


def _stored(tensor: LiteTensor, value: Array) -> tuple[Array, int]:
    """Return numbers as a tensor stores them, and how many were clipped."""
    steps, kind = tensor.quantization, DTYPES.get(tensor.dtype, np.int8)
    is_float = np.issubdtype(kind, np.inexact)
    if value.dtype.kind not in "biufc":
        raise ArgumentTypeError(
            f"{tensor.label} holds {tensor.dtype}, not {value.dtype}; pass numbers"
        )
    if not np.isfinite(value).all() and (
        # Masks of attention are infinite; such a constant can be written back.
        not is_float or np.isfinite(numbers(tensor)).all()
    ):
        raise TFLiteError(
            f"numbers for {tensor.label} are not all finite; `LiteTensor.value` takes "
            "such floats"
        )
    if np.issubdtype(kind, np.floating) and value.dtype.kind != "c":
        # Else they would become infinite.
        most = np.finfo(kind).max
        lost = np.isfinite(value) & (np.abs(value) > most)
        return np.where(lost, np.copysign(most, value), value).astype(kind), int(
            lost.sum()
        )
    if steps is None or tensor.dtype == "bool" or is_float:
        # They stand for themselves; others are refused, as none of them is near.
        try:
            stored(value, tensor.dtype)
        except TFLiteError as error:
            raise TFLiteError(
                f"{tensor.label} holds {tensor.dtype}, which stand for themselves: "
                f"{error}"
            ) from None
        return value, 0
    made, lost = integers_of(value, steps, tensor.dtype)
    return made, int(lost.sum())


@checked
def set_quantization(
    file: Contents,
    tensor: TensorLike,
    scale: float | Sequence[float],
    zero_point: int | Sequence[int] = 0,
    *,
    graph: GraphLike = None,
) -> Stored:
    """Set the scale and zero point of a tensor, and of those tied to it.

    Tensors that kernels such as those of RESHAPE or CONCATENATION tie to it get the
    same ones; constants among them are requantized; biases get the scale of the input
    times that of the weights.

    Args:
        tensor: the tensor of activations or weights, or its name.
        scale: the scale; for weights quantized per channel, one for each channel.
        zero_point: the integer that represents 0.

    Returns:
        A report of the tensors that changed, and of clipped values.

    Raises:
        TFLiteError: it is not quantized, or cannot have these: a kernel has fixed ones,
            or a bias does not fit. The file is unchanged.

    Example:
        >>> from geutil import tflite
        >>> m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
        >>> x = m.add_input("x", "int8", [4], quantization=steps)
        >>> m.set_outputs([m.add("SQUEEZE", [x], name="y", quantization=steps)])
        >>> print(m.set_quantization("x", 0.25, -3))
        2 tensors changed; none clipped
        >>> print(m.tensor("y").quantization)
        scale 0.25, zero point -3
    """
    found = lookups.tensor_of(file, tensor, lookups.graph_of(file, graph))
    # Beyond float32 a scale becomes infinite, which the check of steps refuses.
    with np.errstate(over="ignore"):
        scales = tuple(np.atleast_1d(np.asarray(scale, np.float32)).tolist())
    zeros = tuple(int(zero) for zero in np.atleast_1d(np.asarray(zero_point)))
    zeros *= len(scales) if len(zeros) == 1 else 1
    axis = 0 if found.quantization is None else found.quantization.axis
    steps = Quantization(scales, zeros, axis)
    _check_steps(found, steps)
    members = _tied(file, found)
    for member in members:
        _check_member(member, found)
    if len(steps.scales) > 1 and len(members) > 1:
        names = [t.label for t in members[1:]]
        more = f" and {len(names) - 3} more" if names[3:] else ""
        raise TFLiteError(
            f"{found.label} shares its scale with {', '.join(names[:3])}{more}, which "
            "take one scale each"
        )
    new = dict.fromkeys(members, steps)
    # All is computed before a tensor changes: a refusal leaves the file as it was.
    values: dict[LiteTensor, Array] = {}
    clipped: dict[str, int] = {}
    for member in members:
        if member.buffer.size and not member.makers:
            made, lost = integers_of(numbers(member), steps, member.dtype)
            values[member] = made
            if lost.any():
                clipped[member.name] = int(lost.sum())
    biases = _biases(members, new)
    for member in members:
        member.quantization = steps
        if member in values:
            member.value = values[member]
    for (op, place), (made, own) in biases.items():
        _replace_bias(op, place, made, own)
    changed = [*members, *(op.inputs[place] for op, place in biases)]
    return Stored(clipped, tuple(t for t in changed if t is not None))


def _check_steps(tensor: LiteTensor, steps: Quantization) -> None:
    """Refuse steps that a tensor cannot have."""
    own = tensor.quantization
    if own is None or tensor.dtype not in STEPPED:
        for op in tensor.consumers:
            if own is not None and bias_steps(op) is not None:
                raise TFLiteError(
                    f"{tensor.label} is the bias of {op!r}: its scale is that of the "
                    "input times that of the weights; set one of these"
                )
        raise TFLiteError(
            f"{tensor.label} is {tensor}, which stands for itself; only tensors that "
            "were quantized have steps to set"
        )
    if own.block or steps.block:
        raise TFLiteError(
            f"{tensor.label} is stored in blocks, whose scales are constants; write "
            "these"
        )
    scales = np.asarray(steps.scales)
    is_weight = any(layer_inputs(op)[1] is tensor for op in tensor.consumers)
    # TFLite's specification has a zero point of weights in uint8 alone.
    if any(steps.zero_points) and is_weight and tensor.dtype != "uint8":
        raise TFLiteError(
            f"the zero point of {tensor.label} is 0 in the kernels that read it"
        )
    # A scale for each channel is for stored weights: what an op makes has one.
    if scales.size > 1 and (
        len(own.scales) != scales.size or tensor.makers or not tensor.buffer.size
    ):
        raise TFLiteError(
            f"{tensor.label} has {len(own.scales)} scale(s), not {scales.size}"
        )
    for fault in faults_of_steps(steps, tensor.dtype, tensor.sizes):
        raise TFLiteError(f"{tensor.label} cannot have {steps}: it then {fault}")


def _check_member(member: LiteTensor, tensor: LiteTensor) -> None:
    """Refuse a tensor that kernels want to have other steps."""
    because = (
        "" if member is tensor else f", which shares its scale with {member.label}"
    )
    for op in (*member.makers, *member.readers):
        if op.is_custom or op.kind.endswith(("LSTM", "RNN", "SVDF")):
            raise TFLiteError(
                f"{tensor.label}{because} cannot have another scale: {op!r} keeps "
                "numbers of its own that were computed for this one"
            )
    for op in member.makers:
        if (op.kind, member.dtype) in FIXED_SCALE:
            raise TFLiteError(
                f"{tensor.label}{because} cannot have another scale: {op!r} makes "
                f"{member.dtype} in the scale that its kernel has built in; put a "
                "QUANTIZE behind it"
            )


def _tied(file: Contents, tensor: LiteTensor) -> list[LiteTensor]:
    """Return the tensors that have to have the steps of one: itself, and its class."""
    if len((tensor.quantization or Quantization((1.0,))).scales) > 1:
        return [tensor]
    links = _calls(file)

    def near(one: LiteTensor) -> Iterator[LiteTensor]:
        found = [*links.get(one, ())]
        for op in (*one.makers, *one.readers):
            if op.kind in ONE_SCALE and not op.is_custom:
                found += [t for t in (*op.inputs, *op.outputs) if t is not None]
        return (t for t in found if t.dtype in STEPPED and t.quantization is not None)

    return [*walk([tensor], near)]


def _calls(file: Contents) -> dict[LiteTensor, list[LiteTensor]]:
    """Return the tensors that are the same one across subgraphs, and in variables."""
    links: dict[LiteTensor, list[LiteTensor]] = {}

    def link(group: Sequence[LiteTensor | None]) -> None:
        present = [t for t in group if t is not None]
        for one in present:
            links.setdefault(one, []).extend(t for t in present if t is not one)

    variables: dict[Any, list[LiteTensor | None]] = {}
    for op in file.ops:
        meeting = [(t, getattr(graph, f)) for t, graph, f in effects.calls(op)]
        # The outputs of a round are the inputs of the next one.
        if op.kind == "WHILE":
            meeting.append((op.inputs, op.outputs))
        for some, others in meeting:
            for pair in zip(some, others, strict=False):
                link(pair)
        # A variable keeps integers: they are read in the steps they were written in.
        if op.kind in ("READ_VARIABLE", "ASSIGN_VARIABLE"):
            for handle in op.inputs[0].makers if op.inputs[0] else ():
                group = variables.setdefault(effects.resource_of(handle), [])
                group.extend((*op.inputs[1:], *op.outputs))
    for group in variables.values():
        link(group)
    return links


def _biases(
    members: Sequence[LiteTensor], new: Mapping[LiteTensor, Quantization]
) -> dict[tuple[LiteOp, int], tuple[Array, Quantization]]:
    """Return the biases of ops that read tensors with new steps, in their own."""
    found: dict[tuple[LiteOp, int], tuple[Array, Quantization]] = {}
    for op in dict.fromkeys(op for member in members for op in member.readers):
        (*_, bias), old, own = layer_inputs(op), bias_steps(op), bias_steps(op, new)
        if bias is None or old is None or own is None:
            continue
        if not bias.buffer.size:
            raise TFLiteError(f"the bias of {op!r} is computed, and cannot follow")
        if own == old:
            continue
        # The kernel reads integers without steps in those that it expects.
        exact = numbers(bias)
        if bias.quantization is None:
            exact = numbers_of(exact, old)
        made, lost = integers_of(exact, own, bias.dtype)
        if lost.any():
            raise TFLiteError(
                f"the bias of {op!r} does not fit {bias.dtype} in steps of "
                f"{min(own.scales):.4g}; take a larger scale"
            )
        found[op, BIASED[op.kind][2]] = made, own
    return found


def _replace_bias(op: LiteOp, place: int, value: Array, steps: Quantization) -> None:
    """Replace the bias of an op, by a copy where others read it, too."""
    bias = op.inputs[place]
    if bias is None or op.graph is None:
        return
    if len(bias.readers) > 1 or sum(one is bias for one in op.inputs) > 1:
        bias = op.graph.add_tensor(bias.copied())
        op.set_input(place, bias)
    bias.quantization = steps
    bias.value = value
