"""Noise of single layers: what quantization adds at the result of each op.

The model is run in three forms at once: in float; as it is simulated; and with each
quantized op simulated by itself, fed what it reads in float. Noise is the difference to
the float form. It is reported as a signal-to-noise ratio: ten times the decimal
logarithm of the sum of squares of the values over that of the differences, in dB. Six
dB more are one bit more.

Two things must tell the tensor of a file that holds a result: its name, which the
converter gives it after ops, and how its integers are stored, which is the range that
the result is simulated in. Where several could be meant, none is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError, Words
from geutil.graph import creation, functions, op_types
from geutil.graph.types import MutableIdentityMap, Operation, Tensor
from geutil.quantize.calibration import ranges
from geutil.quantize.partial_copy import PartialCopy, Replace
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.int8_kernels import FAKE_QUANT
from geutil.quantize.planning.network import Network, forwarded_from, simulation_of
from geutil.quantize.planning.plan import plan_quantization
from geutil.quantize.spec import QUANTIZE, QuantizeChoices, Range, nudged, step
from geutil.quantize.tflite.converter_workarounds import read_instead
from geutil.quantize.tflite.runner import Runner
from geutil.select.selections import LayerNames, with_layer
from geutil.tflite import LiteFile, LiteTensor
from geutil.tflite.kinds import BIASED, is_float
from geutil.tflite.op_names import file_names, names_result, sources_of, spellings
from geutil.tflite.parts import Array


@dataclass(frozen=True)
class LayerNoise:
    """The noise of quantization at the result of one op.

    Ratios are infinite without any noise, and minus infinity if there is noise and no
    signal, or if values become infinite. Values that are not finite in float are left
    out.

    Attributes:
        op: the op whose kernel computes the result, by name.
        op_type: its type.
        tensor: the result, by name: that of the last op fused into the kernel.
        own: the signal-to-noise ratio, in dB, with only this op quantized: its weights
            and its result are rounded; its inputs are in float.
        accumulated: the same ratio with all ops quantized.
        cosine: the cosine between the result in float and with all ops quantized.
        clipped: the fraction of float values outside the stored range of the result by
            more than half a step, the rounding error; None if it is stored in float.
        file_tensor: the tensor of the file that holds the result; "" if none is known.
        file_steps: the largest difference between file and simulation in steps; for
            floats, a step is 1/255 of their span. None if no tensor is known.
        file_ratio: the signal-to-noise ratio of the file's tensor, in dB; or None.
        unmatched: why no tensor of the file is known; "" if one is known.
        silent: whether all values are zero in float, so that an infinite ratio is
            meaningless: the data does not reach the layer, or a Relu blocks it.
        keras_layer: the path of the Keras layer that it is in; "" if there is none.
        parts: for a concat, the same for each input, with its op instead of `tensor`,
            if some take 16 times as much of the range as others.
    """

    op: str
    op_type: str
    tensor: str
    own: float
    accumulated: float
    cosine: float
    clipped: float | None
    file_tensor: str = ""
    file_steps: float | None = None
    file_ratio: float | None = None
    unmatched: str = ""
    silent: bool = False
    keras_layer: str = ""
    parts: tuple[LayerNoise, ...] = ()

    @property
    def worst(self) -> LayerNoise:
        """The layer as a whole or its part, whichever is noisier by itself."""
        return min((self, *self.parts), key=lambda noise: noise.own)

    def __str__(self) -> str:
        clipped = "float" if self.clipped is None else f"{self.clipped:.2%} clipped"
        file = f"no tensor: {self.unmatched}"
        if self.file_steps is not None and self.file_ratio is not None:
            file = f"{self.file_steps:.3g} step(s) off, {self.text(self.file_ratio)}"
        parts = "".join(
            f"; its input {part.tensor}: own {part.text(part.own)}, accumulated "
            f"{part.text(part.accumulated)}"
            for part in self.parts
        )
        return (
            f"own {self.text(self.own)}, accumulated {self.text(self.accumulated)}, "
            f"cosine {self.cosine:.6f}, {clipped}; file: {file}{parts}"
        )

    def text(self, ratio: float) -> str:
        """Return one of its ratios as text; "zeros" where all values are zero."""
        return "zeros" if self.silent and ratio == math.inf else decibels(ratio)


def decibels(ratio: float) -> str:
    """Return a ratio as text.

    Example:
        >>> from geutil.quantize.tflite.layer_noise import decibels
        >>> decibels(38.04), decibels(float("inf"))
        ('38.0 dB', 'exact')
    """
    return "exact" if ratio == math.inf else f"{ratio:.1f} dB"


def noisiest(layers: Sequence[LayerNoise]) -> LayerNoise | None:
    """Return the layer that adds most noise by itself; None if none adds any."""
    noisy = [layer.worst for layer in layers if layer.worst.own < math.inf]
    return min(noisy, key=lambda layer: layer.own, default=None)


_TITLES = ("own", "accumulated", "cosine", "clipped", "file: steps", "dB")


def layer_lines(layers: Sequence[LayerNoise]) -> Iterator[str]:
    """Yield a table of layers in the order of the graph, the noisiest marked."""
    worst = noisiest(layers)
    if worst is None:
        yield f"{len(layers)} layer(s), of which none adds noise"
    else:
        yield (
            f"{len(layers)} layer(s); '{worst.op}' ({worst.op_type}) adds most noise: "
            f"{decibels(worst.own)} by itself, marked with >"
        )
    listed = [(each, layer) for layer in layers for each in (layer, *layer.parts)]
    rows = [_cells(each) for each, _ in listed]
    widths = [max(len(row[i]) for row in (_TITLES, *rows)) for i in range(len(_TITLES))]
    names = []
    for each, layer in listed:
        why = f": {layer.unmatched}" if layer.unmatched else ""
        output = layer.tensor.rpartition(":")[2]
        which = "" if output == "0" else f":{output}"
        name = with_layer(layer.keras_layer, layer.op)
        own = f"{name}{which} ({layer.op_type}){why}"
        names.append(own if each is layer else f"  its input {each.tensor}")
    marks = [">" if each is worst else " " for each, _ in listed]
    for mark, cells, name in zip(
        (" ", *marks), (_TITLES, *rows), ("layer", *names), strict=True
    ):
        row = "  ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        yield f"{mark} {row}  {name}".rstrip()


def _cells(layer: LayerNoise) -> tuple[str, ...]:
    steps, ratio = layer.file_steps, layer.file_ratio
    return (
        layer.text(layer.own),
        layer.text(layer.accumulated),
        f"{layer.cosine:.5f}",
        "float" if layer.clipped is None else f"{layer.clipped:.2%}",
        "-" if steps is None else f"{steps:.3g}",
        "-" if ratio is None else layer.text(ratio).removesuffix(" dB"),
    )


_SUMS = ("count", "signal", "own", "accumulated", "dot", "simulated", "outside", "file")
_EXTREMES = ("apart", "low", "high", "moved")
_BLOCK = 1 << 14
"""So many values at once, in float64 and several forms, fit a core's cache."""


