"""Programs of SavedModels, of TensorFlow 2 and of version 1."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import keras_calls, protos, types
from geutil.graph.keras_calls import LayerCall, calls_by_scopes
from geutil.graph.protos import SavedModel
from geutil.graph.resource_variables import VariableFacts, variable_facts
from geutil.graph.types import Graph
from geutil.model.files import proto_files, validation, wire
from geutil.model.files.proto_files import PathLike
from geutil.model.programs import ModelProgram, holdings_of
from geutil.model.sources import graph_defs
from geutil.model.sources.graph_defs import programs_of_graph_def
from geutil.model.sources.objects import Source, program_of_function

_logger = logging.getLogger("geutil")
_INIT_SIGNATURES = frozenset(("__saved_model_init_op", "__saved_model_train_op"))


def open_saved_model(path: Path, tags: Sequence[str] | None) -> Source:
    """Return a SavedModel as a source."""
    meta_graph = proto_files.select_meta_graph(proto_files.read_saved_model(path), tags)
    what = f"SavedModel '{path}'"
    if meta_graph.object_graph_def.nodes:
        return _of_objects(path, meta_graph, what)
    return _of_version_1(path, meta_graph, what)


def _of_objects(path: Path, meta_graph: Any, what: str) -> Source:
    """Return a SavedModel with objects as a source; signatures are read on demand."""
    loaded = load_saved_model(path, list(meta_graph.meta_info_def.tags))
    signatures = getattr(loaded, "signatures", {})
    if not isinstance(signatures, Mapping):
        raise ModelError(f"{what} has no list of signatures: the file is damaged")
    functions: dict[str, Any] = {}
    for name, function in signatures.items():
        if not isinstance(function, tf.types.experimental.ConcreteFunction):
            raise ModelError(
                f"signature '{name}' of {what} is no function but a "
                f"{types.type_name(function)}: the file is damaged"
            )
        functions[name] = function
    holdings = holdings_of(loaded)
    # Keras, and geutil, list those of frozen layers here; the variables say otherwise.
    frozen = getattr(loaded, "non_trainable_variables", None)
    for variable in frozen if isinstance(frozen, Sequence) else ():
        if isinstance(variable, tf.Variable):
            keras_calls.set_trainable(variable, False)
    classes = _keras_classes(path)
    source = Source(what, {}, holdings, functions)

    def find_layers(graph: Graph) -> tuple[LayerCall, ...]:
        op_names = [op.name for op in graph.get_operations()]
        return calls_by_scopes(op_names, classes, holdings.variables)

    source.find_layers = find_layers
    for name, function in functions.items():
        source.signatures[name] = partial(_program, function, name, what)
    return source


_NODE, _PLACE, _KIND, _METADATA = 1, 3, 4, 5
"""Fields of `keras_metadata.pb`: a node, and in it its place, kind and JSON."""


def _keras_classes(path: Path) -> dict[str, str] | None:
    """Return the classes of layers by path, as tf_keras notes them in a SavedModel."""
    # None if there is no such note, or none that can be read: the model opens without.
    file = path / "keras_metadata.pb"
    if not file.is_file():
        return None
    nodes: dict[str, tuple[str, str]] = {}
    data = file.read_bytes()
    try:
        for node in wire.fields(data, 0, len(data)):
            values = {
                f.number: data[f.start : f.end]
                for f in wire.fields(data, node.start, node.end)
            }
            config = json.loads(values.get(_METADATA, b"{}"))
            kind = values.get(_KIND, b"").decode()
            if node.number == _NODE and "class_name" in config and "metric" not in kind:
                place = values.get(_PLACE, b"").decode()
                nodes[place] = (str(config.get("name")), str(config["class_name"]))
    except (ModelError, ValueError) as error:
        _logger.warning("'%s' cannot be read (%s); layers have no names", file, error)
        return None
    classes = {}
    for place, (_, class_name) in nodes.items():
        parts = place.split(".")
        around = [".".join(parts[:count]) for count in range(2, len(parts) + 1)]
        if around and all(place in nodes for place in around):
            classes["/".join(nodes[place][0] for place in around)] = class_name
    return classes


def _program(function: Any, name: str, what: str) -> ModelProgram:
    """Return the program of a signature."""
    try:
        program = program_of_function(function)
    except ModelError:
        raise
    except Exception as error:
        # TensorFlow restores what a damaged file says without asking if it fits.
        raise ModelError(
            f"signature '{name}' of {what} cannot be opened, the file is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    # The file holds a map of them, which each process reads in an order of its own.
    program.outputs = {n: program.outputs[n] for n in sorted(program.outputs, key=_key)}
    return program


def _key(name: str) -> list[Any]:
    """Return the sort key of a name: `output_9` goes before `output_10`."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _of_version_1(path: Path, meta_graph: Any, what: str) -> Source:
    """Return a SavedModel of version 1 as a source."""
    graph_def = meta_graph.graph_def
    frozen = graph_defs.insert_handles(graph_def)
    validation.check_graph_def(graph_def, what)
    signatures = {}
    for name, definition in sorted(meta_graph.signature_def.items()):
        # TensorFlow lists ops that initialize or train among the signatures.
        if name not in _INIT_SIGNATURES:
            inputs = _tensors(definition.inputs, what, name)
            signatures[name] = (inputs, _tensors(definition.outputs, what, name))
    facts = variable_facts(meta_graph.collection_def)
    assets = {
        name: str(path / "assets" / file)
        for name, file in protos.asset_files(meta_graph).items()
    }
    programs, holdings = programs_of_graph_def(
        graph_def,
        signatures,
        what,
        facts=facts,
        value_of=_checkpoint_values(path, facts, what),
        assets=assets,
        frozen=frozen,
    )
    return Source(
        what, {name: partial(_given, p) for name, p in programs.items()}, holdings
    )


