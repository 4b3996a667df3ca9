"""The body of a function as a graph that is edited while its callers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from geutil.graph.function_graphs import bindings, unbind
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation, Tensor, require_tensor
from geutil.graph.placeholders import copy_handle_data
from geutil.graph.state import fingerprint
from geutil.model.core import EditableModel
from geutil.model.ends import Inputs
from geutil.model.errors import ModelError
from geutil.model.functions.body_ends import BodyOutputs
from geutil.model.programs.building import captures_of, ops_to_run
from geutil.model.programs.program import fresh_name, legal_name


class EditableBody(EditableModel):
    """The body of a function: what is changed here is changed in this graph alone.

    `geutil.model.Body` shows users what changes the callers, too.

    Attributes:
        inputs: the arguments by name, in order: placeholders of the graph.
        outputs: the results by name, in order.
        live: the graph, while nothing is written back on access.
    """

    inputs: Inputs
    outputs: BodyOutputs
    live: Graph

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
