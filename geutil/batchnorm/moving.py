"""Moving statistics: the variables that follow the statistics of batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from geutil.batchnorm.norms import Norm
from geutil.batchnorm.steps import Kind
from geutil.graph.importing import make_op
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.names import absolute_unique_name
from geutil.graph.order import topological_sort
from geutil.reroute.control_edges import add_control_inputs
from geutil.select.networks.norms import FUSED
from geutil.select.networks.origins import Origin, Origins
from geutil.transform.rewrite.liveness import Liveness

_UPDATES = frozenset(
    (
        "Assign",
        "AssignAdd",
        "AssignAddVariableOp",
        "AssignSub",
        "AssignSubVariableOp",
        "AssignVariableOp",
    )
)


@dataclass(frozen=True, eq=False)
class Moving:
    """A statistic of a batch, and the variable that follows it.

    Attributes:
        statistic: the mean or variance of the batch.
        updates: the ops that assign the variable what they make of the statistic.
    """

    statistic: Tensor
    updates: tuple[Operation, ...]

    @property
    def variable(self) -> Tensor:
        """The handle of the variable, or the reference to it."""
        return self.updates[0].inputs[0]

    def read(self) -> Tensor:
        """Return the value that the variable has before it is updated.

        It has the shape of the statistic.
        """
        dtype = self.statistic.dtype
        if self.variable.dtype == tf.resource:
            value = tf.raw_ops.ReadVariableOp(
                resource=self.variable, dtype=dtype, name="moving_fold"
            )
        else:
            value = tf.identity(self.variable, "moving_fold")
        for update in self.updates:
            add_control_inputs(update, value.op)
        shape = self.statistic.shape
        return tf.reshape(value, shape) if shape.is_fully_defined() else value


class MovingStatistics:
    """Finds the moving statistics of norms that normalize by those of the batch.

    A variable follows a statistic if the graph assigns it a value that depends on the
    statistic, and on no other data: `variable * m + statistic * (1 - m)`, for example.

    Args:
        graph: the graph.
        origins: of its tensors.

    Cost: linear in the ops between statistics and assignments.
    """

    def __init__(self, graph: Graph, origins: Origins) -> None:
        self._origins = origins
        self._updates: dict[int, list[tuple[Operation, dict[int, Tensor]]]] = {}
        for op in graph.get_operations():
            if op.type not in _UPDATES or origins.of(op.inputs[1]) is not Origin.BATCH:
                continue
            behind = self._behind([op.inputs[1]])
            for t in behind.values():
                if self._is_root(t):
                    self._updates.setdefault(id(t), []).append((op, behind))

    def of(self, norm: Norm) -> list[Moving] | None:
        """Return the moving statistics of a norm; None if they are not known."""
        if norm.steps[0].kind is Kind.NORMALIZE:
            return self._of_fused(norm.steps[0].op)
        used = self._behind(t for step in norm.steps for t in step.parameters)
        found: dict[int, Moving] = {}
        for root in [t for t in used.values() if self._is_root(t)]:
            for update, behind in self._updates.get(id(root), ()):
                statistic = _last([t for key, t in used.items() if key in behind])
                if statistic is None:
                    return None
                known = found.get(id(statistic))
                if known is None:
                    found[id(statistic)] = Moving(statistic, (update,))
                elif known.variable is not update.inputs[0]:
                    return None
                elif update not in known.updates:
                    updates = (*known.updates, update)
                    found[id(statistic)] = Moving(statistic, updates)
        rest = self._behind((t for s in norm.steps for t in s.parameters), found)
        covered = all(key in found or not self._is_root(t) for key, t in rest.items())
        return list(found.values()) if covered else None

    def _of_fused(self, op: Operation) -> list[Moving] | None:
        """Return what follows outputs of a fused norm, if it reads no moving values."""
        if all(_is_vector(t, op.inputs[1]) for t in op.inputs[3:5]):
            known = all(self._origins.is_parameter(t) for t in op.inputs[3:5])
            return [] if known else None
        found = []
        for statistic in op.outputs[1:3]:
            updates = self._updates.get(id(statistic), ())
            if len(updates) != 1:
                return None
            found.append(Moving(statistic, (updates[0][0],)))
        return found

    def _behind(
        self, tensors: Iterable[Tensor], ends: Iterable[int] = ()
    ) -> dict[int, Tensor]:
        """Return by id what statistics there are behind tensors, roots included."""
        stop = frozenset(ends)
        behind: dict[int, Tensor] = {}
        waiting = list(tensors)
        while waiting:
            t = waiting.pop()
            if id(t) in behind or self._origins.of(t) is not Origin.BATCH:
                continue
            behind[id(t)] = t
            if id(t) not in stop and not self._is_root(t):
                waiting.extend(t.op.inputs)
        return behind

    def _is_root(self, t: Tensor) -> bool:
        """Tell whether a statistic is taken of the data there."""
        return t.op.type in FUSED or any(
            self._origins.of(source) is None for source in t.op.inputs
        )


def measures_only(op: Operation, origins: Origins, liveness: Liveness) -> bool:
    """Tell whether all that comes of an op of data is statistics of the batch.

    Cost: linear in the ops between it and the statistics.
    """
    waiting, seen = [op], {op}
    while waiting:
        op = waiting.pop()
        if origins.of(op.outputs[0]) is Origin.BATCH if op.outputs else False:
            continue
        readers = liveness.readers(op)
        if op.type not in _MEASURING or not readers:
            return False
        waiting += [reader for reader in readers if reader not in seen]
        seen |= readers
    return True


_MEASURING = frozenset(
    ("Cast", "Identity", "Mul", "Square", "SquaredDifference", "StopGradient", "Sub")
)


def with_moving(tensor: Tensor, reads: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return a parameter computed from moving statistics.

    Args:
        tensor: the parameter, computed from statistics of the batch.
        reads: pairs (statistic, moving one).

    Cost: linear in the ops between the statistics and the parameter.
    """
    new = {id(old): made for old, made in reads}
    ops: dict[Operation, None] = {}
    waiting = [tensor]
    while waiting:
        t = waiting.pop()
        if id(t) not in new and t.op not in ops:
            ops[t.op] = None
            waiting.extend(t.op.inputs)
    for op in topological_sort(ops):
        inputs = [new.get(id(t), t) for t in op.inputs]
        if all(a is b for a, b in zip(inputs, op.inputs, strict=True)):
            continue
        node_def = op.node_def
        node_def.name = absolute_unique_name(op.graph, f"{op.name}_moving_fold")
        made = make_op(op.graph, node_def, inputs)
        new.update((id(a), b) for a, b in zip(op.outputs, made.outputs, strict=True))
    return new.get(id(tensor), tensor)


def _is_vector(tensor: Tensor, like: Tensor) -> bool:
    return tensor.shape.rank == 1 and tensor.shape.as_list() == like.shape.as_list()


def _last(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that no other one is computed from, if there is just one."""
    read = {id(t) for last in tensors for t in last.op.inputs}
    ends = [t for t in tensors if id(t) not in read]
    return ends[0] if len(ends) == 1 else None
