"""Conversion.

From quantized models to TFLite files of int8 kernels, which keep their promises.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph import creation, functions, op_types, protos, types
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.blocks import block_of
from geutil.quantize.calibration.calibrating import calibrate
from geutil.quantize.calibration.ranges import (
    RangeSite,
    find_sites,
    frozen,
    live_simulations,
    range_values,
    variable_values,
)
from geutil.quantize.int8 import (
    block_weights,
    converter_workarounds,
    far_addends,
    matrix_weights,
    running,
)
from geutil.quantize.int8.converter_workarounds import Dilated, read_instead
from geutil.quantize.int8.end_types import EndTypes
from geutil.quantize.int8.left_in_float import Apart
from geutil.quantize.int8.parted_weights import part_weights
from geutil.quantize.int8.standalone_relus import as_changes_of_steps
from geutil.quantize.int8.weight_layout import stored_as_simulated
from geutil.quantize.partial_copy import Amend, PartialCopy
from geutil.quantize.planning.int8_kernels import (
    DECISIONS,
    FAKE_QUANT,
    KERNELS,
)
from geutil.quantize.planning.network import (
    forwarded_from,
    is_left_in_float,
    is_quantized,
    leave_in_float,
    neutral_input,
)
from geutil.quantize.planning.plan import quantized_ops
from geutil.quantize.spec import SYMMETRIC_START
from geutil.select.networks.layers import LAYERS, Layer, layer_of
from geutil.select.networks.provenance import Origins
from geutil.tflite import LiteFile, LiteOp
from geutil.tflite.names import called, file_names, sources_of
from geutil.tflite.precision import has_floats

Array = np.ndarray[Any, Any]
_ROUNDING = 2.0**-20
_COMPUTING = frozenset((*KERNELS, *LAYERS)) - FAKE_QUANT - op_types.VALUE_BLIND
_IN_INT8 = frozenset((*DECISIONS, *FAKE_QUANT, *op_types.VALUE_BLIND))


def deployed(
    model: Any, *, mend: bool = False, fuse: bool = False, apart: Apart | None = None
) -> Any:
    """Return a function of a quantized model as it will be deployed.

    Ranges and other variables are constants, with the values that they have now. Of a
    model for training, what learns ranges and what delays quantization is left out.

    Its inputs and outputs have the names that they have in a file; see `file_names`.

    Args:
        model: a `geutil.model.Model`.
        mend: make of it what TFLite's converter understands: change values that it
            would store wrong, by less than it rounds them, and write dilated
            convolutions as one op.
        fuse: write dilated convolutions as one op, and biases as vectors, for float
            kernels with ranges between them.
        apart: what sets ops apart that are left in float, and joins the file again.

    Cost: one copy of the graph; with `mend`, one run of what biases depend on.
    """
    graph = model.graph
    values = range_values(graph) | variable_values(graph)
    dilated = converter_workarounds.find_dilated(graph) if mend or fuse else []
    blocks: dict[Operation, Array] = {}
    if fuse:
        values |= far_addends.cut_off(graph, values)
        blocks = block_weights.levels_of_blocks(graph)
        values |= blocks
    if mend:
        values |= matrix_weights.computed_ranges(graph, values)
        values |= far_addends.cut_off(graph, values)
        values |= converter_workarounds.mended(graph, values)
        values |= matrix_weights.simulated(graph, values)
        values |= matrix_weights.in_8_bits(graph, values)
    stand_in_of, moves = frozen(values), converter_workarounds.left_out(dilated)

    def replace(op: Operation) -> Tensor | Array | None:
        # The converter has no word for it.
        if op.type == "PlaceholderWithDefault":
            return op.inputs[0]
        unchanged = neutral_input(op)
        if unchanged is not None:
            return op.inputs[unchanged]
        return moves[op] if op in moves else stand_in_of(op)

    amend = _amendments(graph, dilated, in_8_bits=mend) if mend or fuse else None
    copy = PartialCopy(graph, model.inputs, replace, amend)
    wanted = [*model.outputs.values(), *(op.outputs[0] for op in blocks)]
    copies = copy.of(wanted)
    output_tensors = copies[: len(model.outputs)]
    inputs, outputs = (
        file_names(list(model.inputs)),
        file_names(list(model.outputs)),
    )
    by_handle = {id(v.handle): v for v in model.variables.values()}
    # Those that tables are looked up in, which only the converter can freeze.
    variables = [by_handle[id(e)] for e in copy.externals if id(e) in by_handle]
    input_tensors = {inputs[name]: t for name, t in copy.inputs.items()}
    with creation.neutral(copy.graph):
        if apart is not None:
            skipped = [n for n, t in model.inputs.items() if is_left_in_float(t.op)]
            leave_in_float([copy.inputs[name].op for name in skipped], ())
            output_tensors, given = apart.set_apart(copy.graph, output_tensors)
            input_tensors |= given
        if mend or fuse:
            part_weights(copy.graph)
        block_weights.mark_blocks(copies[len(model.outputs) :])
        if fuse:
            converter_workarounds.with_factors_apart(copy.graph)
            output_tensors = converter_workarounds.with_bias_vectors(
                copy.graph, output_tensors
            )
        if mend:
            converter_workarounds.with_ranges_before_reversals(copy.graph)
            converter_workarounds.with_fitting_comparisons(copy.graph)
            for rewrite in (
                converter_workarounds.with_bias_vectors,
                converter_workarounds.without_divisions,
            ):
                output_tensors = rewrite(copy.graph, output_tensors)
            output_tensors = _parted(output_tensors, _FloatReaders(model))
            matrix_weights.with_parted_data(copy.graph, _layers_in_float(graph))
        results = {
            name: tf.identity(t)
            for name, t in zip(outputs.values(), output_tensors, strict=True)
        }
    return functions.build_function(copy.graph, input_tensors, results, [], variables)


class _FloatReaders:
    """Tells which ops of a copy compute in float, by those of the model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def _left_in_float(self) -> frozenset[str]:
        """The names of ops with kernels that were not quantized, or not wholly."""
        quantized = set(quantized_ops(self._model.graph, self._model.outputs.values()))
        ops = self._model.graph.get_operations()
        return frozenset(
            op.name for op in ops if op.type in _COMPUTING and op not in quantized
        )

    def __call__(self, op: Operation) -> bool:
        """Tell whether an op computes in float."""
        if op.type in _COMPUTING:
            return op.name in self._left_in_float
        return op.type not in _IN_INT8


