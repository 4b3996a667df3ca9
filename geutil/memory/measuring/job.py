"""What the measuring process is told. It travels as a pickle between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """How to measure; see `measure`."""

    steps: int
    inter_op_threads: int | None
    intra_op_threads: int | None
    grappler: bool
    onednn: bool | None
    jit_compile: bool
    timeout: float | None


@dataclass(frozen=True)
class VariableSpec:
    """A variable of a graph.

    Attributes:
        op: the op that makes its handle or, of a version 1 variable, its reference.
        key: variables of the same key are one.
        dtype: the name of its dtype.
        value: its value as an array; None for what `initial` yields.
        initial: the tensor of the initial graph that holds its value, else None.
    """

    op: str
    key: str
    dtype: str
    value: Any = None
    initial: str | None = None


@dataclass(frozen=True)
class GraphJob:
    """A graph to run.

    Attributes:
        graph_def: the serialized `GraphDef`; every resource variable is a VarHandleOp.
        op_types: the types of its ops by name.
        fetches: the names of tensors, and of ops to run.
        feeds: values by tensor name.
        variables: what it reads and assigns.
        initial_graph_def: the serialized `GraphDef` that computes initial values.
        as_function: whether to run it as a function, and not in a Session.
        cpus: how many CPU devices it names.
    """

    graph_def: bytes
    op_types: Mapping[str, str]
    fetches: tuple[str, ...]
    feeds: Mapping[str, Any]
    variables: tuple[VariableSpec, ...]
    initial_graph_def: bytes
    as_function: bool
    cpus: int


@dataclass(frozen=True)
class CallJob:
    """A callable to call.

    Attributes:
        pickled: the pickle of (callable, positional arguments, keyword arguments).
    """

    pickled: bytes


Job = GraphJob | CallJob
