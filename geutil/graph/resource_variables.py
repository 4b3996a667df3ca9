"""Variables: resource handles, new variables outside a graph, and those in collections.

TensorFlow's tracer notes it on the loop; an import does not. A second gradient of a
loop that reads a variable needs it.

TensorFlow takes some 2 ms to make a variable. One of each shape and device serves as a
pattern: the others are copies of its nodes, imported together.

A `tf.Variable` made in a `tf.Graph` is a Python object in the graph's collections
besides its ops. Without the object a copy has no initializer to run and nothing for
`tf.compat.v1.train.Saver` to save.

A graph has one counter of training steps, however many places read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, TransformError
from geutil.graph import _tf, creation, op_types, replicas, state, types
from geutil.graph.types import Graph, MutableIdentityMap, Tensor, is_func_graph
from geutil.graph.walks import node_name

_logger = logging.getLogger("geutil")


def variable_outside(
    graph: Graph,
    initial: Any,
    name: str,
    device: str = "",
    *,
    is_trained: bool = False,
) -> Any:
    """Return a new resource variable, which is not trained unless that is asked for."""
    # In the FuncGraph of a `tf.function` it is an eager variable, or one of the v1
    # graph outside; a function that is traced may make it at any call. In a v1 graph it
    # is a global variable under a unique name, and `device` counts. While a replica of
    # `tf.distribute` is traced it is one of the strategy; in the scope of a strategy,
    # too, but for a v1 graph.
    if _are_of_strategy(graph):
        (variable,) = replicas.new_variables([(name, initial)])
        return variable
    is_placed = device and not is_func_graph(graph)
    place = graph.device(device) if is_placed else nullcontext()
    with creation.neutral(graph), tf.init_scope(), place:
        # The class itself: tf.Variable would ask the tracing function to make it.
        return _tf.ResourceVariable(initial, trainable=is_trained, name=name)


def _are_of_strategy(graph: Graph) -> bool:
    """Return whether new variables are those of a strategy of `tf.distribute`."""
    in_scope = is_func_graph(graph) and replicas.in_scope()
    return in_scope or replicas.current() is not None


class _KeptVariables(dict[int, Any]):
    """Variables outside that geutil made a graph read, by `id`."""


def handle_in(graph: Graph, variable: Any) -> Any:
    """Return the handle of a variable as ops of a graph can read it."""
    # A FuncGraph captures it, and keeps the variable alive.
    handle = replicas.local_handle(variable)
    if not is_func_graph(graph) or getattr(handle, "graph", None) is graph:
        return handle
    graph.watch_variable(variable)
    # The FuncGraph itself holds variables by weak references.
    state.slot(graph, _KeptVariables)[id(variable)] = variable
    return graph.capture(handle)


_NAMES = ("shared_name", "debug_name")
_FIELDS = ("variable_name", "initializer_name", "snapshot_name", "initial_value_name")


def variables_outside(
    graph: Graph,
    initial_values: Sequence[tuple[str, Any]],
    devices: Sequence[str] | None = None,
) -> list[Any]:
    """Return new variables, each as `variable_outside` makes it."""
    # Some 0.2 ms each in a version 1 graph, and 2 ms for each shape and device.
    if _are_of_strategy(graph):
        return replicas.new_variables(initial_values)
    if is_func_graph(graph):
        return [
            variable_outside(graph, initial, name) for name, initial in initial_values
        ]
    global_variables = graph.get_collection_ref(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    before = len(global_variables)
    series = _Series(graph)
    places = [""] * len(initial_values) if devices is None else devices
    planned = [
        series.plan(name, np.asarray(initial), device)
        for (name, initial), device in zip(initial_values, places, strict=True)
    ]
    series.make()
    variables = [series.variable(entry) for entry in planned]
    global_variables[before:] = variables
    return variables


class _Series:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._patterns: dict[tuple[tuple[int, ...], str], tuple[Any, list[Any]]] = {}
        self._graph_def = creation.new_graph_def(graph)

    def plan(self, name: str, initial: Any, device: str) -> Any:
        """Return a variable, or the definition of one that `make` makes."""
        key = initial.shape, device
        # TensorFlow makes the first of each shape and device; its nodes serve as the
        # pattern of the others, which are imported at once.
        if key not in self._patterns:
            count = state.count_ops(self._graph)
            variable = variable_outside(self._graph, initial, name, device)
            nodes = [op.node_def for op in state.ops_since(self._graph, count)]
            with creation.neutral(self._graph):
                self._patterns[key] = variable.to_proto(), nodes
            return variable
        definition, nodes = self._patterns[key]
        old = node_name(definition.variable_name)
        new = types.absolute_unique_name(self._graph, name)
        for node in nodes:
            self._add(node, old, new, initial)
        renamed = type(definition)()
        renamed.CopyFrom(definition)
        for field in _FIELDS:
            setattr(renamed, field, _renamed(getattr(definition, field), old, new))
        return renamed

    def _add(self, node: Any, old: str, new: str, initial: Any) -> None:
        new_node = self._graph_def.node.add()
        new_node.CopyFrom(node)
        new_node.name = _renamed(node.name, old, new)
        new_node.input[:] = [_renamed(name, old, new) for name in node.input]
        for key in _NAMES:
            if key in new_node.attr:
                own = new_node.attr[key].s.decode()
                new_node.attr[key].s = _renamed(own, old, new).encode()
        if "_class" in new_node.attr:
            places = new_node.attr["_class"].list.s
            places[:] = [_moved(place, old, new) for place in places]
        if "value" in new_node.attr:
            new_node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(initial))

    def make(self) -> None:
        """Make the ops that are planned."""
        creation.import_ops(self._graph, self._graph_def, {})

    def variable(self, planned: Any) -> Any:
        """Return a variable that was planned, once its ops are there."""
        if isinstance(planned, _tf.ResourceVariable):
            return planned
        with creation.neutral(self._graph):
            variable = _tf.ResourceVariable.from_proto(planned)
        state.slot(self._graph, _KeptVariables)[id(variable)] = variable
        return variable


def _renamed(name: str, old: str, new: str) -> str:
    """Return a name below another variable's."""
    mark = "^" if name.startswith("^") else ""
    return mark + new + name.removeprefix(mark).removeprefix(old)


