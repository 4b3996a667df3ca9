"""L5, pipelines: a model in stages on several devices, trained in micro-batches.

A partition cuts the forward pass into stages, a placement puts each on a device, and
`pipelined` builds the step in which micro-batches follow each other through them, with
the predicted time, idle time, traffic and peaks. Variables, losses and optimizers stay
the caller's; `geutil.memory` simulates any placed step.
"""

from geutil.pipeline.micro_batches import pipelined
from geutil.pipeline.partitions import (
    Partition,
    PartitionStage,
    PipelinedStep,
    Placement,
    partition,
    place,
)

__all__ = [
    "Partition",
    "PartitionStage",
    "PipelinedStep",
    "Placement",
    "partition",
    "pipelined",
    "place",
]
