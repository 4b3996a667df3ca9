"""Weights rounded layer by layer, by what the layers make of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph.edits import transaction
from geutil.graph.types import Operation, Tensor
from geutil.quantize import partial_copy
from geutil.quantize.calibration.ranges import (
    RangeSite,
    frozen,
    range_values,
    unquantized,
    variable_values,
)
from geutil.quantize.planning.network import Edge, Network
from geutil.quantize.rounding import solvers
from geutil.quantize.rounding.corrections import Correction, corrected
from geutil.quantize.rounding.solvers import Grid
from geutil.quantize.rounding.stages import Stages
from geutil.quantize.rounding.targets import NotRounded, Target, find_targets

Array = np.ndarray[Any, Any]

_DAMPING = 0.01
_MOST_ROWS = 4096
_STEPS = 400


class Moments:
    """Means and products of the rows that a layer reads, exact and simulated.

    Args:
        sizes: how many groups and inputs there are.
        centred: whether products are of differences to the mean.

    Attributes:
        exact_mean: [groups, inputs].
        simulated_mean: the same.
        hessian: the mean of x^T x of simulated rows, [groups, inputs, inputs].
        cross: the mean of x^T y of simulated rows x and exact rows y.
    """

    def __init__(self, rows: Sequence[tuple[Array, Array]], centred: bool) -> None:
        exact, simulated = (
            np.concatenate([part[which] for part in rows], 1) for which in range(2)
        )
        self.count = exact.shape[1]
        self.exact_mean = exact.mean(1, dtype=np.float64)
        self.simulated_mean = simulated.mean(1, dtype=np.float64)
        if centred:
            exact = exact - self.exact_mean[:, None].astype(np.float32)
            simulated = simulated - self.simulated_mean[:, None].astype(np.float32)
        turned = simulated.swapaxes(1, 2)
        self.hessian = (turned @ simulated).astype(np.float64) / self.count
        self.cross = (turned @ exact).astype(np.float64) / self.count


def round_weights(
    model: Any,
    sites: Sequence[RangeSite],
    samples: Sequence[Mapping[str, Any]],
    method: str,
    correct_bias: bool,
    opts: Any = None,
) -> Any:
    opts = opts or {}
    graph = model.graph
    network = Network(graph, model.outputs.values())
    entries = find_targets(network, sites)
    targets = [e for e in entries if isinstance(e, Target)]
    with transaction(graph):
        edges = [(t.site.name, [Edge(t.simulation, 0)]) for t in targets]
        edges += [
            (f"{t.layer.op.name}/bias", [t.bias]) for t in targets if t.bias is not None
        ]
        corrections = corrected(graph, edges, model.variables)
        weight_corrections = corrections[: len(targets)]
        rest = iter(corrections[len(targets) :])
        bias_corrections = [None if t.bias is None else next(rest) for t in targets]
        values = range_values(graph) | variable_values(graph)
        weights = partial_copy.values_of(
            [t.simulation.inputs[0].op.inputs[0] for t in targets], unquantized
        )
        stages = Stages(
            graph, model.inputs, [t.layer for t in targets], samples, frozen(values)
        )
        random = np.random.default_rng(0)
        log = []
        for index, target in enumerate(targets):
            data = stages.data_of(index)
            rows = []
            for exact, simulated in zip(data.exact, data.simulated, strict=True):
                pair = [target.rows.rows(x) for x in (exact, simulated)]
                count = pair[0].shape[1]
                most = max(_MOST_ROWS, 2 * target.rows.sizes[1]) // len(data.exact)
                if count > most:
                    chosen = np.sort(random.choice(count, most, replace=False))
                    pair = [tf.gather(p, chosen, axis=1) for p in pair]
                rows.append(tuple(p.numpy() for p in pair))
            has_bias = target.bias is not None and correct_bias
            moments = Moments(rows, has_bias)
            ends = target.site.read()
            grid = target.grid(ends)
            exact_weights = target.rows.matrices(target.to_kernel(weights[index]))
            nearest = grid.nearest(exact_weights)
            clip = opts.get("clip")
            if clip:
                hc = solvers.damped(moments.hessian, opts.get("damping", _DAMPING))
                factors = np.linspace(0.4, 1.0, 13)[::-1] if clip != "full" else np.linspace(0.5, 1.0, 6)[::-1]
                best = None
                axes = target.site.form.axes
                for f in factors:
                    g = Grid(grid.low * np.float32(f), grid.step * np.float32(f), grid.most)
                    if clip == "full":
                        d = solvers.gptq(hc, exact_weights, g) - exact_weights
                        e = solvers.squared_error(hc, d)[:, None, :]
                        e = np.broadcast_to(e / d.shape[1], d.shape)
                    else:
                        e = (g.nearest(exact_weights) - exact_weights) ** 2
                        if clip == "imp":
                            e = e * np.einsum("gii->gi", hc)[:, :, None]
                    e = target.from_kernel(target.rows.weights(e))
                    e = e.reshape(-1, e.shape[-1]).sum(0) if axes else e.sum()
                    if best is None:
                        best, chosen = e, np.ones_like(e)
                    else:
                        chosen = np.where(e < best, f, chosen)
                        best = np.minimum(e, best)
                new_ends = [np.asarray(end * chosen, np.float32) for end in ends]
                target.site.set(new_ends)
                for t, end in zip(list(target.simulation.inputs)[1:], new_ends):
                    values[t.op] = end
                grid = target.grid(type(ends)(*new_ends))
            h = solvers.damped(moments.hessian, opts.get("damping", _DAMPING))
            wanted = exact_weights
            if opts.get("asym"):
                ha = solvers.damped(moments.hessian, opts["asym"])
                wanted = exact_weights + np.linalg.solve(
                    ha, (moments.cross - moments.hessian) @ exact_weights
                )
            if method == "gptq":
                result = solvers.gptq(h, wanted, grid)
                if opts.get("descend"):
                    result = solvers.descended(h, wanted, result, grid)
            elif method == "adaround":
                result = solvers.adaround(h, wanted, grid, opts.get("steps", _STEPS))
            else:
                result = nearest
            before = solvers.squared_error(moments.hessian, nearest - wanted).sum()
            after = solvers.squared_error(moments.hessian, result - wanted).sum()
            log.append((target.layer.op.name, before, after))
            offset = target.from_kernel(target.rows.weights(result)) - weights[index]
            values[weight_corrections[index].read] = offset.astype(np.float32)
            weight_corrections[index].set(offset)
            correction = bias_corrections[index]
            if correction is not None and correct_bias:
                shift = np.einsum("gi,gio->go", moments.exact_mean, exact_weights)
                shift -= np.einsum("gi,gio->go", moments.simulated_mean, result)
                value = shift.reshape(correction.variable.shape).astype(np.float32)
                values[correction.read] = value
                correction.set(value)
    return log
