"""Models and bodies of functions as users see them: a method for each operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from geutil import lazy
from geutil.graph.types import Graph, Operation, Tensor
from geutil.model import function_edits
from geutil.model.core import EditableModel, ModelFunction, Signatures
from geutil.model.function_edits import Value, sync, sync_below
from geutil.model.function_library import (
    BodyOutputs,
    EditableBody,
    Entry,
    FunctionLibrary,
    Functions,
)
from geutil.model.programs import SharedState, check_copies, restore
from geutil.model.sources.objects import Source
from geutil.model.to_graph import GraphParts
from geutil.select.selections import Layer, layers_of

# Each method imports the module that does its work: together they take 0.1 CPU seconds.
if TYPE_CHECKING:
    from geutil.model.comparison import Comparison
    from geutil.model.model_ends import Links, Selection


class Model(EditableModel):
    """A graph that can be edited, with named inputs and outputs.

    `geutil.model.open` makes models. The methods never change the model they are called
    on: they return a new one, which shares its variables. To edit in place, work on
    `graph` with any function of geutil; `run`, `save` and the others see the edits.

    Attributes:
        inputs: the inputs by name, in order: placeholders of the graph.
        outputs: the outputs by name, in order; they follow edits, and can be set.
        signature: the name of the signature that this graph computes.
        kept_calls: the calls that opening did not inline, each with its reason.
        strip_report: the report of the `strip_training` that made this model; None for
            others.
    """

    def __init__(
        self,
        parts: GraphParts,
        signature: str,
        signatures: Signatures[Model],
        holdings: SharedState,
        library: FunctionLibrary | None = None,
    ) -> None:
        super().__init__(parts, signature, signatures, holdings)
        # None until somebody asks for functions: before, no body can be edited.
        self._known_library = library

    @property
    def _library(self) -> FunctionLibrary:
        if self._known_library is None:
            self._known_library = FunctionLibrary(self._graph, self._holdings, Body)
        return self._known_library

    @property
    def graph(self) -> Graph:
        """A `tf.Graph` to edit; edited bodies of functions are written back to it.

        It is a FuncGraph, which captures eager variables: ops that are added under
        `with model.graph.as_default():` can read any `tf.Variable`.

        Raises:
            ModelError: an edited body cannot be written back; see `functions`.
        """
        if self._known_library is not None:
            sync(self._known_library)
        return self._graph

    @property
    def functions(self) -> Mapping[str, Body]:
        """The functions that the graph calls, directly or indirectly, each a model.

        Bodies of loops, branches of conditionals, and functions whose calls were not
        inlined, under the names that they have in the graph's library; callers come
        before callees. A body is edited on its own graph; the model and all other
        callers are updated when the model is used next. Names do not change.

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
        sync(self._library)
        return Functions[Body](self._library)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The Keras layers that the graph was made from, in the order of their calls.

        They are known for models in memory, `.keras` and `.h5` files, and for
        SavedModels that Keras wrote, whose name scopes and `keras_metadata.pb` record
        them. A layer that is called twice is listed twice; those in nested models and
        in other layers are listed after them, with their paths. Layers whose ops were
        all removed by edits are not listed.

        A layer can be passed wherever a tensor or op is expected: by name, by path, as
        one of these records, as the layer itself or as `layer.output`.

        Cost: linear in ops, times the depth of their scopes.

        Example:
            >>> import keras
            >>> from geutil import model
            >>> x = keras.Input([4], name="x")
            >>> hidden = keras.layers.Dense(3, name="hidden")(x)
            >>> y = keras.layers.Dense(2, name="scores")(hidden)
            >>> m = model.open(keras.Model(x, y, name="net"))
            >>> [(layer.path, layer.class_name) for layer in m.layers]
            [('x', 'InputLayer'), ('hidden', 'Dense'), ('scores', 'Dense')]
            >>> m.cut(outputs="hidden")
            Model('serving_default', ['x'] -> ['hidden'], 7 ops)
        """
        return layers_of(self.graph)

    @property
    def signatures(self) -> Mapping[str, Model]:
        """The signatures by name, including this one, each a model."""
        return self._signatures

    @property
    def variables(self) -> Mapping[str, tf.Variable]:
        """The variables by name, shared by all signatures.

        They include the variables read by ops that were added under
        `with model.graph.as_default():`.
        """
        return super().variables

    @property
    def assets(self) -> tuple[Path, ...]:
        """The files from which the tables of the model are initialized."""
        paths = [asset.asset_path.numpy().decode() for asset in self._holdings.assets]
        return tuple(Path(path) for path in paths)

    def run(
        self, data: Any = None, /, **inputs: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the outputs for some inputs.

        Args:
            data: the inputs, instead of `inputs`: a mapping from their names; an array,
                if there is one input; a tuple `(x, y)`, whose y is ignored; many
                batches of this kind, as an iterable or a `tf.data.Dataset`; or the path
                of a `.npz` file, or of a folder of them. All forms:
                `geutil.select.networks.data.batches`.
            **inputs: a value for each input: an array, or a value that converts to one.

        Returns:
            The outputs by name, in order. Those of many batches are concatenated along
            their first axis.

        Raises:
            ArgumentTypeError: data cannot be converted to inputs.
            ModelError: an input is missing, unknown, or of another dtype or shape; the
                outputs of many batches cannot be concatenated; an output depends on a
                placeholder that is not an input; a variable has no value; eager
                execution is off.
            tf.errors.OpError: an op fails.

        Cost: one execution; after an edit also a copy of the graph.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": 2 * x}
            >>> m = model.open(f)
            >>> m.run(x=[1.0, 2.0])
            {'y': array([2., 4.], dtype=float32)}
            >>> dataset = tf.data.Dataset.from_tensor_slices([0.0, 1.0, 2.0, 3.0])
            >>> m.run(dataset.batch(3))
            {'y': array([0., 2., 4., 6.], dtype=float32)}
        """
        return super().run(data, **inputs)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any = None, /, **inputs: Any) -> dict[str, Tensor]:
        """Compute the outputs for one batch, as tensors; `to_function()` of the same.

        It works in eager code and inside `tf.function`, and under a tape.

        Args:
            data: the inputs, in the place of `inputs`, in any form of one batch that
                `run` takes.
            **inputs: a value for each input.

        Returns:
            The outputs by name.

        Raises:
            ArgumentTypeError: data cannot be converted to inputs.
            ModelError: as `ModelFunction.__call__`; or data may be many batches.

        Cost: as `run`.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": 2 * x}
            >>> model.open(f)(tf.constant([3.0]))["y"].numpy()
            array([6.], dtype=float32)
        """
        return super().__call__(data, **inputs)

    def restore(self, checkpoint: str | Path) -> list[str]:
        """Load the values of the variables from a checkpoint, by name.

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

        Example:
            >>> import tempfile
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> v1 = tf.compat.v1
            >>> with tf.Graph().as_default() as graph, v1.Session() as session:
            ...     w = v1.get_variable("w", initializer=3.0)
            ...     y = tf.multiply(v1.placeholder(tf.float32, [], "x"), w, name="y")
            ...     session.run(w.initializer)
            ...     folder = tempfile.mkdtemp()
            ...     checkpoint = v1.train.Saver().save(session, f"{folder}/model.ckpt")
            >>> m = model.open(graph.as_graph_def())
            >>> m.restore(checkpoint)
            []
            >>> float(m.run(x=5.0)["y"])
            15.0
        """
        return restore(self._holdings, str(checkpoint))

    @tf.autograph.experimental.do_not_convert
    def to_function(self) -> ModelFunction:
        """Return the current model as a callable of tensors.

        It works in eager code and inside `tf.function`, and `tf.GradientTape`
        differentiates it, through its variables too. Later edits of the graph do not
        change it.

        In a replica of `tf.distribute` it reads that replica's copies of variables, if
        the model was opened, or thawed, or its Keras model built, in the strategy's
        scope.

        Raises:
            ModelError: an output depends on a placeholder that is not an input. Or a
                strategy of several replicas is in scope, and a variable has no copies,
                or the graph itself moves one.

        Cost: a copy of the graph, unless nothing was edited since the last one.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> w = tf.Variable(3.0)
            >>> @tf.function(input_signature=[tf.TensorSpec([], name="x")])
            ... def f(x):
            ...     return {"y": w * x}
            >>> function = model.open(f).to_function()
            >>> with tf.GradientTape() as tape:
            ...     y = function(5.0)["y"]
            >>> float(y), float(tape.gradient(y, w))
            (15.0, 5.0)
        """
        function = self.concrete_function()
        check_copies(function)
        return ModelFunction(function, self.inputs, tuple(self.outputs))

    def freeze(self) -> Model:
        """Return the model with constants in place of its variables, in all signatures.

        The constants have the current values of the variables, and their names. Readers
        of a variable read its constant, in loops and other functions too. The ops
        compute the same, bit for bit; but TensorFlow's optimizer may fuse more of them
        where it sees constants, which can change the last bits. Weights and biases that
        a fold computes from variables become constants, too. Tables stay.

        Returns:
            A model without variables. This one is unchanged.

        Raises:
            ModelError: an op changes a variable, or needs its handle and not only its
                value; a variable has no value; or the constants need more than the 2
                GiB that one protobuf holds (no variable is read then).

        Cost: linear in the ops of all signatures and the bytes of the variables.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> w = tf.Variable(3.0, name="w")
            >>> @tf.function(input_signature=[tf.TensorSpec([], name="x")])
            ... def scaled(x):
            ...     return {"y": w * x}
            >>> frozen = model.open(scaled).freeze()
            >>> len(frozen.variables)
            0
            >>> frozen.graph.get_operation_by_name("w").type
            'Const'
            >>> float(frozen.run(x=2.0)["y"])
            6.0
        """
        from geutil.model import frozen_variables

        return frozen_variables.freeze(self)

    def thaw(self, regex: str | re.Pattern[str]) -> Model:
        """Return the model with constants turned into trainable variables.

        Floating-point and complex constants whose op's name the regex matches become
        trainable variables with the constants' values and names. Constants of other
        dtypes stay, even if they match: they are shapes, axes and the like, which
        TensorFlow reads while it builds graphs, and gradients do not reach them. So do
        constants in version 1 loops. Matching constants that stay are logged.

        In other signatures, constants of the same name and value become the same
        variables. Constants in the bodies of functions stay.

        Args:
            regex: a regular expression, searched in the names of ops by `re.search`.

        Returns:
            A model with more variables. This one is unchanged.

        Raises:
            ModelError: no constant matches, or none that matches can become a variable.
            SelectionError: `regex` is not a regular expression.

        Cost: linear in the ops of all signatures and the bytes of the constants.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> with tf.Graph().as_default() as graph:
            ...     x = tf.compat.v1.placeholder(tf.float32, [], "x")
            ...     y = tf.multiply(x, tf.constant(3.0, name="w"), "y")
            >>> thawed = model.open(graph).thaw("^w$")
            >>> list(thawed.variables)
            ['w']
            >>> f = thawed.to_function()
            >>> with tf.GradientTape() as tape:
            ...     loss = f(x=2.0)["y"]
            >>> float(tape.gradient(loss, thawed.variables["w"]))
            2.0
        """
        from geutil.model import frozen_variables

        return frozen_variables.thaw(self, regex)

    def save(
        self,
        path: str | Path,
        format: str = "saved_model",
        *,
        overwrite: bool = False,
        select_tf_ops: bool = False,
    ) -> Path:
        """Write the model to a file or directory.

        An existing file or folder is replaced only after the new one is complete.

        Args:
            path: the file or directory to write.
            format: "saved_model", a directory with variables, tables, assets and all
                signatures; "graph_def" or "pbtxt", one file with this signature frozen,
                in which input `x` is the placeholder `x` and output `y` the tensor
                `y:0`. No other op reads it, so `geutil.model.open` finds it if it
                depends on an input (otherwise it needs `outputs=`, which is logged).
                "tflite", one file with this signature, frozen, for TensorFlow Lite.
            overwrite: whether to replace the file or folder at `path`: a model by a
                model, a file by a file.
            select_tf_ops: for "tflite", whether ops that TensorFlow Lite lacks may stay
                TensorFlow ops, for interpreters that include these.

        Returns:
            The path.

        Raises:
            ModelError: `path` exists; the format is unknown, or does not match the
                suffix of `path`; or the model holds objects that the format cannot
                store: the message names them.

        Cost: linear in the ops and the bytes of the variables.

        Example:
            >>> import tempfile
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": 2 * x}
            >>> path = model.open(f).save(f"{tempfile.mkdtemp()}/doubling")
            >>> loaded = tf.saved_model.load(str(path))
            >>> float(
            ...     loaded.signatures["serving_default"](x=tf.constant([3.0]))["y"][0]
            ... )
            6.0
        """
        from geutil.model import file_writers

        return file_writers.save(
            self,
            Path(path),
            format,
            overwrite=overwrite,
            select_tf_ops=select_tf_ops,
        )

    def cut(
        self,
        inputs: Selection | None = None,
        outputs: Selection | None = None,
        *,
        signature: str | None = None,
    ) -> Model:
        """Return the part of the model between some tensors.

        It has the variables that it needs, and no other signatures unless `signature`
        is given.

        Args:
            inputs: the tensors that become inputs; if None, the inputs that the outputs
                need. Several tensors, ops or Keras layers with one output,
                `layer.output`, or names (of ends, tensors, ops, layers or scopes), or a
                mapping from the name of each new input. Without a mapping, ends and
                layers keep their names and other tensors are named after their ops.
            outputs: the tensors that become outputs, in the same forms; those of the
                model if None.
            signature: the name of a new signature, added to those of the model: `save`
                writes them to one file, each weight once.

        Returns:
            A new model.

        Raises:
            ModelError: a tensor is not in the graph; the outputs still depend on an
                input of the model that is not cut off, or do not depend on a given one;
                two ends or signatures would have the same name.

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
        from geutil.model import model_ends

        return model_ends.cut(self, inputs, outputs, signature)

    def splice(
        self,
        other: Model,
        replaced: Links,
        feeds: Links = (),
        *,
        scope: str = "spliced",
        signature: str | None = None,
    ) -> Model:
        """Return a model in which outputs of another one replace tensors of this one.

        Args:
            other: the model to insert. If names of ops clash, its ops get a scope;
                inputs and outputs whose names clash get a number.
            replaced: a mapping, or pairs, from tensors of this model to the outputs of
                `other` (by name) that replace them. A tensor is given by name, its own
                or that of a Keras layer, as `tensor.ref()` or, in pairs, as it is.
            feeds: a mapping from inputs of `other` (by name) to the tensors of this
                model that feed them. Its other inputs become inputs of the result.
            scope: the scope of the ops of `other` where names clash.
            signature: the name of a new signature, added to those of this model; see
                `prepend`.

        Returns:
            A new model with the variables of both. Its outputs are those of this model
            and those of `other` that replace nothing; inputs that are no longer needed
            are dropped. It replaces this model among its signatures; the others stay,
            and those of `other` are dropped.

        Raises:
            ModelError: an end or tensor does not exist; dtypes or shapes do not fit; or
                the models would form a cycle.

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
        from geutil.model import model_ends

        return model_ends.splice(self, other, replaced, feeds, scope, signature)

    def join(
        self,
        other: Model,
        inputs: Mapping[str, str] | Iterable[str] = (),
        *,
        scope: str = "joined",
        signature: str | None = None,
    ) -> Model:
        """Return a model that computes this one and another one, side by side.

        Joined to itself, a model is applied twice (a siamese network): both halves
        share its variables, which are trained together and saved once. Constants of the
        same name and value are shared, too.

        Args:
            other: the model to join to this one.
            inputs: the inputs that the two have in common: names, or a mapping from
                those of `other` to those of this model. The other inputs of `other`
                become inputs of the result.
            scope: the scope of the ops of `other` where names clash.
            signature: the name of a new signature, added to those of this model; see
                `prepend`.

        Returns:
            A new model with the inputs, outputs and variables of both. An input or
            output of `other` whose name is taken gets a number, with a warning; call
            `rename` first to avoid it. The result replaces this model among its
            signatures, as in `prepend`.

        Raises:
            ModelError: an input does not exist; or dtypes or shapes do not fit.

        Cost: linear in the ops of both.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> w = tf.Variable(3.0, name="w")
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def tower(x):
            ...     return {"y": w * x}
            >>> m = model.open(tower)
            >>> twice = m.join(m.rename(inputs={"x": "z"}, outputs={"y": "of_z"}))
            >>> twice.run(x=[1.0], z=[2.0])
            {'y': array([3.], dtype=float32), 'of_z': array([6.], dtype=float32)}
            >>> list(twice.variables)
            ['w']
            >>> twice.join(m.rename(outputs={"y": "of_x"}), "x").run(x=[1.0], z=[2.0])
            {'y': array([3.], dtype=float32), 'of_z': array([6.], dtype=float32),
             'of_x': array([3.], dtype=float32)}
        """
        from geutil.model import model_ends

        return model_ends.join(self, other, inputs, scope, signature)

    def prepend(
        self,
        other: Model,
        inputs: Mapping[str, str] | None = None,
        *,
        signature: str | None = None,
    ) -> Model:
        """Return a model with another one before it, such as a JPEG decoder.

        Args:
            other: the model to prepend.
            inputs: a mapping from inputs of this model to outputs of `other`. If None,
                those of the same name are connected, or the only ones.
            signature: the name of a new signature, added to those of this model: `save`
                writes them to one file, each weight once. If None, the result replaces
                this signature.

        Returns:
            A new model, as from `splice`. The outputs of `other` that this model does
            not read are among its outputs. The other signatures of this model stay as
            they are; those of `other` are dropped.

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
            >>> m = model.open(f).prepend(model.open(parse), signature="text")
            >>> list(m.signatures)
            ['serving_default', 'text']
        """
        from geutil.model import model_ends

        return model_ends.prepend(self, other, inputs, signature)

    def append(
        self,
        other: Model,
        inputs: Mapping[str, str] | None = None,
        *,
        signature: str | None = None,
    ) -> Model:
        """Return a model with another one after it, such as a softmax.

        Args:
            other: the model to append.
            inputs: a mapping from inputs of `other` to tensors of this model. If None,
                outputs and inputs of the same name are connected, or the only ones.
            signature: the name of a new signature, added to those of this model; see
                `prepend`.

        Returns:
            A new model, as from `splice`, but without the outputs that `other` reads.
            The other signatures of this model stay; those of `other` are dropped.

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
        from geutil.model import model_ends

        return model_ends.append(self, other, inputs, signature)

    def rename(
        self,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        signature: str | None = None,
    ) -> Model:
        """Return the model with its inputs, outputs or signature renamed.

        Args:
            inputs: the new name of each input to rename.
            outputs: the new name of each output to rename.
            signature: the new name of the signature.

        Raises:
            ModelError: an old name does not exist, two ends would have the same name,
                or the signature exists already.

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
        from geutil.model import model_ends

        return model_ends.rename(self, inputs or {}, outputs or {}, signature)

    def strip_training(
        self,
        *,
        switches: Mapping[str, Any] | None = None,
        statistics: Mapping[str, tuple[str, str]] | None = None,
        keep: Iterable[Any] = (),
        neutral: Mapping[str, Any] | None = None,
    ) -> Model:
        """Return the model without the parts that only training needs.

        - Inputs and placeholders that switch between training and inference, such as
          `is_training` or `keras_learning_phase`, become False; of each conditional
          only the branch that runs then is kept.
        - Dropout in all its forms, Gaussian noise, Gaussian and alpha dropout become
          the identity. The updates of their seeds are removed with them.
        - Batch norms that use the statistics of the batch read their moving averages
          instead. The updates of a graph identify these variables.
        - Assert, Print, CheckNumerics and summaries are removed.
        - Assignments to variables are removed if they train, or if nothing that stays
          reads the variable. Other side effects stay.
        - Ops, inputs and variables that are no longer needed are removed.

        The result's `strip_report` lists all this, and each candidate that was kept,
        with the reason: random ops that belong to no known layer, dropout whose
        constants do not fit, and ops in the bodies of loops and of kept calls.

        Args:
            switches: the value at inference of further inputs or placeholders, by name,
                such as `{"keep_prob": 1.0}`; they become constants.
            statistics: the names of the variables of mean and variance, for batch norms
                whose moving averages cannot be identified (because nothing that runs
                updates them). The error names these batch norms.
            keep: names of ops, name scopes and Keras layers that stay as they are.
            neutral: the results at inference of ops that geutil does not know, by name:
                a number for each value, such as False for a SpecAugment mask, or None
                for the first input that fits, such as the one that noise is added to.
                An op of unknown shape still runs, to provide the shape; name the ops
                that draw its numbers, too.

        Returns:
            A new model. If there is nothing to strip, it equals this one.

        Raises:
            ModelError: a batch norm's moving averages are unknown: the message lists
                all such batch norms with the reasons; or a name does not exist, or a
                value does not fit its switch or op.

        Cost: linear in ops and edges, for each nesting level of resolved conditionals.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": tf.nn.dropout(2 * x, rate=0.5)}
            >>> stripped = model.open(f).strip_training()
            >>> print(*stripped.strip_report.entries)
            removed dropout 'dropout/SelectV2': what it gets passes through unchanged
            >>> stripped.run(x=[1.0, 2.0])
            {'y': array([2., 4.], dtype=float32)}
        """
        from geutil.model import training_parts

        return training_parts.strip_training(self, switches, statistics, keep, neutral)

    def without_powers(self) -> Model:
        """Return the model without its capabilities beyond computing.

        Ops that read or write files, print, open connections and the like (see
        `geutil.model.powers`) are removed, unless an output or the new value of a
        variable depends on them; in the body of a branch, a loop or another function,
        unless a result of that body does. Functions of a loaded object that no
        signature calls are not part of a model, and are already gone.

        Returns:
            A new model, whose `strip_report` lists the removed ops, and those that
            could not be removed. If there is nothing to remove, it equals this one.

        Raises:
            ModelError: TensorFlow refuses the resulting graph.

        Cost: linear in ops and edges, function bodies included.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([], name="x")])
            ... def f(x):
            ...     tf.print("noted", output_stream="file:///tmp/notes")
            ...     return {"y": 2 * x}
            >>> m = model.open(f).without_powers()
            >>> print(m.strip_report.removed[0])
            removed power 'PrintV2': can write files, and no output needs it
            >>> print(m.run(x=1.0)["y"])
            2.0
        """
        remove: Callable[[Model], Model] = lazy.provided("model without powers")
        return remove(self)

    def unroll(self, loops: Any = None, *, max_ops: int = 100_000) -> Model:
        """Return the model with its loops unrolled.

        A loop is replaced by copies of its body, one per iteration, as Keras' recurrent
        layers do with `unroll=True`. Results stay the same. Then each step is part of
        the graph: it can be selected, folded and quantized, and TFLite needs no loop
        and no list. The graph grows with the number of steps; all steps share the
        weights.

        The number of iterations must follow from constants and static shapes; the batch
        size may be unknown. Lists (TensorArrays) whose elements are all known become
        tensors. Loops in the bodies of loops are unrolled, too. The model can still be
        trained, unless the body has a `tf.custom_gradient` (as swish and silu do): its
        gradient reads tensors of the loop, which TensorFlow refuses.

        Args:
            loops: the loops to unroll: ops, regexes searched in names, or nested lists
                of these; None unrolls all.
            max_ops: the largest allowed number of ops in the unrolled graph.

        Returns:
            A new model.

        Raises:
            ModelError: there is no such loop; the number of iterations of one is
                unknown; or there would be more ops than `max_ops`.

        Cost: about 0.3 ms for each op of the result.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> layers = [tf.keras.Input([12, 6], name="x"), tf.keras.layers.LSTM(8)]
            >>> m = model.open(tf.keras.Sequential(layers))
            >>> unrolled = m.unroll()
            >>> [len(n.graph.get_operations()) for n in (m, unrolled)]
            [41, 276]
            >>> m.compare(unrolled).equal
            True
        """
        return function_edits.unroll(self, loops, max_ops)

    def replace_op(self, ops: Any, replacement: str | Callable[..., Any]) -> Model:
        """Return the model with some ops replaced.

        Args:
            ops: the ops to replace: an op type; a Keras layer that computes with one
                op, or its name; an op; a regex searched in names; or several of these.
            replacement: a function, such as a custom op or a `tf.function`. It is
                called with the inputs of each op, in the op's graph, name scope and
                device, and returns a tensor for each output. Or the name of another op
                type, which gets the inputs and attributes of the old one.

        Returns:
            A new model. The replacements get the control inputs of the old ops.

        Raises:
            ModelError: no op is selected; a selected op is needed by no output, or is
                an input or variable; or the replacement returns other dtypes, shapes or
                numbers of tensors.

        Cost: linear in the ops, plus the replacements.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": tf.nn.relu6(x, name="activation")}
            >>> m = model.open(f)
            >>> m.replace_op("Relu6", "Relu").run(x=[-1.0, 9.0])
            {'y': array([0., 9.], dtype=float32)}
            >>> m.replace_op("activation", lambda x: x * x).run(x=[-1.0, 9.0])
            {'y': array([ 1., 81.], dtype=float32)}
        """
        from geutil.model import model_ends

        return model_ends.replace_op(self, ops, replacement)

    def set_batch_size(
        self,
        size: int | None,
        *,
        inputs: Iterable[str] | None = None,
        samples: Mapping[str, Any] | None = None,
        verify: bool = True,
    ) -> Model:
        """Return the model with another batch size: a number, or None for any size.

        The first axis of the inputs is the batch dimension. Constants that contain its
        old size (targets of Reshape, zero initial states of loops, sizes of slices and
        of transposed convolutions, loops over the rows, as `tf.map_fn` makes them, and
        others) are found by inferring all shapes for another size, and are replaced.
        The result is then verified by running both models on random inputs: at the old
        size the results are the same, and at others each row equals the old model's
        result for that row, up to rounding (32 times the effect of changing the inputs
        in the last bit). If an output is the same for all rows, as in many untrained
        networks, the tensors that it is computed from are compared, and rows are drawn
        that differ more.

        Args:
            size: the new batch size.
            inputs: the inputs with a batch axis; if None, all but scalars.
            samples: rows to verify with, for some inputs; other inputs are drawn at
                random: normal floats, integers 0 and 1, or below the length of the
                indexed axis.
            verify: whether to verify the result by running it; if False, only the rules
                decide, which can misjudge the meaning of a constant 1.

        Returns:
            A new model; its other signatures are unchanged.

        Raises:
            ModelError: ops still contain the old size, and the message lists each with
                its constants, the reason and the remedy; or the verification fails, or
                is not possible: the rows of an output depend on each other, the model
                has side effects, or its results differ from run to run.

        Cost: about 300 us per op, a copy of the graph and about ten executions.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([1, 2, 2], name="x")])
            ... def flat(x):
            ...     return {"y": tf.reshape(x, [1, 4])}
            >>> m = model.open(flat).set_batch_size(None)
            >>> m.inputs["x"].shape, m.outputs["y"].shape
            (TensorShape([None, 2, 2]), TensorShape([None, 4]))
            >>> m.run(x=tf.reshape(tf.range(8.0), [2, 2, 2]))
            {'y': array([[0., 1., 2., 3.],
                         [4., 5., 6., 7.]], dtype=float32)}
        """
        from geutil.model.batch_size import size_change

        return size_change.set_batch_size(
            self, size, inputs=inputs, samples=samples, verify=verify
        )

    def compare(
        self,
        other: Model,
        inputs: Any = None,
        samples: int = 8,
        rtol: float = 1e-5,
        atol: float = 1e-6,
    ) -> Comparison:
        """Run two models on the same inputs and compare their outputs.

        Outputs are paired by name, or by position if the two models share no name and
        have equally many. Elements agree if |a - b| <= atol + rtol * |b|, where b is
        the other model's; NaN agrees with NaN, and an infinity with itself. Integers,
        booleans and strings are compared exactly.

        Args:
            other: the other model, with inputs of the same names; if each model has
                only one input, the names may differ.
            inputs: the inputs to run on, as `run` takes them: by name, or many batches,
                each a sample. If None, they are drawn at random for the dtypes and
                shapes, with a fixed seed: normal floats, integers 0 and 1, or below the
                length of the indexed axis (`uint8` to 255), strings of four letters. An
                unknown first dimension is taken from the inputs that know it, else 3;
                other unknown ones are 8, in images 32. Pass inputs if the model needs
                others.
            samples: how many inputs to draw.
            rtol: the relative tolerance.
            atol: the absolute tolerance.

        Returns:
            The comparison, true if all outputs agree; its `str` gives the largest
            difference of each output and its position.

        Raises:
            ModelError: inputs or outputs of the two do not match, or one of them fails
                on the inputs.

        Cost: one execution of each model for each input.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def f(x):
            ...     return {"y": x * 2}
            >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
            ... def g(x):
            ...     return {"y": x + x + 1}
            >>> result = model.open(f).compare(model.open(g), {"x": [1.0, 2.0]})
            >>> print(result)
            different on 2 sample(s) in 1 batch(es) (rtol 1e-05, atol 1e-06)
              y: largest difference 1 absolute, 0.333 relative, at [0] of sample 0: 2.0
              and 3.0 (too much); varies by 2 over 2 samples
            >>> bool(result)
            False
        """
        from geutil.model import comparison

        return comparison.compare(
            self, other, inputs, samples=samples, rtol=rtol, atol=atol
        )


