"""One option for each of several items under a budget: a multiple-choice knapsack.

Each item has options, and each option a size and a noise. Wanted is the choice of least
noise whose sizes fit a budget, or the choice of least size whose noise keeps a limit
(Kellerer, Pferschy and Pisinger 2004, Knapsack Problems, chapter 11). It is solved as
an integer program, whose solver proves that there is no better choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from geutil.errors import MissingExtraError

Table = Sequence[Sequence[float]]
"""A number for each option of each item."""
Sizes = Sequence[Sequence[int]]

_PRECISION = 1e-9
"""Of the solver's constraints: below one unit of any size that there is."""


def least_noise(sizes: Sizes, noises: Table, budget: int) -> list[int] | None:
    """Return the choice of least noise within a budget.

    Example:
        >>> from geutil.quantize.bits.knapsack import least_noise
        >>> sizes, noises = [[4, 8], [2, 4]], [[3.0, 1.0], [9.0, 1.0]]
        >>> least_noise(sizes, noises, 9), least_noise(sizes, noises, 5)
        ([0, 1], None)
    """
    # Returns for each item the index of an option; None if no choice fits.
    if sum(min(options) for options in sizes) > budget:
        return None
    # Whole units, as few as can be: so the solver's rounding is below one of them.
    unit = math.gcd(*(size for options in sizes for size in options)) or 1
    units = [[size // unit for size in options] for options in sizes]
    room = budget // unit
    scale = _largest(noises)
    scaled = [[noise / scale for noise in options] for options in noises]
    # The solver's fit may be over by its precision, if sizes are huge.
    most = room
    while True:
        chosen = _solved(scaled, units, most)
        if chosen is None or _sum(units, chosen) <= room:
            return chosen
        most -= 1


def least_size(sizes: Sizes, noises: Table, limit: float) -> list[int] | None:
    """Return the choice of least size whose noise keeps a limit.

    Example:
        >>> from geutil.quantize.bits.knapsack import least_size
        >>> least_size([[4, 8], [2, 4]], [[3.0, 1.0], [9.0, 1.0]], limit=5.0)
        [0, 1]
    """
    # Of several that are as small, one of the least noise.
    # Returns for each item the index of an option; None if no choice keeps the limit.
    if sum(min(options) for options in noises) > limit:
        return None
    scale = max(_largest(noises), abs(limit)) or 1.0
    scaled = [[noise / scale for noise in options] for options in noises]
    largest = _largest(sizes)
    shares = [[size / largest for size in options] for options in sizes]
    chosen = _solved(shares, scaled, limit / scale)
    if chosen is None:
        return None
    quietest = least_noise(sizes, noises, int(_sum(sizes, chosen)))
    return chosen if quietest is None else quietest


def _solved(costs: Table, weights: Table, limit: float) -> list[int] | None:
    """Return the choice of least cost whose weights sum up to a limit at most."""
    solver = _new_solver()
    taken = [[solver.BoolVar("") for _ in options] for options in costs]
    for options in taken:
        solver.Add(sum(options) == 1)
    solver.Add(_weighted(taken, weights) <= limit)
    solver.Minimize(_weighted(taken, costs))
    if solver.Solve() != solver.OPTIMAL:
        return None
    return [
        int(np.argmax([variable.solution_value() for variable in options]))
        for options in taken
    ]


def _weighted(taken: Sequence[Sequence[Any]], numbers: Table) -> Any:
    return sum(
        variable * number
        for options, row in zip(taken, numbers, strict=True)
        for variable, number in zip(options, row, strict=True)
    )


def _sum(table: Table, chosen: Sequence[int]) -> float:
    return sum(row[index] for row, index in zip(table, chosen, strict=True))


def _largest(table: Table) -> float:
    return max((abs(number) for row in table for number in row), default=0.0) or 1.0


def _new_solver() -> Any:
    try:
        from ortools.linear_solver import pywraplp
    except ImportError as error:
        raise MissingExtraError(
            "bits are chosen by OR-Tools, which is not installed; run: "
            "pip install 'geutil[plan]'"
        ) from error
    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetSolverSpecificParametersAsString(
        f"numerics/feastol = {_PRECISION}\nlimits/gap = 0"
    )
    return solver
