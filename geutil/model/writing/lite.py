"""Models as files for TensorFlow Lite."""

from __future__ import annotations

import re
from pathlib import Path

import tensorflow as tf

from geutil.graph.trackables import new_trackable
from geutil.model.core import EditableModel
from geutil.model.errors import ModelError
from geutil.model.holdings import Holdings
from geutil.model.writing.formats import stateless_program

_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)


def write_tflite(model: EditableModel, path: Path) -> None:
    """Write a model for TensorFlow Lite; see `Model.save`."""
    _write(model, path, select_tf_ops=False)


def write_tflite_with_tf_ops(model: EditableModel, path: Path) -> None:
    """Write a model for a TensorFlow Lite that comes with ops of TensorFlow."""
    _write(model, path, select_tf_ops=True)


def _write(model: EditableModel, path: Path, *, select_tf_ops: bool) -> None:
    program = stateless_program(model)
    frozen = model.derived(program, holdings=Holdings(), alone=True)
    # The converter wants to know an owner of variables, of which there are none.
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [frozen.concrete_function()], new_trackable()
    )
    if select_tf_ops:
        converter.target_spec.supported_ops = [
            tf.lite.OpsSet.TFLITE_BUILTINS,
            tf.lite.OpsSet.SELECT_TF_OPS,
        ]
    try:
        path.write_bytes(converter.convert())
    except Exception as error:
        # The converter's own class of errors is no part of TensorFlow's public API.
        remedy = (
            "replace these ops"
            if select_tf_ops
            else "pass select_tf_ops=True to keep ops that TensorFlow Lite lacks, or "
            "replace them"
        )
        raise ModelError(
            f"TensorFlow Lite cannot take {model!r}: {_reason(error)}; {remedy}"
        ) from error


def _reason(error: Exception) -> str:
    """Return what the converter says of the ops, without its traces."""
    text = str(error)
    said = dict.fromkeys(m[1].strip() for m in _SAID.finditer(text))
    return "; ".join(said)[:1500] or text[:1500]
