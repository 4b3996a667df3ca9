"""Bits chosen for the weights of each layer, under a budget of bytes or of noise.

The noise of layers is assumed to be additive, and the knapsack is solved exactly.
Around its choice the noise is measured again, layer by layer, to include their
interaction; the next knapsack is solved from there, as long as the network improves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from geutil.errors import ArgumentTypeError, MissingExtraError, QuantizeError, Words
from geutil.graph.types import type_name
from geutil.quantize import bit_plans
from geutil.quantize.bit_plans import BitOption, BitPlan, Bits, CurvePoint, Metric

Table = Sequence[Sequence[float]]
"""A number for each option of each item."""
Sizes = Sequence[Sequence[int]]

_PRECISION = 1e-9
"""Of the solver's constraints: below one unit of any size that there is."""


def least_noise(sizes: Sizes, noises: Table, budget: int) -> list[int] | None:
    """Return the choice of least noise within a budget.

    Example:
        >>> from geutil.quantize.bit_search import least_noise
        >>> sizes, noises = [[4, 8], [2, 4]], [[3.0, 1.0], [9.0, 1.0]]
        >>> least_noise(sizes, noises, 9), least_noise(sizes, noises, 5)
        ([0, 1], None)
    """
    # Returns for each item the index of an option; None if no choice fits.
    if sum(min(options) for options in sizes) > budget:
        return None
    # Whole units, as few as can be: so the solver's rounding is below one of them.
    unit = math.gcd(*(size for options in sizes for size in options)) or 1
    units = [[size // unit for size in options] for options in sizes]
    room = budget // unit
    scale = _largest(noises)
    scaled = [[noise / scale for noise in options] for options in noises]
    # The solver's fit may be over by its precision, if sizes are huge.
    most = room
    while True:
        chosen = _solved(scaled, units, most)
        if chosen is None or _sum(units, chosen) <= room:
            return chosen
        most -= 1


def least_size(sizes: Sizes, noises: Table, limit: float) -> list[int] | None:
    """Return the choice of least size whose noise keeps a limit.

    Example:
        >>> from geutil.quantize.bit_search import least_size
        >>> least_size([[4, 8], [2, 4]], [[3.0, 1.0], [9.0, 1.0]], limit=5.0)
        [0, 1]
    """
    # Of several that are as small, one of the least noise.
    # Returns for each item the index of an option; None if no choice keeps the limit.
    if sum(min(options) for options in noises) > limit:
        return None
    scale = max(_largest(noises), abs(limit)) or 1.0
    scaled = [[noise / scale for noise in options] for options in noises]
    largest = _largest(sizes)
    shares = [[size / largest for size in options] for options in sizes]
    chosen = _solved(shares, scaled, limit / scale)
    if chosen is None:
        return None
    quietest = least_noise(sizes, noises, int(_sum(sizes, chosen)))
    return chosen if quietest is None else quietest


def _solved(costs: Table, weights: Table, limit: float) -> list[int] | None:
    """Return the choice of least cost whose weights sum up to a limit at most."""
    solver = _new_solver()
    taken = [[solver.BoolVar("") for _ in options] for options in costs]
    for options in taken:
        solver.Add(sum(options) == 1)
    solver.Add(_weighted(taken, weights) <= limit)
    solver.Minimize(_weighted(taken, costs))
    if solver.Solve() != solver.OPTIMAL:
        return None
    return [
        int(np.argmax([variable.solution_value() for variable in options]))
        for options in taken
    ]


def _weighted(taken: Sequence[Sequence[Any]], numbers: Table) -> Any:
    return sum(
        variable * number
        for options, row in zip(taken, numbers, strict=True)
        for variable, number in zip(options, row, strict=True)
    )


def _sum(table: Table, chosen: Sequence[int]) -> float:
    return sum(row[index] for row, index in zip(table, chosen, strict=True))


def _largest(table: Table) -> float:
    return max((abs(number) for row in table for number in row), default=0.0) or 1.0


def _new_solver() -> Any:
    try:
        from ortools.linear_solver import pywraplp
    except ImportError as error:
        raise MissingExtraError(
            "bits are chosen by OR-Tools, which is not installed; run: "
            "pip install 'geutil[plan]'"
        ) from error
    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetSolverSpecificParametersAsString(
        f"numerics/feastol = {_PRECISION}\nlimits/gap = 0"
    )
    return solver


_POINTS = 12
"""Sizes of a curve, the smallest and the largest among them."""
_ROUNDS = 3
"""How often a choice is looked at anew from where it is."""
_TRIES = 8
"""How often a limit of noise is tightened, and a size bisected."""
_MORE = 0.99
"""A limit is tightened by a little more than it was missed by."""


class _Assembled(NamedTuple):
    """The outputs and noise of a network that `quantize` made."""

    outputs: list[bit_plans.Outputs]
    noise: float


class BitSearch:
    """The search for the bits of the layers of a network."""

    def __init__(
        self, subject: bit_plans.FloatNetwork, bits: tuple[int, ...], batches: int
    ) -> None:
        self._subject = subject
        self._bits = bits
        # In 8 bits; what is fed gives the layers others.
        model, report = subject.assembled({})
        self._layers, self._left = bit_plans.find_weights(model, report)
        if not self._layers:
            why = "".join(f"; '{op}' {reason}" for op, reason in self._left[:1])
            raise QuantizeError(
                f"no layer of the model has weights that can be quantized{why}"
            )
        self._count = min(batches, len(subject.samples))
        self._network = bit_plans.SwitchedNetwork(
            model, self._layers, bits, subject.samples
        )
        self._noise_by_bits: dict[Bits, float] = {}
        self._assembled_by_bits: dict[Bits, _Assembled] = {}
        scheme = subject.scheme
        self._options = bit_plans.measured_options(
            self._network, bits, scheme, self._count
        )
        self._usable = [_usable(row) for row in self._options]
        self._sizes = [[option.size for option in row] for row in self._usable]
        # The bytes of all weights in 8 bits.
        self.int8_size = sum(
            la.stored_bytes(bit_plans.BYTE, scheme) for la in self._layers
        )
        self._int8_noise = self._noise((bit_plans.BYTE,) * len(self._layers))
        self._added = [
            [option.together - self._int8_noise for option in row]
            for row in self._usable
        ]

    def within_size(self, most: int) -> Bits:
        """Return the bits of least noise whose weights take so many bytes at most."""
        chosen = least_noise(self._sizes, self._added, most)
        if chosen is None:
            least = sum(map(min, self._sizes))
            raise QuantizeError(
                f"no choice of {self._named} bits takes {most:,} bytes of weights or "
                f"less: the smallest takes {least:,}, which is "
                f"{least / self.int8_size:.1%} of what 8 bits take; pass as much, or "
                "allow fewer bits"
            )
        return self._refined(self._bits_of(chosen), most)

    def _refined(self, bits: Bits, most: int) -> Bits:
        """Return bits of less noise that fit as many bytes, if some are found."""
        for _ in range(_ROUNDS):
            chosen = least_noise(self._sizes, self._around(bits), most)
            new = bits if chosen is None else self._bits_of(chosen)
            if self._noise(new) >= self._noise(bits):
                break
            bits = new
        return bits

    def within_noise(self, wanted: float) -> Bits:
        """Return the smallest bits that are found to reach a signal to noise, in dB."""
        limit = 10.0 ** (-wanted / 10.0)
        quietest = self._quietest()
        target, bits = limit, quietest
        for _ in range(_TRIES):
            bits = self._smallest(target, quietest)
            found = self.assembled(bits).noise
            if found <= limit:
                return bits
            # Layers together are noisier than was predicted: aim lower by the ratio.
            target *= _MORE * limit / found
        # The quietest bits may do where smaller ones were not found.
        reached = self.assembled(quietest).noise
        if reached <= limit:
            return quietest
        raise QuantizeError(
            f"no choice of {self._named} bits was found that reaches {wanted:g} dB of "
            f"signal to noise: the best has {bit_plans.decibels(reached):.2f} dB; ask "
            "for less, or allow more bits"
        )

    def _smallest(self, limit: float, quietest: Bits) -> Bits:
        """Return the smallest bits that are found to keep a limit of noise."""
        target, bits = limit, quietest
        for _ in range(_TRIES):
            chosen = least_size(self._sizes, self._added, target - self._int8_noise)
            if chosen is None:
                break
            new = self._bits_of(chosen)
            found = self._noise(new)
            if found <= limit:
                bits = new
                break
            # Layers add more together than each of them alone.
            target *= _MORE * limit / found
        for _ in range(_ROUNDS):
            room = limit - self._noise(bits)
            chosen = least_size(self._sizes, self._around(bits), room)
            new = bits if chosen is None else self._bits_of(chosen)
            if self._size(new) >= self._size(bits) or self._noise(new) > limit:
                break
            bits = new
        return bits

    def within_accuracy(self, metric: Metric, loss: float) -> Bits:
        """Return the smallest bits that are found to keep a metric."""
        in_float = self._subject.score(self._network.exact, metric)

        def score(bits: Bits) -> float:
            return self._subject.score(self._network.outputs(bits), metric)

        choices = self._choices()
        passing = next(
            (n for n, bits in enumerate(choices) if score(bits) >= in_float - loss),
            len(choices),
        )
        candidates = choices[passing:]
        if 0 < passing < len(choices):
            low, high = (
                self._size(bits) for bits in choices[passing - 1 : passing + 1]
            )
            for _ in range(_TRIES):
                middle = (low + high) // 2
                bits = self.within_size(middle)
                if score(bits) >= in_float - loss:
                    candidates.insert(0, bits)
                    high = min(self._size(bits), middle)
                else:
                    low = middle
        # The assembled network counts, not the one whose bits are switched.
        for bits in candidates:
            kept = self._subject.score(self.assembled(bits).outputs, metric)
            if kept >= in_float - loss:
                return bits
        most = max(map(score, choices))
        raise QuantizeError(
            f"no choice of {self._named} bits was found that loses {loss:g} at most of "
            f"{in_float:.6g}: the best keeps {most:.6g}; allow a loss of "
            f"{max(in_float - most, 0.0):.6g}, or more bits"
        )

    def _choices(self) -> list[Bits]:
        """Return the predicted best choices for several sizes, smallest first."""
        ends = sum(map(min, self._sizes)), sum(map(max, self._sizes))
        chosen = [
            least_noise(self._sizes, self._added, int(size))
            for size in np.linspace(*ends, _POINTS)
        ]
        choices = {self._bits_of(each) for each in chosen if each is not None}
        return sorted(choices, key=lambda bits: (self._size(bits), bits))

    def _quietest(self) -> Bits:
        """Return the choice of least noise, whatever its size."""
        return self.within_size(sum(map(max, self._sizes)))

    def assembled(self, bits: Bits) -> _Assembled:
        """Return the outputs and noise of the network that `quantize` makes."""
        if bits not in self._assembled_by_bits:
            by_op = {
                op: each
                for layer, each in zip(self._layers, bits, strict=True)
                for op in layer.ops
            }
            model, _ = self._subject.assembled(bit_plans.overrides_of(by_op))
            outputs = bit_plans.outputs_of(model, self._subject.samples)
            noise = self._network.noise_of(outputs[: self._count])
            self._assembled_by_bits[bits] = _Assembled(outputs, noise)
        return self._assembled_by_bits[bits]

    def plan(
        self, bits: Bits, budget: str, accuracy: tuple[Metric, float] | None
    ) -> BitPlan:
        """Return a choice as a plan, measured on the assembled network."""
        assembled = self.assembled(bits)
        scores = None
        if accuracy is not None:
            both = (self._network.exact, assembled.outputs)
            before, after = (self._subject.score(o, accuracy[0]) for o in both)
            scores = before, after
        entries = tuple(
            bit_plans.LayerBits(layer.ops, layer.op_type, layer.count, each, options)
            for layer, each, options in zip(
                self._layers, bits, self._options, strict=True
            )
        )
        return BitPlan(
            self._subject.scheme,
            budget,
            entries,
            tuple(self._left),
            self._size(bits),
            self.int8_size,
            assembled.noise,
            self._predicted(bits),
            self._int8_noise,
            self._subject.method,
            self._count,
            self._curve(bits),
            scores,
        )

    def _curve(self, bits: Bits) -> tuple[CurvePoint, ...]:
        """Return the sizes that less noise takes, a choice among them."""
        choices = sorted(
            {*self._choices(), bits}, key=lambda b: (self._size(b), self._noise(b))
        )
        points: list[CurvePoint] = []
        for each in choices:
            noise = self._noise(each)
            if each == bits or not points or noise < points[-1].noise:
                point = CurvePoint(self._size(each), noise, self._predicted(each))
                points.append(point)
        return tuple(points)

    @property
    def _named(self) -> str:
        return ", ".join(map(str, self._bits))

    def _bits_of(self, chosen: Sequence[int]) -> Bits:
        rows = zip(self._usable, chosen, strict=True)
        return tuple(row[index].bits for row, index in rows)

    def _options_of(self, bits: Bits) -> list[BitOption]:
        return [
            row[self._bits.index(each)]
            for row, each in zip(self._options, bits, strict=True)
        ]

    def _size(self, bits: Bits) -> int:
        return sum(option.size for option in self._options_of(bits))

    def _noise(self, bits: Bits) -> float:
        if bits not in self._noise_by_bits:
            self._noise_by_bits[bits] = self._network.noise(bits, self._count)
        return self._noise_by_bits[bits]

    def _predicted(self, bits: Bits) -> float:
        """Return the noise of a choice as the sum of its layers' noise."""
        added = [
            option.together - self._int8_noise for option in self._options_of(bits)
        ]
        return max(self._int8_noise + sum(added), 0.0)

    def _around(self, bits: Bits) -> Table:
        """Return the noise that each option adds to a choice of the others."""
        here = self._noise(bits)
        return [
            [
                self._noise((*bits[:index], option.bits, *bits[index + 1 :])) - here
                for option in row
            ]
            for index, row in enumerate(self._usable)
        ]


def _usable(options: Sequence[BitOption]) -> list[BitOption]:
    """Return the options that save something, each against the next one."""
    # That fewer bits were less noisy on some data, as it happens, is no reason for
    # them.
    return [
        option
        for option, more in zip(options, (*options[1:], None), strict=True)
        if more is None or option.size < more.size
    ]


def choose_bits(
    model: Any,
    data: Any,
    *,
    size: int | float | None = None,
    noise: float | None = None,
    accuracy: tuple[Metric, float] | None = None,
    bits: Sequence[int] | None = None,
    scheme: str = "int8",
    method: str = "best",
    batches: int = 8,
) -> BitPlan:
    """Choose the number of bits for the weights of each layer, under a budget.

    The noise at the outputs is measured for each layer and each number of bits: with
    only that layer quantized, and with all others quantized too. From the latter the
    best choice is found exactly, as a multiple-choice knapsack, since the errors of
    layers nearly add up. Its noise is measured, the layers are measured again around
    it, and the choice is repeated while it improves. Finally the network is quantized
    with these bits by `quantize`, and measured once more.

    Layers are those that `quantize` quantizes; fold batch norms first. An int8 file
    cannot store more than 8 bits, even if layers are skipped; one of `weight_only_int8`
    stores 16. The savings of 4 bits depend on the kernel: in an int8 file, depthwise,
    grouped and transposed convolutions store bytes.

    Args:
        model: a float `geutil.model.Model`, which is not changed.
        data: the data, as `calibrate` takes it. It is iterated once and kept in memory.
        size: the budget for the bytes of the weights in the file; or, as a float below
            1, for the fraction of their size in 8 bits. Other parts of the file, such
            as scales and biases, do not depend on the bits.
        noise: the required signal-to-noise ratio of the outputs, in dB.
        accuracy: `(metric, loss)`: a metric of outputs, and the largest loss of its
            mean over the data against the float model. `metric(outputs, index)` gets
            the outputs of a batch by name, as arrays, and the index of the batch in the
            data; higher is better. Batches are weighted by their samples.
        bits: the options for a layer: 2 to 8, and 16 if the scheme supports it. None
            uses those of 4, 8 and 16 that it supports.
        scheme: the scheme of the file: "int8", or "weight_only_int8", which leaves
            activations in float.
        method: how to calibrate the ranges of activations; see `calibrate`.
        batches: the number of batches to measure noise on; all of them are used to
            calibrate, and for `accuracy`.

    Returns:
        The plan, for `quantize(model, scheme=plan.scheme, overrides=plan.overrides)`.
        Then calibrate by `plan.method`.

    Raises:
        ArgumentTypeError: `model` is not a model, or an argument has another type.
        QuantizeError: not exactly one budget is given; no choice meets it, and the
            message names the reachable one; the model is quantized, or has no layers to
            quantize; bits or scheme are not possible; or the data does not fit.
        MissingExtraError: OR-Tools (the extra `plan`) is not installed.

    Cost: two runs of the network for each layer, number of bits and batch, and up to
        three more to refine, eight times as often for `accuracy`; the knapsacks take
        milliseconds.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import choose_bits, quantize
        >>> first, second = (
        ...     tf.random.stateless_normal([16, 16], seed=(1, n)) for n in range(2)
        ... )
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 16], name="x")])
        ... def f(x):
        ...     hidden = tf.nn.relu(tf.matmul(x, first, name="a"))
        ...     return {"y": tf.matmul(hidden, 0.1 * second, name="b")}
        >>> m = model.open(f)
        >>> data = [{"x": tf.random.stateless_normal([32, 16], seed=(2, 2))}]
        >>> plan = choose_bits(m, data, size=0.9)
        >>> plan.size, plan.int8_size, sorted(layer.bits for layer in plan.layers)
        (384, 512, [4, 8])
        >>> report = quantize(m, is_training=False, overrides=plan.overrides)
    """
    _check_budget(size, noise, accuracy)
    chosen_bits = bit_plans.checked_bits(bits, scheme)
    if type(batches) is not int or batches < 1:
        raise QuantizeError(
            f"batches={batches!r} is no number of batches: pass 1 or more"
        )
    search = BitSearch(
        bit_plans.FloatNetwork(model, data, scheme, method), chosen_bits, batches
    )
    if noise is not None:
        chosen, budget = search.within_noise(noise), f"{noise:g} dB of signal to noise"
    elif accuracy is not None:
        chosen = search.within_accuracy(*accuracy)
        budget = f"a metric at most {accuracy[1]:g} below that in float"
    elif _is_share(size):
        # Floats of numpy, too.
        share = float(size or 0.0)
        chosen = search.within_size(int(share * search.int8_size))
        budget = f"{share:.1%} of the weights' bytes in 8 bits"
    else:
        chosen, budget = (
            search.within_size(int(size or 0)),
            f"{size:,} bytes of weights",
        )
    return search.plan(chosen, budget, accuracy)


def _check_budget(size: Any, noise: Any, accuracy: Any) -> None:
    """Raise unless one budget is given, one that something could meet."""
    if sum(given is not None for given in (size, noise, accuracy)) != 1:
        raise QuantizeError(
            "bits are chosen under one budget",
            remedy=f"pass {Words('one of size=, noise= and accuracy=')}",
        )
    for name, value in (("size", size), ("noise", noise)):
        if value is not None and not _is_number(value):
            raise ArgumentTypeError(
                f"{name} is a number, not {type_name(value)}; see choose_bits"
            )
    if size is not None and (size <= 0 or (_is_share(size) and size > 1)):
        raise QuantizeError(
            "is no budget",
            subject=Words(f"size={size}", size),
            remedy="pass whole bytes, or a share of what 8 bits take "
            f"{Words('as a float from 0 to 1')}",
        )
    if accuracy is not None:
        _check_accuracy(accuracy)


def _is_share(size: Any) -> bool:
    return not isinstance(size, int | np.integer)


def _check_accuracy(accuracy: Any) -> None:
    is_pair = isinstance(accuracy, tuple) and len(accuracy) == 2
    if not is_pair or not callable(accuracy[0]) or not _is_number(accuracy[1]):
        raise ArgumentTypeError(
            "accuracy is (metric, loss): a function of the outputs of a batch and its "
            f"place, and a number; not {accuracy!r}"
        )
    if accuracy[1] < 0:
        raise QuantizeError(f"a loss of {accuracy[1]} is none; pass 0 or more")


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return is_real and not isinstance(value, bool) and math.isfinite(value)
