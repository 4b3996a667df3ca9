"""Reverse mode over a tape, and backward graphs that it builds.

Entries that the targets depend on are visited backwards, each once all gradients of its
outputs are known. A gradient is dropped as soon as the entry that needs it has run, and
so is the entry. Where many gradients of one tensor wait, they are summed before all
have arrived, so that only a few are held at once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TapeError
from geutil.gradients.tape.entries import (
    CapturedTensors,
    Tape,
    TapeEntry,
    VSpace,
    aggregate,
    num_elements,
    tensor_id,
    tensorflow_vspace,
)
from geutil.graph import creation, op_types, runtime, types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure

# Those of TensorFlow's own tape (kMinAggregateCount, kMinAggregateBytes in tape.h).
MIN_AGGREGATE_COUNT = 4
# TensorFlow's own bound: kMinAggregateBytes in c/eager/tape.h.
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
    for place, (t, gradient) in enumerate(zip(target, gradients, strict=True)):
        shape = t.shape if gradient is None else gradient.shape
        if not tf.TensorShape(shape).is_compatible_with(t.shape):
            raise TapeError(
                f"output gradient {place} has shape {shape}, and its "
                f"target has shape {t.shape}; pass one of the target's shape"
            )
    pairs = zip(target, gradients, strict=True)
    return [vspace.ones_like(t) if g is None else g for t, g in pairs]


# Types of ops whose gradient takes None for all outputs but the first, not zeros that
# would cost memory: a norm makes statistics besides its result, and the second output
# of a cross entropy is its own gradient.
ACCEPTS_NONE = op_types.FUSED_NORMS | {
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
}


class Run:
    """One walk back along a tape, which ends at its `stops`."""

    # Where `count` gradients of a tensor wait that hold more than `size` bytes
    # together, they are added up ahead of time, and `summed` is called with the sum.
    # The gradients of `watched` ids are wanted as well, though the walk goes on from
    # them.

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
        """Walk from the targets to the stops, and use up the tape."""
        # A mistake of the caller is found before the tape is touched.
        ids = [self._space.tensor_id(t) for t in target]
        seed_gradients = _seeds(self._space, target, output_gradients)
        self._maker, entries = self._tape.export()
        self._entries, uses = self._needed(ids, entries)
        # Entries that the targets do not depend on are let go now.
        del entries
        seed_gradients.reverse()
        for number in ids:
            self._hand(number, seed_gradients.pop())
        waiting = self._waiting(uses)
        ready = [op for op in self._entries if not waiting[op]]
        # The last in is the first out: new gradients are used up first.
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
        self, targets: Sequence[int], entries: dict[int, TapeEntry]
    ) -> tuple[dict[int, TapeEntry], Counter[int]]:
        """Take out entries that targets depend on; count the reads of each tensor."""

        def makers(numbers: Iterable[int]) -> list[int]:
            made = (n for n in numbers if n not in self._stops and n in self._maker)
            return [self._maker[n] for n in made]

        # The first target comes last: it is the first that is gone back from.
        firsts = makers(reversed(targets))
        ops = closure(firsts, lambda op: makers(entries[op].input_ids))
        needed = {op: entries.pop(op) for op in ops}
        uses = Counter(n for entry in needed.values() for n in entry.input_ids)
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
        """Go back through one entry; return the ids of its inputs."""
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
        """Put zeros where no gradient arrived and one is needed; keep watched ones."""
        # Where another output of the op has one, TensorFlow gives zeros, not None.
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
        try:
            key = tuple(shape), str(dtype)
        except (TypeError, ValueError):
            # The shape is a tensor of a graph.
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
        # Many large gradients are added up now, so that they are not all held.
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
    """Return the gradients of targets with respect to sources, from a tape.

    The origin of the sources does not matter: a source stops the walk, as in
    `tf.gradients` with the sources as `stop_gradients`. A target that another target
    depends on gets its own gradient, and that of the other.

    Args:
        vspace: the space that the gradients are in.
        tape: the tape, which is empty afterwards.
        target: the tensors to differentiate.
        sources: the tensors to differentiate by.
        output_gradients: the gradient of each target, of its shape; None, there or in
            the list, means ones.
        min_aggregate_count: the fewest waiting gradients of a tensor that are summed
            ahead of time, at least 2.
        min_aggregate_bytes: the bytes that they must exceed together.

    Returns:
        A gradient for each source; None if no target depends on it, or it is not on the
        tape.

    Raises:
        TapeError: a target has no gradient, or one of another shape; or a backward
            function does not return a gradient for each input.

    Cost: linear in the entries that the targets depend on and in their inputs, and the
    backward functions.

    Source: the Python tape of the first releases of TensorFlow's eager mode.

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


