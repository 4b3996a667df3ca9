"""What lives as long as a quantized model: the variables of its ranges."""

import gc

import tensorflow as tf

from geutil import model
from geutil.quantize import calibrate, quantize, to_int8
from tests.settings import needs_eager

pytestmark = [needs_eager]


def test_ranges_live_without_the_report():
    kernel = tf.random.stateless_normal([3, 5], seed=(1, 2))

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def function(x):
        return {"y": tf.matmul(x, kernel)}

    m = model.open(function)
    quantize(m, is_training=False)
    gc.collect()
    report = calibrate(m, [{"x": tf.random.stateless_normal([8, 3], seed=(3, 4))}])
    assert len(report.ranges) == 3
    gc.collect()
    assert to_int8(m)
