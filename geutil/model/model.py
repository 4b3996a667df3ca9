"""The model: a graph to edit, with named ends, variables and signatures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings, call_function, seen_variables
from geutil.graph.kinds import Graph, Operation
from geutil.graph.state import fingerprint
from geutil.model import cutting, joining, renaming, saving
from geutil.model.building import build, ops_to_run
from geutil.model.calling import ModelFunction, checked_arguments
from geutil.model.ends import Inputs, Outputs
from geutil.model.holdings import Holdings
from geutil.model.library import Functions, Library
from geutil.model.materializing import Parts, materialize
from geutil.model.program import Program
from geutil.model.restoring import check_initialized, restore
from geutil.model.selecting import Selection
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
        kept_calls: the calls that opening did not inline, each with its reason.
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
            f"{self._size()} ops)"
        )

    def _size(self) -> int:
        # Not those that stand for the model's ends.
        return len(self._graph.get_operations()) - len(self.outputs) - 1

    @property
    def graph(self) -> Graph:
        """A `tf.Graph` to edit; edited bodies of functions are written back to it.

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
        before what they call. A body is edited on its own graph; the model and all
        other callers follow, when the model is used next. The names stay as bodies
        change.

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
        """The variables by name, shared by all signatures.

        Variables that ops were added for under `with model.graph.as_default():` are
        among them.
        """
        self._holdings.add_variables(seen_variables(self.graph))
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
                output depends on a placeholder that is no input; a variable has no
                value.
            tf.errors.OpError: an op fails.

        Cost: one execution; after an edit also a copy of the graph.
        """
        arguments = checked_arguments(self.inputs, inputs)
        function = self.concrete_function()
        try:
            results = call_function(function, arguments)
        except tf.errors.OpError as error:
            check_initialized(self._holdings, function.variables, error)
            raise
        return {name: np.asarray(results[name].numpy()) for name in self.outputs}

    def restore(self, checkpoint: str | Path) -> list[str]:
        """Give the variables the values that they have in a checkpoint, by name.

        For a graph that was not frozen, and the checkpoint of version 1 that belongs to
        it. Variables are shared: all models that read them see the values.

        Args:
            checkpoint: the prefix of the checkpoint's files.

        Returns:
            The names of the variables that the checkpoint does not have, which keep
            their values.

        Raises:
            ModelError: the checkpoint cannot be read, has none of the variables, or has
                another shape or dtype for one; no variable is changed.

        Cost: linear in the bytes of the variables.
        """
        return restore(self._holdings, str(checkpoint))

    def to_function(self) -> ModelFunction:
        """Return the model, as it is now, as a callable of tensors.

        It works in eager code and inside `tf.function`, and `tf.GradientTape`
        differentiates it, through its variables too. Later edits of the graph do not
        change it.

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

    def cut(
        self, inputs: Selection | None = None, outputs: Selection | None = None
    ) -> Model:
        """Return the part of the model between some tensors.

        It has the variables that it needs and no other signatures.

        Args:
            inputs: the tensors that become inputs; those of the model that the outputs
                need if None. Several tensors, ops with one output or names (of ends,
                tensors or ops), or a mapping from the name of each new input. Without a
                mapping, ends keep their names and other tensors are called after their
                ops.
            outputs: the tensors that become outputs, given likewise; those of the model
                if None.

        Returns:
            A new model.

        Raises:
            ModelError: a tensor is not in the graph; the outputs still depend on an
                input of the model that is not cut off, or do not depend on a given one;
                two ends would have the same name.

        Cost: linear in the ops.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     hidden = tf.add(x, 1.0, name="hidden")
            ...     return {"y": 2 * hidden}
            >>> m = model.open(f)
            >>> m.cut(outputs=["hidden"]).run(x=[1.0])
            {'hidden': array([2.], dtype=float32)}
            >>> m.cut(inputs={"h": "hidden"}).run(h=[1.0])
            {'y': array([2.], dtype=float32)}
        """
        return cutting.cut(self, inputs, outputs)

    def splice(
        self,
        other: Model,
        replaced: joining.Links,
        feeds: joining.Links = (),
        *,
        scope: str = "spliced",
    ) -> Model:
        """Return a model in which outputs of another one replace tensors of this one.

        Args:
            other: the model that is put in. Where names of ops clash, its ops get a
                scope; inputs and outputs whose names clash get a number.
            replaced: for tensors of this model the outputs of `other` (by name) that
                their readers read instead. A mapping or pairs; a tensor is given by
                name, as `tensor.ref()` or, in pairs, as it is.
            feeds: for inputs of `other` (by name) the tensors of this model that they
                are. The other inputs of `other` become inputs of the result.
            scope: the scope of the ops of `other` where names clash.

        Returns:
            A new model with the variables of both. Its outputs are those of this model
            and those of `other` that replace nothing; inputs that are not needed any
            more are left out.

        Raises:
            ModelError: an end or tensor does not exist; dtypes or shapes do not fit; or
                the models would depend on each other in a circle.

        Cost: linear in the ops of both.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> spec = tf.TensorSpec([None], name="x")
            >>> @tf.function(input_signature=[spec])
            ... def f(x):
            ...     hidden = tf.add(x, 1.0, name="hidden")
            ...     return {"y": 2 * hidden}
            >>> @tf.function(input_signature=[spec])
            ... def g(x):
            ...     return {"z": x * 100}
            >>> m = model.open(f).splice(model.open(g), {"hidden": "z"}, {"x": "x"})
            >>> m.run(x=[1.0])
            {'y': array([200.], dtype=float32)}
        """
        return joining.splice(self, other, replaced, feeds, scope)

    def prepend(self, other: Model, inputs: Mapping[str, str] | None = None) -> Model:
        """Return a model that computes another one first, such as decoding a JPEG.

        Args:
            other: the model that goes before.
            inputs: for inputs of this model the outputs of `other` that they are. If
                None, those of the same name, or the only ones.

        Returns:
            A new model, as of `splice`. The outputs of `other` that this model does not
            read are among its outputs.

        Raises:
            ModelError: as `splice`; or no names agree.

        Cost: linear in the ops of both.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": 2 * x}
            >>> @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
            ... def parse(text):
            ...     return {"number": tf.strings.to_number(text)}
            >>> model.open(f).prepend(model.open(parse)).run(text=["1", "2"])
            {'y': array([2., 4.], dtype=float32)}
        """
        return joining.prepend(self, other, inputs)

    def append(self, other: Model, inputs: Mapping[str, str] | None = None) -> Model:
        """Return a model that computes another one last, such as a softmax.

        Args:
            other: the model that goes behind.
            inputs: for inputs of `other` the tensors of this model that they are. If
                None, the outputs of the same name, or the only ones.

        Returns:
            A new model, as of `splice`, but without the outputs that `other` reads.

        Raises:
            ModelError: as `splice`; or no names agree.

        Cost: linear in the ops of both.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> spec = tf.TensorSpec([None], name="x")
            >>> @tf.function(input_signature=[spec])
            ... def f(x):
            ...     return {"y": 2 * x}
            >>> largest = tf.function(lambda x: {"largest": tf.reduce_max(x)}, [spec])
            >>> model.open(f).append(model.open(largest)).run(x=[1.0, 2.0])
            {'largest': array(4., dtype=float32)}
        """
        return joining.append(self, other, inputs)

    def rename(
        self,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        signature: str | None = None,
    ) -> Model:
        """Return the model with other names for its ends or its signature.

        Args:
            inputs: the new name of each input to rename.
            outputs: the new name of each output to rename.
            signature: the new name of the signature.

        Raises:
            ModelError: there is no end of an old name, two would have the same name, or
                there is such a signature.

        Cost: linear in the ops.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": 2 * x}
            >>> model.open(f).rename({"x": "images"}, {"y": "scores"}, "predict")
            Model('predict', ['images'] -> ['scores'], 3 ops)
        """
        return renaming.rename(self, inputs or {}, outputs or {}, signature)

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

    def program(self, *, checked: bool = True) -> Program:
        """Return the graph as it is now as a program, the form that it is rebuilt from.

        Args:
            checked: whether to refuse placeholders that nothing feeds.

        Raises:
            ModelError: an output depends on a placeholder that is no input.
        """
        sinks = self.outputs.sinks
        if checked:
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
