"""Replicas of `tf.distribute`: their ops, their variables, and sums over them.

Replicas that one process traces share a graph: the second finds the ops of the first in
it, gradients included. TensorFlow tells them apart by name scopes, `replica_1/` and on;
the first has none. A variable of a strategy has a copy on each device: models are made
of the first copies, which are plain variables; a replica reads its own copy.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import _tf, adjacency, op_types
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure, walk_by_identity

_SCOPE = re.compile(r"(?:^|/)replica_(\d+)/")


def current() -> Any:
    """Return the context of the replica that is being traced, or None."""
    # In a function inside a replica's, TensorFlow lets replicas exchange nothing.
    if in_nested_function() or not _is_replica():
        return None
    return tf.distribute.get_replica_context()


def in_nested_function() -> bool:
    """Return whether a function is being traced inside of that of a replica."""
    # A strategy that traces replicas in threads gives each the graph of its function.
    outer = getattr(threading.current_thread(), "graph", None)
    here = tf.compat.v1.get_default_graph()
    return outer is not None and outer is not here and _is_replica()


def _is_replica() -> bool:
    distribute = tf.distribute
    return distribute.has_strategy() and not distribute.in_cross_replica_context()


def index() -> int:
    """Return the number of the replica among those of this process; 0 outside."""
    context = current()
    if context is None:
        return 0
    number = context.replica_id_in_sync_group
    # In a graph, the number is a constant tensor.
    if not isinstance(number, int):
        number = tf.get_static_value(number)
    return int(number or 0) % max(len(_places(context)), 1)


def _places(context: Any) -> tuple[str, ...]:
    """Return the devices of the replicas of this process."""
    return tuple(getattr(context.strategy.extended, "worker_devices", ()))


def in_several() -> bool:
    """Return whether a replica is being traced that works in step with others."""
    context = current()
    return context is not None and context.num_replicas_in_sync > 1


@contextmanager
def device() -> Iterator[None]:
    """Place new ops where the replica is that is being traced; nowhere outside."""
    context = current()
    places = () if context is None else _places(context)
    # Not `context.devices`: it fails in all processes of several but the first.
    place = places[index()] if places else None
    with tf.device(place):
        yield


_meant: ContextVar[tuple[Graph, list[Tensor]] | None] = ContextVar(
    "meant", default=None
)


@contextmanager
def only_behind(graph: Graph, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Restrict `own_operations` to the ancestors of outputs, if any, in a block."""
    token = _meant.set((graph, list(outputs)) if outputs else None)
    try:
        yield
    finally:
        _meant.reset(token)


def outputs_meant(graph: Graph) -> list[Tensor]:
    """Return the outputs whose ops alone are looked at, to update; none for all."""
    meant = _meant.get()
    return meant[1] if meant is not None and meant[0] is graph else []


def own_operations(graph: Graph) -> list[Operation]:
    """Return the ops of a graph, without those of other replicas."""
    # While a replica is traced, these are its ops and their ancestors. Where outputs
    # are selected, these are the ancestors of the outputs.
    ops: list[Operation] = graph.get_operations()
    if outputs := outputs_meant(graph):
        behind = closure((t.op for t in outputs), adjacency.producers)
        return [op for op in ops if op in behind]
    if current() is None or tf.compat.v1.get_default_graph() is not graph:
        return ops
    own, numbers = index(), {op: _replica_of(op.name) for op in ops}
    if own:
        start = [op for op in ops if numbers[op] == own]
    else:
        start = [
            op
            for op in ops
            if not numbers[op]
            and not (op.type in op_types.PLACEHOLDERS and _is_of_others(op, numbers))
        ]
    needed = closure(
        start, lambda op: [p for p in adjacency.producers(op) if not numbers[p]]
    )
    return [op for op in ops if op in needed]


def _replica_of(name: str) -> int:
    match = _SCOPE.search(name)
    return int(match[1]) if match else 0