def _parted(
    outputs: Sequence[Tensor], is_float: Callable[[Operation], bool]
) -> list[Tensor]:
    """Return outputs that no op shares which reads them in float, or their shape.

    The converter gives both the same tensor, in float, and takes that away where the
    output becomes int8 (TensorFlow 2.21: "Tensor at index 0 was optional"). Those of
    two ranges are not the same, if only by a float32 rounding error.
    """
    replacement_of: MutableIdentityMap[Tensor] = MutableIdentityMap()
    for output in outputs:
        if output in replacement_of:
            continue
        replacement_of[output] = output
        simulation = forwarded_from(output).op
        if simulation.type not in FAKE_QUANT:
            continue
        float_source = output
        if output.op is simulation:
            # What makes it would be in float for them.
            float_source = simulation.inputs[0]
        readers = output.consumers()
        deciding = [op for op in readers if op.type in DECISIONS]
        in_float = any(is_float(op) for op in readers)
        shaped = [
            op for op in float_source.consumers() if op.type in op_types.VALUE_BLIND
        ]
        if shaped:
            twin = _twin(output, simulation, 1.0 + _ROUNDING)
            read_instead(shaped, float_source, twin)
        if deciding:
            # In int8, but only by itself.
            twin = _twin(output, simulation, 1.0 + _ROUNDING)
            read_instead(deciding, output, twin)
        if in_float:
            twin = _twin(output, simulation, 1.0 + 2.0 * _ROUNDING)
            replacement_of[output] = twin
    return [replacement_of[output] for output in outputs]


