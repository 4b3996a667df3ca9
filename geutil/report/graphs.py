"""A graph as the viewer reads it: columns, one entry an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.report.attributes import attributes_of, called_functions

_HOLDERS = {"VarHandleOp", "VariableV2", "ReadVariableOp"}
_HANDERS = {"Identity", "Cast"}
"""What these read of parameters is drawn with the parameters."""


def graph_data(
    label: str,
    graph: Graph,
    ends: Mapping[str, str],
    pages: Mapping[str, str],
    ops: Iterable[Operation] | None = None,
    left_out: int = 0,
) -> dict[str, Any]:
    """Return a graph, or some ops of it, as the viewer takes it.

    Args:
        label: what to call it.
        graph: the graph.
        ends: what to call an op that is an end of the model, by the op's name.
        pages: for a function that can be shown, the label of its graph.
        ops: the ops to show; None shows all.
        left_out: how many ops are not shown because nothing runs them.

    Returns:
        The columns; see `GraphData` in web/src/payload.ts.

    Cost: linear in ops and edges.
    """
    listed = graph.get_operations() if ops is None else list(ops)
    places = {op.name: place for place, op in enumerate(listed)}
    types, devices = _Words(), _Words()
    parameters = _parameters(listed)
    return {
        "label": label,
        "names": [op.name for op in listed],
        "types": [types.place(op.type) for op in listed],
        "typeNames": types.words,
        "inputs": [_inputs(op, places) for op in listed],
        "controls": [
            sorted(places[c.name] for c in op.control_inputs if c.name in places)
            for op in listed
        ],
        "outputs": [[_holds(t) for t in op.outputs] for op in listed],
        "devices": [devices.place(op.device) for op in listed],
        "deviceNames": devices.words,
        "attributes": [attributes_of(op) for op in listed],
        "parameters": [places[name] for name in parameters],
        "ends": {places[n]: text for n, text in ends.items() if n in places},
        "calls": _calls(listed, pages),
        "leftOut": left_out,
    }


class _Words:
    """Words, each kept once, and their places."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, word: str) -> int:
        place = self._places.setdefault(word, len(self.words))
        if place == len(self.words):
            self.words.append(word)
        return place


def _inputs(op: Operation, places: Mapping[str, int]) -> list[int]:
    """Return the op and the output of each input, one after the other."""
    flat: list[int] = []
    for t in op.inputs:
        place = places.get(t.op.name)
        if place is not None:
            flat += (place, t.value_index)
    return flat


def _holds(tensor: Tensor) -> str:
    """Return what a tensor holds, such as "float32 [?, 8]"."""
    shape = tensor.shape
    if shape.rank is None:
        return f"{tensor.dtype.name} [...]"
    sizes = ", ".join("?" if size is None else str(size) for size in shape.as_list())
    return f"{tensor.dtype.name} [{sizes}]"


def _parameters(ops: Sequence[Operation]) -> list[str]:
    """Return the names of ops that hold or read weights and constants."""
    # A constant that waits, as in the loops of version 1, is one all the same.
    free = [op for op in ops if op.type == "Const" or not op.control_inputs]
    handers = {op for op in free if op.type in _HANDERS}
    waiting = [op for op in free if _is_parameter(op)]
    found = set(waiting)
    while waiting:
        for t in waiting.pop().outputs:
            for reader in t.consumers():
                if reader in handers and reader not in found:
                    found.add(reader)
                    waiting.append(reader)
    return [op.name for op in ops if op in found]


def _is_parameter(op: Operation) -> bool:
    return (
        op.type in _HOLDERS
        or op.type in ("Const", "NoOp")
        or (op.type == "Placeholder" and op.outputs[0].dtype.name == "resource")
    )


def _calls(ops: Sequence[Operation], pages: Mapping[str, str]) -> dict[int, list[str]]:
    calls = {}
    called: Callable[[Operation], list[str]] = called_functions
    for place, op in enumerate(ops):
        shown = [pages[name] for name in called(op) if name in pages]
        if shown:
            calls[place] = shown
    return calls
