"""The graphs that batch norms are looked for in: of a model, and of its functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from geutil.batchnorm.report import Refused
from geutil.errors import ArgumentTypeError, GeutilError
from geutil.graph.function_calls import Caller, callers_in
from geutil.graph.kinds import Graph, Operation, Tensor, is_graph, type_name
from geutil.select.networks.norms import FUSED
from geutil.transform.opened import OpenedFunction, OpenedFunctions

SIGNS = FUSED | {"Rsqrt", "Sqrt", "Pow"}
"""Types of ops of which each batch norm has one."""


@dataclass(frozen=True, eq=False)
class Place:
    """A graph that norms are folded in.

    Attributes:
        graph: the graph.
        prefix: what the names of its ops begin with in reports.
        signature: of a model, the signature that it belongs to.
        fixed: why nothing can be changed in it; "" if it can.
        function: of the body of a function that a graph calls, the function.
        inputs: of a body, its arguments.
        sinks: of a body, the ops that read its results, and nothing else.
        callers: of a body, all that calls it.
    """

    graph: Graph
    prefix: str = ""
    signature: str = ""
    fixed: str = ""
    function: OpenedFunction | None = None
    inputs: tuple[Tensor, ...] = ()
    sinks: tuple[Operation, ...] = ()
    callers: tuple[Caller, ...] = ()


class Places:
    """The places of a graph or model.

    Args:
        graph_or_model: a graph, or a model with its signatures and functions.

    Attributes:
        listed: the places, that of the graph or model itself first.
        unopened: functions that may hold norms and cannot be opened.

    Raises:
        ArgumentTypeError: it is neither.
    """

    def __init__(self, graph_or_model: Any) -> None:
        self.listed: list[Place] = []
        self.unopened: list[Refused] = []
        self._functions: OpenedFunctions | None = None
        if is_graph(graph_or_model):
            self._functions = OpenedFunctions(graph_or_model)
            self.listed = [Place(graph_or_model), *_bodies(self._functions)]
            self.unopened = list(_unopened(self._functions))
            return
        for name, model in _signatures(graph_or_model).items():
            self.listed.append(Place(model.graph, "", name))
            self._add_bodies(model, name)

    def _add_bodies(self, model: Any, signature: str) -> None:
        bodies: dict[str, Any] = {}
        for key in model.functions:
            try:
                bodies[key] = model.functions[key]
            except GeutilError as error:
                reason = f"cannot be opened: {error}"
                self.unopened.append(Refused(key, reason, key, signature))
        graphs = [model.graph, *(body.graph for body in bodies.values())]
        known = {caller.op: caller for g in graphs for caller in callers_in(g)}
        for key, body in bodies.items():
            ops = body.callers
            callers = [known[op] for op in ops if op in known]
            place = Place(
                body.graph,
                f"{key}/",
                signature,
                inputs=tuple(body.inputs.values()),
                sinks=tuple(body.outputs.sinks.values()),
                callers=tuple(callers) if len(callers) == len(ops) else (),
            )
            self.listed.append(place)

    def write_back(self, edited: Collection[Place]) -> None:
        """Let the callers of edited bodies call them; models do that themselves."""
        if self._functions is not None:
            functions = [p.function for p in edited if p.function is not None]
            self._functions.write_back(functions)


def _signatures(model: Any) -> Mapping[str, Any]:
    """Return the signatures of a model, its own first."""
    others = getattr(model, "signatures", None)
    own = getattr(model, "signature", None)
    if (
        not isinstance(others, Mapping)
        or not isinstance(own, str)
        or not is_graph(getattr(model, "graph", None))
    ):
        raise ArgumentTypeError(
            f"batch norms are folded in a tf.Graph or a geutil.model.Model, not in a "
            f"{type_name(model)}; open it with geutil.model.open"
        )
    return {own: model, **{name: others[name] for name in others if name != own}}


def _bodies(functions: OpenedFunctions) -> Iterator[Place]:
    for function in functions.opened:
        fixed = ""
        if function.fixed:
            fixed = (
                "is in a function that an op calls by bearing its name as its type, "
                "which cannot be made to call another; use geutil.model.open"
            )
        yield Place(
            function.graph,
            f"{function.name}/",
            "",
            fixed,
            function,
            tuple(function.inputs.values()),
            tuple(function.sinks.values()),
            tuple(function.callers),
        )


def _unopened(functions: OpenedFunctions) -> Iterator[Refused]:
    for function in functions.unopened:
        nodes = (node for d in function.definitions for node in d.node_def)
        if any(node.op in SIGNS for node in nodes):
            reason = f"calls a function that cannot be opened: {function.reason}"
            yield Refused(function.name, reason, function.caller.name)
