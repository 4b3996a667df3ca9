"""Ops of TFLite files as ops of TensorFlow: a table with an entry for each kind.

An entry is a function of a call that returns what the op makes: a tensor, or several.
Rounding is no part of it: values are numbers, as floats, whatever integers stand for
them in the file, and whoever asks rounds the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from geutil.errors import TFLiteError
from geutil.graph import creation
from geutil.tflite.kinds import limits
from geutil.tflite.numbers import dense
from geutil.tflite.parts import Array, LiteGraph, LiteOp, LiteTensor
from geutil.tflite.schema import words

BITS = {"int16": 16, "int2": 2, "int4": 4, "int8": 8, "uint4": 4, "uint8": 8}
"""The bits of types whose integers stand for numbers on steps."""

Shape = tuple[int | None, ...]
Value = Any
"""A tensor of TensorFlow, a constant of the file, or the handle of a variable."""


class Surroundings(Protocol):
    """The subgraph that an op is in, and the model that is being built."""

    def tensor(self, source: LiteTensor, learned: bool) -> Any:
        """Return the tensor of TensorFlow for one of the file."""

    def weights(
        self, source: LiteTensor, order: Sequence[int], shape: Sequence[int] | None
    ) -> Any:
        """Return the tensor for weights, whose axes are put in another order."""

    def value(self, source: LiteTensor) -> Value:
        """Return the value of a tensor of the file."""

    def results_of(self, graph: LiteGraph, values: Sequence[Value]) -> list[Any]:
        """Return the results of another subgraph."""

    def variable(self, handle: Any, like: LiteTensor) -> Any:
        """Return the variable of a handle, made like a tensor if it is not there."""

    def initialize(self, graph: LiteGraph) -> None:
        """Let a subgraph set variables, once."""


class Call:
    """One op of a file, with the tensors that it reads in the graph that is built."""

    def __init__(self, op: LiteOp, around: Surroundings) -> None:
        self.op = op
        self.around = around

    def __getitem__(self, place: int) -> Any:
        """Return the tensor at a place of the inputs."""
        slots = LEARNED.get(self.op.kind, ())
        is_learned = slots is None or place in slots
        return self.around.tensor(self.source(place), is_learned)

    def has(self, place: int) -> bool:
        """Return whether there is an input at a place."""
        return place < len(self.op.inputs) and self.op.inputs[place] is not None

    def source(self, place: int) -> LiteTensor:
        """Return the tensor of the file at a place of the inputs."""
        source = self.op.inputs[place] if place < len(self.op.inputs) else None
        if source is None:
            raise TFLiteError(f"it has no input {place}, which this kind needs")
        return source

    def all(self) -> list[Any]:
        """Return the tensors of all inputs that there are."""
        return [self[i] for i in range(len(self.op.inputs)) if self.has(i)]

    def number(self, place: int) -> Array:
        """Return the value of an input, which has to be a constant."""
        value = dense(self.source(place))
        if value is None:
            raise TFLiteError(
                f"it computes '{self.source(place).name}', which has to be a constant"
            )
        return value

    def scalar(self, place: int) -> Any:
        """Return the tensor at a place of the inputs, which holds one number."""
        tensor = self[place]
        return tensor if tensor.shape.rank == 0 else tf.reshape(tensor, [])

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option, or the default of files without a table of options."""
        return self.op.options.get(name, default)

    @property
    def dtype(self) -> tf.DType:
        """The type of the first result."""
        return tf.as_dtype(self.op.outputs[0].dtype)

    def weights(
        self, place: int, order: Sequence[int], shape: Sequence[int] | None = None
    ) -> Any:
        """Return weights as TensorFlow's kernels have them: axes in another order."""
        return self.around.weights(self.source(place), order, shape)

    def run(self, graph: LiteGraph, values: Sequence[Value]) -> list[Any]:
        """Return the results of a subgraph."""
        return self.around.results_of(graph, values)


Builder = Callable[[Call], Any]

ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "NONE": lambda x: x,
    "RELU": tf.nn.relu,
    "RELU6": tf.nn.relu6,
    "RELU_N1_TO_1": lambda x: tf.maximum(tf.minimum(x, 1.0), -1.0),
    "SIGN_BIT": lambda x: tf.cast(x < 0, x.dtype),
    "TANH": tf.tanh,
}


