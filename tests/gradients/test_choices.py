"""Which tensors modes and policies keep."""

import tensorflow as tf

from geutil.gradients import (
    by_name,
    by_type,
    gradients,
    gradients_memory,
    gradients_speed,
    last_report,
)
from geutil.reroute import reroute_ts
from tests.gradients.checking import assert_close, barriers, check, copied, deep, run

v1 = tf.compat.v1


def chosen():
    return [t.name for t in last_report().kept if t.reason.startswith("chosen")]


def test_casts_are_no_checkpoints(graph):
    x = tf.ones([64])
    source = tf.cast(deep(x), tf.float16, name="half")
    twice = tf.cast(tf.cast(source, tf.float32, name="one"), tf.float64, name="two")
    last = tf.cast(deep(deep(twice)), tf.float32)
    gradients(deep(last), x, checkpoints=by_type("Cast"), min_checkpoint_size=0)
    assert chosen() == ["Sin_1:0"]
    assert "two" in copied(graph)
    # Unless they are listed.
    gradients(deep(last), x, checkpoints=[source, last])
    assert chosen()[0] == source.name
    assert "half" not in {op.name for op in last_report().recomputed}


def test_the_order_of_creation_does_not_matter():
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        with tf.Graph().as_default() as graph:
            x = tf.ones([64])
            layers = {}
            for i in order:
                before = v1.placeholder(tf.float32, [64])
                layers[i] = before, deep(before)
            kept = [layers[i][1] for i in range(3)]
            for i, after in enumerate([x, *kept[:2]]):
                reroute_ts([after], [layers[i][0]])
            y = kept.pop()
            ours = gradients(y, x, checkpoints=kept, min_checkpoint_size=0)
            # The sine and the exponential of all but the last layer.
            again = {
                op.inputs[0].op.name for t in kept for op in (t.op, t.op.inputs[0].op)
            }
            assert {op.name for op in last_report().recomputed} == again, order
            assert_close(*run(graph, (ours, tf.gradients(y, x))))


def weights(*shape):
    return tf.constant(0.1, shape=shape)


def test_speed_keeps_what_heavy_ops_yield(graph):
    x = tf.ones([2, 8, 8, 16])
    h = tf.nn.conv2d(x, weights(3, 3, 16, 16), 1, "SAME", name="bare")
    h = tf.nn.relu(tf.exp(h))
    h = tf.nn.depthwise_conv2d(h, weights(3, 3, 16, 1), [1] * 4, "SAME", name="deep")
    h = tf.nn.conv2d(tf.nn.relu(h), weights(3, 3, 16, 16), 1, "SAME", name="conv")
    h = tf.nn.relu(tf.nn.bias_add(h, weights(16), name="biased"))
    h = tf.matmul(tf.sin(tf.reshape(h, [2, -1])), weights(1024, 1024), name="product")
    h = tf.einsum("bi,ij->bj", tf.sin(h), weights(1024, 512), name="einsum")
    gradients_speed(tf.sin(h), x)
    assert chosen() == ["bare:0", "deep:0", "product:0", "einsum/Einsum:0"]
    assert {op.op_type for op in last_report().recomputed} == {"Exp", "Relu"}


def test_small_tensors_are_not_chosen(graph):
    x = tf.ones([64])
    y = deep(deep(deep(x)))
    gradients(y, x, checkpoints=by_type("Sin"), min_checkpoint_size=65)
    assert chosen() == []
    gradients(y, x, checkpoints=by_type("Sin"), min_checkpoint_size=64)
    # Nothing reads the last one.
    assert len(chosen()) == 4
    # Those that are listed may be small.
    gradients(deep(y), x, checkpoints=[y], min_checkpoint_size=10**9)
    assert chosen() == [y.name]


def test_shapes_that_are_not_known():
    for shape in ([None, 64], [None, None], None):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, shape)
            a = deep(x)
            b = deep(a)
            y = deep(b)
            before = len(graph.get_operations())
            ours = gradients(y, x, checkpoints=[a, b])
            check(ours, last_report(), before)
            assert last_report().recomputed, shape
            feed = {x: [[0.5] * 64] * 3}
            assert_close(*run(graph, (ours, tf.gradients(y, x)), feed))


