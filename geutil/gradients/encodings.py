"""Encodings: smaller forms of forward tensors that are enough for the backward pass.

The gradient of a Relu needs the places where its result is positive, that of a pool of
maxima the place of each maximum, that of a resized image no more than its shape.
`plan_encodings` finds the tensors of which late reads need no more, and builds nothing;
`Encoder` makes their kept forms, and gradients that read these. Source: Jain et al.,
"Gist: Efficient data encoding for deep neural network training", 2018.
"""

# Every gradient is that of TensorFlow's kernels to the last bit, zeros with their
# signs: the gradient of a Relu is a product with 0 or 1, and that of a pool is the
# gradient at the first maximum of each window, -0 as +0, and +0 elsewhere (TensorFlow
# 2.21, oneDNN or Eigen).

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import tensorflow as tf

from geutil.gradients.step import (
    PlainStep,
    TensorRead,
    edits_of,
    first_results,
    is_parameter,
    make_edits,
    renewed,
    tensors_of,
    with_edited_backward,
)
from geutil.graph import adjacency, creation, op_types, state, types, v1_control_flow
from geutil.graph.types import IdentityMap, IdentitySet, Operation, Tensor
from geutil.memory.costs import tensor_bytes, tensor_elements
from geutil.memory.kernels import cpu

# Names of kept forms of a tensor, see `EncodedTensor`.
_MASK, _PLACES, _PART, _SHAPE, _NOTHING = "mask", "places", "part", "shape", "nothing"
_SIGN, _NARROW = "sign", "narrow"

# Gradients of activations, with the input that they read for its sign alone.
_ACTIVATIONS = {"LeakyReluGrad": 1, "Relu6Grad": 1, "ReluGrad": 1}
# Ops that read an input for its shape alone, with the place of that.
_SHAPE_READS = dict.fromkeys(op_types.VALUE_BLIND - {"ShapeN"}, 0)
_SHAPE_READS |= {"ResizeBicubicGrad": 1, "ResizeBilinearGrad": 1}
# Inputs of MaxPoolGrad.
_INPUT, _MAXIMA = 0, 1
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
        for buffer, reads in _late_reads(step, smallest).items()
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
        if pool is not None and _buffer_of(pool.inputs[_MAXIMA]) in left:
            swapped[read.op] = pool
        elif read.op.type in _ACTIVATIONS:
            padded.update((read.tensor, t) for t in _padded(read.tensor, left))
    return EncodingPlan(
        tuple(_encoding(b, reads, swapped, padded) for b, reads in encoded),
        tuple((buffer, obstacles[buffer] or "") for buffer in left),
        swapped,
        padded,
    )


def _late_reads(step: PlainStep, smallest: int) -> IdentityMap[list[TensorRead]]:
    """Return the late reads of buffers of a step that are large, by buffer."""
    by_buffer: types.MutableIdentityMap[list[TensorRead]] = types.MutableIdentityMap()
    for read in step.edges.reads:
        buffer = _buffer_of(read.tensor)
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
            staying = {r.op for r in reads if r.index == _INPUT} & replaced
            if reason is not None and staying:
                replaced -= staying
                settled = False
    return obstacles, replaced