class Body(EditableBody, Model):
    """The body of a function that a model calls, as a model.

    `Model.functions` makes bodies. They are edited like any model: on `graph`, with any
    function of geutil. When the model that calls the function is used next, the edited
    body is written back for all callers. A variable that an edit reads becomes an
    argument, which the callers pass.

    Attributes:
        inputs: the arguments by name, in order: placeholders of the graph.
        outputs: the results by name, in order; they can be set to other tensors.
        live: the graph, without writing edited bodies back on access.
    """

    def __init__(
        self, library: FunctionLibrary, entry: Entry, parts: GraphParts
    ) -> None:
        self._entry = entry
        self.live: Graph = parts.graph
        what = f"function '{entry.key}'"
        source = Source(what, {}, library.holdings)
        signatures = Signatures(source, False, {}, (), Model)
        super().__init__(parts, entry.key, signatures, library.holdings, library)
        self.outputs = BodyOutputs(parts.graph, self.inputs, parts.sinks, what)
        signatures.take_in(entry.key, self)

    def __repr__(self) -> str:
        return f"Body{super().__repr__().removeprefix('Model')}"

    @property
    def graph(self) -> Graph:
        """The body as a `tf.Graph` to edit; see `Model.graph`.

        Raises:
            ModelError: the edited body of a function called by this one cannot be
                written back.
        """
        sync_below(self._library, self._entry)
        return self.live

    @property
    def functions(self) -> Functions[Body]:
        """The functions that the body calls; see `Model.functions`."""
        sync_below(self._library, self._entry)
        return Functions[Body](self._library, self._entry)

    @property
    def callers(self) -> tuple[Operation, ...]:
        """The ops that call the function, in the graph of the model and in bodies."""
        sync(self._library)
        return tuple(c.op for c in self._library.callers_of([self._entry]))

    def run(
        self, data: Any = None, /, **inputs: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the outputs for some inputs; see `Model.run`.

        Raises:
            ModelError: as `Model.run`; or an argument is a resource, which only a
                caller can pass.
        """
        self._refuse_resources()
        return super().run(data, **inputs)

    def add_input(
        self, name: str, dtype: Any, shape: Any = None, *, value: Value
    ) -> Tensor:
        """Add an argument, and a value for it to each call.

        The functions of a loop share their arguments, and so do the branches of a
        conditional: all of them get it. In a loop it is a loop variable that the body
        returns unchanged. An op that calls the function is replaced by one with one
        more input; the old op stays, unread.

        Args:
            name: its name.
            dtype: its dtype.
            shape: its static shape; unknown if None.
            value: the values that the callers pass: a constant; a function of the
                calling op that returns a tensor of `op.graph` and is called with that
                graph as the default one; or a mapping from callers or their names to
                either.

        Returns:
            The argument, a placeholder of the body's graph.

        Raises:
            ModelError: an input of that name exists; a value does not fit; or the
                function is called by an op other than a call, loop or conditional.

        Cost: linear in the graphs of the function, its callers and theirs.

        Example:
            >>> import tensorflow as tf
            >>> from geutil import model
            >>> @tf.function
            ... def double(x):
            ...     return tf.multiply(x, 2.0, name="product")
            >>> @tf.function(input_signature=[tf.TensorSpec([], name="x")])
            ... def f(x):
            ...     return {"y": double(x)}
            >>> m = model.open(f, inline=False)
            >>> body = m.functions[next(iter(m.functions))]
            >>> factor = body.add_input("factor", tf.float32, [], value=5.0)
            >>> with body.graph.as_default():
            ...     product = body.inputs["x"] * factor
            >>> body.outputs["identity"] = product
            >>> m.run(x=3.0)
            {'y': array(15., dtype=float32)}
        """
        sync(self._library)
        spec = tf.TensorSpec(shape, dtype, name)
        return function_edits.add_input(self._library, self._entry, spec, value)

    def remove_input(self, name: str) -> None:
        """Remove an argument that nothing reads, from all callers too.

        A loop variable can be removed if the condition does not read it and the body
        returns it unchanged.

        Args:
            name: its name.

        Raises:
            ModelError: the body, or another function that shares the argument, still
                reads it; the message names the ops.

        Cost: linear in the graphs of the function, its callers and theirs.
        """
        sync(self._library)
        function_edits.remove_input(self._library, self._entry, name)

    def add_output(
        self, name: str, tensor: Tensor | Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Add a result, which becomes a new output of all callers.

        Args:
            name: its name.
            tensor: a tensor of the body; for a branch of a conditional, a mapping from
                the name of each branch in `Model.functions` to a tensor of its body.

        Returns:
            The new output of each caller.

        Raises:
            ModelError: an output of that name exists; a branch is missing; branches
                differ in dtype; or a loop calls the function: its outputs are its
                inputs.

        Cost: linear in the graphs of the function, its callers and theirs.
        """
        sync(self._library)
        return function_edits.add_output(self._library, self._entry, name, tensor)

    def remove_output(self, name: str) -> None:
        """Remove a result that no caller's consumers read.

        All branches of a conditional lose the result at this position.

        Args:
            name: its name.

        Raises:
            ModelError: an op reads it from a caller: the message names both; it is the
                only result; or a loop calls the function.

        Cost: linear in the graphs of the function, its callers and theirs.
        """
        sync(self._library)
        function_edits.remove_output(self._library, self._entry, name)
