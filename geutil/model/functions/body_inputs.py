"""Arguments of functions, added and removed together with what callers pass.

Plan, check, apply: a refusal changes nothing.
"""

from __future__ import annotations

import tensorflow as tf

from geutil.graph.kinds import Tensor
from geutil.model.errors import ModelError
from geutil.model.functions.arguments import Value, in_graph, value_for
from geutil.model.functions.body_readers import readers_of
from geutil.model.functions.callers import Rebuild, same_ends
from geutil.model.functions.families import check_loops, family
from geutil.model.functions.library import Entry, Library
from geutil.model.functions.syncing import (
    add_argument,
    take_all_captures,
    with_argument,
    write,
)


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
            add_argument(found, member, spec.name, spec, next(iter(passed.values())))
        write(library, found.entries, with_argument(found, passed))
        take_all_captures(library)
    return body.inputs[spec.name]


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