def _buffer_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose buffer a tensor is, itself if it has its own."""
    while True:
        sources = dict(cpu.aliases(tensor.op)) if tensor.op.inputs else {}
        if tensor.value_index not in sources:
            return tensor
        tensor = tensor.op.inputs[sources[tensor.value_index]]


def _is_held_anyway(step: PlainStep, buffer: Tensor) -> bool:
    """Return whether a buffer is held throughout, whatever reads it."""
    op = buffer.op
    held = cpu.is_held(op) or is_parameter(op)
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
    same = pool.inputs[_INPUT] is read.tensor
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
    if any(_buffer_of(y) is buffer for y in step.ys):
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
    if index in (_ACTIVATIONS.get(op.type), _SHAPE_READS.get(op.type)):
        return None
    if op.type == "MaxPoolGrad" and index in (_INPUT, _MAXIMA):
        obstacle = _pool_obstacle(op)
        if obstacle is not None:
            return f"'{op.name}' (MaxPoolGrad) reads its values: {obstacle}"
        if op in replaced:
            return None
    return f"'{op.name}' ({op.type}) reads its values"


def _reads_images(read: TensorRead) -> bool:
    return read.op.type == "MaxPoolGrad" and read.index == _INPUT


def _pool_obstacle(op: Operation) -> str | None:
    """Return why places of maxima cannot replace the inputs of a pool's gradient."""
    window, strides = op.get_attr("ksize"), op.get_attr("strides")
    dims = types.dims_of(op.inputs[_INPUT])
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
    if op.type == "Cast" and not is_parameter(op):
        source = op.inputs[0].dtype
        exact = source.is_bool or source.is_integer or source.is_floating
        return _NARROW if exact and source.size < tensor.dtype.size else None
    return _SIGN if op.type == "Sign" and tensor.dtype.is_floating else None


def _encoding(
    buffer: Tensor,
    reads: Sequence[TensorRead],
    swapped: Mapping[Operation, Operation],
    padded: IdentityMap[Tensor],
) -> Encoding:
    """Return the encoding of a tensor, with the bytes of its kept form."""
    compact = _compact(buffer, reads)
    if compact is not None:
        each = 1 if compact == _SIGN else buffer.op.inputs[0].dtype.size
        size = tensor_elements(buffer) * each
        return Encoding(buffer, tuple(reads), (compact,), size)
    signs = IdentitySet(
        read.tensor
        for read in reads
        if read.op.type in _ACTIVATIONS and read.op not in swapped
    )
    masked = IdentitySet(t for t in signs if t not in padded)
    # Of a pool that is differentiated twice there are the same places.
    pooled = IdentitySet(r.op.inputs[_MAXIMA] for r in reads if _reads_images(r))
    kept = {_MASK: masked, _PLACES: pooled}
    names = [name for name, tensors in kept.items() if len(tensors)]
    if len(masked) < len(signs):
        names.append(_PART)
    if not names:
        alone = all(r.op.type == "MaxPoolGrad" and r.index == _MAXIMA for r in reads)
        names.append(_NOTHING if alone else _SHAPE)
    size = sum(tensor_elements(t) for tensors in kept.values() for t in tensors)
    return Encoding(buffer, tuple(reads), tuple(names), size)


