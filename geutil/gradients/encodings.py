"""Encodings: smaller forms of forward tensors that are enough for the backward pass.

The gradient of a Relu needs the places where its result is positive, that of a pool of
maxima the place of each maximum, that of a resized image only its shape. This module
finds the tensors of which late reads need no more, and builds nothing. Source: Jain et
al., "Gist: Efficient data encoding for deep neural network training", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from geutil.gradients import segments
from geutil.gradients.step import PlainStep, TensorRead, tensors_of
from geutil.graph import op_types, types, v1_control_flow
from geutil.graph.types import IdentityMap, IdentitySet, Operation, Tensor
from geutil.memory.kernels import cpu
from geutil.memory.sizes import tensor_bytes, tensor_elements

# Names of kept forms of a tensor, see `EncodedTensor`.
MASK, PLACES, PART, SHAPE, NOTHING = "mask", "places", "part", "shape", "nothing"
SIGN, NARROW = "sign", "narrow"

# Gradients of activations, with the input that they read for its sign alone.
ACTIVATIONS = {"LeakyReluGrad": 1, "Relu6Grad": 1, "ReluGrad": 1}
# Ops that read an input for its shape alone, with the place of that.
_SHAPE_READS = dict.fromkeys(op_types.VALUE_BLIND - {"ShapeN"}, 0)
_SHAPE_READS |= {"ResizeBicubicGrad": 1, "ResizeBilinearGrad": 1}
# Inputs of MaxPoolGrad.
INPUT, MAXIMA = 0, 1
# A place is held as uint8.
_MOST_PLACES = 255
_PADS = frozenset(("MirrorPad", "Pad", "PadV2"))


@dataclass(frozen=True)
class EncodedTensor:
    """A forward tensor that is kept in a smaller form for the backward pass.

    Attributes:
        name: its name.
        op_type: the type of the op that yields it.
        keeps: the form kept instead: "mask", the elements at which an activation passes
            gradients; "places", the position of each maximum in its window; "shape";
            "sign" as int8; "narrow", the input of its cast; "part", only the padded
            tensor that contains it and is held anyway; "nothing", since it was only
            searched for maxima; "bfloat16". Several are joined by " and ".
        bytes: its size.
        kept_bytes: the size of the kept form.
    """

    name: str
    op_type: str
    keeps: str
    bytes: int
    kept_bytes: int


@dataclass(frozen=True, eq=False)
class Encoding:
    """A forward tensor whose buffer is freed, since a smaller form is kept."""

    tensor: Tensor
    # The late reads of it, or of tensors that share its buffer.
    reads: tuple[TensorRead, ...]
    keeps: tuple[str, ...]
    # The size of its kept form, where that would not be held anyway.
    bytes: int

    def described(self) -> EncodedTensor:
        """Return the entry of a report."""
        tensor, keeps = self.tensor, " and ".join(self.keeps)
        size = tensor_bytes(tensor)
        return EncodedTensor(tensor.name, tensor.op.type, keeps, size, self.bytes)


@dataclass(frozen=True, eq=False)
class EncodingPlan:
    """The encodings of a step, in the order of the backward pass."""

    encodings: tuple[Encoding, ...] = ()
    # The other tensors that the backward pass reads, each with the reason.
    left: tuple[tuple[Tensor, str], ...] = ()
    # Gradients of activations, each with that of the pool behind it, which goes last
    # instead: the maximum of a window is positive where its place is, so that the
    # maxima tell where the activation lets gradients through.
    swapped: Mapping[Operation, Operation] = field(default_factory=dict)
    # Tensors that an activation read, each with a held one padded from it.
    padded: IdentityMap[Tensor] = field(default_factory=IdentityMap)


def plan_encodings(
    step: PlainStep, smallest: int, whole: IdentityMap[str] | None = None
) -> EncodingPlan:
    """Return the plan of encodings for late reads, except of `whole` tensors."""
    by_buffer = IdentityMap(
        (buffer, reads)
        for buffer, reads in late_reads(step, smallest).items()
        if buffer.dtype.size
    )
    obstacles, replaced = _obstacles(step, by_buffer, whole or IdentityMap())
    left = IdentitySet(buffer for buffer, reason in obstacles.items() if reason)
    encoded = [(b, reads) for b, reads in by_buffer.items() if b not in left]
    swapped: dict[Operation, Operation] = {}
    padded: types.MutableIdentityMap[Tensor] = types.MutableIdentityMap()
    for read in (read for _, reads in encoded for read in reads):
        pool = _swappable_pool(step, read, replaced)
        # Its maxima have to be there anyway.
        if pool is not None and buffer_of(pool.inputs[MAXIMA]) in left:
            swapped[read.op] = pool
        elif read.op.type in ACTIVATIONS:
            padded.update((read.tensor, t) for t in _padded(read.tensor, left))
    return EncodingPlan(
        tuple(_encoding(b, reads, swapped, padded) for b, reads in encoded),
        tuple((buffer, obstacles[buffer] or "") for buffer in left),
        swapped,
        padded,
    )


def late_reads(step: PlainStep, smallest: int) -> IdentityMap[list[TensorRead]]:
    """Return the late reads of buffers of a step that are large, by buffer."""
    by_buffer: types.MutableIdentityMap[list[TensorRead]] = types.MutableIdentityMap()
    for read in step.edges.reads:
        buffer = buffer_of(read.tensor)
        if buffer in by_buffer:
            by_buffer[buffer].append(read)
        elif not _is_held_anyway(step, buffer) and tensor_elements(buffer) >= smallest:
            by_buffer[buffer] = [read]
    return by_buffer


def _obstacles(
    step: PlainStep, by_buffer: IdentityMap[list[TensorRead]], whole: IdentityMap[str]
) -> tuple[IdentityMap[str | None], set[Operation]]:
    """Return why each tensor is kept whole, and the pool gradients to replace."""
    # A gradient of a pool that stays reads its maxima, too. So these may have to stay,
    # which are the input of another pool in turn.
    every = (read for reads in by_buffer.values() for read in reads)
    replaced = {read.op for read in every if _reads_images(read)}
    obstacles: types.MutableIdentityMap[str | None] = types.MutableIdentityMap()
    settled = False
    while not settled:
        settled = True
        for buffer, reads in by_buffer.items():
            reason = whole.get(buffer) or _obstacle(step, buffer, reads, replaced)
            obstacles[buffer] = reason
            staying = {r.op for r in reads if r.index == INPUT} & replaced
            if reason is not None and staying:
                replaced -= staying
                settled = False
    return obstacles, replaced


def buffer_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose buffer a tensor is, itself if it has its own."""
    while True:
        sources = dict(cpu.aliases(tensor.op)) if tensor.op.inputs else {}
        if tensor.value_index not in sources:
            return tensor
        tensor = tensor.op.inputs[sources[tensor.value_index]]


