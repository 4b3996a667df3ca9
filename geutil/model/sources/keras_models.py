"""Programs of Keras models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.model.errors import ModelError
from geutil.model.files.keras_files import refuse_code
from geutil.model.programs.program import Program
from geutil.model.sources.functions import ordered, program_of_function


@dataclass(frozen=True)
class Weight:
    """A variable of a Keras model.

    Attributes:
        variable: TensorFlow's variable.
        name: what the model calls it.
        trainable: whether the model trains it.
    """

    variable: tf.Variable
    name: str
    trainable: bool


def is_keras_model(source: Any) -> bool:
    """Tell whether `source` is a model of Keras or of tf_keras."""
    return _library_of(source) is not None


def weights_of(model: Any) -> list[Weight]:
    """Return what a Keras model lists as its variables."""
    trained = {id(v) for v in model.trainable_variables}
    found = []
    for v in model.variables:
        # Those of Keras 3 wrap TensorFlow's, those of tf_keras are TensorFlow's.
        is_plain = isinstance(v, tf.Variable)
        name = v.name.partition(":")[0] if is_plain else v.path
        found.append(Weight(v if is_plain else v.value, name, id(v) in trained))
    return found


def load_keras_file(path: Path) -> Any:
    """Load a `.keras` or HDF5 file, in Keras' safe mode.

    Raises:
        ModelError: Keras cannot load it, or it holds code.
    """
    if path.suffix != ".keras":
        refuse_code(path)
    try:
        return tf.keras.models.load_model(path, compile=False)
    except Exception as error:
        # Keras raises errors of many kinds, the layers' own among them.
        raise ModelError(f"Keras cannot load '{path}': {error}") from error


def program_of_keras_model(model: Any) -> tuple[Program, list[tf.Variable]]:
    """Return the program of a Keras model called for inference, and what it reads.

    Inputs and outputs are named as the model names them. The model does not list all
    variables that it reads: the states of layers that keep one between calls.

    Raises:
        ModelError: the model does not know the shapes of its inputs yet, or does not
            compute with TensorFlow.
    """
    _check_backend(model)
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
        if isinstance(model, _library_of(model).Sequential):
            names = [model.layers[-1].name]
        if len(set(names)) == len(program.outputs):
            program.outputs = dict(zip(names, program.outputs.values(), strict=True))
    return program, ordered(function.variables, function.captured_inputs)


def _library_of(source: Any) -> Any:
    """Return the Keras that a model is made with; None if it is no model of any."""
    # Who has a model has imported its library, and nobody waits for another one.
    for name in ("keras", "tf_keras"):
        library = sys.modules.get(name)
        if library is not None and isinstance(source, library.Model):
            return library
    return None


def _check_backend(model: Any) -> None:
    backend = _library_of(model).backend.backend()
    if backend != "tensorflow":
        raise ModelError(
            f"Keras model '{model.name}' computes with {backend}; save it, start "
            "Python with KERAS_BACKEND=tensorflow, and open the file"
        )


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
    floats = _library_of(model).backend.floatx()
    return tf.TensorSpec([None, *shape[1:]], floats, "inputs")


def _or_none(model: Any, name: str) -> Any:
    """Return a property of a Keras model, None where the model has none yet."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return None
