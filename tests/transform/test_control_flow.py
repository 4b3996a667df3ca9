"""Copies of loops and conditionals, made with control flow v1 and v2."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests import settings
from tests.graph.building import snapshot
from tests.settings import evaluate
from tests.transform.test_transformer import transformer_of

v1 = tf.compat.v1


def power(x, exponent=3, name="while"):
    """Return x ** exponent, by a loop."""
    return v1.while_loop(
        lambda i, a: i < exponent,
        lambda i, a: (i + 1, a * x),
        [tf.constant(0), tf.constant(1.0)],
        name=name,
    )[1]


def nested(x):
    """Return a value by a loop that holds a loop and a conditional."""

    def body(i, a):
        inner = v1.while_loop(
            lambda j, b: j < 2, lambda j, b: (j + 1, b * x), [tf.constant(0), a]
        )[1]
        return i + 1, inner + v1.cond(inner > 1.0, lambda: inner * x, lambda: x)

    return v1.while_loop(lambda i, a: i < 2, body, [tf.constant(0), tf.constant(1.0)])[
        1
    ]


def branches(x):
    """Return x squared where it is positive, else minus x."""
    return v1.cond(x > 0.0, lambda: x * x, lambda: -x)


MODELS = {"loop": power, "nested": nested, "conditional": branches}
POINTS = [2.0, -1.5]


def model(build, gradient=False):
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [], name="x")
        y = build(x)
        dy = tf.gradients(y, x)[0] if gradient else None
    return x, y, dy


def values_and_gradients(x, y):
    with x.graph.as_default():
        dy = tf.gradients(y, x)[0]
    return [evaluate(x.graph, [y, dy], {x: point}) for point in POINTS]


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def control_flow(request):
    with settings.control_flow(request.param):
        yield


def test_values_are_what_python_computes(control_flow):
    # The references of this module compare graphs with graphs; this pins the graphs.
    for build, function in (
        (power, lambda x: x**3),
        (branches, lambda x: x * x if x > 0 else -x),
    ):
        x, y, _ = model(build)
        for point in POINTS:
            (value,) = evaluate(x.graph, [y], {x: point})
            np.testing.assert_allclose(value, function(point), rtol=1e-6)


def whole(x, y):
    return ge.copy(x.graph, tf.Graph(), dst_scope="c")[1]


def what_the_output_needs(x, y):
    ops = ge.get_backward_walk_ops(y, control_inputs=True)
    return ge.copy(ops, tf.Graph())[1]


def op_by_op(x, y):
    transformer = transformer_of(ge.copy_op_handler, "one by one")
    return transformer(x.graph, tf.Graph(), "c")[1]


def test_copies_to_another_graph_are_differentiable(control_flow):
    for name, build in MODELS.items():
        expected = values_and_gradients(*model(build)[:2])
        for copy in (whole, what_the_output_needs, op_by_op):
            x, y, _ = model(build)
            x_, y_ = copy(x, y).transformed([x, y])
            ge.verify(x_.graph)
            case = name, copy.__name__
            assert values_and_gradients(x_, y_) == expected, case
        # A training graph is copied with its gradients.
        x, y, dy = model(build, gradient=True)
        x_, y_, dy_ = whole(x, y).transformed([x, y, dy])
        ge.verify(x_.graph)
        found = [evaluate(x_.graph, [y_, dy_], {x_: point}) for point in POINTS]
        assert found == expected, name


def test_copies_within_the_graph_run_beside_the_original(control_flow):
    for name, build in MODELS.items():
        x, y, _ = model(build)
        expected = values_and_gradients(*model(build)[:2])
        _, info = ge.copy(x.graph, dst_scope="c")
        ge.verify(x.graph)
        x_, y_ = info.transformed([x, y])
        with x.graph.as_default():
            dy_ = tf.gradients(y_, x_)[0]
        for point, (value, gradient) in zip(POINTS, expected, strict=True):
            both = evaluate(x.graph, [y, y_, dy_], {x: POINTS[0], x_: point})
            assert both == [expected[0][0], value, gradient], name
            with x.graph.as_default():
                z = tf.constant(point)
                replaced = ge.graph_replace(y, {x.ref(): z})
                slope = tf.gradients(replaced, z)[0]
            assert evaluate(x.graph, [replaced, slope]) == [value, gradient], name
        ge.verify(x.graph)


def test_two_tensors_that_enter_a_loop_become_one(control_flow_v1):
    with tf.Graph().as_default() as graph:
        x, z = tf.constant(2.0, name="x"), tf.constant(3.0, name="z")
        goes_on, start = (lambda i, a: i < 2), [tf.constant(0), tf.constant(1.0)]
        y = v1.while_loop(goes_on, lambda i, a: (i + 1, a * x + z * z), start)[1]
        y_ = ge.graph_replace(y, {x.ref(): z})
    ge.verify(graph)
    enters = [op for op in graph.get_operations() if op.type == "Enter"]
    assert sum(op.inputs[0] is z for op in enters) == 3
    with graph.as_default():
        dy_ = tf.gradients(y_, z)[0]
    ge.verify(graph)
    # (z + z²) z + z² and its derivative.
    assert evaluate(graph, [y, y_, dy_]) == [31.0, 45.0, 39.0]


def recurrent(x):
    """Return a value by a loop that reads one array and fills another."""
    given = tf.TensorArray(tf.float32, 3, element_shape=[]).unstack([1.0, 2.0, 3.0])
    _, state, filled = v1.while_loop(
        lambda i, s, out: i < 3,
        lambda i, s, out: (i + 1, s * x + given.read(i), out.write(i, s * x)),
        [0, x, tf.TensorArray(tf.float32, 3, element_shape=[])],
    )
    return state + tf.reduce_sum(filled.stack())


def test_copies_fill_stacks_and_arrays_of_their_own(control_flow_v1):
    for build in (*MODELS.values(), recurrent):
        x, y, dy = model(build, gradient=True)
        seed = dy.graph.get_tensor_by_name("gradients/grad_ys_0:0")
        ops = x.graph.get_operations()
        contexts = [op._get_control_flow_context() for op in ops]
        with x.graph.as_default():
            z, two = tf.constant(POINTS[1]), tf.constant(2.0)
        y_ = ge.graph_replace(y, {x.ref(): z})
        both = ge.graph_replace([y, dy], {x.ref(): z})
        twice = ge.graph_replace(dy, {seed.ref(): two})
        # The original is left alone.
        assert [op._get_control_flow_context() for op in ops] == contexts, build
        ge.verify(x.graph)
        first, second = [evaluate(x.graph, [y, dy], {x: point}) for point in POINTS]
        found = evaluate(x.graph, [y, dy, y_, *both, twice], {x: POINTS[0]})
        assert found == [*first, second[0], *second, 2 * first[1]], build


def test_what_lives_outside_a_loop_cannot_stand_in_inside(control_flow_v1):
    # TensorFlow would run such a copy into a wall: a segmentation fault.
    x, y, _ = model(power)
    product = x.graph.get_operation_by_name("while/mul")
    with pytest.raises(
        ge.TransformError,
        match=r"'x:0' cannot stand in for 'while/mul:0': the copy of 'while/Next\w+' "
        r"would read in the copy of while loop 'while/while_context', but 'x:0' lives "
        r"outside every while loop; replace what enters the loop",
    ):
        ge.graph_replace(y, {product.outputs[0].ref(): x})
    with x.graph.as_default():
        z = tf.negative(y)
    before = snapshot(x.graph)
    with pytest.raises(
        ge.TransformError, match=r"outside every while loop, but 'while"
    ):
        ge.graph_replace(z, {y.ref(): product.outputs[0]})
    assert snapshot(x.graph) == before


def test_contexts_are_collected_as_the_originals_were(control_flow_v1):
    for build, key in (
        (power, v1.GraphKeys.WHILE_CONTEXT),
        (branches, v1.GraphKeys.COND_CONTEXT),
    ):
        x, y, _ = model(build)
        _, info = ge.copy(x.graph, tf.Graph())
        source, copied = x.graph, info.transformed(x).graph
        assert len(source.get_collection(key)) == len(copied.get_collection(key)) > 0
        with copied.as_default():
            meta_graph = v1.train.export_meta_graph()
        imported = tf.Graph()
        with imported.as_default():
            v1.train.import_meta_graph(meta_graph)
            x_ = imported.get_tensor_by_name(info.transformed(x).name)
            y_ = imported.get_tensor_by_name(info.transformed(y).name)
        expected = values_and_gradients(*model(build)[:2])
        assert values_and_gradients(x_, y_) == expected


def test_part_of_a_loop_is_copied_within_it_and_else_refused(control_flow_v1):
    x, y, _ = model(power)
    product = x.graph.get_operation_by_name("while/mul")
    with pytest.raises(ge.TransformError, match="can only be copied whole"):
        ge.copy(product, tf.Graph())
    merge = ge.filter_ops(x.graph, ge.op_type("Merge"))[0]
    before = x.graph.as_graph_def()
    for destination in (x.graph, tf.Graph()):
        with pytest.raises(ge.TransformError) as caught:
            ge.copy(merge, destination, dst_scope="c")
        assert destination.unique_name("c", mark_as_used=False) == "c"
        for word in ("'while/Merge'", "while/while_context", "whole", "name scope"):
            assert word in str(caught.value)
        assert x.graph.as_graph_def() == before
    # Within the loop it is copied.
    _, info = ge.copy_with_input_replacements(product, [])
    product_ = info.transformed(product)
    context = product._get_control_flow_context()
    assert product_._get_control_flow_context() is context
    ge.reroute_ts(product_.outputs[0], product.outputs[0])
    ge.verify(x.graph)
    assert evaluate(x.graph, [y], {x: 2.0}) == [8.0]


def test_bodies_go_along_to_another_graph(control_flow_v2):
    @tf.function(autograph=False)
    def inner(x):
        return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * x), [0, 1.0])[
            1
        ]

    @tf.function(autograph=False)
    def outer(x):
        return inner(x) + tf.cond(x > 0.0, lambda: inner(x), lambda: -x)

    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], name="x")
        y = outer(x)
        tf.function(lambda a: a * 2.0)(x)
    destination = tf.Graph()
    _, info = ge.copy(ge.get_backward_walk_ops(y), destination)
    ge.verify(destination)
    assert values_and_gradients(*info.transformed([x, y])) == values_and_gradients(x, y)
    carried = {f.signature.name for f in destination.as_graph_def().library.function}
    whole = {f.signature.name for f in graph.as_graph_def().library.function}
    assert carried < whole
