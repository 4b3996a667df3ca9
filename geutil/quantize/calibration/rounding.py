"""Weights rounded layer by layer, by the layers' results on data.

A layer reads x~, simulated with the decisions on those before it, where the network
without quantization reads x. Its rounded weights Q shall make x~ Q near x W, with its
weights W. The weights that come nearest without rounding, W + (H + D)^-1 (C - H) W with
H = E x~^T x~ and C = E x~^T x, are rounded; D is a part of the mean diagonal of
H, so that few rows of data do not get too much weight. Where there is a bias, it takes
over differences of the means, and H and C are of deviations from them (Nagel et al.
2019, arXiv 1906.04721, section 4.2).

Weights W [inputs, outputs] are rounded to the nearest levels, by GPTQ or by AdaRound.
The last two look for Q that makes the squared error of the results least,

    E |x (Q - W)|^2 = sum over columns of (q - w)^T H (q - w),

each q on the levels of its channel. A part of its mean diagonal makes H invertible.

A decision on a layer changes the data of later ones. So the graph is cut into stages,
one for each layer: an op belongs to the last layer that it depends on. Each stage is
run once for all batches, exact and simulated side by side, from the results that
earlier ones keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import adjacency, creation, functions, op_types
from geutil.graph.edits import undone_on_error
from geutil.graph.types import Graph, Operation, Tensor
from geutil.graph.walks import closure
from geutil.quantize.calibration.ranges import (
    RangeSite,
    frozen,
    unquantized,
    variable_values,
)
from geutil.quantize.calibration.rounding_targets import (
    Correction,
    Grid,
    NotRounded,
    Target,
    corrected,
    find_targets,
)
from geutil.quantize.partial_copy import PartialCopy, Replace
from geutil.quantize.planning.network import Edge, Network
from geutil.quantize.spec import Range, with_stored_steps
from geutil.select.networks.layers import Layer

Array = np.ndarray[Any, Any]

_BLOCK = 128  # inputs whose errors are fed back together: that of the paper of GPTQ
_NOTHING = 1e-10


def damped(hessian: Array, share: float) -> Array:
    """Return Hessians with a share of their mean diagonal added to each of it."""
    # `hessian`: [groups, inputs, inputs].
    diagonal = np.einsum("gii->gi", hessian)
    mean = diagonal.mean(-1, keepdims=True)
    # Values next to nothing beside others are all rounding errors.
    added = share * np.maximum(mean, _NOTHING * mean.max())
    # Data of zeros alone: any rounding is as good as another.
    added = np.where(added > 0, added, 1.0)
    result = hessian.copy()
    np.einsum("gii->gi", result)[...] += added
    return result


def gptq(hessian: Array, weights: Array, grid: Grid) -> Array:
    """Return weights rounded one after the other, each for the errors before it."""
    # The error of weights that are rounded already is made up for by those that are
    # not: with H = R R^T and R upper triangular the error is
    # sum over k of (R_kk d_k + sum over j < k of R_jk d_j)^2,
    # whose terms are made least in order of k, from the input with the largest variance
    # on (Frantar et al. 2022, arXiv 2210.17323; that this is Babai's nearest plane:
    # Chen et al. 2025, arXiv 2507.18553).
    # `hessian`: [groups, inputs, inputs], positive definite.
    # `weights`: [groups, inputs, outputs].
    order = np.argsort(-np.einsum("gii->gi", hessian), axis=1, kind="stable")
    rows = order[:, :, None]
    permuted = np.take_along_axis(
        np.take_along_axis(hessian, rows, 1), order[:, None, :], 2
    )
    factor = np.linalg.cholesky(permuted[:, ::-1, ::-1])[:, ::-1, ::-1]
    feedback = factor / np.einsum("gii->gi", factor)[:, None, :]
    feedback = feedback.astype(np.float32)
    target = np.take_along_axis(weights, rows, 1).astype(np.float32)
    sorted_grid = _taken(grid, rows)
    error = np.zeros_like(target)
    count = target.shape[1]
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        before = feedback[:, :start, start:end].swapaxes(1, 2) @ error[:, :start]
        for k in range(start, end):
            within = np.einsum("gj,gjo->go", feedback[:, start:k, k], error[:, start:k])
            wanted = target[:, k] - before[:, k - start] - within
            rounded = sorted_grid.nearest(wanted, np.s_[:, k])
            error[:, k] = rounded - target[:, k]
    result = np.empty_like(target)
    np.put_along_axis(result, rows, target + error, 1)
    return result


def _taken(grid: Grid, rows: Array) -> Grid:
    shape = (*rows.shape[:2], grid.low.shape[2])
    low, step = (
        np.take_along_axis(np.broadcast_to(a, shape), rows, 1)
        for a in (grid.low, grid.step)
    )
    return Grid(low, step, grid.most)


# Those of Nagel et al. 2020, arXiv 2004.10568: section 3.3 and its implementation.
_STRETCH = (-0.1, 1.1)
# Nagel et al. 2020, arXiv 2004.10568: beta falls from 20 to 2 behind a first fifth.
_STEEP = (20.0, 2.0)
_FREE = 0.2
"""Measured as `_STEPS` was: 24.4, 24.9 and 24.8 dB with 0.1, 0.2 and 0.4."""
_RATE = 0.1
"""Measured likewise: 24.5, 24.9 and 24.9 dB with 0.03, 0.1 and 0.3."""
_WEIGHT = 1.0
"""Measured likewise: 24.8, 24.9 and 24.4 dB with 0.3, 1 and 3."""


def adaround(hessian: Array, weights: Array, grid: Grid, steps: int) -> Array:
    """Return weights rounded up or down as gradient descent finds it best."""
    # A weight is its lower level and h(v) of a step, h a sigmoid that is stretched
    # beyond 0 and 1 and cut off there, and v is learnt with Adam. After a fifth of the
    # steps 1 - |2 h - 1|^b draws h to 0 or 1, the more so the lower b is: it falls from
    # 20 to 2 (Nagel et al. 2020, arXiv 2004.10568, equations 22 to 24).
    # `hessian`: [groups, inputs, inputs].
    # `weights`: [groups, inputs, outputs].
    step = np.where(grid.step > 0, grid.step, np.float32(1.0))
    position = np.clip((weights - grid.low) / step, 0, grid.most)
    lower = np.minimum(np.floor(position), grid.most - 1)
    share = np.clip(position - lower, 0.01, 0.99)
    least, greatest = _STRETCH
    inner = (share - least) / (greatest - least)
    start = np.log(inner / (1 - inner)).astype(np.float32)
    v = _learnt(
        tf.constant(hessian.astype(np.float32)),
        tf.constant(weights.astype(np.float32)),
        tf.constant((grid.low + step * lower).astype(np.float32)),
        tf.constant(np.broadcast_to(grid.step, weights.shape).astype(np.float32)),
        tf.constant(start),
        tf.constant(steps),
    )
    return grid.value(lower + (v.numpy() >= 0.0))


@tf.function(reduce_retracing=True)
def _learnt(
    hessian: Any, weights: Any, floor: Any, step: Any, start: Any, steps: Any
) -> Any:
    """Return the v of each weight after so many steps of Adam."""
    least, greatest = _STRETCH
    first, last = _STEEP
    count = tf.cast(steps, tf.float32)
    rest = weights - floor
    # So that both parts of the loss are per weight, in squared steps.
    scale = tf.reduce_mean(tf.linalg.diag_part(hessian)) * tf.reduce_mean(step**2)
    scale = tf.maximum(scale, 1e-30)
    v, mean, square = start, tf.zeros_like(start), tf.zeros_like(start)
    index = tf.constant(0)
    while index < steps:
        t = tf.cast(index, tf.float32)
        sigmoid = tf.sigmoid(v)
        stretched = sigmoid * (greatest - least) + least
        h = tf.clip_by_value(stretched, 0.0, 1.0)
        inside = tf.cast((stretched > 0.0) & (stretched < 1.0), tf.float32)
        slope = inside * sigmoid * (1.0 - sigmoid) * (greatest - least)
        by_error = 2.0 * tf.matmul(hessian, step * h - rest) * step / scale
        progress = (t / count - _FREE) / (1.0 - _FREE)
        steep = last + 0.5 * (first - last) * (1.0 + tf.cos(np.pi * progress))
        apart = 2.0 * h - 1.0
        by_rule = -2.0 * steep * tf.sign(apart) * tf.abs(apart) ** (steep - 1.0)
        weight = tf.where(progress > 0.0, _WEIGHT, 0.0)
        gradient = (by_error + weight * by_rule) * slope
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        unbiased = mean / (1.0 - 0.9 ** (t + 1.0))
        spread = tf.sqrt(square / (1.0 - 0.999 ** (t + 1.0))) + 1e-8
        v -= _RATE * unbiased / spread
        index += 1
    return v


_FACTORS = np.linspace(1.0, 0.4, 13)
_ROUNDS = 20
"""Measured as `_STEPS` was: with 10, 20 and 40 rounds the noise is the same."""


def min_max(target: Target, ends: Range, weights: Array, hessian: Array) -> Range:
    """Return the range as it is: that of the values."""
    del target, weights, hessian
    return ends


def mse(target: Target, ends: Range, weights: Array, hessian: Array) -> Range:
    """Return the range in which rounding changes the layer's result least."""
    # Of a range from 0.4 times as wide to all of it, the one with the least sum of
    # squared errors of the weights on their nearest levels, each counted by the mean
    # square of what it multiplies.
    # `weights`: [groups, inputs, outputs].
    # `hessian`: [groups, inputs, inputs].
    importance = np.einsum("gii->gi", hessian)[:, :, None]
    least, chosen = np.full(np.shape(ends.low), np.inf), np.ones(np.shape(ends.low))
    for factor in _FACTORS:
        grid = target.grid(_scaled(ends, factor))
        error = importance * (grid.nearest(weights) - weights) ** 2
        total = _by_channel(target.simulated(error), np.shape(ends.low))
        chosen = np.where(total < least, factor, chosen)
        least = np.minimum(total, least)
    return _scaled(ends, chosen)


