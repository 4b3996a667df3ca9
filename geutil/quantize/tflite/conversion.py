"""Conversion of models to TFLite files by scheme; ranges that files keep.

A file has the steps of its tensors, and no FakeQuant ops. With the ranges beside them,
and the choices by which its model was quantized, the model in float is quantized again
as it was, without data.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError, TFLiteError, Words
from geutil.graph.types import as_model, type_name
from geutil.quantize.bit_plans import overrides_of
from geutil.quantize.calibration.calibration import calibrate, set_ranges_of_weights
from geutil.quantize.calibration.ranges import find_sites
from geutil.quantize.planning.network import is_quantized, live_simulations
from geutil.quantize.simulation import quantize
from geutil.quantize.spec import QUANTIZE, SCHEMES, Range, Scheme, scheme_named
from geutil.quantize.tflite import deployment, runner, stored_weights
from geutil.quantize.tflite.converter_workarounds import Apart
from geutil.quantize.tflite.deployment import converted, deployed
from geutil.quantize.tflite.integer_kernels import lower
from geutil.quantize.tflite.least_memory import least_memory_order
from geutil.quantize.tflite.stored_weights import LeftInFloat
from geutil.select.networks.layers import Origins, layer_of
from geutil.tflite import LiteFile
from geutil.tflite.effects import without
from geutil.tflite.kinds import name_runtime, slow_ops
from geutil.tflite.op_names import file_names
from geutil.tflite.parts import Buffer
from geutil.tflite.type_changes import End, set_types

Types = str | Mapping[str, str] | None
"""The type of all inputs or outputs that are quantized, or by name those of some."""

_CHOICES = {
    "int8": ("int8", "uint8", "float32"),
    "int16": ("int16", "float32"),
    "float32": ("float32",),
}
"""By the type that a file's kernels read or make, the types that an end can have."""
_NAMES = tuple(dict.fromkeys(name for names in _CHOICES.values() for name in names))


class EndTypes:
    """The types that a caller wants the ends of a model's file to have."""

    def __init__(self, model: Any, inputs: Types, outputs: Types) -> None:
        self._wanted = {
            "input": _by_name("input", list(model.inputs), inputs),
            "output": _by_name("output", list(model.outputs), outputs),
        }
        # A named end has to have its type; among all ends, integers keep theirs.
        self._named = {
            "input": isinstance(inputs, Mapping),
            "output": isinstance(outputs, Mapping),
        }

    def given(self, blob: bytes) -> bytes:
        """Return a file whose ends have these types."""
        if not any(self._wanted.values()):
            return blob
        file = tflite.open(blob)
        (signature,) = file.signatures.values()
        sides = {"input": signature.inputs, "output": signature.outputs}
        ends = [
            End(what, name, wanted, self._named[what], tensor, key)
            for what, tensors in sides.items()
            for key, tensor in tensors.items()
            for name, wanted in [self._wanted[what].get(key, ("", ""))]
            if wanted
        ]
        try:
            set_types(file, signature.graph, ends, _CHOICES)
        except TFLiteError as error:
            raise QuantizeError(str(error)) from error
        return file.to_bytes()


def _by_name(
    what: str, names: Iterable[str], types: Types
) -> dict[str, tuple[str, str]]:
    """Return by their names in a file the names and the types of ends."""
    if types is not None and not isinstance(types, str | Mapping):
        raise ArgumentTypeError(
            f"{what}_type is the name of a type, or a mapping from names to such, not "
            f"{type_name(types)}"
        )
    file_name_of = file_names([*names])
    wanted = dict.fromkeys(file_name_of, types) if isinstance(types, str) else types
    for name, kind in (wanted or {}).items():
        if name not in file_name_of:
            raise QuantizeError(
                f"the model has no {what} '{name}' to give a type; its {what}s are "
                f"{', '.join(file_name_of)}"
            )
        if kind not in _NAMES:
            raise QuantizeError(
                f"there is no type '{kind}' of {what}s; the types are "
                f"{', '.join(_NAMES)}"
            )
    return {file_name_of[name]: (name, kind) for name, kind in (wanted or {}).items()}


