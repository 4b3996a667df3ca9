"""Edits of functions: written back, arguments and results changed, loops unrolled.

The functions of a loop have the same arguments, and so have the branches of a
conditional. They change together: a *family*. In a loop an argument is a variable of
the loop, so the body also returns it. Plan, check, apply: a refusal changes nothing.

An unrolled loop is a chain of calls of its body, which are inlined. Its counters are
constants then, and each element of a list that it reads or writes is a tensor of its
own: an op that takes an element out reads that tensor, and one that stacks the list
packs them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.bodies.function_bodies import (
    NewFunctions,
    NewOutput,
    Rebuild,
    define_body,
    replace_caller,
    same_ends,
)
from geutil.errors import ModelError, Words
from geutil.graph import adjacency, creation, function_calls, functions, op_types
from geutil.graph.function_calls import Caller, Loops, call_others
from geutil.graph.types import Graph, Operation, Tensor, is_tensor, type_name
from geutil.graph.walks import control_references, data_inputs
from geutil.model.core import EditableModel, M
from geutil.model.function_library import (
    EditableBody,
    Entry,
    FunctionLibrary,
    materialize_body,
    result_shapes,
)
from geutil.model.programs import (
    ModelProgram,
    fresh_name,
    legal_name,
    nodes_by_name,
    redirect,
    rename_nodes,
    take_name,
)
from geutil.model.to_graph import (
    GraphParts,
    keep_of,
    materialize,
    ops_to_run,
    program_of_parts,
)
from geutil.rewrite import Match, Op, Rule, rewrite
from geutil.rewrite.rules import constant_folding
from geutil.select.queries import select_ops
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
        replaced = write(library, family.entries, rebuilds)
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
        write(library, family.entries, rebuilds)


def _family_of_results(library: FunctionLibrary, entry: Entry, instead: str) -> Family:
    """Return the functions whose results change together, all of them open."""
    family = family_of(library, entry)
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
    family = family_of(library, entry)
    check_loops(family)
    with library.writing():
        for member in family.entries:
            library.open(member)
        values = [value_for(caller, value, spec) for caller in family.callers]
        passed = {
            caller.op: in_graph(caller.op.graph, v, spec.name)
            for caller, v in zip(family.callers, values, strict=True)
        }
        for member in family.entries:
            add_argument(family, member, spec.name, spec, next(iter(passed.values())))
        write(library, family.entries, with_argument(family, passed))
        take_all_captures(library)
    return body.inputs[spec.name]


def remove_input(library: FunctionLibrary, entry: Entry, name: str) -> None:
    """Take an argument away; see `Body.remove_input`."""
    body = library.open(entry)
    if name not in body.inputs:
        raise ModelError(
            f"function '{entry.key}' has no input '{name}'; it has {list(body.inputs)}"
        )
    index = list(body.inputs).index(name)
    family = family_of(library, entry)
    check_loops(family)
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
        write(library, family.entries, rebuilds)


@dataclass(frozen=True)
class Family:
    """Functions that have their arguments in common, and the ops that call them."""

    entries: list[Entry]
    callers: list[Caller]

    def loops_around(self, entry: Entry) -> list[Caller]:
        """Return the loops whose body the function is."""
        return [c for c in self.callers if c.is_loop and body_of(c) == entry.name]

    def returns_argument(self, caller: Caller) -> bool:
        """Return whether a caller returns a variable of a loop for each argument."""
        names = {e.name for e in self.entries if self.loops_around(e)}
        return caller.is_loop or not names.isdisjoint(caller.names)


def body_of(loop: Caller) -> str:
    """Return the name of the body of a loop."""
    return next(c.name for c in loop.callees if c.attribute == "body")


def family_of(library: FunctionLibrary, entry: Entry) -> Family:
    """Return the functions whose arguments change when those of one do."""
    entries = [entry]
    # A loop or branch passes the same to all its functions, which have more callers.
    while True:
        callers = library.callers_of(entries)
        names = dict.fromkeys(e.name for e in entries)
        for caller in callers:
            if caller.is_loop or caller.is_branching:
                names |= dict.fromkeys(caller.names)
            elif not caller.is_call:
                raise ModelError(
                    f"'{caller.op.name}' ({caller.op.type}) calls '{entry.key}', and "
                    "geutil does not know how its arguments go with its inputs; "
                    "replace that op first"
                )
        if len(names) == len(entries):
            return Family(entries, callers)
        entries = [library.entry(name) for name in names]


def check_loops(entry_family: Family) -> None:
    """Refuse the body of a loop that is something else as well, with other results."""
    for entry in entry_family.entries:
        if not entry_family.loops_around(entry):
            continue
        for caller in entry_family.callers:
            cond = caller.is_loop and body_of(caller) != entry.name
            if entry.name in caller.names and (caller.is_branching or cond):
                raise ModelError(
                    f"function '{entry.key}' is the body of a loop, and "
                    f"'{caller.op.name}' ({caller.op.type}) calls it too; such a "
                    "function keeps its arguments"
                )


def sync(library: FunctionLibrary) -> None:
    """Write edited bodies back to all that call them."""
    if library.is_written or not library.edited():
        return
    with library.writing():
        for entry in library.entries():
            if entry.edited:
                _check_callable(library, entry)
        take_all_captures(library)
        write(library, [entry for entry in library.entries() if entry.edited], {})


def sync_below(library: FunctionLibrary, start: Entry) -> None:
    """Write bodies back if one was edited that a body calls, however indirectly."""
    # An edit of the body itself may be half done; nothing is behind for its graph.
    if library.is_written:
        return
    edited = library.edited(besides=start)
    if edited and not set(edited).isdisjoint(library.reachable(start)):
        sync(library)


def _check_callable(library: FunctionLibrary, entry: Entry) -> None:
    """Raise unless the body is a function that its callers can call as before."""
    draft = draft_of(entry, function_calls.unused_name(entry.name))
    parts = materialize_body(
        draft, library.definitions_for(entry), library.handles(entry)
    )
    shapes = zip(parts.sinks, entry.shapes, result_shapes(parts), strict=True)
    for name, before, after in shapes:
        if not before.is_compatible_with(after):
            raise ModelError(
                f"output '{name}' of function '{entry.key}' was of shape {before} and "
                f"is {after} now; what reads it in the callers was made for the "
                "former: reshape it in the body, or give the callers another output "
                "with add_output"
            )


def draft_of(entry: Entry, name: str) -> Any:
    """Return the definition of an open body as it is now, under another name."""
    body = entry.opened()
    inputs, sinks = {**body.inputs, **body.captured()}, body.outputs.sinks
    effects = body.side_effects
    needed = ops_to_run(GraphParts(body.live, inputs, sinks, effects))
    like = entry.definition
    try:
        return define_body(body.live, name, needed, inputs, sinks, effects, like)
    except (ValueError, tf.errors.OpError) as error:
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error


def write(
    library: FunctionLibrary,
    changed: Iterable[Entry],
    rebuilds: Mapping[Operation, Rebuild],
) -> dict[Operation, Operation]:
    """Define changed functions anew, and with them all that call them."""
    order = _with_callers(library, changed)
    if not order:
        return {}
    for entry in reversed(order):
        library.open(entry)
    new = NewFunctions()
    replaced: dict[Operation, Operation] = {}
    for entry in order:
        graph = entry.opened().live
        replaced |= _update(library, graph, new, rebuilds)
        draft = functools.partial(draft_of, entry)
        library.redefine(entry, new.define(entry.name, graph, draft))
        entry.written = entry.opened().state()
        entry.shapes = [t.shape for t in entry.opened().outputs.values()]
    replaced |= _update(library, library.root, new, rebuilds)
    return replaced


def take_all_captures(library: FunctionLibrary) -> None:
    """Turn captures of bodies into arguments, up to the model's graph."""
    # Callees first: what a callee reads from outside, the body around it reads then.
    for entry in reversed(library.entries()):
        if entry.body is not None:
            _take_captures(library, entry)


