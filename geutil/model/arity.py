"""Arguments and results of functions, added and removed together with the callers'.

The functions of a loop have the same arguments, and so have the branches of a
conditional. They change together: a *family*. In a loop an argument is a variable of
the loop, so the body also returns it. Plan, check, apply: a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from geutil.graph.adjacency import consumers
from geutil.graph.function_calls import Caller
from geutil.graph.function_graphs import seen_variables, stand_in_for
from geutil.graph.kinds import Operation, Tensor
from geutil.model.arguments import Value, in_graph, value_for
from geutil.model.callers import NewOutput, Rebuild, same_ends
from geutil.model.errors import ModelError
from geutil.model.program import fresh_name
from geutil.model.syncing import write

if TYPE_CHECKING:
    from geutil.model.library import Entry, Library


@dataclass(frozen=True)
class Family:
    """Functions that have their arguments in common, and the ops that call them.

    Attributes:
        entries: the functions.
        callers: the ops.
    """

    entries: list[Entry]
    callers: list[Caller]

    def loops_around(self, entry: Entry) -> list[Caller]:
        """Return the loops whose body the function is."""
        return [c for c in self.callers if c.is_loop and _body_of(c) == entry.name]

    def returns_argument(self, caller: Caller) -> bool:
        """Tell whether a caller returns a variable of a loop for each argument."""
        names = {e.name for e in self.entries if self.loops_around(e)}
        return caller.is_loop or not names.isdisjoint(caller.names)


def _body_of(loop: Caller) -> str:
    return next(c.name for c in loop.callees if c.attribute == "body")


def family(library: Library, entry: Entry) -> Family:
    """Return the functions whose arguments change when those of one do.

    Raises:
        ModelError: an op of another kind calls one of them.
    """
    entries = [entry]
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


def add_input(
    library: Library, entry: Entry, spec: tf.TensorSpec, value: Value
) -> Tensor:
    """Add an argument; see `Body.add_input`."""
    body = library.open(entry)
    if spec.name in body.inputs:
        raise ModelError(f"function '{entry.key}' has an input '{spec.name}' already")
    found = family(library, entry)
    _check_loops(found)
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
    return body.inputs[spec.name]


def take_captures(library: Library, entry: Entry) -> None:
    """Turn what a body reads from outside into arguments that its callers pass."""
    body = library.open(entry)
    captured = body.captured()
    if captured:
        library.holdings.add_variables(seen_variables(body.live))
    for name, inside in captured.items():
        found = family(library, entry)
        _check_loops(found)
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


def _check_loops(found: Family) -> None:
    """Refuse the body of a loop that is something else as well, with other results."""
    for entry in found.entries:
        if not found.loops_around(entry):
            continue
        for caller in found.callers:
            cond = caller.is_loop and _body_of(caller) != entry.name
            if entry.name in caller.names and (caller.is_branching or cond):
                raise ModelError(
                    f"function '{entry.key}' is the body of a loop, and "
                    f"'{caller.op.name}' ({caller.op.type}) calls it too; such a "
                    "function keeps its arguments"
                )


def remove_input(library: Library, entry: Entry, name: str) -> None:
    """Take an argument away; see `Body.remove_input`."""
    body = library.open(entry)
    if name not in body.inputs:
        raise ModelError(
            f"function '{entry.key}' has no input '{name}'; it has {list(body.inputs)}"
        )
    index = list(body.inputs).index(name)
    found = family(library, entry)
    _check_loops(found)
    for member in found.entries:
        target = library.open(member)
        readers = target.readers_of(index, bool(found.loops_around(member)))
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


def add_output(
    library: Library, entry: Entry, name: str, tensors: Tensor | Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Add a result; see `Body.add_output`."""
    body = library.open(entry)
    if name in body.outputs:
        raise ModelError(f"function '{entry.key}' has an output '{name}' already")
    given = dict(tensors) if isinstance(tensors, Mapping) else {entry.key: tensors}
    found = _family_of_results(library, entry, "add_input")
    _check_branches(found, given)
    with library.writing():
        for member in found.entries:
            target = member.opened()
            target.take_output(fresh_name(set(target.outputs), name), given[member.key])
        rebuilds = {}
        for caller in found.callers:
            same = same_ends(caller)
            like = NewOutput(given[_keys(found, caller)[0]])
            rebuilds[caller.op] = Rebuild(same.inputs, [*same.outputs, like])
        replaced = write(library, found.entries, rebuilds)
    return tuple(replaced[caller.op].outputs[-1] for caller in found.callers)


def remove_output(library: Library, entry: Entry, name: str) -> None:
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
    found = _family_of_results(library, entry, "remove_input")
    for caller in found.callers:
        readers = consumers(caller.op.outputs[index])
        reading = [op.name for op in readers if op not in library.retired]
        if reading:
            raise ModelError(
                f"'{caller.op.name}' returns output '{name}' of function "
                f"'{entry.key}', and {reading} read it; rewire these first"
            )
    rebuilds = {}
    for caller in found.callers:
        same = same_ends(caller)
        kept = [o for o in same.outputs if o.old != index]
        rebuilds[caller.op] = Rebuild(same.inputs, kept)
    with library.writing():
        for member in found.entries:
            member.opened().drop_output(index)
        write(library, found.entries, rebuilds)


def _family_of_results(library: Library, entry: Entry, instead: str) -> Family:
    """Return the functions whose results change together, all of them open."""
    found = family(library, entry)
    for caller in found.callers:
        if caller.is_loop:
            raise ModelError(
                f"'{caller.op.name}' ({caller.op.type}) calls function '{entry.key}': "
                f"the outputs of a loop's body are its inputs; use {instead}"
            )
    for member in found.entries:
        library.open(member)
    return found


def _keys(found: Family, caller: Caller) -> list[str]:
    return [e.key for e in found.entries if e.name in caller.names]


def _check_branches(found: Family, given: Mapping[str, Tensor]) -> None:
    known = [member.key for member in found.entries]
    missing = [key for key in known if key not in given]
    if missing:
        raise ModelError(
            f"the output must be given for all branches; {missing} lack it: pass "
            "add_output(name, {function: tensor}) with " + _listed(known)
        )
    for key in given:
        if key not in known:
            raise ModelError(f"'{key}' is none of the branches, {_listed(known)}")
    first = given[known[0]]
    for member in found.entries:
        tensor = given[member.key]
        member.opened().require_own(tensor)
        if tensor.dtype != first.dtype:
            raise ModelError(
                f"'{first.name}' of '{known[0]}' is {first.dtype.name}, and "
                f"'{tensor.name}' of '{member.key}' is {tensor.dtype.name}; branches "
                "return the same dtypes"
            )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys)
