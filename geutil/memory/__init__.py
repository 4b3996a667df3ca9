"""What a step needs in memory: predicted from its graph, and measured."""

from geutil.memory.execution import execution_order
from geutil.memory.predicting.predict import predict, step_program
from geutil.memory.program import Node, Program
from geutil.memory.simulation import Simulation, simulate
from geutil.memory.sizes import bytes_of
from geutil.memory.timeline import LiveTensor, Moment, Timeline

__all__ = [
    "predict",
    "bytes_of",
    "Timeline",
    "Moment",
    "LiveTensor",
    "step_program",
    "Program",
    "Node",
    "execution_order",
    "simulate",
    "Simulation",
]
