"""Variables turned into constants, in a graph and in its functions, and back.

Protobufs only: nothing is imported, and nothing is run but the arithmetic of parameters
that edits left, whose values TensorFlow computes on the CPU.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import creation, protos, replicas, resource_variables
from geutil.graph.creation import DERIVED
from geutil.graph.op_types import MERGES
from geutil.graph.protos import Library
from geutil.graph.types import Graph, Operation
from geutil.graph.walks import (
    closure,
    control_references,
    data_inputs,
    node_name,
    short_name,
    tensor_name,
)
from geutil.model import programs, variable_nodes
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram, SharedState
from geutil.model.variable_nodes import Carrier, HandleValue, Version, Versions
from geutil.rewrite.rules.constant_folding import (
    NEVER,
    exact_session,
    is_foldable,
    is_pure,
    on_cpu,
)
from geutil.select.selections import make_regex

_SUMS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_UPDATES = (
    "Assign",
    "ResourceApply",
    "ResourceCountUpTo",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
)
_WRITES = ("Assign", "Resource", "Rng", "Stateful", "Destroy", "CountUpTo")


def replace_handles(
    graph_def: Any, seeds: Mapping[str, HandleValue], changes: list[str] | None = None
) -> set[str]:
    """Put values in the place of handles, in place; return the nodes that read them."""
    # The nodes of `seeds` are values already. Changes of variables that are given up
    # are noted in `changes`: an op that waits for one reads the value that it would
    # set, and nothing is kept. If None, they are refused.
    versions = Versions(graph_def.library, changes)
    node_names = {node.name for node in graph_def.node}
    _, carriers = variable_nodes.handle_flow(graph_def.node, seeds, in_function=False)
    reads = {c.node.name for c in carriers if c.node.op in variable_nodes.READS}
    added = _change(graph_def.node, carriers, seeds, node_names, versions, "")
    graph_def.node.extend(added)
    add_versions(graph_def, versions)
    return reads


def add_versions(graph_def: Any, versions: Versions) -> None:
    """Add the versions of functions that are asked for to a library."""
    for version in versions.waiting():
        function = graph_def.library.function.add()
        function.CopyFrom(versions.functions[version.function])
        arguments = function.signature.input_arg
        seeds = {arguments[index].name: value for index, value in version.values}
        variable_nodes.take_values(function, version)
        values = replace_in_function(function, seeds, versions, version.function)
        _set_results(function, version, values)


def replace_in_function(
    function: Any, seeds: Mapping[str, HandleValue], versions: Versions, name: str
) -> dict[str, HandleValue]:
    """Put values in the place of handles in a function, in place."""
    used_names = {node.name for node in function.node_def}
    used_names |= {argument.name for argument in function.signature.input_arg}
    values, carriers = variable_nodes.handle_flow(
        function.node_def, seeds, in_function=True
    )
    renamed = {
        short_name(f"{c.node.name}:{output}:0"): f"{c.node.name}:output:0"
        for c in carriers
        if (output := variable_nodes.OUTPUT_NAMES.get(c.node.op))
    }
    where = f" in function '{name}'"
    added = _change(function.node_def, carriers, seeds, used_names, versions, where)
    function.node_def.extend(added)
    rename_references(function, renamed)
    return values


def rename_references(function: Any, names: Mapping[str, str]) -> None:
    """Rename the references of a function's nodes and results, in place."""
    for node in function.node_def if names else ():
        for index, text in enumerate(node.input):
            node.input[index] = names.get(short_name(text), text)
    for name, text in list(function.ret.items()):
        function.ret[name] = names.get(short_name(text), text)


def _set_results(
    function: Any, version: Version, values: Mapping[str, HandleValue]
) -> None:
    """Set the types of results that are values now."""
    expected = dict(version.values) if version.returns else {}
    for index, result in enumerate(function.signature.output_arg):
        value = values.get(short_name(function.ret[result.name]))
        expected_value = expected.get(index)
        if (
            value is not None
            and expected_value is not None
            and value.dtype == expected_value.dtype
        ):
            result.type = value.dtype
            result.ClearField("handle_data")
            result.ClearField("experimental_full_type")
        elif value is not None or expected_value is not None:
            name = (value or expected_value or version.values[0][1]).variable
            raise ModelError(
                f"function '{version.function}' hands the handle of variable '{name}' "
                f"on as its result '{result.name}', so it cannot become a constant; "
                "open the model with inline=True"
            )


