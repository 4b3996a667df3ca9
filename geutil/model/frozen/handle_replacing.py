"""Values in place of the handles of variables, in a graph and in its functions.

Protobufs only: nothing is imported and nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.frozen.handle_flow import Carrier, Value, handle_flow, passes
from geutil.model.frozen.value_reads import OUTPUT_NAMES, READS, turn_into_value_read
from geutil.model.frozen.valued_calls import (
    CALLS,
    Version,
    Versions,
    pass_values,
    set_types,
    take_values,
)
from geutil.model.programs.program import fresh_name, node_of, short

_WRITES = ("Assign", "Resource", "Rng", "Stateful", "Destroy", "CountUpTo")


def replace_handles(graph_def: Any, seeds: Mapping[str, Value]) -> set[str]:
    """Put values in the place of handles, in place.

    Args:
        graph_def: the graph. The nodes that are the handles are values already; their
            readers are changed, and functions that took handles get versions that take
            values.
        seeds: the value by the name of each node that was a handle.

    Returns:
        The names of the nodes that read a variable and now read a value.

    Raises:
        ModelError: an op needs the variable itself, not its value; or a function
            returns the handle of a variable.

    Cost: linear in nodes and edges, those of functions included.
    """
    versions = Versions(graph_def.library)
    taken = {node.name for node in graph_def.node}
    _, carriers = handle_flow(graph_def.node, seeds, in_function=False)
    reads = {c.node.name for c in carriers if c.node.op in READS}
    added = _change(carriers, seeds, taken, versions, "")
    graph_def.node.extend(added)
    for version in versions.waiting():
        function = graph_def.library.function.add()
        function.CopyFrom(versions.functions[version.function])
        _make_version(function, version, versions)
    return reads


def _make_version(function: Any, version: Version, versions: Versions) -> None:
    """Make a copy of a function take values where it took handles."""
    arguments = function.signature.input_arg
    seeds = {arguments[index].name: value for index, value in version.values}
    take_values(function, version)
    taken = {node.name for node in function.node_def} | {a.name for a in arguments}
    values, carriers = handle_flow(function.node_def, seeds, in_function=True)
    renamed = {
        short(f"{c.node.name}:{name}:0"): f"{c.node.name}:output:0"
        for c in carriers
        if (name := OUTPUT_NAMES.get(c.node.op))
    }
    where = f" in function '{version.function}'"
    function.node_def.extend(_change(carriers, seeds, taken, versions, where))
    _set_results(function, version, values)
    for node in function.node_def if renamed else ():
        for index, text in enumerate(node.input):
            if short(text) in renamed:
                node.input[index] = renamed[short(text)]
    for name, text in function.ret.items():
        if short(text) in renamed:
            function.ret[name] = renamed[short(text)]


def _set_results(function: Any, version: Version, values: Mapping[str, Value]) -> None:
    """Set the types of results that are values now."""
    expected = dict(version.values) if version.returns else {}
    for index, result in enumerate(function.signature.output_arg):
        value = values.get(short(function.ret[result.name]))
        wanted = expected.get(index)
        if value is not None and wanted is not None and value.dtype == wanted.dtype:
            result.type = value.dtype
            result.ClearField("handle_data")
            result.ClearField("experimental_full_type")
        elif value is not None or wanted is not None:
            name = (value or wanted or version.values[0][1]).variable
            raise ModelError(
                f"function '{version.function}' hands the handle of variable '{name}' "
                f"on as its result '{result.name}', so it cannot become a constant; "
                "open the model with inline=True"
            )


def _change(
    carriers: Iterable[Carrier],
    seeds: Mapping[str, Value],
    taken: set[str],
    versions: Versions,
    where: str,
) -> list[Any]:
    """Change the nodes that read handles; return the nodes that they need besides."""

    def fresh(name: str) -> str:
        name = fresh_name(taken, name)
        taken.add(name)
        return name

    added = []
    for carrier in carriers:
        node = carrier.node
        _check(carrier, versions, where)
        if node.op in READS:
            handle = node.input[0]
            # What is passed on may come from inside a loop; the rest does not.
            waits = [] if short(handle) in seeds else [f"^{node_of(handle)}"]
            (value,) = carrier.values.values()
            added += turn_into_value_read(
                node, value, fresh, waits=waits, in_function=bool(where)
            )
            continue
        if node.op in CALLS:
            pass_values(node, carrier.values, versions)
        elif node.op == "IdentityN":
            set_types(node, "T", carrier.values)
            node.attr.pop("_output_shapes", None)
        else:
            (node.attr["T"].type,) = {v.dtype for v in carrier.values.values()}
            node.attr.pop("_output_shapes", None)
            node.ClearField("experimental_type")
    return added


def _check(carrier: Carrier, versions: Versions, where: str) -> None:
    """Raise ModelError where an input of a node cannot be a value."""
    node = carrier.node
    op = f"'{node.name}' ({node.op}){where}"
    if node.op in CALLS:
        _check_call(node, versions, op)
        return
    for index, value in carrier.values.items():
        if not passes(node, index) and (node.op not in READS or index > 0):
            raise ModelError(_refusal(node, value.variable, op))
    if node.op == "Merge":
        data = [text for text in node.input if not text.startswith("^")]
        dtypes = {value.dtype for value in carrier.values.values()}
        if len(carrier.values) < len(data) or len(dtypes) > 1:
            raise ModelError(f"{op} merges handles of variables with something else")


def _refusal(node: Any, variable: str, op: str) -> str:
    if node.op.startswith(_WRITES):
        return (
            f"{op} changes variable '{variable}', so it cannot become a constant: call "
            "strip_training() first, or cut off what it depends on"
        )
    return (
        f"{op} needs variable '{variable}' itself and not only its value, so it cannot "
        "become a constant: cut off what it depends on, or replace it"
    )


def _check_call(node: Any, versions: Versions, op: str) -> None:
    kind = CALLS[node.op]
    for attribute in kind.functions:
        attr = node.attr[attribute]
        for function in [attr.func] if attr.HasField("func") else attr.list.func:
            if function.name not in versions.functions:
                raise ModelError(f"{op} calls '{function.name}', which is not there")
            if versions.functions[function.name].signature.attr:
                raise ModelError(
                    f"{op} passes a variable to '{function.name}', whose types are "
                    "open; open the model with inline=True"
                )
