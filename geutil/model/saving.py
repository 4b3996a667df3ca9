"""Models written to files, all or nothing."""

from __future__ import annotations

import itertools
import keyword
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.formats import refusal
from geutil.graph import op_types, protos, training_flags
from geutil.model.core import EditableModel
from geutil.model.frozen_graphs import stateless_program, write_graph_def, write_pbtxt
from geutil.model.shared_state import SharedState
from geutil.writing import written_atomically

_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)


def write_tflite(model: EditableModel, path: Path) -> None:
    """Write a model for TensorFlow Lite; see `Model.save`."""
    _write(model, path, select_tf_ops=False)


def write_tflite_with_tf_ops(model: EditableModel, path: Path) -> None:
    """Write a model for a TensorFlow Lite that comes with ops of TensorFlow."""
    _write(model, path, select_tf_ops=True)


def _write(model: EditableModel, path: Path, *, select_tf_ops: bool) -> None:
    program = stateless_program(model)
    frozen = model.derived(program, holdings=SharedState(), alone=True)
    # The converter wants to know an owner of variables, of which there are none.
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [frozen.concrete_function()], protos.new_trackable()
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
    """Return the converter's message about the ops, without its traces."""
    text = str(error)
    said = dict.fromkeys(m[1].strip() for m in _SAID.finditer(text))
    return "; ".join(said)[:1500] or text[:1500]


_INPUT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
"""Names that TensorFlow accepts for inputs of signatures; it changes others."""
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
    """Write a SavedModel: opened signatures as edited, the others as they were."""
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
        # TensorFlow saves the flags of the variables, and geutil only notes its own.
        with training_flags.flags_as_noted(model.variables.values()):
            tf.saved_model.save(root, str(path), signatures=signatures)
    except (ValueError, TypeError, AssertionError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow cannot save {model!r}: {error}") from error


def _check_input_names(model: EditableModel) -> None:
    for name in model.inputs:
        is_reserved = name == "self" or keyword.iskeyword(name)
        if is_reserved or _INPUT_NAME.fullmatch(name) is None:
            legal = re.sub("[^A-Za-z0-9_]", "_", name)
            if is_reserved or not legal[0].isalpha():
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
        if node.op in op_types.PYTHON_CALLS:
            raise ModelError(
                f"'{node.name}' ({node.op}) of {model!r} calls a function of Python, "
                "which no file can hold; replace it, or cut it off with model.cut"
            )


def _root(model: EditableModel, functions: Iterable[Any]) -> Any:
    """Return an object that tracks all that the functions read."""
    root = protos.new_trackable()
    holdings = model.holdings
    for opened in model.opened_signatures().values():
        # One that is kept beside a new one may have got variables since.
        holdings = holdings.merged(opened.holdings)
    variables = list(holdings.variables.values())
    root.variables = variables
    trained = training_flags.trained(variables)
    trained_ids = {id(v) for v in trained}
    root.trainable_variables = list(trained)
    root.non_trainable_variables = [v for v in variables if id(v) not in trained_ids]
    root.geutil_resources = _resources(model, holdings, functions)
    root.geutil_assets = list(holdings.assets)
    return root


def _resources(
    model: EditableModel, holdings: SharedState, functions: Iterable[Any]
) -> list[Any]:
    """Return the owners of tables, known ones and those that functions captured."""
    resources = list(holdings.resources)
    handle_ids = {id(r.resource_handle) for r in resources}
    handle_ids |= set(holdings.by_handle())
    for function in functions:
        for captured in function.captured_inputs:
            if captured.dtype != tf.resource or id(captured) in handle_ids:
                continue
            handle_ids.add(id(captured))
            if any(captured is v.handle for v in function.variables):
                continue
            owner = protos.owner_of(captured)
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