def _change(
    nodes: Iterable[Any],
    carriers: Collection[Carrier],
    seeds: Mapping[str, HandleValue],
    used_names: set[str],
    versions: Versions,
    where: str,
) -> list[Any]:
    """Change the nodes that read handles; return the nodes that they need besides."""
    fresh = partial(programs.take_name, used_names)
    added = []
    new_values: dict[str, tuple[str, str]] = {}
    for carrier in carriers:
        node = carrier.node
        handle = node.input[0]
        # Values that are passed on may come from inside a loop; the rest does not.
        waits = [] if short_name(handle) in seeds else [f"^{node_name(handle)}"]
        value = carrier.values.get(0)
        if versions.changes is not None and value and _only_changes(node):
            op = f"'{node.name}' ({node.op}){where}"
            versions.changes.append(f"{op} changes '{value.variable}'")
            output = _turn_into_new_value(node, value, waits)
            new = f"{node.name}:{output}:0" if where else str(node.name)
            new_values[node.name] = (value.variable, new)
        else:
            _check(carrier, versions, where)
            added += _take_values(carrier, waits, fresh, versions, where)
        if handle not in node.input:
            # An assignment does not read the old value, nor does a test for one.
            carrier.values.clear()
    _read_new_values(nodes, carriers, new_values)
    return added


def _only_changes(node: Any) -> bool:
    """Return whether a node changes variables, and yields none but the old value."""
    return node.op.startswith(_UPDATES)


def _turn_into_new_value(node: Any, value: HandleValue, waits: Iterable[str]) -> str:
    """Turn a node that changes a variable into one that computes the new value."""
    # An update that is no assignment, sum or difference is left out: the old value
    # stays.
    if node.op in _SUMS:
        variable_nodes.set_op_type(node, _SUMS[node.op], T=value.dtype)
        return "z"
    data = data_inputs(node.input)
    controls = control_references(node.input)
    if node.op == "AssignVariableOp":
        data = data[1:]
        controls += [wait for wait in waits if wait not in controls]
    variable_nodes.set_op_type(node, "Identity", T=value.dtype)
    node.input[:] = [data[0], *controls]
    return "output"


def _take_values(
    carrier: Carrier,
    waits: Iterable[str],
    fresh: Callable[[str], str],
    versions: Versions,
    where: str,
) -> list[Any]:
    """Let a node read values or pass them on; return its other control inputs."""
    node = carrier.node
    if node.op in variable_nodes.READS:
        (value,) = carrier.values.values()
        return variable_nodes.turn_into_value_read(
            node, value, fresh, waits=waits, in_function=bool(where)
        )
    if node.op in variable_nodes.CALLS:
        variable_nodes.pass_values(node, carrier.values, versions)
    elif node.op == "IdentityN":
        variable_nodes.set_types(node, "T", carrier.values)
        node.attr.pop("_output_shapes", None)
    else:
        (node.attr["T"].type,) = {v.dtype for v in carrier.values.values()}
        node.attr.pop("_output_shapes", None)
        node.ClearField("experimental_type")
    return []


_MEETINGS = MERGES | {"Exit", "RefExit"}
"""Where the branch or loop ends whose values are no others' to read."""


def _read_new_values(
    nodes: Iterable[Any],
    carriers: Iterable[Carrier],
    changes: Mapping[str, tuple[str, str]],
) -> None:
    """Let nodes that come after a change of a variable read the new value."""
    # `changes` has for each node that changes a variable the tensor with the new value.
    if not changes:
        return
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for text in node.input:
            readers.setdefault(node_name(text), []).append(node)
    behind = {name: _behind(name, readers) for name in changes}
    carrier_by_name = {carrier.node.name: carrier for carrier in carriers}
    old = {name: list(c.node.input) for name, c in carrier_by_name.items()}

    def changes_before(name: str) -> int:
        return sum(name in reached for reached in behind.values())

    for change in sorted(changes, key=changes_before):
        variable, new = changes[change]
        for name in behind[change] & carrier_by_name.keys():
            carrier = carrier_by_name[name]
            for index, value in carrier.values.items():
                # A handle that is passed on has the new value already.
                passed_on = node_name(old[name][index]) in behind[change]
                if value.variable == variable and not passed_on:
                    carrier.node.input[index] = new


