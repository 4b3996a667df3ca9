"""Models written to files, all or nothing."""

from __future__ import annotations

import itertools
import keyword
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil import tflite
from geutil.errors import ModelError, Words
from geutil.formats import refusal, written_atomically
from geutil.graph import keras_calls, op_types, protos
from geutil.graph.walks import node_name, short_name, tensor_name
from geutil.model import frozen_variables, programs
from geutil.model.core import EditableModel
from geutil.model.programs import ModelProgram, SharedState
from geutil.model.sources.graph_defs import named_ends
from geutil.model.sources.objects import DEFAULT_SIGNATURE

_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)


def write_tflite(model: EditableModel, path: Path) -> None:
    """Write a model for TensorFlow Lite; see `Model.save`."""
    _write_tflite(model, path, select_tf_ops=False)


def write_tflite_with_tf_ops(model: EditableModel, path: Path) -> None:
    """Write a model for a TensorFlow Lite that comes with ops of TensorFlow."""
    _write_tflite(model, path, select_tf_ops=True)


def _write_tflite(model: EditableModel, path: Path, *, select_tf_ops: bool) -> None:
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
        blob = converter.convert()
    except Exception as error:
        # The converter's own class of errors is no part of TensorFlow's public API.
        remedy = (
            "replace these ops"
            if select_tf_ops
            else f"pass {Words('select_tf_ops=True')} to keep ops that TensorFlow Lite "
            "lacks, or replace them"
        )
        raise ModelError(
            f"TensorFlow Lite cannot take {model!r}: {_reason(error)}", remedy=remedy
        ) from error
    if model.signature != DEFAULT_SIGNATURE:
        # The converter gives the signature of a function this name.
        file = tflite.open(blob)
        file.rename(signatures={DEFAULT_SIGNATURE: model.signature})
        blob = file.to_bytes()
    path.write_bytes(blob)


def _reason(error: Exception) -> str:
    """Return the converter's message about the ops, without its traces."""
    text = str(error)
    said = dict.fromkeys(m[1].strip() for m in _SAID.finditer(text))
    return "; ".join(said)[:1500] or text[:1500]


_SAVED_MODEL = Words("save it with format='saved_model'")
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
        with keras_calls.flags_as_noted(model.variables.values()):
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
                "digits and '_', a letter first, and no word of Python",
                remedy=Words(
                    f"save model.rename(inputs={{{name!r}: {legal!r}}})",
                    f"{name}={legal}",
                ),
            )


