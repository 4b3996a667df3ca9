"""The table of int8 kernels, measured through TFLite's converter."""

import re

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import QuantizeError
from geutil.quantize import quantize, to_tflite
from geutil.quantize.planning import int8_kernels
from geutil.quantize.planning.int8_kernels import KERNELS, SINCE, kernels_of, version_of
from tests.interpreter import has_floats
from tests.quantize.converted import Together, decibels, opened, spec
from tests.settings import needs_eager

pytestmark = needs_eager

raw = tf.raw_ops
IMAGE = spec(2, 8, 8, 4)
ROW = np.linspace(0.5, 2.0, 4).astype(np.float32)
MATRIX = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
CUBE = np.random.default_rng(1).normal(size=(2, 2, 2, 4, 3)).astype(np.float32)
EDGES = tf.constant([[0, 0], [1, 1], [1, 1], [0, 0]])
BLOCK, CROPS = [2, 2], [[0, 0], [0, 0]]
ONE = ((IMAGE,), {})
TWO = ((IMAGE, IMAGE), {})
POSITIVE = ((IMAGE,), {"low": 0.5})


def one(function):
    return function, *ONE


def two(function):
    return function, *TWO


def positive(function):
    return function, *POSITIVE


KERNEL_CASES = {
    "Abs": one(tf.abs),
    "Add": two(lambda a, b: raw.Add(x=a, y=b)),
    "AddV2": two(lambda a, b: a + b),
    "AvgPool": one(lambda a: tf.nn.avg_pool2d(a, 2, 2, "SAME")),
    "BatchMatMul": two(lambda a, b: raw.BatchMatMul(x=a, y=b, adj_y=True)),
    "BatchMatMulV2": two(lambda a, b: raw.BatchMatMulV2(x=a, y=b, adj_y=True)),
    "BatchMatMulV3": two(
        lambda a, b: raw.BatchMatMulV3(x=a, y=b, Tout=tf.float32, adj_y=True)
    ),
    "BatchToSpaceND": one(
        lambda a: tf.batch_to_space(tf.space_to_batch(a, BLOCK, CROPS), BLOCK, CROPS)
    ),
    "BiasAdd": one(lambda a: tf.nn.bias_add(a, ROW)),
    "BroadcastTo": one(lambda a: tf.broadcast_to(a[:, :1], [2, 8, 8, 4])),
    "ConcatV2": two(lambda a, b: tf.concat([a, b], 3)),
    "DepthToSpace": one(lambda a: tf.nn.depth_to_space(a, 2)),
    "Einsum": two(lambda a, b: tf.einsum("abcd,abed->abce", a, b)),
    "EnsureShape": one(lambda a: tf.ensure_shape(a, [2, 8, 8, 4])),
    "Exp": one(tf.exp),
    "ExpandDims": one(lambda a: tf.expand_dims(a, 1)),
    "Gather": one(lambda a: raw.Gather(params=a, indices=[1, 0])),
    "GatherNd": one(lambda a: tf.gather_nd(a, [[0, 1], [1, 2]])),
    "GatherV2": one(lambda a: tf.gather(a, [0, 2], axis=3)),
    "Identity": one(lambda a: tf.exp(tf.identity(a))),
    "IdentityN": two(lambda a, b: tf.identity_n([a, b])),
    "LeakyRelu": one(lambda a: tf.nn.leaky_relu(a, 0.1)),
    "Log": positive(tf.math.log),
    "LogSoftmax": one(tf.nn.log_softmax),
    "MatMul": (tf.matmul, (spec(5, 4), spec(4, 3)), {}),
    "Max": one(lambda a: tf.reduce_max(a, [1, 2])),
    "MaxPool": one(lambda a: tf.nn.max_pool2d(a, 2, 2, "SAME")),
    "Maximum": two(tf.maximum),
    "Mean": one(lambda a: tf.reduce_mean(a, [1, 2])),
    "Min": one(lambda a: tf.reduce_min(a, [1, 2])),
    "Minimum": two(tf.minimum),
    "MirrorPad": one(lambda a: tf.pad(a, EDGES, "REFLECT")),
    "Mul": two(lambda a, b: a * b),
    "Pack": two(lambda a, b: tf.stack([a, b], 3)),
    "Pad": one(lambda a: tf.pad(a, EDGES)),
    "PadV2": one(lambda a: tf.pad(a, EDGES, constant_values=-1.0)),
    "PlaceholderWithDefault": one(
        lambda a: raw.PlaceholderWithDefault(input=a, shape=a.shape)
    ),
    "PreventGradient": one(lambda a: raw.PreventGradient(input=a)),
    "Prod": one(lambda a: tf.reduce_prod(a, 3)),
    "RealDiv": one(lambda a: a / ROW),
    "Relu": one(tf.nn.relu),
    "Relu6": one(tf.nn.relu6),
    "Reshape": one(lambda a: tf.reshape(a, [2, -1])),
    "ResizeBilinear": one(lambda a: tf.image.resize(a, [16, 16])),
    "ResizeNearestNeighbor": one(lambda a: tf.image.resize(a, [16, 16], "nearest")),
    "ReverseV2": one(lambda a: tf.reverse(a, [1])),
    "Roll": one(lambda a: tf.roll(a, 1, 1)),
    "Rsqrt": positive(tf.math.rsqrt),
    "Select": two(lambda a, b: raw.Select(condition=a > b, x=a, y=b)),
    "SelectV2": two(lambda a, b: tf.where(a > b, a, b)),
    "Sigmoid": one(tf.sigmoid),
    "Slice": one(lambda a: tf.slice(a, [0, 1, 1, 0], [2, 3, 3, 4])),
    "Snapshot": one(lambda a: raw.Snapshot(input=a)),
    "Softmax": one(tf.nn.softmax),
    "SpaceToBatchND": one(lambda a: tf.space_to_batch(a, BLOCK, CROPS)),
    "SpaceToDepth": one(lambda a: tf.nn.space_to_depth(a, 2)),
    "Split": one(lambda a: tf.split(a, 2, 3)),
    "SplitV": one(lambda a: tf.split(a, [1, 3], 3)),
    "Sqrt": positive(tf.sqrt),
    "SquaredDifference": two(tf.math.squared_difference),
    "Squeeze": one(lambda a: tf.squeeze(a[:, :1], 1)),
    "StopGradient": one(tf.stop_gradient),
    "StridedSlice": one(lambda a: a[:, 1:5]),
    "Sub": two(lambda a, b: a - b),
    "Sum": one(lambda a: tf.reduce_sum(a, [1, 2])),
    "Tanh": one(tf.tanh),
    "Tile": one(lambda a: tf.tile(a, [1, 2, 1, 1])),
    "TopKV2": one(lambda a: tf.math.top_k(a, 2)[0]),
    "Transpose": one(lambda a: tf.transpose(a, [0, 3, 1, 2])),
    "Unpack": one(lambda a: tf.unstack(a, axis=3)),
}

