"""Training steps of a model's function under a strategy, in a process of its own.

Called with "one" or "two" devices, where the model comes from, and a folder with the
Keras model. The numbers after some steps go to a file in it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import calibrate, quantize
from tests.distribute.steps import strategy_of

BATCH, STEPS = 4, 3
layers = keras.layers


def net() -> Any:
    image = keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(4, 3)(image)
    x = layers.Activation("gelu")(layers.BatchNormalization()(x))
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def opened(source: str, folder: Path) -> tuple[Any, Any]:
    """Return a model, opened in the scope of a strategy, and what holds its weights."""
    keras_model = keras.models.load_model(folder / "net.keras")
    if source == "keras":
        return model.open(keras_model), keras_model
    if source == "saved":
        return model.open(folder / "saved"), None
    if source == "pb":
        return model.open(folder / "frozen.pb").thaw("kernel|bias|gamma|beta"), None
    return model.open(keras_model).freeze().thaw("kernel|bias|gamma|beta"), None


def calibrated(strategy: Any, folder: Path) -> None:
    """Calibrate within a scope and without one; say by how much results differ."""
    xs = np.float32(np.random.default_rng(0).normal(size=(BATCH, 8, 8, 3)))
    results, copies = [], []
    for scope in (contextlib.nullcontext, strategy.scope):
        with scope():
            found = model.open(folder / "saved")
            fold_batch_norms(found)
            quantize(found, is_training=False)
            calibrate(found, [xs, 1.5 * xs])
            function = found.to_function()
        results.append(found.run(xs))
    for variable in function.variables:
        copies += [strategy.experimental_local_results(variable)]
    step = tf.function(lambda x: strategy.run(function, args=(x,)))
    here = [
        value.numpy()
        for values in step(tf.constant(xs)).values()
        for value in strategy.experimental_local_results(values)
    ]
    (without,), (within,) = (list(found.values()) for found in results)
    np.savez(
        folder / "calibrated.npz",
        without=without,
        within=within,
        replicas=here,
        copies=[len(c) for c in copies],
        differing=sum(not np.array_equal(c[0], c[-1]) for c in copies),
    )


def main(kind: str, source: str, folder: Path) -> None:
    strategy = strategy_of(kind)
    if source == "outside":
        found = model.open(folder / "saved")
        with strategy.scope():
            found.to_function()
    if source == "moving":
        with strategy.scope():
            found = model.open(folder / "saved")
            quantize(found, is_training=True)
            found.to_function()
    if source == "calibrated":
        calibrated(strategy, folder)
        return
    with strategy.scope():
        edited, kept = opened(source, folder)
        function = edited.to_function()
        if source == "saved":
            edited.restore(str(folder / "other_weights"))
    trained = list(function.trainable_variables)

    def replica(x: Any) -> Any:
        with tf.GradientTape() as tape:
            (y,) = function(x).values()
            loss = tf.reduce_sum(tf.square(y - 1.0)) / BATCH
        found = tape.gradient(loss, trained)
        context = tf.distribute.get_replica_context()
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)

        def update(_: Any, *gradients: Any) -> None:
            for v, gradient in zip(trained, gradients, strict=True):
                strategy.extended.update(v, lambda v, g: v.assign_sub(g), (gradient,))

        context.merge_call(update, args=[0.01 * g for g in found])
        return context.all_reduce(tf.distribute.ReduceOp.SUM, loss)

    step = tf.function(lambda x: strategy.run(replica, args=(x,)))
    rng = np.random.default_rng(0)
    numbers: dict[str, Any] = {}
    for index in range(STEPS):
        xs = np.float32(rng.normal(size=(BATCH, 8, 8, 3)))

        def part(context: Any, xs: Any = xs) -> Any:
            size = BATCH // context.num_replicas_in_sync
            start = context.replica_id_in_sync_group * size
            return tf.constant(xs[start : start + size])

        x = strategy.experimental_distribute_values_from_function(part)
        loss = strategy.experimental_local_results(step(x))[0]
        numbers[f"loss/{index}"] = loss.numpy()
    for v in trained:
        for i, copy in enumerate(strategy.experimental_local_results(v)):
            numbers[f"copy/{i}/{v.name}"] = copy.numpy()
    xs = np.float32(rng.normal(size=(BATCH, 8, 8, 3)))
    (numbers["y/before"],) = function(xs).values()
    (numbers["y/run"],) = edited.run(xs).values()
    edited.save(folder / f"trained_{kind}_{source}")
    again = model.open(folder / f"trained_{kind}_{source}")
    (numbers["y/saved"],) = again.run(xs).values()
    np.savez(folder / f"{kind}_{source}.npz", **numbers)
    del kept


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
