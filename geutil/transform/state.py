"""The state of a transformation, and its result: which op became which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from geutil.errors import ArgumentTypeError, TransformError
from geutil.graph import types
from geutil.graph.types import Element, Graph, IdentityMap, Operation, Tensor
from geutil.select.subgraph import SubGraphView
from geutil.select.walks import ControlOutputs

Copier = Callable[..., tuple[SubGraphView, Any]]
"""`copy_replacing`, for modules that are used by it."""


class TransformState:
    """The state of one call of a `Transformer`.

    Names with a trailing underscore speak of the destination, as in `graph_`.

    Attributes:
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
        self.sgv_inputs_set = types.IdentitySet(sgv.inputs)
        self.ops = frozenset(sgv.ops)
        self.graph: Graph = sgv.graph
        self.scope = src_scope
        self.graph_ = dst_graph
        self.scope_ = dst_scope
        self.copy_replacing = copy_replacing
        self.reuses_scope = bool(dst_scope)
        self.transformed_ops: dict[Operation, Operation] = {}
        self.transformed_ts: types.MutableIdentityMap[Tensor] = (
            types.MutableIdentityMap()
        )
        self.control_outputs = ControlOutputs(self.graph)
        self.collections = types.collections_of_elements(self.graph)
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
        # Read once, since each copied op and tensor asks for them.
        self._known_collections = types.known_collection_names()

    @property
    def same_graph(self) -> bool:
        """True if source and destination are one graph."""
        return self.graph is self.graph_

    def new_name(self, name: str) -> str:
        """Return the name in the destination scope for a name in the source scope."""
        if not name.startswith(self.scope):
            raise TransformError(
                f"'{name}' does not lie in the source scope '{self.scope}'; pass "
                "src_scope='' to keep whole names, or leave the op out"
            )
        return self.scope_ + name[len(self.scope) :]

    def collection_names(self, element: Element) -> list[str]:
        """Return the collections that the copy of `element` belongs to."""
        # Names that TensorFlow gives a meaning stay; others move to the new scope.
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


MissingFunction = Callable[[Any], Any]


class TransformerInfo:
    """The ops and tensors of a view, with their copies.

    Args:
        info: the state of the transformation.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> _, info = ge.copy(graph, dst_scope="copy")
        >>> info.transformed(x).name, info.original("copy/x:0").name
        ('copy/x:0', 'x:0')
    """

    def __init__(self, info: TransformState) -> None:
        self._graph, self._scope = info.graph, info.scope
        self._graph_, self._scope_ = info.graph_, info.scope_
        self._ops = info.transformed_ops
        self._ts = info.transformed_ts

    @property
    def _transformed_ops(self) -> Mapping[Operation, Operation]:
        """The ops; read by clients of the old graph editor."""
        return MappingProxyType(self._ops)

    @property
    def _transformed_ts(self) -> IdentityMap[Tensor]:
        """The tensors; read by clients of the old graph editor."""
        return IdentityMap(self._ts.items())

    def transformed(
        self, original: Any, missing_fn: MissingFunction | None = None
    ) -> Any:
        """Return the copy of an op or tensor.

        Args:
            original: an op, a tensor, the name of one, or a nested structure of these.
            missing_fn: called for an element that was not transformed; without it, such
                an element gives None.

        Returns:
            A structure like `original`.

        Raises:
            ArgumentTypeError: a leaf is none of these.
        """
        return self._map(original, self._ops, self._ts, self._names, missing_fn)

    def original(
        self, transformed: Any, missing_fn: MissingFunction | None = None
    ) -> Any:
        """Return the original of a copied op or tensor.

        Args:
            transformed: an op, a tensor, the name of one, or a nested structure of
                these.
            missing_fn: called for an element that is not a result of the
                transformation; without it, such an element gives None.

        Returns:
            A structure like `transformed`.

        Raises:
            ArgumentTypeError: a leaf is none of these.
        """
        ops, tensors, names = self._inverse
        return self._map(transformed, ops, tensors, names, missing_fn)

    @staticmethod
    def _map(
        tree: Any,
        ops: Mapping[Operation, Operation],
        tensors: IdentityMap[Tensor],
        names: Mapping[str, Element],
        missing_fn: MissingFunction | None,
    ) -> Any:
        """Return a structure with the counterpart of each op, tensor and name."""

        def look_up(element: Any) -> Any:
            if types.is_op(element):
                counterpart = ops.get(element)
            elif types.is_tensor(element):
                counterpart = tensors.get(element)
            elif isinstance(element, str):
                counterpart = names.get(element)
            else:
                raise ArgumentTypeError(
                    "expected a tf.Operation, a tf.Tensor or a name, got "
                    f"{types.type_name(element)}; of a variable, pass the tensor or op"
                )
            if counterpart is None and missing_fn:
                return missing_fn(element)
            return counterpart

        return types.map_leaves(tree, look_up)

    @cached_property
    def _names(self) -> dict[str, Element]:
        return {e.name: e_ for e, e_ in (*self._ops.items(), *self._ts.items())}

    @cached_property
    def _inverse(
        self,
    ) -> tuple[
        dict[Operation, Operation],
        IdentityMap[Tensor],
        dict[str, Element],
    ]:
        ops = {op_: op for op, op_ in self._ops.items()}
        tensors = IdentityMap((t_, t) for t, t_ in self._ts.items())
        names = {e_.name: e for e_, e in (*ops.items(), *tensors.items())}
        return ops, tensors, names

    def __str__(self) -> str:
        lines = ["Transform result info:"]
        if self._graph is self._graph_:
            lines.append(f"  Within graph[{id(self._graph)}]")
        else:
            lines.append(f"  graph[{id(self._graph)}] => graph[{id(self._graph_)}]")
        if self._scope:
            lines.append(f"  Relative to source scope: {self._scope}")
        if self._scope_:
            lines.append(f"  Scope destination: {self._scope_}")
        lines.append("Operations mapping:")
        lines += [f"  {op.name} => {op_.name}" for op, op_ in self._ops.items()]
        return "\n".join([*lines, ""])
