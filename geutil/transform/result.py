"""What a transformation did: which op became which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from geutil.errors import ArgumentTypeError
from geutil.graph.identity import IdentityMap
from geutil.graph.kinds import Element, Operation, Tensor, is_op, is_tensor, type_name
from geutil.graph.trees import map_leaves
from geutil.transform.state import TransformState

MissingFunction = Callable[[Any], Any]


class TransformerInfo:
    """The ops and tensors of a view and what they were transformed into.

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
        """Return what an op or tensor was transformed into.

        Args:
            original: an op, a tensor, the name of one, or a nested structure of these.
            missing_fn: called for an element that was not transformed; without it,
                None stands for that element.

        Returns:
            A structure like `original`.

        Raises:
            ArgumentTypeError: a leaf is none of these.
        """
        return self._map(original, self._ops, self._ts, self._names, missing_fn)

    def original(
        self, transformed: Any, missing_fn: MissingFunction | None = None
    ) -> Any:
        """Return what was transformed into an op or tensor.

        Args:
            transformed: an op, a tensor, the name of one, or a nested structure of
                these.
            missing_fn: called for an element that is no result of the transformation;
                without it, None stands for that element.

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
        def look_up(element: Any) -> Any:
            if is_op(element):
                found = ops.get(element)
            elif is_tensor(element):
                found = tensors.get(element)
            elif isinstance(element, str):
                found = names.get(element)
            else:
                raise ArgumentTypeError(
                    "expected a tf.Operation, a tf.Tensor or a name, got "
                    f"{type_name(element)}; of a variable, pass the tensor or op"
                )
            return missing_fn(element) if found is None and missing_fn else found

        return map_leaves(tree, look_up)

    @cached_property
    def _names(self) -> dict[str, Element]:
        return {e.name: e_ for e, e_ in (*self._ops.items(), *self._ts.items())}

    @cached_property
    def _inverse(
        self,
    ) -> tuple[dict[Operation, Operation], IdentityMap[Tensor], dict[str, Element]]:
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
