"""The named inputs and outputs of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import tensorflow as tf

from geutil.graph.function_graphs import set_ends
from geutil.graph.kinds import Graph, Operation, Tensor, require_tensor
from geutil.model.errors import ModelError
from geutil.model.programs.materializing import make_sink


class Inputs(Mapping[str, Tensor]):
    """The inputs of a model by name, in order: placeholders of its graph."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{{{_listed(self)}}}"


class Outputs(MutableMapping[str, Tensor]):
    """The outputs of a model by name, in order.

    An output follows the edits of the graph: `geutil.reroute_ts(new, outputs["y"])`
    makes `new` the output. Assigning does the same; assigning to a new name adds an
    output, and deleting takes one away.

    Args:
        graph: the graph of the model.
        inputs: the inputs of the model.
        sinks: for each output the Identity that reads it.
    """

    def __init__(
        self, graph: Graph, inputs: Inputs, sinks: Mapping[str, Operation]
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._sinks = dict(sinks)
        self._publish()

    @property
    def sinks(self) -> dict[str, Operation]:
        """The ops that read the outputs."""
        return dict(self._sinks)

    def __getitem__(self, name: str) -> Tensor:
        return self._sinks[name].inputs[0]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        require_tensor(tensor)
        if tensor.graph is not self._graph:
            raise ModelError(
                f"'{tensor.name}' cannot be output '{name}': it is in another graph; "
                "make it under `with model.graph.as_default():`"
            )
        if tensor.dtype in (tf.resource, tf.variant):
            raise ModelError(
                f"'{tensor.name}' is a {tensor.dtype.name} and cannot be output "
                f"'{name}'; take what is read from it"
            )
        # A new op, because an old one would keep the static shape that it has.
        self._sinks[name] = make_sink(self._graph, name, tensor)
        self._publish()

    def __delitem__(self, name: str) -> None:
        if len(self._sinks) == 1 and name in self._sinks:
            raise ModelError(f"'{name}' is the only output; a model needs one")
        del self._sinks[name]
        self._publish()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sinks)

    def __len__(self) -> int:
        return len(self._sinks)

    def __repr__(self) -> str:
        return f"{{{_listed(self)}}}"

    def _publish(self) -> None:
        """Tell the graph; rewrite rules leave its outputs as they are."""
        results = [sink.outputs[0] for sink in self._sinks.values()]
        set_ends(self._graph, self._inputs.values(), results)


def _listed(ends: Mapping[str, Tensor]) -> str:
    return ", ".join(f"'{name}': {t!r}" for name, t in ends.items())