def octav(target: Target, ends: Range, weights: Array, hessian: Array) -> Range:
    """Return the range with the least error if weights lay evenly within each step."""
    # With b bits, s is where the noise of steps, s^2 4^-b / 3 for each weight inside,
    # and that of clipping balance: s <- sum of |w| outside / (4^-b / 3 inside +
    # outside), by their numbers (Sakr et al. 2022, arXiv 2206.06501, equation 6).
    # `weights`: [groups, inputs, outputs].
    del hessian
    size = np.abs(target.simulated(weights)).astype(np.float64)
    shape = np.shape(ends.low)
    share = 4.0**-target.site.form.bits / 3.0
    bound = _by_channel(size, shape) / np.maximum(_by_channel(size > 0, shape), 1)
    for _ in range(_ROUNDS):
        outside = size > bound
        inside = _by_channel((size > 0) & ~outside, shape)
        weight = share * inside + _by_channel(outside, shape)
        total = _by_channel(np.where(outside, size, 0.0), shape)
        bound = np.where(weight > 0, total / np.maximum(weight, 1e-30), bound)
    low, high = (np.asarray(end, np.float64) for end in ends)
    return Range(
        np.maximum(low, -bound).astype(np.float32),
        np.minimum(high, bound).astype(np.float32),
    )


