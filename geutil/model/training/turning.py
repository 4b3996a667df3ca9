"""Batch norms in training mode turned to inference: they read moving averages.

Which variables are the moving averages, the updates tell: an assignment that moves a
variable towards the very mean or variance that the norm uses. Names play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.graph.adjacency import consumers, control_inputs
from geutil.graph.identity import MutableIdentityMap
from geutil.graph.importing import neutral
from geutil.graph.kinds import Operation, Tensor
from geutil.model.errors import ModelError
from geutil.model.materializing import Parts
from geutil.model.training.axes import SHAPING
from geutil.model.training.moving import MovingAverage, moving_averages
from geutil.model.training.norms import BatchNorm, batch_norms
from geutil.model.training.options import Options
from geutil.model.training.report import Stripped
from geutil.model.training.working import live_ops
from geutil.reroute.tensors import reroute_ts
from geutil.select.walks import get_forward_walk_ops


@dataclass
class Turned:
    """What became of the batch norms.

    Attributes:
        entries: for the report.
        updates: the updates of moving averages of norms that were turned: for the name
            of each the norm.
        kept_updates: those of norms that were kept, likewise.
    """

    entries: list[Stripped] = field(default_factory=list)
    updates: dict[str, str] = field(default_factory=dict)
    kept_updates: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Source:
    """Where the value of a statistic at inference comes from.

    Attributes:
        name: the name of the variable.
        value: what the variable holds.
    """

    name: str
    value: Tensor


def turn_batch_norms(
    parts: Parts, options: Options, variable_names: Mapping[int, str]
) -> Turned:
    """Turn the batch norms of a graph to inference, in place.

    Args:
        parts: the graph and its ends.
        options: norms to keep, and variables for norms that the graph does not tell.
        variable_names: the names of variables by the identity of their handles, those
            in the graph and those outside.

    Raises:
        ModelError: there is a norm whose moving averages cannot be told; the message
            lists all of them. The graph may have been changed.

    Cost: linear in ops and edges.
    """
    live, norms = _norms(parts)
    averages = _by_statistic(moving_averages(parts.graph))
    turned = Turned()
    chosen: list[tuple[BatchNorm, _Source, _Source]] = []
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
        _apply(parts, chosen, live)
        faults = [
            f"'{norm.name}': its statistics are still read"
            for norm in _norms(parts)[1]
            if not options.keeps(norm.name)
        ]
    if faults:
        raise ModelError(
            "batch norms in training mode cannot be turned to inference: "
            f"{'; '.join(faults)}. Pass statistics={{name: (mean, variance)}} with the "
            "names of their variables, or keep=[name] to leave them as they are"
        )
    return turned


def _norms(parts: Parts) -> tuple[frozenset[Operation], list[BatchNorm]]:
    live = live_ops(parts)
    fed = frozenset(get_forward_walk_ops(list(parts.inputs.values())))
    ordered = [op for op in parts.graph.get_operations() if op in live]
    return live, list(batch_norms(ordered, fed))


def _by_statistic(
    averages: Iterable[MovingAverage],
) -> MutableIdentityMap[list[MovingAverage]]:
    found: MutableIdentityMap[list[MovingAverage]] = MutableIdentityMap()
    for average in averages:
        if average.statistic not in found:
            found[average.statistic] = []
        found[average.statistic].append(average)
    return found


def _check_names(options: Options, norms: list[BatchNorm]) -> None:
    known = [norm.name for norm in norms]
    for name in options.statistics:
        if name not in known:
            raise ModelError(
                f"statistics: '{name}' is no batch norm in training mode; these are: "
                f"{known}"
            )


def _kept(norm: BatchNorm) -> Stripped:
    return Stripped("kept", "batch norm", norm.name, "it is in keep")


def _turned(norm: BatchNorm, mean: _Source, variance: _Source) -> Stripped:
    reason = f"it reads the moving mean '{mean.name}' and variance '{variance.name}'"
    return Stripped("turned", "batch norm", norm.name, reason)


def _sources(
    parts: Parts,
    norm: BatchNorm,
    pair: tuple[list[MovingAverage], list[MovingAverage]],
    options: Options,
    variable_names: Mapping[int, str],
) -> tuple[_Source, _Source] | str:
    """Return where mean and variance come from at inference, or why it is unknown."""
    given = options.statistics.get(norm.name)
    if given is not None:
        with neutral(parts.graph):
            mean, variance = (
                _Source(
                    variable_names[id(v.handle)],
                    tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype),
                )
                for v in given
            )
        return mean, variance
    sources = []
    for what, averages in zip(("mean", "variance"), pair, strict=True):
        if not averages:
            return f"nothing that runs moves a variable towards its {what}"
        names = [_variable_name(a.handle, variable_names) for a in averages]
        if len({id(a.handle) for a in averages}) > 1:
            return f"{names} are all moving averages of its {what}"
        sources.append(_Source(names[0], _read(averages[0])))
    return sources[0], sources[1]


def _variable_name(handle: Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(handle), handle.op.name)


def _read(average: MovingAverage) -> Tensor:
    """Return the variable's value, read without waiting for anything."""
    if average.read is not None and not average.read.op.control_inputs:
        return average.read
    dtype = average.update.get_attr("dtype")
    with neutral(average.update.graph):
        value: Tensor = tf.raw_ops.ReadVariableOp(resource=average.handle, dtype=dtype)
    return value