def _take_captures(library: FunctionLibrary, entry: Entry) -> None:
    """Turn the captures of a body into arguments that its callers pass."""
    body = entry.opened()
    captured = body.captured()
    if captured:
        library.holdings.add_variables(functions.seen_variables(body.live))
    for name, inside in captured.items():
        entry_family = family_of(library, entry)
        check_loops(entry_family)
        outside = body.forget_capture(inside)
        graphs = {caller.op: caller.op.graph for caller in entry_family.callers}
        passed = {
            op: functions.stand_in_for(g, outside, name) for op, g in graphs.items()
        }
        for member in entry_family.entries:
            if member is not entry:
                library.open(member)
                add_argument(entry_family, member, name, inside, inside)
                continue
            body.take_input(name, inside)
            # The body of a loop returns each argument, for the next round.
            if entry_family.loops_around(member):
                body.take_output(fresh_name(set(body.outputs), name), inside)
        write(library, entry_family.entries, with_argument(entry_family, passed))


def add_argument(
    entry_family: Family, member: Entry, name: str, spec: Any, like: Tensor
) -> None:
    """Add an argument to one function of a family."""
    body = member.opened()
    placeholder = body.new_input(fresh_name(set(body.inputs), name), spec, like)
    if entry_family.loops_around(member):
        body.take_output(fresh_name(set(body.outputs), name), placeholder)


