"""How much outputs move with the samples, which decides what a comparison proves."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import check
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.settings import needs_eager

NOTHING = "this comparison proves nothing"


def motion(*batches, result=tf.identity, more=()):
    """Return how an output moves when a model is compared with itself on batches."""
    x = np.asarray(batches[0])
    kind = tf.as_dtype(tf.string if x.dtype == object else x.dtype)
    specs = [tf.TensorSpec([None, *x.shape[1:]], kind, name="x")]
    specs += [tf.TensorSpec([], tf.float32, name="scalar")] * len(more)

    @tf.function(input_signature=specs)
    def f(x, scalar=None):
        y = result(x)
        return {"y": y if scalar is None else (y, scalar)[0]}

    inputs = [{"x": np.asarray(b), **dict(more)} for b in batches]
    return model.open(f).compare(model.open(f), inputs).motions["y"]


def figures(*batches, **options):
    found = motion(*batches, **options)
    return found.varies, found.largest, found.samples


@needs_eager
def test_rows_of_batches_are_samples():
    two = np.array([[1.0, 2.0], [1.5, -4.0], [1.0, 2.0]])
    assert figures(two, two + 1) == (6.0, 4.0, 6)
    # As one sample for each batch: an output that is not as long as the batch.
    first, second = two[:2], two[:2] + 1
    longer = {"result": lambda x: tf.concat([x, x[:1]], 0)}
    assert figures(first, second, **longer) == (1.0, 4.0, 2)
    # Nor are there rows where an input has none.
    scalar = {"more": [("scalar", np.float32(1))]}
    assert figures(two, two + 1, **scalar) == (1.0, 4.0, 2)
    assert motion(two, two[:2], **scalar).varies == np.inf
    assert motion(np.array([3, 3, 250], np.uint8)).varies == 247
    assert motion(np.array([b"a", b"a"], object)).varies == 0
    assert motion(np.array([b"a", b"b"], object)).varies == np.inf
    assert motion(np.array([1j, 1.0])).varies == pytest.approx(2**0.5)
    assert motion(np.array([1.0, np.nan, np.nan])).varies == np.inf


@needs_eager
def test_one_sample_proves_what_it_proves():
    one = motion(np.array([1.0]))
    assert one.proves()
    assert str(one) == ""
    assert motion(np.zeros(2)).relative(0.5) == np.inf


def network(scale):
    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def f(x):
        hidden = tf.nn.relu(x @ tf.eye(3)) * tf.constant(scale)
        return {"live": tf.reduce_sum(x, 1, keepdims=True) @ [[2.0, 1.0]], "y": hidden}

    return model.open(f)


@needs_eager
@pytest.mark.parametrize("scale", [0.0, 1e-10, 1.0])
def test_comparisons_of_outputs_that_do_not_move_prove_nothing(scale):
    m, x = network(scale), np.float32([[1, 2, 3], [3, -1, 2], [0, 1, 1]])
    compared = m.compare(network(scale), {"x": x})
    folded = check(m, network(scale), {"x": x})
    simulated = network(scale)
    quantize(simulated, is_training=False)
    calibrate(simulated, {"x": x}, "min_max", progress=False)
    file = compare_int8(simulated, to_int8(simulated), {"x": x})
    for found in (compared, folded, file):
        live, y = str(found).splitlines()[1:3]
        assert NOTHING not in live
        assert "over 3 samples" in live
        assert (NOTHING in y) == (scale < 1)
    assert compared.motions["y"].varies == pytest.approx(2 * scale)
    live = compared.motions["live"]
    assert (live.varies, live.largest, live.samples) == (8.0, 12.0, 3)
    assert compared.equal