def _scaled(ends: Range, factor: Any) -> Range:
    low, high = (np.asarray(end * factor, np.float32) for end in ends)
    return Range(low, high)


def _by_channel(values: Array, shape: tuple[int, ...]) -> Array:
    """Return the sums of values over all axes but that of the channels, the last."""
    if not shape:
        return np.asarray(values.sum(dtype=np.float64))
    total: Array = values.reshape(-1, shape[0]).sum(0, dtype=np.float64)
    return total


CLIPPINGS: dict[str, Callable[[Target, Range, Array, Array], Range]] = {
    "min_max": min_max,
    "mse": mse,
    "octav": octav,
}


ROUNDINGS = ("nearest", "gptq", "adaround")
# Bits of float32.
_FLOAT_BITS = 32
_STEPS = 400
"""Measured on three networks (a dense one, attention, separable convolutions) with
weights of 4 bits in ranges by "mse": 23.9, 24.0, 24.9 and 24.6 dB in the mean after
100, 200, 400 and 800 steps. Between neighbours single networks differ by 1 dB."""
_MOST_ROWS = 4096
"""Measured likewise: 512 to 16,384 rows tell no more, within 1.1 dB of each other."""
_DAMPING = 0.05
"""Measured likewise: shares from 0.005 to 0.2 lie within 0.5 dB in the mean."""
_DAMPING_OF_TARGET = 0.3
"""Measured likewise: 24.4, 25.0, 24.4 and 23.6 dB with 0.03, 0.1, 0.3 and 1."""


