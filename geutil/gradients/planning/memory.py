"""The choice of kept tensors with the least predicted peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from geutil.gradients.planning.budget import Cutting, cut_within, least_budget
from geutil.gradients.planning.cuts import (
    Stretches,
    crossing_tensors,
    measure_stretches,
)
from geutil.gradients.planning.forward import ForwardPass, read_forward
from geutil.gradients.prediction import StepProgram
from geutil.gradients.segments import Keeps, plan_recomputation
from geutil.gradients.sizes import tensor_elements
from geutil.gradients.step import Step
from geutil.graph.identity import IdentitySet
from geutil.graph.kinds import Tensor

_SLACKS = (1.0, 1.02, 1.05, 1.1)
_WORTH_WHILE = 0.98
"""Plain gradients are left alone unless the peak falls to this part of theirs."""


@dataclass(frozen=True, eq=False)
class MemoryChoice:
    """What to keep so that the peak is least.

    Attributes:
        kept: the tensors, in graph order; none if plain gradients are best.
        peak: the predicted peak in bytes.
        plain_peak: the predicted peak of plain gradients.
        reason: why plain gradients are best, or None.
    """

    kept: tuple[Tensor, ...]
    peak: int
    plain_peak: int
    reason: str | None


def choose_for_memory(
    step: Step, always: Keeps, min_checkpoint_size: int = 0
) -> MemoryChoice:
    """Return the tensors to keep for the least predicted peak.

    No op runs more than once again. The forward pass is cut into stretches such that
    the fullest of them is as small as can be: those near the loss are longer, since
    little else is held when the backward pass is there. Several cuttings are then
    simulated, and the best is taken, unless plain gradients are.

    Args:
        step: the step with plain gradients.
        always: tells which tensors are kept whatever is chosen.
        min_checkpoint_size: no tensor of fewer elements is chosen.

    Cost: linear in the ops of the step and their edges.
    """
    program = StepProgram(step)
    plain = program.peak()
    forward = read_forward(step, always)
    if not forward.buffers:
        return MemoryChoice(
            (), plain, plain, "the backward pass reads nothing that could be recomputed"
        )
    best: tuple[Tensor, ...] = ()
    least = plain
    for kept in _choices(forward, program, step, min_checkpoint_size):
        plan = plan_recomputation(step, lambda t, k=kept: t in k or always(t))
        peak = program.peak(plan.segments)
        if peak < least:
            best, least = tuple(kept), peak
    if least > _WORTH_WHILE * plain:
        return MemoryChoice((), plain, plain, _reason(plain, least))
    return MemoryChoice(best, least, plain, None)


def _choices(
    forward: ForwardPass, program: StepProgram, step: Step, smallest: int
) -> Iterator[IdentitySet]:
    stretches = measure_stretches(forward, program.gradient_bytes(step.backward))
    met = set()
    for cutting in _cuttings(stretches):
        if cutting.cuts and cutting.cuts not in met:
            met.add(cutting.cuts)
            yield _kept(forward, stretches, cutting.cuts, smallest)


def _cuttings(stretches: Stretches) -> Iterator[Cutting]:
    for held in (stretches.in_turn, stretches.at_worst):
        least = least_budget(stretches, held)
        for slack in _SLACKS:
            found = cut_within(stretches, held, int(least.budget * slack))
            if found is not None:
                yield found


def _kept(
    forward: ForwardPass, stretches: Stretches, cuts: Iterable[int], smallest: int
) -> IdentitySet:
    kept = IdentitySet()
    for cut in cuts:
        for number, index in crossing_tensors(
            forward.buffers, int(stretches.places[cut])
        ):
            tensor = forward.buffers[number].tensors[index][0]
            if tensor_elements(tensor) >= smallest:
                kept.add(tensor)
    return kept


def _reason(plain: int, least: int) -> str:
    return (
        f"the best recomputation is predicted to need {least:,} bytes at its peak, and "
        f"plain gradients {plain:,}"
    )
