"""Reverse mode over a tape.

One walk back, from seeds, with gradients that are freed once used up.

Entries that the targets depend on are gone through backwards, each once all gradients
of its outputs are there. A gradient is dropped as soon as the entry that needs it has
run, and so is the entry. Where many gradients of one tensor wait, they are added up
before all have come, so that no more than a few are held at once.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TapeError
from geutil.gradients.tape.entries import Tape, TapeEntry, number_of, tensor_id
from geutil.graph import op_types


class VSpace(NamedTuple):
    """A space of gradients: they can be added, and there is zero.

    Attributes:
        aggregate_fn: returns the sum of a list of gradients, at least one.
        num_elements_fn: returns how many elements a gradient holds.
        tensor_id: returns the number that stands for a tensor on the tape.
        zeros: returns zeros of a shape and dtype.
        ones_like: returns ones of the shape and dtype of a tensor.

    Example:
        >>> # A space that says how many gradients it adds up.
        >>> import numpy as np
        >>> from geutil.gradients.tape import numpy_vspace
        >>> space = numpy_vspace()
        >>> def aggregate(gradients):
        ...     print(len(gradients))
        ...     return space.aggregate_fn(gradients)
        >>> telling = space._replace(aggregate_fn=aggregate)
        >>> telling.aggregate_fn([np.ones(2), np.ones(2)])
        2
        array([2., 2.])
    """

    aggregate_fn: Callable[[Sequence[Any]], Any]
    num_elements_fn: Callable[[Any], int]
    tensor_id: Callable[[Any], int]
    zeros: Callable[[Any, Any], Any]
    ones_like: Callable[[Any], Any]


def numpy_vspace() -> VSpace:
    """Return the space of numpy arrays.

    Example:
        >>> import numpy as np
        >>> from geutil.gradients.tape import numpy_vspace
        >>> numpy_vspace().aggregate_fn([np.ones(2), np.ones(2)])
        array([2., 2.])
    """
    add = functools.partial(functools.reduce, operator.add)
    return VSpace(add, np.size, tensor_id, np.zeros, np.ones_like)


def tensorflow_vspace() -> VSpace:
    """Return the space of TensorFlow's tensors.

    Slices stay slices as long as all that is added is slices.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients.tape import tensorflow_vspace
        >>> rows = tf.IndexedSlices(
        ...     tf.ones([1, 2]), tf.constant([3]), tf.constant([9, 2])
        ... )
        >>> total = tensorflow_vspace().aggregate_fn([rows, rows])
        >>> total.indices.numpy().tolist()
        [3, 3]
    """
    return VSpace(aggregate, num_elements, number_of, zeros, tf.ones_like)


def zeros(shape: Any, dtype: Any) -> Any:
    """Return zeros of a shape, or of the shape of a tensor.

    A list of tensors can only be made of such a list.
    """
    if not isinstance(shape, tf.Tensor):
        return tf.zeros(shape, dtype)
    # The shape is all that has to be held of the tensor.
    same = dtype == tf.variant
    return tf.zeros_like(shape) if same else tf.zeros(tf.shape(shape), dtype)


def aggregate(gradients: Sequence[Any]) -> Any:
    """Return the sum of tensors or `tf.IndexedSlices`."""
    if len(gradients) == 1:
        return gradients[0]
    if not all(isinstance(g, tf.IndexedSlices) for g in gradients):
        return tf.add_n([tf.convert_to_tensor(g) for g in gradients])
    values = tf.concat([g.values for g in gradients], 0)
    # Of several widths the wider one holds all.
    kinds = {g.indices.dtype for g in gradients}
    kind = kinds.pop() if len(kinds) == 1 else tf.int64
    indices = tf.concat([tf.cast(g.indices, kind) for g in gradients], 0)
    return tf.IndexedSlices(values, indices, gradients[0].dense_shape)


def num_elements(gradient: Any) -> int:
    """Return the number of elements; dimensions that are not known count as one."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    dims = () if gradient.shape.rank is None else gradient.shape.as_list()
    return math.prod(n or 1 for n in dims)


MIN_AGGREGATE_COUNT = 4
MIN_AGGREGATE_BYTES = 128 * 1024 * 1024


def require_sum(count: Any) -> None:
    """Raise an error unless that many gradients can be added up."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ArgumentTypeError(f"min_aggregate_count is a number, got {count!r}")
    if count < 2:
        raise TapeError(
            f"min_aggregate_count is {count}; pass 2 or more, since one gradient is no "
            "sum"
        )


def _item_size(dtype: Any) -> int:
    """Return the bytes of an element."""
    if getattr(dtype, "name", "") == "variant":
        # A list, of unknown length.
        return 1
    return int(getattr(dtype, "size", 0) or np.dtype(dtype).itemsize)


def _seeds(
    vspace: VSpace, target: Sequence[Any], output_gradients: Sequence[Any] | None
) -> list[Any]:
    """Return the gradient of each target: the given one, or ones."""
    gradients = [None] * len(target) if output_gradients is None else output_gradients
    if len(gradients) != len(target):
        raise TapeError(
            f"there are {len(target)} targets and {len(gradients)} output gradients; "
            "pass one for each target, or None in its place"
        )
    seeds = []
    for place, (t, gradient) in enumerate(zip(target, gradients, strict=True)):
        if gradient is None:
            gradient = vspace.ones_like(t)
        elif not tf.TensorShape(gradient.shape).is_compatible_with(t.shape):
            raise TapeError(
                f"output gradient {place} has shape {gradient.shape}, and its "
                f"target has shape {t.shape}; pass one of the target's shape"
            )
        seeds.append(gradient)
    return seeds


ACCEPTS_NONE = op_types.FUSED_NORMS | {
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
}
"""Types of ops whose gradient takes None for all outputs but the first.

