"""Training with simulated quantization in functions, tapes, replicas and XLA."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil.model
from geutil.quantize import quantize
from tests.processes import run_python
from tests.quantize.tiny import (
    Layer,
    Reference,
    averaged,
    check_fake_quant,
    close,
    fake_quant,
    of_ranges,
)
from tests.settings import V1

pytestmark = pytest.mark.skipif(V1, reason="needs eager execution")

RANDOM = np.random.default_rng(0)
W = np.float32(RANDOM.normal(size=(5, 3)))
STEPS = [np.float32(RANDOM.normal(size=(8, 5)) * 2) for _ in range(5)]
RATE = 0.1


def _reference(decay=0.999, per_channel=True):
    return Reference([Layer("dense", W)], RATE, decay, per_channel)


def _ranges(reference):
    names = ["dense/weights_quant", "x/input_quant", "dense/act_quant"]
    return np.hstack([end for name in names for end in reference.ranges[name]])


def _ends(report):
    """Return the values of all ends: weights, input, result."""
    slots = ["weights_quant", "input_quant", "act_quant"]
    found = {name: v.numpy() for name, v in of_ranges(report.variables).items()}
    assert len(found) == 6
    return [
        value
        for slot in slots
        for end in ("min", "max")
        for name, value in found.items()
        if name.endswith(f"{slot}/{end}")
    ]


def _net(x, w):
    return tf.nn.relu(tf.matmul(x, w, name="dense"), name="relu")


# -- quantize while a function is traced -----------------------------------------------


def _traced(w, reports, jit=False, **options):
    @tf.function(jit_compile=jit, reduce_retracing=False)
    def step(x):
        y = _net(x, w)
        report = quantize(tf.compat.v1.get_default_graph(), **options)
        reports.append(report)
        out = report.tensor(y)
        (gradient,) = tf.gradients(tf.reduce_sum(out**2), w.handle)
        w.assign_sub(RATE * gradient)
        return out

    return step


# XLA rounds the end of a range in another way than kernels do, so the largest weight of
# a channel may pass its gradient or not.
@pytest.mark.parametrize(
    ("jit", "per_channel"), [(False, True), (True, False)], ids=["plain", "xla"]
)
def test_inside_a_traced_function(jit, per_channel):
    w, reports = tf.Variable(W, name="w"), []
    step = _traced(w, reports, jit, ema_decay=0.9, per_channel=per_channel)
    reference = _reference(0.9, per_channel=per_channel)
    for x in STEPS:
        close(step(tf.constant(x)), reference.step(x), 2e-6)
        close(np.hstack(_ends(reports[0])), _ranges(reference), 2e-6)
        close(w, reference.layers[0].w, 2e-6)
    assert len(reports) == 1


def test_updates_run_in_loops_once_a_turn():
    """A step of a loop is a step of training, wherever the loop stands."""
    w, reports = tf.Variable(W), []
    step = _traced(w, reports, ema_decay=0.9)
    data = tf.constant(np.stack(STEPS))

    @tf.function
    def epoch():
        for index in tf.range(len(STEPS)):
            step(data[index])

    epoch()
    reference = _reference(0.9)
    for x in STEPS:
        reference.step(x)
    close(np.hstack(_ends(reports[0])), _ranges(reference), 5e-6)
    close(w, reference.layers[0].w, 5e-6)


def test_a_delay_inside_a_traced_function():
    w, reports = tf.Variable(W), []
    counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    step = _traced(w, reports, quant_delay=3, step=counter)
    reference = _reference()
    for index, x in enumerate(STEPS):
        expected = reference.step(x, rounds=index + 1 >= 3)
        close(step(tf.constant(x)), expected, 2e-6)
        close(w, reference.layers[0].w, 2e-6)
    assert counter.numpy() == len(STEPS)
    assert reports[0].step is counter


def test_traces_share_variables_that_are_given():
    w, known = tf.Variable(W), {}

    @tf.function(reduce_retracing=False)
    def step(x):
        y = _net(x, w)
        report = quantize(
            tf.compat.v1.get_default_graph(), ema_decay=0.5, variables=known
        )
        known.update(report.variables)
        return report.tensor(y)

    reference = _reference(0.5)
    for rows in (8, 4, 8):
        x = STEPS[1][:rows]
        close(step(tf.constant(x)), reference.step(x, rate=0), 2e-6)
        assert len(known) == 8
    close(
        [v.numpy() for v in list(known.values())[:2]],
        reference.ranges["dense/weights_quant"],
    )


# -- models ----------------------------------------------------------------------------


def _keras_model(w=W):
    dense = keras.layers.Dense(3, activation="relu", use_bias=False)
    model = keras.Sequential([keras.Input((5,), name="x"), dense])
    dense.set_weights([w])
    return model


def _opened(**options):
    model = geutil.model.open(_keras_model())
    return model, quantize(model, **options)


@pytest.mark.parametrize(("outer", "decay"), [(False, 0.999), (True, 0.5)])
def test_a_model_in_a_training_loop(outer, decay):
    model, report = _opened(ema_decay=decay)
    function, watched = model.to_function(), set()
    (w,) = [v for v in model.variables.values() if tuple(v.shape) == (5, 3)]

    def step(x):
        with tf.GradientTape() as tape:
            (out,) = tf.nest.flatten(function(x))
            loss = tf.reduce_sum(out**2)
        w.assign_sub(RATE * tape.gradient(loss, w))
        watched.update(id(v) for v in tape.watched_variables())
        return out

    train = tf.function(step) if outer else step
    reference = _reference(decay)
    for x in STEPS:
        close(train(tf.constant(x)), reference.step(x), 2e-6)
        close(np.hstack(_ends(report)), _ranges(reference), 2e-6)
        close(w, reference.layers[0].w, 2e-6)
    assert id(w) in watched
    assert not any(v.trainable or id(v) in watched for v in report.variables.values())


# -- checkpoints and replicas ----------------------------------------------------------


def test_a_checkpoint_of_the_variables(tmp_path):
    w, reports = tf.Variable(W), []
    step = _traced(w, reports, ema_decay=0.5)
    for x in STEPS:
        step(tf.constant(x))
    kept = _ends(reports[0])
    checkpoint = tf.train.Checkpoint(w=w, ranges=dict(reports[0].variables))
    path = checkpoint.save(str(tmp_path / "c"))
    other, others = tf.Variable(W), []

    @tf.function
    def evaluate(x):
        y = _net(x, other)
        others.append(quantize(tf.compat.v1.get_default_graph(), is_training=False))
        return others[0].tensor(y)

    evaluate(tf.constant(STEPS[0]))
    checkpoint = tf.train.Checkpoint(w=other, ranges=dict(others[0].variables))
    checkpoint.restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(np.hstack(_ends(others[0])), np.hstack(kept))
    xq = fake_quant(STEPS[1], *kept[2:4])
    wq = fake_quant(other.numpy(), *kept[:2], narrow_range=True)
    found = evaluate(tf.constant(STEPS[1]))
    check_fake_quant(found, np.maximum(xq @ wq, 0), *kept[4:])


MIRRORED = """
import json, numpy as np, tensorflow as tf
from geutil.quantize import quantize

