"""Folds whose end stays, since somebody may hold its result.

What nobody reads yet is held by the caller, who will build a loss on it or fetch it; an
output of a function is held by the function. Where the norm ends in a sum, that op can
read the folded layer and its bias. No other op can stand in for a fused norm.
"""

from __future__ import annotations

from math import prod

import tensorflow as tf

from geutil.batchnorm.training.building import Built, TrainingFold
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.kinds import Graph, Operation
from geutil.graph.surroundings import surroundings_of
from geutil.transform.rewrite.liveness import Liveness

_SUMS = frozenset(("Add", "AddV2"))


def held_ends(graph: Graph, folds: list[TrainingFold]) -> frozenset[Operation]:
    """Return the ends of folds that are held and can stay."""
    liveness = Liveness(graph)
    results = {t.op for t in getattr(graph, "outputs", ())}
    return frozenset(
        fold.end
        for fold in folds
        if _is_sum(fold) and (fold.end in results or not liveness.readers(fold.end))
    )


def _is_sum(fold: TrainingFold) -> bool:
    """Tell whether the end adds each channel's number to what it reads."""
    step = fold.statistics.norm.steps[-1]
    if fold.end.type not in _SUMS or step.operand is None:
        return False
    layer, shape = fold.layer, step.operand.shape
    count = prod(layer.sizes(layer.outputs) or [0])
    return bool(shape.is_fully_defined() and shape.num_elements() == count)


def let_stay(fold: TrainingFold, built: Built) -> None:
    """Let the end of a fold read the folded layer and its bias.

    Args:
        fold: a fold whose end can stay.
        built: what was built for it; the sum there is not needed any more.
    """
    end, made = fold.end, built.result.op
    graph = end.graph
    data, bias = made.inputs
    index = fold.statistics.norm.steps[-1].index
    with surroundings_of(end):
        # TensorFlow lets an op read another tensor only if that has the same shape.
        bias = tf.reshape(bias, end.inputs[1 - index].shape)
    apply_edits(graph, [InputEdit(end, index, data), InputEdit(end, 1 - index, bias)])
    liveness = Liveness(graph)
    liveness.abandon([made])
    liveness.retire(
        [step.op for step in fold.statistics.norm.steps[:-1]], lambda op: op is end
    )