def _moved(place: bytes, old: str, new: str) -> bytes:
    """Return the colocation entry of an op, with one variable replaced by another."""
    return f"loc:@{new}".encode() if place == f"loc:@{old}".encode() else place


def carry_loop_handles(graph: Graph) -> None:
    """Let each resource that leaves a loop be like the one that enters it there."""
    for op in graph.get_operations():
        if op.type in op_types.LOOPS:
            for before, after in zip(op.inputs, op.outputs, strict=True):
                if before.dtype == tf.resource:
                    creation.copy_handle_data(before, after)


def dtype_behind(handle: Any) -> tf.DType | None:
    """Return the dtype of the variable that a handle leads to, or None."""
    data = getattr(handle, "_handle_data", None)
    if data is None and types.is_tensor(handle):
        # A capture of a function has the data in the graph alone.
        data = _tf.get_resource_handle_data(handle)
    behind = list(data.shape_and_type) if data is not None and data.is_set else []
    # Of a table there are two, of keys and of values.
    if handle.dtype != tf.resource or len(behind) != 1:
        return None
    return tf.as_dtype(behind[0].dtype)


def value_behind(handle: Any) -> Any:
    """Return the value of the variable that an eager handle leads to, or None."""
    dtype = dtype_behind(handle)
    if dtype is None:
        return None
    with tf.init_scope():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def shape_behind(handle: Any) -> tf.TensorShape | None:
    """Return the shape of the variable that a handle in a graph leads to, if known."""
    data = _tf.get_resource_handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.TensorShape(data.shape_and_type[0].shape)


@dataclass(frozen=True)
class VariableFacts:
    """The facts of one variable in a collection."""

    key: str
    trainable: bool
    # Where it begins in the variable that it is a part of, if it is a part.
    offset: tuple[int, ...] | None
    initializer: str  # The name of the op that initializes it.


def variable_facts(collections: Mapping[str, Any]) -> dict[str, VariableFacts]:
    """Return the facts in a MetaGraph's collections, by the name of a variable's op."""
    trainable = {
        d.variable_name for d in _definitions(collections, "trainable_variables")
    }
    facts = {}
    for key in sorted(collections):
        for definition in _definitions(collections, key):
            name = node_name(definition.variable_name)
            part = definition.save_slice_info_def
            facts[name] = VariableFacts(
                # A checkpoint holds parts of a variable under the name of the whole.
                part.full_name or name,
                definition.variable_name in trainable,
                tuple(part.var_offset) if part.full_name else None,
                node_name(definition.initializer_name),
            )
    return facts