class NoiseMeter:
    """Measures the noise of all layers of a model, batch by batch."""

    def __init__(self, model: Any, runner: Runner) -> None:
        self._runner = runner
        self._results = _stored_results(model)
        if not self._results:
            raise QuantizeError(
                "the model holds no FakeQuant op, so that there is no noise to tell "
                "layer by layer",
                remedy=f"quantize it, with {QUANTIZE}, before it is converted, or "
                f"leave {Words('layers=True')} out",
            )
        self._values = ranges.range_values(model.graph)
        self._tensors = _file_tensors(model, self._results, runner.file, self._values)
        # Names that are no names of inputs: results in float are fed beside these.
        self._inputs = {name: f"x{i}" for i, name in enumerate(model.inputs)}
        self._float = self._copied(model, ranges.unquantized, rounded=False)
        self._simulated = self._copied(model, ranges.frozen(self._values), rounded=True)
        self._alone = self._each_alone(model)

        def forms(
            sample: Mapping[str, Tensor], rounded: Mapping[str, Tensor]
        ) -> tuple[Mapping[str, Tensor], ...]:
            """Return all results in float, simulated, and each layer alone."""
            exact = functions.call_function(self._float, sample)
            simulated = functions.call_function(self._simulated, rounded)
            fed = {**sample, **{f"t{i}": t for i, t in exact.items()}}
            return exact, simulated, functions.call_function(self._alone, fed)

        self._run = tf.function(forms, autograph=False)
        # Behind the results themselves those of which they are joined.
        self._parts = [
            (place, part)
            for place, result in enumerate(self._results)
            for part in ranges.parts_of(result.tensor)
        ]
        count = len(self._results) + len(self._parts)
        self._sums = np.zeros((count, len(_SUMS)))
        self._most = np.full((count, len(_EXTREMES)), -np.inf)

    def add(self, sample: Mapping[str, Any], rounded: Mapping[str, Any]) -> None:
        """Take in a batch that the file was run on just now."""
        forms = self._run(
            *(
                {inner: tf.constant(form[name]) for name, inner in self._inputs.items()}
                for form in (sample, rounded)
            )
        )
        # A result may not be finite once it is simulated, as it may not be in float.
        with np.errstate(over="ignore", invalid="ignore"):
            for place in range(len(self._results)):
                self._add(place, [form[str(place)].numpy() for form in forms])

    def _add(self, place: int, forms: list[Array]) -> None:
        """Take in a result of a batch: in float, simulated, simulated alone."""
        found, simulation = self._tensors[place], self._results[place].stored
        if isinstance(found, _FileTensor):
            stored = self._runner.tensor(found.tensor)
            moved = stored.shape != forms[0].shape
            # Of another shape they are compared with nothing; they must only not fail.
            forms.append(np.zeros_like(forms[0]) if moved else stored)
            self._most[place, -1] = max(self._most[place, -1], moved)
        limits = None
        if simulation is not None:
            # Half a step on both sides, as rounding goes.
            low, high = _range_of_simulation(simulation, self._values)
            half = _step_of_simulation(simulation, self._values).astype(np.float64) / 2
            limits = low - half, high + half
        self._measure(place, forms, found, limits)
        for row, (whole, part) in enumerate(self._parts, len(self._results)):
            if whole == place:
                self._measure(row, [part.of(form) for form in forms], found, limits)
                self._most[row, -1] = self._most[place, -1]

    def _measure(
        self,
        place: int,
        forms: Sequence[Array],
        found: _FileTensor | str,
        limits: tuple[Array, Array] | None,
    ) -> None:
        """Add up the forms of a result in one row of the sums."""
        flat = [values.ravel() for values in forms]
        for start in range(0, flat[0].size, _BLOCK):
            row = _Row(*(values[start : start + _BLOCK] for values in flat[:3]))
            outside, noise, apart = 0.0, 0.0, -np.inf
            if limits is not None:
                outside = row.outside(*limits)
            if isinstance(found, _FileTensor):
                noise, apart = row.of_file(flat[3][start : start + _BLOCK], found)
            self._sums[place] += [*row.sums(), outside, noise]
            # The least value is kept as the largest of its negatives.
            extremes = [apart, -np.min(row.exact), np.max(row.exact)]
            self._most[place, :3] = np.maximum(self._most[place, :3], extremes)

    def layers(self) -> tuple[LayerNoise, ...]:
        """Return the measurements in the order of the graph."""
        noises = [
            replace(
                _entry(*self._measured(place, place)), parts=self._uneven_parts(place)
            )
            for place in range(len(self._results))
        ]
        if not noises:
            return ()
        return tuple(LayerNames(self._results[0].op.graph).noted(noises))

    def _measured(
        self, place: int, row: int
    ) -> tuple[_StoredResult, _FileTensor | str, dict[str, float], Array]:
        sums = dict(zip(_SUMS, map(float, self._sums[row]), strict=True))
        return self._results[place], self._tensors[place], sums, self._most[row]

    def _uneven_parts(self, place: int) -> tuple[LayerNoise, ...]:
        """Return the measurements of the parts of a result, if they differ much."""
        rows = [
            (row, part)
            for row, (whole, part) in enumerate(self._parts, len(self._results))
            if whole == place
        ]
        widths = [
            max(high, 0.0) + max(low, 0.0)
            for row, _ in rows
            for _, low, high, _ in [self._most[row]]
        ]
        if not ranges.are_uneven(widths):
            return ()
        return tuple(
            replace(_entry(*self._measured(place, row)), tensor=part.name)
            for row, part in rows
        )

    def _copied(self, model: Any, stand_ins: Replace, *, rounded: bool) -> Any:
        """Return a function of the model that returns all results."""
        copy = PartialCopy(model.graph, model.inputs, stand_ins)
        tensors = copy.of([_rounded(r) if rounded else r.tensor for r in self._results])
        return self._built(copy, tensors, {})

    def _each_alone(self, model: Any) -> Any:
        """Return a function of ops that read the results of others in float."""
        copy = PartialCopy(model.graph, model.inputs, ranges.frozen(self._values))
        wanted = [t for r in self._results for t in (r.tensor, _rounded(r))]
        copies = copy.of(wanted)
        exact, rounded = copies[::2], copies[1::2]
        fed: dict[str, Tensor] = {}
        simulations = {t.op for t, e in zip(rounded, exact, strict=True) if t is not e}
        with creation.neutral(copy.graph):
            for i, (tensor, result) in enumerate(zip(exact, rounded, strict=True)):
                fed[f"t{i}"] = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                readers = [op for op in tensor.consumers() if op not in simulations]
                read_instead(readers, tensor, fed[f"t{i}"])
                if result is not tensor:
                    read_instead(result.consumers(), result, fed[f"t{i}"])
        return self._built(copy, rounded, fed)

    def _built(
        self, copy: PartialCopy, tensors: Sequence[Tensor], fed: Mapping[str, Tensor]
    ) -> Any:
        with creation.neutral(copy.graph):
            outputs = {str(i): tf.identity(t) for i, t in enumerate(tensors)}
        inputs = {self._inputs[name]: t for name, t in copy.inputs.items()}
        return functions.build_function(copy.graph, {**inputs, **fed}, outputs, [], [])


