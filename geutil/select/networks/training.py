"""Ops that belong to gradients and optimizers."""

from __future__ import annotations

import re

from geutil.graph.kinds import Graph, Operation

_UPDATES = re.compile(r"^(Resource)?(Sparse)?Apply[A-Z]|^ResourceSparseApply")
_GRADIENTS = re.compile(
    r"^(Conv2DBackpropFilter|Conv3DBackpropFilterV2|.*Grad(V\d|WithArgmax)?|"
    r"DepthwiseConv2dNativeBackprop\w+)$"
)
# The gradient of nothing: it is asked for in the forward graph.
_FORWARD = frozenset(("StopGradient", "PreventGradient"))


def training_ops(graph: Graph) -> list[Operation]:
    """Return the ops that compute gradients, or apply them to variables.

    Those of optimizers first. Gradients whose ops are of types of their own are found,
    as those of convolutions, Relus and biases are.

    Cost: linear in the ops.
    """
    ops = graph.get_operations()
    kinds = {op.type for op in ops} - _FORWARD
    updates = {kind for kind in kinds if _UPDATES.search(kind)}
    gradients = {kind for kind in kinds if _GRADIENTS.search(kind)}
    return [op for op in ops if op.type in updates] + [
        op for op in ops if op.type in gradients
    ]
