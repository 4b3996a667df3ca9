"""Ops without a TFLite kernel, rewritten as ops that have one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from geutil.graph import replicas, types
from geutil.graph.creation import Function, Stencils
from geutil.graph.edits import (
    InputEdit,
    Liveness,
    apply_edits,
    reader_edits,
    results_of,
    set_results,
)
from geutil.graph.op_types import FUSED_NORMS, types_in
from geutil.graph.runtime import inlined_convolution
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.planning.fused_ops import Prelu, parted_bias
from geutil.quantize.planning.int8_kernels import DIVISIONS
from geutil.rewrite.driver import replace_each
from geutil.select.networks.batch_norms import is_layer_norm


class Form(NamedTuple):
    """Ops that compute the same as another op."""

    words: str
    scope: str  # the last part of the new ops' scope
    key: Hashable  # tells apart what makes other ops
    function: Function
    inputs: Sequence[Tensor]


def int8_form(op: Operation) -> Form | None:
    """Return the form of an op whose parts have int8 kernels; None if there is none."""
    form = _INT8.get(op.type) or _UNCONVERTED.get(op.type)
    return None if form is None else form(op)


def converted_form(op: Operation) -> Form | None:
    """Return the form of an op that TFLite's converter refuses as it is, or None."""
    form = _UNCONVERTED.get(op.type)
    return None if form is None else form(op)


def _plain(words: str, scope: str, function: Function) -> Callable[[Operation], Form]:
    """Return the maker of a form that depends on nothing but the inputs of an op."""
    return lambda op: Form(words, scope, words, function, op.inputs)


def _negative(x: tf.Tensor) -> list[tf.Tensor]:
    factor = tf.constant(-1.0, tf.float32, name="factor")
    return [tf.multiply(x, factor, name="product")]


def _layer_norm(op: Operation) -> Form | None:
    """The converter would take it apart, too, but where no FakeQuant can lie inside."""
    if not is_layer_norm(op) or op.inputs[0].dtype != tf.float32:
        return None
    epsilon = float(op.get_attr("epsilon"))

    def normalized(x: tf.Tensor) -> list[tf.Tensor]:
        # The batch of one is none to take a mean over.
        axes = list(range(2, x.shape.rank))
        mean = tf.reduce_mean(x, axes, keepdims=True, name="mean")
        squares = tf.math.squared_difference(x, mean, name="squares")
        variance = tf.reduce_mean(squares, axes, keepdims=True, name="variance")
        factor = tf.math.rsqrt(variance + epsilon, name="factor")
        return [tf.multiply(x - mean, factor, name="normalized")]

    words = "is a layer norm and computes (x - mean) * rsqrt(variance + epsilon)"
    return Form(words, "norm", ("norm", op), normalized, op.inputs[:1])


def _one_hot(op: Operation) -> Form | None:
    """One-hot vectors that are quantized make the converter fail."""
    # It moves that to the two values, which the kernel does not take in int8.
    one_hot = op.inputs[0].op if op.type == "Cast" else op
    if one_hot.type != "OneHot":
        return None
    indices, *_, off = one_hot.inputs
    axis = int(one_hot.get_attr("axis"))

    def chosen(
        indices: tf.Tensor, depth: tf.Tensor, on: tf.Tensor, off: tf.Tensor
    ) -> list[tf.Tensor]:
        mask = tf.one_hot(indices, depth, True, False, axis, tf.bool, name="mask")
        on, off = (tf.cast(value, tf.float32) for value in (on, off))
        return [tf.where(mask, on, off, name="choice")]

    key = ("one-hot", axis, indices.dtype.name, off.dtype.name)
    return Form("chooses by a mask", "choice", key, chosen, one_hot.inputs)


def _division(op: Operation) -> Form | None:
    """The int8 kernel for divisions takes no divisor that is stored as 0."""
    *dividend, root = op.inputs
    if root.op.type == "Sqrt":

        def by_root(*xs: tf.Tensor) -> list[tf.Tensor]:
            inverse = tf.math.rsqrt(xs[-1], name="rsqrt")
            return [tf.multiply(xs[0], inverse, name="product") if xs[1:] else inverse]

        inputs = [*dividend, root.op.inputs[0]]
        key = ("root", len(dividend))
        return Form("computes by rsqrt", "by_root", key, by_root, inputs)
    if op.type in DIVISIONS:
        return None
    divisor = tf.get_static_value(root)
    # DivNoNan and Xdivy are plain divisions by constants without zeros alone.
    if op.type != "Div" and (divisor is None or not np.all(divisor)):
        return None
    form = _plain(
        "computes x / y", "quotient", lambda x, y: [tf.divide(x, y, name="quotient")]
    )
    return form(op)