def _is_held_anyway(step: PlainStep, buffer: Tensor) -> bool:
    """Return whether a buffer is held throughout, whatever reads it."""
    op = buffer.op
    held = cpu.is_held(op) or segments.is_parameter(op)
    return held or not step.covers(op) or op in step.seeds


def _swappable_pool(
    step: PlainStep, read: TensorRead, replaced: Collection[Operation]
) -> Operation | None:
    """Return the pool gradient behind that of an activation if the two can swap."""
    op, pool = read.op, read.op.inputs[0].op
    if op.type not in ("ReluGrad", "Relu6Grad") or pool not in replaced:
        return None
    # Once they are swapped, nobody else can read the gradient of the pool itself.
    others = [r for r in step.edges.readers[pool] if r is not op]
    asked = any(t is pool.outputs[0] for t in tensors_of(step.gradients))
    same = pool.inputs[INPUT] is read.tensor
    return pool if same and not others and not asked else None


def _padded(tensor: Tensor, held: IdentitySet) -> list[Tensor]:
    """Return the held tensors that a tensor was padded to, which it can be cut from."""
    return [
        op.outputs[0]
        for op in tensor.consumers()
        if op.type in _PADS
        and op.inputs[0] is tensor
        and op.outputs[0] in held
        and not v1_control_flow.is_inside(op)
        and tf.get_static_value(op.inputs[1]) is not None
    ][:1]


