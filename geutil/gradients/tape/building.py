"""Backward graphs.

Built by a tape in place of TensorFlow's, with sums that free memory in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.tape import spaces
from geutil.gradients.tape.engine import (
    MIN_AGGREGATE_BYTES,
    MIN_AGGREGATE_COUNT,
    Pending,
    Run,
    require_sum,
)
from geutil.gradients.tape.entries import Tape
from geutil.gradients.tape.spaces import CapturedTensors
from geutil.graph import creation, runtime
from geutil.graph.types import Graph, Operation, Tensor

_MOST_AT_ONCE = 9
_BLOCK = 8


def additions(count: int) -> list[tuple[int, int]]:
    """Return in what pairs `AddN` adds: it takes up to nine, then eight at a time.

    Args:
        count: how many tensors are added. They are numbered from 0, and the results of
            the pairs from `count` on.

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

    Args:
        tensors: the tensors, of one graph.
        scope: the name scope of the new ops.
        device: their device.

    Cost: linear in the tensors.
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


def adding_in_pairs(size: int) -> Callable[[Sequence[Any]], Any]:
    """Return a function that adds up gradients, dense ones of more bytes in pairs.

    Args:
        size: that many bytes.
    """

    def add(gradients: Sequence[Any]) -> Any:
        total_bytes = sum(spaces.num_elements(g) * g.dtype.size for g in gradients)
        dense = all(isinstance(g, tf.Tensor) for g in gradients)
        if total_bytes <= size or len(gradients) < 3 or not dense:
            return spaces.aggregate(gradients)
        return add_in_pairs(gradients, SCOPE, gradients[-1].op.device)

    return add


class Order:
    """Lets what is built later wait for sums that free memory.

    Attributes:
        last: the last such sum.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.last: Operation | None = None
        self.count = 0
        # How many sums each gradient has waited for, by the id of its tensor.
        self._waited: dict[int, int] = {}

    def summed(self, total: Any) -> None:
        """Note that gradients were added up ahead of time."""
        values = total.values if isinstance(total, tf.IndexedSlices) else total
        self.last = values.op
        self.count += 1

    def delayed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients that come after the last sum."""
        if self.last is None or self._has_waited(gradients):
            return list(gradients)
        return [self._late(g) if isinstance(g, tf.Tensor) else g for g in gradients]

    def note(self, gradients: Sequence[Any]) -> None:
        """Note that gradients were made of what came after the last sum."""
        if self.last is not None:
            for gradient in gradients:
                if gradient is not None:
                    self._waited[spaces.tensor_id(gradient)] = self.count

    def _has_waited(self, gradients: Sequence[Any]) -> bool:
        return any(
            self._waited.get(spaces.tensor_id(g), 0) == self.count
            for g in gradients
            if g is not None
        )

    def _late(self, gradient: Tensor) -> Tensor:
        if self.last is None or gradient.dtype == tf.variant:
            return gradient
        late = creation.make_stand_in(gradient, SCOPE, "late")
        creation.add_control_edges(late.op, [self.last])
        return late


class Waiting:
    """A backward function whose ops wait for the last sum."""

    def __init__(self, function: Any, order: Order) -> None:
        self.op_name = function.op_name
        self._function = function
        self._order = order

    def __call__(self, *gradients: Any) -> list[Any]:
        """Return the gradients of the inputs, which come after the last sum."""
        results: list[Any] = self._function(*self._order.delayed(gradients))
        self._order.note(results)
        return results


# How TensorFlow's own engine works, and what says that it works as usual.
_FOREIGN = {"aggregation_method": (None, 0), "gate_gradients": (False, None, 0)}
# A tape builds what an op needs on the op's device, whether colocated or not.
_KNOWN = frozenset(
    (
        "colocate_gradients_with_ops",
        "name",
        "stop_gradients",
        "unconnected_gradients",
    )
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
        require_sum(self.min_aggregate_count)


def tape_gradients(
    graph: Graph,
    ys: Sequence[Tensor],
    xs: Sequence[Any],
    grad_ys: Sequence[Any],
    options: Mapping[str, Any],
    engine: TapeEngine,
) -> list[Any]:
    """Return what `tf.gradients` does, by ops that a tape builds.

    Where gradients of a tensor are added up ahead of time, what comes after in the
    order of the tape waits for the sum: else all would be started at once, and nothing
    would be saved.

    Args:
        graph: the graph of `ys`.
        ys: tensors.
        xs: tensors and variables.
        grad_ys: the gradient of each y, or None.
        options: further arguments of `tf.gradients`.
        engine: when gradients are added up ahead of time.

    Raises:
        ArgumentTypeError: an option is for TensorFlow's own engine.
        TapeError: an op has no gradient, or is in a loop or conditional of version 1.

    Cost: linear in ops and edges, and the gradient functions.
    """
    _check(options)
    captured = CapturedTensors()
    sources = [captured.source(x) for x in xs]
    source_tensors = [t for t in sources if t is not None]
    order = Order()
    tape = Tape.from_graph(
        ys, source_tensors, lambda function: Waiting(function, order)
    )
    stops = _siblings(captured.source(x) for x in _listed(options, "stop_gradients"))
    stopped = frozenset(map(spaces.tensor_id, stops))
    # One that others are made of is passed on the way.
    passed = {spaces.tensor_id(t) for t in source_tensors if t in tape} - stopped
    ends = [*stops, *(t for t in source_tensors if spaces.tensor_id(t) not in passed)]
    size = engine.min_aggregate_bytes
    space = spaces.tensorflow_vspace()._replace(aggregate_fn=adding_in_pairs(size))
    pending = Pending(space, engine.min_aggregate_count, size, order.summed)
    run = Run(space, tape, ends, pending, passed)
    with graph.as_default(), tf.name_scope(options.get("name") or "gradients"):
        run.go_back(ys, runtime.default_gradients(ys, grad_ys))
        gradients = [None if t is None else run.gradient(t) for t in sources]
        return _connected(gradients, xs, options)


def _siblings(tensors: Iterable[Any]) -> list[Any]:
    """Return all outputs of the ops of tensors: TensorFlow stops at whole ops."""
    return [
        output
        for t in tensors
        if t is not None
        for output in (t.op.outputs if hasattr(t, "graph") else (t,))
    ]


def _check(options: Mapping[str, Any]) -> None:
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


def _listed(options: Mapping[str, Any], name: str) -> list[Any]:
    tensors = options.get(name)
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _connected(
    gradients: list[Any], xs: Sequence[Any], options: Mapping[str, Any]
) -> list[Any]:
    """Return zeros for what is not connected, if the caller asks for that."""
    unconnected_gradients = options.get(
        "unconnected_gradients", tf.UnconnectedGradients.NONE
    )
    if tf.UnconnectedGradients(unconnected_gradients) is tf.UnconnectedGradients.NONE:
        return gradients
    return [
        tf.zeros_like(x) if gradient is None else gradient
        for gradient, x in zip(gradients, xs, strict=True)
    ]


def engine_of(engine: Any) -> TapeEngine:
    """Return how a tape works, as an engine or as its name.

    Raises:
        ArgumentTypeError: there is no such engine.
    """
    if isinstance(engine, TapeEngine):
        return engine
    if engine == "tape":
        return TapeEngine()
    raise ArgumentTypeError(
        f"there is no engine {engine!r}; pass 'tensorflow', 'tape' or a "
        "geutil.gradients.tape.TapeEngine"
    )
