"""Function bodies go along with the ops that call them."""

from __future__ import annotations

from geutil.graph.functions import (
    calls_of,
    library_for_copies,
    publish_functions,
)
from geutil.graph.importing import import_ops, new_graph_def
from geutil.graph.kinds import is_func_graph
from geutil.transform.state import TransformState


def carry_functions(info: TransformState) -> None:
    """Give the destination the functions that the copies will call.

    Loops and conditionals get bodies of their own, so that original and copy can both
    be differentiated. Linear in the ops.
    """
    called, renamed = calls_of(info.sgv.ops)
    if info.same_graph:
        called = renamed
    library, info.function_names = library_for_copies(info.graph, called, renamed)
    if library.function:
        graph_def = new_graph_def(info.graph)
        graph_def.library.CopyFrom(library)
        import_ops(info.graph_, graph_def, {})
        if is_func_graph(info.graph_):
            # What is traced finds the functions it calls outside its graph.
            publish_functions(info.graph_, [f.signature.name for f in library.function])