def _squared(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    difference = tf.subtract(x, y, name="difference")
    return [tf.multiply(difference, difference, name="square")]


def _squared_twice(x: tf.Tensor) -> tf.Tensor:
    square = tf.multiply(x, x, name="square")
    return tf.multiply(square, square, name="power")


_POWERS: dict[float, tuple[str, Callable[[tf.Tensor], tf.Tensor]]] = {
    -0.5: ("rsqrt(x)", lambda x: tf.math.rsqrt(x, name="power")),
    0.5: ("sqrt(x)", lambda x: tf.sqrt(x, name="power")),
    1.0: ("x", lambda x: tf.identity(x, name="power")),
    2.0: ("x * x", lambda x: tf.multiply(x, x, name="power")),
    3.0: ("x * x * x", lambda x: tf.multiply(x * x, x, name="power")),
    4.0: ("(x * x) * (x * x)", _squared_twice),
}
"""Exponents of powers that other ops compute, and these."""


def _power(op: Operation) -> Form | None:
    exponent = 2.0
    if op.type == "Pow":
        value = tf.get_static_value(op.inputs[1])
        # Of more axes than x, it would give the result more.
        if (
            value is None
            or value.size != 1
            or value.ndim > (op.inputs[0].shape.rank or 0)
        ):
            return None
        exponent = float(value.reshape(()))
    if exponent not in _POWERS:
        return None
    words, compute = _POWERS[exponent]
    key = ("power", exponent)
    return Form(
        f"computes {words}", "power", key, lambda x: [compute(x)], op.inputs[:1]
    )


def _sum(op: Operation) -> Form | None:
    inputs = list(op.inputs)
    if len(inputs) == 1:
        return None
    words = f"adds {len(inputs)} tensors one by one"

    def added(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return [functools.reduce(tf.add, tensors)]

    return Form(words, "sum", ("sum", len(inputs)), added, inputs)


def _scaled_elu(x: tf.Tensor) -> list[tf.Tensor]:
    # Klambauer et al., Self-Normalizing Neural Networks, 2017, section 2.
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    falling = (tf.exp(tf.minimum(x, 0.0)) - 1.0) * (scale * alpha)
    return [tf.add(tf.nn.relu(x) * scale, falling, name="selu")]


def _clipped(x: tf.Tensor, low: tf.Tensor, high: tf.Tensor) -> list[tf.Tensor]:
    return [tf.maximum(tf.minimum(x, high, name="minimum"), low, name="maximum")]


def _norm(op: Operation) -> Form:
    keeps = bool(op.get_attr("keep_dims"))

    def norm(x: tf.Tensor, axes: tf.Tensor) -> list[tf.Tensor]:
        return [tf.sqrt(tf.reduce_sum(x * x, axes, keeps), name="norm")]

    words = "computes sqrt(sum(x * x))"
    return Form(words, "norm", ("euclidean norm", keeps), norm, op.inputs)


def _roll(op: Operation) -> Form | None:
    """The converter takes it apart, too, if no size is unknown, the batch's neither."""
    x, shifts, axes = op.inputs
    places = tf.get_static_value(axes)
    if x.shape.is_fully_defined() or places is None or x.shape.rank is None:
        return None
    amounts = tf.get_static_value(shifts)
    sizes = x.shape.as_list()
    turned = [int(axis) % len(sizes) for axis in places.reshape(-1)]

    def rolled(x: tf.Tensor, *shifts: tf.Tensor) -> list[tf.Tensor]:
        for index, axis in enumerate(turned):
            size = sizes[axis]
            if amounts is None:
                shift = tf.cast(tf.reshape(shifts[0], [-1])[index], tf.int32)
            else:
                shift = int(amounts.reshape(-1)[index])
            if size is None:
                size = tf.shape(x)[axis]
            # How many of the first go behind the others.
            start = -shift % size
            if isinstance(start, int) and start == 0:
                continue
            before = (slice(None),) * axis
            x = tf.concat(
                [x[(*before, slice(start, None))], x[(*before, slice(start))]], axis
            )
        return [tf.identity(x, name="rolled")]

    inputs = [x, shifts] if amounts is None else [x]
    constant = None if amounts is None else tuple(amounts.reshape(-1).tolist())
    key = ("roll", tuple(turned), constant, tuple(sizes))
    return Form("joins two slices for each axis", "roll", key, rolled, inputs)


_INT8: dict[str, Callable[[Operation], Form | None]] = {
    **dict.fromkeys(FUSED_NORMS, _layer_norm),
    **dict.fromkeys((*DIVISIONS, "Div", "DivNoNan", "Xdivy"), _division),
    **dict.fromkeys(("Pow", "Square"), _power),
    **dict.fromkeys(("Cast", "OneHot"), _one_hot),
    "AddN": _sum,
    "BiasAddV1": _plain(
        "computes x + b", "sum", lambda x, bias: [tf.nn.bias_add(x, bias, name="sum")]
    ),
    "Expm1": _plain(
        "computes exp(x) - 1",
        "exp",
        lambda x: [tf.subtract(tf.exp(x), 1.0, name="less_one")],
    ),
    "Log1p": _plain(
        "computes log(x + 1)", "log", lambda x: [tf.math.log(x + 1.0, name="log")]
    ),
    "MulNoNan": _plain(
        "computes x * y", "product", lambda x, y: [tf.multiply(x, y, name="product")]
    ),
    "Neg": _plain("computes x * -1", "product", _negative),
    "Selu": _plain(
        "computes scale * (relu(x) + alpha * (exp(min(x, 0)) - 1))", "selu", _scaled_elu
    ),
    # Of more than four axes the converter takes it apart, with no FakeQuant inside.
    "SquaredDifference": _plain("computes (x - y) * (x - y)", "product", _squared),
}
"""Forms of ops that TFLite computes in float, or does not compute as they are."""

_UNCONVERTED: dict[str, Callable[[Operation], Form | None]] = {
    "AccumulateNV2": _sum,
    "ClipByValue": _plain("computes max(min(x, b), a)", "clip", _clipped),
    "EuclideanNorm": _norm,
    "Roll": _roll,
}
"""Forms of ops that the converter refuses (TensorFlow 2.21)."""

REFUSED = types_in(
    """
    Acos Acosh AdjustContrastv2 AdjustHue AdjustSaturation Angle ApproximateEqual
    Asin Asinh Atan Atanh AvgPool3D BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr
    Cholesky Complex Conj Cosh CropAndResize Cross Cumprod CumulativeLogsumexp
    DenseBincount Diag DiagPart Digamma Dilation2D DynamicPartition Erf Erfc Erfinv
    ExtractImagePatches FFT FFT2D HSVToRGB HistogramFixedWidth IFFT IFFT2D IRFFT
    IRFFT2D Igamma ImageProjectiveTransformV3 InTopKV2 Invert LeftShift
    LogMatrixDeterminant LowerBound Lu MatrixDeterminant MatrixDiagPartV3
    MatrixInverse MatrixSolve MatrixTriangularSolve MaxPool3D MaxPoolWithArgmax Mod
    Ndtri NthElement Polygamma Qr RFFT3D RGBToHSV RandomGamma RandomShuffle
    RandomUniformInt ResizeArea ResizeBicubic ScaleAndTranslate SegmentMax
    SegmentMean SegmentProd SelfAdjointEigV2 Sinh StatelessRandomNormalV2
    StatelessRandomUniformV2 Svd Tan TensorScatterMax TensorScatterMin
    TensorScatterSub TruncateMod TruncatedNormal UniqueV2 UniqueWithCounts
    UpperBound Zeta
    """
)
"""Types of ops that the converter refuses, and for which there is no form here.

Measured with TensorFlow 2.21; `tests/quantize/test_kernels.py` measures it again.
"""


def is_refused(op: Operation) -> bool:
    """Tell whether TFLite's converter refuses an op as it is."""
    return op.type in REFUSED or converted_form(op) is not None


Lowered = tuple[list[str], dict[Operation, Operation]]
"""The rewrites in words; and by new ops those that they stand in for."""


def lower(
    graph: Graph,
    prelus: Sequence[Prelu],
    calls: Sequence[Operation],
    forms: Mapping[Operation, Form],
    biases: Sequence[Operation],
) -> Lowered:
    """Write ops of a plan in another form that has int8 kernels."""
    lines, stands_for = _lower_prelus(graph, prelus), dict[Operation, Operation]()
    for more, results in (
        _lower_calls(graph, calls),
        _lower_forms(graph, forms),
        _lower_biases(graph, biases),
    ):
        lines += more
        stands_for |= results
    return lines, stands_for


def _lower_prelus(graph: Graph, prelus: Sequence[Prelu]) -> list[str]:
    """Let PReLUs compute `relu(x) + alpha * min(x, 0)`, which is the same."""
    # Keras writes `relu(x) + -alpha * relu(-x)`, and TFLite negates in float only.
    if not prelus:
        return []
    stencils = Stencils(graph)
    base_names = [f"{prelu.product.name}/negative" for prelu in prelus]
    names = types.absolute_unique_names(graph, base_names)
    minima = [
        stencils.add("minimum", _minimum, name, [prelu.source], prelu.end.device)
        for prelu, name in zip(prelus, names, strict=True)
    ]
    tensor_of = stencils.make()
    edits = [
        edit
        for prelu, (minimum,) in zip(prelus, minima, strict=True)
        for edit in (
            InputEdit(prelu.product, prelu.slot, tensor_of[minimum]),
            InputEdit(prelu.product, 1 - prelu.slot, prelu.alpha),
        )
    ]
    replaced: list[Operation] = [t.op for p in prelus for t in p.product.inputs]
    apply_edits(graph, edits)
    Liveness(graph).retire(replaced, lambda op: False)
    words = "a PReLU, computes relu(x) + alpha * min(x, 0)"
    return [f"'{prelu.end.name}', {words}" for prelu in prelus]


def _lower_forms(graph: Graph, forms: Mapping[Operation, Form]) -> Lowered:
    """Replace ops that TFLite has no kernel for by their forms."""
    results = _replace(graph, list(forms.items()))
    lines = [f"'{op.name}' ({op.type}) {form.words}" for op, form in forms.items()]
    return lines, results


def _lower_calls(graph: Graph, ops: Sequence[Operation]) -> Lowered:
    """Let convolutions stand in the place of calls that are nothing else."""
    if not ops:
        return [], {}
    # Results of a function survive replacements; here they are replaced, too.
    results = results_of(graph)
    set_results(graph, [])
    done = replace_each(graph, ops, inlined_convolution, name="inlined")
    outputs = replicas.outputs_meant(graph)
    outputs[:] = map(done.current, outputs)
    set_results(graph, list(map(done.current, results)))
    lines = [f"'{op.name}' ({op.type}) is the convolution that it calls" for op in ops]
    return lines, {done.current(op.outputs[0]).op: op for op in ops}


def _lower_biases(graph: Graph, ops: Sequence[Operation]) -> Lowered:
    """Let layers add their biases before a Reshape, which is the same."""
    # A layer's kernel adds a bias before it rounds; behind a Reshape that parts the
    # channels another kernel adds it, and both round.
    forms: dict[Operation, Form] = {}
    for op in ops:
        parted = parted_bias(op)
        if parted is not None:
            words = f"is added by '{parted.data.op.name}', before a Reshape"
            key = ("bias", *(t.dtype.name for t in parted))
            forms[op] = Form(words, "early", key, _biased_early, list(parted))
    lines, by_result = _lower_forms(graph, forms)
    by_sum = {new.inputs[0].op: old for new, old in by_result.items()}
    return lines, by_result | by_sum


def _replace(
    graph: Graph, lowerings: Sequence[tuple[Operation, Form]]
) -> dict[Operation, Operation]:
    """Let forms be read in the place of ops; return the ops by their stand-ins."""
    if not lowerings:
        return {}
    stencils = Stencils(graph)
    base_names = [f"{op.name}/{form.scope}" for op, form in lowerings]
    names = types.absolute_unique_names(graph, base_names)
    results = [
        stencils.add(form.key, form.function, name, list(form.inputs), op.device)
        for (op, form), name in zip(lowerings, names, strict=True)
    ]
    tensor_of = stencils.make()
    by_tensor: MutableIdentityMap[Tensor] = MutableIdentityMap(
        (op.outputs[0], tensor_of[result])
        for (op, _), (result,) in zip(lowerings, results, strict=True)
    )
    edits = [edit for pair in by_tensor.items() for edit in reader_edits(*pair)]
    apply_edits(graph, edits)
    set_results(graph, [by_tensor.get(t, t) for t in results_of(graph)])
    outputs = replicas.outputs_meant(graph)
    outputs[:] = [by_tensor.get(t, t) for t in outputs]
    # TensorFlow cannot remove an op, which is marked as retired.
    Liveness(graph).retire([op for op, _ in lowerings], lambda op: False)
    return {new.op: old.op for old, new in by_tensor.items()}


def _biased_early(x: tf.Tensor, bias: tf.Tensor, shape: tf.Tensor) -> list[tf.Tensor]:
    total = tf.nn.bias_add(x, tf.reshape(bias, [-1]), name="sum")
    return [tf.reshape(total, shape, name="parted")]


def _minimum(x: tf.Tensor) -> list[tf.Tensor]:
    zero = tf.constant(0.0, tf.float32, name="zero")
    return [tf.minimum(x, zero, name="minimum")]
