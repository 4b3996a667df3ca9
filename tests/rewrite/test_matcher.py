import keras
import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.errors import ArgumentTypeError, SelectionError
from geutil.rewrite import (
    Any,
    Const,
    Op,
    Optional,
    Or,
    Variable,
    Weight,
    constant_value,
    match,
)
from tests.graph.building import chain
from tests.settings import names, slow
from tests.thorough import length


def roots(graph, pattern, **options):
    return names(found.root for found in match(graph, pattern, **options))


def test_types_inputs_and_captures(graph):
    x, y = tf.constant([1.0], name="x"), tf.constant([2.0], name="y")
    total = tf.add(x, tf.exp(y, name="e"), name="s")
    tf.add(total, x, name="other")
    a, b = Any("a"), Any("b")
    [found] = match(graph, Op("AddV2", a, exp := Op("Exp", b, name="exp"), name="sum"))
    assert names(found.ops) == ["s", "e"]
    assert found.root is found["sum"] is total.op
    assert found["exp"] is found[exp]
    assert found["a"] is x is found[a]
    assert found["b"] is y
    assert list(found.tensors()) == ["a", "b"]
    assert "nothing" not in found
    assert found.get("nothing") is None
    with pytest.raises(KeyError, match="nothing"):
        found["nothing"]


def test_the_number_of_inputs(graph):
    x = tf.constant([1.0])
    tf.add_n([x, x], name="two"), tf.add_n([x, x, x], name="three")
    assert roots(graph, Op("AddN")) == ["two", "three"]
    assert roots(graph, Op("AddN", Any(), Any())) == ["two"]
    assert roots(graph, Op("AddN", Any(), Any(), ...)) == ["two", "three"]
    assert roots(graph, Op("AddN", Any(), Any(), Any(), Any(), ...)) == []


def test_one_node_or_name_is_one_element(graph):
    x, y = tf.constant([1.0]), tf.constant([2.0])
    tf.multiply(x, x, name="square"), tf.multiply(x, y, name="product")
    a = Any("a")
    for pattern in (Op("Mul", Any("a"), Any("a")), Op("Mul", a, a)):
        assert roots(graph, pattern) == ["square"]
    e, f = tf.exp(x), tf.exp(x)
    tf.add(e, e, name="same"), tf.add(e, f, name="two")
    exp = Op("Exp")
    assert roots(graph, Op("AddV2", exp, exp)) == ["same"]
    # Two nodes may stand for one op.
    assert roots(graph, Op("AddV2", Op("Exp"), Op("Exp")), overlaps=True) == [
        "same",
        "two",
    ]


def test_outputs_of_one_op(graph):
    x = tf.constant([1.0, 2.0])
    a, b = tf.split(x, 2)
    c, _ = tf.split(x, 2)
    tf.add(a, b, name="ab"), tf.add(b, a, name="ba"), tf.add(c, b, name="cb")
    split = Op("Split", Any(), Any("x"))
    assert roots(graph, Op("AddV2", split[0], split[1])) == ["ab"]
    assert roots(graph, Op("AddV2", split, split[1])) == ["ab"]
    both_ways = Op("AddV2", split[0], split[1], commutative=True)
    assert roots(graph, both_ways, overlaps=True) == ["ab", "ba"]


def test_attributes(graph):
    image = tf.zeros([1, 4, 4, 1])
    for padding in ("SAME", "VALID"):
        tf.nn.max_pool2d(image, 2, 2, padding, name=padding)
    assert roots(graph, Op("MaxPool", attrs={"padding": "SAME"})) == ["SAME"]
    assert roots(graph, Op("MaxPool", attrs={"padding": b"VALID"})) == ["VALID"]
    assert roots(graph, Op("MaxPool", attrs={"ksize": (1, 2, 2, 1)})) == [
        "SAME",
        "VALID",
    ]
    assert roots(graph, Op("MaxPool", attrs={"T": tf.float16})) == []
    assert roots(graph, Op("MaxPool", attrs={"padding": lambda v: v[:1] == b"V"})) == [
        "VALID"
    ]
    assert roots(graph, Op("MaxPool", attrs={"no_such": 1})) == []
    # And predicates of ops and tensors.
    tf.exp(tf.zeros([3]), name="e"), tf.exp(tf.zeros([2]), name="f")
    assert roots(graph, Op("Exp", where=lambda op: op.name == "f")) == ["f"]
    assert roots(graph, Op("Exp", Any(where=lambda t: t.shape[0] == 3))) == ["e"]


