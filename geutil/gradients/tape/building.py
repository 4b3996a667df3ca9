"""Backward graphs that a tape builds, in place of TensorFlow's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.tape.captured import Captured
from geutil.gradients.tape.entries import Tape
from geutil.gradients.tape.identifiers import tensor_id
from geutil.gradients.tape.ordering import Order, Waiting, adding_in_pairs
from geutil.gradients.tape.pending import (
    MIN_AGGREGATE_BYTES,
    MIN_AGGREGATE_COUNT,
    Pending,
    require_sum,
)
from geutil.gradients.tape.running import Run
from geutil.gradients.tape.tensors import tensorflow_vspace
from geutil.graph.kinds import Graph, Tensor
from geutil.graph.plain_gradients import default_gradients

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
    captured = Captured()
    sources = [captured.source(x) for x in xs]
    known = [t for t in sources if t is not None]
    order = Order()
    tape = Tape.from_graph(ys, known, lambda function: Waiting(function, order))
    stops = _siblings(captured.source(x) for x in _listed(options, "stop_gradients"))
    stopped = frozenset(map(tensor_id, stops))
    # One that others are made of is passed on the way.
    passed = {tensor_id(t) for t in known if t in tape} - stopped
    ends = [*stops, *(t for t in known if tensor_id(t) not in passed)]
    size = engine.min_aggregate_bytes
    space = tensorflow_vspace()._replace(aggregate_fn=adding_in_pairs(size))
    pending = Pending(space, engine.min_aggregate_count, size, order.summed)
    run = Run(space, tape, ends, pending, passed)
    with graph.as_default(), tf.name_scope(options.get("name") or "gradients"):
        run.go_back(ys, default_gradients(ys, grad_ys))
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
    wanted = options.get("unconnected_gradients", tf.UnconnectedGradients.NONE)
    if tf.UnconnectedGradients(wanted) is tf.UnconnectedGradients.NONE:
        return gradients
    return [
        tf.zeros_like(x) if gradient is None else gradient
        for gradient, x in zip(gradients, xs, strict=True)
    ]


def engine_of(engine: Any) -> TapeEngine | None:
    """Return how a tape works; None if TensorFlow's own engine is asked for.

    Raises:
        ArgumentTypeError: there is no such engine.
    """
    if isinstance(engine, TapeEngine):
        return engine
    if engine == "tape":
        return TapeEngine()
    if engine == "tensorflow":
        return None
    raise ArgumentTypeError(
        f"there is no engine {engine!r}; pass 'tensorflow', 'tape' or a "
        "geutil.gradients.tape.TapeEngine"
    )