def _rounded(result: _StoredResult) -> Tensor:
    simulation = result.simulation
    return result.tensor if simulation is None else simulation.outputs[0]


class _Row:
    """Values of a result in three forms, those that are finite in float."""

    def __init__(self, exact: Array, simulated: Array, alone: Array) -> None:
        self._counted = np.isfinite(exact)
        self._count = np.count_nonzero(self._counted)
        self.exact, self._simulated, self._alone = map(
            self._flat, (exact, simulated, alone)
        )

    def _flat(self, values: Array) -> Array:
        # In float64, since sums of squares of millions of values are compared.
        return self._only_counted(values.astype(np.float64))

    def _only_counted(self, values: Array) -> Array:
        if self._count == values.size:
            return values
        return np.where(self._counted, values, 0.0)

    def sums(self) -> list[float]:
        """Return the sums up to the one of simulated values, as `_SUMS` has them."""
        exact, simulated = self.exact, self._simulated
        own, accumulated = self._alone - exact, simulated - exact
        return [
            self._count,
            exact @ exact,
            own @ own,
            accumulated @ accumulated,
            exact @ simulated,
            simulated @ simulated,
        ]

    def outside(self, low: Array, high: Array) -> float:
        """Return how many values lie outside a range."""
        out = (self.exact < low) | (self.exact > high)
        return float(np.count_nonzero(self._only_counted(out)))

    def of_file(self, stored: Array, found: _FileTensor) -> list[float]:
        """Return the noise of a file's tensor, and how many steps it is apart."""
        levels = self._flat(stored)
        values, expected = levels, self._simulated
        if found.step:
            values = (levels - found.zero) * found.step
            rounded = np.round(self._simulated / found.step) + found.zero
            expected = np.clip(rounded, *found.limits)
        error = self._only_counted(values) - self.exact
        apart = self._only_counted(np.abs(expected - levels))
        return [error @ error, np.max(apart)]


