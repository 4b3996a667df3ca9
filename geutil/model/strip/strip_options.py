"""Options of stripping, checked, and the copy of a graph that it works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, SelectionError
from geutil.graph.functions import bindings
from geutil.graph.types import Operation, as_list, is_in_scope
from geutil.model.core import EditableModel
from geutil.model.programs import ModelProgram
from geutil.model.sources.objects import program_of_graph
from geutil.model.to_graph import GraphParts
from geutil.select import names
from geutil.select.walks import get_backward_walk_ops


def program_of_parts(parts: GraphParts) -> ModelProgram:
    """Return the program of a graph and its ends, as they are now."""
    program = program_of_graph(
        parts.graph,
        parts.inputs,
        {name: sink.inputs[0] for name, sink in parts.sinks.items()},
        bindings(parts.graph),
    )
    program.side_effects = [op.name for op in parts.side_effects.control_inputs]
    return program


def keep_of(parts: GraphParts) -> list[Any]:
    """Return the ends of a graph, which rewriting must leave."""
    return [*parts.inputs.values(), *parts.sinks.values(), parts.side_effects]


def live_ops(parts: GraphParts) -> frozenset[Operation]:
    """Return the ops that the values of the outputs are computed by."""
    return frozenset(get_backward_walk_ops(list(parts.sinks.values())))


@dataclass(frozen=True)
class StripOptions:
    """The caller's choices, which the graph does not tell."""

    # The value for each input or placeholder that is to be a constant.
    switches: Mapping[str, Any] = field(default_factory=dict)
    # For batch norms the variables of their moving mean and variance.
    statistics: Mapping[str, tuple[tf.Variable, tf.Variable]] = field(
        default_factory=dict
    )
    keep: tuple[str, ...] = ()  # Ops and name scopes that stay as they are.
    # For ops their value at inference; None is that of an input.
    neutral: Mapping[str, Any] = field(default_factory=dict)

    def keeps(self, name: str) -> bool:
        """Tell whether an op of that name stays as it is."""
        return any(name == scope or name.startswith(f"{scope}/") for scope in self.keep)


def checked_options(
    model: EditableModel,
    switches: Mapping[str, Any] | None,
    statistics: Mapping[str, tuple[str, str]] | None,
    keep: Iterable[Any],
    neutral: Mapping[str, Any] | None,
) -> StripOptions:
    """Return the options."""
    scopes = [scope for item in as_list(keep) for scope in _scopes(model, item)]
    op_names = {op.name for op in model.graph.get_operations()}
    inputs = {t.op.name for t in model.inputs.values()}
    for name in neutral or {}:
        if name in inputs:
            raise ModelError(f"neutral: '{name}' is an input; pass it in switches")
        if name not in op_names:
            raise ModelError(
                f"neutral: {model!r} has no op '{name}'; "
                f"{names.similar(model.graph, name)}"
            )
    return StripOptions(
        dict(switches or {}),
        _variables(model, statistics or {}),
        tuple(scopes),
        dict(neutral or {}),
    )


def _scopes(model: EditableModel, item: Any) -> tuple[str, ...]:
    """Return the scopes of an item of `keep`: an op, a name scope, a layer."""
    graph = model.graph
    try:
        scopes = names.scopes_meant([graph], item, repr(model)) or ("",)
    except SelectionError as error:
        raise ModelError(f"keep: {error}") from error
    if not any(is_in_scope(op.name, scopes) for op in graph.get_operations()):
        name = str(getattr(item, "name", item))
        raise ModelError(
            f"keep: {model!r} has no op, name scope, or layer with ops, '{name}'; "
            f"{names.similar(graph, name)}"
        )
    return scopes


def _variables(
    model: EditableModel, statistics: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[tf.Variable, tf.Variable]]:
    variables_by_norm = {}
    for norm, pair in statistics.items():
        for name in pair:
            if name not in model.variables:
                raise ModelError(
                    f"statistics: {model!r} has no variable '{name}' for '{norm}'; it "
                    f"has {list(model.variables)[:20]}"
                )
        mean, variance = pair
        variables_by_norm[norm] = (model.variables[mean], model.variables[variance])
    return variables_by_norm