def _behind(start: str, readers: Mapping[str, Iterable[Any]]) -> set[str]:
    """Return the names of a node's descendants, within its branch or loop."""

    def after(name: str) -> list[str]:
        nodes = readers.get(name, ())
        return [node.name for node in nodes if node.op not in _MEETINGS]

    return set(closure(after(start), after))


def _check(carrier: Carrier, versions: Versions, where: str) -> None:
    """Raise ModelError where an input of a node cannot be a value."""
    node = carrier.node
    op = f"'{node.name}' ({node.op}){where}"
    if node.op in variable_nodes.CALLS:
        _check_call(carrier, versions, op)
        return
    for index, value in carrier.values.items():
        if not variable_nodes.passes(node, index) and (
            node.op not in variable_nodes.READS or index > 0
        ):
            raise ModelError(_refusal(node, value.variable, op))
    if node.op == "Merge":
        data = data_inputs(node.input)
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


def _check_call(carrier: Carrier, versions: Versions, op: str) -> None:
    """Refuse a call that passes a variable to a function that cannot take its value."""
    node = carrier.node
    kind = variable_nodes.CALLS[node.op]
    last = max(carrier.values) - kind.offset
    for attribute in kind.functions:
        attr = node.attr[attribute]
        for function in [attr.func] if attr.HasField("func") else attr.list.func:
            if function.name not in versions.functions:
                raise ModelError(f"{op} calls '{function.name}', which is not there")
            signature = versions.functions[function.name].signature
            if last >= len(signature.input_arg):
                raise ModelError(f"{op} passes more than '{function.name}' takes")
            if signature.attr:
                raise ModelError(
                    f"{op} passes a variable to '{function.name}', whose types are "
                    "open; open the model with inline=True"
                )


@dataclass(frozen=True)
class Captured:
    """The captures that become constants: variables, or values too large for one."""

    name: str  # The name of the variable or value.
    outside: Any  # The handle of the variable, or the value.
    dtype: tf.DType
    is_variable: bool

    def shape(self) -> list[int]:
        """Return the shape, for which a variable is not read."""
        if not self.is_variable:
            return [int(size) for size in self.outside.shape]
        shape = tf.raw_ops.VariableShape(input=self.outside, out_type=tf.int64)
        return [int(size) for size in shape.numpy()]

    def value(self) -> Any:
        """Return the value."""
        if not self.is_variable:
            return self.outside
        return tf.raw_ops.ReadVariableOp(resource=self.outside, dtype=self.dtype)


def freeze(model: M) -> M:
    """Return a model with constants for variables; see `Model.freeze`."""
    frozen = {}
    for name, signature in model.signatures.items():
        try:
            frozen[name] = frozen_program(signature)
        except ModelError as error:
            if name == model.signature:
                raise
            raise ModelError(
                f"signature '{name}' cannot be frozen, which shares the variables: "
                f"{error}"
            ) from error
    holdings = model.holdings
    return model.rebuilt(frozen, SharedState({}, holdings.resources, holdings.assets))


def frozen_program(model: EditableModel) -> ModelProgram:
    """Return the program of a model with constants for its variables."""
    # Captures that are no variables, as those of tables, are left. Functions that
    # nothing calls any more are dropped.
    program = model.program()
    sources = _sources(model, program)
    _check_initialized(sources)
    _check_size(repr(model), program, sources)
    names = _insert_constants(program, sources)
    reads = replace_handles(
        program.graph_def,
        {
            names[node]: HandleValue(
                source.name,
                source.dtype.as_datatype_enum,
                tf.TensorShape(source.shape()).as_proto().SerializeToString(),
            )
            for node, source in sources.items()
            if source.is_variable
        },
    )
    for name in names.values():
        del program.captures[f"{name}:0"]
    # A variable was read in its turn among the effects; a constant has no such turn.
    program.side_effects = [n for n in program.side_effects if n not in reads]
    _fold_constants(program, programs.prune(program))
    library = Library(program.graph_def.library).still_called(program.graph_def.node)
    program.graph_def.library.CopyFrom(library)
    return program


