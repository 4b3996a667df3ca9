"""Programs of objects in memory: functions and Keras models."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import keras_calls, replicas
from geutil.graph.functions import bindings, side_effects
from geutil.graph.keras_calls import LayerCall
from geutil.graph.types import Graph, Tensor
from geutil.graph.walks import node_name
from geutil.model.files.keras_files import inspect_keras, refuse_code, without_values
from geutil.model.programs import (
    Ancestor,
    ModelProgram,
    SharedState,
    nodes_by_name,
    set_constant,
)

CONSTANT_LIMIT = 64 * 2**20
"""Captured values of at most so many bytes become constants of the graph."""


def concrete_function_of(function: Any) -> Any:
    """Return the one concrete function of a `tf.function` with an input signature."""
    if getattr(function, "input_signature", None) is None:
        raise ModelError(
            f"{function!r} has no input signature, so there is no telling which trace "
            "of it is meant; pass function.get_concrete_function(...) or decorate it "
            "with tf.function(input_signature=[...])"
        )
    return function.get_concrete_function()


def ordered(
    variables: Iterable[tf.Variable], captured: Iterable[Any]
) -> list[tf.Variable]:
    """Return variables in the order in which a function captured them."""
    # TensorFlow lists them in another order in each process. Those that were not
    # captured go last, by name.
    rest = {id(v.handle): v for v in map(replicas.first_copy, variables)}
    handles = map(replicas.first_handle, captured)
    captured_variables = [rest.pop(id(t)) for t in handles if id(t) in rest]
    return [*captured_variables, *sorted(rest.values(), key=lambda v: str(v.name))]


def program_of_function(function: Any) -> ModelProgram:
    """Return the program of a concrete function; named as its arguments and results."""
    # A result that is no dictionary of tensors has outputs called `output_0` and so on,
    # as TensorFlow calls them in a SavedModel.
    graph = function.graph
    arguments = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
    return program_of_graph(
        graph,
        dict(zip(_argument_names(function, arguments), arguments, strict=True)),
        _named_results(function),
        zip(
            map(replicas.first_handle, function.captured_inputs),
            function.inputs[len(arguments) :],
            strict=True,
        ),
    )


def program_of_graph(
    graph: Graph,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    captures: Iterable[tuple[Any, Tensor]] | None = None,
) -> ModelProgram:
    """Return the program of a FuncGraph or of a `tf.Graph`, which captures nothing."""
    if captures is None:
        captures = bindings(graph) if hasattr(graph, "captures") else ()
    graph_def = graph_def_with_shapes(graph)
    outside = {inner.name: external for external, inner in captures}
    return ModelProgram(
        graph_def,
        {name: t.name for name, t in inputs.items()},
        {name: t.name for name, t in outputs.items()},
        _small_values_as_constants(graph_def, outside),
        [op.name for op in side_effects(graph)],
        [Ancestor(graph)],
        keras_calls.calls_in(graph),
    )


def graph_def_with_shapes(graph: Graph) -> Any:
    """Return the `GraphDef` of a graph, with its known shapes."""
    try:
        graph_def = graph.as_graph_def(add_shapes=True)
        if graph_def.library.function:
            # Shapes inside functions would make them differ from what TensorFlow holds
            # under the same names, which it refuses.
            graph_def.library.CopyFrom(graph.as_graph_def().library)
        return graph_def
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(
            "the graph holds more constants than fit into one protobuf (2 GB); keep "
            f"large values in variables: {error}"
        ) from error


def _argument_names(function: Any, arguments: list[Tensor]) -> list[str]:
    """Name arguments by keyword if there are only keywords, else by placeholder."""
    signature = function.structured_input_signature
    if signature is not None and not signature[0]:
        keywords = signature[1]
        if len(keywords) == len(arguments) and all(
            isinstance(spec, tf.TensorSpec) for spec in keywords.values()
        ):
            return _in_order_of(keywords, arguments)
    return [t.op.name for t in arguments]


def _in_order_of(keywords: dict[str, Any], arguments: list[Tensor]) -> list[str]:
    """Return the keywords in the order of the placeholders, which bear their names."""
    by_name = {}
    for keyword, spec in keywords.items():
        by_name[spec.name or keyword] = keyword
        by_name[keyword] = keyword
    names = [by_name.get(t.op.name) for t in arguments]
    if None in names or len(set(names)) != len(names):
        return list(keywords)
    return [name for name in names if name is not None]


def _named_results(function: Any) -> dict[str, Tensor]:
    structure = function.structured_outputs
    outputs = list(function.outputs)
    if structure is not None:
        # A tape that differentiated the function has added what the gradient reads.
        flat = tf.nest.flatten(structure, expand_composites=True)
        outputs = outputs[: sum(map(_is_tensor, flat))]
    if isinstance(structure, dict) and all(map(_is_tensor, structure.values())):
        # Functions flatten dictionaries by sorted key.
        by_name = dict(zip(sorted(structure), outputs, strict=True))
        return {name: by_name[name] for name in structure}
    return {f"output_{i}": t for i, t in enumerate(outputs)}


def _is_tensor(result: Any) -> bool:
    return isinstance(result, tf.Tensor | tf.TensorSpec)


def _small_values_as_constants(
    graph_def: Any, captures: dict[str, Any]
) -> dict[str, Any]:
    """Turn captured values into constants; return the captures that remain."""
    nodes = nodes_by_name(graph_def) if captures else {}
    remaining: dict[str, Any] = {}
    for name, external in captures.items():
        node = nodes.get(node_name(name))
        if node is None or not _is_small_value(external):
            remaining[name] = external
            continue
        set_constant(node, node.name, external)
    return remaining


def _is_small_value(external: Any) -> bool:
    if not isinstance(external, tf.Tensor) or not hasattr(external, "numpy"):
        return False
    if external.dtype in (tf.resource, tf.variant):
        return False
    size: int = tf.size(external).numpy() * max(external.dtype.size or 0, 1)
    return size <= CONSTANT_LIMIT


@dataclass(frozen=True)
class KerasWeight:
    """A variable of a Keras model."""

    variable: tf.Variable
    name: str


def is_keras_model(source: Any) -> bool:
    """Return whether `source` is a model of Keras or of tf_keras."""
    return _library_of(source) is not None


def weights_of(model: Any) -> list[KerasWeight]:
    """Return the variables that a Keras model lists."""
    weights = []
    for v in model.variables:
        # Those of Keras 3 wrap TensorFlow's, those of tf_keras are TensorFlow's.
        is_plain = isinstance(v, tf.Variable)
        name = node_name(v.name) if is_plain else v.path
        weights.append(KerasWeight(v if is_plain else v.value, name))
    return weights


def load_keras_file(path: Path) -> Any:
    """Load a `.keras` or HDF5 file, in Keras' safe mode."""
    if path.suffix != ".keras":
        refuse_code(path)
    load = tf.keras.models.load_model
    return _by_keras(partial(load, path, compile=False), path)


