"""The body of a function as a model that can be edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings, unbind
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor, require_tensor
from geutil.graph.placeholders import copy_handle_data
from geutil.graph.state import fingerprint
from geutil.model.ends import Inputs
from geutil.model.errors import ModelError
from geutil.model.functions import body_inputs, body_outputs
from geutil.model.functions.arguments import Value
from geutil.model.functions.body_ends import BodyOutputs
from geutil.model.functions.library import Functions
from geutil.model.model import Model
from geutil.model.programs.building import captures_of, ops_to_run
from geutil.model.programs.program import fresh_name, legal_name
from geutil.model.signatures import Signatures
from geutil.model.sources.source import Source

if TYPE_CHECKING:
    from geutil.model.functions.library import Entry, Library
    from geutil.model.programs.materializing import Parts


class Body(Model):
    """The body of a function that a model calls, as a model.

    `Model.functions` makes bodies. They are edited like any model: on `graph`, with any
    function of geutil. Whenever the model that calls the function is used next, the
    edited body is written back and all callers call it. A variable that an edit reads
    becomes an argument, which the callers pass.

    Attributes:
        inputs: the arguments by name, in order: placeholders of the graph.
        outputs: the results by name, in order; they can be set to other tensors.
        live: the graph, while nothing is written back on access.
    """

    inputs: Inputs
    outputs: BodyOutputs

    def __init__(self, library: Library, entry: Entry, parts: Parts) -> None:
        self._entry = entry
        self.live: Graph = parts.graph
        what = f"function '{entry.key}'"
        source = Source(what, {}, library.holdings)
        signatures = Signatures(source, False, {}, ())
        super().__init__(parts, entry.key, signatures, library.holdings, library)
        self.outputs = BodyOutputs(parts.graph, self.inputs, parts.sinks, what)

    def __repr__(self) -> str:
        return f"Body{super().__repr__().removeprefix('Model')}"

    @property
    def graph(self) -> Graph:
        """The body as a `tf.Graph` to edit; see `Model.graph`.

        Raises:
            ModelError: an edited body of a function that this one calls cannot be
                written back.
        """
        self._library.sync_below(self._entry)
        return self.live

    @property
    def functions(self) -> Functions:
        """The functions that the body calls; see `Model.functions`."""
        self._library.sync_below(self._entry)
        return Functions(self._library, self._entry)

    @property
    def callers(self) -> tuple[Operation, ...]:
        """The ops that call the function, in the graph of the model and in bodies."""
        self._library.sync()
        return tuple(c.op for c in self._library.callers_of([self._entry]))

    def run(self, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the outputs for some inputs; see `Model.run`.

        Raises:
            ModelError: as `Model.run`; or an argument is a resource, which only a
                caller can pass.
        """
        self._refuse_resources()
        return super().run(**inputs)

    def concrete_function(self) -> Any:
        """Return a concrete function of the body as it is now.

        Raises:
            ModelError: an argument is a resource, which only a caller can pass.
        """
        self._refuse_resources()
        return super().concrete_function()

    def _refuse_resources(self) -> None:
        for name, t in self.inputs.items():
            if t.dtype in (tf.resource, tf.variant):
                raise ModelError(
                    f"input '{name}' of {self!r} is a {t.dtype.name}, which cannot be "
                    "given by value; run the model that calls the function"
                )

    def add_input(
        self, name: str, dtype: Any, shape: Any = None, *, value: Value
    ) -> Tensor:
        """Add an argument, and give all callers what they pass for it.

        The functions of a loop share their arguments, and so do the branches of a
        conditional: all of them get it. In a loop it is a variable that the body
        returns as it is. An op that calls the function is replaced by one with one more
        input; the old op stays, and nothing reads it.

        Args:
            name: its name.
            dtype: its dtype.
            shape: its static shape; unknown if None.
            value: what the callers pass: a constant; a function of the calling op that
                returns a tensor of `op.graph` and is called with that graph as the
                default one; or a mapping from callers or their names to either.

        Returns:
            The argument, a placeholder of the body's graph.

        Raises:
            ModelError: there is an input of that name; a value does not fit; or an op
                of another kind than calls, loops and conditionals calls the function.

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
        self._library.sync()
        spec = tf.TensorSpec(shape, dtype, name)
        return body_inputs.add_input(self._library, self._entry, spec, value)

    def remove_input(self, name: str) -> None:
        """Take an argument away that nothing reads, from all callers too.

        In a loop, a variable can go that the condition does not read and the body
        returns as it is.

        Args:
            name: its name.

        Raises:
            ModelError: the body, or another function that shares the argument, still
                reads it; the message names the ops.

        Cost: linear in the graphs of the function, its callers and theirs.
        """
        self._library.sync()
        body_inputs.remove_input(self._library, self._entry, name)

    def add_output(
        self, name: str, tensor: Tensor | Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Add a result, which all callers return from now on.

        Args:
            name: its name.
            tensor: a tensor of the body; for a branch of a conditional, a mapping from
                the name of each branch in `Model.functions` to a tensor of its body.

        Returns:
            The new output of each caller.

        Raises:
            ModelError: there is an output of that name; a branch is missing; branches
                differ in dtype; or a loop calls the function: its outputs are its
                inputs.

        Cost: linear in the graphs of the function, its callers and theirs.
        """
        self._library.sync()
        return body_outputs.add_output(self._library, self._entry, name, tensor)

    def remove_output(self, name: str) -> None:
        """Take a result away that no caller's consumers read.

        Branches of a conditional lose the result at the same place.

        Args:
            name: its name.

        Raises:
            ModelError: an op reads it from a caller: the message names both; it is the
                only one; or a loop calls the function.

        Cost: linear in the graphs of the function, its callers and theirs.
        """
        self._library.sync()
        body_outputs.remove_output(self._library, self._entry, name)

    # What follows serves the writing of bodies; it changes this graph alone.

    @property
    def side_effects(self) -> Operation:
        """The op that waits for what the body runs besides its outputs."""
        return self._side_effects

    def state(self) -> Any:
        """Return what differs after any edit."""
        ends = [*self.inputs.values(), *self.outputs.sinks.values()]
        return fingerprint(self.live), tuple(map(id, ends))

    def needed_ops(self) -> list[Operation]:
        """Return the ops that a call runs."""
        sinks = self.outputs.sinks
        return ops_to_run(self.live, self.inputs, sinks, self._side_effects)

    def captured(self) -> dict[str, Tensor]:
        """Return the stand-ins for what the body reads from outside, by new names."""
        names: dict[str, Tensor] = {}
        if bindings(self.live):
            for _, inside in captures_of(self.live, self.needed_ops()):
                name = inside.op.name.replace("/", "_").lower()
                names[fresh_name({*self.inputs, *names}, name)] = inside
        return names

    def forget_capture(self, inside: Tensor) -> Any:
        """Unbind the stand-in for something outside, and return what it stood for."""
        outside = next(o for o, i in bindings(self.live) if i is inside)
        unbind(self.live, outside)
        return outside

    def require_own(self, tensor: Tensor) -> None:
        """Raise unless a tensor is one of this body."""
        require_tensor(tensor)
        if tensor.graph is not self.live:
            raise ModelError(
                f"'{tensor.name}' is no tensor of {self!r}; make it under `with "
                "body.graph.as_default():`"
            )

    def new_input(self, name: str, spec: Any, like: Tensor) -> Tensor:
        """Add an argument; a resource is one like another tensor."""
        with neutral(self.live):
            placeholder = tf.compat.v1.placeholder(
                spec.dtype, spec.shape, legal_name(name)
            )
        copy_handle_data(like, placeholder)
        self.take_input(name, placeholder)
        return placeholder

    def take_input(self, name: str, placeholder: Tensor) -> None:
        """Make a placeholder an argument."""
        self._set_ends({**self.inputs, name: placeholder}, self.outputs.sinks)

    def drop_input(self, index: int) -> None:
        """Forget an argument."""
        inputs = [p for i, p in enumerate(self.inputs.items()) if i != index]
        self._set_ends(dict(inputs), self.outputs.sinks)

    def take_output(self, name: str, tensor: Tensor) -> None:
        """Add a result."""
        self.outputs = self.outputs.with_added(self.inputs, name, tensor)

    def drop_output(self, index: int) -> None:
        """Forget a result."""
        sinks = [s for i, s in enumerate(self.outputs.sinks.items()) if i != index]
        self._set_ends(self.inputs, dict(sinks))

    def _set_ends(
        self, inputs: Mapping[str, Tensor], sinks: Mapping[str, Operation]
    ) -> None:
        self._built = None  # It may have other arguments.
        self.inputs = Inputs(inputs)
        self.outputs = self.outputs.changed(self.inputs, sinks)
