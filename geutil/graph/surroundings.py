"""Making ops in the place of another op: its scope, device and control flow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from geutil.graph.adjacency import control_flow_context
from geutil.graph.importing import neutral
from geutil.graph.kinds import Graph, Operation
from geutil.graph.names import scope_dirname


@contextmanager
def surroundings_of(
    op: Operation, control_inputs: Iterable[Operation] = ()
) -> Iterator[None]:
    """Make new ops of the block look as if they had been made beside `op`.

    The graph of `op` is the default one. New ops get the name scope, the device and
    the version 1 control-flow context of `op`; nothing around the caller counts.

    Args:
        op: the op.
        control_inputs: what each new op waits for, unless an input of it does.
    """
    graph = op.graph
    scope = scope_dirname(op.name)
    awaited = list(control_inputs)
    with ExitStack() as stack:
        stack.enter_context(neutral(graph))
        graph._set_control_flow_context(control_flow_context(op))
        # Each of these takes as long as a small edit, so what is not needed is left.
        if scope:
            # One that ends in a slash is absolute.
            stack.enter_context(graph.name_scope(scope))
        if op.device:
            stack.enter_context(graph.device(op.device))
        if awaited:
            stack.enter_context(graph.control_dependencies(awaited))
        yield


def count_ops(graph: Graph) -> int:
    """Return the number of ops of `graph`, without listing them."""
    return int(graph.num_operations())


def ops_since(graph: Graph, count: int) -> list[Operation]:
    """Return the ops made since `graph` had `count` of them.

    Cost: none when there are none, else one listing of the ops (some 5 ns each).
    """
    if count_ops(graph) == count:
        return []
    made: list[Operation] = graph.get_operations()[count:]
    return made


def context_name(op: Operation) -> str | None:
    """Return the name of the version 1 control-flow context that `op` runs in."""
    context = control_flow_context(op)
    return None if context is None else str(context.name)
