"""What a step needs in memory: predicted from its graph, and measured."""

from geutil.memory.comparing import TimelineComparison, compare
from geutil.memory.measuring.measure import measure
from geutil.memory.measuring.measurement import Environment, Measurement
from geutil.memory.timeline import LiveTensor, Moment, Timeline

__all__ = [
    "measure",
    "Measurement",
    "Environment",
    "compare",
    "TimelineComparison",
    "Timeline",
    "Moment",
    "LiveTensor",
]