def _twin(tensor: Tensor, simulation: Operation, wider: float) -> Tensor:
    """Return a tensor that is quantized once more, in a range that is hardly wider.

    Args:
        tensor: the tensor.
        simulation: the FakeQuant op that its values come from.
        wider: the factor by which the range is wider.
    """
    static_ends = [tf.get_static_value(t) for t in list(simulation.inputs)[1:]]
    get = simulation.get_attr
    low, high = static_ends or (get("min"), get("max"))
    bits, narrow = (get(name) for name in ("num_bits", "narrow_range"))
    return tf.quantization.fake_quant_with_min_max_vars(
        tensor, low * wider, high * wider, bits, narrow
    )


def _amendments(graph: Graph, dilated: Sequence[Dilated], *, in_8_bits: bool) -> Amend:
    by_op = {each.convolution: each for each in dilated}
    op_names = {op.name for op in graph.get_operations()}
    origins = Origins(graph)
    simulations = live_simulations(graph)
    fewer_bits = set(matrix_weights.with_fewer_bits(graph)) if in_8_bits else ()
    range_ends = {t.op for op in simulations for t in list(op.inputs)[1:]}
    of_weights = {op for op in simulations if origins.is_parameter(op.inputs[0])}
    # Channels of several axes are brought together, and taken apart again.
    around = {o for op in of_weights for o in (op.inputs[0].op, *_readers(op))}
    of_weights |= {op for op in around if op.type == "Reshape"}
    # What is left of a name without its digits must be no op's, either.
    prefix = next(letters for i in count(1) if (letters := "r" * i) not in op_names)
    short_names = (name for i in count() if (name := f"{prefix}{i}") not in op_names)

    def amend(node: Any, op: Operation) -> None:
        converter_workarounds.nudge(node, op)
        if op in fewer_bits:
            node.attr["num_bits"].i = _BITS
        # The file has its name, and holds it for each tensor.
        scope, _, own = op.name.rpartition("/")
        if own == op.type and op.type in FAKE_QUANT and scope not in op_names:
            node.name = scope or op.name
        # So it has those of both ends of a range, for the tensor in that range, and of
        # the FakeQuant op of weights, next to the name of the layer.
        if (op in range_ends and node.op == "Const") or op in of_weights:
            node.name = next(short_names)
        if op in by_op:
            by_op[op].amend(node)

    return amend


def _readers(op: Operation) -> list[Operation]:
    return [reader for t in op.outputs for reader in t.consumers()]


_CASTS = frozenset(("DEQUANTIZE", "QUANTIZE"))
_OF_LAYERS = frozenset(
    (
        "BATCH_MATMUL",
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "FULLY_CONNECTED",
        "TRANSPOSE_CONV",
    )
)


def missed(model: Any, float_ops: Sequence[LiteOp]) -> list[LiteOp]:
    """Return float ops of a file whose values are quantized in the model.

    They are told by the names of the tensors that they make. What TFLite has no int8
    kernel for, or was not quantized, is not among them.

    Args:
        model: the quantized model that the file was made from.
        float_ops: the ops of the file that compute in float.

    Cost: that of planning the quantization of the model again, if there are any.
    """
    computing = [op for op in float_ops if op.kind not in _CASTS]
    if not computing:
        return []
    promised = {op.name for op in quantized_ops(model.graph, model.outputs.values())}
    by_name = {op.name: op for op in model.graph.get_operations()}
    return [op for op in computing if _is_promised(op, by_name, promised)]


def _is_promised(op: LiteOp, by_name: dict[str, Operation], promised: set[str]) -> bool:
    """Tell whether all ops that an op of the file is named after are quantized."""
    matches = (called(source, by_name) for source in sources_of(op.result))
    named = [
        graph_op
        for graph_op in matches
        if graph_op is not None and not _is_range(graph_op)
    ]
    behind = [o.inputs[0].op if o.type in FAKE_QUANT else o for o in named]
    return bool(behind) and all(graph_op.name in promised for graph_op in behind)


def _is_range(op: Operation) -> bool:
    return op.type == "ReadVariableOp"


def _layers_in_float(graph: Graph) -> list[Layer]:
    """Return the layers whose weights are not quantized."""
    origins = Origins(graph)
    candidates = [op for op in graph.get_operations() if op.type in LAYERS]
    layers = [layer_of(op, origins) for op in candidates]
    return [
        layer
        for layer in layers
        if layer is not None and not is_quantized(layer.kernel)
    ]


