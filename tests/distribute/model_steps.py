"""Training steps of a model's function, and `model.fit`, under a strategy.

Called with a folder with models, and jobs: where the model comes from, or "fit", and
"one" or "two" devices, of a fit what is done to the model. The results are the numbers
of each job after some steps.
"""

import contextlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ModelError
from geutil.gradients import checkpointed, last_report
from geutil.quantize import calibrate, quantize
from tests.distribute.programs import distributed, mirrored, start

BATCH, STEPS = 4, 3
layers = keras.layers


def net():
    image = keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(4, 3)(image)
    x = layers.Activation("gelu")(layers.BatchNormalization()(x))
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def opened(source, folder):
    """Return a model, opened in the scope of a strategy, and what holds its weights."""
    keras_model = keras.models.load_model(folder / "net.keras")
    if source == "keras":
        return model.open(keras_model), keras_model
    if source == "saved":
        return model.open(folder / "saved"), None
    return model.open(folder / "frozen.pb").thaw("kernel|bias|gamma|beta"), None


def calibrated(strategy, folder):
    """Calibrate without a scope and within one, and run each replica."""
    xs = np.float32(np.random.default_rng(0).normal(size=(BATCH, 8, 8, 3)))
    results = []
    for scope in (contextlib.nullcontext, strategy.scope):
        with scope():
            found = model.open(folder / "saved")
            fold_batch_norms(found)
            quantize(found, is_training=False)
            calibrate(found, [xs, 1.5 * xs])
            function = found.to_function()
        results += found.run(xs).values()
    copies = [strategy.experimental_local_results(v) for v in function.variables]
    step = tf.function(lambda x: strategy.run(function, args=(x,)), autograph=False)
    return {
        "without": results[0],
        "within": results[1],
        "replicas": [
            value.numpy()
            for values in step(tf.constant(xs)).values()
            for value in strategy.experimental_local_results(values)
        ],
        "copies": [[copy.numpy() for copy in of_one] for of_one in copies],
    }


def refused(strategy, source, folder):
    """Return why a function of a model is refused."""
    try:
        if source == "outside":
            found = model.open(folder / "saved")
        with strategy.scope():
            if source == "moving":
                found = model.open(folder / "saved")
                quantize(found, is_training=True)
            found.to_function()
    except ModelError as error:
        return str(error)
    return ""


def trained(kind, strategy, source, folder):
    with strategy.scope():
        edited, kept = opened(source, folder)
        function = edited.to_function()
        if source == "saved":
            edited.restore(str(folder / "other_weights"))
    variables = list(function.trainable_variables)

    def replica(x):
        with tf.GradientTape() as tape:
            (y,) = function(x).values()
            loss = tf.reduce_sum(tf.square(y - 1.0)) / BATCH
        found = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)

        def update(_, *gradients):
            for v, gradient in zip(variables, gradients, strict=True):
                strategy.extended.update(v, lambda v, g: v.assign_sub(g), (gradient,))

        context.merge_call(update, args=[0.01 * g for g in found])
        return context.all_reduce(tf.distribute.ReduceOp.SUM, loss)

    step = tf.function(lambda x: strategy.run(replica, args=(x,)), autograph=False)
    rng = np.random.default_rng(0)
    numbers = {}
    for index in range(STEPS):
        xs = np.float32(rng.normal(size=(BATCH, 8, 8, 3)))
        loss = strategy.experimental_local_results(step(distributed(strategy, xs)))[0]
        numbers[f"loss/{index}"] = loss.numpy()
    for v in variables:
        for i, copy in enumerate(strategy.experimental_local_results(v)):
            numbers[f"copy/{i}/{v.name}"] = copy.numpy()
    xs = np.float32(rng.normal(size=(BATCH, 8, 8, 3)))
    (numbers["y/before"],) = function(xs).values()
    (numbers["y/run"],) = edited.run(xs).values()
    if kind == "two":
        again = model.open(edited.save(folder / f"trained_{source}"))
        (numbers["y/saved"],) = again.run(xs).values()
    del kept
    return {key: np.asarray(value) for key, value in numbers.items()}


def deep_net():
    """Return a net that is deep enough for something to be computed again."""
    image = keras.Input([8, 8, 3], name="image")
    x = layers.Conv2D(8, 3, padding="same")(image)
    y = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    y = layers.Activation("swish")(layers.BatchNormalization()(y))
    x = layers.Add()([x, y])
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def fitted(strategy, edit):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = deep_net()
        if edit == "checkpointed":
            checkpointed(model, "inputs")
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(32, 8, 8, 3)))
    y = np.float32(rng.normal(size=(32, 3)))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    history = model.fit(data, verbose=0)
    numbers = {f"weight/{v.path}": v.numpy() for v in model.weights}
    if edit == "checkpointed":
        numbers["recomputed"] = len(last_report().recomputed)
    return {"loss": np.array(history.history["loss"]), **numbers}


def main(folder, *jobs):
    strategies, path = mirrored(), Path(folder)
    results = []
    for source, kind, *edit in (job.split() for job in jobs):
        strategy = strategies[kind]
        if source == "fit":
            results.append(fitted(strategy, *edit))
        elif source == "calibrated":
            results.append(calibrated(strategy, path))
        elif source in ("outside", "moving"):
            results.append(refused(strategy, source, path))
        else:
            results.append(trained(kind, strategy, source, path))
    return results


if __name__ == "__main__":
    start(main)
