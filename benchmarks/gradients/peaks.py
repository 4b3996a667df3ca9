"""The peak memory of a step: of this process, which does nothing else."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import tensorflow as tf

from benchmarks.gradients.cases import Setting
from benchmarks.gradients.repeating import FEWEST, rounds
from benchmarks.gradients.ways import WAYS, configure, traced
from benchmarks.networks import NETWORKS
from benchmarks.resident import forget_peak, resident, resident_peak


@dataclass(frozen=True)
class Peak:
    """What some steps need above what the process holds at rest, in bytes.

    Attributes:
        allocator: by the statistics of TensorFlow's allocator; None with oneDNN off,
            where it keeps none.
        resident: by the resident memory. With Grappler's and XLA's needs, and with
            what the allocator holds unused.
        steady: likewise, of a later step for itself.
    """

    allocator: int | None
    resident: int
    steady: int


def measure_peak(network: str, setting: Setting, way: str) -> Peak:
    """Return the peak of some steps in this process."""
    configure(setting)
    chosen = WAYS[way]
    step = chosen.make(NETWORKS[network])
    function = traced(chosen, step, setting)
    batch = step.tensors()
    _settle()
    at_rest = _allocated() if setting.onednn else None
    resident_at_rest = resident()
    growth, highest = [], 0
    seconds = 0.0
    while len(growth) < FEWEST or len(growth) < rounds(seconds):
        _settle()
        before = forget_peak()
        start = perf_counter()
        function(*batch)
        seconds = perf_counter() - start
        highest = max(highest, resident_peak())
        growth.append(resident_peak() - before)
    allocator = None if at_rest is None else _info()["peak"] - at_rest
    return Peak(allocator, highest - resident_at_rest, max(growth[1:]))


def _settle() -> None:
    gc.collect()
    # What malloc holds unused would hide how much the next step needs.
    ctypes.CDLL(None).malloc_trim(0)


def _allocated() -> int:
    tf.config.experimental.reset_memory_stats("CPU:0")
    return int(_info()["current"])


def _info() -> dict[str, Any]:
    return dict(tf.config.experimental.get_memory_info("CPU:0"))
