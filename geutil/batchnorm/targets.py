"""The graphs that batch norms are folded in.

Of a model and of its functions, with constants passed to them.

Tracing passes constants of the graph around a loop or a branch as arguments. In the
body a weight is then no constant any more, but whatever a caller gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from geutil.batchnorm.report import Refused
from geutil.errors import GeutilError
from geutil.graph import creation, op_types, replicas, types
from geutil.graph.function_calls import Caller, callers_in
from geutil.graph.types import Graph, IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.reroute.tensors import reroute_ts
from geutil.select.networks.provenance import ROOTS
from geutil.transform.function_bodies import OpenedFunction, OpenedFunctions

SIGNS = op_types.FUSED_NORMS | ROOTS
"""Types of ops of which each batch norm has one."""


@dataclass(frozen=True, eq=False)
class Place:
    """A graph that batch norms are folded in.

    Attributes:
        prefix: the prefix of its ops' names in reports.
        signature: of a model, the signature that it belongs to.
        fixed: why nothing can be changed in it; "" if it can.
        function: of the body of a function that a graph calls, the function.
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

    Attributes:
        listed: the places, that of the graph or model itself first.
        unopened: functions that may hold batch norms and cannot be opened.
    """

    def __init__(self, graph_or_model: Any) -> None:
        self.listed: list[Place] = []
        self.unopened: list[Refused] = []
        self._functions: OpenedFunctions | None = None
        if types.is_graph(graph_or_model):
            self._functions = OpenedFunctions(graph_or_model)
            own = frozenset(replicas.own_operations(graph_or_model))
            self.listed = [Place(graph_or_model), *_bodies(self._functions, own)]
            graphs = [place.graph for place in self.listed]
            self.unopened = list(_unopened(self._functions, own, graphs))
            return
        verb = "batch norms are folded in a tf.Graph or a geutil.model.Model, not in"
        for name, model in types.signatures_of(graph_or_model, verb).items():
            self.listed.append(Place(model.graph, "", name))
            self._add_bodies(model, name)

    def _add_bodies(self, model: Any, signature: str) -> None:
        """List the bodies of the functions that the graph of a model calls."""
        if not callers_in(model.graph):
            return
        bodies: dict[str, Any] = {}
        for key in model.functions:
            try:
                bodies[key] = model.functions[key]
            except GeutilError as error:
                reason = f"cannot be opened: {error}"
                self.unopened.append(Refused(key, reason, key, signature))
        graphs = [model.graph, *(body.graph for body in bodies.values())]
        caller_by_op = {caller.op: caller for g in graphs for caller in callers_in(g)}
        for key, body in bodies.items():
            ops = body.callers
            callers = [caller_by_op[op] for op in ops if op in caller_by_op]
            # A list of callers is of use only if it is complete.
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


def _bodies(functions: OpenedFunctions, own: Collection[Operation]) -> Iterator[Place]:
    """Yield the bodies of functions that own ops call, with the reason if one is fixed.

    Callers come before the bodies that they call.
    """
    graphs: set[Graph] = set()
    for function in functions.opened:
        callers = [caller.op for caller in function.callers]
        if callers and not any(op in own or op.graph in graphs for op in callers):
            continue
        graphs.add(function.graph)
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


def _unopened(
    functions: OpenedFunctions, own: Collection[Operation], graphs: Sequence[Graph]
) -> Iterator[Refused]:
    for function in functions.unopened:
        caller = function.caller
        if caller not in own and caller.graph not in graphs[1:]:
            continue
        nodes = (node for d in function.definitions for node in d.node_def)
        if any(node.op in SIGNS for node in nodes):
            reason = f"calls a function that cannot be opened: {function.reason}"
            yield Refused(function.name, reason, function.caller.name)


Passed = list[tuple[Tensor, Operation]]
"""(argument, constant) for each argument of a body that is always the same constant."""
Sunk = list[tuple[Tensor, Tensor]]
"""(argument, constant) for each argument that is read as a constant."""


def constants_passed(places: Sequence[Place]) -> list[Passed]:
    """Return for each place the constant arguments that batch norms may read.

    An argument is a constant if all callers pass the same one, and loops forward it as
    it is. Nothing is changed.

    Cost: linear in the ops of the bodies, and in the bytes of the constants.
    """
    graph_ids = _wanted(places)
    constant_by_argument: MutableIdentityMap[Operation] = MutableIdentityMap()
    listed: list[Passed] = []
    for place in places:
        listed.append([])
        if not place.callers or place.fixed or id(place.graph) not in graph_ids:
            continue
        for index, argument in enumerate(place.inputs):
            if not argument.dtype.is_floating or not _readers(place, argument):
                continue
            constant = _passed(place, index, constant_by_argument)
            if constant is not None:
                constant_by_argument[argument] = constant
                listed[-1].append((argument, constant))
    return listed


def sink_constants(place: Place, passed: Passed) -> Sunk:
    """Let a body read its own copies of the constants that it is passed.

    Callers go on passing them.
    """
    sunk = []
    for argument, constant in passed:
        copy = _copied(place, argument, constant)
        reroute_ts([copy], [argument], can_modify=_readers(place, argument))
        sunk.append((argument, copy))
    return sunk


def raise_constants(sunk: Sunk) -> None:
    """Let readers of sunk constants read the arguments again."""
    for argument, constant in sunk:
        reroute_ts([argument], [constant])


def _wanted(places: Sequence[Place]) -> frozenset[int]:
    """Return the ids of bodies that may hold batch norms, and of their callers."""
    graph_ids: set[int] = set()
    for place in reversed(places):
        if id(place.graph) in graph_ids or _may_hold_norms(place.graph):
            graph_ids.add(id(place.graph))
            graph_ids.update(id(caller.op.graph) for caller in place.callers)
    return frozenset(graph_ids)


def _may_hold_norms(graph: Graph) -> bool:
    return any(op.type in SIGNS for op in graph.get_operations())


def _readers(place: Place, argument: Tensor) -> list[Operation]:
    return [op for op in argument.consumers() if op not in place.sinks]


def _passed(
    place: Place, index: int, constant_by_argument: IdentityMap[Operation]
) -> Operation | None:
    """Return the constant that all callers pass as an argument, if they do."""
    constant: Operation | None = None
    for caller in place.callers:
        if caller.is_loop and not _is_handed_on(place, index):
            return None
        if not (caller.is_loop or caller.is_branching or caller.is_call):
            return None
        source = _source(caller.op.inputs[caller.first_argument + index])
        op = constant_by_argument.get(source, source.op)
        if op.type != "Const":
            return None
        if constant is not None and op.get_attr("value") != constant.get_attr("value"):
            return None
        constant = op
    return constant


def _is_handed_on(place: Place, index: int) -> bool:
    """Tell whether the body of a loop returns a loop variable as it is."""
    if index >= len(place.sinks):
        return False
    return _source(place.sinks[index].inputs[0]) is place.inputs[index]


def _source(tensor: Tensor) -> Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _copied(place: Place, argument: Tensor, constant: Operation) -> Tensor:
    node = constant.node_def
    node.name = types.absolute_unique_name(place.graph, argument.op.name)
    node.attr.pop("_class", None)
    del node.input[:]
    with creation.neutral(place.graph):
        return creation.make_op(place.graph, node, []).outputs[0]
