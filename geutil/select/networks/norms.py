"""Norms of examples that are written as norms of a batch."""

from __future__ import annotations

from geutil.graph.kinds import Operation, Tensor
from geutil.select.walks import get_backward_walk_ops

FUSED = frozenset(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"))
# Where the shape of the data is known it is a constant; its product is not folded.
_LENGTHS = frozenset(("Prod", "Shape", "ShapeN", "Size"))


def is_layer_norm(op: Operation) -> bool:
    """Tell whether a fused batch norm normalizes each example by itself.

    So tf_keras writes a layer norm: examples become the channels of a batch of one,
    scaled by ones and shifted by zeros, as many as there are examples. No parameter and
    no moving average has such a length, so no batch norm looks like this.

    Cost: linear in the ops that compute the length.
    """
    if op.type not in FUSED or not op.get_attr("is_training"):
        return False
    if not op.get_attr("data_format").startswith(b"NC"):
        return False
    data, scale, offset = op.inputs[:3]
    # The batch went into the channels.
    shape = data.shape
    if data.op.type != "Reshape" or shape.rank is None or shape[0] != 1:
        return False
    if any(statistic.consumers() for statistic in op.outputs[1:3]):
        return False
    return _is_as_long_as_data(scale) and _is_as_long_as_data(offset)


def _is_as_long_as_data(t: Tensor) -> bool:
    """Tell whether a vector of one value has a length that is computed."""
    if t.op.type != "Fill":
        return False
    behind = get_backward_walk_ops([t.op.inputs[0].op])
    return any(op.type in _LENGTHS for op in behind)
