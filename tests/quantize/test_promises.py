"""What the report calls int8 is int8 in the file."""

import numpy as np
import tensorflow as tf

from geutil.quantize import compare_int8, quantize, to_int8
from geutil.tflite.kinds import KINDS
from tests.quantize.converted import Together, alternate, opened, samples, spec
from tests.settings import needs_eager

pytestmark = needs_eager

random = np.random.default_rng(0)
IMAGE = spec(2, 6, 6, 4)
SQUARE = np.float32(random.normal(size=(4, 4)))


def weights(*shape):
    return (random.normal(size=shape) * 0.3).astype(np.float32)


BIASES = {
    "no bias": None,
    "a bias": weights(4),
    "a bias of zeros": np.zeros(4, np.float32),
    "a bias of few values": np.float32([0.0, 0.0, 0.5, 0.0]),
}


ACTIVATIONS = {"relu": tf.nn.relu, "relu6": tf.nn.relu6, "none": lambda y: y}


def transposed(bias, activation, batch):
    """Return a transposed convolution with weights of its own."""
    kernel = weights(3, 3, 4, 4)

    def function(a):
        shape = [2 if batch else tf.shape(a)[0], 12, 12, 4]
        y = tf.nn.conv2d_transpose(a, kernel, tf.stack(shape), 2)
        return activation(y if bias is None else tf.nn.bias_add(y, bias))

    return function, (spec(batch, 6, 6, 4),)


def test_transposed_convolutions():
    cases = {
        ", ".join(map(str, (bias, activation, batch))): transposed(
            BIASES[bias], ACTIVATIONS[activation], batch
        )
        for bias, activation, batch in alternate(BIASES, ACTIVATIONS, [2, None])
    }
    wrong = {}
    for case, part in Together(cases).parts().items():
        bias, activation, _ = case.split(", ")
        split = bias == "no bias" and activation != "none"
        # Where values reach beyond 6, a change of steps is no Relu6.
        made = [k for k in part.kinds if k in ("TRANSPOSE_CONV", "QUANTIZE", "RELU6")]
        most = 1 if bias != "no bias" else 2
        if not part.is_int8 or part.most > most or len(made) != 1 + split:
            wrong[case] = part
    assert wrong == {}


LAYERS = {
    "conv": lambda a, w: tf.nn.conv2d(a, w, 1, "SAME"),
    "dense": tf.matmul,
    "heads": lambda a, w: tf.reshape(tf.matmul(a, w), [-1, 2, 2]),
    "reshaped": lambda a, w: tf.reshape(
        tf.matmul(tf.reshape(a, [-1, 4]), w), tf.shape(a)
    ),
}


def of_same_weights(kind):
    """Return two layers; of the last kinds two variables have the same values."""
    value = weights(*([3, 3, 4, 4] if kind == "conv" else [4, 4]))
    other = value if kind in ("heads", "reshaped") else np.roll(value, 1, -1)
    first, second = tf.Variable(value), tf.Variable(other)

    def function(a):
        y, z = LAYERS[kind](a, first), LAYERS[kind](a, second)
        # Both are stored in other ranges.
        return tf.concat([y, 3.0 * y], -1), tf.reduce_mean(z, [-1])

    return function, (IMAGE if kind == "conv" else spec(6, 4),)


def twins(a):
    y, z = (tf.nn.relu(tf.exp(a) - 1.0) for _ in range(2))
    return tf.concat([y, 3.0 * y], -1), tf.reduce_mean(z, [-1])


def test_layers_with_the_same_weights_and_ops_that_compute_the_same():
    cases = {kind: of_same_weights(kind) for kind in LAYERS}
    cases["twins"] = (twins, (spec(6, 4),))
    parts = Together(cases).parts()
    assert {
        kind: part
        for kind, part in parts.items()
        if not part.is_int8 or part.most > (2 if kind == "twins" else 3)
    } == {}
    assert parts["twins"].kinds.count("EXP") == 1


