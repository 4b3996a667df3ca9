"""Files declared in Python compute what numpy does."""

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import GeutilError, TFLiteError
from tests.tflite.declared import chain
from tests.tflite.running import runs


def test_a_network_in_int8():
    m = tflite.LiteFile()
    step = tflite.Quantization((0.5,), (-3,))
    x = m.add_input("x", "int8", [1, 4, 4, 2], quantization=step)
    random = np.random.default_rng(1)
    w = random.integers(-9, 9, (3, 1, 1, 2), np.int8)
    scales = (0.25, 0.5, 0.125)
    w = m.add_constant("w", w, quantization=tflite.Quantization(scales, (0,) * 3, 0))
    bias = tflite.Quantization(tuple(0.5 * s for s in scales), (0,) * 3, 0)
    b = m.add_constant("b", np.int32([40, -7, 9]), quantization=bias)
    y = m.add(
        "CONV_2D",
        [x, w, b],
        name="y",
        quantization=tflite.Quantization((1.0,), (2,)),
        padding="VALID",
        stride_w=2,
        stride_h=2,
        dilation_w_factor=1,
        dilation_h_factor=1,
        fused_activation_function="RELU",
    )
    assert m.op("y").version == 3
    assert str(y) == "int8 [1, 2, 2, 3]"
    m.set_outputs([y])
    m.add_signature("serve", {"image": "x"}, {"logits": "y"})
    m.verify()
    (run,) = runs(
        m.to_bytes(), [{"x": random.integers(-99, 99, (1, 4, 4, 2), np.int8)}]
    )
    real = 0.5 * (run.inputs["x"][:, ::2, ::2].astype(float) + 3)
    weights = w.value.reshape(3, 2) * np.reshape(scales, (3, 1))
    sums = real @ weights.T + b.value * np.asarray(bias.scales)
    expected = np.clip(np.round(np.maximum(sums, 0)) + 2, -128, 127)
    assert np.abs(run.outputs["y"] - expected).max() <= 1


def test_several_results_and_subgraphs():
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [6])
    axis = m.add_constant("axis", np.int32(0))
    halves = m.add("SPLIT", [axis, x], name=["a", "b"], num_splits=2)
    assert [str(t) for t in halves] == ["float32 [3]"] * 2
    flag = m.add_input("flag", "bool", [])
    branches = [m.add_graph(name) for name in ("then", "else")]
    for branch, kind in zip(branches, ("ADD", "SUB"), strict=True):
        ends = [m.add_input(n, "float32", [3], graph=branch) for n in "pq"]
        made = m.add(kind, ends, name="r", graph=branch)
        m.set_outputs([made], graph=branch)
    named = {"then_subgraph_index": branches[0], "else_subgraph_index": branches[1]}
    y = m.add("IF", [flag, *halves], name="y", dtype="float32", **named)
    m.set_outputs([y])
    m.verify()
    x = np.arange(6, dtype=np.float32)
    for flag, expected in ((True, x[:3] + x[3:]), (False, x[:3] - x[3:])):
        (run,) = runs(m.to_bytes(), [{"x": x, "flag": np.bool_(flag)}])
        np.testing.assert_array_equal(run.outputs["y"], expected)


def test_ops_of_your_own_and_tensors_that_you_made():
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [None, 3])
    y = m.add("Own", [x, None], name="y", shape=[None, 5], custom_options=b"abc")
    made = tflite.LiteTensor("z", "int8", [2])
    assert m.add("Own", [y], outputs=[made], custom_options=b"") is made
    m.set_outputs([made])
    again = tflite.open(m.to_bytes())
    first, second = again.graphs[0].ops
    assert (first.kind, first.is_custom, first.custom_options) == ("Own", True, b"abc")
    assert first.inputs[1] is None
    assert again.tensor("y").shape == (None, 5)
    assert str(second.outputs[0]) == "int8 [2]"


def conv(m, **options):
    return m.add("CONV_2D", ["x", "x", None], **options)


