import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.rewrite import Any, Const, Op, Optional, Or, Rule, Weight, match, rewrite

WRONG_NODES = {
    ArgumentTypeError: [
        lambda: Op("Relu", "x"),
        lambda: Op("Relu", Any(), name=3),
        lambda: Any(lambda t: True),
        lambda: Const(3),
        lambda: Or(Any(), None),
    ],
    SelectionError: [
        lambda: Optional("Relu"),
        lambda: Optional(Op("Relu")),
        lambda: Optional(Any()),
        Or,
        lambda: Op([]),
        lambda: Op("AddN", ..., Any()),
        lambda: Op("Split")[-1],
    ],
}
WRONG_PATTERNS = {
    ArgumentTypeError: ["Relu"],
    SelectionError: [
        Any("x"),
        Const(),
        Op("Split")[0],
        Optional(Op("Relu", Any())),
        Op("Relu") | Any(),
        Op("Relu", only_consumer=True),
        Op("Relu", Op("Neg", Any("a"), name="a")),
    ],
}


def test_nodes_and_patterns_that_cannot_be():
    for error, builds in WRONG_NODES.items():
        for build in builds:
            with pytest.raises(error):
                build()
    for error, patterns in WRONG_PATTERNS.items():
        for pattern in patterns:
            with pytest.raises(error):
                Rule(pattern, lambda match: None)


@pytest.mark.parametrize("kind", ["Relu", "Relu6"])
@pytest.mark.parametrize("bias", [None, "BiasAdd", "AddV2"])
def test_a_pattern_with_alternatives_inside_matches_each(kind, bias):
    x = Any("x")
    conv = Op("Conv2D", x, Weight("w", through_identity=False), only_consumer=True)
    biased = Optional(Op({"BiasAdd", "AddV2"}, conv, Any("b")), conv)
    with tf.Graph().as_default() as graph:
        image = tf.zeros([1, 4, 4, 2])
        activate = getattr(tf.raw_ops, kind)
        for weights in (tf.ones([1, 1, 2, 2]), tf.exp(tf.ones([1, 1, 2, 2]))):
            y = tf.nn.conv2d(image, weights, 1, "SAME")
            if bias == "BiasAdd":
                y = tf.nn.bias_add(y, tf.ones([2]))
            elif bias:
                y = y + tf.ones([2])
            activate(features=y)
        # None is one of a product, nor of a layer that another op reads.
        activate(features=tf.matmul(tf.ones([2, 2]), tf.ones([2, 2])))
        read_twice = tf.nn.conv2d(image, tf.ones([1, 1, 2, 2]), 1, "SAME")
        activate(features=tf.identity(read_twice))
        activate(features=read_twice)
    (found,) = match(graph, Op("Relu", biased) | Op("Relu6", biased))
    assert [op.type for op in found.ops] == [*filter(None, [kind, bias, "Conv2D"])]


def test_alternatives_are_joined():
    a, b, c = Op("A"), Op("B"), Op("C")
    assert (a | b | c).alternatives == (a, b, c)
    optional = Optional(Op("A", c))
    assert (optional | b).alternatives == (optional, b)


def test_a_deep_pattern():
    pattern = Any("x")
    for _ in range(5_000):
        pattern = Op("Neg", pattern)
    with tf.Graph().as_default() as graph:
        x = y = tf.zeros([], name="x")
        for _ in range(5_000):
            y = tf.negative(y)
        end = tf.identity(y)
        report = rewrite(graph, Rule(pattern, lambda match: tf.abs(match["x"])))
    (entry,) = report.rewritten
    assert len(entry.ops) == 5_000
    assert end.op.inputs[0].op.inputs[0] is x
