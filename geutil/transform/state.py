"""What a transformation knows while it runs; handlers get it as `info`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from geutil.errors import TransformError
from geutil.graph.collecting import collections_of_elements, known_collection_names
from geutil.graph.identity import IdentityMap, IdentitySet, MutableIdentityMap
from geutil.graph.kinds import Element, Graph, Operation, Tensor
from geutil.select.controls import ControlOutputs
from geutil.select.subgraph import SubGraphView

Copier = Callable[..., tuple[SubGraphView, Any]]
"""`copy_replacing`, for modules that are used by it."""


class TransformState:
    """The state of one call of a `Transformer`.

    Names with a trailing underscore speak of the destination, as in `graph_`.

    Attributes:
        sgv: the view that is transformed.
        sgv_inputs_set: its inputs.
        ops: its ops.
        graph, scope: the source graph, and the scope that names are relative to.
        graph_, scope_: the destination graph and scope.
        reuses_scope: whether names in that scope may be taken.
        copy_replacing: copies a view later on, for the gradients of copies.
        transformed_ops, transformed_ts: the copies made so far.
        collections: the collections of each op and tensor of the source graph.
        control_outputs: the control outputs in the source graph.
        copied: the ops that were copied as they are, with their copies.
        colocated: the `_class` entries of the ops that have any.
        replacements: tensors to read instead of others, inside ones included.
        has_contexts: whether an op of the view is in a version 1 loop or conditional.
        context_names: the new name of each version 1 context; a loop's is its frame.
        outside_ts: the tensors from outside the view that its copies read by proxy.
        function_names: the new names of the functions that are renamed.
        loose_controls: the ops whose copies lack control inputs so far.
        altered_ops: the ops whose definition the caller's `nodedef_fn` saw.
        handled_ts: the tensors for which the caller's op handler gave one that is no
            output of a copy.
        cyclic_ts: (op, index, tensor) for loop edges that wait for their producer.
        transform_original_op_handler: the handler of the running transformer.
    """

    def __init__(
        self,
        sgv: SubGraphView,
        dst_graph: Graph,
        dst_scope: str,
        src_scope: str,
        copy_replacing: Copier,
    ) -> None:
        self.sgv = sgv
        self.sgv_inputs_set = IdentitySet(sgv.inputs)
        self.ops = frozenset(sgv.ops)
        self.graph: Graph = sgv.graph
        self.scope = src_scope
        self.graph_ = dst_graph
        self.scope_ = dst_scope
        self.copy_replacing = copy_replacing
        self.reuses_scope = bool(dst_scope)
        self.transformed_ops: dict[Operation, Operation] = {}
        self.transformed_ts: MutableIdentityMap[Tensor] = MutableIdentityMap()
        self.control_outputs = ControlOutputs(self.graph)
        self.collections = collections_of_elements(self.graph)
        self.copied: dict[Operation, Operation] = {}
        self.loose_controls: list[Operation] = []
        self.altered_ops: list[Operation] = []
        self.handled_ts: list[Tensor] = []
        self.outside_ts: list[Tensor] = []
        self.cyclic_ts: list[tuple[Operation, int, Tensor]] = []
        self.has_contexts = False
        self.context_names: dict[str, str] = {}
        self.function_names: dict[str, str] = {}
        self.colocated: dict[Operation, list[bytes]] = {}
        self.replacements: IdentityMap[Tensor] = IdentityMap()
        self.transform_original_op_handler: Any = None
        self._known_collections = known_collection_names()

    @property
    def same_graph(self) -> bool:
        """Whether source and destination are one graph."""
        return self.graph is self.graph_

    def new_name(self, name: str) -> str:
        """Return the name in the destination scope for a name in the source scope.

        Raises:
            TransformError: the name does not lie in the source scope.
        """
        if not name.startswith(self.scope):
            raise TransformError(
                f"'{name}' does not lie in the source scope '{self.scope}'; pass "
                "src_scope='' to keep whole names, or leave the op out"
            )
        return self.scope_ + name[len(self.scope) :]

    def collection_names(self, element: Element) -> list[str]:
        """Return the collections that the copy of `element` belongs to.

        Names that TensorFlow gives a meaning stay; others move to the new scope.
        """
        return [self.collection_name(n) for n in self.collections.get(element, [])]

    def collection_name(self, name: str) -> str:
        """Return the name in the destination for a collection of the source graph."""
        if name in self._known_collections:
            return name
        return self.scope_ + name.removeprefix(self.scope)

    def copied_name(self, name: str) -> str | None:
        """Return the name of the copy of an op or tensor, or None if it has none."""
        return self._copied_names.get(name)

    @cached_property
    def _copied_names(self) -> dict[str, str]:
        names = {op.name: op_.name for op, op_ in self.copied.items()}
        names.update((t.name, t_.name) for t, t_ in self.transformed_ts.items())
        return names