@dataclass(frozen=True)
class Choice:
    """How weights are rounded."""

    rounding: str  # "nearest", "gptq" or "adaround"
    clipping: str  # how their ranges are chosen: "min_max", "mse" or "octav"
    correct_bias: bool  # whether biases take over differences of the means

    @classmethod
    def of(
        cls,
        rounding: str | None,
        clipping_name: str | None,
        correct_bias: bool | None,
        default: str,
    ) -> Choice:
        """Return a choice, with defaults that fit each other."""
        for what, name, names in (
            ("rounding", rounding, (None, *ROUNDINGS)),
            ("clipping", clipping_name, (None, *CLIPPINGS)),
        ):
            if name not in names:
                known = ", ".join(n for n in names if n is not None)
                raise QuantizeError(f"there is no {what} '{name}'; there are {known}")
        rounding = rounding or default
        by_data = rounding != "nearest"
        return cls(
            rounding,
            clipping_name or ("mse" if by_data else "min_max"),
            by_data if correct_bias is None else bool(correct_bias),
        )

    @property
    def is_plain(self) -> bool:
        """True if weights are left on the nearest levels of the widest range."""
        return self == Choice("nearest", "min_max", False)


@dataclass(frozen=True)
class Rounded:
    """A layer whose weights were rounded to preserve its results on data.

    Attributes:
        op: the layer, by the name of its op.
        op_type: its type.
        before: the mean squared quantization error of the layer's results, due to its
            inputs and to weights on the nearest levels, as a fraction of their
            variance.
        after: the same after rounding.
        moved: the fraction of weights that are not on their nearest level.
        bias: whether its bias was corrected.
    """

    op: str
    op_type: str
    before: float
    after: float
    moved: float
    bias: bool

    def __str__(self) -> str:
        bias = ", bias corrected" if self.bias else ""
        return (
            f"noise / variance {self.before:.3g}, now {self.after:.3g}; "
            f"{self.moved:.1%} of the weights moved{bias}"
        )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that a layer reads: [groups, rows, inputs] each."""

    # Their largest value is 1, so that no square of theirs is lost.

    exact: Array  # if nothing were quantized
    simulated: Array  # with what was decided on earlier layers
    scale: float  # what both were divided by

    @property
    def means(self) -> tuple[Array, Array]:
        """The means of each input: [groups, inputs]."""
        return self.exact.mean(1), self.simulated.mean(1)

    def products(self, centred: bool) -> tuple[Array, Array]:
        """Return the means of x~^T x~ and x~^T x, in float64."""
        exact, simulated = self.exact, self.simulated
        if centred:
            exact, simulated = (
                rows - mean[:, None]
                for rows, mean in zip((exact, simulated), self.means, strict=True)
            )
        turned = simulated.swapaxes(1, 2)
        count = exact.shape[1]
        return (
            (turned @ simulated).astype(np.float64) / count,
            (turned @ exact).astype(np.float64) / count,
        )


def default_rounding(graph: Graph, sites: Sequence[RangeSite]) -> str:
    """Return how weights are rounded where nothing is said.

    By data where most of the noise is theirs: they have fewer bits than activations
    have, which are not to be trained any more. Layers in control flow of version 1
    cannot be run one by one.
    """
    weights, activations = (
        min((s.form.bits for s in sites if s.is_weights is of), default=_FLOAT_BITS)
        for of in (True, False)
    )
    trains = any(site.learnt is not None for site in sites)
    in_order = not any(
        op.type in op_types.VERSION_1_FLOW for op in graph.get_operations()
    )
    return "gptq" if weights < activations and in_order and not trains else "nearest"


def round_weights(
    model: Any,
    sites: Sequence[RangeSite],
    ranges: dict[str, Range],
    samples: Sequence[Mapping[str, Any]],
    choice: Choice,
    progress: Callable[[Sequence[Target]], Iterable[Target]] = iter,
) -> list[Rounded | NotRounded]:
    """Round the weights of a quantized model."""
    # `ranges`: what these are to be, by name; those of weights that are clipped become
    # narrower here.
    # Returns each layer whose weights are quantized: rounded, or not and why.
    graph = model.graph
    entries = find_targets(Network(graph, model.outputs.values()), sites)
    targets = [entry for entry in entries if isinstance(entry, Target)]
    with undone_on_error(graph):
        run = _Run(model, targets, _by_end(sites, ranges), ranges, samples, choice)
        rounded = {
            target: run.rounded(index, target)
            for index, target in enumerate(progress(targets))
        }
    run.assign()
    return [rounded[e] if isinstance(e, Target) else e for e in entries]


def _by_end(
    sites: Sequence[RangeSite], ranges: Mapping[str, Range]
) -> dict[Operation, Array]:
    """Return the ends of ranges, by the ops that FakeQuant ops read them from."""
    return {
        t.op: np.asarray(end, np.float32)
        for site in sites
        for op in site.ops
        for t, end in zip(list(op.inputs)[1:], ranges[site.name], strict=True)
    }


class _Run:
    """The rounding of a model, layer by layer."""

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        ends: Mapping[Operation, Array],
        ranges: dict[str, Range],
        samples: Sequence[Mapping[str, Any]],
        choice: Choice,
    ) -> None:
        self._choice = choice
        self._ranges = ranges
        self._weights = _corrections(model, targets, choice)
        graph = model.graph
        self._values = variable_values(graph) | dict(ends)
        layers = [target.layer for target in targets]
        self._stages = Stages(
            graph, model.inputs, layers, samples, frozen(self._values)
        )
        # A model is rounded the same each time.
        self._random = np.random.default_rng(0)
        self._later: list[tuple[Correction, Array]] = []

    def rounded(self, index: int, target: Target) -> Rounded | NotRounded:
        """Decide on the weights of a layer."""
        weights = target.matrices(target.values)
        rows = self._rows(target, self._stages.data_of(index))
        if not (np.isfinite(weights).all() and np.isfinite(rows.scale)):
            return target.skipped("reads NaN or infinite values, or has such weights")
        correction, bias = self._weights[target]
        hessian, cross = rows.products(centred=bias is not None)
        curvature = damped(hessian, _DAMPING)
        plain = target.grid(self._ranges[target.site.name])
        grid = target.grid(self._range(target, weights, curvature))
        wanted = weights
        # Layers before it changed the data, for which other weights fit best.
        if self._choice.rounding != "nearest":
            change = damped(hessian, _DAMPING_OF_TARGET)
            wanted = weights + np.linalg.solve(change, (cross - hessian) @ weights)
        result = _ROUND[self._choice.rounding](curvature, wanted, grid)
        self._set(correction, target.simulated(result) - target.values)
        shift = np.zeros(())
        if bias is not None:
            exact_mean, simulated_mean = rows.means
            shift = np.einsum("gi,gio->go", exact_mean, weights)
            shift -= np.einsum("gi,gio->go", simulated_mean, result)
            self._set(bias, shift * rows.scale)
            shift = shift[:, None]
        nearest = plain.nearest(weights)
        return Rounded(
            target.layer.op.name,
            target.layer.op.type,
            _noise(rows, weights, nearest),
            _noise(rows, weights, result, shift),
            float(np.mean(grid.level(weights) != grid.level(result))),
            bias is not None,
        )

    def assign(self) -> None:
        """Write the decisions to the variables."""
        for correction, value in self._later:
            correction.set(value)

    def _set(self, correction: Correction, value: Array) -> None:
        shaped = value.reshape(correction.variable.shape).astype(np.float32)
        self._values[correction.read] = shaped
        self._later.append((correction, shaped))

    def _range(self, target: Target, weights: Array, hessian: Array) -> Range:
        """Choose the range of weights; later stages see it."""
        ends = self._ranges[target.site.name]
        if target.shares_range:
            return ends
        clip = CLIPPINGS[self._choice.clipping]
        ends = clip(target, ends, weights, hessian)
        ends = with_stored_steps(ends, target.site.form)
        self._ranges[target.site.name] = ends
        self._values |= _by_end([target.site], self._ranges)
        return ends

    def _rows(self, target: Target, data: Data) -> _Rows:
        """Return rows that a layer reads: all of them, or as many at random."""
        parts: list[tuple[Array, Array]] = []
        most = max(_MOST_ROWS, 2 * target.rows.sizes[1]) // len(data.exact) + 1
        for batch in zip(data.exact, data.simulated, strict=True):
            rows = [target.rows.rows(values) for values in batch]
            count = int(rows[0].shape[1])
            if count > most:
                # Neighbouring windows tell nearly the same.
                chosen = np.sort(self._random.choice(count, most, replace=False))
                rows = [tf.gather(each, chosen, axis=1) for each in rows]
            exact, simulated = (each.numpy() for each in rows)
            parts.append((exact, simulated))
        both = [np.concatenate(each, 1) for each in zip(*parts, strict=True)]
        # Infinite or NaN if a value is.
        scale = float(np.max([np.abs(rows).max(initial=0.0) for rows in both])) or 1.0
        exact, simulated = (rows / np.float32(scale) for rows in both)
        return _Rows(exact, simulated, scale)


def _corrections(
    model: Any, targets: Sequence[Target], choice: Choice
) -> dict[Target, tuple[Correction, Correction | None]]:
    """Return the corrections of the weights of layers, and of their biases."""
    edges: list[tuple[str, list[Edge]]] = [
        (target.site.name, [Edge(op, 0) for op in target.simulations])
        for target in targets
    ]
    biases = [
        (t, t.bias) for t in targets if t.bias is not None and choice.correct_bias
    ]
    edges += [(f"{target.layer.op.name}/bias", [edge]) for target, edge in biases]
    corrections = corrected(model.graph, edges, model.variables)
    count = len(targets)
    of_bias = {
        target: correction
        for (target, _), correction in zip(biases, corrections[count:], strict=True)
    }
    return {
        target: (correction, of_bias.get(target))
        for target, correction in zip(targets, corrections[:count], strict=True)
    }


def _noise(
    rows: _Rows, weights: Array, rounded: Array, shift: Array | float = 0.0
) -> float:
    """Return the mean square of changes in results, over their variance."""
    exact = rows.exact @ weights
    noise = float(np.mean(np.square(rows.simulated @ rounded + shift - exact)))
    variance = float(np.mean(np.square(exact - exact.mean(1, keepdims=True))))
    return noise / variance if variance else noise


_ROUND: dict[str, Callable[[Array, Array, Grid], Array]] = {
    "nearest": lambda hessian, weights, grid: grid.nearest(weights),
    "gptq": gptq,
    "adaround": partial(adaround, steps=_STEPS),
}


_NEAREST = Words("rounding='nearest'", "nearest")
_NOT_KEPT = (tf.resource, tf.variant)


class Data(NamedTuple):
    """The data of a layer, batch by batch."""

    exact: list[Any]  # if nothing were quantized
    simulated: list[Any]  # with what was decided on earlier layers


class Stages:
    """The stages of a FuncGraph."""

    # `samples`: batches of data by the names of the inputs; they are held in memory,
    # and so is what they become between two stages.
    # `simulated`: what stands in for ops in the simulation; it is asked anew for each
    # stage.

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        layers: Sequence[Layer],
        samples: Sequence[Mapping[str, Any]],
        simulated: Replace,
    ) -> None:
        ops = graph.get_operations()
        check_flow(graph)
        _check_branches(graph, layers)
        self._graph = graph
        self._replace = (unquantized, simulated)
        self._layers = layers
        self._stage = _stages(adjacency.topological_sort(ops), inputs, layers)
        self._wanted = self._plan()
        self._kept: dict[str, tuple[list[Any], list[Any]]] = {}
        # Each value as it is, and as simulated: of inputs these are the same.
        for name, t in inputs.items():
            values = [sample[name] for sample in samples]
            self._kept[t.name] = values, values
        self._count = len(samples)

    def data_of(self, index: int) -> Data:
        """Return the data of a layer; to be asked for one layer after the other."""
        self._run(index)
        layer = self._layers[index]
        exact, simulated = self._kept[layer.op.inputs[layer.data].name]
        return Data(exact, simulated)

    def _plan(self) -> list[dict[str, Tensor]]:
        """Return the tensors that each stage has to keep, by name."""
        wanted: list[dict[str, Tensor]] = [{} for _ in range(len(self._layers) + 1)]
        self._last_use: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            data = layer.op.inputs[layer.data]
            wanted[self._stage.get(data.op, 0)][data.name] = data
            self._last_use[data.name] = index
        for stage in reversed(range(len(wanted))):
            for t in self._read(list(wanted[stage].values()), stage):
                wanted[self._stage[t.op]][t.name] = t
                self._last_use.setdefault(t.name, stage)
                self._last_use[t.name] = max(self._last_use[t.name], stage)
        return wanted

    def _read(self, targets: Sequence[Tensor], stage: int) -> list[Tensor]:
        """Return the tensors of earlier stages that a stage reads."""
        found: dict[str, Tensor] = {}

        def before(op: Operation) -> list[Operation]:
            """Return the producers in this stage; note tensors of earlier ones."""
            if op.type in op_types.PLACEHOLDERS:
                found[op.outputs[0].name] = op.outputs[0]
                return []
            producers = list(op.control_inputs)
            for t in op.inputs:
                earlier = self._stage.get(t.op, stage) < stage
                # Lists and resources cannot outlive a run, so their ops run again.
                if earlier and len(t.op.outputs) == 1 and t.dtype not in _NOT_KEPT:
                    found[t.name] = t
                else:
                    producers.append(t.op)
            return [op for op in producers if op in self._stage]

        closure((t.op for t in targets), before)
        return list(found.values())

    def _run(self, stage: int) -> None:
        """Run a stage, keep its results, and forget those that have no reader left."""
        targets = [t for t in self._wanted[stage].values() if t.name not in self._kept]
        if targets:
            sources = {f"s{i}": t for i, t in enumerate(self._read(targets, stage))}
            exact, simulated = (
                self._values(targets, sources, which) for which in range(2)
            )
            for t in targets:
                self._kept[t.name] = exact[t.name], simulated[t.name]
        for name in list(self._kept):
            if self._last_use.get(name, -1) < stage:
                del self._kept[name]

    def _values(
        self, targets: Sequence[Tensor], sources: Mapping[str, Tensor], which: int
    ) -> dict[str, list[Any]]:
        copy = PartialCopy(self._graph, sources, self._replace[which])
        copies = copy.of(targets)
        with creation.neutral(copy.graph):
            results = {f"r{i}": tf.identity(t) for i, t in enumerate(copies)}
        function = functions.build_function(copy.graph, copy.inputs, results, [], [])
        values: dict[str, list[Any]] = {t.name: [] for t in targets}
        for batch in range(self._count):
            feed = {n: self._kept[t.name][which][batch] for n, t in sources.items()}
            made = functions.call_function(function, feed)
            for i, t in enumerate(targets):
                values[t.name].append(made[f"r{i}"])
        return values


def check_flow(graph: Graph) -> None:
    """Raise QuantizeError for a graph that has no topological order."""
    for op in graph.get_operations():
        if op.type in op_types.ENTERS:
            raise QuantizeError(
                f"'{op.name}' ({op.type}) begins a loop of version 1, and layers in it "
                "cannot be run one by one",
                remedy=f"calibrate with {_NEAREST}",
            )


def _check_branches(graph: Graph, layers: Sequence[Layer]) -> None:
    """Refuse layers in branches of version 1: they lack data if others are taken."""
    switched = [op for op in graph.get_operations() if op.type in op_types.SWITCHES]

    def inside(op: Operation) -> list[Operation]:
        readers = (reader for t in op.outputs for reader in adjacency.consumers(t))
        return [reader for reader in readers if reader.type not in op_types.MERGES]

    in_branches = closure(switched, inside)
    for layer in layers:
        if layer.op in in_branches:
            raise QuantizeError(
                f"'{layer.op.name}' ({layer.op.type}) is in a branch of a conditional "
                "of version 1, and has no data where another branch is taken",
                remedy=f"calibrate with {_NEAREST}",
            )


def _stages(
    ordered: Sequence[Operation], inputs: Mapping[str, Tensor], layers: Sequence[Layer]
) -> dict[Operation, int]:
    """Return the stage of each op that depends on the inputs."""
    begins = {layer.op: index + 1 for index, layer in enumerate(layers)}
    stage_of = {t.op: 0 for t in inputs.values()}
    for op in ordered:
        before = [
            stage_of[producer]
            for producer in (*(t.op for t in op.inputs), *op.control_inputs)
            if producer in stage_of
        ]
        if before:
            stage_of[op] = max(begins.get(op, 0), *before)
    return stage_of
