"""One counter of training steps for a graph, shared by all its readers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TransformError
from geutil.graph import creation, replicas, resource_variables
from geutil.graph.state import slot
from geutil.graph.types import Graph, Tensor, type_name

STEP_NAME = "fake_quantization_step"


class StepCounter:
    """A variable that grows by one with each step, and its value in the step."""

    # All readers of the value together have the step counted once; the first is 1.

    def __init__(self, graph: Graph, variable: Any) -> None:
        self.variable = variable  # An int64 variable that is not trained.
        scope = f"{STEP_NAME}_count"
        with creation.neutral(graph), replicas.device(), tf.name_scope(scope):
            # A variable of a strategy would add on all replicas, for each of them.
            handle = resource_variables.handle_in(graph, variable)
            before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
            # The order is stated, since a v1 graph has none of its own.
            with tf.control_dependencies([before]):
                counted = tf.raw_ops.AssignAddVariableOp(
                    resource=handle, value=tf.constant(1, tf.int64)
                )
            with tf.control_dependencies([counted]):
                # The number of this step; the first is 1. Who reads it has the step
                # counted; all readers together have it counted once.
                self.value: Tensor = tf.add(before, 1, name="value")


class _StepCounters(dict[int, StepCounter]):
    """The step counters of a graph, by the replica that reads them."""


def step_counter(graph: Graph, variable: Any = None) -> StepCounter:
    """Return the step counter of a graph, made on the first call.

    In the FuncGraph of a `tf.function` the variable is made outside, and the graph
    keeps it alive. In a v1 graph it is a global variable, to be initialized with the
    others; each `Session.run` that depends on the counter counts.

    Args:
        graph: the graph; the FuncGraph of a function only while it is traced.
        variable: the variable to count in; None makes one, of name
            `fake_quantization_step`. A function that is traced more than once needs one
            for all traces.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.transform.step_counter import step_counter
        >>> with tf.Graph().as_default() as graph:
        ...     value = step_counter(graph).value
        ...     start = tf.compat.v1.global_variables_initializer()
        >>> step_counter(graph).value is value
        True
        >>> with tf.compat.v1.Session(graph=graph) as session:
        ...     session.run(start)
        ...     [int(session.run(value)) for _ in range(3)]
        [1, 2, 3]
    """
    if variable is not None:
        check_step_variable(variable)
    counter = counter_of(graph)
    if counter is None:
        if variable is None:
            variable = resource_variables.variable_outside(
                graph, np.int64(0), STEP_NAME
            )
        counter = StepCounter(graph, variable)
        slot(graph, _StepCounters)[replicas.index()] = counter
    if variable is not None and counter.variable is not variable:
        raise TransformError(
            f"the graph counts its steps in '{counter.variable.name}' already, not in "
            f"'{variable.name}'; pass the same variable, or none"
        )
    return counter


def counter_of(graph: Graph) -> StepCounter | None:
    """Return the step counter of a graph, if it has one."""
    # Each replica of `tf.distribute` counts in a copy of its own.
    return slot(graph, _StepCounters).get(replicas.index())


def check_step_variable(variable: Any) -> None:
    """Raise ArgumentTypeError for a variable that cannot count steps."""
    if not isinstance(variable, tf.Variable) or not hasattr(variable, "handle"):
        raise ArgumentTypeError(
            "steps are counted in a resource variable, such as tf.Variable(0, "
            f"dtype=tf.int64, trainable=False), not in {type_name(variable)}"
        )
    if variable.dtype != tf.int64:
        raise ArgumentTypeError(
            f"steps are counted in int64, and '{variable.name}' is of type "
            f"{variable.dtype.name}"
        )
