import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests import settings
from tests.settings import in_each_setting

NAMES = [
    # name of the op, scope, prefix, result
    ("x", None, "geph", "geph__x_0"),
    ("a/x", None, "geph", "a/geph__x_0"),
    ("a/b/x", None, "geph", "a/b/geph__x_0"),
    ("a/x", "", "geph", "geph__x_0"),
    ("a/x", "c", "geph", "c/geph__x_0"),
    ("a/x", "c/", "geph", "c/geph__x_0"),
    ("a/x", "c/d", "p", "c/d/p__x_0"),
    # a placeholder of a placeholder does not pile up prefixes
    ("geph__x_0", None, "geph", "geph__x_0"),
    ("a/geph__x_0", "b", "geph", "b/geph__x_0"),
    ("geph__x_0", None, "p", "p__geph__x_0_0"),
]


def test_placeholder_name():
    found = []
    for name, scope, prefix, _ in NAMES:
        with tf.Graph().as_default():
            t = tf.constant(1.0, name=name)
        made = ge.placeholder_name(t, scope, prefix)
        found.append((name, scope, prefix, made))
    assert found == NAMES
    with tf.Graph().as_default():
        outputs = tf.split(tf.zeros([4]), 2, name="s")
    assert [ge.placeholder_name(t) for t in outputs] == ["geph__s_0", "geph__s_1"]
    for scope, expected in ((None, "geph"), ("", "geph"), ("a", "a/geph")):
        assert ge.placeholder_name(scope=scope) == expected


def test_what_is_no_tensor_is_refused():
    with tf.Graph().as_default() as graph:
        for wrong in ("x:0", 1, np.zeros(2), [None]):
            for function in (ge.placeholder_name, ge.make_placeholder_from_tensor):
                with pytest.raises(
                    ge.ArgumentTypeError, match=r"expected a tf\.Tensor"
                ):
                    function(wrong)
        assert graph.get_operations() == []
    with tf.init_scope():
        eager = tf.constant(1.0)
    if tf.executing_eagerly():
        with pytest.raises(ge.ArgumentTypeError, match="eager tensors belong to no gr"):
            ge.make_placeholder_from_tensor(eager)


@pytest.mark.parametrize("shape", [None, [], [2, 3], [None, 3]], ids=str)
def test_placeholder_has_the_dtype_and_shape(shape):
    for dtype in (tf.float32, tf.int64, tf.string, tf.bool, tf.complex64, tf.half):
        with tf.Graph().as_default():
            t = tf.compat.v1.placeholder(dtype, shape, name="a/t")
            copy = ge.make_placeholder_from_tensor(t)
            made = ge.make_placeholder_from_dtype_and_shape(dtype, shape, scope="b")
        for placeholder, name in ((copy, "a/geph__t_0"), (made, "b/geph")):
            assert placeholder.op.type == "Placeholder"
            assert placeholder.op.name == name
            assert placeholder.dtype == dtype
            dims = placeholder.shape
            assert (None if dims.rank is None else dims.as_list()) == shape


@in_each_setting
def test_names_are_absolute_and_unique():
    with tf.name_scope("outer"):
        first, second = ge.ph(tf.float32, scope="a"), ge.ph(tf.float32, scope="a")
    assert settings.names([first.op, second.op]) == ["a/geph", "a/geph_1"]
    # The caller places it.
    with tf.device("/device:CPU:7"):
        assert ge.ph(tf.float32).op.device == "/device:CPU:7"
    assert ge.make_placeholder_from_tensor(first).op.device == ""


def test_a_resource_keeps_what_is_behind_the_handle_and_a_reference_is_a_value():
    with tf.Graph().as_default():
        old = tf.compat.v1.Variable([1.0], use_resource=False)
        reference = old.op.outputs[0]
        assert reference.dtype._is_ref_dtype
        assert ge.make_placeholder_from_tensor(reference).dtype == tf.float32
        variable = tf.compat.v1.Variable(tf.zeros([2, 3]), use_resource=True)
        placeholder = ge.make_placeholder_from_tensor(variable.handle)
        read = tf.raw_ops.ReadVariableOp(resource=placeholder, dtype=tf.float32)
    assert placeholder.dtype == tf.resource
    assert read.shape == [2, 3]


def test_nothing_around_the_caller_puts_it_into_a_loop(control_flow_v1):
    made = []

    def body(i):
        made.append(ge.ph(tf.float32))
        return i + 1

    with tf.Graph().as_default():
        tf.compat.v1.while_loop(lambda i: i < 3, body, [0])
    op = made[0].op
    assert op._get_control_flow_context() is None
    assert op.control_inputs == []
