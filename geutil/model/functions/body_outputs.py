"""Results of functions, added and removed together with the outputs of their callers.

Plan, check, apply: a refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from geutil.graph.adjacency import consumers
from geutil.graph.function_calls import Caller
from geutil.graph.kinds import Tensor
from geutil.model.errors import ModelError
from geutil.model.functions.callers import NewOutput, Rebuild, same_ends
from geutil.model.functions.families import Family, family
from geutil.model.functions.library import Entry, Library
from geutil.model.functions.syncing import write
from geutil.model.programs.program import fresh_name


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
