"""Constants that are passed to function bodies, put into the bodies.

Tracing passes constants of the graph around a loop or a branch as arguments. In the
body a weight is then no constant any more, but whatever a caller gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from geutil.batchnorm.places import SIGNS, Place
from geutil.graph.identity import IdentityMap, MutableIdentityMap
from geutil.graph.importing import make_op, neutral
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.names import absolute_unique_name
from geutil.reroute.tensors import reroute_ts

Passed = list[tuple[Tensor, Operation]]
"""(argument, constant) for each argument of a body that is always the same constant."""
Sunk = list[tuple[Tensor, Tensor]]
"""(argument, constant) for each argument that is read as a constant."""


def constants_passed(places: Sequence[Place]) -> list[Passed]:
    """Return, for each place, the arguments that are constants, if norms may read them.

    An argument is a constant if all callers pass the same one, and loops hand it on as
    it is. Nothing is changed.

    Args:
        places: bodies, and the graphs that call them, callers first.

    Cost: linear in the ops of the bodies, and in the bytes of the constants.
    """
    wanted = _wanted(places)
    known: MutableIdentityMap[Operation] = MutableIdentityMap()
    listed: list[Passed] = []
    for place in places:
        listed.append([])
        if not place.callers or place.fixed or id(place.graph) not in wanted:
            continue
        for index, argument in enumerate(place.inputs):
            if not argument.dtype.is_floating or not _readers(place, argument):
                continue
            constant = _passed(place, index, known)
            if constant is not None:
                known[argument] = constant
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
    """Let what reads sunk constants read the arguments again."""
    for argument, constant in sunk:
        reroute_ts([argument], [constant])


def _wanted(places: Sequence[Place]) -> frozenset[int]:
    """Return the ids of the bodies that may hold norms, and of those that call them."""
    wanted: set[int] = set()
    for place in reversed(places):
        if id(place.graph) in wanted or _may_hold_norms(place.graph):
            wanted.add(id(place.graph))
            wanted.update(id(caller.op.graph) for caller in place.callers)
    return frozenset(wanted)


def _may_hold_norms(graph: Graph) -> bool:
    return any(op.type in SIGNS for op in graph.get_operations())


def _readers(place: Place, argument: Tensor) -> list[Operation]:
    return [op for op in argument.consumers() if op not in place.sinks]


def _passed(
    place: Place, index: int, known: IdentityMap[Operation]
) -> Operation | None:
    """Return the constant that all callers pass as an argument, if they do."""
    found: Operation | None = None
    for caller in place.callers:
        if caller.is_loop and not _is_handed_on(place, index):
            return None
        if not (caller.is_loop or caller.is_branching or caller.is_call):
            return None
        source = _source(caller.op.inputs[caller.first_argument + index])
        op = known.get(source, source.op)
        if op.type != "Const":
            return None
        if found is not None and op.get_attr("value") != found.get_attr("value"):
            return None
        found = op
    return found


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
    node.name = absolute_unique_name(place.graph, argument.op.name)
    node.attr.pop("_class", None)
    del node.input[:]
    with neutral(place.graph):
        return make_op(place.graph, node, []).outputs[0]
