"""Signatures of functions.

Arguments and results, added and removed with those of callers.

Plan, check, apply: a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.bodies.function_bodies import NewOutput, Rebuild, same_ends
from geutil.errors import ModelError
from geutil.graph import adjacency, creation, functions
from geutil.graph.function_calls import Caller
from geutil.graph.types import Graph, Operation, Tensor, is_tensor, type_name
from geutil.model.functions import write_back
from geutil.model.functions.library import EditableBody, Entry, FunctionLibrary
from geutil.model.functions.write_back import Family
from geutil.model.programs import fresh_name, legal_name
from geutil.select.walks import get_backward_walk_ops


def readers_of(body: EditableBody, index: int, in_loop: bool) -> list[str]:
    """Return the readers of an argument; a loop's body may return it as it is."""
    argument = list(body.inputs.values())[index]
    passing: set[Operation] = set()
    if in_loop:
        result = list(body.outputs.values())[index]
        passing = _way_back(result, argument)
        if result is not argument and not passing:
            return [f"{result.op.name} (it is another value after each round)"]
        passing.add(list(body.outputs.sinks.values())[index])
    needed = frozenset(body.needed_ops())
    sinks = {sink: f"output '{n}'" for n, sink in body.outputs.sinks.items()}
    read = [argument, *(t for op in passing for t in op.outputs)]
    consumers = [op for t in read for op in adjacency.consumers(t)]
    return [
        sinks.get(op, op.name)
        for op in dict.fromkeys(consumers)
        if op in needed and op not in passing
    ]


def _way_back(t: Tensor, source: Tensor) -> set[Operation]:
    """Return the Identity ops between two tensors; none if there are others."""
    ops = set()
    while t is not source:
        if t.op.type != "Identity":
            return set()
        ops.add(t.op)
        (t,) = t.op.inputs
    return ops


def add_output(
    library: FunctionLibrary,
    entry: Entry,
    name: str,
    tensors: Tensor | Mapping[str, Tensor],
) -> tuple[Tensor, ...]:
    """Add a result; see `Body.add_output`."""
    body = library.open(entry)
    if name in body.outputs:
        raise ModelError(f"function '{entry.key}' has an output '{name}' already")
    tensor_by_key = (
        dict(tensors) if isinstance(tensors, Mapping) else {entry.key: tensors}
    )
    family = _family_of_results(library, entry, "add_input")
    _check_branches(family, tensor_by_key)
    with library.writing():
        for member in family.entries:
            target = member.opened()
            target.take_output(
                fresh_name(set(target.outputs), name), tensor_by_key[member.key]
            )
        rebuilds = {}
        for caller in family.callers:
            same = same_ends(caller)
            key = next(e.key for e in family.entries if e.name in caller.names)
            like = NewOutput(tensor_by_key[key])
            rebuilds[caller.op] = Rebuild(same.inputs, [*same.outputs, like])
        replaced = write_back.write(library, family.entries, rebuilds)
    return tuple(replaced[caller.op].outputs[-1] for caller in family.callers)


def remove_output(library: FunctionLibrary, entry: Entry, name: str) -> None:
    """Take a result away; see `Body.remove_output`."""
    body = library.open(entry)
    if name not in body.outputs:
        raise ModelError(
            f"function '{entry.key}' has no output '{name}'; its outputs are "
            f"{list(body.outputs)}"
        )
    if len(body.outputs) == 1:
        raise ModelError(f"'{name}' is the only output of function '{entry.key}'")
    index = list(body.outputs).index(name)
    family = _family_of_results(library, entry, "remove_input")
    for caller in family.callers:
        readers = adjacency.consumers(caller.op.outputs[index])
        reading = [op.name for op in readers if op not in library.retired]
        if reading:
            raise ModelError(
                f"'{caller.op.name}' returns output '{name}' of function "
                f"'{entry.key}', and {reading} read it; rewire these first"
            )
    rebuilds = {}
    for caller in family.callers:
        same = same_ends(caller)
        outputs = [o for o in same.outputs if o.old != index]
        rebuilds[caller.op] = Rebuild(same.inputs, outputs)
    with library.writing():
        for member in family.entries:
            member.opened().drop_output(index)
        write_back.write(library, family.entries, rebuilds)


def _family_of_results(library: FunctionLibrary, entry: Entry, instead: str) -> Family:
    """Return the functions whose results change together, all of them open."""
    family = write_back.family(library, entry)
    for caller in family.callers:
        if caller.is_loop:
            raise ModelError(
                f"'{caller.op.name}' ({caller.op.type}) calls function '{entry.key}': "
                f"the outputs of a loop's body are its inputs; use {instead}"
            )
    for member in family.entries:
        library.open(member)
    return family


def _check_branches(family: Family, tensor_by_key: Mapping[str, Tensor]) -> None:
    """Raise unless each branch has its own tensor for an output, all of one dtype."""
    branch_keys = [member.key for member in family.entries]
    missing = [key for key in branch_keys if key not in tensor_by_key]
    if missing:
        raise ModelError(
            f"the output must be given for all branches; {missing} lack it: pass "
            "add_output(name, {function: tensor}) with " + _listed(branch_keys)
        )
    for key in tensor_by_key:
        if key not in branch_keys:
            raise ModelError(f"'{key}' is none of the branches, {_listed(branch_keys)}")
    first = tensor_by_key[branch_keys[0]]
    for member in family.entries:
        tensor = tensor_by_key[member.key]
        member.opened().require_own(tensor)
        if tensor.dtype != first.dtype:
            raise ModelError(
                f"'{first.name}' of '{branch_keys[0]}' is {first.dtype.name}, and "
                f"'{tensor.name}' of '{member.key}' is {tensor.dtype.name}; branches "
                "return the same dtypes"
            )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys)