FLOAT_CASES = {
    "Ceil": one(tf.math.ceil),
    "Conv3D": (
        lambda a: tf.nn.conv3d(a, CUBE, [1] * 5, "SAME"),
        (spec(1, 4, 4, 4, 4),),
        {},
    ),
    "Cos": one(tf.cos),
    "Cumsum": one(lambda a: tf.cumsum(a, 1)),
    "Elu": one(tf.nn.elu),
    "Floor": one(tf.floor),
    "LRN": one(tf.nn.lrn),
    "Pow": positive(lambda a: tf.pow(a, 1.5)),
    "Round": one(tf.round),
    "Sign": one(tf.sign),
    "Sin": one(tf.sin),
    "Softplus": one(tf.nn.softplus),
    "Softsign": one(tf.nn.softsign),
}

# By type and words of the report: the function, its data, the kernels of the file.
FORM_CASES = {
    "AddN) adds 3 tensors": (two(lambda a, b: tf.add_n([a, b, a])), "ADD ADD"),
    "AccumulateNV2) adds 2": (
        two(lambda a, b: raw.AccumulateNV2(inputs=[a, b], shape=a.shape)),
        "ADD",
    ),
    "BiasAddV1) computes x + b": (
        one(lambda a: raw.BiasAddV1(value=a, bias=ROW)),
        "ADD",
    ),
    "ClipByValue) computes max": (
        one(lambda a: raw.ClipByValue(t=a, clip_value_min=-1.0, clip_value_max=2.0)),
        "MINIMUM MAXIMUM",
    ),
    "Div) computes x / y": (one(lambda a: raw.Div(x=a, y=ROW)), "MUL"),
    "DivNoNan) computes": (one(lambda a: tf.math.divide_no_nan(a, ROW)), "MUL"),
    "Xdivy) computes x / y": (one(lambda a: tf.math.xdivy(a, ROW)), "MUL"),
    "EuclideanNorm) computes": (
        one(lambda a: raw.EuclideanNorm(input=a, axis=[3])),
        "MUL SUM SQRT",
    ),
    "Expm1) computes exp(x) - 1": (one(tf.math.expm1), "EXP SUB"),
    "Log1p) computes log(x + 1)": (positive(tf.math.log1p), "ADD LOG"),
    "MulNoNan) computes x * y": (two(tf.math.multiply_no_nan), "MUL"),
    "Pow) computes rsqrt(x)": (positive(lambda a: a**-0.5), "RSQRT"),
    "Pow) computes sqrt(x)": (positive(lambda a: a**0.5), "SQRT"),
    "Pow) computes x": (one(lambda a: tf.exp(a**1.0)), "EXP"),
    "Pow) computes x * x": (one(lambda a: a**2.0), "MUL"),
    "Pow) computes x * x * x": (one(lambda a: a**3.0), "MUL MUL"),
    "Pow) computes (x * x) * (x * x)": (one(lambda a: a**4.0), "MUL MUL"),
    "Selu) computes scale": (one(tf.nn.selu), "MINIMUM EXP SUB MUL QUANTIZE MUL ADD"),
    "Square) computes x * x": (one(tf.square), "MUL"),
}