def test_constants_and_variables(graph):
    const = tf.constant([1.0, 2.0])
    v = tf.Variable([3.0, 4.0])
    reference = tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32)
    placeholder = tf.compat.v1.placeholder(tf.float32, [2])
    tf.exp(const, name="plain"), tf.exp(tf.identity(const), name="frozen")
    tf.exp(v, name="read"), tf.exp(tf.identity(v.read_value()), name="read_twice")
    tf.exp(tf.identity(reference), name="v1"), tf.exp(placeholder, name="fed")
    constants, variables = ["plain", "frozen"], ["read", "read_twice", "v1"]
    assert roots(graph, Op("Exp", Const())) == constants
    assert roots(graph, Op("Exp", Const(through_identity=False))) == ["plain"]
    assert roots(graph, Op("Exp", Variable())) == variables
    assert roots(graph, Op("Exp", Weight())) == [*constants, *variables]
    for found in match(graph, Op("Exp", Const("c"))):
        assert constant_value(found["c"]).tolist() == [1.0, 2.0]
        assert names(found.ops) == [found.root.name]
    with pytest.raises(SelectionError, match="is no constant"):
        constant_value(placeholder)


def test_choices_are_taken_in_order_and_back_if_they_fail_later(graph):
    x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
    tf.subtract(tf.multiply(x, y, name="m"), y, name="s")
    a, b = Any("a"), Any("b")
    # The first order of the product, a = x, does not fit what is subtracted.
    product = Op("Mul", a, b, commutative=True)
    [found] = match(graph, Op("Sub", product, a))
    assert (found["a"], found["b"]) == (y, x)
    # Alternatives are taken in order, and the larger pattern takes the smaller along.
    tf.exp(tf.sin(x, name="sin"), name="e")
    any_first = Op("Exp", Any("any") | Op("Sin", name="sin"))
    sin_first = Op("Exp", Op("Sin", name="sin") | Any("any"))
    assert list(match(graph, any_first)[0].captures) == ["any"]
    assert list(match(graph, sin_first)[0].captures) == ["sin"]
    tf.sin(x, name="other")
    assert roots(graph, Op("Exp", Op("Sin")) | Op("Sin")) == ["e", "other"]


def test_readers_within_the_match_do_not_count(graph):
    s = tf.sin(tf.constant([1.0]))
    tf.add(tf.exp(s), tf.cos(s), name="sum")
    sin = Op("Sin", only_consumer=True)
    assert roots(graph, Op("AddV2", Op("Exp", sin), Op("Cos", sin))) == ["sum"]


def test_a_function_result_is_read_outside():
    def traced(x):
        e = tf.exp(x)
        return e, tf.sin(e)

    pattern = Op("Sin", Op("Identity", Op("Exp"), only_consumer=True))
    graph = tf.function(traced).get_concrete_function(tf.TensorSpec([])).graph
    exp = next(op for op in graph.get_operations() if op.type == "Exp")
    graph.outputs[0] = exp.outputs[0]
    assert roots(graph, Op("Sin", Op("Exp"))) == ["Sin"]
    assert roots(graph, Op("Sin", Op("Exp", only_consumer=True))) == []
    assert roots(graph, pattern) == []


def test_ops_limit_the_match(graph):
    s = tf.sin(tf.constant(1.0), name="s")
    e = tf.exp(s, name="e")
    pattern = Op("Exp", Op("Sin"))
    assert roots([e.op, s.op], pattern) == ["e"]
    assert roots([e.op], pattern) == []
    assert match([], pattern) == []