REFUSED = [
    (lambda m: m.add("CONV2D", ["x"]), "no op of the kind 'CONV2D'"),
    (lambda m: m.add("NEG", ["z"]), "no tensor 'z'"),
    (lambda m: conv(m, strides=2), "CONV_2D has no option 'strides'; its options are"),
    (
        lambda m: m.add("RELU", ["x"], alpha=1),
        "RELU has no option 'alpha'; it has none",
    ),
    (
        lambda m: m.add("Own", ["x"], custom_options=b""),
        "tells the shape of 'own'; pass",
    ),
    (lambda m: m.add("VAR_HANDLE", [], shape=[], name="v", dtype="float"), "no type"),
    (lambda m: m.add("CONV_2D", ["x"]), "tells the shape of 'conv_2d'; pass"),
    (lambda m: m.insert("t0", "CONV_2D"), "reads 1 tensors, and its kernel takes 3"),
    (lambda m: m.add("UNIQUE", []), "the type of 'unique' is open; pass dtype="),
    (lambda m: m.add("NEG", ["x"], outputs=[m.tensor("x")]), "a tensor of .* already"),
    (lambda m: m.add_input("y", "float31", [1]), "no type 'float31'; it has"),
    (lambda m: m.add_constant("y", np.array("text")), "no type for <U4 arrays"),
    (lambda m: m.add_constant("y", [300], dtype="int8"), "numbers that int8 cannot be"),
    (lambda m: m.add_constant("y", [0.5], dtype="int8"), "numbers that int8 cannot be"),
    (lambda m: m.add_constant("y", [np.nan], dtype="int32"), "that int32 cannot be"),
    (lambda m: m.add_constant("y", [8], dtype="int4"), "that int4 cannot be; round"),
    (lambda m: m.add_constant("y", [-1], dtype="uint4"), "that uint4 cannot be"),
    (lambda m: m.add_input("y", "int8", [-1, 4]), "sizes are whole numbers"),
    (lambda m: m.add_input("y", "int8", [2**31]), "cannot have the shape"),
    (lambda m: m.add_signature("serve"), "there is a signature 'serve' already"),
    (lambda m: m.add_signature("new", {"a": "t0"}), r"name each of \['x'\] once"),
    (lambda m: m.set_outputs(["nothing"]), "no tensor 'nothing'"),
    (lambda m: tflite.LiteFile().tensor("x"), "has no subgraph; begin one"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1][:20])
def test_refused(case):
    declare, reason = case
    m = chain("NEG")
    before = m.to_bytes()
    with pytest.raises(TFLiteError, match=reason):
        declare(m)
    assert m.to_bytes() == before


@pytest.mark.parametrize(
    ("kind", "option"), [("SOFTMAX", "beta"), ("LEAKY_RELU", "alpha")]
)
def test_options_that_would_be_0_are_asked_for(kind, option):
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [1, 4])
    before = len(m.graphs[0].ops)
    with pytest.raises(TFLiteError, match=f"needs the option '{option}'"):
        m.add(kind, [x])
    assert len(m.graphs[0].ops) == before


def test_signatures_follow_their_ends():
    m = chain("NEG", "EXP")
    m.metadata["TFLITE_METADATA"] = tflite.parts.Buffer(np.zeros(4, np.uint8))
    m.set_outputs(["t1", "t0"])
    assert [*m.signatures["serve"].outputs] == ["scores", "t0"]
    # It describes the ends that were.
    assert not m.metadata
    m.set_outputs("t0")
    m.add_input("mask", "bool", [4])
    signature = m.signatures["serve"]
    assert ([*signature.inputs], [*signature.outputs]) == (["image", "mask"], ["t0"])
    m.verify()
    with pytest.raises(TFLiteError, match="has an input 'image' already; pass a"):
        m.add_input("image", "bool", [4])
    assert len(m.graphs[0].inputs) == 2
    m.tensor("t1").name = ""
    with pytest.raises(
        TFLiteError, match=r"or give <LiteTensor output 0 of op 1 \(EXP"
    ):
        m.set_outputs(m.op(1).outputs)


def test_nameless_tensors_are_told_by_their_ops():
    m = chain("NEG", "EXP")
    m.strip(names=True)
    assert repr(m.op(0)) == "<LiteOp 0 (NEG)>"
    with pytest.raises(TFLiteError, match=r"output 0 of op 0 \(NEG\) is float32"):
        m.set_quantization(m.op(0).outputs[0], 0.5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.metadata.update({"\ud800": tflite.parts.Buffer()}),
        lambda m: m.metadata.update({3: tflite.parts.Buffer()}),
        lambda m: setattr(m, "description", "\ud800"),
        lambda m: setattr(m.signatures["serve"], "key", "\ud800"),
        lambda m: m.signatures["serve"].inputs.update({"\ud800": m.tensor("x")}),
        lambda m: setattr(m.op(0), "version", "two"),
        lambda m: setattr(m.op(0), "kind", "NEGATE"),
        lambda m: setattr(m.tensor("t0"), "dtype", "int99"),
        lambda m: setattr(
            m.graphs[0], "outputs", (tflite.LiteTensor("o", "int8", []),)
        ),
    ],
)
def test_fields_that_no_file_can_have_are_told_on_writing(spoil):
    m = chain("NEG", "EXP")
    spoil(m)
    with pytest.raises(GeutilError):
        m.to_bytes()
    assert chain("NEG", "EXP").to_bytes()
