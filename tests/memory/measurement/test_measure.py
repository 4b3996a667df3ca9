"""Steps measured in processes of their own.

Most of them are forked: one that starts takes seconds. `of_plain_graph` starts one.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util._pywrap_util_port import IsMklEnabled

from geutil.errors import MeasurementError
from geutil.memory import Measurement, Timeline, measure, predict
from tests.memory.refusals import refused
from tests.processes import forked

MIB = 2**20
TRACE = "allocation records of a traced Session"
ALLOCATOR = "allocator statistics"
RESIDENT = "resident-set high-water mark"
SIDE = 512
"""A float32 matrix of this many rows and columns is a MiB, a size that the allocator
hands out without rounding."""
DEPTH = 4
VALUE = np.full([SIDE, SIDE], 0.5, np.float32)


# DEPTH times matmul and tanh, which is computed in the matmul's buffer; then backward,
# where each TanhGrad is computed in the buffer of its tanh. Before the first two
# matmuls of the backward pass DEPTH buffers are held, and they make two more. After
# each such pair two buffers are free (an activation that is now a gradient, and one
# that flowed) and one is held more (a gradient of the weights); so no later pair needs
# more.
def training_peak(depth):
    return (depth + 2) * MIB


MODULE = """
import os
import tensorflow as tf
from tensorflow.python.util._pywrap_util_port import IsMklEnabled

def step(side=1, fill=0.5):
    held = [tf.fill([side, side], fill + i) for i in range(3)]
    return tf.exp(held[0])

def fail():
    raise RuntimeError("the callable's own complaint")

def die():
    os.abort()
"""


@pytest.fixture(scope="module")
def training_graph():
    """A version 1 graph: (graph, gradients, placeholder)."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, SIDE], name="x")
        weights = tf.Variable(tf.eye(SIDE), name="weights")
        h = x
        for i in range(DEPTH):
            h = tf.tanh(tf.matmul(h, weights, name=f"matmul_{i}"))
        flowing = tf.compat.v1.placeholder(tf.float32, [None, SIDE], name="flowing")
        tf.compat.v1.placeholder(tf.float32, [], name="not_needed")
        return graph, tf.gradients(h, [weights], [flowing]), x


@pytest.fixture(scope="module", autouse=True)
def fork():
    with forked():
        yield


@pytest.fixture(scope="module")
def of_graph(training_graph) -> Measurement:
    graph, gradients, x = training_graph
    return measure((graph, gradients, {x: VALUE, "flowing:0": VALUE}), steps=2)


@pytest.fixture(scope="module")
def of_plain_graph(training_graph) -> Measurement:
    """The same with everything off that can be turned off."""
    graph, gradients, x = training_graph
    fetches = {"weights": [tensor.name for tensor in gradients]}
    return measure(
        (graph, fetches, [("x:0", VALUE), ("flowing:0", VALUE)]),
        steps=1,
        onednn=False,
        grappler=False,
        intra_op_threads=2,
    )


@pytest.fixture(scope="module")
def function():
    """A training step: a chain as in the graph, and an update, if that is wanted."""
    weights = tf.Variable(tf.eye(SIDE), name="weights")

    @tf.function
    def train(x, flowing, depth=DEPTH, update=True):
        with tf.GradientTape() as tape:
            h = x
            for _ in range(depth):
                h = tf.tanh(tf.matmul(h, weights))
        gradient = tape.gradient(h, weights, flowing)
        if not update:
            return gradient
        weights.assign_sub(gradient)
        return None

    return train