# How older releases compute in float what KERNEL_CASES holds.
TO_COME_CASES = {
    "BroadcastTo": (
        lambda a: tf.broadcast_to(tf.exp(a[:, :1]), tf.shape(a)),
        (spec(None, 8, 8, 4),),
        {},
    ),
    "Sqrt": KERNEL_CASES["Sqrt"],
}
# The first release in which TFLite computes these at all.
CONVERTS_SINCE = {"Softsign": (2, 20)}
RUNNING = version_of(tf.__version__)
# In the order of the table: xdist wants the same one in every worker.
TO_COME = [kind for kind, first in SINCE.items() if first > RUNNING]
# A product with ones stands in for a BroadcastTo to a shape that is known.
FLOAT_YET = [kind for kind in TO_COME if kind != "BroadcastTo"]
REFUSED = [kind for kind, first in CONVERTS_SINCE.items() if first > RUNNING]


def test_every_kernel_of_the_table_is_measured():
    assert set(KERNEL_CASES) == {*KERNELS, *TO_COME}
    assert not set(KERNELS) & set(TO_COME)


def test_kernels_compute_in_int8():
    cases = {k: case for k, case in KERNEL_CASES.items() if k not in FLOAT_YET}
    parts = Together(cases).parts()
    assert {
        kind: part
        for kind, part in parts.items()
        if kind not in part.types or not part.is_int8 or part.most > 1
    } == {}


def test_what_has_no_kernel_is_float_and_reported(caplog):
    cases = {**{kind: TO_COME_CASES[kind] for kind in TO_COME}, **FLOAT_CASES}
    for kind in REFUSED:
        with pytest.raises(QuantizeError, match=f"TF Select ops: {kind}"):
            Together({kind: cases.pop(kind)})
    wrong = {}
    for kind, part in Together(cases).parts().items():
        (skipped,) = part.skipped
        told = (
            skipped.op_type,
            "TFLite has no int8 kernel" in skipped.reason,
            f"and this is {tf.__version__}" in skipped.reason,
            skipped.has_kernel,
        )
        # Its ends are int8 all the same.
        whole = part.floats and part.coverage == 1.0 and part.most <= 1
        casts = ("QUANTIZE", "DEQUANTIZE")
        whole &= all(f" {op} " in caplog.text for op in part.floats if op not in casts)
        if told != (kind, True, kind in TO_COME, False) or not whole:
            wrong[kind] = part
    assert wrong == {}


def test_kernels_come_with_versions():
    for name in ("2.21.0", "2.21.0-rc1", "2.21.0-dev20250801"):
        assert version_of(name) == (2, 21), name
    counts = [len(kernels_of((2, minor))) for minor in (16, 19, 20, 21, 22, 100)]
    assert counts[0] == counts[1] == len(KERNEL_CASES) - 2
    assert counts[2] == len(KERNEL_CASES) - 1
    assert set(counts[3:]) == {len(KERNEL_CASES)}


