"""Folds whose result is asked for: the op that makes it stays, and reads other tensors.

What is fetched by name, returned by a function that is being traced, or read by nobody
yet is held by someone who does not see that another tensor took its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from geutil.batchnorm.folds import Fold
from geutil.batchnorm.links import Link
from geutil.batchnorm.waiting import build_waiting
from geutil.graph.edits import InputEdit, apply_edits
from geutil.graph.function_results import results_of
from geutil.graph.kinds import Graph, Operation, Tensor
from geutil.graph.op_types import BIAS_ADDITIONS
from geutil.graph.staleness import check_editable
from geutil.graph.surroundings import count_ops, ops_since, surroundings_of
from geutil.transform.rewrite.liveness import Liveness


def can_stay(fold: Fold) -> bool:
    """Tell whether the end of a fold can read what is folded: if it adds something."""
    link = _last(fold)
    if link is None or link.step is None:
        # The layer has no bias, and gets none if the norm shifts by nothing.
        return False
    step = link.step
    return step.op.type in BIAS_ADDITIONS or (step.op.type == "Sub" and step.index == 0)


def held_ends(
    graph: Graph, folds: Iterable[Fold], kept: Iterable[Tensor] = ()
) -> frozenset[Operation]:
    """Return the ends of folds that somebody holds.

    Args:
        graph: the graph of the folds.
        folds: folds whose ends can stay.
        kept: tensors that are held besides the results of the graph.

    Cost: linear in the readers of the ends.
    """
    liveness = Liveness(graph)
    named = {t.op for t in (*results_of(graph), *kept)}
    ends = (fold.end for fold in folds)
    return frozenset(end for end in ends if end in named or not liveness.readers(end))


def build_in_place(fold: Fold) -> Operation | None:
    """Fold norms, and let the end of the fold read the layer and its bias.

    Args:
        fold: a fold whose end `can_stay`.

    Returns:
        The end; None, and nothing is changed, if what was built does not end in a sum.
    """
    end = fold.end
    graph = end.graph
    link = _last(fold)
    if link is None:
        return None
    check_editable(graph, [end])
    before = count_ops(graph)
    liveness = Liveness(graph)
    made = build_waiting(fold).op
    if made.type not in BIAS_ADDITIONS:
        liveness.abandon(ops_since(graph, before))
        return None
    let_stay(link, made, _for_end(end, made, made.inputs[1]), _replaced(fold))
    return end


def let_stay(
    last: Link, made: Operation, bias: Tensor, replaced: Iterable[Operation]
) -> None:
    """Let the end of a fold read the folded layer and its bias.

    Args:
        last: the end: a sum.
        made: the sum that was built for it, which is not needed any more.
        bias: the bias in the form in which the end reads one.
        replaced: the ops that were folded, which count no more if nobody reads them.
    """
    end, graph = last.op, last.op.graph
    data = made.inputs[0]
    edits = [InputEdit(end, last.index, data), InputEdit(end, 1 - last.index, bias)]
    apply_edits(graph, edits)
    liveness = Liveness(graph)
    liveness.abandon([made])
    liveness.retire(replaced, lambda op: op is end)


def _last(fold: Fold) -> Link | None:
    """Return the link that ends a fold; None if the layer itself does."""
    links = fold.bias if fold.forward else fold.links
    return links[-1] if links else None


def _for_end(end: Operation, made: Operation, bias: Tensor) -> Tensor:
    """Return a bias in the form in which the end of a fold reads one."""
    channels_first = made.type == "BiasAdd" and made.get_attr("data_format") != b"NHWC"
    with surroundings_of(end):
        if end.type != "BiasAdd" and channels_first:
            behind = made.outputs[0].shape.rank - 2
            bias = _reshaped(bias, [-1] + [1] * behind)
        return _negated(bias) if end.type == "Sub" else bias


def _value(bias: Tensor) -> Any:
    """Return the value of a constant that waits for nothing, else None."""
    return None if bias.op.control_inputs else tf.get_static_value(bias)


def _reshaped(bias: Tensor, shape: Sequence[int]) -> Tensor:
    value = _value(bias)
    if value is None:
        return tf.reshape(bias, shape)
    return tf.constant(value.reshape(shape), bias.dtype, name="bias_fold")


def _negated(bias: Tensor) -> Tensor:
    value = _value(bias)
    if value is None:
        return tf.negative(bias)
    return tf.constant(-value, bias.dtype, name="bias_fold")


def _replaced(fold: Fold) -> list[Operation]:
    return [fold.layer.op, *(link.op for link in fold.links if link.op is not fold.end)]
