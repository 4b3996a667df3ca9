"""Whether the process asks for the same bits every time."""

from __future__ import annotations

from tensorflow.python.framework import config


def is_determinism_enabled() -> bool:
    """Tell whether `tf.config.experimental.enable_op_determinism` was called."""
    return bool(config.is_op_determinism_enabled())
