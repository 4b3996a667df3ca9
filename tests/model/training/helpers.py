"""What tests of stripping share."""

import numpy as np
import tensorflow as tf

from geutil import model

RANDOM_WORDS = ("Random", "Assign", "Rng")


def types_of(m):
    """Return the types of ops that a call of a model runs."""
    graph = m.concrete_function().graph
    return {op.type for op in graph.get_operations()}


def is_deterministic(m):
    """Tell whether a model neither draws numbers nor writes variables."""
    return not any(word in t for t in types_of(m) for word in RANDOM_WORDS)


def by_name(m):
    """Return what the report of a stripped model says, by name."""
    return {entry.name: entry for entry in m.strip_report.entries}


def kinds(entries):
    return sorted({entry.kind for entry in entries})


def opened_in_training(keras_model, *specs):
    """Open a Keras model as it is called in training."""

    @tf.function(input_signature=specs, autograph=False)
    def train(*x):
        return {"y": keras_model(x[0] if len(x) == 1 else list(x), training=True)}

    return model.open(train)


def at_inference(keras_model, spec, x):
    """Return what Keras itself computes at inference, traced as the model is."""
    call = tf.function(lambda x: keras_model(x, training=False), autograph=False)
    return call.get_concrete_function(spec)(tf.constant(x, spec.dtype)).numpy()


def randomize(keras_model, seed=0):
    """Give the statistics of batch norms values that make a difference."""
    rng = np.random.default_rng(seed)
    for v in keras_model.variables:
        if v.path.endswith("moving_variance"):
            v.assign(rng.uniform(0.5, 2.0, v.shape))
        elif v.path.endswith(("moving_mean", "beta", "gamma")):
            v.assign(v + 0.1 * rng.normal(size=v.shape))