_logger = logging.getLogger("geutil")
_CONVERTED = "a geutil.model.Model is converted, not"
# The bits of activations of 16x8.
_INT16_BITS = 16
_LEAST_MEMORY = "least_memory"
_ORDERS = ("converter", _LEAST_MEMORY)


def to_int8(
    model: Any,
    representative: Any = None,
    *,
    input_type: str | Mapping[str, str] | None = None,
    output_type: str | Mapping[str, str] | None = None,
) -> bytes:
    """Convert a quantized model to a TFLite file that computes in int8.

    TFLite's converter writes a file of float kernels with the ranges of the FakeQuant
    ops between them, and geutil converts these to integer kernels; inputs and outputs
    are int8, too, if they are floats in the model and quantized. Ops that `quantize`
    left in float, because of overrides, a scope or activations, are float in the file,
    with the weights of the model. Each op that stays in float is logged as a warning
    with the reason, which says if the op is quantized in the model. A model that was
    quantized for training is converted as it will be deployed: with the current ranges,
    at any delay.

    Args:
        model: a `geutil.model.Model` that was quantized.
        representative: data to calibrate the model with first; see `calibrate`. None
            uses the current ranges.
        input_type: the type of its inputs: "int8", "uint8", "float32", or a mapping by
            name; see `to_tflite`.
        output_type: the same for its outputs.

    Returns:
        The file's bytes, for an interpreter (`ai_edge_litert.interpreter.Interpreter`,
        the extra `litert`) or to be written to disk.

    Raises:
        ArgumentTypeError: `model` is not a model.
        QuantizeError: the model was not quantized, or neither trained nor calibrated
            since; activations have other than 8 bits, or weights more; an input or an
            output cannot have its type; or the converter fails, with its message in
            this one, or writes a file that cannot be run.

    Cost: the time of TFLite's converter: seconds for a network of 150 layers.

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
        >>> from ai_edge_litert.interpreter import Interpreter
        >>> interpreter = Interpreter(model_content=blob)
        >>> interpreter.get_output_details()[0]["dtype"].__name__
        'int8'
    """
    graph = as_model(model, _CONVERTED).graph
    if not live_simulations(graph):
        raise QuantizeError(
            "the model holds no FakeQuant op",
            remedy=f"quantize it first, with {QUANTIZE}",
        )
    types_of_ends = EndTypes(model, input_type, output_type)
    if representative is not None:
        calibrate(model, representative)
    deployment.check_bits(model.graph)
    blob, left = _lowered(model, SCHEMES["int8"])
    reasons = {entry.result: f": {entry.reason}" for entry in left}
    # Some files are made, and cannot be run.
    runner.interpreter_of(blob)
    in_float = deployment.float_ops(tflite.open(blob))
    not_kept = deployment.missed(model, in_float)
    for op in in_float:
        _logger.warning(
            "to_int8: %s '%s' of the TFLite file computes in float%s%s",
            op.kind,
            op.result,
            ", though it is quantized in the model" if op in not_kept else "",
            reasons.get(op.result, ""),
        )
    return types_of_ends.given(blob)