@pytest.mark.usefixtures("control_flow_v1")
def test_no_match_crosses_a_context(graph):
    x = tf.constant(1.0)
    tf.compat.v1.cond(
        x > 0, lambda: tf.exp(tf.sin(x, name="s"), name="inside"), lambda: x
    )
    assert roots(graph, Op("Exp", Op("Sin"))) == ["cond/inside"]
    assert roots(graph, Op("Sin", Op("Switch")[1])) == ["cond/s"]
    assert roots(graph, Op("Merge", Op("Switch"), ...)) == []
    assert len(match(graph, Op("Merge"))) == 1
    # Loops are no trap.
    tf.compat.v1.while_loop(
        lambda i: i < 3, lambda i: tf.add(i, 1, name="step"), [tf.constant(0)]
    )
    again = Op("Merge", Any(), Op("NextIteration", Op("AddV2")))
    assert len(match(graph, again)) == 1


def test_keras_batch_norm():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            keras.layers.Conv2D(2, 3),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(2, 1, use_bias=False),
            keras.layers.BatchNormalization(),
        ]
    )
    function = tf.function(lambda x: model(x, training=False))
    graph = function.get_concrete_function(tf.TensorSpec([1, 4, 4, 3])).graph
    conv = Op("Conv2D", Any("x"), through("kernel"), name="conv", only_consumer=True)
    biased = Or(
        Op("BiasAdd", conv, through("bias"), only_consumer=True),
        Op({"Add", "AddV2"}, conv, through("bias"), commutative=True),
    )
    shifted = Op("AddV2", through("variance"), Const("epsilon"), commutative=True)
    scale = Op("Mul", Op("Rsqrt", shifted), through("gamma"), commutative=True)
    offset = Op(
        "Sub", through("beta"), Op("Mul", through("mean"), scale, commutative=True)
    )
    scaled = Op("Mul", Optional(biased, conv), scale, commutative=True)
    found = match(graph, Op("AddV2", scaled, offset, commutative=True))
    assert len(found) == 2
    assert ["bias" in m for m in found] == [True, False]
    variables = {id(inside): outer for outer, inside in graph.captures}
    by_handle = {id(v.value.handle): v.value for v in model.variables}
    for m, norm in zip(found, (model.layers[1], model.layers[4]), strict=True):
        for name, variable in (
            ("gamma", norm.gamma),
            ("beta", norm.beta),
            ("mean", norm.moving_mean),
            ("variance", norm.moving_variance),
        ):
            handle = variables[id(read_of(m[name]).inputs[0])]
            assert by_handle[id(handle)] is variable.value
        assert constant_value(m["epsilon"]) == np.float32(norm.epsilon)


def through(name):
    """A weight, perhaps brought to another shape."""
    weight = Weight(name)
    reshaped = Optional(Op("Reshape", weight, Const()))
    return Optional(Op("Squeeze", reshaped))


def read_of(tensor):
    ops = ge.get_backward_walk_ops(tensor)
    return next(op for op in ops if op.type == "ReadVariableOp")


@slow
def test_a_very_long_chain():
    count = length(100_000)
    graph = chain(count)
    pattern = Op("Identity", Op("Identity", Op("Identity", Op("Placeholder"))))
    assert roots(graph, pattern) == ["n3"]
    assert len(match(graph, Op("Identity", Op("Identity")))) == count // 2 - 1


def test_an_ambiguous_pattern_is_bounded(graph):
    x = tf.constant(1.0)
    tf.add_n([tf.exp(x) for _ in range(12)])
    where = Any("last", where=lambda t: False)
    exps = [Op("Exp") for _ in range(11)]
    with pytest.raises(SelectionError, match="100000 steps"):
        match(graph, Op("AddN", *exps, where, commutative=True))


def test_wrong_types(graph):
    for argument in (None, "x", 3):
        with pytest.raises(ArgumentTypeError):
            match(argument, Op("Relu"))
        with pytest.raises(ArgumentTypeError):
            match(graph, argument)
    x = tf.constant(1.0)
    with tf.Graph().as_default():
        y = tf.constant(1.0)
    with pytest.raises(SelectionError, match="different graphs"):
        match([x.op, y.op], Op("Const"))
