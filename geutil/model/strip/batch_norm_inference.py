"""Batch norms in training mode turned to inference: they read moving averages.

Which variables are the moving averages, the updates tell: an assignment that moves a
variable towards the very mean or variance that the norm uses. Names play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import adjacency, creation
from geutil.graph.types import MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import short_name
from geutil.model.strip.report import Stripped
from geutil.model.strip.strip_options import StripOptions, live_ops
from geutil.model.to_graph import GraphParts
from geutil.reroute.tensors import reroute_ts
from geutil.select.networks import batch_norms, moving_averages
from geutil.select.networks.batch_norms import SHAPING, BatchMoments
from geutil.select.networks.moving_averages import MovingVariable
from geutil.select.walks import get_forward_walk_ops


@dataclass
class Turned:
    """The fate of the batch norms."""

    entries: list[Stripped] = field(default_factory=list)
    # The updates of moving averages of batch norms that were turned: for the name of
    # each the norm.
    updates: dict[str, str] = field(default_factory=dict)
    # Those of batch norms that were kept, likewise.
    kept_updates: dict[str, str] = field(default_factory=dict)
    # For the name of each fused batch norm the names of the tensors that are its mean
    # and variance now; the attributes of an op in a graph cannot change, so this is for
    # its program.
    fused: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Source:
    """Where the value of a statistic at inference comes from."""

    name: str
    value: Tensor


def turn_batch_norms(
    parts: GraphParts, options: StripOptions, variable_names: Mapping[int, str]
) -> Turned:
    """Turn the batch norms of a graph to inference, in place."""
    live, norms = _norms(parts)
    averages = _by_statistic(moving_averages.moving_averages(parts.graph))
    turned = Turned()
    chosen: list[tuple[BatchMoments, _Source, _Source]] = []
    faults: list[str] = []
    for norm in norms:
        pair = (averages.get(norm.mean, []), averages.get(norm.variance, []))
        updates = {average.update.name: norm.name for side in pair for average in side}
        if options.keeps(norm.name):
            turned.entries.append(_kept(norm))
            turned.kept_updates |= updates
            continue
        sources = _sources(parts, norm, pair, options, variable_names)
        if isinstance(sources, str):
            faults.append(f"'{norm.name}': {sources}")
            continue
        chosen.append((norm, *sources))
        turned.entries.append(_turned(norm, *sources))
        turned.updates |= updates
    _check_names(options, norms)
    if not faults:
        _apply(parts, chosen, live, turned)
        faults = _left(parts, options, turned, averages)
    if faults:
        statistics = Words(
            "pass statistics={name: (mean, variance)} with the names of their "
            "variables, or keep=[name]"
        )
        raise ModelError(
            "batch norms in training mode cannot be turned to inference: "
            f"{'; '.join(faults)}",
            remedy=f"{statistics} to leave them as they are",
        )
    return turned


def _left(
    parts: GraphParts,
    options: StripOptions,
    turned: Turned,
    averages: Mapping[Tensor, list[MovingVariable]],
) -> list[str]:
    """Return the ops that still depend on the batch, in words."""
    live, norms = _norms(parts)
    faults = [
        f"'{norm.name}': its statistics are still read"
        for norm in norms
        if norm.name not in turned.fused and not options.keeps(norm.name)
    ]
    claimed = {**turned.updates, **turned.kept_updates}
    claimed_averages = (
        a for group in averages.values() for a in group if a.update.name in claimed
    )
    faults += [
        f"'{update.name}' moves a variable towards '{tensor.name}', which outputs are "
        "computed from and which is no statistic of a batch norm that geutil knows"
        for update, tensor in moving_averages.unknown_averages(
            parts.graph, live, claimed_averages
        )
        if not options.keeps(update.name)
    ]
    return faults


def _norms(parts: GraphParts) -> tuple[frozenset[Operation], list[BatchMoments]]:
    live = live_ops(parts)
    fed = frozenset(get_forward_walk_ops(list(parts.inputs.values())))
    ordered = [op for op in parts.graph.get_operations() if op in live]
    return live, list(batch_norms.batch_moments(ordered, fed))


def _by_statistic(
    averages: Iterable[MovingVariable],
) -> MutableIdentityMap[list[MovingVariable]]:
    averages_of: MutableIdentityMap[list[MovingVariable]] = MutableIdentityMap()
    for average in averages:
        if average.statistic not in averages_of:
            averages_of[average.statistic] = []
        averages_of[average.statistic].append(average)
    return averages_of


def _check_names(options: StripOptions, norms: list[BatchMoments]) -> None:
    norm_names = [norm.name for norm in norms]
    for name in options.statistics:
        if name not in norm_names:
            raise ModelError(
                f"statistics: '{name}' is no batch norm in training mode; these are: "
                f"{norm_names}"
            )


def _kept(norm: BatchMoments) -> Stripped:
    return Stripped("kept", "batch norm", norm.name, "it is in keep")


def _turned(norm: BatchMoments, mean: _Source, variance: _Source) -> Stripped:
    reason = f"it reads the moving mean '{mean.name}' and variance '{variance.name}'"
    return Stripped("turned", "batch norm", norm.name, reason)


def _sources(
    parts: GraphParts,
    norm: BatchMoments,
    pair: tuple[list[MovingVariable], list[MovingVariable]],
    options: StripOptions,
    variable_names: Mapping[int, str],
) -> tuple[_Source, _Source] | str:
    """Return where mean and variance come from at inference, or why it is unknown."""
    variables = options.statistics.get(norm.name)
    if variables is not None:
        with creation.neutral(parts.graph):
            mean, variance = (
                _Source(
                    variable_names[id(v.handle)],
                    tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype),
                )
                for v in variables
            )
        return mean, variance
    sources = []
    for what, averages in zip(("mean", "variance"), pair, strict=True):
        if not averages:
            return f"nothing that runs moves a variable towards its {what}"
        handles = [a.variable for a in averages]
        names = [variable_names.get(id(h), h.op.name) for h in handles]
        if len({id(a.variable) for a in averages}) > 1:
            return f"{names} are all moving averages of its {what}"
        sources.append(_Source(names[0], _read(averages[0])))
    return sources[0], sources[1]


def _read(average: MovingVariable) -> Tensor:
    """Return the variable's value, read without waiting for anything."""
    if average.value is not None and not average.value.op.control_inputs:
        return average.value
    dtype = average.update.get_attr("dtype")
    with creation.neutral(average.update.graph):
        handle = average.variable
        value: Tensor = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return value