@pytest.fixture(scope="module")
def of_compiled(function) -> Measurement:
    return measure(function, [VALUE, VALUE], steps=1, jit_compile=True)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that another process can import."""
    (tmp_path / "importable_step.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import importable_step

    return importable_step


def test_the_peak_of_a_graph_is_that_of_its_tensors(of_graph):
    assert of_graph.source == TRACE
    assert of_graph.peak == of_graph.trace_peak == of_graph.timeline.peak
    assert of_graph.peak == training_peak(DEPTH)
    if IsMklEnabled():
        assert of_graph.allocator_peak == of_graph.trace_peak
    if of_graph.resident_peak is not None:
        assert of_graph.resident_peak >= of_graph.trace_peak


def test_without_onednn_the_allocator_does_not_count(of_plain_graph):
    assert of_plain_graph.allocator_peak is None
    assert of_plain_graph.source == TRACE
    assert of_plain_graph.peak == training_peak(DEPTH)


def test_the_timeline_of_a_graph(of_graph):
    timeline = of_graph.timeline
    assert isinstance(timeline, Timeline)
    assert timeline.variable_bytes == MIB
    ops = [moment.op for moment in timeline.moments]
    forward = [f"matmul_{i}" for i in range(DEPTH)]
    assert [op for op in ops if op in forward] == forward
    # In seconds: ops take some time, and together no more than a test waits for.
    assert 0 < sum(moment.time for moment in timeline.moments) < 600
    levels = {moment.op: moment.bytes for moment in timeline.moments}
    assert [levels[op] for op in forward] == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    assert sum(tensor.bytes for tensor in timeline.at_peak) == timeline.peak
    held = {tensor.name: tensor.op_type for tensor in timeline.at_peak}
    assert held["matmul_0:0"] == "MatMul"


def test_what_it_was_measured_with(of_graph, of_plain_graph):
    assert of_graph.steps == len(of_graph.seconds) == 2
    assert all(seconds > 0 for seconds in of_graph.seconds)
    environment = of_graph.environment
    assert environment.tensorflow == tf.__version__
    assert environment.onednn == IsMklEnabled()
    assert (environment.grappler, environment.jit_compile) == (True, False)
    assert (environment.inter_op_threads, environment.intra_op_threads) == (1, None)
    other = of_plain_graph.environment
    assert (other.onednn, other.grappler) == (False, False)
    assert (other.inter_op_threads, other.intra_op_threads) == (1, 2)


def test_a_function(function):
    kwargs = {"flowing": VALUE, "depth": 3, "update": False}
    of_function = measure(function, [VALUE], kwargs, steps=1)
    assert of_function.source == TRACE
    assert of_function.peak == training_peak(3)
    assert of_function.timeline.variable_bytes == MIB
    if IsMklEnabled():
        # It counted the function itself, not the Session that was traced.
        assert of_function.allocator_peak == of_function.peak


def test_a_function_that_xla_compiles(of_compiled):
    assert of_compiled.environment.jit_compile
    assert of_compiled.timeline is None
    assert of_compiled.source == (ALLOCATOR if IsMklEnabled() else RESIDENT)
    assert of_compiled.peak >= DEPTH * MIB


@pytest.mark.skipif(not IsMklEnabled(), reason="only oneDNN's allocator counts")
def test_what_the_allocator_does_not_count():
    """Nothing of what is smaller than 256 KiB; records of a Session have it."""

    @tf.function(autograph=False)
    def step(x):
        return tf.add_n([tf.sin(x + i) for i in range(DEPTH)])

    quarter = np.zeros([SIDE * SIDE // 4 - 64], np.float32)
    measurement = measure(step, [quarter], steps=1)
    assert measurement.allocator_peak == 0
    assert measurement.peak == measurement.trace_peak >= DEPTH * quarter.nbytes


def test_a_callable(module):
    measurement = measure(module.step, [SIDE], {"fill": 1.5}, steps=1)
    assert measurement.timeline is None
    if IsMklEnabled():
        assert measurement.source == ALLOCATOR
        assert measurement.peak == 4 * MIB


def test_a_callable_that_fails(module):
    for step, options, reason in (
        (module.fail, {}, "the callable's own complaint"),
        (module.die, {}, "killed by SIGABRT"),
        (module.step, {"timeout": 0.01}, r"within 0\.01 s.*longer timeout"),
    ):
        with refused(MeasurementError, reason):
            measure(step, **options)


def test_as_text(of_graph, of_compiled):
    lines = str(of_graph).splitlines()
    megabytes = f"{of_graph.peak / 1e6:.1f} MB"
    assert lines[0] == f"peak {megabytes} by {TRACE} (1 MB = 10^6 bytes)"
    assert "(median of 2)" in str(of_graph)
    assert f"TensorFlow {tf.__version__} on CPU:0" in lines[-1]
    assert "threads: inter-op 1, intra-op default" in lines[-1]
    assert f"{TRACE}: none" in str(of_compiled)


def test_calls_that_xla_compiles_count():
    @tf.function(jit_compile=True)
    def both(x):
        return 2.0 * tf.sin(x), x

    @tf.function(input_signature=[tf.TensorSpec([4 * SIDE, SIDE])])
    def step(x):
        doubled, same = both(tf.exp(x))
        return tf.reduce_sum(doubled) + tf.reduce_sum(same)

    concrete = step.get_concrete_function()
    measurement = measure(concrete, [np.ones([4 * SIDE, SIDE], np.float32)], steps=1)
    # The records hold what is made outside of the call, and that is one of three.
    assert measurement.partly_compiled
    assert measurement.trace_peak == pytest.approx(4 * MIB, rel=0.01)
    predicted = predict(concrete.outputs).peak
    assert predicted == pytest.approx(12 * MIB, rel=0.01)
    if IsMklEnabled():
        assert measurement.source == ALLOCATOR
        assert measurement.peak == pytest.approx(predicted, rel=0.05)
