"""The core of a model, an editable graph with named ends, as operations see it.

`geutil.model.Model` shows the operations to users; they import this class, never that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings, call_function, seen_variables
from geutil.graph.kinds import Graph, Operation
from geutil.graph.state import fingerprint
from geutil.model.calling import checked_arguments
from geutil.model.ends import Inputs, Outputs
from geutil.model.errors import ModelError
from geutil.model.holdings import Holdings
from geutil.model.programs.building import build, ops_to_run
from geutil.model.programs.closures import prune
from geutil.model.programs.materializing import Parts, materialize
from geutil.model.programs.program import Program
from geutil.model.restoring import check_initialized
from geutil.model.signatures import Signatures
from geutil.model.sources.functions import program_of_graph
from geutil.model.training.report import StripReport
from geutil.select.walks import get_backward_walk_ops
from geutil.showing import Shown

M = TypeVar("M", bound="EditableModel")


class EditableModel(Shown):
    """A graph that can be edited, with named ends, and what its signatures share.

    Args:
        parts: the graph and its ends.
        signature: the name of the signature that the graph computes.
        signatures: all signatures, which make models of other graphs, too.
        holdings: the variables, tables and assets.
    """

    def __init__(
        self,
        parts: Parts,
        signature: str,
        signatures: Signatures[Any],
        holdings: Holdings,
    ) -> None:
        self._graph: Graph = parts.graph
        self.inputs = Inputs(parts.inputs)
        self.outputs = Outputs(parts.graph, self.inputs, parts.sinks)
        self.signature = signature
        self.kept_calls = tuple(parts.kept)
        self.strip_report: StripReport | None = None
        self._side_effects: Operation = parts.side_effects
        self._signatures = signatures
        self._holdings = holdings
        self._built: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        return (
            f"Model('{self.signature}', {list(self.inputs)} -> {list(self.outputs)}, "
            f"{self._size()} ops)"
        )

    def _size(self) -> int:
        # Not those that stand for the model's ends.
        return len(self._graph.get_operations()) - len(self.outputs) - 1

    @property
    def graph(self) -> Graph:
        """The graph to edit, up to date: `Model` writes edited functions back to it."""
        return self._graph

    @property
    def signatures(self) -> Mapping[str, Any]:
        """The signatures by name, each a model."""
        return self._signatures

    @property
    def variables(self) -> Mapping[str, tf.Variable]:
        """The variables by name, those that edits have added included."""
        self._holdings.add_variables(seen_variables(self.graph))
        return MappingProxyType(self._holdings.variables)

    def run(self, /, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the outputs for some inputs; see `Model.run`."""
        if not tf.executing_eagerly():
            raise ModelError(
                "run computes arrays, so it needs eager execution; inside tf.function "
                "and graphs call model.to_function()"
            )
        arguments = checked_arguments(self.inputs, inputs)
        function = self.concrete_function()
        try:
            results = call_function(function, arguments)
        except tf.errors.OpError as error:
            check_initialized(self._holdings, function.variables, error)
            raise
        return {name: np.asarray(results[name].numpy()) for name in self.outputs}

    @property
    def holdings(self) -> Holdings:
        """What the signatures share: variables, tables, assets."""
        return self._holdings

    def opened_signatures(self: M) -> dict[str, M]:
        """Return the signatures that were opened, this one among them."""
        return self._signatures.opened()

    def unopened_signatures(self) -> dict[str, Any]:
        """Return the functions of the signatures that nobody has opened."""
        return self._signatures.unopened()

    def concrete_function(self) -> Any:
        """Return a concrete function of the graph as it is now; see `to_function`."""
        sinks = self.outputs.sinks
        state = (fingerprint(self.graph), tuple(sinks), len(self._holdings.variables))
        if self._built is None or self._built[0] != state:
            function = build(
                self.graph, self.inputs, sinks, self._side_effects, self._holdings
            )
            self._built = (state, function)
        return self._built[1]

    def reached_ops(self) -> list[Operation]:
        """Return the ops that outputs and side effects need, in the order of the graph.

        The inputs are among them. What edits left behind is not: it is neither run nor
        saved.

        Cost: linear in ops and edges.
        """
        ends = [*self.outputs.sinks.values(), self._side_effects]
        reached = get_backward_walk_ops(ends, control_inputs=True)
        names = {op.name for op in reached} | {t.op.name for t in self.inputs.values()}
        return [op for op in self.graph.get_operations() if op.name in names]

    def program(self, *, checked: bool = True) -> Program:
        """Return the graph as it is now as a program, the form that it is rebuilt from.

        Args:
            checked: whether to refuse placeholders that nothing feeds.

        Raises:
            ModelError: an output depends on a placeholder that is no input.
        """
        sinks = self.outputs.sinks
        if checked:
            ops_to_run(self.graph, self.inputs, sinks, self._side_effects)
        program = program_of_graph(
            self.graph, dict(self.inputs), dict(self.outputs), bindings(self.graph)
        )
        program.side_effects = [op.name for op in self._side_effects.control_inputs]
        if checked:
            prune(program)
        return program

    def derived(
        self: M,
        program: Program,
        *,
        holdings: Holdings | None = None,
        signature: str | None = None,
        alone: bool = False,
    ) -> M:
        """Return a model of a program, with the other signatures unless it is alone."""
        parts = materialize(program, inline=False, what=repr(self))
        name = self.signature if signature is None else signature
        others = self._signatures.vacated(self.signature, name)
        if alone:
            others = others.alone()
        derived: M = others.new(
            name, parts, self._holdings if holdings is None else holdings
        )
        return derived

    def rebuilt(self: M, programs: Mapping[str, Program], holdings: Holdings) -> M:
        """Return a model with a new program for each signature."""
        signatures = self._signatures.alone()
        for name, program in programs.items():
            parts = materialize(program, inline=False, what=repr(self))
            signatures.new(name, parts, holdings)
        rebuilt: M = signatures[self.signature]
        return rebuilt
