"""Writing models."""

from __future__ import annotations

import itertools
import keyword
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.formats import refusal
from geutil.graph.op_types import PYTHON_CALLS
from geutil.graph.trackables import new_trackable, owner_of
from geutil.graph.trainable import flags_as_noted, is_trainable
from geutil.model.core import EditableModel
from geutil.model.errors import ModelError
from geutil.model.writing.atomic import written_atomically
from geutil.model.writing.formats import write_graph_def, write_pbtxt
from geutil.model.writing.lite import write_tflite, write_tflite_with_tf_ops

_INPUT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
"""What TensorFlow can call an input of a signature; it changes other names."""
_logger = logging.getLogger("geutil")


def save(
    model: EditableModel,
    path: Path,
    format: str,
    *,
    overwrite: bool,
    select_tf_ops: bool,
) -> Path:
    """Write a model; see `Model.save`."""
    if format not in _WRITERS:
        raise ModelError(f"unknown format '{format}'; choose one of {sorted(_WRITERS)}")
    write = _WRITERS[format]
    if select_tf_ops:
        if format != "tflite":
            raise ModelError(f"select_tf_ops=True is for 'tflite', not for '{format}'")
        write = write_tflite_with_tf_ops
    reason = refusal(path, format)
    if reason is not None:
        raise ModelError(reason)
    with written_atomically(path, overwrite=overwrite) as new:
        write(model, new)
    return path


def _write_saved_model(model: EditableModel, path: Path) -> None:
    untouched = model.unopened_signatures()
    for opened in model.opened_signatures().values():
        _check_input_names(opened)
    functions = {
        name: opened.concrete_function()
        for name, opened in model.opened_signatures().items()
    }
    for function in functions.values():
        _check_python(model, function)
    root = _root(model, [*functions.values(), *untouched.values()])
    signatures = {
        name: functions.get(name) or untouched[name] for name in model.signatures
    }
    try:
        with flags_as_noted(model.variables.values()):
            tf.saved_model.save(root, str(path), signatures=signatures)
    except (ValueError, TypeError, AssertionError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow cannot save {model!r}: {error}") from error


def _check_input_names(model: EditableModel) -> None:
    for name in model.inputs:
        taken = name == "self" or keyword.iskeyword(name)
        if taken or _INPUT_NAME.fullmatch(name) is None:
            legal = re.sub("[^A-Za-z0-9_]", "_", name)
            if taken or not legal[0].isalpha():
                legal = f"input_{legal}"
            raise ModelError(
                f"a SavedModel cannot call an input '{name}': only letters of ASCII, "
                "digits and '_', a letter first, and no word of Python; save "
                f"model.rename(inputs={{{name!r}: {legal!r}}})"
            )


def _check_python(model: EditableModel, function: Any) -> None:
    graph_def = function.graph.as_graph_def()
    bodies = (f.node_def for f in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *bodies):
        if node.op in PYTHON_CALLS:
            raise ModelError(
                f"'{node.name}' ({node.op}) of {model!r} calls a function of Python, "
                "which no file can hold; replace it, or cut it off with model.cut"
            )


def _root(model: EditableModel, functions: Iterable[Any]) -> Any:
    """Return an object that tracks all that the functions read."""
    root = new_trackable()
    variables = list(model.variables.values())
    root.variables = variables
    root.trainable_variables = [v for v in variables if is_trainable(v)]
    root.non_trainable_variables = [v for v in variables if not is_trainable(v)]
    root.geutil_resources = _resources(model, functions)
    root.geutil_assets = list(model.holdings.assets)
    return root


def _resources(model: EditableModel, functions: Iterable[Any]) -> list[Any]:
    """Return the owners of tables, known ones and those that functions captured."""
    resources = list(model.holdings.resources)
    known = {id(r.resource_handle) for r in resources}
    known |= set(model.holdings.by_handle())
    for function in functions:
        for captured in function.captured_inputs:
            if captured.dtype != tf.resource or id(captured) in known:
                continue
            known.add(id(captured))
            if any(captured is v.handle for v in function.variables):
                continue
            owner = owner_of(captured)
            if owner is None:
                raise ModelError(
                    f"{model!r} reads a resource that no object in memory owns "
                    f"({captured}); keep the table that you made it from, and save "
                    "again"
                )
            resources.append(owner)
    return resources


_WRITERS: dict[str, Callable[[EditableModel, Path], None]] = {
    "saved_model": _write_saved_model,
    "graph_def": write_graph_def,
    "pbtxt": write_pbtxt,
    "tflite": write_tflite,
}