def _entry(
    result: _StoredResult,
    found: _FileTensor | str,
    sums: Mapping[str, float],
    extremes: Array,
) -> LayerNoise:
    """Return the measurements of one result."""
    apart, low, high, moved = map(float, extremes)
    if moved > 0:
        found = "its tensor has another shape in the file"
    share = sums["outside"] / sums["count"] if sums["count"] else 0.0
    lengths = math.sqrt(sums["signal"] * sums["simulated"])
    noise = LayerNoise(
        result.op.name,
        result.op.type,
        result.tensor.name,
        signal_to_noise(sums["signal"], sums["own"]),
        signal_to_noise(sums["signal"], sums["accumulated"]),
        # Of two that are all zeros it is 1.
        sums["dot"] / lengths
        if lengths
        else float(sums["signal"] == sums["simulated"]),
        None if result.stored is None else float(share),
        silent=sums["signal"] == 0.0,
    )
    if isinstance(found, str):
        return replace(noise, unmatched=found)
    step = 1.0 if found.step else (low + high) / 255 or 1.0
    return replace(
        noise,
        file_tensor=found.tensor.name,
        file_steps=apart / step,
        file_ratio=signal_to_noise(sums["signal"], sums["file"]),
    )


def signal_to_noise(signal: float, noise: float) -> float:
    """Return a signal-to-noise ratio in dB, from sums of squares.

    Example:
        >>> from geutil.quantize.tflite.layer_noise import signal_to_noise
        >>> signal_to_noise(4.0, 0.04), signal_to_noise(0.0, 0.0)
        (20.0, inf)
        >>> [signal_to_noise(0.0, 1.0), signal_to_noise(4.0, float("inf"))]
        [-inf, -inf]
        >>> signal_to_noise(4.0, float("nan"))
        -inf
    """
    if noise == 0.0:
        return math.inf
    if not math.isfinite(noise):
        # Something that is finite in float is not when it is simulated.
        return -math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


