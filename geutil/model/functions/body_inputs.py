"""Arguments of functions, added and removed together with what callers pass.

Plan, check, apply: a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from geutil.graph.function_graphs import seen_variables, stand_in_for
from geutil.graph.kinds import Operation, Tensor
from geutil.model.errors import ModelError
from geutil.model.functions.arguments import Value, in_graph, value_for
from geutil.model.functions.body_readers import readers_of
from geutil.model.functions.callers import NewOutput, Rebuild, same_ends
from geutil.model.functions.families import Family, check_loops, family
from geutil.model.functions.syncing import write
from geutil.model.programs.program import fresh_name

if TYPE_CHECKING:
    from geutil.model.functions.library import Entry, Library


def add_input(
    library: Library, entry: Entry, spec: tf.TensorSpec, value: Value
) -> Tensor:
    """Add an argument; see `Body.add_input`."""
    body = library.open(entry)
    if spec.name in body.inputs:
        raise ModelError(f"function '{entry.key}' has an input '{spec.name}' already")
    found = family(library, entry)
    check_loops(found)
    with library.writing():
        for member in found.entries:
            library.open(member)
        values = [value_for(caller, value, spec) for caller in found.callers]
        passed = {
            caller.op: in_graph(caller.op.graph, v, spec.name)
            for caller, v in zip(found.callers, values, strict=True)
        }
        for member in found.entries:
            _add_argument(found, member, spec.name, spec, next(iter(passed.values())))
        write(library, found.entries, _with_argument(found, passed))
        take_all_captures(library)
    return body.inputs[spec.name]


def take_all_captures(library: Library) -> None:
    """Turn what bodies read from outside into arguments, up to the model's graph."""
    # Callees first: what a callee reads from outside, the body around it reads then.
    for entry in reversed(library.entries()):
        if entry.body is not None:
            _take_captures(library, entry)


def _take_captures(library: Library, entry: Entry) -> None:
    """Turn what a body reads from outside into arguments that its callers pass."""
    body = entry.opened()
    captured = body.captured()
    if captured:
        library.holdings.add_variables(seen_variables(body.live))
    for name, inside in captured.items():
        found = family(library, entry)
        check_loops(found)
        outside = body.forget_capture(inside)
        graphs = {caller.op: caller.op.graph for caller in found.callers}
        passed = {op: stand_in_for(g, outside, name) for op, g in graphs.items()}
        for member in found.entries:
            if member is not entry:
                library.open(member)
                _add_argument(found, member, name, inside, inside)
                continue
            body.take_input(name, inside)
            if found.loops_around(member):
                body.take_output(fresh_name(set(body.outputs), name), inside)
        write(library, found.entries, _with_argument(found, passed))


def _add_argument(
    found: Family, member: Entry, name: str, spec: Any, like: Tensor
) -> None:
    body = member.opened()
    placeholder = body.new_input(fresh_name(set(body.inputs), name), spec, like)
    if found.loops_around(member):
        body.take_output(fresh_name(set(body.outputs), name), placeholder)


def _with_argument(
    found: Family, passed: Mapping[Operation, Tensor]
) -> dict[Operation, Rebuild]:
    rebuilds = {}
    for caller in found.callers:
        same, value = same_ends(caller), passed[caller.op]
        added = [NewOutput(value)] if found.returns_argument(caller) else []
        rebuilds[caller.op] = Rebuild([*same.inputs, value], [*same.outputs, *added])
    return rebuilds


def remove_input(library: Library, entry: Entry, name: str) -> None:
    """Take an argument away; see `Body.remove_input`."""
    body = library.open(entry)
    if name not in body.inputs:
        raise ModelError(
            f"function '{entry.key}' has no input '{name}'; it has {list(body.inputs)}"
        )
    index = list(body.inputs).index(name)
    found = family(library, entry)
    check_loops(found)
    for member in found.entries:
        target = library.open(member)
        readers = readers_of(target, index, bool(found.loops_around(member)))
        if readers:
            raise ModelError(
                f"input '{list(target.inputs)[index]}' of function '{member.key}' is "
                f"still read by {readers}; rewire these first"
            )
    rebuilds = {}
    for caller in found.callers:
        place = index + caller.first_argument
        same = same_ends(caller)
        inputs = [t for i, t in enumerate(same.inputs) if i != place]
        if found.returns_argument(caller):
            # The variable never changes: what comes out is what goes in.
            outputs = [o for o in same.outputs if o.old != index]
            rebuilds[caller.op] = Rebuild(inputs, outputs, {index: same.inputs[place]})
        else:
            rebuilds[caller.op] = Rebuild(inputs, same.outputs)
    with library.writing():
        for member in found.entries:
            member.opened().drop_input(index)
            if found.loops_around(member):
                member.opened().drop_output(index)
        write(library, found.entries, rebuilds)
