"""The ranges that a graph reads from variables, and what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.function_graphs import bindings
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.quantize.applying.variables import LEARNT
from geutil.quantize.arithmetic import Range
from geutil.quantize.finding.kernels import FAKE_QUANT
from geutil.quantize.spec import Format
from geutil.select.networks.origins import Origins
from geutil.transform.rewrite.liveness import Liveness

_ENDS = "/min"


@dataclass(eq=False)
class Site:
    """A range, and what is quantized with it.

    Attributes:
        name: the name of the range.
        low: the handle of the variable that holds its low end.
        high: that of the high end.
        form: how values are stored.
        is_weights: whether it is the range of weights.
        ops: the FakeQuant ops.
        learnt: the variable that counts its moving average in training, if there is
            one.
    """

    name: str
    low: Any
    high: Any
    form: Format
    is_weights: bool
    ops: list[Operation] = field(default_factory=list)
    learnt: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """What is quantized."""
        return [op.inputs[0] for op in self.ops]

    def read(self) -> Range:
        """Return the range as it is."""
        low, high = (
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy()
            for handle in (self.low, self.high)
        )
        return Range(low, high)

    def set(self, ends: Range) -> None:
        """Set the range."""
        for handle, value in zip((self.low, self.high), ends, strict=True):
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=np.asarray(value, np.float32)
            )
        if self.learnt is not None:
            # Else the next step of training would begin anew.
            self.learnt.assign(1.0)


def find_sites(graph: Graph, variables: Mapping[str, Any]) -> list[Site]:
    """Return the ranges that FakeQuant ops of a FuncGraph read from variables.

    Args:
        graph: the graph.
        variables: its variables by name.

    Cost: linear in ops and edges.
    """
    outside = MutableIdentityMap((inside, ext) for ext, inside in bindings(graph))
    names = {id(v.handle): name for name, v in variables.items()}
    origins = Origins(graph)
    found: dict[int, Site] = {}
    for op in live_simulations(graph):
        if len(op.inputs) != 3:
            continue
        low, high = (outside.get(variable_behind(t)) for t in op.inputs[1:])
        if low is None or high is None:
            continue
        site = found.get(id(low))
        if site is None:
            name = names.get(id(low), op.name).removesuffix(_ENDS)
            is_weights = origins.is_parameter(op.inputs[0])
            site = Site(name, low, high, _format(op), is_weights)
            site.learnt = variables.get(f"{name}/{LEARNT}")
            found[id(low)] = site
        site.ops.append(op)
    return list(found.values())


def live_simulations(graph: Graph) -> list[Operation]:
    """Return the FakeQuant ops of a graph, but for those that rewrites retired."""
    live = Liveness(graph)
    ops = graph.get_operations()
    return [op for op in ops if op.type in FAKE_QUANT and not live.is_retired(op)]


def _format(op: Operation) -> Format:
    narrow = bool(op.get_attr("narrow_range"))
    # The op knows the last axis alone; what it reads was reshaped to have it there.
    axes = (op.inputs[0].shape.rank - 1,) if op.type.endswith("PerChannel") else ()
    return Format(int(op.get_attr("num_bits")), narrow, narrow, axes)


def variable_behind(end: Tensor) -> Tensor | None:
    """Return the handle of the variable that an end of a range is in."""
    op = end.op
    if op.type == "ReadVariableOp":
        return op.inputs[0]
    # In training: an Identity of what was assigned just before.
    for waited in op.control_inputs:
        if waited.type == "AssignVariableOp" and waited.inputs[1] is op.inputs[0]:
            return waited.inputs[0]
    return None
