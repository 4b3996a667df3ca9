import pytest

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.transform.rewrite import Any, Const, Op, Optional, Or, Rule, Weight
from geutil.transform.rewrite.compiling import compile_pattern


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: Op("Relu", "x"), ArgumentTypeError),
        (lambda: Op("Relu", Any(), name=3), ArgumentTypeError),
        (lambda: Any(lambda t: True), ArgumentTypeError),
        (lambda: Const(3), ArgumentTypeError),
        (lambda: Or(Any(), None), ArgumentTypeError),
        (lambda: Optional("Relu"), SelectionError),
        (lambda: Optional(Op("Relu")), SelectionError),
        (lambda: Optional(Any()), SelectionError),
        (Or, SelectionError),
        (lambda: Op([]), SelectionError),
        (lambda: Op("AddN", ..., Any()), SelectionError),
        (lambda: Op("Split")[-1], SelectionError),
    ],
)
def test_nodes_that_cannot_be(build, error):
    with pytest.raises(error):
        build()


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("Relu", ArgumentTypeError),
        (Any("x"), SelectionError),
        (Const(), SelectionError),
        (Op("Split")[0], SelectionError),
        (Optional(Op("Relu", Any())), SelectionError),
        (Op("Relu") | Any(), SelectionError),
        (Op("Relu", only_consumer=True), SelectionError),
        (Op("Relu", Op("Neg", Any("a"), name="a")), SelectionError),
    ],
)
def test_patterns_that_cannot_be_used(pattern, error):
    with pytest.raises(error):
        compile_pattern(pattern)
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
