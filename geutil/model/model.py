"""The model: a graph to edit, with named ends, variables and signatures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings, call_function
from geutil.graph.kinds import Graph, Operation
from geutil.graph.state import fingerprint
from geutil.model import saving
from geutil.model.building import build, ops_to_run
from geutil.model.calling import ModelFunction, checked_arguments
from geutil.model.ends import Inputs, Outputs
from geutil.model.holdings import Holdings
from geutil.model.library import Functions, Library
from geutil.model.materializing import Parts, materialize
from geutil.model.program import Program
from geutil.model.signatures import Signatures
from geutil.model.sources.functions import program_of_graph

if TYPE_CHECKING:
    from geutil.model.bodies import Body


class Model:
    """A graph that can be edited, with named inputs and outputs.

    `geutil.model.open` makes models. The methods never change the model they are called
    on: they return a new one, which shares its variables. To edit in place, work on
    `graph` with any function of geutil; `run`, `save` and the others see the edits.

    Attributes:
        inputs: the inputs by name, in order: placeholders of the graph.
        outputs: the outputs by name, in order; they follow edits, and can be set.
        signature: the name of the signature that this graph computes.
        kept_calls: (op, function, reason) for each call that was not inlined.
    """

    def __init__(
        self,
        parts: Parts,
        signature: str,
        signatures: Signatures,
        holdings: Holdings,
        library: Library | None = None,
    ) -> None:
        self._graph: Graph = parts.graph
        self._library = Library(parts.graph, holdings) if library is None else library
        self.inputs = Inputs(parts.inputs)
        self.outputs = Outputs(parts.graph, self.inputs, parts.sinks)
        self.signature = signature
        self.kept_calls = tuple(parts.kept)
        self._side_effects: Operation = parts.side_effects
        self._signatures = signatures
        self._holdings = holdings
        self._built: tuple[Any, Any] | None = None
        signatures.adopt(self)

    def __repr__(self) -> str:
        return (
            f"Model('{self.signature}', {list(self.inputs)} -> {list(self.outputs)}, "
            f"{len(self.graph.get_operations())} ops)"
        )

    @property
    def graph(self) -> Graph:
        """A `tf.Graph` to edit; edited bodies of functions are written back to it first.

        To be precise it is a FuncGraph, which reads eager variables by capturing them:
        under `with model.graph.as_default():`, ops can be added that read any
        `tf.Variable`.

        Raises:
            ModelError: an edited body cannot be written back; see `functions`.
        """
        self._library.sync()
        return self._graph

    @property
    def functions(self) -> Mapping[str, Body]:
        """The functions that the graph's ops call, however indirectly, each a model.

        Bodies of loops, branches of conditionals, and functions whose calls were not
        inlined, under the names that they have in the graph's library; callers come
        before what they call. A body is edited on its own graph; the model and all other
        callers follow, when the model is used next. The names stay as bodies change.

        Example:
            >>> import tensorflow as tf
            >>> import geutil as ge
            >>> from geutil import model
            >>> @tf.function
            ... def square(x):
            ...     return tf.multiply(x, x, name="product")
            >>> @tf.function(input_signature=[tf.TensorSpec([], name="x")])
            ... def f(x):
            ...     return {"y": square(x) + square(-x)}
            >>> m = model.open(f, inline=False)
            >>> [name] = m.functions
            >>> body = m.functions[name]
            >>> product = body.graph.get_tensor_by_name("product:0")
            >>> with body.graph.as_default():
            ...     root = tf.sqrt(product)
            >>> _ = ge.swap_outputs(ge.sgv(product.op), ge.sgv(root.op))
            >>> m.run(x=3.0)
            {'y': array(6., dtype=float32)}
        """
        self._library.sync()
        return Functions(self._library)

    @property
    def signatures(self) -> Mapping[str, Model]:
        """The signatures by name, this one among them, each a model."""
        return self._signatures

    @property
    def variables(self) -> Mapping[str, tf.Variable]:
        """The variables by name, shared by all signatures."""
        return MappingProxyType(self._holdings.variables)

    @property
    def assets(self) -> tuple[Path, ...]:
        """The files that the tables of the model are read from."""
        paths = [asset.asset_path.numpy().decode() for asset in self._holdings.assets]
        return tuple(Path(path) for path in paths)

    def run(self, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the outputs for some inputs.

        Args:
            **inputs: a value for each input: an array, or what converts to one.

        Returns:
            The outputs by name, in order.

        Raises:
            ModelError: an input is missing, unknown, or of another dtype or shape; an
                output depends on a placeholder that is no input.
            tf.errors.OpError: an op fails.

        Cost: one execution; after an edit also a copy of the graph.
        """
        arguments = checked_arguments(self.inputs, inputs)
        results = call_function(self.concrete_function(), arguments)
        return {name: results[name].numpy() for name in self.outputs}

    def to_function(self) -> ModelFunction:
        """Return the model, as it is now, as a callable of tensors.

        It works in eager code and inside `tf.function`; `tf.GradientTape` differentiates
        it, through its variables too. Later edits of the graph do not change it.

        Raises:
            ModelError: an output depends on a placeholder that is no input.

        Cost: a copy of the graph, unless nothing was edited since the last one.
        """
        return ModelFunction(self.concrete_function(), self.inputs, tuple(self.outputs))

    def save(
        self,
        path: str | Path,
        format: str = "saved_model",
        *,
        overwrite: bool = False,
    ) -> Path:
        """Write the model to a file or directory.

        The old content stays whole until the new one is written in full.

        Args:
            path: where to.
            format: "saved_model", a directory with variables, tables, assets and all
                signatures; "graph_def" or "pbtxt", one file with this signature frozen,
                in which input `x` is the placeholder `x` and output `y` the tensor
                `y:0`; "tflite", one file with this signature for TensorFlow Lite.
            overwrite: whether to replace what is at `path`.

        Returns:
            The path.

        Raises:
            ModelError: there is something at `path`; the format is unknown; or the
                model holds what the format cannot: the message names it.

        Cost: linear in the ops and the bytes of the variables.
        """
        return saving.save(self, Path(path), format, overwrite=overwrite)

    @property
    def holdings(self) -> Holdings:
        """What the signatures share: variables, tables, assets."""
        return self._holdings

    def opened_signatures(self) -> dict[str, Model]:
        """Return the signatures that were opened, this one among them."""
        return self._signatures.opened()

    def unopened_signatures(self) -> dict[str, Any]:
        """Return the functions of the signatures that nobody has opened."""
        return self._signatures.unopened()

    def concrete_function(self) -> Any:
        """Return a concrete function of the graph as it is now; see `to_function`."""
        sinks = self.outputs.sinks
        state = (fingerprint(self.graph), tuple(sinks), len(self._holdings.variables))
        if self._built is None or self._built[0] != state:
            function = build(
                self.graph, self.inputs, sinks, self._side_effects, self._holdings
            )
            self._built = (state, function)
        return self._built[1]

    def program(self) -> Program:
        """Return the graph as it is now as a program, the form that it is rebuilt from.

        Raises:
            ModelError: an output depends on a placeholder that is no input.
        """
        sinks = self.outputs.sinks
        ops_to_run(self.graph, self.inputs, sinks, self._side_effects)
        program = program_of_graph(
            self.graph, dict(self.inputs), dict(self.outputs), bindings(self.graph)
        )
        program.side_effects = [op.name for op in self._side_effects.control_inputs]
        return program

    def derived(
        self,
        program: Program,
        *,
        holdings: Holdings | None = None,
        signature: str | None = None,
        alone: bool = False,
    ) -> Model:
        """Return a model of a program, with the other signatures unless it is alone."""
        parts = materialize(program, inline=False, what=repr(self))
        others = self._signatures.without(self.signature)
        if alone:
            others = others.alone()
        return Model(
            parts,
            self.signature if signature is None else signature,
            others,
            self._holdings if holdings is None else holdings,
        )
