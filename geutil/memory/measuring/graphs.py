"""A graph as a job: what the fetches need, and the values of its variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import MeasurementError
from geutil.graph.function_attributes import names_of_functions
from geutil.graph.function_graphs import write_stand_in
from geutil.graph.kinds import Graph, Operation, Tensor, is_op
from geutil.graph.op_types import PYTHON_CALLS
from geutil.memory.measuring.job import GraphJob
from geutil.memory.measuring.variables import variables_of
from geutil.select.walks import get_backward_walk_ops

_HANDLES = (tf.resource, tf.variant)


def graph_job(
    graph: Graph,
    fetches: Sequence[Any],
    feeds: Sequence[tuple[Tensor, Any]],
    bound: Sequence[tuple[Any, Tensor]],
    session: Any,
    *,
    as_function: bool,
) -> GraphJob:
    """Return the job that runs a graph.

    Args:
        graph: a `tf.Graph` or FuncGraph.
        fetches: its ops and tensors that are wanted.
        feeds: (tensor, array) pairs.
        bound: (eager tensor outside, placeholder) pairs.
        session: a Session that holds the values of the variables, or None.
        as_function: whether to run it as a function, and not in a Session.

    Raises:
        MeasurementError: the graph cannot be run elsewhere; the message says why.

    Cost: one serialization of the graph, and the values of its variables.
    """
    ops = get_backward_walk_ops(_ops_of(fetches), control_inputs=True)
    needed = {op.name for op in ops}
    given = {t.name: value for t, value in feeds}
    outside = {t.op.name: e for e, t in bound if t.op.name in needed}
    handles = {n: e for n, e in outside.items() if e.dtype in _HANDLES}
    given |= {f"{n}:0": _array(n, e) for n, e in outside.items() if n not in handles}
    _check_placeholders(fetches, [t for t, _ in feeds], outside)

    graph_def = _part(graph, needed)
    _check_python(graph_def)
    for node in graph_def.node:
        if node.name in handles:
            write_stand_in(node, handles[node.name])
    variables, initials = variables_of(graph, graph_def, handles, session)
    return GraphJob(
        graph_def=graph_def.SerializeToString(),
        op_types={node.name: node.op for node in graph_def.node},
        fetches=tuple(dict.fromkeys(fetch.name for fetch in fetches)),
        feeds=given,
        variables=variables,
        initial_graph_def=_initial_part(graph, initials),
        as_function=as_function,
        cpus=_cpus(graph_def),
    )


def _ops_of(fetches: Iterable[Any]) -> list[Operation]:
    return [fetch if is_op(fetch) else fetch.op for fetch in fetches]


def _array(name: str, external: Any) -> Any:
    if not hasattr(external, "numpy"):
        raise MeasurementError(
            f"'{name}' stands for a tensor of another graph; feed it a value"
        )
    return external.numpy()


def _check_placeholders(
    fetches: Sequence[Any], fed: Sequence[Tensor], outside: dict[str, Any]
) -> None:
    """Raise `MeasurementError` if a placeholder that is needed has no value."""
    fed_ids = {id(t) for t in fed}
    seeds = _ops_of(fetch for fetch in fetches if id(fetch) not in fed_ids)
    missing = [
        op.name
        for op in get_backward_walk_ops(seeds, stop_at_ts=fed, control_inputs=True)
        if op.type == "Placeholder"
        and op.name not in outside
        and id(op.outputs[0]) not in fed_ids
    ]
    if missing:
        raise MeasurementError(f"placeholders without a value: {missing}; feed them")


def _part(graph: Graph, names: set[str]) -> Any:
    """Return the `GraphDef` of some ops and of the functions that they call."""
    try:
        whole = graph.as_graph_def()
    except (ValueError, tf.errors.OpError) as error:
        raise MeasurementError(
            "the graph holds more constants than fit into one protobuf (2 GB); keep "
            f"large values in variables or feeds: {error}"
        ) from error
    part = tf.compat.v1.GraphDef(versions=whole.versions)
    part.node.extend(node for node in whole.node if node.name in names)
    functions = {f.signature.name: f for f in whole.library.function}
    called = _called(part.node, functions)
    part.library.function.extend(functions[name] for name in called)
    part.library.gradient.extend(
        g for g in whole.library.gradient if g.function_name in called
    )
    for node in part.node:
        _drop_colocation(node, names)
    return part


def _called(nodes: Iterable[Any], functions: dict[str, Any]) -> dict[str, None]:
    """Return the functions that nodes call, and those that these call in turn."""
    found: dict[str, None] = {}
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            for name in names_of_functions(node):
                if name in functions and name not in found:
                    found[name] = None
                    waiting.append(functions[name].node_def)
    return found


def _drop_colocation(node: Any, names: set[str]) -> None:
    """Take off colocation with ops that are not there."""
    if "_class" in node.attr:
        places = node.attr["_class"].list.s
        kept = [p for p in places if p.decode().removeprefix("loc:@") in names]
        if len(kept) < len(places):
            del node.attr["_class"]
            if kept:
                node.attr["_class"].list.s.extend(kept)


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _check_python(graph_def: Any) -> None:
    for node in _all_nodes(graph_def):
        if node.op in PYTHON_CALLS:
            raise MeasurementError(
                f"'{node.name}' ({node.op}) calls Python of this process; measure a "
                "callable of an importable module that builds and runs the graph"
            )


def _initial_part(graph: Graph, initials: list[Tensor]) -> bytes:
    if not initials:
        return b""
    ops = get_backward_walk_ops(initials, control_inputs=True)
    return bytes(_part(graph, {op.name for op in ops}).SerializeToString())


def _cpus(graph_def: Any) -> int:
    """Return how many CPU devices the device strings of a graph ask for."""
    devices = {node.device for node in _all_nodes(graph_def) if node.device}
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    indices = [s.device_index or 0 for s in specs if s.device_type == "CPU"]
    return 1 + max(indices, default=0)