None takes the place of zeros that would cost memory: a norm makes statistics besides
its result, and the second output of a cross entropy is its own gradient.
"""


class Run:
    """One walk back along a tape.

    Args:
        vspace: the space that the gradients are in.
        tape: the tape.
        stops: the tensors that the walk ends at.
        count: how many gradients of a tensor have to wait to be added up ahead of time.
        size: how many bytes they have to hold together: more than this.
        watched: the ids of tensors whose gradients are wanted as well, though the walk
            goes on from them.
        summed: is told each sum that was made ahead of time.

    Raises:
        TapeError: `count` is less than 2.
    """

    def __init__(
        self,
        vspace: VSpace,
        tape: Tape,
        stops: Sequence[Any],
        count: int = MIN_AGGREGATE_COUNT,
        size: int = MIN_AGGREGATE_BYTES,
        watched: Set[int] = frozenset(),
        summed: Callable[[Any], None] | None = None,
    ) -> None:
        require_sum(count)
        self._space, self._tape = vspace, tape
        self._stops = frozenset(map(vspace.tensor_id, stops))
        self._count, self._size = count, size
        self._watched, self._summed = watched, summed
        # The gradients of each tensor that have arrived, and their bytes.
        self._arrived: dict[int, list[Any]] = {}
        self._bytes: Counter[int] = Counter()
        self._maker: Mapping[int, int] = {}
        self._entries: dict[int, TapeEntry] = {}
        self._totals: dict[int, Any] = {}
        self._zeros: tuple[Any, Any] = (None, None)

    def go_back(
        self, target: Sequence[Any], output_gradients: Sequence[Any] | None
    ) -> None:
        """Walk from the targets to the stops, and use up the tape.

        A mistake of the caller is found before the tape is touched.
        """
        ids = [self._space.tensor_id(t) for t in target]
        seed_gradients = _seeds(self._space, target, output_gradients)
        self._maker, entries = self._tape.export()
        self._entries, uses = self._needed(ids, entries)
        # What the targets do not depend on is let go now.
        del entries
        seed_gradients.reverse()
        for number in ids:
            self._hand(number, seed_gradients.pop())
        waiting = self._waiting(uses)
        ready = [op for op in self._entries if not waiting[op]]
        # The last in is the first out: what was just made is used up first.
        while ready:
            for number in self._step(self._entries.pop(ready.pop())):
                uses[number] -= 1
                op = self._maker.get(number)
                if uses[number] or number in self._stops or op not in self._entries:
                    continue
                waiting[op] -= 1
                if not waiting[op]:
                    ready.append(op)

    def gradient(self, tensor: Any) -> Any:
        """Return the gradient of a stop or watched tensor, always the same, or None."""
        number = self._space.tensor_id(tensor)
        if number not in self._totals and number in self._stops:
            self._totals[number] = self._take(number)
        return self._totals.get(number)

    def _needed(
        self, targets: Iterable[int], entries: dict[int, TapeEntry]
    ) -> tuple[dict[int, TapeEntry], Counter[int]]:
        """Take out entries that targets depend on; count the reads of each tensor."""
        uses: Counter[int] = Counter()
        needed: dict[int, TapeEntry] = {}
        stack = list(targets)
        while stack:
            number = stack.pop()
            op = self._maker.get(number)
            if number in self._stops or op is None or op in needed:
                continue
            entry = needed[op] = entries.pop(op)
            uses.update(entry.input_ids)
            stack += entry.input_ids
        return needed, uses

    def _waiting(self, uses: Mapping[int, int]) -> Counter[int]:
        """Return for each entry how many of its outputs await gradients."""
        return Counter(
            op
            for op, entry in self._entries.items()
            for number in dict.fromkeys(entry.output_ids)
            if uses.get(number) and number not in self._stops
        )

    def _step(self, entry: TapeEntry) -> tuple[int, ...]:
        """Go back through one entry; return the ids of what it read."""
        incoming = [
            None if number in self._stops else self._take(number)
            for number in entry.output_ids
        ]
        if any(gradient is not None for gradient in incoming):
            self._complete(entry, incoming)
            made = entry.backward_function(*incoming)
            del incoming
            outgoing = list(made) if isinstance(made, list | tuple) else [made]
            del made
            if len(outgoing) != len(entry.input_ids):
                raise TapeError(
                    f"the backward function of {_named(entry)} returned "
                    f"{len(outgoing)} gradient(s) for {len(entry.input_ids)} input(s); "
                    "it has to return one for each, or None in its place"
                )
            # So that none is held here once it is added up.
            outgoing.reverse()
            for number in entry.input_ids:
                self._hand(number, outgoing.pop())
        return entry.input_ids

    def _take(self, number: int) -> Any:
        """Return the sum of the gradients of a tensor; None if none arrived."""
        gradients = self._arrived.pop(number, None)
        del self._bytes[number]
        return None if gradients is None else self._space.aggregate_fn(gradients)

    def _complete(self, entry: TapeEntry, incoming: list[Any]) -> None:
        """Put zeros where no gradient arrived and one is needed; keep watched ones.

        Where another output of the op has one, TensorFlow gives zeros, not None.
        """
        places = zip(entry.output_ids, entry.output_shape_and_dtype, strict=True)
        for place, (number, kind) in enumerate(places):
            gradient = incoming[place]
            watched = number in self._watched and number not in self._totals
            needed = not (place and entry.op_type in ACCEPTS_NONE)
            if gradient is None and kind is not None and (needed or watched):
                gradient = self._zeros_of(kind)
            if needed:
                incoming[place] = gradient
            if watched and gradient is not None:
                self._totals[number] = gradient

    def _zeros_of(self, kind: tuple[Any, Any]) -> Any:
        shape, dtype = kind
        key = _key(shape, dtype)
        if key is None:
            return self._space.zeros(shape, dtype)
        if self._zeros[0] != key:
            self._zeros = key, self._space.zeros(shape, dtype)
        return self._zeros[1]

    def _hand(self, number: int, gradient: Any) -> None:
        """Let a gradient arrive, if anything goes on from there or it is wanted."""
        goes_on = self._maker.get(number) in self._entries
        if gradient is None or not (goes_on or number in self._stops):
            return
        gradients = self._arrived.setdefault(number, [])
        gradients.append(gradient)
        self._bytes[number] += self._bytes_of(gradient)
        if len(gradients) >= self._count and self._bytes[number] > self._size:
            gradients[:] = [self._space.aggregate_fn(list(gradients))]
            self._bytes[number] = self._bytes_of(gradients[0])
            if self._summed is not None:
                self._summed(gradients[0])

    def _bytes_of(self, gradient: Any) -> int:
        return self._space.num_elements_fn(gradient) * _item_size(gradient.dtype)


def _named(entry: TapeEntry) -> str:
    name = getattr(entry.backward_function, "op_name", "")
    return f"'{name}' ({entry.op_type})" if name else f"'{entry.op_type}'"


def _key(shape: Any, dtype: Any) -> Any:
    """Return what zeros are told by; None if the shape is a tensor of a graph."""
    try:
        return tuple(shape), str(dtype)
    except (TypeError, ValueError):
        return None


@tf.autograph.experimental.do_not_convert
def imperative_grad(
    vspace: VSpace,
    tape: Tape,
    target: Sequence[Any],
    sources: Sequence[Any],
    output_gradients: Sequence[Any] | None = None,
    *,
    min_aggregate_count: int = MIN_AGGREGATE_COUNT,
    min_aggregate_bytes: int = MIN_AGGREGATE_BYTES,
) -> list[Any]:
    """Return the gradients of targets by sources, from a tape.

    How the sources were made does not count: a source stops the walk, as in
    `tf.gradients` with the sources as `stop_gradients`. A target that another target
    depends on gets its own gradient, and what flows to it from the other.

    Args:
        vspace: the space that the gradients are in.
        tape: the tape, which is empty afterwards.
        target: the tensors to differentiate.
        sources: the tensors to differentiate by.
        output_gradients: the gradient of each target, of its shape; None, there or in
            the list, means ones.
        min_aggregate_count: how many gradients of a tensor have to wait before they are
            added up ahead of time, at least 2.
        min_aggregate_bytes: how much they have to hold together: more than this.

    Returns:
        A gradient for each source; None if no target depends on it, or it is not on the
        tape.

    Raises:
        TapeError: there is no gradient for each target, or one of another shape; or a
            backward function returns a number of gradients other than that of inputs.

    Cost: linear in the entries that the targets depend on and in their inputs, and the
    backward functions.

    Source: the tape of TensorFlow's eager mode as its first releases had it in Python.

    Example:
        >>> import numpy as np
        >>> from geutil.gradients.tape import Tape, imperative_grad, numpy_vspace
        >>> x, tape = np.array(3.0), Tape()
        >>> y = np.multiply(x, x, out=np.empty(()))
        >>> tape.record("Mul", [y], [x, x], lambda g: (g * x, g * x))
        >>> [float(g) for g in imperative_grad(numpy_vspace(), tape, [y], [x])]
        [6.0]
    """
    run = Run(vspace, tape, sources, min_aggregate_count, min_aggregate_bytes)
    run.go_back(target, output_gradients)
    return [run.gradient(source) for source in sources]
