"""The LiteRT quantizer, in the environment that `make bench-quantize` sets up for it.

`python -m benchmarks.quantized.litert FLOAT.tflite CALIBRATION.npz FOLDER`: writes a
file for each recipe into the folder. It imports neither geutil nor TensorFlow. The
recipes are the best that this quantizer offers by its policy: ops that it has no 4-bit
kernel for, depthwise convolutions among them, get 8 bits, and where an algorithm is for
some ops only, the others get its plain one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from litert_quantizer import qtyping, quantizer
from litert_quantizer.utils import tfl_flatbuffer_utils

from benchmarks.quantized.made import write_all

Recipe = Callable[[Any], None]
Op = qtyping.TFLOperationName
Algorithm = quantizer.AlgorithmName
FEW_BITS = (Op.CONV_2D, Op.FULLY_CONNECTED)
"""What has 4-bit kernels."""
MIN_MAX, OCTAV, MSE, GPTQ = (
    Algorithm.MIN_MAX_UNIFORM_QUANT,
    Algorithm.OCTAV,
    Algorithm.MSE,
    Algorithm.GPTQ,
)
OPS_OF = {
    MIN_MAX: FEW_BITS,
    OCTAV: FEW_BITS,
    MSE: FEW_BITS,
    # Of convolutions it cannot tell the Hessian.
    GPTQ: (Op.FULLY_CONNECTED,),
}


def static(activations: int, weights: int, algorithm: Any = MIN_MAX) -> Recipe:
    """Return a recipe for integers everywhere."""

    def add(q: Any) -> None:
        q.add_static_config(".*", Op.ALL_SUPPORTED, activations, 8)
        for op, chosen in _chosen(weights, algorithm):
            q.add_static_config(".*", op, activations, weights, algorithm_key=chosen)

    return add


def weight_only(weights: int, algorithm: Any = MIN_MAX) -> Recipe:
    """Return a recipe for weights that are made float before they are used."""

    def add(q: Any) -> None:
        q.add_weight_only_config(".*", Op.ALL_SUPPORTED, 8)
        for op, chosen in _chosen(weights, algorithm):
            q.add_weight_only_config(".*", op, weights, algorithm_key=chosen)

    return add


def dynamic(weights: int, algorithm: Any = MIN_MAX) -> Recipe:
    """Return a recipe for activations that are rounded while the file runs."""

    def add(q: Any) -> None:
        q.add_dynamic_config(".*", Op.ALL_SUPPORTED, 8)
        for op, chosen in _chosen(weights, algorithm):
            q.add_dynamic_config(".*", op, weights, algorithm_key=chosen)

    return add


def _chosen(weights: int, algorithm: Any) -> list[tuple[Any, Any]]:
    """Return the ops that get other weights or another algorithm, and which one."""
    if weights == 8:
        return [(op, algorithm) for op in OPS_OF[algorithm] if algorithm != MIN_MAX]
    return [(op, algorithm if op in OPS_OF[algorithm] else MIN_MAX) for op in FEW_BITS]


RECIPES: dict[str, Recipe] = {
    "int8, min-max": static(8, 8),
    "int8, OCTAV": static(8, 8, OCTAV),
    "int8, MSE": static(8, 8, MSE),
    "int8, GPTQ": static(8, 8, GPTQ),
    "4/8, min-max": static(8, 4),
    "4/8, OCTAV": static(8, 4, OCTAV),
    "4/8, MSE": static(8, 4, MSE),
    "4/8, GPTQ": static(8, 4, GPTQ),
    "16x8, min-max": static(16, 8),
    "weights int8, min-max": weight_only(8),
    "weights int4, min-max": weight_only(4),
    "weights int4, OCTAV": weight_only(4, OCTAV),
    "weights int4, MSE": weight_only(4, MSE),
    "weights int4, GPTQ": weight_only(4, GPTQ),
    "dynamic int8, min-max": dynamic(8),
    "dynamic int4, min-max": dynamic(4),
    "dynamic int4, OCTAV": dynamic(4, OCTAV),
}


def quantized(path: str, add: Recipe, images: Any) -> bytes:
    """Return the file that a recipe makes of a float one."""
    made = quantizer.Quantizer(path)
    add(made)
    ranges = _calibrated(made, path, images)
    if _asks_for(made, GPTQ):
        # Ranges of what a layer reads come from the op before, without its Hessian;
        # the weights would be nonsense.
        for name, found in hessians(path, images).items():
            ranges.setdefault(name, {}).update(found)
    result = made.quantize(ranges or None, enable_progress_report=False)
    return bytes(result.quantized_model)


def hessians(path: str, images: Any) -> dict[str, dict[str, Any]]:
    """Return what GPTQ needs of what dense layers read, by the name of the tensor."""
    made = quantizer.Quantizer(path)
    made.add_weight_only_config(".*", Op.FULLY_CONNECTED, 8, algorithm_key=GPTQ)
    ranges = _calibrated(made, path, images)
    keys = ("hessian", "num_samples")
    found = {
        name: {key: each[key] for key in keys}
        for name, each in ranges.items()
        if "hessian" in each
    }
    for result, data in _moves(path):
        # The quantizer gives the result what it knows of the data.
        if result in found:
            found[data] = found[result]
    return found


def _moves(path: str) -> list[tuple[str, str]]:
    """Return results and data, by name, of ops that move values, from the last on."""
    model = tfl_flatbuffer_utils.read_model(path)
    graph = model.subgraphs[0]
    codes = [code.builtinCode for code in model.operatorCodes]
    names = [tensor.name.decode() for tensor in graph.tensors]
    return [
        (names[op.outputs[0]], names[op.inputs[0]])
        for op in reversed(graph.operators)
        if tfl_flatbuffer_utils.TFL_OP_CODE_TO_NAME.get(codes[op.opcodeIndex])
        in (Op.RESHAPE, Op.TRANSPOSE)
    ]


def _calibrated(made: Any, path: str, images: Any) -> dict[str, Any]:
    ((key, ends),) = Interpreter(path).get_signature_list().items()
    (name,) = ends["inputs"]
    # One batch: of several, ranges would be moving averages that begin with the first.
    ranges: dict[str, Any] = made.calibrate({key: [{name: images}]}, num_threads=1)
    return ranges


def _asks_for(made: Any, algorithm: Any) -> bool:
    recipe = made.get_quantization_recipe()
    return any(each["algorithm_key"] == algorithm for each in recipe)


def main() -> None:
    """Write all files."""
    path, calibration, folder = sys.argv[1:]
    with np.load(calibration) as kept:
        (images,) = kept.values()
    schemes = {
        name: partial(quantized, path, add, images) for name, add in RECIPES.items()
    }
    write_all(schemes, Path(folder))


if __name__ == "__main__":
    main()