def with_argument(
    entry_family: Family, passed: Mapping[Operation, Tensor]
) -> dict[Operation, Rebuild]:
    """Return the new ends of callers that pass one more argument."""
    rebuilds = {}
    for caller in entry_family.callers:
        same, value = same_ends(caller), passed[caller.op]
        added = [NewOutput(value)] if entry_family.returns_argument(caller) else []
        rebuilds[caller.op] = Rebuild([*same.inputs, value], [*same.outputs, *added])
    return rebuilds


def _with_callers(library: FunctionLibrary, changed: Iterable[Entry]) -> list[Entry]:
    """Return functions and those that call them, however indirectly, callees first."""
    # No function calls itself: TensorFlow cannot import such a graph.
    affected = {entry.name for entry in changed}
    order = []
    for entry in reversed(library.entries()):
        if entry.name in affected or not affected.isdisjoint(library.called_in(entry)):
            affected.add(entry.name)
            order.append(entry)
    return order


def _update(
    library: FunctionLibrary,
    graph: Graph,
    new: NewFunctions,
    rebuilds: Mapping[Operation, Rebuild],
) -> dict[Operation, Operation]:
    """Make the ops of one graph call the new functions."""
    replaced = {}
    for caller in library.callers_in(graph):
        if not new.hold(graph, caller):
            continue
        # An op whose type is the function itself cannot be changed in place.
        if caller.op not in rebuilds and caller.callees[0].attribute:
            call_others(caller, new.names)
            continue
        rebuild = rebuilds.get(caller.op) or same_ends(caller)
        replaced[caller.op] = replace_caller(caller, new.names, rebuild)
        library.retired.add(caller.op)
    return replaced


_CALLS = {"While": "StatefulPartitionedCall", "StatelessWhile": "PartitionedCall"}
_SCALAR = 8
"""Bytes of the largest values that are folded: counters are scalars."""
# Names that a message lists; the rest is counted.
_SHOWN = 10