def test_the_plan_follows_the_version_that_runs(monkeypatch):
    monkeypatch.delitem(KERNELS, "Sqrt", raising=False)
    monkeypatch.setattr(tf, "__version__", "2.20.1")
    m = opened(lambda a: tf.exp(tf.sqrt(a)), IMAGE)
    report = quantize(m, is_training=False)
    (skipped,) = report.skipped
    assert skipped.reason == (
        "TFLite has no int8 kernel for Sqrt before TensorFlow 2.21, and this is 2.20.1"
    )
    assert report.coverage == 1.0
    assert "Sqrt" not in [entry.op_type for entry in report.quantized]


DIVISIONS = {
    "RealDiv": lambda a, b: tf.nn.relu(a) / b,
    "Reciprocal": lambda a, b: tf.nn.relu(a) * tf.math.reciprocal(b),
}


def test_divisors_that_are_stored_as_zero():
    """TFLite's int8 kernel refuses them, whatever they stand for."""
    cases = {
        kind: two(lambda a, b, f=divide: f(a, 1.0 + tf.sigmoid(b)) * 2.0)
        for kind, divide in DIVISIONS.items()
    }
    for kind, part in Together(cases).parts().items():
        (skipped,) = (skip for skip in part.skipped if skip.op_type == kind)
        assert not skipped.has_kernel, kind
        lacking = "that works" if kind == "RealDiv" else "for Reciprocal"
        assert f"no int8 kernel {lacking}" in skipped.reason
        assert "POW" in part.floats, kind
        assert "DIV" not in part.kinds, kind
        assert part.most <= 1, kind


