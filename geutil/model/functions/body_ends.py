"""The outputs of a function's body: their number is a matter of its callers too."""

from __future__ import annotations

from collections.abc import Mapping

from geutil.graph.kinds import Graph, Operation, Tensor, require_tensor
from geutil.model.ends import Inputs, Outputs
from geutil.model.errors import ModelError
from geutil.model.programs.materializing import make_sink


class BodyOutputs(Outputs):
    """The results of a function by name, in order.

    They follow edits and can be set, to a tensor of the same dtype. Adding and taking
    away is up to `Body.add_output` and `Body.remove_output`.

    Args:
        graph: the graph of the body.
        inputs: the arguments.
        sinks: for each result the Identity that reads it.
        what: the body in words, for messages.
    """

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
        sink = make_sink(self._graph, name, tensor)
        return self.changed(inputs, {**self.sinks, name: sink})