def build_keras_file(path: Path) -> Any:
    """Build the model of a file with zeros as weights; None if more is to be read."""
    is_legacy = tf.keras.__version__.startswith("2.")
    config = None if is_legacy else without_values(path)
    if config is None:
        return None
    build = tf.keras.utils.deserialize_keras_object
    return _by_keras(partial(build, config), path)


def _by_keras(make: Callable[[], Any], path: Path) -> Any:
    """Let Keras make the model of a file, and say why it cannot."""
    try:
        return make()
    except Exception as error:
        # Keras raises errors of many kinds, the layers' own among them.
        advice = _advice(path)
        raise ModelError(f"Keras cannot load '{path}': {error}{advice}") from error


def _advice(path: Path) -> str:
    """Return the remedy for a file of the Keras before Keras 3; "" for others."""
    version = inspect_keras(path).version or ""
    if not version.startswith("2.") or tf.keras.__version__.startswith("2."):
        return ""
    return (
        f"\nKeras {version} wrote it, which goes on as tf_keras: install that, start "
        "Python with TF_USE_LEGACY_KERAS=1, and open the file again"
    )


def program_of_keras_model(model: Any) -> tuple[ModelProgram, list[tf.Variable]]:
    """Return the program of a Keras model called for inference, and its variables."""
    # Inputs and outputs are named as the model names them. The model does not list all
    # variables that it reads: the states of layers that keep one between calls.
    _check_backend(model)
    specs = _input_specs(model)

    def call(*arguments: Any) -> Any:
        inputs = tf.nest.pack_sequence_as(specs, arguments)
        return model(inputs, training=False)

    flat = tf.nest.flatten(specs)
    try:
        with keras_calls.recorded(model) as calls:
            function = tf.function(call, autograph=False).get_concrete_function(*flat)
    except Exception as error:  # Whatever the layers raise.
        shapes = ", ".join(f"{spec.name} {spec.shape}" for spec in flat)
        raise ModelError(
            f"Keras model '{model.name}' cannot be called with the inputs that it "
            f"declares, {shapes}: {type(error).__name__}; where a layer needs a size "
            "that is open there, build the model with a keras.Input that has it"
        ) from error
    program = program_of_function(function)
    placeholders = list(program.inputs.values())
    program.inputs = dict(zip([s.name for s in flat], placeholders, strict=True))
    program.layers = (*_input_layers(model, program.inputs), *calls)
    if not isinstance(function.structured_outputs, dict):
        names = list(getattr(model, "output_names", None) or ())
        if isinstance(model, _library_of(model).Sequential):
            names = [model.layers[-1].name]
        if len(set(names)) == len(program.outputs):
            program.outputs = dict(zip(names, program.outputs.values(), strict=True))
    return program, ordered(function.variables, function.captured_inputs)


