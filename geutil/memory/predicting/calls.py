"""Ops that run functions: conditionals, loops and calls.

Such an op is one node of a program, and what its function holds beyond the results is
its temporary memory.
"""

from __future__ import annotations

from collections.abc import Callable

from geutil.graph.body_shapes import body_for_call
from geutil.graph.function_calls import Caller, callers_in
from geutil.graph.kinds import Graph, Operation
from geutil.memory.program import Program
from geutil.memory.simulation import simulate

ReadBody = Callable[[Graph, "dict[Operation, int]"], Program]
"""Reads the graph of a function, given the temporary bytes of its calls."""


def call_bytes(graph: Graph, read: ReadBody) -> dict[Operation, int]:
    """Return what the functions that a graph's ops run hold beyond the ops' results.

    Of a conditional the larger branch counts, of a loop one iteration.

    Args:
        graph: the graph of the calls.
        read: how to read a body.

    Cost: linear in the ops of the bodies, each as often as it is called.
    """
    return {caller.op: _bytes(graph, caller, read) for caller in callers_in(graph)}


def _bytes(graph: Graph, caller: Caller, read: ReadBody) -> int:
    arguments = list(caller.op.inputs)[caller.first_argument :]
    most = 0
    for name in caller.names:
        body = body_for_call(graph, name, arguments)
        if body is None:
            continue
        program = read(body, call_bytes(body, read))
        results = sum(program.sizes[t] for t in program.fetched)
        most = max(most, simulate(program).peak - results)
    return most
