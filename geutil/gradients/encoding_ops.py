"""The ops of encodings: the kept form of a tensor, and gradients that read no more."""

# Every gradient is that of TensorFlow's kernels to the last bit, zeros with their
# signs: the gradient of a Relu is a product with 0 or 1, and that of a pool is the
# gradient at the first maximum of each window, -0 as +0, and +0 elsewhere (TensorFlow
# 2.21, oneDNN or Eigen).

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import tensorflow as tf

from geutil.gradients import encodings
from geutil.gradients.apply import make_edits
from geutil.gradients.encodings import Encoding, EncodingPlan
from geutil.gradients.step import (
    PlainStep,
    TensorRead,
    edits_of,
    first_results,
    renewed,
    with_edited_backward,
)
from geutil.graph import adjacency, creation, state, types, v1_control_flow
from geutil.graph.types import IdentitySet, MutableIdentityMap, Operation, Tensor

_SCOPE = "encoded"
# Returns the kept form, as of when the backward pass gets to an op.
Late = Callable[[Operation, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Encoder:
    """Builds the kept form of tensors, once for each tensor."""

    # TensorFlow builds gradients of a function again and again until they read nothing
    # new; nothing is made twice for that.

    # Encoded tensors by name of the encoding and by tensor, and the ops that make them.
    made: dict[str, MutableIdentityMap[Tensor]] = field(default_factory=dict)
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
            if keeps in (encodings.NARROW, encodings.SIGN):
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
        if keeps == encodings.NARROW:
            return _widened(read, tensor.op.inputs[0], late)
        if keeps == encodings.SIGN:
            return _widened(read, self.narrow(tensor, tf.int8), late)
        if op in plan.swapped or op.type == "MaxPoolGrad":
            pool = plan.swapped.get(op, op)
            places = self._places(pool)
            gradient = _without_minus_zero(pool.inputs[2])
            if pool is not op:
                maxima = pool.inputs[encodings.MAXIMA]
                gradient = _gradient_like(op, gradient, maxima)
            return _spread(pool, gradient, late(pool, places))
        # All others read the shape of the tensor alone.
        if op.type not in encodings.ACTIVATIONS:
            key = encodings.SHAPE
            shape = self._once(key, tensor, lambda t: tf.raw_ops.Shape(input=t))
            return _of_shape(op, shape, late)
        if tensor in plan.padded:
            padded = plan.padded[tensor]
            return _gradient_like(op, op.inputs[0], _cut(padded, late(op, padded)))
        if op.type == "Relu6Grad":
            return _masked(op, late(op, self._once(op.type, tensor, _is_0_to_6)))
        mask = self._once(encodings.MASK, tensor, lambda t: t > tf.zeros([], t.dtype))
        return _masked(op, late(op, mask))

    def narrow(self, tensor: Tensor, dtype: tf.DType) -> Tensor:
        """Return the values of a tensor in fewer bytes."""
        return self._once(dtype.name, tensor, lambda t: tf.cast(t, dtype))

    def _places(self, op: Operation) -> Tensor:
        """Return the index of each maximum of a pool in its window, row by row."""
        maxima = op.inputs[encodings.MAXIMA]
        window = op.get_attr("ksize")[1:3]
        images = op.inputs[encodings.INPUT]
        key = f"{encodings.PLACES} {window}"
        return self._once(key, maxima, partial(_first_places, images, window))

    def _once(
        self, key: str, tensor: Tensor, make: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the op made for a tensor before, or make it in the forward pass."""
        made = self.made.setdefault(key, MutableIdentityMap())
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
        or (read.index == encodings.INPUT and read.op not in late)
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
    images = op.inputs[encodings.INPUT]
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
    for buffer, reads in encodings.late_reads(step, smallest).items():
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
    if any(encodings.buffer_of(y) is buffer for y in step.ys):
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