_RELUS = ("RELU", "RELU6")
_TAILS = ("ADD", "SUB", *_RELUS)
"""Ops of files that compute the end of a kernel of the model, if it is not fused."""
_ACTIVATIONS = int8_kernels.FUSED_ACTIVATIONS.keys()
_SAME_STEP = 1e-4
"""How far the steps of a file and of the simulation are apart at most, relatively."""


@dataclass(frozen=True, eq=False)
class _StoredResult:
    """A tensor that quantization changes: the result of a quantized op.

    Attributes:
        op: the op whose kernel makes it.
        tensor: the tensor, before it is rounded.
        members: the ops that the kernel computes, the op among them.
        simulation: the FakeQuant op that rounds it; None if nothing does, as where only
            weights are rounded, or values are forwarded.
        stored: the FakeQuant op in whose range it is stored; None if it is a float.
    """

    op: Operation
    tensor: Tensor
    members: tuple[Operation, ...]
    simulation: Operation | None
    stored: Operation | None

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names that the file may give it, those of other parts of the kernel apart."""
        name = self.tensor.op.name
        if self.simulation is None:
            return (name,)
        # `to_int8` calls a FakeQuant op of a scope of its own after the scope.
        rounded = self.simulation.name
        return (name, rounded, rounded.rpartition("/")[0])

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the file may give it."""
        return (*self.own_names, *(op.name for op in self.members))


def _stored_results(model: Any) -> list[_StoredResult]:
    """Return the results of the quantized ops of a model, in topological order.

    That is what FakeQuant ops round, what ops make of rounded weights, and what ops
    forward in the range of what they read.
    """
    results = list(model.outputs.values())
    network = Network(model.graph, results)
    plan = plan_quantization(model.graph, results, QuantizeChoices())
    members: dict[Operation, list[Operation]] = {}
    for op in network.ops:
        if op in plan.kernels:
            members.setdefault(plan.kernels[op], []).append(op)
    simulations: MutableIdentityMap[list[Operation]] = MutableIdentityMap()
    for op in network.ops:
        if op.type in FAKE_QUANT and network.is_data(op.inputs[0]):
            earlier = simulations.get(op.inputs[0], [])
            simulations[op.inputs[0]] = [*earlier, op]
    found: list[_StoredResult] = []
    for op in network.ops:
        kernel = plan.kernels.get(op, op)
        parts = tuple(members.get(kernel, [op]))
        for tensor in op.outputs:
            if op.type in FAKE_QUANT or not network.is_data(tensor):
                continue
            for simulation in simulations.get(tensor, []):
                found.append(
                    _StoredResult(kernel, tensor, parts, simulation, simulation)
                )
            if tensor in simulations:
                continue
            forwarded = _forwarded_range(tensor, network)
            rounded_weights = (
                op in plan.kernels
                and _leaves(tensor, parts, network)
                and any(
                    simulation_of(t) is not None
                    for part in parts
                    for t in part.inputs
                    if network.is_parameter(t)
                )
            )
            if forwarded is not None or rounded_weights:
                found.append(_StoredResult(kernel, tensor, parts, None, forwarded))
    return found