def _apply(
    parts: GraphParts,
    chosen: list[tuple[BatchMoments, _Source, _Source]],
    live: frozenset[Operation],
    turned: Turned,
) -> None:
    for norm, _, variance in chosen:
        _redirect(norm, norm.variance, variance.value, live)
    # Who computes the variances needs the means; now those do not count any more.
    live = live_ops(parts)
    for norm, mean, variance in chosen:
        _redirect(norm, norm.mean, mean.value, live)
        if norm.fused is not None:
            with creation.neutral(parts.graph):
                turned.fused[norm.name] = (
                    _fitted(mean.value, norm.mean).name,
                    _fitted(variance.value, norm.variance).name,
                )


def write_fused(graph_def: Any, fused: Mapping[str, tuple[str, str]]) -> None:
    """Turn the fused batch norms of a `GraphDef` to inference, in place."""
    for node in graph_def.node:
        if node.name in fused:
            node.attr["is_training"].b = False
            node.attr.pop("exponential_avg_factor", None)
            node.input[3], node.input[4] = map(short_name, fused[node.name])


def _redirect(
    norm: BatchMoments, statistic: Tensor, value: Tensor, live: frozenset[Operation]
) -> None:
    """Let whoever reads a statistic, in whatever shape, read a variable's value."""
    shapes = [statistic]
    for tensor in shapes:
        readers = [op for op in adjacency.consumers(tensor) if op in live]
        if tensor.dtype != value.dtype or not _same_shape(tensor, value):
            passing = [op for op in readers if op.type in SHAPING]
            shapes += [op.outputs[0] for op in passing if op.inputs[0] is tensor]
            readers = [op for op in readers if op.type not in SHAPING]
        if not readers:
            continue
        if not _fits(value, tensor):
            keep = Words(f"keep=['{norm.name}']", norm.name)
            raise ModelError(
                f"batch norm '{norm.name}': what is moved towards "
                f"'{statistic.name}' has shape {value.shape}, and '{tensor.name}' "
                f"{tensor.shape}; pass {keep} to leave it as it is"
            )
        with creation.neutral(tensor.graph):
            reroute_ts(_fitted(value, tensor), tensor, can_modify=readers)


def _same_shape(tensor: Tensor, value: Tensor) -> bool:
    rank = value.shape.rank
    return rank is not None and (
        tensor.shape.rank == rank and value.shape.is_compatible_with(tensor.shape)
    )


def _fits(value: Tensor, like: Tensor) -> bool:
    if value.shape.is_compatible_with(like.shape):
        return True
    return (
        like.shape.is_fully_defined()
        and value.shape.num_elements() == like.shape.num_elements()
    )


def _fitted(value: Tensor, like: Tensor) -> Tensor:
    """Return a value in the dtype and shape of a statistic."""
    if value.dtype != like.dtype:
        value = tf.cast(value, like.dtype)
    if not value.shape.is_compatible_with(like.shape):
        value = tf.reshape(value, like.shape)
    return value