def test_tiny_tensors_are_kept(graph):
    x = tf.ones([512, 16])
    h = x
    for _ in range(3):
        h = deep(h)
        mean = tf.reduce_mean(h, 0, name="mean")
        h = (h - mean) * tf.math.rsqrt(mean + 2.0)
    y = deep(deep(h))
    gradients(y, x, checkpoints=by_name("^mul(_[12])?$"), min_checkpoint_size=0)
    reasons = {t.name: t.reason for t in last_report().kept}
    assert reasons["Rsqrt:0"] == "it is too small to matter"
    assert "mean" not in copied(graph)


def test_reads_of_version_1_variables_are_variables(graph):
    x = h = tf.ones([64, 64])
    for i in range(6):
        w = v1.get_variable(f"w{i}", [64, 64], use_resource=False)
        h = tf.tanh(h @ w)
    gradients(h, x, checkpoints=by_name("Tanh_[13]"), offload=True)
    report = last_report()
    assert not [t.name for t in report.kept if "read" in t.name]
    assert not [name for name in report.offloaded if "read" in name]
    assert not [op.name for op in barriers(graph) if "read" in op.name]


def test_memory_of_a_tiny_network(graph):
    # The search for the least budget ends where budgets are a few bytes.
    for size in (1, 2, 3, 7, 16):
        x = tf.ones([size])
        gradients_memory(deep(deep(x)), x)
        assert last_report().mode == "memory"


def test_speed_leaves_gradients_alone_that_need_less_without_it(graph):
    """What is run again holds more for a moment than all that is kept."""
    x = v1.placeholder(tf.float32, [64, 64])
    weights = [v1.placeholder(tf.float32, [64, 64]) for _ in range(4)]
    h = x
    for w in weights[:-1]:
        h = h @ w
        wide = tf.reshape(tf.sin(tf.tile(h, [1, 4])), [64, 4, 64])
        h = tf.tanh(h + tf.stop_gradient(tf.reduce_sum(wide, 1)))
    gradients_speed(tf.reduce_sum(tf.sin(h @ weights[-1])), weights)
    report = last_report()
    assert report.segments == 0
    assert report.peak <= report.plain_peak
    (warning,) = report.warnings
    assert warning.startswith("these are plain gradients: what 'speed' recomputes")


def test_memory_needs_no_more_than_speed(graph):
    """Also where only what few ops yield is large enough to be kept."""
    x = v1.placeholder(tf.float32, [60, 16])
    weights = []
    for _ in range(3):
        more = [v1.placeholder(tf.float32, shape) for shape in ([16, 32], [32, 16])]
        y = tf.tanh(x / tf.sqrt(1.0 + tf.reduce_mean(x * x, -1, keepdims=True)))
        x = x + deep(tf.sin(y @ more[0])) @ more[1]
        weights += more
    y = tf.reduce_sum(tf.sin(x))
    peaks = []
    for take in (gradients_memory, gradients_speed):
        take(y, weights)
        peaks.append(last_report().peak)
    assert peaks[0] <= peaks[1] < last_report().plain_peak


def test_policies_see_forward_tensors_that_could_be_recomputed(graph):
    seen = []
    x = tf.ones([64], name="x")
    tf.exp(x, name="aside")
    y = deep(tf.nn.dropout(deep(x), 0.5))
    before = {t.name for op in graph.get_operations() for t in op.outputs}

    def policy(tensor):
        seen.append(tensor.name)
        return False

    gradients(y, x, checkpoints=policy, min_checkpoint_size=0)
    assert seen
    assert "aside:0" not in seen
    assert not any("random" in name.lower() for name in seen if name in before)
    assert last_report().mode == "policy"


def test_two_gradients_in_one_graph(graph):
    x = tf.ones([8, 64])
    # One output of several is kept.
    left, right = tf.split(deep(x), 2)
    b = deep(deep(left) * tf.exp(right))
    ys = deep(b), tf.tanh(deep(b))
    plain = [tf.gradients(y, x) for y in ys]
    ours = [
        gradients(y, x, checkpoints=[left, b], min_checkpoint_size=0, name="ours")
        for y in ys
    ]
    assert "split" in {op.name for op in last_report().recomputed}
    for optimize in (False, True):
        assert_close(*run(graph, (ours, plain), optimize=optimize))
    names = [op.name for op in graph.get_operations()]
    assert len(set(names)) == len(names)
