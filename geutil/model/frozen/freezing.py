"""Variables turned into constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.calls import Library
from geutil.graph.handles import dtype_behind
from geutil.graph.importing import BULK_LIMIT
from geutil.model.core import EditableModel, M
from geutil.model.errors import ModelError
from geutil.model.frozen.handle_flow import Value
from geutil.model.frozen.handle_replacing import replace_handles
from geutil.model.holdings import Holdings
from geutil.model.programs.closures import prune
from geutil.model.programs.constants import become_const
from geutil.model.programs.program import Program, fresh_name, legal_name, node_of
from geutil.model.programs.rewiring import rename_placeholders


@dataclass(frozen=True)
class Captured:
    """What becomes a constant: a variable, or a value that was too large for one.

    Attributes:
        name: the name of the variable or value.
        outside: the handle of the variable, or the value.
        dtype: its dtype.
        is_variable: whether `outside` is a handle.
    """

    name: str
    outside: Any
    dtype: tf.DType
    is_variable: bool

    def shape(self) -> list[int]:
        """Return the shape, for which a variable is not read."""
        if not self.is_variable:
            return [int(size) for size in self.outside.shape]
        shape = tf.raw_ops.VariableShape(input=self.outside, out_type=tf.int64)
        return [int(size) for size in shape.numpy()]

    def value(self) -> Any:
        """Return the value."""
        if not self.is_variable:
            return self.outside
        return tf.raw_ops.ReadVariableOp(resource=self.outside, dtype=self.dtype)


def freeze(model: M) -> M:
    """Return a model with constants for variables; see `Model.freeze`."""
    programs = {}
    for name, signature in model.signatures.items():
        try:
            programs[name] = frozen_program(signature)
        except ModelError as error:
            if name == model.signature:
                raise
            raise ModelError(
                f"signature '{name}' cannot be frozen, which shares the variables: "
                f"{error}"
            ) from error
    held = model.holdings
    return model.rebuilt(programs, Holdings({}, held.resources, held.assets))


def frozen_program(model: EditableModel) -> Program:
    """Return the program of a model with constants for its variables.

    Captures that are no variables, as those of tables, are left. Functions that nothing
    calls any more are dropped.

    Raises:
        ModelError: a variable has no value, or something needs more than its value; or
            the constants do not fit into a protobuf.

    Cost: linear in nodes and edges and in the bytes of the variables.
    """
    program = model.program()
    sources = _sources(model, program)
    _check_initialized(sources)
    _check_size(repr(model), program, sources)
    names = _insert_constants(program, sources)
    reads = replace_handles(
        program.graph_def,
        {
            names[node]: Value(
                source.name,
                source.dtype.as_datatype_enum,
                tf.TensorShape(source.shape()).as_proto().SerializeToString(),
            )
            for node, source in sources.items()
            if source.is_variable
        },
    )
    for name in names.values():
        del program.captures[f"{name}:0"]
    # A variable was read in its turn among the effects; a constant has no such turn.
    program.side_effects = [n for n in program.side_effects if n not in reads]
    prune(program)
    library = Library(program.graph_def.library).still_called(program.graph_def.node)
    program.graph_def.library.CopyFrom(library)
    return program


def _sources(model: EditableModel, program: Program) -> dict[str, Captured]:
    """Return what becomes a constant, by the name of the node that stands for it."""
    names = {id(v.handle): name for name, v in model.variables.items()}
    sources = {}
    for tensor, outside in program.captures.items():
        node = node_of(tensor)
        if outside.dtype == tf.resource:
            dtype = dtype_behind(outside)
            if dtype is not None:
                name = names.get(id(outside), node)
                sources[node] = Captured(name, outside, dtype, True)
        elif outside.dtype != tf.variant:
            sources[node] = Captured(node, outside, outside.dtype, False)
    return sources


def _check_initialized(sources: Mapping[str, Captured]) -> None:
    empty = [
        source.name
        for source in sources.values()
        if source.is_variable
        and not tf.raw_ops.VarIsInitializedOp(resource=source.outside)
    ]
    if empty:
        more = " and more" if len(empty) > 10 else ""
        raise ModelError(
            f"the variables {empty[:10]}{more} have no value, so they cannot become "
            "constants: read a checkpoint with model.restore(path) or assign values"
        )


def _check_size(what: str, program: Program, sources: Mapping[str, Captured]) -> None:
    total = program.graph_def.ByteSize()
    for outside in {id(s.outside): s for s in sources.values()}.values():
        elements = int(np.prod(outside.shape(), dtype=object))
        total += elements * max(outside.dtype.size, 1)
    if total > BULK_LIMIT:
        raise ModelError(
            f"frozen, {what} would have {total:,} bytes, and a graph of constants "
            f"holds at most {BULK_LIMIT:,}: save it as a SavedModel, which keeps them "
            "as variables"
        )


def _insert_constants(
    program: Program, sources: Mapping[str, Captured]
) -> dict[str, str]:
    """Put constants in the place of the nodes that stand for variables.

    Returns:
        For each such node the name of the constant.
    """
    taken = {node.name for node in program.graph_def.node} - set(sources)
    names: dict[str, str] = {}
    for node, source in sources.items():
        names[node] = fresh_name(taken, legal_name(source.name))
        taken.add(names[node])
    rename_placeholders(program, names)
    by_name = {names[node]: source for node, source in sources.items()}
    for node in program.graph_def.node:
        if node.name in by_name:
            become_const(node, node.name, by_name[node.name].value())
    return names