def _sources(model: EditableModel, program: ModelProgram) -> dict[str, Captured]:
    """Return the captures that become constants, by the names of their nodes."""
    names = {id(v.handle): name for name, v in model.variables.items()}
    sources = {}
    for tensor, outside in program.captures.items():
        node = node_name(tensor)
        if outside.dtype == tf.resource:
            dtype = resource_variables.dtype_behind(outside)
            if dtype is not None:
                name = names.get(id(outside), node)
                sources[node] = Captured(name, outside, dtype, True)
        elif outside.dtype != tf.variant:
            sources[node] = Captured(node, outside, outside.dtype, False)
    return sources


def _check_initialized(sources: Mapping[str, Captured]) -> None:
    empty = [
        source.name
        for source in sources.values()
        if source.is_variable
        and not tf.raw_ops.VarIsInitializedOp(resource=source.outside)
    ]
    if empty:
        more = " and more" if len(empty) > 10 else ""
        raise ModelError(
            f"the variables {empty[:10]}{more} have no value, so they cannot become "
            "constants",
            remedy=programs.RESTORE,
        )


def _check_size(
    what: str, program: ModelProgram, sources: Mapping[str, Captured]
) -> None:
    total = program.graph_def.ByteSize()
    for outside in {id(s.outside): s for s in sources.values()}.values():
        elements = int(np.prod(outside.shape(), dtype=object))
        total += elements * max(outside.dtype.size, 1)
    if total > creation.BULK_LIMIT:
        raise ModelError(
            f"frozen, {what} would have {total:,} bytes, and a graph of constants "
            f"holds at most {creation.BULK_LIMIT:,}: save it as a SavedModel, "
            "which keeps them as variables"
        )


def _insert_constants(
    program: ModelProgram, sources: Mapping[str, Captured]
) -> dict[str, str]:
    """Put constants in the place of the nodes that correspond to variables."""
    node_names = {node.name for node in program.graph_def.node} - set(sources)
    names: dict[str, str] = {}
    for node, source in sources.items():
        names[node] = programs.take_name(node_names, programs.legal_name(source.name))
    programs.rename_nodes(program, names)
    by_name = {names[node]: source for node, source in sources.items()}
    for node in program.graph_def.node:
        if node.name in by_name:
            programs.set_constant(node, node.name, by_name[node.name].value())
    return names


_logger = logging.getLogger("geutil")
_LISTED = 10
"""As many names are listed in messages."""


@dataclass
class _Matches:
    """The constants of a program that a regex matches."""

    # The nodes that can become variables.
    found: list[Any] = field(default_factory=list)
    # The reason for each that cannot, by name.
    stay: dict[str, str] = field(default_factory=dict)


