"""Where the handles of variables go in a list of nodes.

A handle passes through some ops as it is. References are as nodes write them without a
`:0` at the end: `node` and `node:1` in a graph, `argument`, `node:output` and
`node:output:1` in a function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from geutil.graph.op_types import LOOPS
from geutil.model.programs.program import short

SINGLE_PASSES = frozenset(("Identity", "Enter", "Exit", "NextIteration", "Merge"))
LIST_PASSES = frozenset(("IdentityN",)) | LOOPS
_SWITCH = "Switch"


@dataclass(frozen=True)
class Value:
    """What takes the place of a handle.

    Attributes:
        variable: the name of the variable, for messages.
        dtype: the number of its `tf.DType`.
        shape: its shape, a serialized `TensorShapeProto`.
    """

    variable: str
    dtype: int
    shape: bytes


@dataclass
class Carrier:
    """A node that reads handles.

    Attributes:
        node: the node.
        values: the value for each input, by index, that is a handle.
    """

    node: Any
    values: dict[int, Value] = field(default_factory=dict)


def handle_flow(
    nodes: Iterable[Any], seeds: Mapping[str, Value], *, in_function: bool
) -> tuple[dict[str, Value], list[Carrier]]:
    """Follow handles through the ops that pass them on.

    Args:
        nodes: the nodes of a graph or of a function.
        seeds: the values by the references that are handles to begin with.
        in_function: whether the nodes write references as functions do.

    Returns:
        The values by all references that are handles, and the nodes that read some, in
        the order of the nodes.

    Cost: linear in nodes and edges.
    """
    readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    listed = list(nodes)
    for place, node in enumerate(listed):
        for index, text in enumerate(node.input):
            readers[short(text)].append((place, index))
    values = dict(seeds)
    carriers: dict[int, Carrier] = {}
    waiting = list(values)
    while waiting:
        reference = waiting.pop()
        value = values[reference]
        for place, index in readers.get(reference, ()):
            carrier = carriers.setdefault(place, Carrier(listed[place]))
            carrier.values[index] = value
            for passed in _passed_on(listed[place], index, in_function):
                if passed not in values:
                    values[passed] = value
                    waiting.append(passed)
    return values, [carriers[place] for place in sorted(carriers)]


def passes(node: Any, index: int) -> bool:
    """Tell whether a node passes a handle on as it is."""
    if node.op in SINGLE_PASSES or node.op in LIST_PASSES:
        return True
    return (node.op, index) == (_SWITCH, 0)


def _passed_on(node: Any, index: int, in_function: bool) -> Iterator[str]:
    """Yield the references to the outputs that are the handle at input `index`."""
    if node.op in SINGLE_PASSES:
        outputs = [("output", 0, 0)]
    elif node.op in LIST_PASSES:
        outputs = [("output", index, index)]
    elif (node.op, index) == (_SWITCH, 0):
        outputs = [("output_false", 0, 0), ("output_true", 0, 1)]
    else:
        outputs = []
    for argument, within, position in outputs:
        if in_function:
            yield short(f"{node.name}:{argument}:{within}")
        else:
            yield short(f"{node.name}:{position}")