def to_tflite(
    model: Any,
    *,
    scheme: str | None = None,
    representative: Any = None,
    order: str = "converter",
    input_type: str | Mapping[str, str] | None = None,
    output_type: str | Mapping[str, str] | None = None,
) -> bytes:
    """Convert a model to a TFLite file by a quantization scheme.

    A quantized model is stored as it is simulated. Another one can be converted by the
    schemes that quantize no activations: its weights are rounded to the nearest values,
    as by `quantize` with that scheme. The schemes are

    - "int8" and "int8x4": see `to_int8`; weights on few enough levels are stored in 4
      bits;
    - "int16x8": activations of 16 bits, symmetric, and weights of 8: for networks that
      lose accuracy in 8 bits. Its kernels are not optimized for CPUs: a file can take a
      hundred times as long as with int8. An op without such a kernel computes in float;
    - "dynamic_range": weights of 8 bits; convolutions and products quantize their data
      at run time, in ranges found then. This is not simulated: the model has only the
      noise of the weights. Depthwise convolutions, and layers of fewer than 1,024
      weights, are faster in float, and read their weights as floats;
    - "dynamic_range_int4": the same, with weights of products in 4 bits, and a range
      for each 32 inputs of a channel, or in 8 bits where this is impossible; the report
      of `quantize` says why. It needs LiteRT 2.1 or later: 2.0 with XNNPACK computes
      wrong values;
    - "weight_only_int8", "weight_only_int4": weights of 8 or 4 bits, which are
      converted to float before the first run; all else is in float;
    - "float16": weights in float16.

    Each op that computes in float although the scheme stores it in integers is logged
    as a warning, with the reason; so are ops with slow kernels.

    Args:
        model: a `geutil.model.Model`. It is not changed, except by `representative`.
        scheme: the scheme; None uses the one that the model was quantized by.
        representative: data to calibrate the model with first; see `calibrate`. None
            uses the current ranges.
        order: "converter" keeps the op order of TFLite's converter; "least_memory" uses
            the order that needs the smallest arena, and logs the arena before and
            after; see `least_memory_order`.
        input_type: the type of the file's inputs: "int8", "uint8" or "float32"; with
            activations of 16 bits "int16" or "float32". Or a mapping from the names of
            some inputs to their types. None uses the types of the kernels. Names stay.
            Inputs that are not floats in the model, such as ids, are unchanged.
        output_type: the same for the outputs.

    Returns:
        The file's bytes, for LiteRT's interpreter or to be written to disk.

    Raises:
        ArgumentTypeError: `model` is not a model.
        QuantizeError: there is no such scheme, or order; the model was quantized by
            another scheme, or not at all although this one requires it; it was neither
            trained nor calibrated since; an input or an output cannot have its type; or
            the converter fails, or writes a file that cannot be run.

    Cost: that of TFLite's converter, seconds for a network of 150 layers, and of the
    search for an order.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import to_tflite
        >>> kernel = tf.random.stateless_normal([64, 64], seed=(1, 2))
        >>> @tf.function(input_signature=[tf.TensorSpec([1, 64], name="x")])
        ... def f(x):
        ...     return {"y": tf.matmul(x, kernel)}
        >>> m = model.open(f)
        >>> sizes = {
        ...     scheme: len(to_tflite(m, scheme=scheme))
        ...     for scheme in ("float16", "weight_only_int8", "weight_only_int4")
        ... }
        >>> list(sizes.values()) == sorted(sizes.values(), reverse=True)
        True
    """
    as_model(model, _CONVERTED)
    if order not in _ORDERS:
        raise QuantizeError(
            f"there is no order '{order}'; the orders are {', '.join(_ORDERS)}"
        )
    chosen = _scheme_of(model) if scheme is None else scheme_named(scheme)
    _check_scheme(model, chosen)
    types_of_ends = EndTypes(model, input_type, output_type)
    blob = types_of_ends.given(_file(model, chosen, representative))
    # The types of ends may have added ops, which are ordered with the others.
    if order == _LEAST_MEMORY:
        reordered = least_memory_order(blob)
        _logger.info("to_tflite: %s", reordered)
        blob = reordered.blob
    for slow in slow_ops(tflite.open(blob)):
        _logger.warning("to_tflite: slow on CPUs: %s", slow)
    return blob


