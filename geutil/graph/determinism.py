"""Whether the process asks for the same bits every time."""

from __future__ import annotations

from geutil.graph._tf import is_op_determinism_enabled


def is_determinism_enabled() -> bool:
    """Tell whether `tf.config.experimental.enable_op_determinism` was called.

    TensorFlow does not keep the promise for sums of three or more (`AddN`) whose terms
    other ops read too: in what order it adds depends on which ops have run.
    """
    return bool(is_op_determinism_enabled())
