"""`model.fit` under a strategy, in a process of its own.

Called with "one" or "two" devices, what is done to the model, and a file for the
numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from geutil.gradients import checkpointed, last_report
from tests.distribute.steps import strategy_of

layers = keras.layers


def net(*, with_norms: bool) -> Any:
    """Return a net that is deep enough for something to be computed again."""
    image = keras.Input([16, 16, 3], name="image")
    x = layers.Conv2D(8, 3, padding="same")(image)
    for _ in range(6):
        y = layers.Conv2D(8, 3, padding="same", use_bias=not with_norms)(x)
        norm = (
            layers.BatchNormalization() if with_norms else layers.LayerNormalization()
        )
        x = layers.Add()([x, layers.Activation("swish")(norm(y))])
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def main(kind: str, edit: str, file: str) -> None:
    keras.utils.set_random_seed(1)
    with strategy_of(kind).scope():
        model = net(with_norms="norms" in edit)
        if "checkpointed" in edit:
            checkpointed(model, "inputs" if "inputs" in edit else "memory")
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(32, 16, 16, 3)))
    y = np.float32(rng.normal(size=(32, 3)))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0)
    numbers = {f"weight/{v.path}": v.numpy() for v in model.weights}
    recomputed = len(last_report().recomputed) if "checkpointed" in edit else 0
    np.savez(file, loss=history.history["loss"], recomputed=recomputed, **numbers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
