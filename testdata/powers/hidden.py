"""Ways in which an op that writes the marker is hidden in a graph."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from testdata.powers.common import Sample, counted, written

HIDDEN: dict[str, Sample] = {
    "branch": lambda marker, x: tf.cond(x > 0, lambda: written(marker, x), lambda: x),
    "case": lambda marker, x: tf.switch_case(
        tf.cast(x, tf.int32) * 0, [lambda: written(marker, x), lambda: x]
    ),
    "loop": lambda marker, x: tf.while_loop(
        lambda i, _: i < 1, lambda i, y: (i + 1, written(marker, y)), (0, x)
    )[1],
    "function": lambda marker, x: tf.function(
        lambda y: 2 * tf.function(lambda z: written(marker, z))(y)
    )(x),
    "map": lambda marker, x: counted(
        tf.data.Dataset.range(2).map(lambda i: written(marker, i))
    ),
    "computed path": lambda marker, x: written(
        tf.strings.join([marker, tf.strings.as_string(tf.cast(x, tf.int32))]), x
    ),
    "custom gradient": lambda marker, x: tf.custom_gradient(
        lambda y: (written(marker, y), lambda slope: slope)
    )(x),
    "condition of a loop": lambda marker, x: tf.while_loop(
        lambda i, y: written(marker, y) + i < 1.5, lambda i, y: (i + 1, y), (0.0, x)
    )[1],
    "map_fn": lambda marker, x: tf.map_fn(lambda y: written(marker, y), x[None]),
    "filter": lambda marker, x: counted(
        tf.data.Dataset.range(2).filter(lambda i: written(marker, i) > 0)
    ),
    "interleave": lambda marker, x: counted(
        tf.data.Dataset.range(2).interleave(
            lambda i: tf.data.Dataset.from_tensors(written(marker, i))
        )
    ),
    "reduce": lambda marker, x: tf.data.Dataset.range(2).reduce(
        np.int64(0), lambda count, i: written(marker, count) + i
    ),
    "scan": lambda marker, x: counted(
        tf.data.Dataset.range(2).scan(
            np.int64(0), lambda state, i: (written(marker, state), i)
        )
    ),
    "batch function": lambda marker, x: tf.nondifferentiable_batch_function(
        1, 1, 10, allowed_batch_sizes=[1]
    )(lambda y: written(marker, y))(x[None]),
    "call without state": lambda marker, x: tf.raw_ops.PartitionedCall(
        args=[x],
        Tout=[tf.float32],
        f=tf.function(
            lambda y: written(marker, y), input_signature=[tf.TensorSpec([])]
        ).get_concrete_function(),
    )[0],
}
"""Ways in which an op that writes the marker is hidden."""