def _obstacle(
    step: PlainStep,
    buffer: Tensor,
    reads: Sequence[TensorRead],
    replaced: Collection[Operation],
) -> str | None:
    """Return why a tensor is kept as it is, or None."""
    if any(buffer_of(y) is buffer for y in step.ys):
        return "it is asked for"
    for op in (buffer.op, *(read.op for read in reads)):
        if v1_control_flow.is_inside(op):
            name = "it" if op is buffer.op else f"'{op.name}'"
            return f"{name} belongs to a loop or conditional of version 1"
    if _compact(buffer, reads) is not None:
        return None
    return next(filter(None, (_why_values(read, replaced) for read in reads)), None)


def _why_values(read: TensorRead, replaced: Collection[Operation]) -> str | None:
    """Return why a read needs the values of a tensor, or None if it does not."""
    op, index = read.op, read.index
    if index in (ACTIVATIONS.get(op.type), _SHAPE_READS.get(op.type)):
        return None
    if op.type == "MaxPoolGrad" and index in (INPUT, MAXIMA):
        obstacle = _pool_obstacle(op)
        if obstacle is not None:
            return f"'{op.name}' (MaxPoolGrad) reads its values: {obstacle}"
        if op in replaced:
            return None
    return f"'{op.name}' ({op.type}) reads its values"


def _reads_images(read: TensorRead) -> bool:
    return read.op.type == "MaxPoolGrad" and read.index == INPUT


def _pool_obstacle(op: Operation) -> str | None:
    """Return why places of maxima cannot replace the inputs of a pool's gradient."""
    window, strides = op.get_attr("ksize"), op.get_attr("strides")
    dims = types.dims_of(op.inputs[INPUT])
    if op.get_attr("data_format") != b"NHWC" or window[0] != 1 or window[3] != 1:
        return "it pools over more than height and width"
    if list(window) != list(strides):
        return "its windows overlap, and oneDNN adds up in an order of its own"
    if dims is None or len(dims) != 4 or None in dims[1:]:
        return "its height, width and channels are not known"
    if any((dims[i] or 0) % window[i] for i in (1, 2)):
        return "its windows do not tile the image"
    if math.prod(window) > _MOST_PLACES:
        return f"a window has more than {_MOST_PLACES} places"
    return None


def _compact(tensor: Tensor, reads: Iterable[TensorRead]) -> str | None:
    """Return the smaller form of a tensor whose op yields few values, or None."""
    op = tensor.op
    if any(read.tensor is not tensor for read in reads):
        return None
    if op.type == "Cast" and not segments.is_parameter(op):
        source = op.inputs[0].dtype
        exact = source.is_bool or source.is_integer or source.is_floating
        return NARROW if exact and source.size < tensor.dtype.size else None
    return SIGN if op.type == "Sign" and tensor.dtype.is_floating else None


def _encoding(
    buffer: Tensor,
    reads: Sequence[TensorRead],
    swapped: Mapping[Operation, Operation],
    padded: IdentityMap[Tensor],
) -> Encoding:
    """Return the encoding of a tensor, with the bytes of its kept form."""
    compact = _compact(buffer, reads)
    if compact is not None:
        each = 1 if compact == SIGN else buffer.op.inputs[0].dtype.size
        size = tensor_elements(buffer) * each
        return Encoding(buffer, tuple(reads), (compact,), size)
    signs = IdentitySet(
        read.tensor
        for read in reads
        if read.op.type in ACTIVATIONS and read.op not in swapped
    )
    masked = IdentitySet(t for t in signs if t not in padded)
    # Of a pool that is differentiated twice there are the same places.
    pooled = IdentitySet(r.op.inputs[MAXIMA] for r in reads if _reads_images(r))
    kept = {MASK: masked, PLACES: pooled}
    names = [name for name, tensors in kept.items() if len(tensors)]
    if len(masked) < len(signs):
        names.append(PART)
    if not names:
        alone = all(r.op.type == "MaxPoolGrad" and r.index == MAXIMA for r in reads)
        names.append(NOTHING if alone else SHAPE)
    size = sum(tensor_elements(t) for tensors in kept.values() for t in tensors)
    return Encoding(buffer, tuple(reads), tuple(names), size)