def _input_layers(model: Any, inputs: dict[str, str]) -> Iterator[LayerCall]:
    """Yield the input layers of a model, which nothing calls."""
    for layer in getattr(model, "layers", ()):
        if type(layer).__name__ == keras_calls.INPUT_LAYER and layer.name in inputs:
            tensor = inputs[layer.name]
            yield LayerCall(
                layer.name,
                layer.name,
                keras_calls.INPUT_LAYER,
                node_name(tensor),
                (),
                (tensor,),
                weakref.ref(layer),
            )


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


DEFAULT_SIGNATURE = "serving_default"


@dataclass
class Source:
    """A source of models."""

    what: str  # The source in words, for messages.
    # For each signature the function that makes its program.
    signatures: dict[str, Callable[[], ModelProgram]]
    holdings: SharedState = field(default_factory=SharedState)
    # For each signature the function that can be saved as it is, when nobody has opened
    # the signature.
    functions: dict[str, Any] = field(default_factory=dict)
    # Finds the calls of Keras layers in a graph of which no program tells any.
    find_layers: Callable[[Graph], tuple[LayerCall, ...]] | None = None

    def chosen(self, signature: str | None) -> str:
        """Return the signature that is asked for, or the one that is selected."""
        signature_names = sorted(self.signatures)
        if signature is not None:
            if signature not in self.signatures:
                raise ModelError(
                    f"{self.what} has no signature '{signature}'; it has "
                    f"{signature_names}"
                )
            return signature
        # TensorFlow Serving, too, takes this one where none is named.
        if DEFAULT_SIGNATURE in self.signatures:
            return DEFAULT_SIGNATURE
        if len(signature_names) == 1:
            return signature_names[0]
        if not signature_names:
            raise ModelError(
                f"{self.what} has no signatures",
                remedy=Words(
                    "load it with tf.saved_model.load and pass one of its functions",
                    key="saved_model.load",
                ),
            )
        raise ModelError(
            f"{self.what} has several signatures and no '{DEFAULT_SIGNATURE}'",
            remedy=f"pass {Words('signature=')} as one of {signature_names}",
        )
