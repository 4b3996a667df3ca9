"""One walk back along a tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from geutil.errors import TapeError
from geutil.gradients.tape.accepted import ACCEPTS_NONE
from geutil.gradients.tape.entries import Tape, TapeEntry
from geutil.gradients.tape.pending import Pending
from geutil.gradients.tape.seeds import seeds
from geutil.gradients.tape.spaces import VSpace


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
        given = seeds(self._space, target, output_gradients)
        self._maker, entries = self._tape.export()
        self._entries, uses = self._needed(ids, entries)
        # What the targets do not depend on is let go now.
        del entries
        given.reverse()
        for number in ids:
            self._hand(number, given.pop())
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
        gradient = self._pending.take(number)
        if number in self._watched and gradient is not None:
            self._totals[number] = gradient
        return gradient

    def _fill(self, entry: TapeEntry, incoming: list[Any]) -> None:
        """Put zeros where no gradient arrived and one is needed."""
        accepted = ACCEPTS_NONE.get(entry.op_type, frozenset())
        for place, kind in enumerate(entry.output_shape_and_dtype):
            if incoming[place] is None and kind is not None and place not in accepted:
                incoming[place] = self._zeros_of(kind)

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