# TensorFlow's AddN adds 8 tensors in a pass, 2 to 9 in the first (aggregate_ops.cc).
_BLOCK = 8
_MOST_AT_ONCE = _BLOCK + 1


def additions(count: int) -> list[tuple[int, int]]:
    """Return the pairs in which `AddN` adds tensors; results are numbered on."""
    # It takes up to nine, then eight at a time.
    pairs: list[tuple[int, int]] = []

    def add_up(numbers: range) -> int:
        total = numbers[0]
        for number in numbers[1:]:
            pairs.append((total, number))
            total = count + len(pairs) - 1
        return total

    first = count if count <= _MOST_AT_ONCE else count % _BLOCK or _BLOCK
    first = _MOST_AT_ONCE if first == 1 else first
    total = add_up(range(first))
    for start in range(first, count, _BLOCK):
        block = add_up(range(start, start + _BLOCK))
        pairs.append((total, block))
        total = count + len(pairs) - 1
    return pairs


def add_in_pairs(tensors: Sequence[Tensor], scope: str, device: str) -> Tensor:
    """Return the sum of tensors that `AddN` would return, to the last bit."""
    # Of more than two tensors Grappler makes `AddN`, where memory is short, add to
    # zeros: a constant of the sum's size that is never freed, in an order that is left
    # to chance. Sums of two it leaves alone, with an op between them that keeps it from
    # joining them.
    parts = list(tensors)
    graph = parts[0].graph
    with creation.neutral(graph), graph.name_scope(f"{scope}/"), graph.device(device):
        for first, second in additions(len(tensors)):
            ahead = parts[first]
            barrier = tf.raw_ops.PlaceholderWithDefault(
                input=ahead, shape=ahead.shape, name="barrier"
            )
            pair = [barrier, parts[second]]
            parts.append(tf.raw_ops.AddN(inputs=pair, name="sum"))
    return parts[-1]


SCOPE = "tape"


class _Order:
    """Makes ops that are built later wait for the last sum that frees memory."""

    def __init__(self) -> None:
        self._last: Operation | None = None
        # The last sum that each gradient has waited for, by the id of its tensor.
        self._waited: dict[int, Operation] = {}

    def summed(self, total: Any) -> None:
        """Note that gradients were added up ahead of time."""
        self._last = (total.values if isinstance(total, tf.IndexedSlices) else total).op

    def waiting(self, function: Any) -> Callable[..., list[Any]]:
        """Return a backward function whose ops wait for the last sum."""

        @functools.wraps(function)
        def wait(*gradients: Any) -> list[Any]:
            last = self._last
            if last is None:
                made: list[Any] = function(*gradients)
                return made
            given = (tensor_id(g) for g in gradients if g is not None)
            # A gradient that was made after the last sum has waited for it already.
            if not any(self._waited.get(i) is last for i in given):
                gradients = tuple(_late(g, last) for g in gradients)
            made = function(*gradients)
            self._waited.update((tensor_id(g), last) for g in made if g is not None)
            return made

        return wait


def _late(gradient: Any, last: Operation) -> Any:
    """Return a gradient that comes after an op, where it is a tensor of numbers."""
    if not isinstance(gradient, tf.Tensor) or gradient.dtype == tf.variant:
        return gradient
    late = creation.make_stand_in(gradient, SCOPE, "late")
    creation.add_control_edges(late.op, [last])
    return late


# The ways in which TensorFlow's own engine works, and the sign that it does so.
_FOREIGN = {"aggregation_method": (None, 0), "gate_gradients": (False, None, 0)}
# A tape builds the gradient ops of an op on its device, whether colocated or not.
_KNOWN = frozenset(
    ("colocate_gradients_with_ops", "name", "stop_gradients", "unconnected_gradients")
)