class _ThawedVariables:
    """The variables made so far; constants of one name and value share one."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], tf.Variable] = {}

    def of(self, node: Any) -> tf.Variable:
        """Return the variable for a constant."""
        key = node.name, node.attr["value"].tensor.SerializeToString(deterministic=True)
        if key not in self._made:
            self._made[key] = tf.Variable(
                programs.value_of_const(node), trainable=True, name=node.name
            )
        return self._made[key]

    def named(self) -> dict[str, tf.Variable]:
        """Return the variables by the names of the constants, in order."""
        named: dict[str, tf.Variable] = {}
        for (name, _), variable in self._made.items():
            named[programs.fresh_name(named, name)] = variable
        return named


def thaw(model: M, regex: str | re.Pattern[str]) -> M:
    """Return a model with variables for constants; see `Model.thaw`."""
    pattern = make_regex(regex)
    # This signature first: its constants give the variables their names.
    order = dict.fromkeys((model.signature, *model.signatures))
    untouched = {name: model.signatures[name].program() for name in order}
    matches = {name: _matches(p.graph_def, pattern) for name, p in untouched.items()}
    _check_matches(untouched[model.signature], matches[model.signature], pattern)
    variables = _ThawedVariables()
    thawed = {
        name: _thawed(untouched[name], matches[name].found, variables) for name in order
    }
    holdings = model.holdings.merged(SharedState())
    named = variables.named()
    holdings.add_variables(named.values(), named)
    return model.rebuilt({name: thawed[name] for name in model.signatures}, holdings)


def _matches(graph_def: Any, pattern: re.Pattern[str]) -> _Matches:
    matches = _Matches()
    has_loops = any(node.op == "Enter" for node in graph_def.node)
    for node in graph_def.node:
        if node.op == "Const" and pattern.search(node.name):
            dtype = tf.as_dtype(node.attr["dtype"].type)
            if not (dtype.is_floating or dtype.is_complex):
                matches.stay[node.name] = f"{dtype.name}, which no gradient reaches"
            elif has_loops and node.input:
                matches.stay[node.name] = "in a loop of version 1"
            else:
                matches.found.append(node)
    return matches


def _check_matches(
    program: ModelProgram, matches: _Matches, pattern: re.Pattern[str]
) -> None:
    """Refuse a thaw without any variable; log weights that stay constants."""
    stay = [f"'{name}' ({reason})" for name, reason in matches.stay.items()]
    listed = ", ".join(stay[:_LISTED]) + (", ..." if len(stay) > _LISTED else "")
    if matches.found:
        if stay:
            _logger.info("%d matching constants stay constants: %s", len(stay), listed)
        return
    if stay:
        raise ModelError(
            f"no constant that '{pattern.pattern}' matches can become a variable: "
            f"{listed}; to train something else, read a tf.Variable of your own under "
            "`with model.graph.as_default():` and reroute to it"
        )
    candidates = _matches(program.graph_def, re.compile("")).found
    names = [node.name for node in candidates[:_LISTED]]
    raise ModelError(
        f"no constant has a name that '{pattern.pattern}' matches; "
        f"{len(candidates)} could become variables"
        + (f", such as {names}" if names else "")
        + " (those in functions cannot: open the model with inline=True)"
    )


def _thawed(
    program: ModelProgram, constants: list[Any], variables: _ThawedVariables
) -> ModelProgram:
    """Return a program that reads variables in place of some constants."""
    graph_def = program.graph_def
    node_names = {node.name for node in graph_def.node}
    captures = dict(program.captures)
    reads: dict[str, str] = {}
    for node in constants:
        variable = replicas.first_copy(variables.of(node))
        captures[f"{node.name}:0"] = variable.handle
        reads[node.name] = programs.take_name(node_names, f"{node.name}/ReadVariableOp")
    for node in graph_def.node:
        for index, text in enumerate(node.input):
            if node_name(text) in reads:
                # An op may wait for the constant, and not read it.
                control = "^" if text.startswith("^") else ""
                node.input[index] = control + reads[node_name(text)]
    for node in constants:
        graph_def.node.append(_read_node(reads[node.name], node))
        _become_handle(node)
    outputs = {
        name: tensor_name(reads.get(node_name(t), t))
        for name, t in program.outputs.items()
    }
    effects = [reads.get(name, name) for name in program.side_effects]
    return replace(program, captures=captures, outputs=outputs, side_effects=effects)


def _read_node(name: str, constant: Any) -> Any:
    """Return the node that reads the variable; it has the constant's control inputs."""
    node = tf.compat.v1.NodeDef(name=name, op="ReadVariableOp", device=constant.device)
    node.attr["dtype"].type = constant.attr["dtype"].type
    node.input.append(constant.name)
    node.input.extend(constant.input)
    return node


def _become_handle(node: Any) -> None:
    """Turn a constant into the placeholder for the handle of its variable."""
    handle = tf.compat.v1.NodeDef(name=node.name, op="Placeholder", device=node.device)
    handle.attr["dtype"].type = tf.resource.as_datatype_enum
    node.CopyFrom(handle)