def _forwarded_range(tensor: Tensor, network: Network) -> Operation | None:
    """Return the FakeQuant op whose values an op forwards; None for other ops."""
    op = tensor.op
    data = [t for t in op.inputs if network.is_data(t)]
    if op.type not in int8_kernels.PASSING or len(data) != 1:
        return None
    source = forwarded_from(tensor).op
    return source if source.type in FAKE_QUANT else None


def _leaves(tensor: Tensor, parts: Sequence[Operation], network: Network) -> bool:
    """Return whether a tensor is the result of a kernel, and no step inside of it."""
    inside = set(parts)
    readers = [edge.op for edge in network.readers(tensor)]
    return tensor in network.results or any(op not in inside for op in readers)


def _range_of_simulation(op: Operation, values: Mapping[Operation, Array]) -> Range:
    """Return the values that a FakeQuant op rounds to: the lowest and the highest."""
    form = ranges.format_of_simulation(op)
    return nudged(*ranges.simulated_ends(op, values), form.bits, form.narrow_range)


def _step_of_simulation(op: Operation, values: Mapping[Operation, Array]) -> Array:
    """Return the distance of two values that a FakeQuant op rounds to."""
    form = ranges.format_of_simulation(op)
    return step(*ranges.simulated_ends(op, values), form.bits, form.narrow_range)


@dataclass(frozen=True, eq=False)
class _FileTensor:
    """A tensor of a file that holds a result."""

    tensor: LiteTensor
    step: float
    zero: int
    limits: tuple[int, int]


def _file_tensors(
    model: Any,
    results: Sequence[_StoredResult],
    file: LiteFile,
    values: Mapping[Operation, Array],
) -> list[_FileTensor | str]:
    """Return for each result the tensor of a file that holds it, or why none does."""
    names = _Names(model, file)
    named = [names.candidates(result) for result in results]
    chosen = [
        names.likeliest(result, [t for t in tensors if _fits(result, t, values)])
        for result, tensors in zip(results, named, strict=True)
    ]
    # An Identity of a result may be in the same tensor: that is no other value.
    sources = [id(list(ranges.same_values(result.tensor))[-1]) for result in results]
    claims = Counter(
        tensor
        for tensor, _ in {
            (tensor, source)
            for fits, source in zip(chosen, sources, strict=True)
            for tensor in fits
        }
    )
    return [
        _matched(len(tensors), fits, claims)
        for tensors, fits in zip(named, chosen, strict=True)
    ]


class _Names:
    """The tensors that a file computes, by the names of the ops that they can be of."""

    def __init__(self, model: Any, file: LiteFile) -> None:
        # Constants share the names of ops, so that only what ops make counts.
        (signature,) = file.signatures.values()
        graph = signature.graph
        self._by_name: dict[str, list[LiteTensor]] = {}
        made = (tensor for op in graph.ops for tensor in op.outputs)
        for tensor in dict.fromkeys((*graph.inputs, *made)):
            sources = sources_of(tensor.name)
            if sources and not names_result(sources[0]):
                for name in spellings(sources[0]):
                    self._by_name.setdefault(name, []).append(tensor)
        self._ends: MutableIdentityMap[LiteTensor] = MutableIdentityMap()
        for tensors, ends in (
            (model.inputs, signature.inputs),
            (model.outputs, signature.outputs),
        ):
            for name, file_name in file_names(list(tensors)).items():
                for tensor in ranges.same_values(tensors[name]):
                    self._ends[tensor] = ends[file_name]

    def candidates(self, result: _StoredResult) -> list[LiteTensor]:
        """Return the tensors that bear a name of a result, or are the same end."""
        end = self._ends.get(result.tensor)
        named = (t for name in result.names for t in self._by_name.get(name, ()))
        return list(dict.fromkeys((*(() if end is None else (end,)), *named)))

    def likeliest(
        self, result: _StoredResult, fits: list[LiteTensor]
    ) -> list[LiteTensor]:
        """Return which of the tensors of a result are most surely it."""
        end = self._ends.get(result.tensor)
        if end is not None and end in fits:
            return [end]
        if result.stored is None:
            # Of integers their steps tell how far a kernel goes.
            fits = [t for t in fits if _is_whole(result, t)]
        fits = [t for t in fits if _is_of_output(result.tensor, t)]
        # Another activation makes a tensor: 'Relu6' may be a 'Relu'.
        kinds = {op.type.upper() for op in result.members} & {*_RELUS}
        others = {*_RELUS} - kinds if kinds else set()
        fits = [t for t in fits if t.producer is None or t.producer.kind not in others]
        own = {*result.own_names}
        exact = [t for t in fits if own & {*spellings(sources_of(t.name)[0])}] or fits
        # Not those that are another one as it is.
        return [
            t
            for t in exact
            if (maker := t.producer) is None
            or maker.kind != "RESHAPE"
            or maker.inputs[0] not in exact
        ]


