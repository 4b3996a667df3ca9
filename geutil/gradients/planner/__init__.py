"""Schedules of any computation under a byte budget: outputs freed and recomputed.

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