def _is_of_others(placeholder: Operation, numbers: dict[Operation, int]) -> bool:
    """Return whether an input is read by other replicas, or by none yet."""
    readers = [op for t in placeholder.outputs for op in t.consumers()]
    return all(numbers.get(op, 1) for op in readers)


@dataclass(eq=False)
class _Message:
    """A message from one replica to the others, and the answer."""

    content: Any
    answer: Any = field(default=None)


def merge_call(content: Any, answer: Callable[[Any, list[Any]], Any]) -> Any:
    """Return the answer to the messages of all replicas of this process."""
    # Each replica has to ask the same number of times.

    def merged(strategy: Any, messages: Any) -> None:
        every = strategy.experimental_local_results(messages)
        answered = answer(strategy, [message.content for message in every])
        for message in every:
            message.answer = answered

    message = _Message(content)
    current().merge_call(merged, args=(message,))
    return message.answer


def from_first_replica(content: Any, check: Callable[[list[Any]], Any]) -> Any:
    """Return the message of the first replica of this process."""

    def first(_: Any, contents: list[Any]) -> Any:
        check(contents)
        return contents[0]

    return merge_call(content, first)


def new_variables(initial_values: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return variables of the strategy whose replica is traced, or that is in scope."""
    # Each replica reads and writes its own copy; the copies stay equal if all write the
    # same. Attributes read from outside are the first one's.

    def make(strategy: Any, contents: list[Any]) -> list[Any]:
        # tf.function refuses new variables where it traces a second time, init_scope
        # or not: what refuses hangs on this thread's graph.
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(_new_variables, strategy, contents[0]).result()

    if tf.distribute.in_cross_replica_context():
        return make(tf.distribute.get_strategy(), [list(initial_values)])
    variables: list[Any] = merge_call(list(initial_values), make)
    return variables


def _new_variables(
    strategy: Any, initial_values: Sequence[tuple[str, Any]]
) -> list[Any]:
    with strategy.scope():
        return [
            tf.Variable(
                initial,
                trainable=False,
                name=name,
                synchronization=tf.VariableSynchronization.ON_WRITE,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for name, initial in initial_values
        ]


def all_reduce_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least of `low` and the greatest of `high` over all replicas."""
    # tf.distribute reduces by sums and means only. So each replica writes its own into
    # a row of zeros, and the rows are summed: exactly, and with a single transfer.
    context = current()
    count = context.num_replicas_in_sync
    ends = tf.stack([low, high])
    row = tf.reshape(tf.cast(context.replica_id_in_sync_group, tf.int32), [1, 1])
    shape = tf.concat([[count], tf.shape(ends)], 0)
    own = tf.scatter_nd(row, tf.expand_dims(tf.stop_gradient(ends), 0), shape)
    rows = tf.ensure_shape(
        context.all_reduce(tf.distribute.ReduceOp.SUM, own),
        [count, *ends.shape.as_list()],
    )
    return tf.reduce_min(rows[:, 0], 0), tf.reduce_max(rows[:, 1], 0)


_EXCHANGING = (
    op_types.REDUCTIONS_OVER_REPLICAS
    | op_types.SUMS
    | {"Concat", "ConcatV2", "Identity", "IdentityN", "Reshape", "SplitV"}
)


def own_summand(tensor: Tensor, is_summand: Callable[[Operation], bool]) -> Tensor:
    """Return the summand of a replica in a sum, where TensorFlow keeps it."""

    def behind(t: Tensor) -> list[Tensor]:
        if t.op.type not in _EXCHANGING:
            return []
        # The last comes first: IdentityN has the summand behind the sum.
        return [i for i in reversed(t.op.inputs) if i.dtype == tensor.dtype]

    tensors = walk_by_identity([tensor], behind)
    return next((t for t in tensors if is_summand(t.op)), tensor)


def in_scope() -> bool:
    """Return whether the scope of a strategy is open here, and no replica is traced."""
    return tf.distribute.has_strategy() and not _is_replica()


def needs_copies() -> bool:
    """Return whether the scope of a strategy of several replicas is open here."""
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
    if _is_replica():
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
