"""The body of a function as a graph that is edited while its callers are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from geutil.bodies.function_bodies import add_ends, define_body, read_body
from geutil.errors import ModelError, TransformError
from geutil.graph import creation, functions
from geutil.graph.state import fingerprint
from geutil.graph.types import Graph, Operation, Tensor, require_tensor
from geutil.model import programs, to_function, to_graph
from geutil.model.core import EditableModel, Inputs, Outputs
from geutil.model.to_graph import GraphParts


def materialize_body(
    definition: Any, library: Mapping[str, Any], handles: Mapping[str, Tensor]
) -> GraphParts:
    """Make an editable graph of a function's definition."""
    # Of arguments that are resources, the body takes the handle data from `handles`,
    # tensors that a caller passes.
    name = definition.signature.name
    try:
        read = read_body(
            definition, library.values(), handles, to_graph.release_colocation
        )
    except TransformError as error:
        raise ModelError(f"function '{name}' cannot be opened: {error}") from error
    except Exception as error:
        # The importer raises whatever the C++ status and its own checks make of it.
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error

    results = {name: _behind_copies(t) for name, t in read.results().items()}
    sinks, effects = add_ends(
        read.graph, results, read.side_effects(), programs.legal_name
    )
    return GraphParts(read.graph, dict(read.inputs), sinks, effects, [])


def _behind_copies(t: Tensor) -> Tensor:
    """Return a result as it is before the Identity ops that tracing adds."""
    while (
        t.op.type == "Identity"
        and t.op.name.rpartition("/")[2].startswith("Identity")
        and not t.consumers()
        and not t.op.control_inputs
    ):
        (t,) = t.op.inputs
    return t


def definition_of(
    graph: Graph,
    name: str,
    inputs: Mapping[str, Tensor],
    outputs: Outputs,
    effects: Operation,
    like: Any,
) -> Any:
    """Return the `FunctionDef` of a body's graph as it is now."""
    needed = to_function.ops_to_run(graph, inputs, outputs.sinks, effects)
    try:
        return define_body(graph, name, needed, inputs, outputs.sinks, effects, like)
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error


def result_shapes(parts: GraphParts) -> list[tf.TensorShape]:
    """Return the static shapes of the results, as TensorFlow infers them."""
    return [sink.inputs[0].shape for sink in parts.sinks.values()]


class BodyOutputs(Outputs):
    """The results of a function by name, in order."""

    # They follow edits and can be set, to a tensor of the same dtype. Adding and taking
    # away is up to `Body.add_output` and `Body.remove_output`.

    def __init__(
        self, graph: Graph, inputs: Inputs, sinks: Mapping[str, Operation], what: str
    ) -> None:
        super().__init__(graph, inputs, sinks)
        self._what = what

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        require_tensor(tensor)
        if name not in self:
            raise ModelError(
                f"{self._what} has no output '{name}'; its callers must be given the "
                "new output too: use add_output"
            )
        # Setting an output leaves the callers and their readers as they were made.
        if tensor.dtype != self[name].dtype:
            raise ModelError(
                f"output '{name}' of {self._what} is {self[name].dtype.name}, and "
                f"'{tensor.name}' is {tensor.dtype.name}; the callers read the former: "
                "cast it, or use remove_output and add_output"
            )
        if not self[name].shape.is_compatible_with(tensor.shape):
            raise ModelError(
                f"output '{name}' of {self._what} is of shape {self[name].shape}, and "
                f"'{tensor.name}' of shape {tensor.shape}; the callers were made for "
                "the former: reshape it, or use add_output"
            )
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        raise ModelError(
            f"output '{name}' of {self._what} may be read by callers; use remove_output"
        )

    def changed(self, inputs: Inputs, sinks: Mapping[str, Operation]) -> BodyOutputs:
        """Return the outputs with other arguments and other sinks."""
        return BodyOutputs(self._graph, inputs, sinks, self._what)

    def with_added(self, inputs: Inputs, name: str, tensor: Tensor) -> BodyOutputs:
        """Return the outputs with one more, at the end."""
        sink = to_graph.make_sink(self._graph, name, tensor)
        return self.changed(inputs, {**self.sinks, name: sink})


class EditableBody(EditableModel):
    """The body of a function: changes here stay in this graph."""

    # `geutil.model.Body` offers users edits that change the callers, too.

    inputs: Inputs  # The arguments by name, in order: placeholders of the graph.
    outputs: BodyOutputs  # The results by name, in order.
    live: Graph  # The graph, while nothing is written back on access.

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

    @property
    def side_effects(self) -> Operation:
        """The op that waits for the body's side effects."""
        return self._side_effects

    def state(self) -> Any:
        """Return a value that changes with each edit."""
        ends = [*self.inputs.values(), *self.outputs.sinks.values()]
        return fingerprint(self.live), tuple(map(id, ends))

    def needed_ops(self) -> list[Operation]:
        """Return the ops that a call runs."""
        sinks = self.outputs.sinks
        return to_function.ops_to_run(self.live, self.inputs, sinks, self._side_effects)

    def captured(self) -> dict[str, Tensor]:
        """Return the stand-ins of the body's captures, by new names."""
        names: dict[str, Tensor] = {}
        if functions.bindings(self.live):
            for _, inside in to_function.captures_of(self.live, self.needed_ops()):
                name = inside.op.name.replace("/", "_").lower()
                names[programs.fresh_name({*self.inputs, *names}, name)] = inside
        return names

    def forget_capture(self, inside: Tensor) -> Any:
        """Unbind the stand-in of a capture, and return the captured tensor."""
        outside = next(o for o, i in functions.bindings(self.live) if i is inside)
        functions.unbind(self.live, outside)
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
        with creation.neutral(self.live):
            placeholder = tf.compat.v1.placeholder(
                spec.dtype, spec.shape, programs.legal_name(name)
            )
        creation.copy_handle_data(like, placeholder)
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
