"""Bits chosen under a budget, next to the same bytes spent without looking.

`python -m benchmarks.chosen_bits [--share 0.6] [--images 4000] [--network NAME]` makes
int8 files of the trained networks of `benchmarks.glyphs`: with 8 bits in each layer,
with bits chosen for a share of these bytes, with 4 bits for the largest layers until
as few bytes are left, for the first layers or the last ones, and with 4 bits in all. It
prints what the files do: bytes of weights as they are read from the files, signal to
noise and accuracy on images that nothing was chosen by. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import glyphs
from benchmarks.quantized.judging import Array, Runner, decibels
from benchmarks.quantized.networks import TRAINED
from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.quantize import (
    BitPlan,
    LayerBits,
    calibrate,
    choose_bits,
    quantize,
    to_int8,
)
from geutil.quantize.bit_plans import overrides_of

_SEED = 3_100_000
"""Of no image that anything was trained on."""
_CALIBRATION, _BATCH = 256, 32
SHARE = 0.6
LOSS, AHEAD = 0.5, 1.5
"""What bits chosen for that share may lose in points, and must be ahead in dB."""


@dataclass(frozen=True)
class Result:
    """What the file of one way does.

    Attributes:
        network: the network's name.
        way: how the bits were chosen.
        share: the bytes of the weights, of those in 8 bits.
        decibels: signal to noise of the file's outputs.
        loss: points of accuracy below float.
        size: the bytes of the file.
    """

    network: str
    way: str
    share: float
    decibels: float
    loss: float
    size: int


def results(name: str, network: Any, share: float, images: int) -> Iterator[Result]:
    """Make and judge the files of a network.

    Args:
        name: its name.
        network: the network, of Keras.
        share: the bytes of weights, of those in 8 bits.
        images: how many images files are judged by.
    """
    m = model.open(network)
    fold_batch_norms(m)
    (input_name,) = m.inputs
    x, _ = glyphs.images(_CALIBRATION, _SEED)
    data = [{input_name: x[at : at + _BATCH]} for at in range(0, len(x), _BATCH)]
    judged, labels = glyphs.images(images, _SEED + 1)
    exact = _in_float(network, judged)
    right = glyphs.accuracy(lambda y: _in_float(network, y), judged, labels)
    plan = choose_bits(m, data, size=share)
    for way, bits in ways(plan, share).items():
        blob = _file(m, data, plan.method, bits)
        found = Runner(blob, delegates=True)(judged)
        kept = 100.0 * float((found.argmax(-1) == labels).mean())
        size = sum(_size(layer, bits[layer.ops[0]]) for layer in plan.layers)
        yield Result(
            name,
            way,
            size / plan.int8_size,
            decibels(found, exact),
            right - kept,
            len(blob),
        )


def ways(plan: BitPlan, share: float) -> dict[str, dict[str, int]]:
    """Return the bits of each op, by the way in which they are chosen."""
    by_size = sorted(plan.layers, key=lambda layer: -layer.weights)
    budget = share * plan.int8_size
    return {
        "8 bits": {op: 8 for layer in plan.layers for op in layer.ops},
        "chosen": {op: layer.bits for layer in plan.layers for op in layer.ops},
        "largest first": _until_small(by_size, budget),
        "first layers": _until_small(plan.layers, budget),
        "last layers": _until_small(plan.layers[::-1], budget),
        "4 bits": {op: 4 for layer in plan.layers for op in layer.ops},
    }


def _until_small(layers: Sequence[LayerBits], budget: float) -> dict[str, int]:
    """Give 4 bits to one layer after the other, until all fit."""
    bits = {op: 8 for layer in layers for op in layer.ops}
    size = sum(_size(layer, 8) for layer in layers)
    for layer in layers:
        saved = _size(layer, 8) - _size(layer, 4)
        if size > budget and saved:
            bits |= dict.fromkeys(layer.ops, 4)
            size -= saved
    return bits


def _size(layer: LayerBits, bits: int) -> int:
    return next(option.size for option in layer.options if option.bits == bits)


def _file(
    m: Any, data: Sequence[Mapping[str, Array]], method: str, bits: Mapping[str, int]
) -> bytes:
    copy = m.cut()
    quantize(copy, is_training=False, overrides=overrides_of(bits))
    calibrate(copy, data, method)
    return to_int8(copy)


def _in_float(network: Any, images: Array) -> Array:
    parts = [
        np.asarray(network(images[at : at + _BATCH], training=False))
        for at in range(0, len(images), _BATCH)
    ]
    return np.concatenate(parts)


def main() -> None:
    """Print a table for each network, and what is not reached."""
    parser = argparse.ArgumentParser("python -m benchmarks.chosen_bits")
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--network", action="append", choices=list(TRAINED))
    options = parser.parse_args()
    for name in options.network or TRAINED:
        found = list(results(name, TRAINED[name](), options.share, options.images))
        print(f"\n{name}\n\n| bits | weights | dB | loss, points | file, KB |")
        print("|---|---|---|---|---|")
        for each in found:
            print(
                f"| {each.way} | {each.share:.1%} | {each.decibels:.1f} | "
                f"{each.loss:+.2f} | {each.size / 1000:.0f} |"
            )
        print(*judged(found), sep="\n", flush=True)


def judged(found: Sequence[Result]) -> list[str]:
    """Return lines on what is to be reached: loss, and dB ahead of other ways."""
    by_way = {each.way: each for each in found}
    chosen, others = by_way["chosen"], ("largest first", "first layers", "last layers")
    best = max((by_way[way] for way in others), key=lambda each: each.decibels)
    ahead = chosen.decibels - _between(by_way["4 bits"], by_way["8 bits"], chosen.share)
    return [
        f"\nloss {chosen.loss:+.2f} points, at most {LOSS} wanted"
        + ("" if chosen.loss <= LOSS else " (!)"),
        f"{ahead:+.1f} dB ahead of the line from 4 to 8 bits, {AHEAD} wanted"
        + ("" if ahead >= AHEAD else " (!)"),
        f"{chosen.decibels - best.decibels:+.1f} dB ahead of '{best.way}'",
    ]


def _between(four: Result, eight: Result, share: float) -> float:
    """Return the dB at a size on the line between two files of equal bits."""
    part = (share - four.share) / (eight.share - four.share)
    return four.decibels + part * (eight.decibels - four.decibels)


if __name__ == "__main__":
    main()