Value: TypeAlias = Any | Callable[[Operation], Any] | Mapping[Operation | str, Any]
"""A constant, a function of the calling op, or a mapping from the op or its name."""


def value_for(caller: Caller, value: Value, spec: tf.TensorSpec) -> Any:
    """Return the value that a caller passes: a tensor of its graph, or an eager one."""
    op = caller.op
    if isinstance(value, Mapping):
        if op not in value and op.name not in value:
            raise ModelError(
                f"there is no value for the caller '{op.name}'; add it to the mapping"
            )
        value = value[op] if op in value else value[op.name]
    if callable(value) and not isinstance(value, tf.Variable):
        with op.graph.as_default():
            value = value(op)
    if is_tensor(value):
        _check_tensor(op, value, spec)
        return value
    return _eager(value, spec)


def _check_tensor(op: Operation, t: Tensor, spec: tf.TensorSpec) -> None:
    what = f"'{t.name}' cannot be passed by '{op.name}' as input '{spec.name}'"
    if t.graph is not op.graph:
        raise ModelError(
            f"{what}: it is in another graph; pass a function of the calling op, which "
            "makes it in op.graph"
        )
    if t.dtype != spec.dtype or not spec.shape.is_compatible_with(t.shape):
        raise ModelError(
            f"{what}: it is {t.dtype.name} of shape {t.shape}, and the input "
            f"{spec.dtype.name} of shape {spec.shape}"
        )
    if op in set(get_backward_walk_ops([t.op], control_inputs=True)):
        raise ModelError(f"{what}: it depends on what '{op.name}' returns")


def _eager(value: Any, spec: tf.TensorSpec) -> Any:
    """Return a value as an eager tensor for an input; variables stay variables."""
    if isinstance(value, tf.Variable) and spec.dtype == tf.resource:
        return value.handle
    try:
        eager = tf.convert_to_tensor(value, spec.dtype)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ModelError(
            f"a {type_name(value)} cannot be passed as input '{spec.name}' "
            f"({spec.dtype.name}): {error}"
        ) from error
    if not spec.shape.is_compatible_with(eager.shape):
        raise ModelError(
            f"a value of shape {eager.shape} cannot be passed as input '{spec.name}', "
            f"which is of shape {spec.shape}"
        )
    # A tensor would freeze a variable at the value that it has now.
    return value if isinstance(value, tf.Variable) else eager


def in_graph(graph: Graph, value: Any, name: str) -> Tensor:
    """Return a value as a tensor of a graph; variables and resources are captured."""
    if is_tensor(value):
        return value
    if isinstance(value, tf.Variable):
        with creation.neutral(graph):
            return tf.identity(value, name=legal_name(name))
    if value.dtype in (tf.resource, tf.variant):
        return functions.stand_in_for(graph, value, legal_name(name))
    with creation.neutral(graph):
        return tf.constant(value.numpy(), value.dtype, name=legal_name(name))


def add_input(
    library: FunctionLibrary, entry: Entry, spec: tf.TensorSpec, value: Value
) -> Tensor:
    """Add an argument; see `Body.add_input`."""
    body = library.open(entry)
    if spec.name in body.inputs:
        raise ModelError(f"function '{entry.key}' has an input '{spec.name}' already")
    family = write_back.family(library, entry)
    write_back.check_loops(family)
    with library.writing():
        for member in family.entries:
            library.open(member)
        values = [value_for(caller, value, spec) for caller in family.callers]
        passed = {
            caller.op: in_graph(caller.op.graph, v, spec.name)
            for caller, v in zip(family.callers, values, strict=True)
        }
        for member in family.entries:
            write_back.add_argument(
                family, member, spec.name, spec, next(iter(passed.values()))
            )
        write_back.write(
            library, family.entries, write_back.with_argument(family, passed)
        )
        write_back.take_all_captures(library)
    return body.inputs[spec.name]


def remove_input(library: FunctionLibrary, entry: Entry, name: str) -> None:
    """Take an argument away; see `Body.remove_input`."""
    body = library.open(entry)
    if name not in body.inputs:
        raise ModelError(
            f"function '{entry.key}' has no input '{name}'; it has {list(body.inputs)}"
        )
    index = list(body.inputs).index(name)
    family = write_back.family(library, entry)
    write_back.check_loops(family)
    for member in family.entries:
        target = library.open(member)
        readers = readers_of(target, index, bool(family.loops_around(member)))
        if readers:
            raise ModelError(
                f"input '{list(target.inputs)[index]}' of function '{member.key}' is "
                f"still read by {readers}; rewire these first"
            )
    rebuilds = {}
    for caller in family.callers:
        place = index + caller.first_argument
        same = same_ends(caller)
        inputs = [t for i, t in enumerate(same.inputs) if i != place]
        if family.returns_argument(caller):
            # The variable never changes: what comes out is what goes in.
            outputs = [o for o in same.outputs if o.old != index]
            rebuilds[caller.op] = Rebuild(inputs, outputs, {index: same.inputs[place]})
        else:
            rebuilds[caller.op] = Rebuild(inputs, same.outputs)
    with library.writing():
        for member in family.entries:
            member.opened().drop_input(index)
            if family.loops_around(member):
                member.opened().drop_output(index)
        write_back.write(library, family.entries, rebuilds)
