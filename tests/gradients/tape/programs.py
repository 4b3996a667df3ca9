"""Random programs on numpy arrays, recorded by hand: no TensorFlow op is involved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from geutil.gradients.tape import Tape

SIZE = 4
COUNT = 2
"""The number of sources."""
Array = np.ndarray[Any, Any]
Backward = Callable[..., Any]


def _sin(x: Array) -> tuple[list[Array], Backward]:
    return [np.sin(x)], lambda g: [g * np.cos(x)]


def _product(x: Array, y: Array) -> tuple[list[Array], Backward]:
    return [np.tanh(x * y)], lambda g: [
        g * y * (1 - np.tanh(x * y) ** 2),
        g * x * (1 - np.tanh(x * y) ** 2),
    ]


def _difference(x: Array, y: Array) -> tuple[list[Array], Backward]:
    return [x - y], lambda g: (g, -g)


def _halves(x: Array) -> tuple[list[Array], Backward]:
    half = SIZE // 2
    parts = [np.resize(x[:half], SIZE), np.resize(x[half:], SIZE)]

    def backward(first: Array, second: Array) -> Array:
        return np.concatenate(
            [first[:half] + first[half:], second[:half] + second[half:]]
        )

    return parts, backward


def _stopped(x: Array) -> tuple[list[Array], Backward]:
    return [np.round(x)], lambda g: [None]


OPERATIONS: dict[str, tuple[int, Callable[..., tuple[list[Array], Backward]]]] = {
    "sin": (1, _sin),
    "product": (2, _product),
    "difference": (2, _difference),
    "halves": (1, _halves),
}
# What finite differences do not see is left out there.
STOPPED = {"stopped": (1, _stopped)}


@dataclass(frozen=True)
class Program:
    """Operations, each with the positions of what it reads; the sources come first."""

    operations: tuple[tuple[str, tuple[int, ...]], ...]

    def run(self, sources: Sequence[Array], tape: Tape | None = None) -> list[Array]:
        """Return all arrays: the sources, and what the operations made."""
        arrays = list(sources)
        for kind, reads in self.operations:
            _, operation = (OPERATIONS | STOPPED)[kind]
            inputs = [arrays[i % len(arrays)] for i in reads]
            outputs, backward = operation(*inputs)
            if tape is not None:
                tape.record(kind, outputs, inputs, backward)
            arrays += outputs
        return arrays


@st.composite
def programs(draw: st.DrawFn) -> Program:
    operations = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(sorted(OPERATIONS)))
        arity, _ = OPERATIONS[kind]
        reads = tuple(draw(st.integers(0, 30)) for _ in range(arity))
        operations.append((kind, reads))
    return Program(tuple(operations))


def sources(seed: int = 0) -> list[Array]:
    """Return arrays to start from."""
    return list(np.random.default_rng(seed).uniform(-1, 1, (COUNT, SIZE)))