def activated(call: Call, x: Any) -> Any:
    """Return a tensor behind the activation that is part of an op."""
    return ACTIVATIONS[call.option("fused_activation_function", "NONE")](x)


def _plain(function: Callable[..., Any]) -> Builder:
    """Return the entry of kinds that compute a function of all their inputs."""
    return lambda call: function(*call.all())


def _fused(function: Callable[..., Any]) -> Builder:
    """Return the entry of such kinds with an activation behind them."""
    return lambda call: activated(call, function(*call.all()))


def _reduction(function: Callable[..., Any]) -> Builder:
    return lambda call: function(
        call[0], call[1], keepdims=call.option("keep_dims", False)
    )


def _extremum(function: Callable[..., Any]) -> Builder:
    return lambda call: function(call[0], call.scalar(1), output_type=call.dtype)


def _strides(call: Call) -> list[int]:
    return [1, call.option("stride_h", 1), call.option("stride_w", 1), 1]


def _dilations(call: Call) -> list[int]:
    names = "dilation_h_factor", "dilation_w_factor"
    return [max(call.option(name, 1), 1) for name in names]


def _padding(call: Call) -> str:
    return str(call.option("padding", "SAME"))


def _biased(call: Call, x: Any, place: int) -> Any:
    """Return the result of a layer with its bias and its activation."""
    if call.has(place):
        x = tf.nn.bias_add(x, call.weights(place, [0]))
    return activated(call, x)


def _convolution(call: Call) -> Any:
    filters = call.weights(1, [1, 2, 3, 0])
    made = tf.nn.conv2d(
        call[0], filters, _strides(call), _padding(call), dilations=_dilations(call)
    )
    return _biased(call, made, 2)