@dataclass(frozen=True)
class TapeEngine:
    """The rule by which a tape sums gradients ahead of time; see `imperative_grad`.

    Attributes:
        min_aggregate_count: the fewest waiting gradients of a tensor that are summed.
        min_aggregate_bytes: the bytes that they must exceed together.

    Raises:
        TapeError: `min_aggregate_count` is less than 2.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients
        >>> from geutil.gradients.tape import TapeEngine
        >>> @tf.function
        ... def slope(x):
        ...     y = tf.add_n([tf.square(x * i) for i in (1.0, 2.0, 3.0)])
        ...     return gradients(y, x, checkpoints=None, engine=TapeEngine(2, 0))[0]
        >>> float(slope(tf.constant(1.0)))
        28.0
    """

    min_aggregate_count: int = MIN_AGGREGATE_COUNT
    min_aggregate_bytes: int = MIN_AGGREGATE_BYTES

    def __post_init__(self) -> None:
        require_sum(self.min_aggregate_count)


def tape_gradients(
    graph: Graph,
    ys: Sequence[Tensor],
    xs: Sequence[Any],
    grad_ys: Sequence[Any],
    options: Mapping[str, Any],
    engine: TapeEngine,
) -> list[Any]:
    """Return the gradients of `tf.gradients`, by ops that a tape builds."""
    # Where gradients of a tensor are added up ahead of time, later entries of the tape
    # wait for the sum: else all would be started at once, and nothing would be saved.
    _check(options)
    captured = CapturedTensors()
    sources = [captured.source(x) for x in xs]
    source_tensors = [t for t in sources if t is not None]
    order = _Order()
    tape = Tape.from_graph(ys, source_tensors, order.waiting)
    given = options.get("stop_gradients")
    given_stops = map(captured.source, () if given is None else types.as_list(given))
    stops: list[Any] = []
    for t in (t for t in given_stops if t is not None):
        # TensorFlow stops at whole ops.
        stops += t.op.outputs if hasattr(t, "graph") else [t]
    stopped = frozenset(map(tensor_id, stops))
    # One that others are made of is passed on the way.
    passed = {tensor_id(t) for t in source_tensors if t in tape} - stopped
    ends = [*stops, *(t for t in source_tensors if tensor_id(t) not in passed)]
    count, size = engine.min_aggregate_count, engine.min_aggregate_bytes

    def add(gradients: Sequence[Any]) -> Any:
        total = sum(num_elements(g) * g.dtype.size for g in gradients)
        dense = all(isinstance(g, tf.Tensor) for g in gradients)
        if total <= size or len(gradients) < 3 or not dense:
            return aggregate(gradients)
        return add_in_pairs(gradients, SCOPE, gradients[-1].op.device)

    space = tensorflow_vspace()._replace(aggregate_fn=add)
    run = Run(space, tape, ends, count, size, passed, order.summed)
    unconnected = options.get("unconnected_gradients", tf.UnconnectedGradients.NONE)
    as_zeros = tf.UnconnectedGradients(unconnected) is tf.UnconnectedGradients.ZERO
    with graph.as_default(), tf.name_scope(options.get("name") or "gradients"):
        run.go_back(ys, runtime.default_gradients(ys, grad_ys))
        gradients = [None if t is None else run.gradient(t) for t in sources]
        return [
            tf.zeros_like(x) if gradient is None and as_zeros else gradient
            for gradient, x in zip(gradients, xs, strict=True)
        ]


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that `tf.gradients` has not, or a tape."""
    unknown = sorted(options.keys() - _KNOWN - _FOREIGN.keys())
    if unknown:
        raise ArgumentTypeError(
            f"tf.gradients has no argument {unknown[0]!r}; it has "
            f"{', '.join(sorted(_KNOWN | _FOREIGN.keys()))}"
        )
    for name, usual in _FOREIGN.items():
        if options.get(name, usual[0]) not in usual:
            raise ArgumentTypeError(
                f"{name} is for TensorFlow's own engine; leave it out, or pass "
                'engine="tensorflow"'
            )


def engine_of(engine: Any) -> TapeEngine:
    """Return how a tape works, given an engine or its name."""
    if engine == "tape":
        return TapeEngine()
    if not isinstance(engine, TapeEngine):
        raise ArgumentTypeError(
            f"there is no engine {engine!r}; pass 'tensorflow', 'tape' or a "
            "geutil.gradients.tape.TapeEngine"
        )
    return engine
