"""LSTM and GRU as TFLite files: with their loops, and unrolled."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import QuantizeError
from geutil.quantize import calibrate, compare_int8, quantize, to_int8, to_tflite
from tests.interpreter import new_interpreter, run_on_values
from tests.settings import needs_eager
from tests.thorough import chosen, crossed

pytestmark = needs_eager
layers = tf.keras.layers
STEPS = 2
REMEDIES = ["unroll", "set_batch_size"]
SCHEMES = ["float16", "weight_only_int8", "dynamic_range"]


def spotter(cell, batch=None):
    """Return a small keyword spotter, its batch norms with random statistics."""
    tf.keras.utils.set_random_seed(5)
    rng = np.random.RandomState(2)
    x = tf.keras.Input([2 * STEPS, 5], batch_size=batch, name="x")
    y = layers.Conv1D(8, 3, 2, "same", use_bias=False, name="conv")(x)
    norm = layers.BatchNormalization(name="norm")
    y = layers.ReLU()(norm(y))
    y = layers.Dense(6, name="head")(cell(y))
    network = tf.keras.Model(x, {"y": y})
    norm.set_weights([*rng.normal(size=(3, 8)), rng.uniform(0.5, 2.0, 8)])
    return network


def batches(rows, count=4):
    rng = np.random.RandomState(3)
    shape = [rows, 2 * STEPS, 5]
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]


def quantized(opened, data):
    fold_batch_norms(opened)
    report = quantize(opened, is_training=False)
    calibrate(opened, data, "min_max")
    return report


def assert_near(network, blob, data):
    """Assert that a file computes what Keras does, up to what 8 bits round."""
    exact = np.concatenate([network(batch["x"])["y"] for batch in data])
    found = np.concatenate([made["y"] for made in run_on_values(blob, data)])
    # Each of the steps rounds; one in a thousand of the variance is 30 dB.
    assert np.square(found - exact).mean() < 0.003 * exact.var()


def types_in(blob):
    """Return the dtypes of the tensors of the main graph of a file."""
    return {d["dtype"] for d in new_interpreter(blob).get_tensor_details()}


CELLS = {
    "LSTM": lambda: layers.LSTM(8),
    "GRU": lambda: layers.GRU(8),
    "both ways": lambda: layers.Bidirectional(layers.LSTM(6)),
}


# Both ways there are two LSTMs.
CASES = chosen(itertools.product(CELLS, [None, 1]), ("both ways", None), ("GRU", 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unrolled_all_computes_in_int8(case):
    cell, batch = case
    network = spotter(CELLS[cell](), batch)
    data = batches(batch or 8, 16 // (batch or 8) * 2)
    opened = model.open(network).unroll()
    report = quantized(opened, data)
    assert report.coverage == 1.0
    assert {entry.op_type for entry in report.skipped} <= {"Fill"}
    blob = to_int8(opened)
    comparison = compare_int8(opened, blob, data)
    assert comparison.float_ops == ()
    assert np.float32 not in types_in(blob)
    assert_near(network, blob, data)


@pytest.mark.parametrize("cell", chosen(["LSTM", "GRU"], "GRU"))
def test_with_its_loop_the_layers_around_compute_in_int8(cell):
    network = spotter(CELLS[cell](), 1)
    data = batches(1, 32)
    opened = model.open(network)
    report = quantized(opened, data)
    assert {"Conv2D", "MatMul"} <= {entry.op_type for entry in report.quantized}
    (entry,) = [e for e in report.skipped if e.op_type.endswith("While")]
    assert "Model.unroll()" in entry.reason
    blob = to_int8(opened)
    comparison = compare_int8(opened, blob, data)
    assert any("WHILE" in str(op) for op in comparison.float_ops)
    assert_near(network, blob, data)


def test_a_loop_at_an_open_batch_is_refused_with_what_to_do():
    opened = model.open(spotter(CELLS["LSTM"]()))
    quantized(opened, batches(8))
    with pytest.raises(QuantizeError, match=r"by Model\.unroll\(\)") as caught:
        to_int8(opened)
    assert "set_batch_size(1)" in str(caught.value)


@pytest.mark.parametrize(("remedy", "scheme"), crossed(REMEDIES, SCHEMES, together=1))
def test_the_remedies_work(remedy, scheme):
    network = spotter(CELLS["GRU"]())
    opened = model.open(network)
    opened = opened.unroll() if remedy == "unroll" else opened.set_batch_size(1)
    if scheme != "float16":
        quantize(opened, is_training=False, scheme=scheme)
    runner = new_interpreter(to_tflite(opened, scheme=scheme)).get_signature_runner()
    x = batches(1)[0]["x"]
    exact = network(x)["y"].numpy()
    (result,) = runner(x=x).values()
    assert np.square(result - exact).mean() < 0.003 * np.square(exact).mean()