def _depthwise(call: Call) -> Any:
    x = call[0]
    # The file counts the filters of all channels in one dimension.
    _, height, width, count = call.source(1).sizes
    channels = x.shape[-1] or count // max(call.option("depth_multiplier", 1), 1)
    shape = [height, width, channels, count // channels]
    filters = call.weights(1, [1, 2, 3, 0], shape)
    strides, dilations = _strides(call), _dilations(call)
    padding = _padding(call)
    if strides[1] == strides[2]:
        made = tf.nn.depthwise_conv2d(x, filters, strides, padding, dilations=dilations)
    else:
        # That kernel has one stride; a grouped convolution is the same.
        grouped = tf.reshape(filters, [height, width, 1, count])
        made = tf.nn.conv2d(x, grouped, strides, padding, dilations=dilations)
    return _biased(call, made, 2)


def _transposed(function: Callable[..., Any], order: Sequence[int]) -> Builder:
    """Return the entry of transposed convolutions, whose weights have axes so."""

    def build(call: Call) -> Any:
        strides = _strides(call) if len(order) == 4 else _volume(call, "stride_{}")
        filters = call.weights(1, order)
        made = function(call[2], filters, call[0], strides, _padding(call))
        return _biased(call, made, 3)

    return build


def _volume(call: Call, name: str) -> list[int]:
    return [1, *(max(call.option(name.format(axis), 1), 1) for axis in "dhw"), 1]


def _convolution_3d(call: Call) -> Any:
    strides, dilations = (
        _volume(call, name) for name in ("stride_{}", "dilation_{}_factor")
    )
    filters = call.weights(1, range(5))
    made = tf.nn.conv3d(call[0], filters, strides, _padding(call), dilations=dilations)
    return _biased(call, made, 2)


def _fully_connected(call: Call) -> Any:
    if call.option("weights_format", 0):
        raise TFLiteError("its weights are shuffled for one processor")
    x = call[0]
    matrix = call.weights(1, [1, 0])
    if not call.option("keep_num_dims", False) and x.shape.rank != 2:
        x = tf.reshape(x, [-1, call.source(1).sizes[1]])
    return _biased(call, tf.matmul(x, matrix), 2)


def _pool(function: Callable[..., Any]) -> Builder:
    def build(call: Call) -> Any:
        window = [call.option("filter_height"), call.option("filter_width")]
        made = function(call[0], window, _strides(call), _padding(call))
        return activated(call, made)

    return build


def _resize(op: Callable[..., Any]) -> Builder:
    return lambda call: op(
        images=call[0],
        size=call[1],
        align_corners=call.option("align_corners", False),
        half_pixel_centers=call.option("half_pixel_centers", False),
    )


def _reshape(call: Call) -> Any:
    removed = _removed_axis(call.source(0).shape, call.op.outputs[0].shape)
    if removed is not None:
        # TFLite's converter writes it so, and what it is part of is known by it.
        return tf.squeeze(call[0], [removed])
    if call.has(1):
        return tf.reshape(call[0], call[1])
    return tf.reshape(call[0], call.option("new_shape", []))


def _removed_axis(before: Shape | None, after: Shape | None) -> int | None:
    """Return the axis of size 1 behind the batch that a shape is without, if any."""
    if before is None or after is None or after.count(None) > 1:
        return None
    axes = (i for i in range(len(before) - 1, 0, -1) if before[i] == 1)
    return next((i for i in axes if (*before[:i], *before[i + 1 :]) == after), None)


def _strided_slice(call: Call) -> Any:
    begin, end = call[1], call[2]
    if call.option("offset", False):
        end = begin + end
    masks = {
        name: call.option(name, 0)
        for name in (
            *("begin_mask", "end_mask", "ellipsis_mask"),
            *("new_axis_mask", "shrink_axis_mask"),
        )
    }
    return tf.strided_slice(call[0], begin, end, call[3], **masks)


def _update_slice(call: Call) -> Any:
    x, update, start = call[0], call[1], call[2]
    free = tf.shape(x) - tf.shape(update)
    start = tf.clip_by_value(tf.cast(start, tf.int32), 0, free)
    around = tf.stack([start, free - start], 1)
    is_new = tf.pad(tf.ones_like(update, tf.bool), around)
    return tf.where(is_new, tf.pad(update, around), x)


def _gather(call: Call) -> Any:
    places = call[1]
    if places.dtype not in (tf.int32, tf.int64):
        places = tf.cast(places, tf.int32)
    axis, batch = call.option("axis", 0), call.option("batch_dims", 0)
    return tf.gather(call[0], places, axis=axis, batch_dims=batch)


def _non_max_suppression(op: Callable[..., Any], *, soft: bool) -> Builder:
    """Return the builder of a kernel that selects boxes."""

    def build(call: Call) -> Any:
        """Compute the boxes, and how many of them count."""
        named = {}
        if soft:
            if call.number(5).any():
                raise TFLiteError(
                    "it lowers scores by a sigma, where TensorFlow keeps boxes that "
                    "TFLite drops"
                )
            named["soft_nms_sigma"] = call.scalar(5)
        made = op(
            boxes=call[0],
            scores=call[1],
            max_output_size=call.scalar(2),
            iou_threshold=call.scalar(3),
            score_threshold=call.scalar(4),
            pad_to_max_output_size=True,
            **named,
        )
        return list(made)

    return build


def _random(op: Callable[..., Any]) -> Builder:
    return lambda call: op(
        shape=call[0],
        dtype=call.dtype,
        seed=call.option("seed", 0),
        seed2=call.option("seed2", 0),
    )


def _cast(call: Call) -> Any:
    if call.source(0).quantization is not None:
        raise TFLiteError("it reads integers with steps as plain integers")
    return tf.cast(call[0], call.dtype)


def _bits(call: Call) -> Any:
    if call.source(0).quantization or call.op.outputs[0].quantization:
        raise TFLiteError("it reads the bits of integers with steps")
    return tf.bitcast(call[0], call.dtype)


def _fake_quant(call: Call) -> Any:
    return tf.quantization.fake_quant_with_min_max_args(
        call[0],
        call.option("min"),
        call.option("max"),
        num_bits=call.option("num_bits", 8),
        narrow_range=call.option("narrow_range", False),
    )


def has_steps(tensor: LiteTensor) -> bool:
    """Return whether a tensor holds quantized integers of at most 16 bits."""
    return bool(tensor.quantization and tensor.dtype in BITS)


def _lowest_number(tensor: LiteTensor) -> float | None:
    """Return the lowest number that a tensor of one range can hold; None of others."""
    steps = tensor.quantization
    if steps is None or not has_steps(tensor) or len(steps.scales) != 1:
        return None
    return steps.scales[0] * (limits(tensor.dtype)[0] - steps.zero_points[0])


def _with_other_steps(call: Call) -> Any:
    """Return a tensor that is rounded next, cut off at 0 if the new range begins there.

    TFLite's converter leaves out the second of two FakeQuant ops, but no Relu.
    """
    x = call[0]
    before, after = _lowest_number(call.source(0)), _lowest_number(call.op.outputs[0])
    cuts = before is not None and before < 0.0 and after == 0.0
    return tf.nn.relu(x) if cuts else x


def _values(call: Call, start: int) -> list[Value]:
    """Return the values of the inputs of a call, from a place on."""
    places = range(start, len(call.op.inputs))
    return [call.around.value(call.source(i)) for i in places]


def _call(option: str) -> Builder:
    def build(call: Call) -> Any:
        values = _values(call, 0)
        return call.run(call.option(option), values)

    return build


def _branches(call: Call) -> Any:
    values = _values(call, 1)
    then, other = call.option("then_subgraph_index"), call.option("else_subgraph_index")
    return tf.cond(
        call.scalar(0), lambda: call.run(then, values), lambda: call.run(other, values)
    )


def _loop(call: Call) -> Any:
    test, body = call.option("cond_subgraph_index"), call.option("body_subgraph_index")
    values = _values(call, 0)
    # Weights that a loop passes from step to step are read from outside.
    moves = [i for i, t in enumerate(body.inputs) if body.outputs[i] is not t]
    started = [call[i] for i in moves]

    def with_state(state: Sequence[Any]) -> list[Value]:
        found = [*values]
        for i, tensor in zip(moves, state, strict=True):
            found[i] = tensor
        return found

    shapes = [
        _common(t.shape, body.inputs[i], body.outputs[i])
        for i, t in zip(moves, started, strict=True)
    ]

    def step(*state: Any) -> list[Any]:
        made = call.run(body, with_state(state))
        after = [made[i] for i in moves]
        for tensor, shape in zip(after, shapes, strict=True):
            # TensorFlow infers less than the file says of slices, say.
            if tensor.shape.is_compatible_with(shape):
                tensor.set_shape(shape)
        return after

    def goes_on(*state: Any) -> Any:
        return tf.reshape(call.run(test, with_state(state))[0], [])

    ended = tf.while_loop(goes_on, step, started, shapes) if moves else []
    return with_state(ended)


def _common(
    shape: tf.TensorShape, given: LiteTensor, made: LiteTensor
) -> tf.TensorShape:
    """Return the shape of a part of a loop's state in all its steps."""
    before, after = given.shape, made.shape
    if shape.rank is None or before is None or after is None:
        return tf.TensorShape(None)
    if not len(before) == len(after) == shape.rank:
        return tf.TensorShape(None)
    pairs = zip(before, after, strict=True)
    return tf.TensorShape([a if a == b else None for a, b in pairs])


def _assign_variable(call: Call) -> Any:
    handle = call.around.value(call.source(0))
    call.around.variable(handle, call.source(1)).assign(call[1])
    return []


def _variable_handle(call: Call) -> Any:
    names = call.option("container", ""), call.option("shared_name", "")
    return [Handle("/".join(tf.compat.as_str(name) for name in names if name))]


def _initialize(call: Call) -> Any:
    call.around.initialize(call.option("init_subgraph_index"))
    return []


class Handle:
    """The handle of a variable of a file."""

    def __init__(self, name: str) -> None:
        self.name = name


def flex(call: Call) -> Any:
    """Return the result of an op of TensorFlow that a file contains as it is."""
    # No other kind needs it.
    from flatbuffers import flexbuffers

    parts = flexbuffers.GetRoot(bytearray(call.op.custom_options)).AsVector
    node = tf.compat.v1.NodeDef.FromString(bytes(parts[1].AsStringBytes))
    graph = tf.compat.v1.get_default_graph()
    (node.name,) = (graph.unique_name(node.op),)
    return list(creation.make_op(graph, node, call.all()).outputs)


def _transposed_with_bias(call: Call) -> Any:
    """Return MediaPipe's convolution: its options are three numbers of 32 bits."""
    padding, width, height = np.frombuffer(call.op.custom_options[:12], np.int32)
    x = call[0]
    filters = call.weights(1, [1, 2, 0, 3])
    rows, columns, outputs = filters.shape[:3]
    # Of TfLitePadding, 1 is SAME and 2 is VALID.
    is_same = int(padding) == 1
    sizes = [
        (tf.shape(x)[i] * step) if is_same else (tf.shape(x)[i] - 1) * step + window
        for i, step, window in ((1, int(height), rows), (2, int(width), columns))
    ]
    shape = tf.stack([tf.shape(x)[0], *sizes, outputs])
    made = tf.nn.conv2d_transpose(
        x,
        filters,
        shape,
        [1, int(height), int(width), 1],
        "SAME" if is_same else "VALID",
    )
    return _biased(call, made, 2)


_RAW = tf.raw_ops


def _table(entry: Callable[..., Builder], rows: str) -> dict[str, Builder]:
    """Return the entries of rows of a kind and its function of TensorFlow."""
    pairs = (row.split() for row in rows.split(","))
    return {kind: entry(operator.attrgetter(name)(tf)) for kind, name in pairs}


KINDS: Mapping[str, Builder] = {
    **_table(
        _plain,
        """
        ABS abs, ATAN2 atan2, BITWISE_XOR bitwise.bitwise_xor,
        BROADCAST_ARGS broadcast_dynamic_shape, BROADCAST_TO broadcast_to,
        CEIL math.ceil, COMPLEX_ABS abs, COS cos, ELU nn.elu, EQUAL equal, EXP exp,
        FILL fill, FLOOR floor, FLOOR_DIV math.floordiv, FLOOR_MOD math.floormod,
        GATHER_ND gather_nd, GREATER greater, GREATER_EQUAL greater_equal,
        IMAG math.imag, LESS less, LESS_EQUAL less_equal, LOG math.log,
        LOGICAL_AND logical_and, LOGICAL_NOT logical_not, LOGICAL_OR logical_or,
        LOGISTIC sigmoid, LOG_SOFTMAX nn.log_softmax, MATRIX_DIAG linalg.diag,
        MATRIX_SET_DIAG linalg.set_diag, MAXIMUM maximum, MINIMUM minimum,
        NEG negative, NOT_EQUAL not_equal, POW pow, RANGE range, RANK rank,
        REAL math.real, RELU nn.relu, RELU6 nn.relu6, REVERSE_V2 reverse,
        RFFT2D signal.rfft2d, RIGHT_SHIFT bitwise.right_shift, ROUND round,
        RSQRT math.rsqrt, SCATTER_ND scatter_nd, SEGMENT_SUM math.segment_sum,
        SELECT_V2 where, SIGN sign, SIN sin, SLICE slice, SQRT sqrt, SQUARE square,
        SQUARED_DIFFERENCE math.squared_difference, TANH tanh, TILE tile,
        TRANSPOSE transpose, UNSORTED_SEGMENT_MAX math.unsorted_segment_max,
        UNSORTED_SEGMENT_MIN math.unsorted_segment_min,
        UNSORTED_SEGMENT_PROD math.unsorted_segment_prod,
        UNSORTED_SEGMENT_SUM math.unsorted_segment_sum, WHERE where
        """,
    ),
    **_table(
        _reduction,
        """
        MEAN reduce_mean, REDUCE_ALL reduce_all, REDUCE_ANY reduce_any,
        REDUCE_MAX reduce_max, REDUCE_MIN reduce_min, REDUCE_PROD reduce_prod,
        SUM reduce_sum
        """,
    ),
    "ADD": _fused(tf.add),
    "ADD_N": lambda call: tf.add_n(call.all()),
    "ARG_MAX": _extremum(tf.argmax),
    "ARG_MIN": _extremum(tf.argmin),
    "ASSIGN_VARIABLE": _assign_variable,
    "AVERAGE_POOL_2D": _pool(tf.nn.avg_pool2d),
    "BATCH_MATMUL": lambda call: tf.matmul(
        *call.all(),
        adjoint_a=call.option("adj_x", False),
        adjoint_b=call.option("adj_y", False),
    ),
    "BATCH_TO_SPACE_ND": lambda call: _RAW.BatchToSpaceND(
        input=call[0], block_shape=call[1], crops=call[2]
    ),
    "BITCAST": _bits,
    "BUCKETIZE": lambda call: _RAW.Bucketize(
        input=call[0], boundaries=list(call.option("boundaries", ()))
    ),
    "CALL": _call("subgraph"),
    "CALL_ONCE": _initialize,
    "CAST": _cast,
    "CONCATENATION": lambda call: activated(
        call, tf.concat(call.all(), call.option("axis", 0))
    ),
    "CONV_2D": _convolution,
    "CONV_3D": _convolution_3d,
    "CONV_3D_TRANSPOSE": _transposed(tf.nn.conv3d_transpose, range(5)),
    "CUMSUM": lambda call: tf.cumsum(
        call[0],
        call.scalar(1),
        exclusive=call.option("exclusive", False),
        reverse=call.option("reverse", False),
    ),
    "DENSIFY": lambda call: call[0],
    "DEPTHWISE_CONV_2D": _depthwise,
    "DEPTH_TO_SPACE": lambda call: tf.nn.depth_to_space(
        call[0], call.option("block_size")
    ),
    "DEQUANTIZE": lambda call: tf.cast(call[0], call.dtype),
    # Quotients of integers are cut off towards zero, as C++ does.
    "DIV": _fused(
        lambda x, y: (tf.math.divide if x.dtype.is_floating else tf.truncatediv)(x, y)
    ),
    "DYNAMIC_UPDATE_SLICE": _update_slice,
    "EMBEDDING_LOOKUP": lambda call: tf.gather(call[1], call[0]),
    "EXPAND_DIMS": lambda call: tf.expand_dims(call[0], call.scalar(1)),
    "FAKE_QUANT": _fake_quant,
    "FULLY_CONNECTED": _fully_connected,
    "GATHER": _gather,
    "GELU": lambda call: tf.nn.gelu(call[0], call.option("approximate", False)),
    "HARD_SWISH": lambda call: call[0] * tf.nn.relu6(call[0] + 3.0) * (1.0 / 6.0),
    "IF": _branches,
    "L2_NORMALIZATION": lambda call: activated(
        call, tf.math.l2_normalize(call[0], -1, epsilon=1e-12)
    ),
    "L2_POOL_2D": _pool(
        lambda x, *window: tf.sqrt(tf.nn.avg_pool2d(tf.square(x), *window))
    ),
    "LEAKY_RELU": lambda call: tf.nn.leaky_relu(call[0], call.option("alpha", 0.0)),
    "LOCAL_RESPONSE_NORMALIZATION": lambda call: tf.nn.local_response_normalization(
        call[0],
        call.option("radius"),
        call.option("bias"),
        call.option("alpha"),
        call.option("beta"),
    ),
    "MAX_POOL_2D": _pool(tf.nn.max_pool2d),
    "MIRROR_PAD": lambda call: tf.pad(
        call[0], call[1], str(call.option("mode", "REFLECT"))
    ),
    "MUL": _fused(tf.multiply),
    "MULTINOMIAL": lambda call: _RAW.Multinomial(
        logits=call[0],
        num_samples=call.scalar(1),
        seed=call.option("seed", 0),
        seed2=call.option("seed2", 0),
        output_dtype=call.dtype,
    ),
    "NON_MAX_SUPPRESSION_V4": _non_max_suppression(
        _RAW.NonMaxSuppressionV4, soft=False
    ),
    "NON_MAX_SUPPRESSION_V5": _non_max_suppression(_RAW.NonMaxSuppressionV5, soft=True),
    "ONE_HOT": lambda call: tf.one_hot(*call.all(), axis=call.option("axis", -1)),
    "PACK": lambda call: tf.stack(call.all(), call.option("axis", 0)),
    "PAD": lambda call: tf.pad(call[0], call[1]),
    "PADV2": lambda call: tf.pad(call[0], call[1], constant_values=call[2]),
    # In the form in which Keras writes it, which TFLite's converter knows.
    "PRELU": lambda call: tf.nn.relu(call[0]) + -call[1] * tf.nn.relu(-call[0]),
    "QUANTIZE": _with_other_steps,
    "RANDOM_STANDARD_NORMAL": _random(_RAW.RandomStandardNormal),
    "RANDOM_UNIFORM": _random(_RAW.RandomUniform),
    "READ_VARIABLE": lambda call: call.around.variable(
        call.around.value(call.source(0)), call.op.outputs[0]
    ).read_value(),
    "RELU_0_TO_1": lambda call: tf.minimum(tf.maximum(call[0], 0.0), 1.0),
    "RELU_N1_TO_1": lambda call: ACTIVATIONS["RELU_N1_TO_1"](call[0]),
    "RESHAPE": _reshape,
    "RESIZE_BILINEAR": _resize(_RAW.ResizeBilinear),
    "RESIZE_NEAREST_NEIGHBOR": _resize(_RAW.ResizeNearestNeighbor),
    "REVERSE_SEQUENCE": lambda call: tf.reverse_sequence(
        call[0], call[1], call.option("seq_dim"), call.option("batch_dim", 0)
    ),
    "SELECT": lambda call: _RAW.Select(condition=call[0], x=call[1], y=call[2]),
    "SHAPE": lambda call: tf.shape(call[0], call.dtype),
    "SOFTMAX": lambda call: tf.nn.softmax(
        call[0] if call.option("beta", 1.0) == 1.0 else call[0] * call.option("beta")
    ),
    "SPACE_TO_BATCH_ND": lambda call: _RAW.SpaceToBatchND(
        input=call[0], block_shape=call[1], paddings=call[2]
    ),
    "SPACE_TO_DEPTH": lambda call: tf.nn.space_to_depth(
        call[0], call.option("block_size")
    ),
    "SPARSE_TO_DENSE": lambda call: _RAW.SparseToDense(
        sparse_indices=call[0],
        output_shape=call[1],
        sparse_values=call[2],
        default_value=call[3],
        validate_indices=call.option("validate_indices", False),
    ),
    "SPLIT": lambda call: tf.split(call[1], call.option("num_splits"), call.scalar(0)),
    "SPLIT_V": lambda call: tf.split(call[0], call.number(1).tolist(), call.scalar(2)),
    "SQUEEZE": lambda call: tf.squeeze(
        call[0], list(call.option("squeeze_dims", ())) or None
    ),
    "STABLEHLO_COMPOSITE": _call("decomposition_subgraph_index"),
    "STRIDED_SLICE": _strided_slice,
    "SUB": _fused(tf.subtract),
    "TOPK_V2": lambda call: list(tf.math.top_k(call[0], call.scalar(1))),
    "TRANSPOSE_CONV": _transposed(tf.nn.conv2d_transpose, [1, 2, 0, 3]),
    "UNIQUE": lambda call: list(
        tf.unique(call[0], tf.as_dtype(call.op.outputs[1].dtype))
    ),
    "UNPACK": lambda call: tf.unstack(
        call[0], call.option("num"), call.option("axis", 0)
    ),
    "VAR_HANDLE": _variable_handle,
    "WHILE": _loop,
    "ZEROS_LIKE": _plain(tf.zeros_like),
}
"""The builders of TensorFlow ops, by the builtin kinds of TFLite."""

CUSTOM: Mapping[str, Builder] = {"Convolution2DTransposeBias": _transposed_with_bias}
"""The builders for custom ops whose kernels are published."""

LEARNED: Mapping[str, Sequence[int] | None] = {
    **dict.fromkeys(
        ("ADD", "BATCH_MATMUL", "CONCATENATION", "DIV", "MUL", "PRELU", "SUB")
    ),
    "EMBEDDING_LOOKUP": (1,),
    "GATHER": (0,),
}
"""The inputs whose constants are trained besides the weights of layers; None for all.

Constants of one value, as in gelu, are not.
"""

FORWARDING = words(
    "BATCH_TO_SPACE_ND BROADCAST_TO DEPTH_TO_SPACE EXPAND_DIMS GATHER GATHER_ND "
    "MAX_POOL_2D MIRROR_PAD PAD READ_VARIABLE REDUCE_MAX REDUCE_MIN RESHAPE "
    "RESIZE_NEAREST_NEIGHBOR SLICE SPACE_TO_BATCH_ND SPACE_TO_DEPTH SQUEEZE "
    "STRIDED_SLICE TILE TRANSPOSE"
)
"""Kinds whose results keep the steps of their inputs, and need no rounding."""