def _apply(
    parts: Parts,
    chosen: list[tuple[BatchNorm, _Source, _Source]],
    live: frozenset[Operation],
) -> None:
    ends = frozenset(parts.sinks.values())
    for norm, mean, variance in chosen:
        if norm.fused is not None:
            _unfuse_training(norm.fused, mean.value, variance.value)
        _redirect(norm, norm.variance, variance.value, live, ends)
    # Who computes the variances needs the means; now those do not count any more.
    live = live_ops(parts)
    for norm, mean, _ in chosen:
        _redirect(norm, norm.mean, mean.value, live, ends)


def _unfuse_training(op: Operation, mean: Tensor, variance: Tensor) -> None:
    """Let the readers of a fused batch norm read one that takes the statistics."""
    x, scale, offset = list(op.inputs)[:3]
    make: Any = getattr(tf.raw_ops, op.type)
    with neutral(op.graph), tf.device(op.device or None):
        waited = control_inputs(op)
        with op.graph.control_dependencies(waited):
            results = make(
                x=x,
                scale=scale,
                offset=offset,
                mean=_fitted(mean, op.outputs[1]),
                variance=_fitted(variance, op.outputs[2]),
                epsilon=op.get_attr("epsilon"),
                data_format=op.get_attr("data_format").decode(),
                is_training=False,
                name=f"{op.name}_inference",
            )
    reroute_ts(results[0], op.outputs[0])


def _redirect(
    norm: BatchNorm,
    statistic: Tensor,
    value: Tensor,
    live: frozenset[Operation],
    ends: frozenset[Operation],
) -> None:
    """Let whoever reads a statistic, in whatever shape, read a variable's value."""
    shapes = [statistic]
    for tensor in shapes:
        readers = []
        for op in consumers(tensor):
            passes_on = op.type in SHAPING and op.inputs[0] is tensor
            if passes_on and op not in ends:
                shapes.append(op.outputs[0])
            elif op in live:
                readers.append(op)
        if not readers:
            continue
        if not _fits(value, tensor):
            raise ModelError(
                f"batch norm '{norm.name}': what is moved towards "
                f"'{statistic.name}' has shape {value.shape}, and '{tensor.name}' "
                f"{tensor.shape}; pass keep=['{norm.name}'] to leave it as it is"
            )
        with neutral(tensor.graph):
            reroute_ts(_fitted(value, tensor), tensor, can_modify=readers)


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
