"""Reverse mode over a tape.

Entries that the targets depend on are gone through backwards, each once all gradients
of its outputs are there. A gradient is dropped as soon as the entry that needs it has
run, and so is the entry. Where many gradients of one tensor wait, they are added up
before all have come, so that no more than a few are held at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from geutil.gradients.tape.entries import Tape
from geutil.gradients.tape.pending import (
    MIN_AGGREGATE_BYTES,
    MIN_AGGREGATE_COUNT,
    Pending,
)
from geutil.gradients.tape.running import Run
from geutil.gradients.tape.spaces import VSpace


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
