"""Backward graphs that a tape builds, in place of TensorFlow's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.stand_ins import make_stand_in
from geutil.gradients.tape.engine import (
    MIN_AGGREGATE_BYTES,
    MIN_AGGREGATE_COUNT,
    Run,
)
from geutil.gradients.tape.entries import Tape
from geutil.gradients.tape.identifiers import tensor_id
from geutil.gradients.tape.recording import tensor_of
from geutil.gradients.tape.tensors import tensorflow_vspace
from geutil.graph.importing import add_control_edges
from geutil.graph.kinds import Graph, Operation, Tensor

SCOPE = "tape"
# They say how TensorFlow's own engine works.
_FOREIGN = {"aggregation_method": None, "gate_gradients": False}


@dataclass(frozen=True)
class TapeEngine:
    """How a tape adds up gradients ahead of time; see `imperative_grad`.

    Attributes:
        min_aggregate_count: how many gradients of a tensor have to wait for that.
        min_aggregate_bytes: how many bytes they have to hold together.
    """

    min_aggregate_count: int = MIN_AGGREGATE_COUNT
    min_aggregate_bytes: int = MIN_AGGREGATE_BYTES


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
    sources = [tensor_of(graph, x) for x in xs]
    stops = [tensor_of(graph, x) for x in _listed(options.get("stop_gradients"))]
    order = _Order()
    known = [t for t in sources if t is not None]
    tape = Tape.from_graph(ys, known, lambda function: _Waiting(function, order))
    # One that others depend on is passed on the way.
    passed = {tensor_id(t) for t in known if t in tape}
    passed -= {tensor_id(t) for t in stops if t is not None}
    found: dict[int, Any] = {}

    def watch(number: int, gradient: Any) -> None:
        if number in passed:
            found[number] = gradient

    ends = [
        t for t in (*sources, *stops) if t is not None and tensor_id(t) not in passed
    ]
    run = Run(
        tensorflow_vspace(),
        tape,
        ends,
        engine.min_aggregate_count,
        engine.min_aggregate_bytes,
        watch,
        order.summed,
    )
    with graph.as_default(), tf.name_scope(options.get("name") or "gradients"):
        results = run.gradients(ys, grad_ys)
        found.update(zip(map(tensor_id, ends), results, strict=True))
        gradients = [None if t is None else found.get(tensor_id(t)) for t in sources]
        return _connected(gradients, xs, options)


def _check(options: Mapping[str, Any]) -> None:
    for name, default in _FOREIGN.items():
        if options.get(name, default) not in (default, 0):
            raise ArgumentTypeError(
                f"{name} is for TensorFlow's own engine; leave it out, or pass "
                'engine="tensorflow"'
            )


def _listed(tensors: Any) -> list[Any]:
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


class _Order:
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
                    self._waited[tensor_id(gradient)] = self.count

    def _has_waited(self, gradients: Sequence[Any]) -> bool:
        return any(
            self._waited.get(tensor_id(g), 0) == self.count
            for g in gradients
            if g is not None
        )

    def _late(self, gradient: Tensor) -> Tensor:
        if self.last is None or gradient.dtype == tf.variant:
            return gradient
        late = make_stand_in(gradient, SCOPE, "late")
        add_control_edges(late.op, [self.last])
        return late


class _Waiting:
    """A backward function whose ops wait for the last sum."""

    def __init__(self, function: Any, order: _Order) -> None:
        self.op_name = function.op_name
        self._function = function
        self._order = order

    def __call__(self, *gradients: Any) -> list[Any]:
        results: list[Any] = self._function(*self._order.delayed(gradients))
        self._order.note(results)
        return results


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