def _definitions(collections: Mapping[str, Any], key: str) -> list[Any]:
    if key not in collections or "variables" not in key:
        return []
    definitions = []
    for data in collections[key].bytes_list.value:
        definition = _tf.VariableDef()
        definition.ParseFromString(data)
        definitions.append(definition)
    return definitions


def uninitialized_variable(dtype: Any, shape: Any, trainable: bool, name: str) -> Any:
    """Return an eager variable that has no value yet."""
    return _tf.UninitializedVariable(
        dtype=tf.as_dtype(dtype), shape=shape, trainable=trainable, name=name
    )


def carry_variables(
    graph: Graph,
    graph_: Graph,
    rename: Callable[[str], str | None],
    collection_name: Callable[[str], str],
) -> None:
    """Make variable objects in `graph_` for those of `graph` whose ops were copied."""
    # A variable of which a part has no copy is left out, with a warning.
    carried: MutableIdentityMap[tf.Variable | None] = MutableIdentityMap()
    for key in graph.get_all_collection_keys():
        for element in graph.get_collection_ref(key):
            if not isinstance(element, tf.Variable):
                continue
            if element not in carried:
                carried[element] = _carry(element, graph_, rename)
            variable_ = carried[element]
            if variable_ is not None:
                graph_.add_to_collection(collection_name(key), variable_)


def _carry(
    variable: tf.Variable, graph_: Graph, rename: Callable[[str], str | None]
) -> tf.Variable | None:
    # Outside a graph TensorFlow takes the request for one about an eager variable.
    with creation.neutral(variable.graph):
        definition = variable.to_proto()
    if rename(definition.variable_name) is None:
        return None
    for field in _FIELDS:
        name = getattr(definition, field)
        if not name:
            continue
        new = rename(name)
        if new is None:
            _logger.warning(
                "variable '%s' is copied without a tf.Variable object: '%s' is not "
                "among the copied ops; copy it too",
                variable.name,
                name,
            )
            return None
        setattr(definition, field, new)
    with creation.neutral(graph_):
        if definition.is_resource:
            return _tf.ResourceVariable.from_proto(definition)
        return tf.compat.v1.Variable.from_proto(definition)


STEP_NAME = "fake_quantization_step"


class StepCounter:
    """A variable that grows by one with each step, and its value in the step."""

    def __init__(self, graph: Graph, variable: Any) -> None:
        self.variable = variable  # An int64 variable that is not trained.
        scope = f"{STEP_NAME}_count"
        with creation.neutral(graph), replicas.device(), tf.name_scope(scope):
            # A variable of a strategy would add on all replicas, for each of them.
            handle = handle_in(graph, variable)
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
        >>> from geutil.graph.resource_variables import step_counter
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
    counter = step_counter_of(graph)
    if counter is None:
        if variable is None:
            variable = variable_outside(graph, np.int64(0), STEP_NAME)
        counter = StepCounter(graph, variable)
        state.slot(graph, _StepCounters)[replicas.index()] = counter
    if variable is not None and counter.variable is not variable:
        raise TransformError(
            f"the graph counts its steps in '{counter.variable.name}' already, not in "
            f"'{variable.name}'; pass the same variable, or none"
        )
    return counter


def step_counter_of(graph: Graph) -> StepCounter | None:
    """Return the step counter of a graph, if it has one."""
    # Each replica of `tf.distribute` counts in a copy of its own.
    return state.slot(graph, _StepCounters).get(replicas.index())


def check_step_variable(variable: Any) -> None:
    """Raise ArgumentTypeError for a variable that cannot count steps."""
    if not isinstance(variable, tf.Variable) or not hasattr(variable, "handle"):
        raise ArgumentTypeError(
            "steps are counted in a resource variable, such as tf.Variable(0, "
            f"dtype=tf.int64, trainable=False), not in {types.type_name(variable)}"
        )
    if variable.dtype != tf.int64:
        raise ArgumentTypeError(
            f"steps are counted in int64, and '{variable.name}' is of type "
            f"{variable.dtype.name}"
        )