(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    w = tf.Variable(np.ones((5, 3), np.float32))
known = {}

@tf.function
def replica(x):
    y = tf.nn.relu(tf.matmul(x, w, name="dense"), name="relu")
    graph = tf.compat.v1.get_default_graph()
    report = quantize(graph, ema_decay=0.5, variables=known)
    known.update(report.variables)
    return report.tensor(y)

@tf.function
def step(x):
    # A function by itself would be taken apart, and all replicas be in one graph.
    return strategy.run(lambda x: replica(x), args=(x,))

data = [np.full((2, 5), v, np.float32) for v in (1.0, 3.0)]
values = strategy.experimental_distribute_values_from_function(
    lambda context: tf.constant(data[context.replica_id_in_sync_group])
)
assert len(step(values).values) == 2
found = {name: v.numpy().tolist() for name, v in known.items()}
open(PATH, "w").write(json.dumps(found))
"""


def test_replicas_of_a_mirrored_strategy(tmp_path):
    """In a process of its own, since the number of devices is fixed at the start."""
    path = tmp_path / "ranges.json"
    script = f"PATH = {str(path)!r}\n{MIRRORED}"
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr.decode()
    assert b"each moves the ranges in turn" in done.stderr
    found = json.loads(path.read_text())
    assert sorted(found) == [
        f"{name}/{end}"
        for name in ("dense/act_quant", "dense/weights_quant", "x/input_quant")
        for end in ("learnt", "max", "min")
        if end != "learnt" or "weights" not in name
    ]
    assert found["dense/weights_quant/max"] == [1.0, 1.0, 1.0]
    # What a replica reads the other may have moved before, or not.
    high = found["x/input_quant/max"]
    both = [averaged([(0.0, a), (0.0, b)], 0.5)[1] for a, b in ((1, 3), (3, 1))]
    assert any(np.isclose(high, one) for one in (1.0, 3.0, *both))
