"""One counter of training steps for a graph, as delayed quantization has it."""

import pytest
import tensorflow as tf

from geutil.errors import TransformError
from geutil.quantize import quantize
from tests.settings import needs_eager

v1 = tf.compat.v1


@needs_eager
@pytest.mark.parametrize("jit", [False, True])
def test_traces_share_a_variable(jit):
    variable, other = (
        tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)
    )
    kernel, reports = tf.Variable(tf.eye(2)), []

    @tf.function(jit_compile=jit, reduce_retracing=False)
    def step(x):
        y = tf.nn.relu(x @ kernel)
        graph = v1.get_default_graph()
        reports.append(quantize(graph, quant_delay=2, step=variable))
        result = reports[-1].tensor(y)
        z = tf.nn.relu(result @ kernel)
        count = len(graph.get_operations())
        with pytest.raises(TransformError, match="counts its steps in"):
            quantize(graph, quant_delay=2, step=other)
        assert len(graph.get_operations()) == count
        return result, z

    for rows in (1, 5, 1):
        step(tf.zeros([rows, 2]))
    assert len(reports) == 2
    assert all(report.step is variable for report in reports)
    assert (int(variable), int(other)) == (3, 0)
