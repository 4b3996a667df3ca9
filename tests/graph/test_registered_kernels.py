"""Which devices ops run on, and what lies in host memory, by TensorFlow's registry."""

import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.memory import predict, predict_by_device

v1 = tf.compat.v1
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def held(make):
    """Return the bytes that a step holds on a GPU, feeds apart."""
    with tf.Graph().as_default():
        return predict(make(), device="GPU:0", grappler=False).peak


def fed(*shape, dtype=tf.float32):
    return v1.placeholder(dtype, shape)


def test_a_kernel_reads_and_makes_shapes_in_host_memory():
    # Sixteen floats; the shape is computed, and lies in the memory of the host.
    assert held(lambda: tf.reshape(fed(4, 4), tf.shape(fed(16)))) == 0
    assert held(lambda: tf.exp(tf.reshape(fed(4, 4), tf.shape(fed(16))))) == 64
    assert held(lambda: tf.shape(fed(3))) == 0


def test_integers_are_added_in_host_memory():
    assert held(lambda: tf.add(fed(4, dtype=tf.int32), 1)) == 0
    assert held(lambda: tf.add(fed(4), 1.0)) == 16


def test_arguments_of_several_tensors_count_each():
    # ConcatV2 reads its values, then the axis, which is computed here.
    parts = (2, 3, 4)
    assert held(lambda: tf.concat([*map(fed, parts)], tf.rank(fed(2)) - 1)) == 36
    # Of values that are computed, too, the bytes of all are held.
    computed = held(
        lambda: tf.concat([tf.exp(fed(n)) for n in parts], tf.rank(fed(2)) - 1)
    )
    assert computed == 72
    assert held(lambda: tf.raw_ops.ShapeN(input=[fed(2), fed(3)])) == 0


def places(make, default):
    """Return the devices that ops of each type run on, by a prediction of each."""
    with tf.Graph().as_default() as graph:
        found = predict_by_device(make(), default=default, grappler=False)
    kinds = {op.name: op.type for op in graph.get_operations()}
    devices = {}
    for row in found.devices:
        for moment in row.timeline.moments:
            if moment.op in kinds:
                devices.setdefault(kinds[moment.op], set()).add(row.device)
    return devices


def test_strings_have_no_kernel_on_a_gpu():
    def make():
        return tf.strings.join([fed(dtype=tf.string), "b"])

    assert places(make, GPU)["StringJoin"] == {CPU}
    with tf.Graph().as_default():
        y = make()
        with pytest.raises(ArgumentTypeError, match="has kernels for"):
            predict(y, device="TPU:0")


def coupled():
    v = v1.get_variable("v", [4], use_resource=True)
    words = tf.strings.as_string(v)
    with v1.colocate_with(words):
        there = tf.square(v.value())
    return [there, tf.square(v), words]


def test_ops_without_a_kernel_go_to_the_cpu_with_all_that_must_be_there():
    by_type = places(coupled, GPU)
    assert by_type["AsString"] == {CPU}
    assert by_type["Square"] == {CPU, GPU}
    assert by_type["VarHandleOp"] == {GPU}
    assert set().union(*places(coupled, None).values()) == {CPU}


def test_a_named_cpu_is_kept():
    def make():
        with tf.device("/CPU:0"):
            x = tf.random.uniform([4])
        return tf.square(x)

    by_type = places(make, GPU)
    assert by_type["Square"] == {GPU}
    assert by_type["RandomUniform"] == {CPU}
