"""Kernels of TensorFlow: the buffers that ops make, share and need, by device."""

from __future__ import annotations

import os

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph.fetched_subgraph import uses_onednn
from geutil.graph.placement import has_kernels, kind_of
from geutil.memory.allocator import Allocator
from geutil.memory.program import Device

_GROWS = "TF_FORCE_GPU_ALLOW_GROWTH"
_GPU_ALLOCATOR = "TF_GPU_ALLOCATOR"
_CPU_TAKES_CHUNKS = "TF_CPU_ALLOCATOR_USE_BFC"


def device_of(name: str | None = None, onednn: bool | None = None) -> Device:
    """Return a device such as "GPU:0", which need not be there."""
    kind = kind_of(name)
    if kind not in ("CPU", "GPU") or not has_kernels(kind):
        raise ArgumentTypeError(
            f"'{name}' is no device that this TensorFlow has kernels for; pass "
            f"'CPU:0'{' or ' + repr('GPU:0') if has_kernels('GPU') else ''}"
        )
    if kind == "CPU":
        onednn = uses_onednn() if onednn is None else onednn
        return Device(kind, onednn, _allocator_of_cpu())
    return Device(kind, False, _allocator_of_gpu())


def _allocator_of_cpu() -> Allocator | None:
    is_set = os.environ.get(_CPU_TAKES_CHUNKS, "").lower() in ("1", "true")
    return Allocator(grows=True) if is_set else None


def _allocator_of_gpu() -> Allocator | None:
    # It takes each request from the driver.
    if os.environ.get(_GPU_ALLOCATOR) == "cuda_malloc_async":
        return None
    said = os.environ.get(_GROWS)
    # TensorFlow takes no other spelling.
    if said in ("true", "false"):
        return Allocator(grows=said == "true")
    gpus = tf.config.get_visible_devices("GPU")
    return Allocator(
        grows=any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
    )
