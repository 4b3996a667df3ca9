"""Pipelined steps, and what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from geutil.gradients.pipeline_source import Source
from geutil.graph.types import Operation, Tensor
from geutil.memory.pipeline import Pipeline
from geutil.transform.partitioning import Partition


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A step of micro-batches.

    Attributes:
        loss: the mean, or the sum, of the losses of the micro-batches.
        gradients: one for each x: a tensor, `tf.IndexedSlices` or None.
        partition: the stages.
    """

    loss: Tensor
    gradients: tuple[Any, ...]
    partition: Partition
    source: Source = field(repr=False)
    pipeline: Pipeline = field(repr=False)
    recomputed: tuple[bool, ...]
    passes: Mapping[tuple[int, bool], tuple[Operation, ...]] = field(repr=False)
