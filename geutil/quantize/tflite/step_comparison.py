"""Compares a TFLite file with the model that it was made from, in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import QuantizeError
from geutil.graph.functions import call_function
from geutil.lazy import Shown
from geutil.quantize.calibration.calibration import batches
from geutil.quantize.calibration.ranges import JoinedPart, are_uneven, parts_of
from geutil.quantize.tflite.deployment import deployed, float_ops, missed
from geutil.quantize.tflite.layer_noise import LayerNoise, NoiseMeter, layer_lines
from geutil.quantize.tflite.runner import Runner
from geutil.select.networks.outputs import ATOL, Motion, Movement, rows_of
from geutil.tflite import LiteOp
from geutil.tflite.op_names import file_names
from geutil.tflite.parts import Array

_MARGIN = 2
"""Steps between the two largest values from which on they have to agree."""


@dataclass(frozen=True)
class OutputSteps:
    """The differences of one output in steps: the distance between int8 values.

    Attributes:
        output: the name of the output.
        step: the size of a step. Integers that were not quantized have steps of 1.
            Dequantized floats have the steps of their integers; for others it is 1/255
            of the span of the first batch.
        counts: the number of values that differ by 0, 1, 2 and so on steps; the last
            entry is 255 and more.
        clear: the number of samples whose largest value leads by more than two steps.
        agreeing: the number of these with the largest value at the same index.
        width: the number of steps that the values of the model span, including zero.
        parts: for a concat, the same for each input, under the name of its op, if some
            take 16 times as much of the range as others. Each float has its own steps.
        motion: how much the output of the model varies over the samples; None if
            unknown. If it is no more than a step or 1e-6, agreement proves nothing.
    """

    output: str
    step: float
    counts: tuple[int, ...]
    clear: int
    agreeing: int
    width: float = 0.0
    parts: tuple[OutputSteps, ...] = ()
    motion: Motion | None = None

    def __str__(self) -> str:
        motion = ""
        if self.motion is not None:
            motion = self.motion.told(0.0, max(self.step, ATOL), equal=self.most <= 1)
        return (
            f"within 1 step: {self.share(1):.4%}, most: {self.most}, same largest: "
            f"{self.agreeing} of {self.clear} (step {self.step:.4g})"
            f"{'; ' if motion else ''}{motion}"
        )

    @property
    def most(self) -> int:
        """The largest difference, in steps."""
        return max((n for n, count in enumerate(self.counts) if count), default=0)

    def share(self, steps: int) -> float:
        """Return the fraction of values that differ by at most so many steps."""
        total = sum(self.counts)
        return sum(self.counts[: steps + 1]) / total if total else 1.0

    @property
    def agreement(self) -> float:
        """The fraction of clear samples whose largest value is at the same index."""
        return self.agreeing / self.clear if self.clear else 1.0


@dataclass(frozen=True)
class Int8Comparison(Shown):
    """The differences between a TFLite file and its model.

    Attributes:
        outputs: one entry for each output, in order.
        samples: the number of samples that were run.
        float_ops: the ops of the file that compute in float, as type and name.
        missed: those of them that are quantized in the model.
        layers: the noise of each quantized op, in graph order; empty unless requested.
    """

    outputs: tuple[OutputSteps, ...]
    samples: int
    float_ops: tuple[str, ...]
    missed: tuple[str, ...] = ()
    layers: tuple[LayerNoise, ...] = ()

    @property
    def most(self) -> int:
        """The largest difference of all outputs, in steps."""
        return max((output.most for output in self.outputs), default=0)

    @property
    def agreement(self) -> float:
        """The smallest agreement of all outputs and their parts."""
        judged = [part for output in self.outputs for part in (output, *output.parts)]
        return min((each.agreement for each in judged), default=1.0)

    def __str__(self) -> str:
        """Return the report as lines: the whole, each output, ops left in float."""
        apart = f"{self.most} step(s) apart at most"
        if not self.outputs:
            apart = "no outputs to compare"
        lines = [
            f"{self.samples} sample(s), {apart}, {len(self.float_ops)} float op(s)"
        ]
        width = max((len(entry.output) for entry in self.outputs), default=0)
        for output in self.outputs:
            lines.append(f"  {output.output:<{width}}  {output}")
            lines += [
                f"    {part.output}, {part.width:.3g} step(s) wide: {part}"
                for part in output.parts
            ]
        for op in self.float_ops:
            noted = ", though it is quantized in the model"
            lines.append(f"  float: {op}{noted if op in self.missed else ''}")
        if self.layers:
            lines += layer_lines(self.layers)
        return "\n".join(lines)


def compare_int8(
    model: Any, tflite: bytes, dataset: Any, *, layers: bool = False
) -> Int8Comparison:
    """Run a model and the TFLite file made from it on the same data.

    The file is run by TFLite's builtin kernels, without delegates. Inputs of both and
    outputs of the model are rounded to the file's steps. A model that was quantized for
    training is run as it will be deployed, and does not learn.

    Args:
        model: the `geutil.model.Model` that the file was made from.
        tflite: the result of `to_int8`.
        dataset: the data, as `calibrate` takes it.
        layers: whether to report also the noise of each quantized op: by itself,
            accumulated, and in the file; see `LayerNoise`.

    Returns:
        For each output, the differences of the values in steps, and the number of
        samples whose largest value along the last axis is at the same index, among
        those where it leads by more than two steps. For a concat, the same for each
        input if their ranges are very different.

    Raises:
        ArgumentTypeError: the data is of another type.
        QuantizeError: the data is empty or does not fit; the file is that of another
            model; or, with `layers`, the model has no FakeQuant op.

    Cost: one run of each for each batch; with `layers`, three more of the model, and
    all results of a batch in memory at once.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import compare_int8, quantize, to_int8
        >>> kernel = tf.random.stateless_normal([3, 5], seed=(1, 2))
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
        ... def f(x):
        ...     return {"y": tf.matmul(x, kernel)}
        >>> m = model.open(f)
        >>> _ = quantize(m, is_training=False)
        >>> data = [{"x": tf.random.stateless_normal([8, 3], seed=(3, 4))}]
        >>> compare_int8(m, to_int8(m, data), data).most <= 1
        True
    """
    ends = list(model.inputs), list(model.outputs)
    runner = Runner(tflite, *ends, keep_tensors=layers)
    meter = NoiseMeter(model, runner) if layers else None
    function = deployed(model)
    tallies = {
        name: _Tally(name, runner.quantization(name), parts_of(tensor))
        for name, tensor in model.outputs.items()
    }
    movements = {name: Movement() for name in tallies}
    inputs, outputs = file_names(list(model.inputs)), file_names(list(model.outputs))
    in_float = float_ops(runner.file)
    samples = 0
    for sample in batches(dataset, model.inputs):
        stored = runner.stored(sample)
        # As the file sees it: values between two steps may be rounded either way.
        rounded_inputs = runner.values(stored)
        model_outputs = call_function(
            function,
            {inputs[name]: tf.constant(x) for name, x in rounded_inputs.items()},
        )
        file_outputs = runner.run(stored)
        for name, tally in tallies.items():
            values = model_outputs[outputs[name]].numpy()
            tally.add(values, file_outputs[name])
            movements[name].add(values, rows_of(sample))
        if meter is not None:
            meter.add(sample, rounded_inputs)
        samples += len(next(iter(sample.values()))) if sample else 1
    return Int8Comparison(
        tuple(
            replace(tally.entry(), motion=movements[name].entry())
            for name, tally in tallies.items()
        ),
        samples,
        tuple(map(_op_text, in_float)),
        tuple(map(_op_text, missed(model, in_float))),
        () if meter is None else meter.layers(),
    )


def _op_text(op: LiteOp) -> str:
    return f"{op.kind} '{op.result}'"


class _Tally:
    """Counts differences of an output."""

    def __init__(
        self,
        name: str,
        quantization: tuple[float, int],
        parts: Sequence[JoinedPart] = (),
    ) -> None:
        self._name = name
        self._low = self._high = 0.0
        self._parts = [(part, _Tally(part.name, quantization)) for part in parts]
        self._step, self._zero = quantization
        self._counts = np.zeros(256, np.int64)
        self._clear = 0
        self._agreeing = 0

    def add(self, model_output: Array, file_output: Array) -> None:
        """Take in the outputs of the model and the file for a batch."""
        if model_output.shape != file_output.shape:
            raise QuantizeError(
                f"output '{self._name}' has shape {list(model_output.shape)} in the "
                f"model and {list(file_output.shape)} in the TFLite file, which is of "
                "another model"
            )
        for part, tally in self._parts:
            tally.add(part.of(model_output), part.of(file_output))
        self._low = min(self._low, float(model_output.min(initial=0)))
        self._high = max(self._high, float(model_output.max(initial=0)))
        # An output in float has no steps: 255 of them span its first batch.
        if not self._step:
            self._step = float(np.ptp(model_output)) / 255 or 1.0
        expected = np.round(model_output / self._step) + self._zero
        if np.issubdtype(file_output.dtype, np.floating):
            file_output = np.round(file_output / self._step)
        elif np.issubdtype(model_output.dtype, np.floating):
            # The file holds no value outside of its type.
            limits = np.iinfo(file_output.dtype)
            expected = np.clip(expected, limits.min, limits.max)
        apart = np.abs(expected - file_output.astype(float)).reshape(-1)
        # The last count is that of 255 steps and more.
        self._counts += np.bincount(np.minimum(apart, 255).astype(int), minlength=256)
        # A winner is compared only where a row has several values.
        if model_output.ndim < 2 or model_output.shape[-1] < 2:
            return
        rows = expected.reshape(-1, expected.shape[-1])
        first, second = np.sort(rows, axis=-1)[:, -2:].T[::-1]
        clear = first - second > _MARGIN
        same = rows.argmax(-1) == file_output.reshape(rows.shape).argmax(-1)
        self._clear += int(clear.sum())
        self._agreeing += int((clear & same).sum())

    def entry(self) -> OutputSteps:
        """Return the counts."""
        most = int(np.flatnonzero(self._counts)[-1]) if self._counts.any() else 0
        counts = tuple(int(n) for n in self._counts[: most + 1])
        width = (self._high - self._low) / self._step if self._step else 0.0
        clear = self._clear, self._agreeing
        parts = tuple(tally.entry() for _, tally in self._parts)
        if not are_uneven([part.width * part.step for part in parts]):
            parts = ()
        return OutputSteps(self._name, self._step, counts, *clear, width, parts)
