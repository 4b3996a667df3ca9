"""What holds for every small network."""

from collections import Counter

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil.quantize import calibrate, quantize
from tests.quantize.converted import opened, samples, spec
from tests.settings import needs_eager
from tests.thorough import examples

pytestmark = needs_eager

SIZE, COUNT = 6, 4
IMAGE = spec(1, SIZE, SIZE, COUNT)


def _weights(random, *shape):
    value = random.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
    return tf.constant(value.astype(np.float32))


def _conv(random, x, y):
    return tf.nn.conv2d(x, _weights(random, 3, 3, COUNT, COUNT), 1, "SAME")


def _biased(random, x, y):
    return tf.nn.bias_add(_conv(random, x, y), _weights(random, COUNT))


def _depthwise(random, x, y):
    kernel = _weights(random, 3, 3, COUNT, 1)
    return tf.nn.depthwise_conv2d(x, kernel, [1] * 4, "SAME")


def _dense(random, x, y):
    flat = tf.reshape(x, [-1, COUNT]) @ _weights(random, COUNT, COUNT)
    return tf.reshape(flat, [1, SIZE, SIZE, COUNT]) + _weights(random, COUNT)


def _concat(random, x, y):
    return tf.concat([x[..., :2], y[..., 2:]], 3)


def _prelu(random, x, y):
    return tf.nn.relu(x) + -_weights(random, COUNT) * tf.nn.relu(-x)


STEPS = {
    "conv": _conv,
    "biased": _biased,
    "depthwise": _depthwise,
    "dense": _dense,
    "concat": _concat,
    "prelu": _prelu,
    "relu": lambda r, x, y: tf.nn.relu(x),
    "relu6": lambda r, x, y: tf.nn.relu6(x),
    "swish": lambda r, x, y: x * tf.nn.relu6(x + 3) / 6,
    "gelu": lambda r, x, y: tf.nn.gelu(x),
    "sigmoid": lambda r, x, y: tf.sigmoid(x),
    "sum": lambda r, x, y: x + y,
    "product": lambda r, x, y: x * tf.sigmoid(y),
    "pool": lambda r, x, y: tf.nn.avg_pool2d(x, 3, 1, "SAME"),
    "max": lambda r, x, y: tf.nn.max_pool2d(x, 3, 1, "SAME"),
    "turn": lambda r, x, y: tf.transpose(x, [0, 2, 1, 3]),
    "negative": lambda r, x, y: -x,
    "sine": lambda r, x, y: tf.sin(x),
    "gate": lambda r, x, y: tf.where(x > y, x, y),
}
PATHS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), min_size=1, max_size=8
)


def network(path, results):
    """Return a function: each step reads the last result, and one of those before."""

    def function(a):
        random = np.random.default_rng(0)
        made = [a]
        for name, other in path:
            made.append(STEPS[name](random, made[-1], made[other % len(made)]))
        return {f"y{i}": made[-1 - i] for i in range(min(results, len(made) - 1))}

    return function


def computing(graph):
    """Return the ops that compute with floats, by TensorFlow alone."""
    aside = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}
    return {
        op.name: op
        for op in graph.get_operations()
        if op.type not in aside and any(t.dtype.is_floating for t in op.outputs)
    }


@examples(30, derandomize=True)
@given(PATHS, st.integers(1, 3))
def test_every_op_is_reported_once_and_a_second_call_changes_nothing(path, results):
    m = opened(network(path, results), IMAGE)
    before = computing(m.graph)
    ends = {op.name for op in m.graph.get_operations() if op.name in m.outputs}
    report = quantize(m, is_training=False)
    ge.verify(m.graph)
    entries = Counter(e.op for e in [*report.quantized, *report.skipped])
    assert set(entries.values()) == {1}
    told = {name for name in _reached(m.outputs.values()) if name in before} - ends
    parameters = {name for name in told if _is_parameter(before[name])}
    assert told - parameters <= set(entries)
    read = Counter(
        op.inputs[0].name
        for op in m.graph.get_operations()
        if op.type.startswith("FakeQuant")
    )
    assert max(read.values()) == 1
    definition = m.graph.as_graph_def()
    again = quantize(m, is_training=False)
    assert not again.variables
    assert m.graph.as_graph_def() == definition


def _reached(tensors):
    """Return the ops that tensors depend on, by name."""
    found, waiting = {}, [t.op for t in tensors]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found[op.name] = op
            waiting += [t.op for t in op.inputs]
    return found


def _is_parameter(op):
    before = _reached(op.outputs).values()
    return not any(o.type.startswith("Placeholder") and o.name == "a" for o in before)


@examples(25, derandomize=True)
@given(PATHS, st.integers(1, 3))
def test_sixteen_bits_are_close_to_float(path, results):
    # What decides by values may decide another way.
    path = [(name if name != "gate" else "relu", other) for name, other in path]
    function = network(path, results)
    m = opened(function, IMAGE)
    sample = samples(m.inputs)
    want = m.run(**sample)
    quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    calibrate(m, sample, "min_max")
    for name, value in m.run(**sample).items():
        span = max(np.ptp(want[name]), 1.0)
        assert np.abs(value - want[name]).max() <= 2e-3 * span