def _check_python(model: EditableModel, function: Any) -> None:
    graph_def = function.graph.as_graph_def()
    bodies = (f.node_def for f in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *bodies):
        if node.op in op_types.PYTHON_CALLS:
            raise ModelError(
                f"'{node.name}' ({node.op}) of {model!r} calls a function of Python, "
                "which no file can hold",
                remedy=f"replace it, or cut it off with {Words('model.cut')}",
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
    trained = keras_calls.trained(variables)
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
            # Variables are saved from a list of their own.
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


_LEGAL = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def write_graph_def(model: EditableModel, path: Path) -> None:
    """Write a binary GraphDef; see `Model.save`."""
    _write_nodes(model, path, as_text=False)


def write_pbtxt(model: EditableModel, path: Path) -> None:
    """Write a GraphDef as text; see `Model.save`."""
    _write_nodes(model, path, as_text=True)


def _write_nodes(model: EditableModel, path: Path, *, as_text: bool) -> None:
    """Write a model's frozen graph, whose nodes tell its ends."""
    # Input `x` is the placeholder `x`, and output `y` the tensor `y:0`, which no node
    # reads.
    check_names(model)
    dtypes = {name: tensor.dtype for name, tensor in model.outputs.items()}
    graph_def = with_named_ends(stateless_program(model), dtypes)
    _tell_what_opening_misses(graph_def, list(model.outputs))
    tf.io.write_graph(graph_def, str(path.parent), path.name, as_text=as_text)


def check_names(model: EditableModel) -> None:
    """Check that the names of inputs and outputs can be names of nodes."""
    for kind, ends, rename in (
        ("input", model.inputs, Words("rename(inputs={...})")),
        ("output", model.outputs, Words("rename(outputs={...})")),
    ):
        for name in ends:
            if not _LEGAL.fullmatch(name):
                raise ModelError(
                    f"{kind} '{name}' cannot be the name of a node, which this format "
                    f"asks for; choose another one with {rename}"
                )
    for name, tensor in model.outputs.items():
        if name in model.inputs and tensor is not model.inputs[name]:
            raise ModelError(
                f"'{name}' is an input and also an output, '{tensor.name}', and this "
                "format has one node of each name",
                remedy=f"choose another name with {Words('rename(outputs={...})')}",
            )


def _tell_what_opening_misses(graph_def: Any, outputs: list[str]) -> None:
    """Log the ends that opening misses: inputs, and outputs that no input leads to."""
    shown = named_ends(graph_def, None, "the file", "output")
    missed = [name for name in outputs if name not in shown]
    if missed:
        _logger.warning(
            "the file does not show that %s are outputs, as no input leads to them; %s",
            missed,
            Words(f"geutil.model.open takes their names: outputs={outputs}"),
        )


def stateless_program(model: EditableModel) -> ModelProgram:
    """Return the frozen program of a model that captures nothing."""
    program = frozen_variables.frozen_program(model)
    if program.captures:
        # In reverse order, the first reader of each is the one that remains.
        readers = {
            node_name(text): f"'{node.name}' ({node.op})"
            for node in reversed(program.graph_def.node)
            for text in node.input
        }
        descriptions = [
            f"'{node_name(t)}', read by {readers[node_name(t)]}"
            for t in program.captures
        ]
        raise ModelError(
            f"{model!r} reads tables or the like, which are no constants and no part "
            f"of this format: {'; '.join(descriptions)}",
            remedy=f"{_SAVED_MODEL}, or cut the model off behind them",
        )
    return program


def with_named_ends(program: ModelProgram, dtypes: Mapping[str, tf.DType]) -> Any:
    """Return the graph of a program, its ends called as the program calls them."""
    # An output stays the node that it is if that has the right name and serves nothing
    # else; else it becomes an Identity, which also waits for the side effects. Nodes
    # that bear the name of an end for something else are renamed.
    graph_def, inputs = program.graph_def, list(program.inputs)
    in_place = _outputs_in_place(program)
    ends = {node_name(t): name for name, t in program.inputs.items()}
    ends |= {name: name for name in in_place}
    names = _new_names(graph_def, ends, {*inputs, *program.outputs})
    programs.rename_nodes(program, names)
    for name, tensor in program.outputs.items():
        if name not in in_place and name not in inputs:
            source = short_name(tensor_name(tensor))
            waits = [f"^{effect}" for effect in program.side_effects]
            node = graph_def.node.add(name=name, op="Identity", input=[source, *waits])
            node.attr["T"].type = dtypes[name].as_datatype_enum
    # The order of nodes tells the order of inputs and outputs.
    rank = {name: place for place, name in enumerate((*inputs, "", *program.outputs))}
    graph_def.node.sort(key=lambda node: rank.get(node.name, len(inputs)))
    return graph_def


def _outputs_in_place(program: ModelProgram) -> set[str]:
    """Return the outputs that are named nodes already, which nothing else reads."""
    if program.side_effects:
        return set()
    nodes = programs.nodes_by_name(program.graph_def)
    uses = Counter(node_name(t) for n in nodes.values() for t in n.input)
    uses.update(node_name(t) for t in program.outputs.values())
    return {
        name
        for name, tensor in program.outputs.items()
        if tensor_name(tensor) == f"{name}:0"
        and uses[name] == 1
        and nodes[name].op not in _NO_ENDS
    }


_NO_ENDS = ("Const", "Placeholder")
"""Ops that are not taken for outputs when nothing reads them."""


def _new_names(
    graph_def: Any, ends: Mapping[str, str], reserved: set[str]
) -> dict[str, str]:
    """Return the new names of nodes: ends get theirs, others leave these to them."""
    used_names = {node.name for node in graph_def.node} | reserved
    names = dict(ends)
    for node in graph_def.node:
        if node.name in reserved and node.name not in ends:
            names[node.name] = programs.take_name(used_names, node.name)
    return names


_WRITERS: dict[str, Callable[[EditableModel, Path], None]] = {
    "saved_model": _write_saved_model,
    "graph_def": write_graph_def,
    "pbtxt": write_pbtxt,
    "tflite": write_tflite,
}
