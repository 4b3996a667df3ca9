"""Names of the ops of TFLite files, and of the graph ops that these were made from.

Ops of a file have no names, its tensors have. The converter calls a tensor after the op
that made it; after all of them, with ";" between, where it fused several; and it puts a
number behind a name that is taken.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from geutil.graph.op_types import CALLS, FAKE_QUANT
from geutil.tflite.parts import LiteGraph, LiteOp

T = TypeVar("T")

_DIGITS = "0123456789"
_SIMULATIONS = sorted(FAKE_QUANT)


def sources_of(tensor_name: str) -> list[str]:
    """Return the names of the ops that a tensor is named after, its maker's first.

    Example:
        >>> sources_of("net/Relu;net/conv:0;net/bias")
        ['net/Relu', 'net/conv', 'net/bias']
    """
    parts = (part.partition(":")[0].strip() for part in tensor_name.split(";"))
    return [part for part in parts if part]


def spellings(name: str) -> Iterator[str]:
    """Yield the names that a file's name of an op can stand for, the likeliest first.

    Example:
        >>> list(spellings("MatMul_11"))
        ['MatMul_11', 'MatMul_1', 'MatMul_']
    """
    yield name
    while name and name[-1] in _DIGITS:
        name = name[:-1]
        if name:
            yield name


def called(name: str, ops: Mapping[str, T]) -> T | None:
    """Return the op that a file's name of it stands for; None if there is none.

    Example:
        >>> called("net/MatMul_12", {"net/MatMul": 0, "net/MatMul_1": 1})
        1
    """
    for spelling in spellings(name):
        # `to_int8` calls a FakeQuant op of a scope of its own after the scope.
        for full in (spelling, *(f"{spelling}/{kind}" for kind in _SIMULATIONS)):
            if full in ops:
                return ops[full]
    return None


def names_result(name: str) -> bool:
    """Tell whether a name is that of a whole function's result, and so of no op."""
    return name.rpartition("/")[2].rstrip(_DIGITS).rstrip("_") in CALLS


def op_names(graph: LiteGraph) -> list[str]:
    """Return a name for each op of a subgraph, all different, by its first result."""
    unique = UniqueNames()
    return [unique.name(_wanted(op)) for op in graph.ops]


def _wanted(op: LiteOp) -> str:
    return next(iter(sources_of(op.result)), op.kind.lower())


class UniqueNames:
    """Names of which none is given twice."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def name(self, wanted: str) -> str:
        """Return a name, or that name with a number behind it where it is taken."""
        name = wanted
        while name in self._times:
            self._times[wanted] += 1
            name = f"{wanted}_{self._times[wanted]}"
        self._times[name] = 0
        return name


def file_names(names: Sequence[str]) -> dict[str, str]:
    """Return what inputs or outputs are called in a file: names Python can call.

    Example:
        >>> from geutil.tflite.names import file_names
        >>> file_names(["image", "in", "a/b", "a_b"])
        {'image': 'image', 'in': 'in_', 'a/b': 'a_b_1', 'a_b': 'a_b'}
    """
    file_name_of: dict[str, str] = {}
    used_names = {name for name in names if _is_callable(name)}
    for name in names:
        file_name = name
        if not _is_callable(name):
            base = re.sub(r"\W|^(?=\d)", "_", name)
            base = f"{base}_" if keyword.iskeyword(base) else base
            endings = ("", *(f"_{number}" for number in range(1, len(used_names) + 2)))
            file_name = next(base + e for e in endings if base + e not in used_names)
            used_names.add(file_name)
        file_name_of[name] = file_name
    return file_name_of


def _is_callable(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