def test_a_promise_that_is_not_kept_is_told(monkeypatch, caplog):
    # As with a runtime that lacks a kernel which the plan counts on.
    monkeypatch.delitem(KINDS, "SUB")
    m = opened(twins, spec(6, 4))
    assert quantize(m, is_training=False).coverage == 1.0
    data = samples(m.inputs)
    comparison = compare_int8(m, to_int8(m, data), data)
    assert {line.partition(" ")[0] for line in comparison.missed} == {"SUB"}
    assert "though it is quantized in the model" in str(comparison)
    told = [r.message for r in caplog.records if "though it is quantized" in r.message]
    assert len(told) == len(comparison.missed)


def test_what_is_float_by_choice_is_no_broken_promise():
    def function(a):
        y = tf.exp(tf.nn.relu(a, name="skipped"))
        return tf.nn.relu6(tf.nn.elu(y))

    m = opened(function, spec(6, 4))
    report = quantize(m, is_training=False, overrides={"skipped": "skip"})
    assert {entry.op_type for entry in report.skipped} == {"Relu", "Elu"}
    data = samples(m.inputs)
    comparison = compare_int8(m, to_int8(m, data), data)
    kinds = {line.partition(" ")[0] for line in comparison.float_ops}
    assert "ELU" in kinds
    assert comparison.missed == ()


def test_convolutions_by_data_that_has_a_zero_point_are_float():
    """TFLite's kernel reads no such weights: it refuses to run."""
    specs = IMAGE, spec(3, 3, 4, 4)
    case = lambda a, b: tf.nn.conv2d(a, b, 1, "SAME"), specs, {"low": -1.0}
    part = Together({"data": case}).part()
    assert ("CONV_2D" in part.floats, part.most <= 1) == (True, True)


CLASSES = {
    "argmax": (lambda y: tf.argmax(y, -1), "ARG_MAX", []),
    "comparison": (lambda y: y > 0.5, "GREATER", []),
    "cast": (lambda y: tf.cast(y, tf.int32), "CAST", ["DEQUANTIZE", "CAST"]),
    "half": (lambda y: tf.cast(y, tf.float16), "CAST", ["DEQUANTIZE", "CAST"]),
    "shape": (tf.shape, "SHAPE", []),
    "float": (lambda y: tf.sin(y) > 0.5, "SIN", ["DEQUANTIZE", "SIN", "QUANTIZE"]),
}
ENDS = {
    "relu": tf.nn.relu,
    "softmax": tf.nn.softmax,
    "reshape": lambda y: tf.reshape(tf.nn.relu(y), [-1, 2, 2]),
    "transpose": lambda y: tf.transpose(tf.nn.relu(y)),
    "maximum": lambda y: tf.reduce_max(tf.nn.relu(y), 1, keepdims=True),
    "slice": lambda y: tf.nn.relu(y)[:, 1:],
}


def read_by(function, end):
    kernel = weights(4, 4)

    def both(a):
        y = end(a @ kernel)
        return {"y": y, "z": function(y)}

    return both, (spec(None, 4),)


def all_sorts(a):
    y = tf.nn.relu(a @ SQUARE)
    z = tf.cast(y, tf.int64) + tf.argmax(y, -1)[:, None]
    return {"y": y, "z": z, "again": y, "next": y @ SQUARE}


def test_outputs_that_are_read_by_what_makes_no_numbers_of_them():
    """The converter leaves what reads an output in float without an input."""
    cases = {
        f"{read}, {end}": read_by(CLASSES[read][0], ENDS[end])
        for read, end in alternate(CLASSES, ENDS)
    }
    wrong, sorts = {}, {"all sorts": (None, "ARG_MAX", ["DEQUANTIZE", "CAST"])}
    cases["all sorts"] = all_sorts, (spec(None, 4),)
    for case, part in Together(cases).parts().items():
        _, kind, expected = (CLASSES | sorts)[case.partition(",")[0]]
        if kind not in part.kinds or part.floats != expected or part.most > 1:
            wrong[case] = part
    assert wrong == {}
