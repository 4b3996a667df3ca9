"""Constants turned into variables."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import strategy_variables
from geutil.graph.walks import node_name, tensor_name
from geutil.model import core, programs
from geutil.model.programs import ModelProgram
from geutil.model.shared_state import SharedState
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
        variable = strategy_variables.first_copy(variables.of(node))
        captures[f"{node.name}:0"] = variable.handle
        reads[node.name] = programs.fresh_name(
            node_names, f"{node.name}/ReadVariableOp"
        )
        node_names.add(reads[node.name])
    for node in graph_def.node:
        for index, text in enumerate(node.input):
            if node_name(text) in reads:
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
