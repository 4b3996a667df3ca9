"""`model.fit` under a strategy.

Called with jobs: "one" or "two" devices and what is done to the model. The results are
the numbers of each job.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from geutil.gradients import checkpointed, last_report
from tests.distribute.programs import mirrored, start

layers = keras.layers


def net(*, with_norms):
    """Return a net that is deep enough for something to be computed again."""
    image = keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(8, 3, padding="same")(image)
    for _ in range(4):
        y = layers.Conv2D(8, 3, padding="same", use_bias=not with_norms)(x)
        norm = (
            layers.BatchNormalization() if with_norms else layers.LayerNormalization()
        )
        x = layers.Add()([x, layers.Activation("swish")(norm(y))])
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def fitted(strategy, edits):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = net(with_norms="norms" in edits)
        if "checkpointed" in edits:
            checkpointed(model, "inputs" if "inputs" in edits else "memory")
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(32, 8, 8, 3)))
    y = np.float32(rng.normal(size=(32, 3)))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0)
    numbers = {f"weight/{v.path}": v.numpy() for v in model.weights}
    if "checkpointed" in edits:
        numbers["recomputed"] = len(last_report().recomputed)
    return {"loss": np.array(history.history["loss"]), **numbers}


def main(*jobs):
    strategies = mirrored()
    return [
        fitted(strategies[kind], edits)
        for kind, *edits in (job.split() for job in jobs)
    ]


if __name__ == "__main__":
    start(main)