def _file(model: Any, scheme: Scheme, representative: Any) -> bytes:
    if not scheme.weights_only and scheme.activation_bits != _INT16_BITS:
        return to_int8(model, representative)
    if representative is not None:
        calibrate(model, representative)
    if scheme.is_float:
        blob = converted(deployed(model, fuse=True), _ask_for_float16)
    else:
        if not live_simulations(model.graph):
            model = model.cut()
            quantize(model, scheme=scheme.name, is_training=False)
        blob, left = _lowered(model, scheme)
        for entry in left:
            level = logging.INFO if entry.is_chosen else logging.WARNING
            _logger.log(level, "to_tflite: %s", entry)
    # Some files are made, and cannot be run.
    runner.interpreter_of(blob)
    return blob


def _ask_for_float16(converter: Any) -> None:
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_types = [tf.float16]


def _activation_bits(model: Any) -> set[int]:
    """Return in how many bits activations are simulated; none if they are not."""
    origins = Origins(model.graph)
    return {
        int(op.get_attr("num_bits"))
        for op in live_simulations(model.graph)
        if not origins.is_parameter(op.inputs[0])
    }


def _scheme_of(model: Any) -> Scheme:
    """Return the scheme that a model was quantized by, as far as its file tells."""
    if not live_simulations(model.graph):
        raise QuantizeError(
            "the model holds no FakeQuant op, so that it does not tell by which scheme "
            "it is to be stored",
            remedy=f"pass {Words('scheme=')}, one of {', '.join(SCHEMES)}",
        )
    bits = _activation_bits(model)
    if not bits:
        has_blocks = bool(stored_weights.in_blocks(model.graph))
        return SCHEMES["dynamic_range_int4" if has_blocks else "weight_only_int8"]
    return SCHEMES["int16x8" if max(bits) == _INT16_BITS else "int8"]


def _check_scheme(model: Any, scheme: Scheme) -> None:
    """Raise if a model was not quantized as a scheme needs it."""
    bits = _activation_bits(model)
    quantized = bool(live_simulations(model.graph))
    call = Words(f"quantize(model, scheme='{scheme.name}')", scheme.name)
    again = f"quantize it with {call}"
    if scheme.is_float and quantized:
        raise QuantizeError(
            f"the scheme '{scheme.name}' stores a model that is not quantized, and "
            "this one holds FakeQuant ops; open it anew"
        )
    if stored_weights.in_blocks(model.graph) and scheme.block is None:
        raise QuantizeError(
            f"the scheme '{scheme.name}' stores no weights by blocks, and the model "
            "simulates some; convert it by the scheme 'dynamic_range_int4', or open it "
            f"anew and {again}"
        )
    if scheme.weights_only and bits:
        raise QuantizeError(
            f"the scheme '{scheme.name}' leaves activations in float, and the model "
            f"simulates them in {max(bits)} bits",
            remedy=again,
        )
    if not scheme.weights_only and (scheme.activation_bits or 0) < max(bits, default=0):
        raise QuantizeError(
            f"the scheme '{scheme.name}' stores activations in "
            f"{scheme.activation_bits} bits, and the model simulates {max(bits)}",
            remedy=again,
        )
    if not scheme.weights_only and not bits:
        raise QuantizeError(
            f"the model simulates no activations, which the scheme '{scheme.name}' "
            f"stores in {scheme.activation_bits} bits",
            remedy=f"{again}, and calibrate",
        )


def _lowered(model: Any, scheme: Scheme) -> tuple[bytes, list[LeftInFloat]]:
    """Lower a model's kernels to the types of a scheme; return ops in float, too."""
    if not scheme.weights_only:
        deployment.check_learnt(find_sites(model.graph, model.variables))
    apart = Apart()
    file = tflite.open(converted(deployed(model, fuse=True, apart=apart)))
    left: list[LeftInFloat] = []
    matrices, found = stored_weights.block_matrices(model.graph), set[str]()
    origins = Origins(model.graph)
    found_layers = {o.name: layer_of(o, origins) for o in model.graph.get_operations()}
    layers = {
        name: layer is not None and is_quantized(layer.kernel)
        for name, layer in found_layers.items()
    }
    for graph in file.graphs:
        found |= stored_weights.store_in_blocks(graph, matrices)
        stored_weights.store_weights(graph)
        if scheme.weights_only:
            left += stored_weights.layers_lost(graph, layers)
        if scheme.at_run_time:
            left += stored_weights.read_weights_stored(graph)
    if scheme.activation_bits is not None:
        left += lower(file, scheme.activation_bits)
    for graph in file.graphs:
        stored_weights.pack_weights(graph)
    edges = apart.join(file)
    left = [entry for entry in left if entry.result not in edges]
    stored_weights.check_all_found(matrices, found)
    if matrices:
        stored_weights.warn_of_runtime()
    file.strip()
    name_runtime(file)
    return file.to_bytes(), left


