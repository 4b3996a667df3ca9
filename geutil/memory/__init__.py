"""The memory of a step: predicted from its graph, bounded, and measured."""

from geutil.memory.bounds import WorstCase, worst_case
from geutil.memory.buffers import Simulation
from geutil.memory.by_device import Cut, DeviceMemory, MemoryByDevice, predict_by_device
from geutil.memory.costs import bytes_of
from geutil.memory.executor import (
    Pipeline,
    PipelineRun,
    Stage,
    execution_order,
    simulate,
)
from geutil.memory.measurement import measure
from geutil.memory.program import Node, Program
from geutil.memory.step_prediction import BatchFit, largest_batch, predict, step_program
from geutil.memory.timeline import (
    DeviceMeasurement,
    Environment,
    Lifetime,
    LiveTensor,
    Measurement,
    Moment,
    Timeline,
    TimelineComparison,
    compare,
)

__all__ = [
    "predict",
    "predict_by_device",
    "MemoryByDevice",
    "DeviceMemory",
    "Cut",
    "worst_case",
    "WorstCase",
    "largest_batch",
    "BatchFit",
    "measure",
    "Measurement",
    "DeviceMeasurement",
    "Environment",
    "compare",
    "TimelineComparison",
    "Timeline",
    "Moment",
    "LiveTensor",
    "Lifetime",
    "bytes_of",
    "step_program",
    "Program",
    "Node",
    "Simulation",
    "execution_order",
    "simulate",
    "Pipeline",
    "PipelineRun",
    "Stage",
]