def unroll(model: M, loops: Any, max_ops: int) -> M:
    """Return a model without its loops; see `Model.unroll`."""
    program = model.program()
    wanted = _selected(model, loops)
    unrolled: list[str] = []
    left = max_ops - len(model.graph.get_operations())
    parts = materialize(program, inline=False, what=repr(model))
    _fold_scalars(parts)
    while True:
        found = [c for c in _loops_in(parts.graph) if wanted is None or _in(c, wanted)]
        if not found:
            return model.derived(_with_short_names(parts, unrolled))
        times = {}
        for caller in found:
            count, size = _count(caller)
            if count is None:
                continue
            left -= count * size
            times[caller.op.name] = count
        if left < 0:
            raise ModelError(
                f"unrolled, the loops of {model!r} have over {max_ops:,} ops",
                remedy=f"pass {Words('max_ops=')} to allow more, or {Words('loops=')} "
                "to unroll some of them",
            )
        if not times:
            # A loop whose bound the result of another one tells had its turn before.
            raise ModelError(_refusal(model, found))
        program = program_of_parts(parts)
        _write_calls(program, times)
        unrolled.extend(times)
        parts = materialize(program, inline=True, what=repr(model))
        _fold_scalars(parts)
        rewrite(parts.graph, _list_rules(), keep=keep_of(parts))


def _selected(model: EditableModel, loops: Any) -> frozenset[str] | None:
    """Return the names of the loops that are selected; None for all."""
    callers = _loops_in(model.graph)
    if not callers:
        raise ModelError(f"{model!r} has no loop to unroll{_elsewhere(model.graph)}")
    if loops is None:
        return None
    meant = frozenset(select_ops(loops, graph=model.graph))
    names = frozenset(c.op.name for c in callers if c.op in meant)
    if not names:
        raise ModelError(
            f"selects none of the loops of {model!r}: "
            f"{[c.op.name for c in callers][:_SHOWN]}",
            subject=Words(f"loops={loops!r}"),
        )
    return names


def _elsewhere(graph: Graph) -> str:
    """Return where the loops of a graph may be that has none of version 2."""
    if any(op.type in op_types.ENTERS for op in graph.get_operations()):
        return (
            ": its loops are of version 1; build them after "
            "tf.compat.v1.enable_control_flow_v2()"
        )
    names = [caller.op.name for caller in function_calls.callers_in(graph)]
    if names:
        return (
            f"; functions that {names[:_SHOWN]} run are not looked into: open it with "
            "their calls inlined"
        )
    return ""


def _in(caller: Caller, names: Iterable[str]) -> bool:
    """Return whether a loop is one of those named, or was in the body of one."""
    name = caller.op.name
    return any(name == n or name.startswith(f"{n}/") for n in names)


def _loops_in(graph: Graph) -> list[Caller]:
    return [c for c in function_calls.callers_in(graph) if c.is_loop]


def _count(caller: Caller) -> tuple[int | None, int]:
    """Return how often a loop runs, None if that is not known, and its body's ops."""
    op = caller.op
    graphs = [
        function_calls.body_for_call(op.graph, callee.name, list(op.inputs))
        for callee in sorted(caller.callees, key=lambda c: c.attribute != "cond")
    ]
    condition, body = graphs
    if condition is None or body is None:
        return None, 0
    count = Loops({op: (condition, body)}).exact_times(op)
    return count, len(body.get_operations())


def _refusal(model: EditableModel, found: list[Caller]) -> str:
    names = ", ".join(f"'{caller.op.name}'" for caller in found[:_SHOWN])
    return (
        f"how often {names} of {model!r} runs cannot be read off constants and shapes: "
        "give the input a fixed number of steps where the model is built, as in "
        "keras.Input([12, 6]) or tf.TensorSpec([None, 12, 6]), or pass "
        f"{Words('loops=')} with those that are to be unrolled"
    )


def _write_calls(program: ModelProgram, times: Mapping[str, int]) -> None:
    """Replace each loop by a chain of calls of its body, in place."""
    graph_def = program.graph_def
    nodes = nodes_by_name(graph_def)
    for name, count in times.items():
        loop = nodes[name]
        controls = control_references(loop.input)
        values = data_inputs(loop.input)
        places = range(len(values))
        for step in range(count):
            call = graph_def.node.add(op=_CALLS[loop.op], device=loop.device)
            call.name = fresh_name(nodes, f"{name}/step_{step}")
            nodes[call.name] = call
            call.input.extend([*values, *controls])
            call.attr["f"].func.CopyFrom(loop.attr["body"].func)
            for attribute in ("Tin", "Tout"):
                call.attr[attribute].CopyFrom(loop.attr["T"])
            values = [f"{call.name}:{i}" for i in places]
        # Ops that wait for the loop wait for its results.
        last = type(loop)(op="IdentityN", name=name, device=loop.device)
        last.input.extend([*values, *controls])
        last.attr["T"].CopyFrom(loop.attr["T"])
        loop.CopyFrom(last)
        waiting = [n for n in graph_def.node if f"^{name}" in n.input]
        redirect(program, {f"{name}:{i}": values[i] for i in places})
        for node in waiting:
            node.input.append(f"^{name}")


