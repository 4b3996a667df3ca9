"""Programs of Keras models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.model.errors import ModelError
from geutil.model.programs.program import Program
from geutil.model.sources.functions import program_of_function


def is_keras_model(source: Any) -> bool:
    """Tell whether `source` is a Keras model."""
    return isinstance(source, tf.keras.Model)


def load_keras_file(path: Path) -> Any:
    """Load a `.keras` file, in Keras' safe mode.

    Raises:
        ModelError: Keras cannot load it.
    """
    try:
        return tf.keras.models.load_model(path, compile=False)
    except Exception as error:
        # Keras raises errors of many kinds, the layers' own among them.
        raise ModelError(f"Keras cannot load '{path}': {error}") from error


def program_of_keras_model(model: Any) -> Program:
    """Return the program of a Keras model called for inference.

    Inputs and outputs are named as the model names them.

    Raises:
        ModelError: the model does not know the shapes of its inputs yet.
    """
    specs = _input_specs(model)

    def call(*arguments: Any) -> Any:
        inputs = tf.nest.pack_sequence_as(specs, arguments)
        return model(inputs, training=False)

    flat = tf.nest.flatten(specs)
    function = tf.function(call, autograph=False).get_concrete_function(*flat)
    program = program_of_function(function)
    placeholders = list(program.inputs.values())
    program.inputs = dict(zip([s.name for s in flat], placeholders, strict=True))
    if not isinstance(function.structured_outputs, dict):
        names = list(getattr(model, "output_names", None) or ())
        if isinstance(model, tf.keras.Sequential):
            names = [model.layers[-1].name]
        if len(set(names)) == len(program.outputs):
            program.outputs = dict(zip(names, program.outputs.values(), strict=True))
    return program


def _input_specs(model: Any) -> Any:
    """Return a structure of `TensorSpec`, as the model takes its inputs."""
    inputs = _or_none(model, "inputs")
    if inputs:
        # A functional model also tells in what structure; a Sequential takes one.
        structure = _or_none(model, "input")
        if structure is None:
            structure = inputs[0] if len(inputs) == 1 else inputs
        return tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype, t.name), structure
        )
    shape = ((model.built and model.get_build_config()) or {}).get("input_shape")
    if shape is None or tf.nest.is_nested(shape[0]):
        raise ModelError(
            f"Keras model '{model.name}' does not say what inputs it takes: it is a "
            "subclass or was never built; pass "
            "tf.function(model).get_concrete_function(tf.TensorSpec(...)) instead"
        )
    return tf.TensorSpec([None, *shape[1:]], tf.keras.config.floatx(), "inputs")


def _or_none(model: Any, name: str) -> Any:
    """Return a property of a Keras model, None where the model has none yet."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return None
