"""Converts quantized models to TFLite files of int8 kernels."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.kinds import is_graph, type_name
from geutil.graph.tflite_files import FileOp, ops_of
from geutil.quantize.calibration.calibrating import calibrate
from geutil.quantize.calibration.sites import Site, find_sites
from geutil.quantize.finding.kernels import FAKE_QUANT

_logger = logging.getLogger("geutil")

_STARTS = ((-6.0, 6.0), (0.0, 6.0))
_SHOWN = 5


def to_int8(model: Any, representative: Any = None) -> bytes:
    """Convert a quantized model to a TFLite file that computes in int8.

    TFLite's converter takes the ranges from the FakeQuant ops; inputs and outputs are
    int8, too. What stays float is logged as a warning, op by op.

    Args:
        model: a `geutil.model.Model` that was quantized.
        representative: data to calibrate the model with first; see `calibrate`. None
            takes the ranges as they are.

    Returns:
        The file's bytes, for `tf.lite.Interpreter` or to be written to disk.

    Raises:
        ArgumentTypeError: it is no model.
        QuantizeError: the model was not quantized, or neither trained nor calibrated
            since; or the converter fails, whose message is in this one.

    Cost: what TFLite's converter takes: seconds for a network of 150 layers.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import calibrate, quantize, to_int8
        >>> kernel = tf.random.stateless_normal([3, 3, 3, 8], seed=(1, 2))
        >>> spec = tf.TensorSpec([1, 8, 8, 3], name="x")
        >>> @tf.function(input_signature=[spec])
        ... def f(x):
        ...     return {"y": tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))}
        >>> m = model.open(f)
        >>> _ = quantize(m, is_training=False)
        >>> x = tf.random.stateless_normal([1, 8, 8, 3], seed=(3, 4))
        >>> _ = calibrate(m, [{"x": x}])
        >>> blob = to_int8(m)
        >>> interpreter = tf.lite.Interpreter(model_content=blob)
        >>> interpreter.get_output_details()[0]["dtype"].__name__
        'int8'
    """
    graph: Any = getattr(model, "graph", None)
    if not hasattr(model, "concrete_function") or not is_graph(graph):
        raise ArgumentTypeError(
            f"a geutil.model.Model is converted, not a {type_name(model)}; open it "
            "with geutil.model.open"
        )
    if not any(op.type in FAKE_QUANT for op in graph.get_operations()):
        raise QuantizeError(
            "the model holds no FakeQuant op; quantize it first, with "
            "geutil.quantize.quantize(model, is_training=False)"
        )
    if representative is not None:
        calibrate(model, representative)
    _check_learnt(find_sites(graph, model.variables))
    blob = _converted(model.concrete_function())
    for op in float_ops(blob):
        _logger.warning(
            "to_int8: %s '%s' of the TFLite file computes in float", op.kind, op.result
        )
    return blob


def float_ops(blob: bytes) -> list[FileOp]:
    """Return the ops of a TFLite file that read or make floats."""
    return [op for op in ops_of(blob) if op.is_float]


def _converted(function: Any) -> bytes:
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = tf.int8
    converter.inference_output_type = tf.int8
    try:
        return bytes(converter.convert())
    # The converter raises classes of its own for what MLIR refuses.
    except Exception as error:
        raise QuantizeError(f"TFLite's converter fails: {error}") from error


def _check_learnt(sites: list[Site]) -> None:
    untouched = [s.name for s in sites if not s.is_weights and _is_untouched(s)]
    if not untouched:
        return
    names = ", ".join(f"'{name}'" for name in untouched[:_SHOWN])
    more = len(untouched) - _SHOWN
    raise QuantizeError(
        f"{len(untouched)} range(s) are as they were initialized: {names}"
        f"{f' and {more} more' if more > 0 else ''}; call geutil.quantize.calibrate "
        "with data, train the model, or restore a checkpoint"
    )


def _is_untouched(site: Site) -> bool:
    low, high = site.read()
    return any(np.all(low == a) and np.all(high == b) for a, b in _STARTS)