_PASSED = ("Const", "Identity")
_INTERMEDIATE = 1 << 20
"""Bytes of intermediate values in any graph: `max_bytes` of `constant_folding`."""


def _fold_constants(program: ModelProgram, kept: Iterable[str]) -> None:
    """Replace the parameters that edits compute from constants by values, in place."""
    # Of all ops that follow from constants, those are replaced that are marked
    # `DERIVED` or read by such: other ops go on reading constants that have the names
    # of variables. Left as they are: what `constant_folding` never folds; ops with
    # control inputs, or in bodies of functions, which take constants as arguments; ops
    # whose values take more bytes than all that is dropped for them, are of unknown
    # size, or beyond 1 MiB and the size of the graph.
    node_by_name = programs.nodes_by_name(program.graph_def)
    marked = [node for node in node_by_name.values() if DERIVED in node.attr]
    if not marked:
        return
    # A fold may read the arithmetic of a norm as it is.
    names = {node.name for node in marked}
    names.update(node_name(text) for node in marked for text in node.input)
    ends = [*program.outputs.values(), *program.side_effects, *kept]
    uses = Counter(map(node_name, ends))
    for node in node_by_name.values():
        uses.update(map(node_name, node.input))
    candidates = _following(node_by_name)
    part = tf.compat.v1.GraphDef()
    part.node.extend(node_by_name[name] for name in candidates)
    graph = on_cpu(part)
    limit = max(_INTERMEDIATE, part.ByteSize())
    with closing(exact_session(graph)) as session:
        # Readers first: what they do not need any more is not computed.
        for op in reversed(_computable(graph, candidates, limit)):
            if op.name in names and uses[op.name] and op.type not in _PASSED:
                _replace(op, session, node_by_name, uses)
    program.keep(node_by_name.values())


def _following(node_by_name: Mapping[str, Any]) -> list[str]:
    """Return the nodes that follow from constants, in topological order."""
    found: dict[str, None] = {}
    needs = {
        name: [node_name(text) for text in node.input]
        for name, node in node_by_name.items()
    }
    for name in protos.needs_first(needs):
        node = node_by_name[name]
        if node.op in NEVER or not node.input:
            follows = node.op in _PASSED
        else:
            follows = is_pure(protos.signature_of(node.op, {}), node.attr)
        # A control input is no key of `found`; it keeps its node from being one.
        if follows and all(text.partition(":")[0] in found for text in node.input):
            found[name] = None
    return list(found)


def _computable(graph: Graph, names: Iterable[str], limit: int) -> list[Operation]:
    """Return the ops that have a result of known size, like all before them."""
    found: dict[Operation, None] = {}
    for name in names:
        op = graph.get_operation_by_name(name)
        sizes = [(t.shape.num_elements(), t.dtype.size) for t in op.outputs]
        if (
            len(op.outputs) == 1
            and all(
                count is not None and count * size <= limit for count, size in sizes
            )
            and all(tensor.op in found for tensor in op.inputs)
            and (op.type in _PASSED or is_foldable(op))
        ):
            found[op] = None
    return list(found)


def _replace(
    op: Operation, session: Any, node_by_name: dict[str, Any], uses: Counter[str]
) -> None:
    """Replace an op by a constant if it can be computed and nothing grows."""
    try:
        (value,) = session.run(op.outputs)
    # An op that cannot be computed here, such as a failing check, stays.
    except tf.errors.OpError:
        return
    const = programs.const_node(op.name, tf.constant(value, op.outputs[0].dtype))
    ended: Counter[str] = Counter()
    gone = [op.name]
    for name in gone:
        for node in map(node_name, node_by_name[name].input):
            ended[node] += 1
            # An op goes only with the last of those that read it.
            if ended[node] == uses[node]:
                gone.append(node)
    if const.ByteSize() <= sum(node_by_name[name].ByteSize() for name in gone):
        for name in gone[1:]:
            del node_by_name[name]
        node_by_name[op.name] = const
        uses.subtract(ended)