KEPT = "geutil_quantization"
"""The name of the metadata that keep ranges and choices."""
# The version of the format of ranges in a file.
_KEPT_VERSION = 1


@dataclass(frozen=True)
class KeptRanges:
    """Everything that quantizes a model again, but the model."""

    folded: bool  # whether batch norms were folded before
    # Those of `quantize` but overrides: scheme, bits, scope.
    arguments: Mapping[str, Any]
    skipped: tuple[str, ...] = ()  # regular expressions of ops that were left in float
    # The bits of the weights of some ops, by their names.
    bits: Mapping[str, int] = field(default_factory=dict)
    # The two ends of the range of each activation, by the name of the range.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def quantize(self, model: Any, *, strict: bool = False) -> Any:
        """Quantize a model by the choices; return the report of `quantize`."""
        overrides: dict[str, Any] = dict.fromkeys(self.skipped, "skip")
        return quantize(
            model,
            is_training=False,
            overrides=overrides | overrides_of(self.bits),
            strict=strict,
            **self.arguments,
        )

    def restore(self, model: Any) -> None:
        """Quantize a model, with the ranges that were kept."""
        self.quantize(model)
        sites = find_sites(model.graph, model.variables)
        activations = {site.name: site for site in sites if not site.is_weights}
        if activations.keys() != self.ranges.keys():
            apart = sorted(activations.keys() ^ self.ranges.keys())
            raise QuantizeError(
                f"the file was made from another model: '{apart[0]}' is a range of one "
                "of the two alone; pass the model that it was made from"
            )
        set_ranges_of_weights(model.graph, model.variables)
        for name, site in activations.items():
            site.set(Range(*map(np.float32, self.ranges[name])))

    def within(self, model: Any, blob: bytes) -> bytes:
        """Return a TFLite file with these choices and a model's ranges in it."""
        sites = find_sites(model.graph, model.variables)
        ranges = {s.name: s.read() for s in sites if not s.is_weights}
        content = asdict(self) | {
            "version": _KEPT_VERSION,
            "ranges": {n: [float(r.low), float(r.high)] for n, r in ranges.items()},
        }
        file = tflite.open(blob)
        text = json.dumps(content, separators=(",", ":")).encode()
        file.metadata[KEPT] = Buffer(np.frombuffer(text, np.uint8))
        return file.to_bytes()


def ranges_kept(file: LiteFile) -> KeptRanges | None:
    """Return the ranges and choices that a file keeps; None if it keeps none."""
    entry = file.metadata.get(KEPT)
    if entry is None or entry.data is None:
        return None
    try:
        content = json.loads(entry.data.tobytes())
        if content.pop("version") != _KEPT_VERSION:
            return None
        kept = KeptRanges(**content)
        call = inspect.signature(quantize).bind
        call(None, is_training=False, overrides={}, strict=False, **kept.arguments)
        for low, high in kept.ranges.values():
            Range(np.float32(low), np.float32(high))
    # Anybody may have written them: text that is no JSON, other fields, other types.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QuantizeError(
            f"the metadata '{KEPT}' of the file are damaged ({error}); make the file "
            f"again, or leave them out with {without(KEPT)}"
        ) from error
    return kept
