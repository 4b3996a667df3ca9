"""Schedules under a byte budget: what to free and compute again, of any computation.

Pure: a problem is numbers and edges, no TensorFlow.
"""

from geutil.gradients.planner.problem import (
    Improvement,
    Problem,
    Schedule,
    ScheduleStep,
)
from geutil.gradients.planner.solver import Curve, CurvePoint, pareto, solve

__all__ = [
    "Curve",
    "Improvement",
    "CurvePoint",
    "Problem",
    "Schedule",
    "ScheduleStep",
    "pareto",
    "solve",
]
