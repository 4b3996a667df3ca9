"""Backward graphs built by a tape, with sums that free memory in time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.tape import engine as reverse
from geutil.gradients.tape.engine import MIN_AGGREGATE_BYTES, MIN_AGGREGATE_COUNT
from geutil.gradients.tape.entries import CapturedTensors, Tape, tensor_id
from geutil.graph import creation, runtime, types
from geutil.graph.types import Graph, Operation, Tensor

_MOST_AT_ONCE = 9
_BLOCK = 8


def additions(count: int) -> list[tuple[int, int]]:
    """Return the pairs in which `AddN` adds: it takes up to nine, then eight at a time.

    The `count` tensors are numbered from 0, and the results of pairs from `count` on.

    Example:
        >>> additions(4)
        [(0, 1), (4, 2), (5, 3)]
        >>> additions(11)[:3]
        [(0, 1), (11, 2), (3, 4)]
        >>> additions(11)[-1]
        (12, 19)
    """
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
    """Return the sum of tensors that `AddN` would return, to the last bit.

    Of more than two tensors Grappler makes `AddN`, where memory is short, add to zeros:
    a constant of the sum's size that is never freed, in an order that is left to
    chance. Sums of two it leaves alone, with something between them that keeps it from
    joining them.
    """
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


def _adding_in_pairs(size: int) -> Callable[[Sequence[Any]], Any]:
    """Return a function that adds up gradients, dense ones of more bytes in pairs."""

    def add(gradients: Sequence[Any]) -> Any:
        total = sum(reverse.num_elements(g) * g.dtype.size for g in gradients)
        dense = all(isinstance(g, tf.Tensor) for g in gradients)
        if total <= size or len(gradients) < 3 or not dense:
            return reverse.aggregate(gradients)
        return add_in_pairs(gradients, SCOPE, gradients[-1].op.device)

    return add


class _Order:
    """Lets what is built later wait for the last sum that frees memory."""

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
            results: list[Any] = function(*self._delayed(gradients))
            if self._last is not None:
                made = (tensor_id(g) for g in results if g is not None)
                self._waited.update(dict.fromkeys(made, self._last))
            return results

        return wait

    def _delayed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients that come after the last sum."""
        given = (tensor_id(g) for g in gradients if g is not None)
        if self._last is None or any(self._waited.get(i) is self._last for i in given):
            return list(gradients)
        return [self._late(g) if isinstance(g, tf.Tensor) else g for g in gradients]

    def _late(self, gradient: Tensor) -> Tensor:
        if self._last is None or gradient.dtype == tf.variant:
            return gradient
        late = creation.make_stand_in(gradient, SCOPE, "late")
        creation.add_control_edges(late.op, [self._last])
        return late


# How TensorFlow's own engine works, and what says that it works as usual.
_FOREIGN = {"aggregation_method": (None, 0), "gate_gradients": (False, None, 0)}
# A tape builds what an op needs on the op's device, whether colocated or not.
_KNOWN = frozenset(
    ("colocate_gradients_with_ops", "name", "stop_gradients", "unconnected_gradients")
)


@dataclass(frozen=True)
class TapeEngine:
    """How a tape adds up gradients ahead of time; see `imperative_grad`.

    Attributes:
        min_aggregate_count: how many gradients of a tensor have to wait for that.
        min_aggregate_bytes: how many bytes they have to hold together: more than this.

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
        reverse.require_sum(self.min_aggregate_count)


def tape_gradients(
    graph: Graph,
    ys: Sequence[Tensor],
    xs: Sequence[Any],
    grad_ys: Sequence[Any],
    options: Mapping[str, Any],
    engine: TapeEngine,
) -> list[Any]:
    """Return the gradients of `tf.gradients`, by ops that a tape builds.

    Where gradients of a tensor are added up ahead of time, what comes after in the
    order of the tape waits for the sum: else all would be started at once, and nothing
    would be saved.

    Raises:
        ArgumentTypeError: an option is for TensorFlow's own engine.
        TapeError: an op has no gradient, or is in a loop or conditional of version 1.
    """
    _check(options)
    captured = CapturedTensors()
    sources = [captured.source(x) for x in xs]
    source_tensors = [t for t in sources if t is not None]
    order = _Order()
    tape = Tape.from_graph(ys, source_tensors, order.waiting)
    stops: list[Any] = []
    given = options.get("stop_gradients")
    for x in [] if given is None else types.as_list(given):
        t = captured.source(x)
        if t is not None:
            # TensorFlow stops at whole ops.
            stops += t.op.outputs if hasattr(t, "graph") else [t]
    stopped = frozenset(map(tensor_id, stops))
    # One that others are made of is passed on the way.
    passed = {tensor_id(t) for t in source_tensors if t in tape} - stopped
    ends = [*stops, *(t for t in source_tensors if tensor_id(t) not in passed)]
    count, size = engine.min_aggregate_count, engine.min_aggregate_bytes
    space = reverse.tensorflow_vspace()._replace(aggregate_fn=_adding_in_pairs(size))
    run = reverse.Run(space, tape, ends, count, size, passed, order.summed)
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
    if isinstance(engine, TapeEngine):
        return engine
    if engine == "tape":
        return TapeEngine()
    raise ArgumentTypeError(
        f"there is no engine {engine!r}; pass 'tensorflow', 'tape' or a "
        "geutil.gradients.tape.TapeEngine"
    )