def _with_short_names(parts: GraphParts, loops: Sequence[str]) -> ModelProgram:
    """Return the program of a graph, with the scope of each loop in a name once."""
    # Nodes of a body have its scope already, and get that of their step before it.
    program = program_of_parts(parts)
    nodes = nodes_by_name(program.graph_def)
    taken = set(nodes)
    names = {}
    for name in nodes:
        short = name
        for loop in loops:
            short = re.sub(
                rf"({re.escape(loop)}/step_\d+/){re.escape(loop)}/", r"\1", short
            )
        if short != name:
            names[name] = take_name(taken, short)
    graph = parts.graph
    counts = {n: len(graph.get_operation_by_name(n).outputs) for n in names}
    rename_nodes(program, names, counts)
    return program


def _fold_scalars(parts: GraphParts) -> None:
    """Fold the ancestors of counters and bounds."""
    rules = constant_folding(max_bytes=_SCALAR)
    rewrite(parts.graph, rules, keep=keep_of(parts))


def _list_rules() -> tuple[Rule, ...]:
    """Return rules that read elements of lists where these come from."""
    unstacked: dict[int, list[Tensor]] = {}

    def element(match: Match) -> Any:
        """Return the tensor that an element is, or why it is not known."""
        handle, index = match.root.inputs[:2]
        place = _number(index)
        if place is None:
            return "its place in the list is no constant"
        for op in _writers(handle):
            if op.type == "TensorListSetItem":
                written = _number(op.inputs[1])
                if written is None:
                    return f"the place that '{op.name}' writes is no constant"
                if written == place:
                    return op.inputs[2]
            elif op.type == "TensorListFromTensor":
                rows = _rows(op, unstacked)
                return rows[place] if 0 <= place < len(rows) else "there is none"
        return "nothing that is known was put there"

    def stacked(match: Match) -> Any:
        """Return the elements of a list packed, or why they are not known."""
        elements: dict[int, Tensor] = {}
        length = None
        for op in _writers(match.root.inputs[0]):
            if op.type == "TensorListSetItem":
                place = _number(op.inputs[1])
                if place is None:
                    return f"the place that '{op.name}' writes is no constant"
                # The last write of a place comes first, and counts.
                elements.setdefault(place, op.inputs[2])
            elif op.type == "TensorListReserve":
                length = _number(op.inputs[1])
        if length is None or sorted(elements) != list(range(length)):
            return "not all elements are known"
        return tf.stack([elements[i] for i in range(length)])

    return (
        Rule(Op("TensorListGetItem", ...), element, name="element of a list"),
        Rule(Op("TensorListStack", ...), stacked, name="stacked list"),
    )


def _rows(op: Operation, unstacked: dict[int, list[Tensor]]) -> list[Tensor]:
    """Return the rows of the tensor that a list was made from, unstacked once."""
    tensor = op.inputs[0]
    if id(op) not in unstacked:
        unstacked[id(op)] = tf.unstack(tensor)
    return unstacked[id(op)]


def _writers(handle: Tensor) -> Iterator[Operation]:
    """Yield the ops that wrote a list, the last one first."""
    while True:
        op = handle.op
        yield op
        if op.type not in ("TensorListSetItem", "Identity"):
            return
        handle = op.inputs[0]


def _number(tensor: Tensor) -> int | None:
    value = tf.get_static_value(tensor)
    return None if value is None or value.ndim else int(value)