def spread(a):
    """Return what the converter parts, as in a group norm, and leaves in float."""
    parts = tf.reshape(a, [*a.shape[:-1], 2, a.shape[-1] // 2])
    return tf.math.squared_difference(parts, tf.reduce_mean(parts, 4, True))


def test_ops_without_kernels_are_computed_by_others():
    cases = {
        kind: two(lambda a, b, f=divide: f(a, tf.sqrt(1 + tf.exp(b))))
        for kind, divide in DIVISIONS.items()
    }
    cases |= {"Neg": one(lambda a: -tf.exp(a)), "spread": one(spread)}
    together = Together(cases)
    parts = together.parts()
    assert {kind: part for kind, part in parts.items() if not part.is_int8} == {}
    assert max(part.most for part in parts.values()) <= 1
    for kind in DIVISIONS:
        kinds = ["ADD", "EXP", "MUL", "QUANTIZE", "RSQRT"]
        assert sorted(parts[kind].kinds) == kinds
        (line,) = parts[kind].rewritten
        assert line.endswith(f" ({kind}) computes by rsqrt")
    assert parts["Neg"].kinds == ["EXP", "MUL"]
    assert parts["Neg"].rewritten == ["'Neg/Neg' (Neg) computes x * -1"]
    assert "rewritten: 'Neg/Neg' (Neg) computes x * -1" in str(together.report)
    assert parts["spread"].kinds.count("MUL") == 1
    assert parts["spread"].kinds.count("SUB") == 1


def test_forms_are_int8_and_compute_the_same():
    cases = {words: case for words, (case, _) in FORM_CASES.items()}
    # With a Sqrt in it there is a kernel since 2.21.
    yet = (
        {w for w in cases if "sqrt" in w.lower() or "Euclid" in w} if FLOAT_YET else {}
    )
    together = Together({w: case for w, case in cases.items() if w not in yet})
    exact = together.traced(*together.data.values())
    found, wrong = together.results(), {}
    for words, part in together.parts().items():
        ((_, stored),) = found[words]
        (output,) = (n for n in exact if together.is_of(n, words))
        noise = decibels(exact[output].numpy(), stored)
        told = len(part.rewritten) == 1 and f"({words}" in part.rewritten[0]
        right = told and part.is_int8 and noise > 34
        if not right or sorted(part.kinds) != sorted(FORM_CASES[words][1].split()):
            wrong[words] = part, noise
    assert wrong == {}


ANY_IMAGES = spec(None, 8, 8, 4)
ROLLS = {
    "one axis": lambda a: tf.roll(a, 1, 1),
    "two axes": lambda a: tf.roll(
        tf.nn.relu(tf.roll(a, [-3, 2], [1, 2])), [3, -2], [1, 2]
    ),
    "once around": lambda a: tf.roll(a, [11, 8], [-1, 2]),
    "twice along": lambda a: tf.roll(a, [1, 2], [1, 1]),
    "the batch": lambda a: tf.roll(a, 1, 0),
    "computed": lambda a: tf.roll(a, tf.shape(a)[0] // 2, 1),
    "decisions": lambda a: tf.where(tf.roll(a > 0, [1, 1], [1, 2]), a, 0.0),
}


def test_rolls_of_unknown_batches_are_slices():
    """The converter takes those apart whose sizes are all known."""
    cases = {name: (roll, (ANY_IMAGES,)) for name, roll in ROLLS.items()}
    cases["unknown"] = ROLLS["one axis"], (spec(None, None, 8, 4),)
    together = Together(cases)
    exact = together.traced(*together.data.values())
    wrong = {}
    for name, pairs in together.results().items():
        ((_, stored),) = pairs
        (output,) = (n for n in exact if together.is_of(n, name))
        apart = np.abs(exact[output].numpy() - stored).max()
        floats = [op.kind for op in together.ops(name) if has_floats(op)]
        if apart > 6 / 255 or floats:
            wrong[name] = apart, floats
    assert wrong == {}
    lines = together.report.rewritten
    assert len(lines) == 9
    assert all(line.endswith("joins two slices for each axis") for line in lines)
    # Where weights alone are stored in integers, too.
    m = opened(lambda a: tf.roll(a, 1, 1) @ MATRIX, ANY_IMAGES)
    report = quantize(m, scheme="weight_only_int8", is_training=False)
    assert len(report.rewritten) == 1
    kinds = [op.kind for op in tflite.open(to_tflite(m, scheme="weight_only_int8")).ops]
    assert kinds.count("STRIDED_SLICE") == 2


SQUARE = spec(4, 4)
# Types of ops by what they read.
REFUSED_CASES = {
    "Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e Cosh Digamma Erf Erfc Erfinv "
    "Ndtri Sinh Tan": lambda a: {"x": a},
    "Cholesky LogMatrixDeterminant Lu MatrixDeterminant MatrixInverse Qr "
    "SelfAdjointEigV2 Svd DiagPart": lambda a: {"input": a},
    "MatrixSolve MatrixTriangularSolve": lambda a: {"matrix": a, "rhs": a},
    "ApproximateEqual Mod TruncateMod": lambda a: {"x": a, "y": a + 9.0},
    "Cross": lambda a: {"a": a[:, :3], "b": a[:, 1:]},
    "Betainc": lambda a: {"a": a, "b": a, "x": a},
    "Igamma Polygamma": lambda a: {"a": a, "x": a},
    "Zeta": lambda a: {"x": a, "q": a},
    "Cumprod CumulativeLogsumexp": lambda a: {"x": a, "axis": 0},
    "Diag": lambda a: {"diagonal": a},
    "MatrixDiagPartV3": lambda a: {"input": a, "k": 0, "padding_value": 0.0},
    "SegmentMax SegmentMean SegmentProd": lambda a: {"data": a, "segment_ids": ROW_IDS},
    "DynamicPartition": lambda a: {
        "data": a,
        "partitions": ROW_IDS,
        "num_partitions": 3,
    },
    "TensorScatterMax TensorScatterMin TensorScatterSub": lambda a: {
        "tensor": a,
        "indices": [[0]],
        "updates": a[:1],
    },
    "LowerBound UpperBound": lambda a: {"sorted_inputs": a, "values": a},
    "NthElement": lambda a: {"input": a, "n": 1},
    "InTopKV2": lambda a: {"predictions": a, "targets": ROW_IDS, "k": 2},
    "HistogramFixedWidth": lambda a: {
        "values": a,
        "value_range": [0.0, 1.0],
        "nbins": 4,
    },
    "UniqueV2": lambda a: {"x": whole(a), "axis": [0]},
    "UniqueWithCounts": lambda a: {"x": whole(a)[0]},
    "BitwiseAnd BitwiseOr LeftShift": lambda a: {"x": whole(a), "y": whole(a)},
    "Invert": lambda a: {"x": whole(a)},
    "DenseBincount": lambda a: {"input": whole(a), "size": 3, "weights": []},
    "Complex": lambda a: {"real": a, "imag": a},
    "Conj FFT FFT2D IFFT IFFT2D Angle": lambda a: {"input": tf.complex(a, a)},
    "IRFFT": lambda a: {"input": tf.complex(a, a), "fft_length": [4]},
    "IRFFT2D": lambda a: {"input": tf.complex(a, a), "fft_length": [4, 4]},
    "RFFT3D": lambda a: {"input": images(a), "fft_length": [2, 2, 2]},
    "HSVToRGB RGBToHSV": lambda a: {"images": images(a)[..., :3]},
    "AdjustHue": lambda a: {"images": images(a)[..., :3], "delta": 0.1},
    "AdjustSaturation": lambda a: {"images": images(a)[..., :3], "scale": 2.0},
    "AdjustContrastv2": lambda a: {"images": images(a), "contrast_factor": 2.0},
    "ResizeArea ResizeBicubic": lambda a: {"images": images(a), "size": [4, 4]},
    "ScaleAndTranslate": lambda a: {
        "images": images(a),
        "size": [4, 4],
        "scale": [2.0, 2.0],
        "translation": [0.0, 0.0],
    },
    "ImageProjectiveTransformV3": lambda a: {
        "images": images(a),
        "transforms": [[1.0, 0, 0, 0, 1, 0, 0, 0]],
        "output_shape": [4, 4],
        "fill_value": 0.0,
        "interpolation": "BILINEAR",
    },
    "CropAndResize": lambda a: {
        "image": images(a),
        "boxes": a,
        "box_ind": [0] * 4,
        "crop_size": [2, 2],
    },
    "ExtractImagePatches": lambda a: {
        "images": images(a),
        "ksizes": [1, 2, 2, 1],
        "strides": [1] * 4,
        "rates": [1] * 4,
        "padding": "SAME",
    },
    "Dilation2D": lambda a: {
        "input": images(a),
        "filter": images(a)[0],
        "strides": [1] * 4,
        "rates": [1] * 4,
        "padding": "SAME",
    },
    "AvgPool3D MaxPool3D": lambda a: {
        "input": images(a)[None],
        "ksize": [1, 1, 2, 2, 1],
        "strides": [1] * 5,
        "padding": "SAME",
    },
    "MaxPoolWithArgmax": lambda a: {
        "input": images(a),
        "ksize": [1, 2, 2, 1],
        "strides": [1] * 4,
        "padding": "SAME",
    },
    "RandomShuffle": lambda a: {"value": a},
    "RandomGamma": lambda a: {"shape": [2], "alpha": a},
    "RandomUniformInt": lambda a: {
        "shape": whole(a)[0],
        "minval": 0,
        "maxval": 3,
    },
    "TruncatedNormal": lambda a: {"shape": whole(a)[0], "dtype": tf.float32},
    "StatelessRandomNormalV2 StatelessRandomUniformV2": lambda a: {
        "shape": whole(a)[0],
        "key": tf.constant([1], tf.uint64),
        "counter": tf.constant([1, 2], tf.uint64),
        "alg": 1,
    },
}
ROW_IDS = [0, 0, 1, 2]


def whole(a):
    return tf.cast(a, tf.int32)


def images(a):
    return tf.reshape(a, [1, 2, 2, 4])


def test_what_the_converter_refuses_is_named_before_it_is_asked():
    made = {}

    def function(a):
        for kinds, reads in REFUSED_CASES.items():
            for kind in kinds.split():
                made[kind] = tf.nest.flatten(getattr(raw, kind)(**reads(a)))[0]
        return made

    m = opened(function, SQUARE)
    traced = tf.function(function, input_signature=[SQUARE], autograph=False)
    concrete = traced.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete])
    with pytest.raises(Exception, match="neither a custom op nor a flex op") as refused:
        converter.convert()
    found = set(re.findall(r"'tf\.(\w+)' op is neither", str(refused.value)))
    assert found == set(made) == int8_kernels.REFUSED
    report = quantize(m, is_training=False, strict=True)
    reasons = {e.op_type: e.reason for e in report.skipped}
    assert {k for k in made if "has no kernel in TFLite" not in reasons[k]} == set()
    assert "op(s) have no kernel in TFLite, 'Acos' (Acos) among" in report.warnings[0]