_SCOPE = "encoded"
# Returns the kept form, as of when the backward pass gets to an op.
Late = Callable[[Operation, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Encoder:
    """Builds the kept form of tensors, once for each tensor."""

    # TensorFlow builds gradients of a function again and again until they read nothing
    # new; nothing is made twice for that.

    # Encoded tensors by name of the encoding and by tensor, and the ops that make them.
    made: dict[str, types.MutableIdentityMap[Tensor]] = field(default_factory=dict)
    ops: list[Operation] = field(default_factory=list)
    # The tensors made of them, by the read whose place they take.
    decoders: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def encode(self, step: PlainStep, plan: EncodingPlan) -> PlainStep:
        """Return the step whose backward ops read kept forms, by planned edits."""
        if not plan.encodings:
            return step
        late = _late(step)
        reads: dict[tuple[Operation, int], Tensor] = {}
        results: dict[Operation, Tensor] = {}
        for read, encoding in _in_backward_order(step, plan):
            op, keeps = read.op, encoding.keeps[0]
            # The same in all plans that have it so.
            is_padded = read.tensor in plan.padded
            key = (op, read.index, plan.swapped.get(op), is_padded)
            if key not in self.decoders:
                with creation.surroundings_of(op):
                    self.decoders[key] = self._replacement(read, keeps, plan, late)
            if keeps in (_NARROW, _SIGN):
                reads[op, read.index] = self.decoders[key]
            else:
                results[op] = self.decoders[key]
        replaced = first_results(results)
        gradients = (renewed(g, replaced) for g in step.gradients)
        edits = replace(edits_of(reads, results), loops=step.edits.loops)
        return with_edited_backward(step, gradients, self.ops, edits)

    def _replacement(
        self, read: TensorRead, keeps: str, plan: EncodingPlan, late: Late
    ) -> Tensor:
        """Build the replacement of a tensor, or of the op that reads it."""
        op, tensor = read.op, read.tensor
        if keeps == _NARROW:
            return _widened(read, tensor.op.inputs[0], late)
        if keeps == _SIGN:
            return _widened(read, self.narrow(tensor, tf.int8), late)
        if op in plan.swapped or op.type == "MaxPoolGrad":
            pool = plan.swapped.get(op, op)
            places = self._places(pool)
            gradient = _without_minus_zero(pool.inputs[2])
            if pool is not op:
                maxima = pool.inputs[_MAXIMA]
                gradient = _gradient_like(op, gradient, maxima)
            return _spread(pool, gradient, late(pool, places))
        # All others read the shape of the tensor alone.
        if op.type not in _ACTIVATIONS:
            key = _SHAPE
            shape = self._once(key, tensor, lambda t: tf.raw_ops.Shape(input=t))
            return _of_shape(op, shape, late)
        if tensor in plan.padded:
            padded = plan.padded[tensor]
            return _gradient_like(op, op.inputs[0], _cut(padded, late(op, padded)))
        if op.type == "Relu6Grad":
            return _masked(op, late(op, self._once(op.type, tensor, _is_0_to_6)))
        mask = self._once(_MASK, tensor, lambda t: t > tf.zeros([], t.dtype))
        return _masked(op, late(op, mask))

    def narrow(self, tensor: Tensor, dtype: tf.DType) -> Tensor:
        """Return the values of a tensor in fewer bytes."""
        return self._once(dtype.name, tensor, lambda t: tf.cast(t, dtype))

    def _places(self, op: Operation) -> Tensor:
        """Return the index of each maximum of a pool in its window, row by row."""
        maxima = op.inputs[_MAXIMA]
        window = op.get_attr("ksize")[1:3]
        images = op.inputs[_INPUT]
        key = f"{_PLACES} {window}"
        return self._once(key, maxima, partial(_first_places, images, window))

    def _once(
        self, key: str, tensor: Tensor, make: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the op made for a tensor before, or make it in the forward pass."""
        made = self.made.setdefault(key, types.MutableIdentityMap())
        if tensor not in made:
            graph = tensor.graph
            before = state.count_ops(graph)
            with (
                creation.neutral(graph),
                graph.name_scope(f"{_SCOPE}/{tensor.op.name}/"),
                graph.device(tensor.op.device),
            ):
                made[tensor] = make(tensor)
            self.ops.extend(state.ops_since(graph, before))
        return made[tensor]


def _in_backward_order(
    step: PlainStep, plan: EncodingPlan
) -> list[tuple[TensorRead, Encoding]]:
    """Return the reads to rewire, for the gradient of a pool that of its input."""
    place = {op: place for place, op in enumerate(step.backward)}
    late = frozenset(plan.swapped.values())
    reads = [
        (read, encoding)
        for encoding in plan.encodings
        for read in encoding.reads
        if read.op.type != "MaxPoolGrad"
        or (read.index == _INPUT and read.op not in late)
    ]
    return sorted(reads, key=lambda pair: (place[pair[0].op], pair[0].index))


def _is_0_to_6(tensor: Tensor) -> Tensor:
    zero, six = (tf.constant(value, tensor.dtype) for value in (0, 6))
    return tf.logical_and(tensor > zero, tensor < six)


def _first_places(images: Tensor, window: Sequence[int], maxima: Tensor) -> Tensor:
    """Return the index of the first maximum in each window, counted row by row."""
    # The place is the number of places before it, each of which has something less.
    height, width = window
    _, columns, channels = _image_dims(images)
    apart = tf.reshape(images, [-1, height, columns // width, width, channels])
    pooled = tf.reshape(maxima, [-1, columns // width, channels])
    place, still_less = None, None
    for row, column in list(product(range(height), range(width)))[:-1]:
        less = tf.not_equal(apart[:, row, :, column, :], pooled)
        still_less = less if still_less is None else tf.logical_and(still_less, less)
        step = tf.cast(still_less, tf.uint8)
        place = step if place is None else place + step
    return tf.zeros_like(pooled, tf.uint8) if place is None else place


def _image_dims(images: Tensor) -> tuple[int, int, int]:
    """Return height, width and channels, which are known where places are kept."""
    _, rows, columns, channels = (dim or 0 for dim in types.dims_of(images) or ())
    return rows, columns, channels


def _late(step: PlainStep) -> Late:
    """Return a function that lets the backward pass of a step read late."""
    backward = frozenset((*step.backward, *step.seeds))

    def late(op: Operation, kept: Tensor) -> Tensor:
        scope = types.scope_dirname(op.name)[:-1]
        waiting = creation.make_stand_in(kept, scope, "late")
        awaited = [p for p in adjacency.predecessors(op) if p in backward]
        creation.add_control_edges(waiting.op, awaited[:1])
        return waiting

    return late


def _masked(op: Operation, passes: Tensor) -> Tensor:
    """Build the gradient of an activation from its mask."""
    gradient = op.inputs[0]
    if op.type == "LeakyReluGrad":
        ones = tf.ones([], gradient.dtype)
        slope = tf.constant(op.get_attr("alpha"), gradient.dtype)
        factor = tf.where(passes, ones, slope)
    else:
        # A product, as in the kernel: negative numbers become -0.
        factor = tf.cast(passes, gradient.dtype)
    return tf.multiply(gradient, factor)


def _cut(padded: Tensor, whole: Tensor) -> Tensor:
    """Build a tensor again from its padded form, held or late."""
    source, padding = padded.op.inputs[:2]
    before = tf.get_static_value(padding)[:, 0]
    size = tf.shape(padded) - padding[:, 0]
    size -= padding[:, 1]
    part = tf.slice(whole, before, size)
    part.set_shape(source.shape)
    return part


def _of_shape(op: Operation, shape: Tensor, late: Late) -> Tensor:
    """Build the result of an op that reads the shape of a tensor alone."""
    dtype = op.outputs[0].dtype
    if op.type == "Shape":
        return tf.cast(shape, dtype)
    if op.type == "Rank":
        return tf.size(shape)
    if op.type == "Size":
        return tf.cast(tf.reduce_prod(shape), dtype)
    if op.type in ("OnesLike", "ZerosLike"):
        value = tf.constant(int(op.type == "OnesLike"), dtype)
        return tf.fill(late(op, shape), value)
    return _resize_gradient(op, shape)


def _widened(read: TensorRead, kept: Tensor, late: Late) -> Tensor:
    """Build the values of a tensor again, when they are read."""
    return tf.cast(late(read.op, kept), read.tensor.dtype)


def _spread(op: Operation, gradient: Tensor, places: Tensor) -> Tensor:
    """Build the gradient of a pool: that of each maximum at its position."""
    # The product with zero is +0, as where the kernel adds nothing.
    height, width = op.get_attr("ksize")[1:3]
    images = op.inputs[_INPUT]
    rows, columns, channels = _image_dims(images)
    flat = tf.reshape(gradient, [-1, columns // width, channels])
    parts = []
    for place in range(height * width):
        is_there = tf.equal(places, tf.constant(place, tf.uint8))
        factor = tf.cast(is_there, gradient.dtype)
        parts.append(tf.raw_ops.MulNoNan(x=flat, y=factor))
    rows_of_parts = (parts[i : i + width] for i in range(0, height * width, width))
    lines = [
        tf.reshape(tf.stack(row, axis=2), [-1, 1, columns * channels])
        for row in rows_of_parts
    ]
    spread = tf.reshape(tf.concat(lines, 1), [-1, rows, columns, channels])
    spread.set_shape(images.shape)
    return spread


def _without_minus_zero(gradient: Tensor) -> Tensor:
    """Return a gradient as added to zeros; no optimizer sees that zero is added."""
    scope = types.scope_dirname(gradient.op.name)[:-1]
    zero = creation.make_stand_in(tf.zeros([], gradient.dtype), scope, "zero")
    return gradient + zero


def _gradient_like(op: Operation, gradient: Tensor, features: Tensor) -> Tensor:
    """Build the gradient of an activation by the same kernel."""
    slope = {"alpha": op.get_attr("alpha")} if op.type == "LeakyReluGrad" else {}
    make = getattr(tf.raw_ops, op.type)
    built: Tensor = make(gradients=gradient, features=features, **slope)
    return built


def _resize_gradient(op: Operation, shape: Tensor) -> Tensor:
    """Build the gradient of a resized image with another image of its shape."""
    gradient, image = op.inputs
    some = tf.cast(tf.reshape(gradient, [-1])[0], image.dtype)
    make = getattr(tf.raw_ops, op.type)
    built: Tensor = make(
        grads=gradient,
        original_image=tf.fill(shape, some),
        align_corners=op.get_attr("align_corners"),
        half_pixel_centers=op.get_attr("half_pixel_centers"),
    )
    return built


@dataclass(frozen=True, eq=False)
class Halved:
    """A step with the tensors that wait as bfloat16, and reasons for the others."""

    step: PlainStep
    tensors: tuple[Tensor, ...]
    left: tuple[tuple[Tensor, str], ...]


def halve(step: PlainStep, smallest: int, encoder: Encoder) -> Halved:
    """Let kept tensors of float32 wait as bfloat16, by edits of the graph."""
    # Each is rounded in the forward pass, and widened again for each op that reads it
    # in the backward pass: backward ops, and the ops that recomputation starts from.
    # Ops that run again count: they wait for the backward pass.
    step = with_edited_backward(step, step.gradients, ())
    halved, left = [], []
    edits: dict[tuple[Operation, int], Tensor] = {}
    late = _late(step)
    for buffer, reads in _late_reads(step, smallest).items():
        if obstacle := _why_whole(step, buffer, reads):
            left.append((buffer, obstacle))
            continue
        halved.append(reads[0].tensor)
        for read in reads:
            kept = encoder.narrow(read.tensor, tf.bfloat16)
            with creation.surroundings_of(read.op):
                edits[read.op, read.index] = _widened(read, kept, late)
    make_edits(edits_of(edits, {}))
    edited = with_edited_backward(step, step.gradients, encoder.ops)
    return Halved(edited, tuple(halved), tuple(left))


def _why_whole(
    step: PlainStep, buffer: Tensor, reads: Sequence[TensorRead]
) -> str | None:
    """Return why a tensor is kept as it is, or None."""
    if buffer.dtype != tf.float32:
        return f"its type is {buffer.dtype.name}"
    if any(_buffer_of(y) is buffer for y in step.ys):
        return "it is asked for"
    if any(v1_control_flow.is_inside(op) for op in (buffer.op, *(r.op for r in reads))):
        return "it belongs to a loop or conditional of version 1"
    if len(IdentitySet(read.tensor for read in reads)) > 1:
        return "the backward pass reads it in several shapes"
    for read in reads:
        if read.op.type == "MaxPoolGrad":
            return f"'{read.op.name}' (MaxPoolGrad) finds maxima by their values"
        # Rounded, it would be equal to none of the values that it was chosen from.
        if buffer.op.type == "MaxPool" and read.op.type == "PlaceholderWithDefault":
            return "the places of its maxima are found again by comparing with it"
    return None