def _is_of_output(tensor: Tensor, found: LiteTensor) -> bool:
    """Return whether a tensor is that output of its op, where both have as many."""
    maker, count = found.producer, len(tensor.op.outputs)
    if maker is None or count == 1 or len(maker.outputs) != count:
        return True
    return maker.outputs.index(found) == tensor.value_index


def _is_whole(result: _StoredResult, tensor: LiteTensor) -> bool:
    """Return whether the op that makes a tensor ends a kernel, and computes no more."""
    maker = tensor.producer
    if maker is None or maker.kind not in (*BIASED, "BATCH_MATMUL", *_TAILS):
        return False
    kinds = {op.type for op in result.members}
    fused = maker.options.get("fused_activation_function", "NONE") != "NONE"
    # A kernel that ends on the other side of the activation holds other values.
    if (fused or maker.kind in _RELUS) != bool(kinds & _ACTIVATIONS):
        return False
    adds = bool(kinds & op_types.SHIFTS)
    if maker.kind in _TAILS:
        return adds or maker.kind in _RELUS
    *_, slot = BIASED.get(maker.kind, (-1,))
    bias = maker.inputs[slot] if 0 <= slot < len(maker.inputs) else None
    if adds or bias is None:
        return adds == (bias is not None)
    # The converter gives zeros to layers that have no bias.
    return bias.value is not None and not np.any(bias.value)


def _fits(
    result: _StoredResult, tensor: LiteTensor, values: Mapping[Operation, Array]
) -> bool:
    """Return whether a tensor has the shape and the steps of a result."""
    shape = result.tensor.shape
    if shape.rank is None or tensor.shape is None or shape.rank != len(tensor.shape):
        return False
    sizes = zip(shape.as_list(), tensor.shape, strict=True)
    if any(a != b for a, b in sizes if a is not None and b is not None):
        return False
    if result.stored is None:
        return is_float(tensor.dtype)
    steps = tensor.quantization
    if steps is None or len(steps.scales) != 1:
        return False
    wanted = _step_of_simulation(result.stored, values)
    if wanted.ndim:
        return False
    return abs(steps.scales[0] / float(wanted) - 1.0) < _SAME_STEP


def _matched(
    named: int, fits: Sequence[LiteTensor], claims: Mapping[LiteTensor, int]
) -> _FileTensor | str:
    """Return the tensor that is a result, if it is one alone; else what is wrong."""
    if not named:
        return "no tensor of the file is named after it"
    if not fits:
        return f"none of {named} tensor(s) of its name has its range and shape"
    if len(fits) > 1:
        return f"{len(fits)} tensors of the file can be it"
    (tensor,) = fits
    if claims[tensor] > 1:
        return f"'{tensor.name}' of the file can be another op's"
    if tensor.quantization is None:
        return _FileTensor(tensor, 0.0, 0, (0, 0))
    (scale,), (zero,) = tensor.quantization.scales, tensor.quantization.zero_points
    limits = np.iinfo(tensor.dtype)
    return _FileTensor(tensor, scale, zero, (int(limits.min), int(limits.max)))
