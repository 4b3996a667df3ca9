"""Graphs that FakeQuant ops are not put into."""

from __future__ import annotations

from geutil.errors import QuantizeError
from geutil.graph import op_types, replicas, runtime
from geutil.graph.types import Graph
from geutil.select.networks.layers import training_ops
from geutil.select.networks.provenance import Origins


def refuse_mesh(graph: Graph) -> None:
    """Raise QuantizeError for a function that reads variables of a DTensor mesh."""
    if runtime.is_on_mesh(graph):
        raise QuantizeError(
            "the function reads variables of a DTensor mesh, and DTensor has no layout "
            "for FakeQuant ops; quantize it outside of the mesh, or shard the batch by "
            "tf.distribute"
        )


def refuse_training_ops(graph: Graph) -> None:
    """Raise QuantizeError for a graph that holds gradients or optimizer ops."""
    refused_ops = training_ops(graph)
    if refused_ops:
        raise QuantizeError(
            f"'{refused_ops[0].name}' ({refused_ops[0].type}) belongs to gradients or "
            "an optimizer; insert quantization before gradients, into a graph that "
            "has none"
        )
    if replicas.outputs_meant(graph):
        _refuse_gradients_of_outputs(graph)


def _refuse_gradients_of_outputs(graph: Graph) -> None:
    own = frozenset(replicas.own_operations(graph))
    origins = Origins(graph)
    for op in training_ops(graph, graph.get_operations()):
        for t in op.inputs:
            is_input = t.op.type in op_types.PLACEHOLDERS or origins.is_parameter(t)
            if t.op in own and t.dtype.is_floating and not is_input:
                raise QuantizeError(
                    f"'{op.name}' ({op.type}) belongs to gradients and reads "
                    f"'{t.name}', which the outputs depend on; insert quantization "
                    "before gradients"
                )