_logger = logging.getLogger("geutil")

_STARTS = ((-6.0, 6.0), (0.0, 6.0))
_SYMMETRIC_STARTS = ((-SYMMETRIC_START, SYMMETRIC_START),)
_BITS = 8
_SHOWN = 5
_SAID = re.compile(r"(?:error: |^(?=[A-Z][A-Za-z ]* ops: ))(.*)", re.M)
_LONGEST = 1500


def to_int8(
    model: Any,
    representative: Any = None,
    *,
    input_type: str | Mapping[str, str] | None = None,
    output_type: str | Mapping[str, str] | None = None,
) -> bytes:
    """Convert a quantized model to a TFLite file that computes in int8.

    TFLite's converter takes the ranges from the FakeQuant ops; inputs and outputs are
    int8, too, if they are floats in the model and quantized. Ops that `quantize` was
    told to leave in float, by overrides, a scope or activations, are float in the file,
    with the weights that they have in the model. What stays float is logged
    as a warning, op by op, which says so if the op is quantized in the model all the
    same. A model that was quantized for training is converted as it will be deployed:
    with the ranges as they are, whatever its delay. Biases that the converter would
    store wrong are changed in what it is given, by less than it rounds.

    Args:
        model: a `geutil.model.Model` that was quantized.
        representative: data to calibrate the model with first; see `calibrate`. None
            takes the ranges as they are.
        input_type: the type of its inputs: "int8", "uint8", "float32", or some of them
            by name; see `to_tflite`.
        output_type: the same of its outputs.

    Returns:
        The file's bytes, for an interpreter (`ai_edge_litert.interpreter.Interpreter`,
        the extra `litert`) or to be written to disk.

    Raises:
        ArgumentTypeError: it is no model.
        QuantizeError: the model was not quantized, or neither trained nor calibrated
            since; activations have other than 8 bits, or weights more; an input or an
            output cannot have its type; or the converter fails, whose message is in
            this one, or makes a file that cannot be run.

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
        >>> from ai_edge_litert.interpreter import Interpreter
        >>> interpreter = Interpreter(model_content=blob)
        >>> interpreter.get_output_details()[0]["dtype"].__name__
        'int8'
    """
    graph: Any = getattr(model, "graph", None)
    if not hasattr(model, "concrete_function") or not types.is_graph(graph):
        raise ArgumentTypeError(
            f"a geutil.model.Model is converted, not a {types.type_name(model)}; open "
            "it with geutil.model.open"
        )
    if not live_simulations(graph):
        raise QuantizeError(
            "the model holds no FakeQuant op; quantize it first, with "
            "geutil.quantize.quantize(model, is_training=False)"
        )
    types_of_ends = EndTypes(model, input_type, output_type)
    if representative is not None:
        calibrate(model, representative)
    check_learnt(find_sites(graph, model.variables))
    _check_bits(graph)
    apart = Apart()
    blob = converted(deployed(model, mend=True, apart=apart), _ask_for_int8)
    blob = apart.joined(blob)
    blob = stored_as_simulated(blob, matrix_weights.matrices(graph))
    blob = as_changes_of_steps(blob)
    # Some files are made, and cannot be run.
    running.interpreter_of(blob)
    _warn_of_matrices(graph)
    file = tflite.open(blob)
    in_float = float_ops(file)
    not_kept = missed(model, in_float)
    for op in in_float:
        _logger.warning(
            "to_int8: %s '%s' of the TFLite file computes in float%s",
            op.kind,
            op.result,
            ", though it is quantized in the model" if op in not_kept else "",
        )
    _warn_of_skipped(graph, file)
    return types_of_ends.given(blob)


def _warn_of_matrices(graph: Graph) -> None:
    """Tell of ranges for each column that this TensorFlow's converter cannot store."""
    ops = matrix_weights.stored_in_one_range(graph)
    if ops:
        _logger.warning(
            "to_int8: TensorFlow %s stores %d matrices, '%s' among them, with one "
            "range for all columns, and 2.17 and later with one for each, as simulated",
            tf.__version__,
            len(ops),
            ops[0].name,
        )


