"""Inlining calls: the same values and effects as TensorFlow's own calls."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function

from geutil.bodies import Kept, inline_calls
from tests.bodies.calling import calls_left, node_names, nodes, same, unordered


def placeholder(name="x", shape=(2,), dtype=tf.float32):
    return tf.compat.v1.placeholder(dtype, shape, name=name)


def traced(body):
    """Make a tf.function that is traced anew for each graph."""
    return tf.function(body, autograph=False)


def graph_of(build):
    """Return the GraphDef that `build` makes."""
    with tf.Graph().as_default() as graph:
        build()
    return graph.as_graph_def(add_shapes=True)


FEED = {"x:0": np.array([2.0, -3.0], np.float32)}


@traced
def affine(x):
    return tf.add(tf.multiply(x, 3.0, name="scaled"), 1.0, name="moved")


@traced
def middle(x):
    return affine(x) * affine(-x)


@traced
def outer(x):
    return middle(x) + affine(x), tf.reduce_sum(middle(x))


def test_it_is_deterministic():
    def build():
        outer(outer(placeholder())[0])

    graph_def = graph_of(build)
    first, second = inline_calls(graph_def), inline_calls(graph_def)
    assert first.graph_def == second.graph_def
    assert list(first.tensors.items()) == list(second.tensors.items())
    assert first.graph_def.versions == graph_def.versions
    assert first.kept == ()
    # Without calls it stays as it is.
    again = inline_calls(first.graph_def)
    assert again.graph_def == first.graph_def
    assert again.tensors == {}


def raw_call(name, functions, function, inputs, outputs, op="PartitionedCall"):
    """Make a call with chosen name in the default graph."""
    concrete = functions[function]
    graph = tf.compat.v1.get_default_graph()
    concrete.add_to_graph(graph)
    value = tf.compat.v1.AttrValue
    types = [
        value.ListValue(type=[t.as_datatype_enum for t in side])
        for side in ([t.dtype for t in inputs], outputs)
    ]
    return graph.create_op(
        op,
        inputs,
        outputs,
        name=name,
        attrs={
            "f": value(func=tf.compat.v1.NameAttrList(name=concrete.name)),
            "Tin": value(list=types[0]),
            "Tout": value(list=types[1]),
        },
    )


def concrete(body, *specs):
    return tf.function(body, autograph=False).get_concrete_function(*specs)


VECTOR = tf.TensorSpec([2], tf.float32)


def test_outputs_asked_for_by_name():
    functions = {"f": concrete(lambda x: (x, -x, tf.split(x, 2)[1]), VECTOR)}

    def build():
        x = placeholder()
        raw_call("call", functions, "f", [x], [tf.float32] * 3)

    graph_def = graph_of(build)
    inlined = same(graph_def, [["call:0", "call:1", "call:2"], ["call:2"]], FEED)
    assert list(inlined.tensors) == ["call:0", "call:1", "call:2"]
    assert all(":" in name for name in inlined.tensors.values())


# Effects


def variable_graph(build, value=(1.0, 2.0)):
    """Build with a variable; `init` sets it and `value` reads it, each on its own."""
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(value, name="v", dtype=tf.float32)
        build(variable)
        tf.group(variable.initializer, name="init")
        tf.identity(variable.read_value(), name="value")
    return graph.as_graph_def(add_shapes=True)


def inlined_in_order(build, feed=FEED, **options):
    """Check `out` and the variable behind it, and the order of its accesses."""
    steps = [["init"], ["out:0"], ["value:0"]]
    inlined = same(variable_graph(build), steps, feed, **options)
    if not inlined.kept:
        assert unordered(inlined.graph_def) == []
    return inlined


def test_the_body_waits_for_what_the_call_waits_for():
    def build(v):
        @traced
        def read(factor):
            return v.read_value() * factor, factor, tf.constant(7.0)

        @traced
        def nested(factor):
            return read(factor * 2.0)

        x = placeholder()
        assign = v.assign_add([10.0, 20.0], read_value=False)
        wait = tf.debugging.assert_greater(placeholder("w"), 0.0)
        with tf.control_dependencies([assign, wait]):
            for i, t in enumerate(nested(x)):
                tf.identity(t, name=f"out{i}")

    steps = [["init"], ["out0:0"], ["value:0"], ["out1:0"], ["value:0"], ["out2:0"]]
    feed = {**FEED, "w:0": np.ones(2, np.float32)}
    inlined = same(variable_graph(build), [*steps, ["value:0"]], feed)
    assert unordered(inlined.graph_def) == []


def test_a_control_input_does_not_touch_a_convolution():
    def build():
        image = placeholder(shape=(1, 4, 4, 1))

        @traced
        def convolve(x, filters):
            return tf.nn.conv2d(x, filters, 1, "SAME", name="conv")

        filters = tf.ones([2, 2, 1, 1])
        with tf.control_dependencies([tf.no_op(name="before")]):
            convolve(image, filters)

    inlined = inline_calls(graph_of(build))
    conv = nodes(inlined)["conv"]
    assert not any(name.startswith("^") for name in conv.input)
    gate = nodes(inlined)[conv.input[0]]
    assert gate.op == "Identity"
    assert list(gate.input) == ["x", "^before"]
    assert gate.attr["T"].type == tf.float32.as_datatype_enum


def loose_effect():
    """A legacy function that nothing ties to its effect."""

    @function.Defun(tf.resource, tf.float32, func_name="Loose")
    def loose(handle, x):
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=x)
        return x * 2.0, x, tf.constant(3.0)

    return loose


def test_an_effect_happens_with_each_result():
    def build(v):
        for i, t in enumerate(loose_effect()(v.handle, placeholder())):
            tf.identity(t, name=f"out{i}")

    steps = [["init"], ["out0:0"], ["value:0"], ["out1:0"], ["value:0"], ["out2:0"]]
    inlined = same(variable_graph(build), [*steps, ["value:0"]], FEED)
    assert calls_left(inlined.graph_def) == []


def test_who_waits_for_a_call_waits_for_its_effects():
    def build(v):
        first, *_ = loose_effect()(v.handle, placeholder())
        with tf.control_dependencies([first.op]):
            tf.identity(v.read_value(), name="out")

    inlined_in_order(build)


def test_an_effect_happens_however_deep():
    def assign(handle, x):
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=x)

    def around(call, depth):
        @function.Defun(tf.resource, tf.float32, func_name=f"Deep{depth}")
        def deep(handle, x):
            call(handle, x)
            return tf.constant(float(depth))

        return deep

    call = assign
    for depth in range(1, 5):
        call = around(call, depth)

    def build(v):
        tf.identity(call(v.handle, placeholder()), name="out")

    for keep in ([], ["Deep1"], ["Deep2"], ["Deep3"]):
        inlined_in_order(build, keep=keep)


def test_a_write_in_a_body_comes_after_a_read_before_the_call():
    def build(v):
        @traced
        def write(x):
            v.assign([7.0, 7.0])
            return tf.constant(1.0)

        tf.identity(write(v.read_value()), name="out")

    inlined_in_order(build, None)


@pytest.mark.parametrize("by_control", [True, False])
def test_a_read_in_a_body_comes_before_a_write_behind_the_call(by_control):
    @function.Defun(tf.resource, tf.float32, func_name="Read")
    def read(handle, x):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        return x * 2.0, tf.ensure_shape(value, [2])

    def build(v):
        doubled, value = read(v.handle, placeholder())
        if by_control:
            with tf.control_dependencies([doubled.op]):
                change = v.assign([7.0, 7.0], read_value=False)
        else:
            change = v.assign(doubled, read_value=False)
        with tf.control_dependencies([change]):
            tf.identity(value, name="out")

    inlined_in_order(build)


def test_a_call_that_is_run_by_name():
    with tf.Graph().as_default() as graph:
        v = tf.Variable([1.0, 2.0], name="v")
        tf.group(v.initializer, name="init")
        tf.identity(v.read_value(), name="value")
        # The variable of another graph cannot be captured: one is handed over.
        handed = concrete(
            lambda x, h: (
                tf.raw_ops.AssignAddVariableOp(resource=h, value=x),
                tf.identity(x),
            )[1],
            VECTOR,
            tf.TensorSpec([], tf.resource),
        )
        inputs = [placeholder(), v.handle]
        for name in ("unused", "used"):
            op = raw_call(
                name,
                {"f": handed},
                "f",
                inputs,
                [tf.float32],
                "StatefulPartitionedCall",
            )
        tf.identity(op.outputs[0], name="out")
    graph_def = graph.as_graph_def()
    steps = [["init"], ["unused"], ["value:0"], ["used"], ["value:0"]]
    inlined = same(graph_def, steps, FEED, protected_names=["used", "out:0"])
    assert nodes(inlined)["used"].op == nodes(inlined)["unused"].op == "NoOp"
    assert "used" not in node_names(inline_calls(graph_def))
    quiet = inline_calls(graph_def, protected_names=["unused:0"])
    assert "unused" not in node_names(quiet)


# Control flow


def test_functional_control_flow_is_left_alone():
    def build():
        @traced
        def body(x):
            _, y = tf.while_loop(
                lambda i, _: i < 3, lambda i, v: (i + 1, affine(v)), [0, x]
            )
            return tf.cond(tf.reduce_sum(y) > 0.0, lambda: middle(y), lambda: -y)

        tf.identity(body(placeholder()), name="out")

    graph_def = graph_of(build)
    inlined = same(graph_def, [["out:0"]], FEED)
    assert calls_left(inlined.graph_def) == []
    units = [
        n for n in inlined.graph_def.node if n.op in {"StatelessWhile", "StatelessIf"}
    ]
    assert len(units) == 2
    functions = {f.signature.name: f for f in graph_def.library.function}
    left = {f.signature.name: f for f in inlined.graph_def.library.function}
    assert left.items() <= functions.items()
    assert any("affine" in name for name in left)
    assert not any(name.startswith("__inference_body") for name in left)


@traced
def with_constants(x):
    return tf.constant([1.0, 2.0]), tf.constant([0.5, 0.25]) * x + nested_constant()


@traced
def nested_constant():
    return tf.constant(3.0)


def test_calls_in_a_loop_of_version_1(control_flow_v1):
    def build():
        def body(i, value, other):
            one, two = with_constants(value)
            return i + 1, one + two, one

        x = placeholder()
        loop = tf.compat.v1.while_loop(lambda i, *_: i < 3, body, [0, x, x])
        tf.identity(loop[1], name="out")
        tf.identity(affine(loop[2]), name="after")

    inlined = same(graph_of(build), [["out:0", "after:0"]], FEED)
    assert calls_left(inlined.graph_def) == []


@pytest.mark.parametrize("flag", [True, False])
def test_calls_in_a_branch_of_version_1(control_flow_v1, flag):
    @traced
    def waits(x):
        with tf.control_dependencies([x]):
            return tf.constant([5.0, 6.0])

    def build():
        x, flag = placeholder(), placeholder("flag", (), tf.bool)
        y = tf.compat.v1.cond(
            flag,
            lambda: with_constants(x)[0],
            lambda: with_constants(-x)[0] * nested_constant(),
        )
        z = tf.compat.v1.cond(flag, lambda: waits(x), lambda: x + waits(x))
        tf.stack([y, z], name="out")

    graph_def = graph_of(build)
    inlined = same(graph_def, [["out:0"]], {**FEED, "flag:0": flag})
    assert calls_left(inlined.graph_def) == []


def test_loops_of_version_1_in_a_function_keep_their_frames_apart(control_flow_v1):
    @function.Defun(tf.float32, func_name="Loop")
    def loop(x):
        return tf.compat.v1.while_loop(
            lambda i, _: i < 3, lambda i, v: (i + 1, v * 2.0), [0, x], name="loop"
        )[1]

    def build():
        tf.add(loop(placeholder()), loop(loop(placeholder("y"))), name="out")

    feed = {**FEED, "y:0": FEED["x:0"] + 1}
    inlined = same(graph_of(build), [["out:0"]], feed)
    enters = [n for n in inlined.graph_def.node if n.op == "Enter"]
    assert len({n.attr["frame_name"].s for n in enters}) == 3
    assert calls_left(inlined.graph_def) == []


def test_a_function_with_an_effect_in_a_branch_of_version_1_stays(control_flow_v1):
    @function.Defun(tf.resource, tf.float32, func_name="Branch")
    def branch(handle, x):
        def assign():
            with tf.control_dependencies(
                [tf.raw_ops.AssignAddVariableOp(resource=handle, value=x)]
            ):
                return tf.identity(x)

        return tf.compat.v1.cond(tf.reduce_sum(x) < 0.0, assign, lambda: x)

    def build(v):
        tf.identity(branch(v.handle, placeholder()), name="out")

    (kept,) = inlined_in_order(build).kept
    assert kept.function == "Branch"
    assert "version 1" in kept.reason


def test_a_custom_gradient_stays_in_its_op():
    def build():
        @tf.custom_gradient
        def odd(x):
            return x * 2.0, lambda dy: dy * 100.0

        tf.identity(traced(lambda x: odd(x) + 1.0)(placeholder()), name="out")

    inlined = same(graph_of(build), [["out:0"]], FEED)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(inlined.graph_def, name="")
        x, out = (graph.get_tensor_by_name(n) for n in ("x:0", "out:0"))
        (gradient,) = tf.gradients(out, x)
        with tf.compat.v1.Session() as session:
            values = session.run(gradient, FEED)
    np.testing.assert_array_equal(values, [100.0, 100.0])


# What stays a call


def test_calls_that_stay(control_flow_v2):
    plain = concrete(lambda x: x + 1.0, VECTOR)
    compiled = tf.function(lambda x: x * 2.0, jit_compile=True).get_concrete_function(
        VECTOR
    )
    functions = {"plain": plain, "compiled": compiled}

    def build():
        x = placeholder()
        for name in ("kept", "xla", "marked", "overridden", "own"):
            which = "compiled" if name == "xla" else "plain"
            op = raw_call(name, functions, which, [x], [tf.float32])
            tf.identity(op.outputs[0], name=f"{name}_out")

    graph_def = graph_of(build)
    by_name = {n.name: n for n in graph_def.node}
    by_name["marked"].attr["_noinline"].b = True
    by_name["overridden"].attr["_gradient_op_type"].s = b"Mine"
    by_name["own"].attr["_gradient_op_type"].s = b"PartitionedCall-12"
    names = [n for n in by_name if n.endswith("_out")]
    outs = [f"{n}:0" for n in names]
    if not tf.config.list_physical_devices("XLA_CPU"):
        outs.remove("xla_out:0")
    inlined = same(graph_def, [outs], FEED)
    stay = ("xla", "marked", "overridden")
    assert {k.node: k.function for k in inlined.kept} == {
        name: by_name[name].attr["f"].func.name for name in stay
    }
    reasons = {k.node: k.reason for k in inlined.kept}
    assert "XLA" in reasons["xla"]
    assert "_noinline" in reasons["marked"]
    assert "gradient is overridden" in reasons["overridden"]
    left = {f.signature.name for f in inlined.graph_def.library.function}
    assert left == {k.function for k in inlined.kept}
    name = by_name["kept"].attr["f"].func.name
    inlined = inline_calls(graph_def, keep={name})
    assert Kept("kept", name, "the function is named in keep") in inlined.kept


def test_a_kept_call_inside_a_body_and_its_callees():
    @traced
    def keep_me(x):
        return affine(x) + 1.0

    @traced
    def caller(x):
        return keep_me(x) * 2.0

    graph_def = graph_of(lambda: tf.identity(caller(placeholder()), name="out"))
    name = next(
        f.signature.name
        for f in graph_def.library.function
        if "keep_me" in f.signature.name
    )
    inlined = same(graph_def, [["out:0"]], FEED, keep=[name])
    (kept,) = inlined.kept
    assert kept.function == name
    assert nodes(inlined)[kept.node].op == "PartitionedCall"
    left = [f.signature.name for f in inlined.graph_def.library.function]
    assert sorted("keep_me" in n or "affine" in n for n in left) == [True, True]


def test_functions_with_gradient_functions_and_symbolic_gradients_stay():
    @function.Defun(tf.float32, tf.float32, func_name="Grad")
    def gradient(x, dy):
        return dy * 5.0

    for gradients in ([gradient], []):

        @function.Defun(tf.float32, func_name="Fun", grad_func=(*gradients, None)[0])
        def fun(x):
            return x * x

        def build(fun=fun):
            x = placeholder()
            y = tf.identity(fun(x), name="out")
            tf.identity(tf.gradients(y, x)[0], name="gradient")

        inlined = same(graph_of(build), [["out:0", "gradient:0"]], FEED)
        assert {k.function for k in inlined.kept} == {"Fun"}
        library = inlined.graph_def.library
        names = [f.signature.name for f in library.function]
        assert sorted(names) == ["Fun", "Grad"][: 1 + len(gradients)]
        assert [g.gradient_func for g in library.gradient] == ["Grad"] * len(gradients)
    assert "gradient of the function" in inlined.kept[0].reason


# Devices and colocation


def test_devices_and_colocation():
    def build():
        @traced
        def body(x):
            a = tf.negative(x, name="a")
            with tf.compat.v1.colocate_with(a.op):
                b = tf.identity(a, name="b")
            with tf.compat.v1.colocate_with(x.op, ignore_existing=True):
                c = tf.identity(b, name="c")
            with tf.device("/device:CPU:0"):
                return tf.exp(c, name="d")

        with tf.device("/job:worker/task:1"):
            y = body(placeholder())
        with tf.compat.v1.colocate_with(y.op):
            tf.identity(y, name="out")

    found = nodes(inline_calls(graph_of(build)))
    assert found["a"].device == "/job:worker/task:1"
    assert found["d"].device == "/job:worker/task:1/device:CPU:0"
    assert list(found["b"].attr["_class"].list.s) == [b"loc:@a"]
    assert list(found["c"].attr["_class"].list.s) == [b"loc:@x"]
    assert "_class" not in found["out"].attr
    assert "_output_shapes" in found["a"].attr
