"""Ends of TFLite files replaced, those of signatures with them."""

from __future__ import annotations

from geutil.tflite.parts import Contents, LiteGraph, LiteTensor


def set_end(
    file: Contents, graph: LiteGraph, tensor: LiteTensor, new: LiteTensor
) -> None:
    """Let a tensor be an input or an output of a subgraph in the place of another one.

    Cost: linear in inputs and outputs.
    """
    graph.inputs = tuple(new if t is tensor else t for t in graph.inputs)
    graph.outputs = tuple(new if t is tensor else t for t in graph.outputs)
    for signature in file.signatures.values():
        for ends in (signature.inputs, signature.outputs):
            for name, end in ends.items() if signature.graph is graph else ():
                if end is tensor:
                    ends[name] = new
