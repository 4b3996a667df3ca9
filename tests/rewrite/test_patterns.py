import pytest

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.rewrite import Any, Const, Op, Optional, Or, Rule, Weight
from geutil.rewrite.compiling import compile_pattern

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


def test_what_is_worked_out():
    x = Any("x")
    conv = Op("Conv2D", x, Weight("w", through_identity=False), only_consumer=True)
    biased = Optional(Op({"BiasAdd", "AddV2"}, conv, Any("b")), conv)
    compiled = compile_pattern(Op("Relu", biased) | Op("Relu6", biased))
    assert compiled.types == {"Relu", "Relu6"}
    assert [op.types_text() for op in compiled.ops] == [
        "Relu",
        "AddV2|BiasAdd",
        "Conv2D",
        "Relu6",
    ]
    # Relu -> BiasAdd -> Conv2D -> the op behind w.
    assert compiled.depth == 3
    assert compiled.interior == {
        *("BiasAdd", "AddV2", "Conv2D"),
        *("Const", "ReadVariableOp", "Variable", "VariableV2"),
    }
    assert compiled.may_match(["Conv2D"])
    assert not compiled.may_match(["MatMul"])
    assert not compiled.may_match(["Conv2D", "Const"])


def test_alternatives_are_joined():
    a, b, c = Op("A"), Op("B"), Op("C")
    assert (a | b | c).alternatives == (a, b, c)
    optional = Optional(Op("A", c))
    assert (optional | b).alternatives == (optional, b)


def test_a_deep_pattern():
    pattern = Any("x")
    for _ in range(5_000):
        pattern = Op("Neg", pattern)
    compiled = compile_pattern(pattern)
    assert (compiled.depth, len(compiled.ops)) == (4_999, 5_000)
