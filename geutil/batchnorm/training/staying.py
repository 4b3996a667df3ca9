"""Folds for training whose end stays, since somebody may hold its result.

What nobody reads yet is held by the caller, who will build a loss on it or fetch it; an
output of a function is held by the function. Where the norm ends in a sum, that op can
read the folded layer and its bias. No other op can stand in for a fused norm.
"""

from __future__ import annotations

from math import prod

import tensorflow as tf

from geutil.batchnorm.ending import let_stay
from geutil.batchnorm.training.building import Built, TrainingFold
from geutil.graph.op_types import ADDITIONS
from geutil.graph.surroundings import surroundings_of


def can_stay(fold: TrainingFold) -> bool:
    """Tell whether the end adds each channel's number to what it reads."""
    step = fold.statistics.norm.steps[-1]
    if fold.end.type not in ADDITIONS or step.operand is None:
        return False
    layer, shape = fold.layer, step.operand.shape
    count = prod(layer.sizes(layer.outputs) or [0])
    return bool(shape.is_fully_defined() and shape.num_elements() == count)


def stay(fold: TrainingFold, built: Built) -> None:
    """Let the end of a fold read the folded layer and its bias.

    Args:
        fold: a fold whose end can stay.
        built: what was built for it; the sum there is not needed any more.
    """
    last, made = fold.links[-1], built.result.op
    with surroundings_of(last.op):
        # TensorFlow lets an op read another tensor only if that has the same shape.
        bias = tf.reshape(made.inputs[1], last.op.inputs[1 - last.index].shape)
    inside = [step.op for step in fold.statistics.norm.steps[:-1]]
    let_stay(last, made, bias, inside)
