"""Reverse mode over a tape.

One walk back, from seeds, with gradients that are freed once used up.

Entries that the targets depend on are gone through backwards, each once all gradients
of its outputs are there. A gradient is dropped as soon as the entry that needs it has
run, and so is the entry. Where many gradients of one tensor wait, they are added up
before all have come, so that no more than a few are held at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TapeError
from geutil.gradients.tape.entries import Tape, TapeEntry
from geutil.gradients.tape.spaces import VSpace

MIN_AGGREGATE_COUNT = 4
MIN_AGGREGATE_BYTES = 128 * 1024 * 1024


class Pending:
    """The gradients of tensors, added up ahead of time where they are many.

    Args:
        vspace: the space that they are in.
        count: how many gradients of a tensor have to wait for that.
        size: how many bytes they have to hold together: more than this.
        summed: is told each sum that was made ahead of time.

    Raises:
        TapeError: `count` is less than 2.
    """

    def __init__(
        self,
        vspace: VSpace,
        count: int = MIN_AGGREGATE_COUNT,
        size: int = MIN_AGGREGATE_BYTES,
        summed: Callable[[Any], None] | None = None,
    ) -> None:
        require_sum(count)
        self._space = vspace
        self._count, self._size = count, size
        self._summed = summed
        self._arrived: dict[int, _Arrived] = {}

    def add(self, number: int, gradient: Any) -> None:
        """Let a gradient of the tensor of that id arrive."""
        arrived = self._arrived.setdefault(number, _Arrived())
        arrived.gradients.append(gradient)
        arrived.size += self._bytes(gradient)
        if len(arrived.gradients) >= self._count and arrived.size > self._size:
            total = self._space.aggregate_fn(arrived.gradients)
            self._arrived[number] = _Arrived([total], self._bytes(total))
            if self._summed is not None:
                self._summed(total)

    def take(self, number: int) -> Any:
        """Hand over the sum of the gradients of a tensor; None if none arrived."""
        arrived = self._arrived.pop(number, None)
        return None if arrived is None else self._space.aggregate_fn(arrived.gradients)

    def _bytes(self, gradient: Any) -> int:
        return self._space.num_elements_fn(gradient) * _item_size(gradient.dtype)


def require_sum(count: Any) -> None:
    """Raise an error unless that many gradients can be added up."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ArgumentTypeError(f"min_aggregate_count is a number, got {count!r}")
    if count < 2:
        raise TapeError(
            f"min_aggregate_count is {count}; pass 2 or more, since one gradient is no "
            "sum"
        )


@dataclass
class _Arrived:
    """Gradients of one tensor, and the bytes that they hold together."""

    gradients: list[Any] = field(default_factory=list)
    size: int = 0


def _item_size(dtype: Any) -> int:
    """Return the bytes of an element."""
    if getattr(dtype, "name", "") == "variant":
        # A list, of unknown length.
        return 1
    return int(getattr(dtype, "size", 0) or np.dtype(dtype).itemsize)


def seeds(
    vspace: VSpace, target: Sequence[Any], output_gradients: Sequence[Any] | None
) -> list[Any]:
    """Return the gradient of each target: that which is given, or ones.

    Args:
        vspace: the space that they are in.
        target: the targets.
        output_gradients: their gradients; None, there or in the list, means ones.

    Raises:
        TapeError: there is no gradient for each target, or one of another shape.
    """
    gradients = [None] * len(target) if output_gradients is None else output_gradients
    if len(gradients) != len(target):
        raise TapeError(
            f"there are {len(target)} targets and {len(gradients)} output gradients; "
            "pass one for each target, or None in its place"
        )
    for place, (t, gradient) in enumerate(zip(target, gradients, strict=True)):
        if gradient is not None and not _fits(gradient, t):
            raise TapeError(
                f"output gradient {place} has shape {gradient.shape}, and its "
                f"target has shape {t.shape}; pass one of the target's shape"
            )
    return [
        vspace.ones_like(t) if gradient is None else gradient
        for t, gradient in zip(target, gradients, strict=True)
    ]


def _fits(gradient: Any, tensor: Any) -> bool:
    """Tell whether shapes agree, as far as they are known."""
    shape, other = gradient.shape, tensor.shape
    if hasattr(shape, "is_compatible_with"):
        return bool(shape.is_compatible_with(other))
    return tuple(shape) == tuple(other)


