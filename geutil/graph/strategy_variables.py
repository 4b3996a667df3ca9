"""Variables of a strategy of `tf.distribute`: one object, and a copy on each device.

A graph reads one copy, by its handle. A model is made of first copies, which are plain
variables; in a replica, its functions read that replica's copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import _tf, op_types
from geutil.graph.types import Operation


def in_scope() -> bool:
    """Tell whether the scope of a strategy is open here, and no replica is traced."""
    distribute = tf.distribute
    return distribute.has_strategy() and distribute.in_cross_replica_context()


def needs_copies() -> bool:
    """Tell whether the scope of a strategy of several replicas is open here."""
    return in_scope() and tf.distribute.get_strategy().num_replicas_in_sync > 1


def first_copy(variable: Any) -> Any:
    """Return the first copy of a variable of a strategy; another variable as it is."""
    copies = getattr(variable, "values", None)
    return copies[0] if isinstance(copies, tuple) else variable


def first_handle(captured: Any) -> Any:
    """Return the handle of the first copy, if a captured variable has copies."""
    copy = first_copy(captured)
    return captured if copy is captured else copy.handle


def whole(variable: Any) -> Any:
    """Return the variable of a strategy that a copy belongs to, or the variable."""
    return _tf.value_container(variable)


def local_handle(variable: Any) -> Any:
    """Return the handle of this replica's copy; outside of replicas, the first one."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        return variable.handle
    return first_copy(variable).handle


def assign(handle: Any, value: Any) -> None:
    """Set a float32 variable by its handle, in all of its copies."""
    owner = getattr(handle, "_distributed_container", None)
    # TensorFlow keeps a weak reference to the container.
    found = owner() if callable(owner) else None
    copies = [handle] if found is None else [copy.handle for copy in found.values]
    for copy in copies:
        tf.raw_ops.AssignVariableOp(resource=copy, value=np.asarray(value, np.float32))


def moved_by(function: Any) -> list[tuple[Operation, Any]]:
    """Return the ops of a concrete function that write float variables, with these."""
    # Those in bodies of loops and conditionals are left out.
    variable_by_handle = {id(v.handle): v for v in function.variables}
    variable_by_input = {
        id(inside): variable_by_handle[id(outside)]
        for outside, inside in function.graph.captures
        if id(outside) in variable_by_handle
    }
    return [
        (op, variable)
        for op in function.graph.get_operations()
        if op.type in _WRITING
        and (variable := variable_by_input.get(id(op.inputs[0]))) is not None
        and variable.dtype.is_floating
    ]


_WRITING = op_types.ASSIGNMENTS | op_types.INCREMENTS


def captured_here(function: Any) -> list[Any]:
    """Return the captures of a function, with the handles of this replica's copies."""
    # Tapes record that those variables are read.
    variable_by_handle = {id(v.handle): v for v in function.variables}
    found = []
    for captured in function.captured_inputs:
        variable = variable_by_handle.get(id(captured))
        owner = None if variable is None else whole(variable)
        if owner is None or owner is variable:
            found.append(captured)
            continue
        _tf.variable_accessed(owner)
        found.append(local_handle(owner))
    return found
