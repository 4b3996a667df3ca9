"""What is to be changed in a graph or function body, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from geutil.model.batching.sizes import Source


@dataclass(frozen=True)
class Grown:
    """A dimension that is some times the batch."""

    factor: int


Dims: TypeAlias = tuple["int | Grown", ...]


@dataclass(frozen=True)
class SetConstant:
    """Input `index` of `node` becomes a constant of its own."""

    node: str
    index: int
    value: np.ndarray[Any, Any]


@dataclass(frozen=True)
class SetElements:
    """Elements of the vector that a Pack op makes for input `index` are replaced."""

    node: str
    index: int
    pack: str
    elements: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SetDims:
    """Input `index` of `node` becomes a vector of dimensions."""

    node: str
    index: int
    dims: Dims
    source: Source
    dtype: int


@dataclass(frozen=True)
class Broadcast:
    """Input `index` of `node`, or a result of a function, is repeated for the batch.

    Attributes:
        node: the node, or None for a result.
        index: the index of the input or of the result.
        axis: the axis that is repeated; of several equal rows the first is taken.
        rows: how long that axis is.
        dims: the shape afterwards.
        source: where the size of the batch is read.
        dtype: the dtype of the tensor.
    """

    node: str | None
    index: int
    axis: int
    rows: int
    dims: Dims
    source: Source
    dtype: int


@dataclass(frozen=True)
class SetAttribute:
    """An attribute of `node` gets a new value."""

    node: str
    name: str
    value: Any = field(repr=False)


@dataclass(frozen=True)
class BiasToAdd:
    """A BiasAdd becomes an AddV2 that reads `bias` as it was before a Squeeze."""

    node: str
    bias: str


@dataclass(frozen=True)
class CallAnew:
    """A function that `node` calls is replaced by a changed copy.

    Attributes:
        node: the calling node.
        attribute: the attribute that names the function; None if it is the op's type.
        position: the place in the attribute, for a list of functions.
        function: the name of the function.
        plan: the changes.
    """

    node: str
    attribute: str | None
    position: int
    function: str
    plan: Plan


Edit: TypeAlias = (
    SetConstant
    | SetElements
    | SetDims
    | Broadcast
    | SetAttribute
    | BiasToAdd
    | CallAnew
)


@dataclass(frozen=True)
class Problem:
    """What cannot be mended, and what to do about it."""

    node: str
    op: str
    reason: str
    remedy: str
    constants: tuple[str, ...] = ()

    def __str__(self) -> str:
        reads = f" with {', '.join(self.constants)}" if self.constants else ""
        return f"'{self.node}' ({self.op}){reads}: {self.reason}; {self.remedy}"


@dataclass
class Plan:
    """The changes of one graph or function body.

    Attributes:
        edits: the changes, in the order of the ops.
        problems: what cannot be mended.
        growing: the names of the nodes that depend on the batch; what is recorded of
            their shapes no longer holds.
    """

    edits: list[Edit] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    growing: set[str] = field(default_factory=set)

    def all_problems(self) -> list[Problem]:
        """Return the problems, those of the functions that are called included."""
        found = list(self.problems)
        waiting = list(self.edits)
        while waiting:
            edit = waiting.pop(0)
            if isinstance(edit, CallAnew):
                found += edit.plan.problems
                waiting += edit.plan.edits
        return list(dict.fromkeys(found))
