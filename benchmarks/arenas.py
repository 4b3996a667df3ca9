"""Arenas of TFLite files: in the order of the file, and in the least that is found.

`python -m benchmarks.arenas [--json PATH] [--pixels 96]`. Networks of Keras, and cells
that are wired at random, with random weights, in float and frozen. Each file is run in
both orders, and the results must be the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.quantize import least_memory_order
from geutil.tflite.interpreter import RUNTIMES, Runtime, new_interpreter
from testdata.irregular_cells import irregular_network

_SEEDS = range(6)
_IRREGULAR_PIXELS = 32
_KERAS = ("InceptionV3", "NASNetMobile", "DenseNet121", "MobileNetV2")
_KB = 1024


@dataclass(frozen=True)
class ArenaRow:
    """One network under one runtime.

    Attributes:
        network: its name.
        pixels: of the image.
        ops: how many the file has.
        runtime: whose arena is made small.
        before: the bytes of the arena in the order of the file.
        after: in the order that was found.
        peak_before: the most bytes that are alive at once.
        peak_after: likewise, in the order that was found.
        bound: no order has a smaller arena.
        proven: whether the order is known to be the best.
        seconds: that the search took, with what it asks the interpreter.
        same: whether both files give the same results, bit by bit.
    """

    network: str
    pixels: int
    ops: int
    runtime: Runtime
    before: int
    after: int
    peak_before: int
    peak_after: int
    bound: int
    proven: bool
    seconds: float
    same: bool


def rows(pixels: int) -> Iterator[ArenaRow]:
    """Convert every network, order its ops for every runtime, and yield the rows."""
    for name, size, made in _networks(pixels):
        tf.keras.utils.set_random_seed(0)
        blob = _converted(made(), size)
        for runtime in RUNTIMES:
            began = perf_counter()
            found = least_memory_order(blob, runtime=runtime)
            seconds = perf_counter() - began
            (graph,) = found.subgraphs
            yield ArenaRow(
                name,
                size,
                graph.ops,
                runtime,
                found.arena_before,
                found.arena_after,
                graph.peak_before,
                graph.peak_after,
                found.lower_bound,
                found.proven,
                seconds,
                _result(blob, size) == _result(found.blob, size),
            )
        tf.keras.backend.clear_session()


def _networks(pixels: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    for name in _KERAS:
        made = getattr(tf.keras.applications, name)

        def network(made: Any = made) -> Any:
            return made(weights=None, input_shape=(pixels, pixels, 3))

        yield name, pixels, network
    for seed in _SEEDS:
        yield (
            f"irregular cells {seed}",
            _IRREGULAR_PIXELS,
            lambda seed=seed: irregular_network(seed, pixels=_IRREGULAR_PIXELS),
        )


def _converted(network: Any, pixels: int) -> bytes:
    from tensorflow.python.framework.convert_to_constants import (
        convert_variables_to_constants_v2,
    )

    function = tf.function(lambda image: network(image, training=False))
    spec = tf.TensorSpec([1, pixels, pixels, 3], name="image")
    frozen = convert_variables_to_constants_v2(function.get_concrete_function(spec))
    return tf.lite.TFLiteConverter.from_concrete_functions([frozen]).convert()


def _result(blob: bytes, pixels: int) -> bytes:
    image = np.random.default_rng(0).normal(size=(1, pixels, pixels, 3))
    interpreter = new_interpreter(blob)
    interpreter.allocate_tensors()
    (entry,), (exit_,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    interpreter.set_tensor(entry["index"], image.astype(np.float32))
    interpreter.invoke()
    return interpreter.get_tensor(exit_["index"]).tobytes()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.arenas")
    parser.add_argument("--json", type=Path, help="write the rows, not rounded")
    parser.add_argument("--pixels", type=int, default=96, help="of Keras' networks")
    options = parser.parse_args()
    print(
        "| network | pixels | ops | runtime | file's order, KB | least, KB | change | "
        "alive at the peak, KB | bound, KB | proven | same bits | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    found = []
    for row in rows(options.pixels):
        found.append(row)
        print(
            f"| {row.network} | {row.pixels} | {row.ops} | {row.runtime} | "
            f"{row.before / _KB:.0f} | {row.after / _KB:.0f} | "
            f"{100 * (row.after / row.before - 1):+.1f} % | "
            f"{row.peak_before / _KB:.0f} -> {row.peak_after / _KB:.0f} | "
            f"{row.bound / _KB:.0f} | {'yes' if row.proven else 'no'} | "
            f"{'yes' if row.same else 'NO'} | {row.seconds:.1f} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
