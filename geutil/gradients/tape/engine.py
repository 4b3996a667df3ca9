"""Reverse mode over a tape.

Entries that the targets depend on are gone through backwards, each once all gradients
of its outputs are there. A gradient is dropped as soon as the entry that needs it has
run, and so is the entry. Where many gradients of one tensor wait, they are added up
before all have come, so that no more than a few are held at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from geutil.errors import TapeError
from geutil.gradients.tape.accepted import ACCEPTS_NONE
from geutil.gradients.tape.entries import Tape, TapeEntry
from geutil.gradients.tape.spaces import VSpace

MIN_AGGREGATE_COUNT = 4
MIN_AGGREGATE_BYTES = 128 * 1024 * 1024

Watch = Callable[[int, Any], None]


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
    run = Run(vspace, tape, sources, min_aggregate_count, min_aggregate_bytes)
    return run.gradients(target, output_gradients)


class Run:
    """One walk back along a tape.

    Args:
        vspace: the space that the gradients are in.
        tape: the tape.
        sources: the tensors to differentiate by.
        min_aggregate_count: see `imperative_grad`.
        min_aggregate_bytes: see there.
        watch: is told the id and the gradient of each tensor that a gradient arrived
            at, but for the sources, before it goes on.
        summed: is told each sum that was made ahead of time.
    """

    def __init__(
        self,
        vspace: VSpace,
        tape: Tape,
        sources: Sequence[Any],
        min_aggregate_count: int = MIN_AGGREGATE_COUNT,
        min_aggregate_bytes: int = MIN_AGGREGATE_BYTES,
        watch: Watch | None = None,
        summed: Callable[[Any], None] | None = None,
    ) -> None:
        if min_aggregate_count < 2:
            raise TapeError(
                f"min_aggregate_count is {min_aggregate_count}; pass 2 or more, since "
                "one gradient is no sum"
            )
        self._space = vspace
        self._sources = [vspace.tensor_id(t) for t in sources]
        self._count, self._bytes = min_aggregate_count, min_aggregate_bytes
        self._watch, self._summed = watch, summed
        self._maker, self._entries = tape.export()
        # The gradients of tensors that have arrived, by id.
        self._arrived: dict[int, list[Any]] = {}
        self._zeros: tuple[Any, Any] = (None, None)

    def gradients(
        self, target: Sequence[Any], output_gradients: Sequence[Any] | None
    ) -> list[Any]:
        """Return the gradients of targets by the sources."""
        ids = [self._space.tensor_id(t) for t in target]
        for number, seed in zip(
            ids, self._seeds(target, output_gradients), strict=True
        ):
            self._arrived.setdefault(number, []).append(seed)
        stops = frozenset(self._sources)
        self._entries, uses = self._needed(ids, stops)
        waiting = self._waiting(uses, stops)
        ready = [op for op in self._entries if not waiting[op]]
        # The last in is the first out: what was just made is used up first.
        while ready:
            entry = self._entries.pop(ready.pop())
            for number in self._step(entry, stops):
                uses[number] -= 1
                op = self._maker.get(number)
                if uses[number] or number in stops or op not in self._entries:
                    continue
                waiting[op] -= 1
                if not waiting[op]:
                    ready.append(op)
            del entry
        return [self._total(self._arrived.get(number)) for number in self._sources]

    def _seeds(
        self, target: Sequence[Any], output_gradients: Sequence[Any] | None
    ) -> Iterable[Any]:
        given = [None] * len(target) if output_gradients is None else output_gradients
        if len(given) != len(target):
            raise TapeError(
                f"there are {len(target)} targets and {len(given)} output gradients; "
                "pass one for each target, or None in its place"
            )
        for place, (t, gradient) in enumerate(zip(target, given, strict=True)):
            if gradient is not None and not _fits(gradient, t):
                raise TapeError(
                    f"output gradient {place} has shape {gradient.shape}, and its "
                    f"target has shape {t.shape}; pass one of the target's shape"
                )
        return [
            self._space.ones_like(t) if gradient is None else gradient
            for t, gradient in zip(target, given, strict=True)
        ]

    def _needed(
        self, targets: Iterable[int], stops: frozenset[int]
    ) -> tuple[dict[int, TapeEntry], Counter[int]]:
        """Return the entries that targets depend on, and how often each tensor is read.

        What they do not depend on is dropped.
        """
        uses: Counter[int] = Counter()
        needed: dict[int, TapeEntry] = {}
        stack = list(targets)
        while stack:
            number = stack.pop()
            op = self._maker.get(number)
            if number in stops or op is None or op in needed:
                continue
            entry = needed[op] = self._entries.pop(op)
            uses.update(entry.input_ids)
            stack += entry.input_ids
        return needed, uses

    def _waiting(self, uses: Mapping[int, int], stops: frozenset[int]) -> Counter[int]:
        """Return for each entry how many of its outputs await gradients."""
        return Counter(
            op
            for op, entry in self._entries.items()
            for number in dict.fromkeys(entry.output_ids)
            if uses.get(number) and number not in stops
        )

    def _step(self, entry: TapeEntry, stops: frozenset[int]) -> tuple[int, ...]:
        """Go back through one entry; return the ids of what it read."""
        incoming = [self._take(number, stops) for number in entry.output_ids]
        if any(gradient is not None for gradient in incoming):
            self._filled(entry, incoming)
            outgoing = _listed(entry.backward_function(*incoming))
            del incoming
            if len(outgoing) != len(entry.input_ids):
                raise TapeError(
                    f"the backward function of {_named(entry)} returned "
                    f"{len(outgoing)} gradient(s) for {len(entry.input_ids)} input(s); "
                    "it has to return one for each, or None in its place"
                )
            for number, gradient in zip(entry.input_ids, outgoing, strict=True):
                if gradient is not None:
                    self._hand(number, gradient, stops)
        return entry.input_ids

    def _take(self, number: int, stops: frozenset[int]) -> Any:
        """Return the whole gradient of an output; None if none arrived."""
        if number in stops:
            return None
        gradient = self._total(self._arrived.pop(number, None))
        if self._watch is not None and gradient is not None:
            self._watch(number, gradient)
        return gradient

    def _filled(self, entry: TapeEntry, incoming: list[Any]) -> None:
        """Put zeros where no gradient arrived and one is needed."""
        accepted = ACCEPTS_NONE.get(entry.op_type, frozenset())
        for place, kind in enumerate(entry.output_shape_and_dtype):
            if incoming[place] is None and kind is not None and place not in accepted:
                incoming[place] = self._zeros_of(kind)

    def _zeros_of(self, kind: tuple[Any, Any]) -> Any:
        shape, dtype = kind
        key = _key(shape, dtype)
        if key is None or self._zeros[0] != key:
            self._zeros = key, self._space.zeros(shape, dtype)
        return self._zeros[1]

    def _hand(self, number: int, gradient: Any, stops: frozenset[int]) -> None:
        """Let a gradient arrive, and add up those that are there if they are many."""
        if number not in stops and self._maker.get(number) not in self._entries:
            # Nothing goes on from there.
            return
        arrived = self._arrived.setdefault(number, [])
        arrived.append(gradient)
        if len(arrived) >= self._count and self._held(arrived) > self._bytes:
            total = self._space.aggregate_fn(arrived)
            self._arrived[number] = [total]
            if self._summed is not None:
                self._summed(total)

    def _held(self, gradients: Iterable[Any]) -> int:
        return sum(self._space.num_elements_fn(g) * _size(g.dtype) for g in gradients)

    def _total(self, gradients: Sequence[Any] | None) -> Any:
        return self._space.aggregate_fn(gradients) if gradients else None


def _listed(gradients: Any) -> list[Any]:
    if isinstance(gradients, list | tuple):
        return list(gradients)
    return [gradients]


def _named(entry: TapeEntry) -> str:
    name = getattr(entry.backward_function, "op_name", "")
    return f"'{name}' ({entry.op_type})" if name else f"'{entry.op_type}'"


def _fits(gradient: Any, tensor: Any) -> bool:
    """Tell whether shapes agree, as far as they are known."""
    shape, other = gradient.shape, tensor.shape
    if hasattr(shape, "is_compatible_with"):
        return bool(shape.is_compatible_with(other))
    return tuple(shape) == tuple(other)


def _size(dtype: Any) -> int:
    """Return the bytes of an element."""
    return int(getattr(dtype, "size", 0) or np.dtype(dtype).itemsize)


def _key(shape: Any, dtype: Any) -> Any:
    """Return what zeros are told by; None if the shape is a tensor of a graph."""
    try:
        return tuple(shape), str(dtype)
    except (TypeError, ValueError):
        return None
