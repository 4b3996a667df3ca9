"""Comparison with a TFLite file: ends by name, counts, and refusals."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.quantize import Int8Comparison, OutputSteps, compare_int8, quantize, to_int8
from tests.quantize.converted import opened, spec
from tests.quantize.small_networks import convolved, normal, prepared
from tests.settings import needs_eager

pytestmark = needs_eager

X, D = normal(4, 8, 8, 3), normal(4, 8, seed=1)
WEIGHTS, BIAS, DENSE = normal(3, 3, 3, 8), normal(8, seed=2), normal(8, 5, seed=3)
TABLE = normal(20, 8, seed=4)
IDS = np.random.default_rng(0).integers(0, 20, (4, 6)).astype(np.int32)
IMAGE, VECTOR, WORDS = (
    spec(None, 8, 8, 3, name="zz"),
    spec(None, 8, name="a"),
    spec(None, 6, name="ids", dtype=tf.int32),
)


def image(x):
    return tf.nn.relu(convolved(x, WEIGHTS, BIAS, "conv"))


def words(ids, table=TABLE):
    return tf.reduce_mean(tf.gather(table, ids), 1)


def built(compute, specs, sample):
    return prepared(opened(compute, *specs), sample)


VARIABLE = tf.Variable(TABLE) if tf.executing_eagerly() else None
# What is computed, of which inputs; the names are in no order on purpose.
ENDS = {
    "passed through, integers out, a float end": (
        lambda zz, a: {
            "y": image(zz),
            "b": tf.matmul(a, DENSE) + 1.0,
            "same": zz,
            "raw": a,
            "k": tf.argmax(tf.reduce_max(image(zz), 1), -1),
            "elu": tf.nn.elu(tf.matmul(a, -DENSE)),
        },
        {"zz": X, "a": D},
        [IMAGE, VECTOR],
    ),
    "alike, names of no variables": (
        lambda x, a: {"y": x * 3.0, "l/z": a * 0.5, "class": tf.matmul(x, DENSE)},
        {"in": D, "a": D[::-1].copy()},
        [spec(None, 8, name="in"), VECTOR],
    ),
    "integers in, a variable": (
        lambda ids, a: {
            "y": tf.matmul(words(ids, VARIABLE), DENSE),
            "both": tf.matmul(words(ids) + a, -DENSE),
        },
        {"ids": IDS, "a": D},
        [WORDS, VECTOR],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends_are_found_by_name(case):
    compute, sample, specs = ENDS[case]
    m = built(compute, specs, sample)
    comparison = compare_int8(m, to_int8(m), sample)
    assert [o.output for o in comparison.outputs] == list(m.outputs)
    assert comparison.most <= 1
    assert comparison.agreement == 1.0
    assert comparison.samples == 4
    for output in comparison.outputs:
        size = np.size(m.run(**sample)[output.output])
        assert sum(output.counts) == size


@pytest.fixture(scope="module")
def several():
    sample = {"zz": X, "a": D}
    m = built(
        lambda zz, a: {"y": image(zz), "b": tf.matmul(a, DENSE) + 1.0, "c": a * 2.0},
        [IMAGE, VECTOR],
        sample,
    )
    return m, to_int8(m), sample


def test_it_sees_what_is_wrong(several):
    m, blob, sample = several
    name = next(n for n in m.variables if n.endswith("weights_quant/max"))
    kept = m.variables[name].numpy()
    m.variables[name].assign(kept * 0.7)
    try:
        assert compare_int8(m, blob, sample).most > 2
    finally:
        m.variables[name].assign(kept)
    assert compare_int8(m, blob, sample).most <= 1


def test_several_batches_add_up(several):
    m, blob, sample = several
    parts = [{n: v[i : i + 2] for n, v in sample.items()} for i in (0, 2)]
    whole, split = compare_int8(m, blob, sample), compare_int8(m, blob, parts)
    assert whole == split


def test_values_are_counted_as_numpy_counts_them():
    """Of a file that gives the integers that it is given, whatever is wanted."""
    row = spec(1, 3, name="wanted"), spec(1, 3, name="found")
    m = opened(lambda wanted, found: {"y": wanted + 0.0 * found}, *row)
    file = tflite.LiteFile()
    file.add_input("wanted", "float32", [1, 3])
    steps = tflite.Quantization.of(0.5, zero=3)
    given = file.add_input("found", "int8", [1, 3], quantization=steps)
    shape = file.add_constant("shape", np.array([1, 3], np.int32))
    made = file.add("RESHAPE", [given, shape], name="y")
    made.quantization = steps
    file.set_outputs([made])
    file.add_signature("serving_default")
    wanted = np.array([[0.0, 1.0, -1.0], [5.0, 0.2, 70.0], [0.0, 9.0, 0.0]], np.float32)
    # In steps, about the zero point: [3, 5, 1], [13, 3, 127] and [3, 21, 3].
    found = np.array([[3, 6, 1], [13, 5, 127], [9, 3, 3]])
    data = [
        {"wanted": w[np.newaxis], "found": np.float32((f - 3) * 0.5)[np.newaxis]}
        for w, f in zip(wanted, found, strict=True)
    ]
    (entry,) = compare_int8(m, file.to_bytes(), data[:2]).outputs
    told = OutputSteps("y", 0.5, (4, 1, 1), 1, 1, 142.0, motion=entry.motion)
    assert entry == told
    assert entry.share(0) == pytest.approx(4 / 6)
    (entry,) = compare_int8(m, file.to_bytes(), data).outputs
    assert (entry.clear, entry.agreeing, entry.agreement) == (2, 1, 0.5)


def test_files_of_other_models_and_bad_data_are_refused(several):
    m, blob, sample = several
    other = built(lambda a: {"y": a * 2.0}, [VECTOR], {"a": D})
    for layers in (False, True):
        with pytest.raises(QuantizeError, match="of another model"):
            compare_int8(other, blob, {"a": D}, layers=layers)
        with pytest.raises(QuantizeError, match="empty"):
            compare_int8(m, blob, [], layers=layers)
    with pytest.raises(QuantizeError, match="TFLite cannot run the file"):
        compare_int8(m, b"nothing", sample)
    with pytest.raises(ArgumentTypeError, match="read_bytes"):
        compare_int8(m, "model.tflite", sample)
    with pytest.raises(QuantizeError, match=r"the model has \['a', 'zz'\]"):
        compare_int8(m, blob, {"a": D})
    with pytest.raises(ArgumentTypeError, match="pass mappings from input names"):
        compare_int8(m, blob, 3)


def test_a_kernel_that_does_not_take_a_sample_is_told():
    sample = {"a": np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)}

    def roots(clipped):
        def compute(a):
            source = tf.maximum(a, 0.0) if clipped else a
            return tf.where(a > 0.0, tf.sqrt(source), 0.0) * 2.0

        m = built(compute, [spec(4, 6, name="a")], sample)
        return m, to_int8(m), sample

    assert compare_int8(*roots(clipped=True)).samples == 4
    with pytest.raises(QuantizeError, match=r"(?s)fails on this sample.*its domain"):
        compare_int8(*roots(clipped=False))


def test_tests_of_values_are_reported():
    m = opened(
        lambda a: tf.reduce_logsumexp(a, -1, keepdims=True) * 2.0, spec(4, 6, name="a")
    )
    report = quantize(m, is_training=False)
    assert [entry.op_type for entry in report.skipped] == ["IsFinite"]
    assert report.coverage == 1.0


def test_a_comparison_without_outputs_says_so():
    comparison = Int8Comparison((), 3, ())
    assert str(comparison) == "3 sample(s), no outputs to compare, 0 float op(s)"
    assert (comparison.most, comparison.agreement) == (0, 1.0)
