"""Which devices ops run on, and what lies in host memory, by TensorFlow's registry."""

import tensorflow as tf

from geutil.graph.placement import default_device, has_kernels, kernel_of, places_of

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def built(make):
    """Return an op of a graph, and all ops there."""
    with tf.Graph().as_default() as graph:
        made = make()
        return getattr(made, "op", made), graph.get_operations()


def test_a_kernel_names_its_arguments_in_host_memory():
    op, _ = built(lambda: tf.reshape(tf.ones([4, 4]), [16]))
    kernel = kernel_of(op, "GPU")
    assert (kernel.host_inputs, kernel.host_outputs) == ({1}, set())
    op, _ = built(lambda: tf.shape(tf.zeros([3])))
    assert kernel_of(op, "GPU").host_outputs == {0}


def test_integers_are_added_in_host_memory():
    op, _ = built(lambda: tf.add(tf.ones([4], tf.int32), 1))
    kernel = kernel_of(op, "GPU")
    assert (kernel.host_inputs, kernel.host_outputs) == ({0, 1}, {0})
    op, _ = built(lambda: tf.add(tf.ones([4]), 1.0))
    assert kernel_of(op, "GPU").host_outputs == set()


def test_arguments_of_several_tensors_count_each():
    op, _ = built(lambda: tf.concat([tf.ones([2]), tf.ones([3]), tf.ones([4])], 0))
    # ConcatV2 reads its values, then the axis.
    assert kernel_of(op, "GPU").host_inputs == {3}
    op, _ = built(lambda: tf.raw_ops.ShapeN(input=[tf.ones([2]), tf.ones([3])]))
    op = op if hasattr(op, "type") else op[0].op
    assert kernel_of(op, "GPU").host_outputs == {0, 1}


def test_strings_have_no_kernel_on_a_gpu():
    op, _ = built(lambda: tf.strings.join(["a", "b"]))
    assert kernel_of(op, "GPU") is None
    assert kernel_of(op, "CPU") is not None
    assert has_kernels("GPU")
    assert not has_kernels("FPGA")


def test_ops_without_a_kernel_go_to_the_cpu_with_all_that_must_be_there():
    def make():
        v = tf.compat.v1.get_variable("v", [4], use_resource=True)
        words = tf.strings.as_string(v)
        with tf.compat.v1.colocate_with(words):
            there = tf.square(v.value())
        return tf.group(there, tf.square(v), words)

    _, ops = built(make)
    places = places_of(ops, [], GPU)
    by_type = {
        op.type: {places[o.name] for o in ops if o.type == op.type} for op in ops
    }
    assert by_type["AsString"] == {CPU}
    assert by_type["Square"] == {CPU, GPU}
    assert by_type["VarHandleOp"] == {GPU}
    assert set(places_of(ops, [], default_device(())).values()) == {CPU}


def test_a_named_cpu_is_kept():
    def make():
        with tf.device("/CPU:0"):
            x = tf.random.uniform([4])
        return tf.square(x)

    _, ops = built(make)
    places = places_of(ops, [], GPU)
    assert places["Square"] == GPU
    assert {places[op.name] for op in ops if "uniform" in op.name} == {CPU}