def _given(program: ModelProgram) -> ModelProgram:
    return program


def _tensors(infos: Any, what: str, signature: str) -> dict[str, str]:
    tensors = {}
    for name in sorted(infos, key=_key):
        if not infos[name].name:
            raise ModelError(
                f"'{name}' in signature '{signature}' of {what} is no plain tensor; "
                "geutil opens signatures of dense tensors"
            )
        tensors[name] = infos[name].name
    return tensors


def _checkpoint_values(
    path: Path, facts: dict[str, VariableFacts], what: str
) -> Callable[[str, Any], np.ndarray[Any, Any] | None]:
    """Return a function that reads variables from a SavedModel's checkpoint."""
    prefix = path / "variables" / "variables"
    if not prefix.with_suffix(".index").exists():
        return lambda _name, _node: None
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except Exception as error:
        # The reader raises what the C++ status says, in classes of many kinds.
        raise ModelError(f"the variables of {what} cannot be read: {error}") from error

    def value_of(name: str, node: Any) -> np.ndarray[Any, Any] | None:
        """Return the value of a variable, or None if the checkpoint has none."""
        node_facts = facts.get(name)
        key = node_facts.key if node_facts is not None else name
        if not reader.has_tensor(key):
            return None
        try:
            value: np.ndarray[Any, Any] = np.asarray(reader.get_tensor(key))
        except Exception as error:
            raise ModelError(
                f"variable '{key}' of {what} cannot be read: {error}"
            ) from error
        # The parts of a partitioned variable are one entry of the checkpoint.
        if node_facts is not None and node_facts.offset is not None:
            shape = [d.size for d in node.attr["shape"].shape.dim]
            pairs = zip(node_facts.offset, shape, strict=True)
            value = value[tuple(slice(o, o + size) for o, size in pairs)]
        return value

    return value_of


def open_checkpoint(prefix: Path) -> Any:
    """Check the files of a checkpoint, and open its index."""
    index = proto_files.checked_index(prefix)
    try:
        return tf.train.load_checkpoint(str(prefix))
    except Exception as error:  # TensorFlow raises several kinds, RuntimeError too.
        raise ModelError(f"'{index}' is damaged: {error}") from error


def load_saved_model(path: PathLike, tags: Iterable[str] | None = None) -> Any:
    """Load a SavedModel, checked before.

    Args:
        path: the directory of the SavedModel.
        tags: exactly the tags of the MetaGraph; None means "serve", or the only one
            there is.

    Example:
        >>> loaded = load_saved_model("testdata/two_signatures")
        >>> sorted(loaded.signatures)
        ['decode', 'encode']
    """
    folder = Path(path)
    saved_model = proto_files.read_saved_model(folder)
    chosen = list(proto_files.select_meta_graph(saved_model, tags).meta_info_def.tags)
    check_saved_model(saved_model, folder)
    del saved_model
    try:
        return tf.saved_model.load(str(folder), tags=chosen)
    except Exception as error:  # The loader raises whatever its Python code meets.
        reason = str(error).strip() or type(error).__name__
        raise ModelError(f"'{folder}' cannot be loaded: {reason}") from error


def check_saved_model(saved_model: SavedModel, folder: Path) -> None:
    """Check a SavedModel's graphs and its checkpoint."""
    for meta_graph in saved_model.meta_graphs:
        tags = ", ".join(meta_graph.meta_info_def.tags)
        validation.check_graph_def(
            meta_graph.graph_def, f"'{folder}', MetaGraph '{tags}'"
        )
    prefix = proto_files.variables_prefix(folder)
    if proto_files.has_checkpoint(prefix) or any(
        map(_has_variables, saved_model.meta_graphs)
    ):
        open_checkpoint(prefix)


def _has_variables(meta_graph: Any) -> bool:
    nodes = meta_graph.object_graph_def.nodes
    return any(node.WhichOneof("kind") == "variable" for node in nodes)
