"""Constants: turned into variables, or computed from others by a program that freezes.

The latter are parameters that edits compute from parameters: protobufs are read and
changed, and TensorFlow computes the values, on the CPU.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import call_graph, replicas
from geutil.graph.creation import DERIVED
from geutil.graph.types import Graph, Operation
from geutil.graph.walks import node_name, tensor_name
from geutil.model import core, programs
from geutil.model.programs import ModelProgram
from geutil.model.shared_state import SharedState
from geutil.rewrite.rules.constant_folding import (
    NEVER,
    exact_session,
    is_foldable,
    is_pure,
    on_cpu,
)
from geutil.select.conversions import make_regex

_logger = logging.getLogger("geutil")
_LISTED = 10
"""As many names are listed in messages."""


@dataclass
class Matches:
    """The constants of a program that a regex matches."""

    # The nodes that can become variables.
    found: list[Any] = field(default_factory=list)
    # The reason for each that cannot, by name.
    stay: dict[str, str] = field(default_factory=dict)


class ThawedVariables:
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


def thaw(model: core.M, regex: str | re.Pattern[str]) -> core.M:
    """Return a model with variables for constants; see `Model.thaw`."""
    pattern = make_regex(regex)
    # This signature first: its constants give the variables their names.
    order = dict.fromkeys((model.signature, *model.signatures))
    untouched = {name: model.signatures[name].program() for name in order}
    matches = {name: _matches(p.graph_def, pattern) for name, p in untouched.items()}
    _check(untouched[model.signature], matches[model.signature], pattern)
    variables = ThawedVariables()
    thawed = {
        name: _thawed(untouched[name], matches[name].found, variables) for name in order
    }
    holdings = model.holdings.merged(SharedState())
    named = variables.named()
    holdings.add_variables(named.values(), named)
    return model.rebuilt({name: thawed[name] for name in model.signatures}, holdings)


def _matches(graph_def: Any, pattern: re.Pattern[str]) -> Matches:
    matches = Matches()
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


def _check(program: ModelProgram, matches: Matches, pattern: re.Pattern[str]) -> None:
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
    program: ModelProgram, constants: list[Any], variables: ThawedVariables
) -> ModelProgram:
    """Return a program that reads variables in place of some constants."""
    graph_def = program.graph_def
    node_names = {node.name for node in graph_def.node}
    captures = dict(program.captures)
    reads: dict[str, str] = {}
    for node in constants:
        variable = replicas.first_copy(variables.of(node))
        captures[f"{node.name}:0"] = variable.handle
        reads[node.name] = programs.fresh_name(
            node_names, f"{node.name}/ReadVariableOp"
        )
        node_names.add(reads[node.name])
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


def fold_constants(program: ModelProgram, kept: Iterable[str]) -> None:
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
    for name in call_graph.needs_first(needs):
        node = node_by_name[name]
        if node.op in NEVER or not node.input:
            follows = node.op in _PASSED
        else:
            follows = is_pure(call_graph.signature_of(node.op, {}), node.attr)
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
