"""How far a file is from the network in float, how accurate, how large and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.glyphs import accuracy
from benchmarks.quantized.networks import Subject
from geutil.tflite.interpreter import new_interpreter

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Judgement:
    """What a file is like.

    Attributes:
        decibels: the signal to the noise in the outputs for the images to judge by:
            the variance of the float ones over the mean square of the differences.
        accuracy: in percent, of a trained network.
        size: in bytes.
        milliseconds: the median time of one image, on one thread.
        delegates: whether it ran with XNNPACK; some files run only without.
    """

    decibels: float
    accuracy: float | None
    size: int
    milliseconds: float
    delegates: bool


def judge(blob: bytes, subject: Subject, exact: Array) -> Judgement:
    """Run a file.

    Args:
        blob: the file.
        subject: its network.
        exact: what that makes of the images to judge by.

    Raises:
        ValueError, RuntimeError: it does not run.
    """
    try:
        runner = Runner(blob, delegates=True)
        found = runner(subject.judged)
    except (ValueError, RuntimeError):
        runner = Runner(blob, delegates=False)
        found = runner(subject.judged)
    milliseconds = 1e3 * median(runner.seconds)
    right = None
    if subject.labelled is not None:
        right = accuracy(runner, *subject.labelled)
    return Judgement(
        decibels(found, exact), right, len(blob), milliseconds, runner.delegates
    )


def decibels(found: Array, exact: Array) -> float:
    """Return the signal to noise ratio of outputs, in dB."""
    noise = np.mean(np.square(found.astype(np.float64) - exact))
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(np.var(exact, dtype=np.float64) / noise))


class Runner:
    """A file with one input and one output, run image by image, as in an app.

    Attributes:
        delegates: whether ops may go to XNNPACK.
        seconds: how long each image took.
    """

    def __init__(self, blob: bytes, delegates: bool) -> None:
        self.delegates = delegates
        self.seconds: list[float] = []
        self._interpreter = new_interpreter(blob, delegates=delegates)
        self._interpreter.allocate_tensors()
        (self._input,) = self._interpreter.get_input_details()
        (self._output,) = self._interpreter.get_output_details()

    def __call__(self, images: Array) -> Array:
        """Return the outputs as float32 for images as the network takes them."""
        return np.concatenate([self._one(image[None]) for image in images])

    def _one(self, image: Array) -> Array:
        self._interpreter.set_tensor(self._input["index"], _stored(image, self._input))
        began = perf_counter()
        self._interpreter.invoke()
        self.seconds.append(perf_counter() - began)
        stored = self._interpreter.get_tensor(self._output["index"])
        return _value(stored, self._output)


def _stored(value: Array, detail: dict[str, Any]) -> Array:
    scale, zero = detail["quantization"]
    if not scale:
        return value.astype(detail["dtype"])
    limits = np.iinfo(detail["dtype"])
    levels = np.round(value / scale) + zero
    return np.clip(levels, limits.min, limits.max).astype(detail["dtype"])


def _value(stored: Array, detail: dict[str, Any]) -> Array:
    scale, zero = detail["quantization"]
    return (stored.astype(np.float32) - zero) * np.float32(scale) if scale else stored
