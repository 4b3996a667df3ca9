"""Converts quantized models to TFLite files of int8 kernels."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.kinds import Graph, is_graph, type_name
from geutil.graph.tflite_files import FileOp, ops_of
from geutil.graph.trackables import new_trackable
from geutil.quantize.calibration.calibrating import calibrate
from geutil.quantize.calibration.sites import Site, find_sites, live_simulations
from geutil.quantize.int8.deploying import deployed
from geutil.quantize.int8.promises import missed
from geutil.quantize.int8.running import interpreter_of
from geutil.select.networks.origins import Origins

_logger = logging.getLogger("geutil")

_STARTS = ((-6.0, 6.0), (0.0, 6.0))
_BITS = 8
_COARSE = 3
"""Bits of weights of which the values, thirds, are none of the sevenths that TFLite's
4 bits hold. Those of 2 are; of 5 to 7 the nearest of 127ths will do."""
_SHOWN = 5
_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)
_LONGEST = 1500


def to_int8(model: Any, representative: Any = None) -> bytes:
    """Convert a quantized model to a TFLite file that computes in int8.

    TFLite's converter takes the ranges from the FakeQuant ops; inputs and outputs are
    int8, too, if they are floats in the model and quantized. What stays float is logged
    as a warning, op by op, which says so if the op is quantized in the model all the
    same. A model that was quantized for training is converted as it will be deployed:
    with the ranges as they are, whatever its delay. Biases that the converter would
    store wrong are changed in what it is given, by less than it rounds.

    Args:
        model: a `geutil.model.Model` that was quantized.
        representative: data to calibrate the model with first; see `calibrate`. None
            takes the ranges as they are.

    Returns:
        The file's bytes, for `tf.lite.Interpreter` or to be written to disk.

    Raises:
        ArgumentTypeError: it is no model.
        QuantizeError: the model was not quantized, or neither trained nor calibrated
            since; activations have other than 8 bits, or weights more; or the converter
            fails, whose message is in this one, or makes a file that cannot be run.

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
    if not live_simulations(graph):
        raise QuantizeError(
            "the model holds no FakeQuant op; quantize it first, with "
            "geutil.quantize.quantize(model, is_training=False)"
        )
    if representative is not None:
        calibrate(model, representative)
    _check_learnt(find_sites(graph, model.variables))
    _check_bits(graph)
    blob = _converted(deployed(model, mend=True))
    # Some files are made, and cannot be run.
    interpreter_of(blob)
    in_float = float_ops(blob)
    not_kept = missed(model, in_float)
    for op in in_float:
        _logger.warning(
            "to_int8: %s '%s' of the TFLite file computes in float%s",
            op.kind,
            op.result,
            ", though it is quantized in the model" if op in not_kept else "",
        )
    return blob


def float_ops(blob: bytes) -> list[FileOp]:
    """Return the ops of a TFLite file that read or make floats."""
    return [op for op in ops_of(blob) if op.is_float]


def _check_bits(graph: Graph) -> None:
    origins = Origins(graph)
    for op in live_simulations(graph):
        bits = int(op.get_attr("num_bits"))
        is_weights = origins.is_parameter(op.inputs[0])
        if bits == _BITS or (is_weights and bits < _BITS and bits != _COARSE):
            continue
        if is_weights and bits == _COARSE:
            raise QuantizeError(
                f"'{op.name}' has {bits} bits: the converter stores them in 4, which "
                "do not hold the same values; quantize with weight_bits=2 or 4"
            )
        raise QuantizeError(
            f"'{op.name}' has {bits} bits: TFLite's int8 kernels store activations in "
            "8 bits, and weights in 8 or less; quantize with activation_bits=8 and "
            "weight_bits up to 8 to convert, or keep the model for simulation"
        )


def _converted(function: Any) -> bytes:
    # The converter wants to know an owner of variables; without one the file has no
    # names.
    owner = new_trackable()
    owner.variables = list(function.variables)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], owner)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = tf.int8
    converter.inference_output_type = tf.int8
    try:
        with warnings.catch_warnings():
            # It misses the ranges of inputs, which FakeQuant ops tell.
            warnings.filterwarnings("ignore", "Statistics for quantized inputs")
            return bytes(converter.convert())
    # The converter raises classes of its own for what MLIR refuses.
    except Exception as error:
        raise QuantizeError(
            f"TFLite's converter fails: {_said(error)}. Replace ops that it names, or "
            "cut the model before them (model.cut); what the report of quantize skips "
            "stays float"
        ) from error


def _check_learnt(sites: list[Site]) -> None:
    activations = [site for site in sites if not site.is_weights]
    untouched = [site.name for site in activations if _is_at(site, _STARTS)]
    if len(untouched) < len(activations):
        # Data behind a Relu6 that fills its range looks untouched, too.
        untouched = [site.name for site in activations if _is_at(site, _STARTS[:1])]
    if not untouched:
        return
    names = ", ".join(f"'{name}'" for name in untouched[:_SHOWN])
    more = len(untouched) - _SHOWN
    raise QuantizeError(
        f"{len(untouched)} range(s) are as they were initialized: {names}"
        f"{f' and {more} more' if more > 0 else ''}; call geutil.quantize.calibrate "
        "with data, train the model, or restore a checkpoint"
    )


def _is_at(site: Site, ranges: Sequence[tuple[float, float]]) -> bool:
    low, high = site.read()
    return any(np.all(low == a) and np.all(high == b) for a, b in ranges)


def _said(error: Exception) -> str:
    """Return what the converter says of the ops, without its traces."""
    text = str(error)
    said = dict.fromkeys(match[1].strip() for match in _SAID.finditer(text))
    return "; ".join(said)[:_LONGEST] or text[:_LONGEST]
