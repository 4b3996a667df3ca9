"""What TensorFlow knows about types of ops."""

from __future__ import annotations

from tensorflow.python.framework import op_def_registry


def has_outputs(op_type: str) -> bool:
    """Tell whether ops of a type have outputs; a type that is not known has."""
    definition = op_def_registry.get(op_type)
    return definition is None or bool(definition.output_arg)