def _warn_of_skipped(graph: Graph, file: LiteFile) -> None:
    """Tell of layers that compute in int8 though they were left out.

    The converter quantizes what lies between two ranges.
    """
    left_out = {layer.op.name for layer in _layers_in_float(graph)}
    is_out = {op.name: op.name in left_out for op in graph.get_operations()}
    for op in file.ops if left_out else ():
        named_out = any(called(source, is_out) for source in sources_of(op.result))
        if op.kind in _OF_LAYERS and not has_floats(op) and named_out:
            _logger.warning(
                "to_int8: %s '%s' of the TFLite file computes in int8, though it is "
                "not quantized in the model: TFLite's converter quantizes what lies "
                "between two ranges; leave what it reads or makes without one, too",
                op.kind,
                op.result,
            )


def float_ops(file: LiteFile) -> list[LiteOp]:
    """Return the ops of a TFLite file that read or make floats."""
    return [*filter(has_floats, file.ops)]


def _check_bits(graph: Graph) -> None:
    """Raise if a graph simulates bits that the int8 kernels of TFLite lack."""
    origins = Origins(graph)
    for op in live_simulations(graph):
        bits = int(op.get_attr("num_bits"))
        is_weights = origins.is_parameter(op.inputs[0])
        if block_of(op) is not None:
            raise QuantizeError(
                f"'{op.name}' rounds weights by blocks, which TFLite's int8 kernels "
                "cannot read; convert by to_tflite(model, scheme='dynamic_range_int4')"
            )
        if bits == _BITS or (is_weights and bits < _BITS):
            continue
        raise QuantizeError(
            f"'{op.name}' has {bits} bits: TFLite's int8 kernels store activations in "
            "8 bits, and weights in 8 or less; quantize with activation_bits=8 and "
            "weight_bits up to 8 to convert, or keep the model for simulation"
        )


def _ask_for_int8(converter: Any) -> None:
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = tf.int8
    converter.inference_output_type = tf.int8


def converted(
    function: Any, ask: Callable[[Any], None] = lambda converter: None
) -> bytes:
    """Return the TFLite file of a function.

    Args:
        function: the function, with names for its inputs and outputs.
        ask: sets options of the converter.

    Raises:
        QuantizeError: the converter fails.
    """
    # The converter wants to know an owner of variables; without one the file has no
    # names.
    owner = protos.new_trackable()
    owner.variables = list(function.variables)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], owner)
    ask(converter)
    try:
        with warnings.catch_warnings():
            # It misses the ranges of inputs, which FakeQuant ops tell.
            warnings.filterwarnings("ignore", "Statistics for quantized inputs")
            return bytes(converter.convert())
    # The converter raises classes of its own for what MLIR refuses.
    except Exception as error:
        said = _said(error)
        if "TensorList" in said and "element_shape" in said:
            raise QuantizeError(
                "TFLite's converter takes no loop whose lists have elements of an open "
                f"size ({said.partition(';')[0]}): convert a model without loops, by "
                "Model.unroll(), or of a fixed batch, by Model.set_batch_size(1)"
            ) from error
        raise QuantizeError(
            f"TFLite's converter fails: {said}. Replace ops that it names, or "
            "cut the model before them (model.cut); what the report of quantize skips "
            "stays float"
        ) from error


def check_learnt(sites: list[RangeSite]) -> None:
    """Raise QuantizeError if ranges of activations are as they were initialized."""
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


def _is_at(site: RangeSite, ranges: Sequence[tuple[float, float]]) -> bool:
    low, high = site.read()
    ranges = _SYMMETRIC_STARTS if site.form.symmetric else ranges
    return any(
        np.all(low == np.float32(a)) and np.all(high == np.float32(b))
        for a, b in ranges
    )


def _said(error: Exception) -> str:
    """Return what the converter says of the ops, without its traces."""
    text = str(error)
    said = dict.fromkeys(match[1].strip() for match in _SAID.finditer(text))
    return "; ".join(said)[:_LONGEST] or text[:_LONGEST]