_NORM = frozenset((1, 2, 3, 4, 5))

ACCEPTS_NONE: Mapping[str, frozenset[int]] = {
    "FusedBatchNorm": frozenset((1, 2, 3, 4)),
    "FusedBatchNormV2": frozenset((1, 2, 3, 4)),
    "FusedBatchNormV3": _NORM,
    "SoftmaxCrossEntropyWithLogits": frozenset((1,)),
    "SparseSoftmaxCrossEntropyWithLogits": frozenset((1,)),
}
"""By type of op the outputs whose gradients may be None.

They take the place of zeros that would cost memory: what the norms make besides their
result is statistics, and the second output of a cross entropy is its own gradient.
"""


class Run:
    """One walk back along a tape.

    Args:
        vspace: the space that the gradients are in.
        tape: the tape.
        stops: the tensors that the walk ends at.
        pending: what gradients wait in.
        watched: the ids of tensors whose gradients are wanted as well, though the walk
            goes on from them.
    """

    def __init__(
        self,
        vspace: VSpace,
        tape: Tape,
        stops: Sequence[Any],
        pending: Pending,
        watched: Set[int] = frozenset(),
    ) -> None:
        self._space, self._tape, self._pending = vspace, tape, pending
        self._stops = frozenset(vspace.tensor_id(t) for t in stops)
        self._watched = watched
        self._maker: Mapping[int, int] = {}
        self._entries: dict[int, TapeEntry] = {}
        self._totals: dict[int, Any] = {}
        self._zeros: tuple[Any, Any] = (None, None)

    def go_back(
        self, target: Sequence[Any], output_gradients: Sequence[Any] | None
    ) -> None:
        """Walk from the targets to the stops, and use up the tape.

        What the caller got wrong is found before the tape is touched.
        """
        ids = [self._space.tensor_id(t) for t in target]
        seed_gradients = seeds(self._space, target, output_gradients)
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
        """Return the gradient of a stop or watched tensor; None if it has none.

        Of the same tensor it is the same one each time.
        """
        number = self._space.tensor_id(tensor)
        if number not in self._totals and number in self._stops:
            self._totals[number] = self._pending.take(number)
        return self._totals.get(number)

    def _needed(
        self, targets: Iterable[int], entries: dict[int, TapeEntry]
    ) -> tuple[dict[int, TapeEntry], Counter[int]]:
        """Return the entries that targets depend on, and how often each tensor is read.

        They are taken out of `entries`.
        """
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
        incoming = [self._take(number) for number in entry.output_ids]
        if any(gradient is not None for gradient in incoming):
            self._fill(entry, incoming)
            self._watch(entry, incoming)
            outgoing = _listed(entry.backward_function(*incoming))
            del incoming
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
        """Return the whole gradient of an output; None if none arrived."""
        if number in self._stops:
            return None
        return self._pending.take(number)

    def _fill(self, entry: TapeEntry, incoming: list[Any]) -> None:
        """Put zeros where no gradient arrived and one is needed."""
        accepted = ACCEPTS_NONE.get(entry.op_type, frozenset())
        for place, kind in enumerate(entry.output_shape_and_dtype):
            if incoming[place] is None and kind is not None and place not in accepted:
                incoming[place] = self._zeros_of(kind)

    def _watch(self, entry: TapeEntry, incoming: Sequence[Any]) -> None:
        """Keep the gradients of outputs that are wanted as well.

        Where another output of the op has one, TensorFlow gives zeros, not None.
        """
        for place, number in enumerate(entry.output_ids):
            kind = entry.output_shape_and_dtype[place]
            if number not in self._watched or number in self._totals:
                continue
            if incoming[place] is not None:
                self._totals[number] = incoming[place]
            elif kind is not None:
                self._totals[number] = self._zeros_of(kind)

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
        if gradient is not None and (goes_on or number in self._stops):
            self._pending.add(number, gradient)


def _listed(gradients: Any) -> list[Any]:
    if isinstance(gradients, list | tuple):
        return list(gradients)
    return [gradients]


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

    What the sources were made of does not count: a source stops the walk, as in
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
    pending = Pending(vspace, min_aggregate_count, min_aggregate_bytes)
    run = Run(vspace, tape, sources, pending)
    run.go_back(target, output_gradients)
    return [run.gradient(source) for source in sources]
