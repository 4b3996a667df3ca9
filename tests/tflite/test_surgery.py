"""Edits in place, against files that were declared as the edited ones shall be."""

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from tests.tflite.declared import buffer_of, chain, counter, diamond
from tests.tflite.running import runs
from tests.tflite_files import SAMPLES

X = np.linspace(-2, 8, 8, dtype=np.float32).reshape(2, 4)


def computed(m):
    """Return the outputs of a file whose invariants hold, in order."""
    m.verify()
    (run,) = runs(m.to_bytes(), [{m.graphs[0].inputs[0].name: X}])
    return [*run.outputs.values()]


def kinds(m):
    return [op.kind for op in m.graphs[0].ops]


def test_readers_are_rerouted():
    m = chain("NEG", "EXP", "ABS")
    m.reroute("t0", "x")
    np.testing.assert_allclose(computed(m)[0], np.exp(X), rtol=1e-6)
    # An op that nothing reads stays until it is stripped.
    assert kinds(m) == ["NEG", "EXP", "ABS"]
    m.strip()
    assert kinds(m) == ["EXP", "ABS"]


def test_some_readers_are_rerouted():
    m = chain("ABS", "NEG")
    m.set_outputs([m.add("ADD", ["t0", "t1"], name="sum")])
    m.signatures.clear()
    m.reroute("t0", "x", consumers="sum")
    np.testing.assert_array_equal(computed(m)[0], X - np.abs(X))
    with pytest.raises(TFLiteError, match=r"NEG -> 't1'> does not read .*'x'"):
        m.reroute("x", "t0", consumers="t1")


def test_an_output_is_rerouted_in_signatures_too():
    m = chain("NEG", "EXP")
    m.reroute("t1", "t0")
    assert [t.name for t in m.graphs[0].outputs] == ["t0"]
    assert m.signatures["serve"].outputs == {"scores": m.tensor("t0")}
    np.testing.assert_array_equal(computed(m)[0], -X)


def test_ops_move_behind_those_they_read():
    m = chain("NEG", "EXP")
    late = m.add("ABS", ["x"], name="late")
    m.reroute("t0", late)
    assert kinds(m) == ["NEG", "ABS", "EXP"]
    np.testing.assert_allclose(computed(m)[0], np.exp(np.abs(X)), rtol=1e-6)


def test_readers_are_swapped():
    m = chain("ABS", "NEG")
    m.set_outputs([m.add("SUB", ["t0", "t1"], name="difference")])
    m.signatures.clear()
    before = computed(m)[0]
    other = m.add("SQUARE", ["x"], name="square")
    m.set_outputs(["difference", m.add("FLOOR", [other], name="floor")])
    m.swap("t0", "square")
    a, b = computed(m)
    np.testing.assert_array_equal(a, 2 * np.square(X))
    np.testing.assert_array_equal(b, np.floor(np.abs(X)))
    np.testing.assert_array_equal(before, 2 * np.abs(X))


def test_a_bypassed_op_is_gone():
    m = chain("NEG", "EXP", "ABS")
    m.bypass("t1")
    assert kinds(m) == ["NEG", "ABS"]
    assert not m.find_tensors(name="t1")
    np.testing.assert_array_equal(computed(m)[0], np.abs(X))
    m = chain("NEG")
    y = m.add("ADD", ["x", "t0"], name="y")
    m.set_outputs([y])
    m.signatures.clear()
    with pytest.raises(TFLiteError, match="reads 2 tensors that are no constants"):
        m.bypass("y")
    m.bypass("y", "t0")
    np.testing.assert_array_equal(computed(m)[0], -X)


def test_ops_that_nothing_reads_are_removed():
    m = chain("NEG", "EXP")
    m.add("ABS", ["x"], name="unread")
    m.remove("unread")
    assert kinds(m) == ["NEG", "EXP"]
    with pytest.raises(TFLiteError, match=r"EXP -> 't1'> still reads .*'t0'"):
        m.remove("t0")
    with pytest.raises(TFLiteError, match=r"'t1'.* is an output of the file"):
        m.remove(["t0", "t1"])


def test_an_op_is_inserted_behind_a_tensor():
    m = chain("NEG", "EXP")
    new = m.insert("t0", "RELU")
    assert (new.name, kinds(m)) == ("t0/relu", ["NEG", "RELU", "EXP"])
    np.testing.assert_allclose(computed(m)[0], np.exp(np.maximum(-X, 0)), rtol=1e-6)
    m = chain("NEG")
    m.insert("t0", "LEAKY_RELU", alpha=0.5, name="leaky")
    assert m.signatures["serve"].outputs["scores"].name == "leaky"
    np.testing.assert_allclose(computed(m)[0], np.where(-X > 0, -X, -X / 2), rtol=1e-6)


def test_an_op_of_several_inputs_is_inserted():
    m = chain("NEG", "EXP")
    two = m.add_constant("two", np.float32(2))
    made = tflite.LiteTensor("doubled", "float32", (2, 4))
    m.insert("t0", tflite.LiteOp("MUL", [m.tensor("t0"), two], [made]))
    np.testing.assert_allclose(computed(m)[0], np.exp(-2 * X), rtol=1e-6)
    with pytest.raises(TFLiteError, match="is in a subgraph already"):
        m.insert("t0", m.op("doubled"))


def test_a_file_is_inserted():
    m = chain("NEG", "EXP")
    m.insert("t0", chain("ABS", "SQUARE"))
    assert kinds(m) == ["NEG", "ABS", "SQUARE", "EXP"]
    assert len({t.name for t in m.graphs[0].tensors}) == 5
    np.testing.assert_allclose(computed(m)[0], np.exp(X * X), rtol=1e-6)
    # One of other sizes does not fit, and the message says so.
    with pytest.raises(TFLiteError, match=r"shapes are \(2, 4\) and \(1, 4\)"):
        m.insert("t0", chain("ABS", shape=(1, 4)))


def test_ops_are_replaced_by_another_kind():
    m = chain("RELU6", "EXP", "RELU6")
    new = m.replace(m.find("RELU6"), "LEAKY_RELU", alpha=0.25)
    assert [op.kind for op in new] == ["LEAKY_RELU"] * 2
    assert kinds(m) == ["LEAKY_RELU", "EXP", "LEAKY_RELU"]
    leaky = np.exp(np.where(X > 0, X, X / 4))
    np.testing.assert_allclose(computed(m)[0], leaky, rtol=1e-6)
    with pytest.raises(TFLiteError, match="LEAKY_RELU has no option 'beta'"):
        m.replace("t0", "LEAKY_RELU", beta=1)
    with pytest.raises(TFLiteError, match="no op of the kind 'SWISH'"):
        m.replace("t0", "SWISH")


def test_a_part_is_replaced_by_an_op():
    m = chain("ABS", "SQRT", "NEG")
    fused = tflite.LiteOp("SQUARE", [m.tensor("x")], [m.tensor("t1")])
    m.replace(["t0", "t1"], fused)
    assert kinds(m) == ["SQUARE", "NEG"]
    np.testing.assert_array_equal(computed(m)[0], -X * X)
    other = tflite.LiteTensor("other", "float32", (2, 4))
    m.replace("t1", tflite.LiteOp("ABS", [m.tensor("x")], [other]))
    np.testing.assert_array_equal(computed(m)[0], -np.abs(X))
    wrong = tflite.LiteTensor("wrong", "int8", (2, 4))
    with pytest.raises(TFLiteError, match="dtypes are int8 and float32; insert"):
        m.replace("other", tflite.LiteOp("ABS", [m.tensor("x")], [wrong]))


def test_a_part_is_replaced_by_a_file_with_the_subgraphs_it_calls():
    flow = tflite.open(SAMPLES["flow"]().blob)
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [3, 4])
    n = m.add_input("n", "int32", [])
    m.add_input("unused", "float32", [1])
    named = {"x": m.add("NEG", [x], name="before"), "n": n}
    ends = [
        named[t.name.split("_")[-1].partition(":")[0]] for t in flow.graphs[0].inputs
    ]
    ignored = m.add(
        "ADD",
        [m.add("CAST", [n], dtype="float32", out_data_type="FLOAT32"), "before"],
        name="old",
    )
    m.set_outputs([m.add("ABS", [ignored], name="y")])
    m.replace("old", flow, inputs=ends)
    m.strip()
    m.verify()
    assert len(m.graphs) == len(flow.graphs)
    x = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    for count in (1, 4):
        feed = {"x": x, "n": np.int32(count), "unused": np.zeros(1, np.float32)}
        (got,) = runs(m.to_bytes(), [feed])
        values = {"x": -x, "n": np.int32(count)}
        there = {
            t.name: values[t.name.split("_")[-1].partition(":")[0]]
            for t in flow.graphs[0].inputs
        }
        (want,) = runs(SAMPLES["flow"]().blob, [there])
        np.testing.assert_array_equal(
            got.outputs["y"], np.abs(next(iter(want.outputs.values())))
        )


def test_a_part_keeps_its_variables_to_itself():
    m = counter()
    m.insert("squared", counter())
    m.verify()
    feeds = [{"x": np.float32([i, 1, -2])} for i in range(3)]
    alone = runs(counter().to_bytes(), feeds)
    behind = runs(counter().to_bytes(), [{"x": r.outputs["squared"]} for r in alone])
    for made, wanted in zip(runs(m.to_bytes(), feeds), behind, strict=True):
        (value,) = made.outputs.values()
        np.testing.assert_array_equal(value, wanted.outputs["squared"])


def test_tensors_are_exposed():
    m = chain("NEG", "EXP", "ABS")
    before = computed(m)[0]
    m.expose({"negative": "t0"})
    m.expose(["t1", "t0"])
    assert [*m.signatures["serve"].outputs] == ["scores", "negative", "t1"]
    scores, negative, t1 = computed(m)
    np.testing.assert_array_equal(scores, before)
    np.testing.assert_array_equal(negative, -X)
    with pytest.raises(TFLiteError, match="has an output 'scores' already"):
        m.expose({"scores": "x"})
    with pytest.raises(TFLiteError, match="is a handle and cannot be an output"):
        counter().expose("handle")


def unsigned():
    m = chain("NEG", "EXP")
    m.signatures.clear()
    return m


def test_edits_in_a_subgraph_that_is_called():
    m = tflite.open(SAMPLES["flow"]().blob)
    body = next(
        g for g in m.graphs[1:] if m.find("RELU", graph=g) or m.find("TANH", graph=g)
    )
    (op,) = m.find(["RELU", "TANH"], graph=body)
    m.replace(op, "ABS" if op.kind == "RELU" else "NEG", graph=body)
    m.verify()
    assert not m.find(op.kind, graph=body)
    with pytest.raises(TFLiteError, match="is no op of"):
        m.bypass(m.find(graph=body)[0])


QUANTIZED = tflite.Quantization((0.5,), (3,))


def other(dtype="float32", shape=(2, 4), quantization=None):
    m = chain("NEG", "EXP")
    m.add_input("other", dtype, shape, quantization=quantization)
    m.signatures.clear()
    return m


def circle():
    m = chain("NEG", "EXP", "ABS")
    return m, lambda: m.reroute("x", "t1", consumers="t0")


def of_metadata():
    m = chain("NEG", "EXP")
    m.metadata["OfflineMemoryAllocation"] = buffer_of(bytes(4))
    return m, lambda: m.bypass("t0")


def state_behind():
    m = counter()
    return m, lambda: m.reroute("handle", "squared")


def other_constant():
    m = chain("NEG")
    sizes = [m.add_constant(n, np.int32(v)) for n, v in (("a", [8]), ("b", [9]))]
    m.set_outputs(m.add("RESHAPE", ["t0", sizes[0]], name="flat"))
    m.signatures.clear()
    return m, lambda: m.reroute("a", "b")


def rerouted(m):
    return m, lambda: m.reroute("t0", "other")


REFUSED = [
    (lambda: rerouted(other("int32")), "dtypes are int32 and float32; insert"),
    (lambda: rerouted(other(shape=(4, 2))), "shapes are .* insert a RESHAPE"),
    (lambda: rerouted(other(quantization=QUANTIZED)), "insert a QUANTIZE"),
    (other_constant, "cannot take its inputs: 8 values do not fit"),
    (circle, "would have to run before itself"),
    (of_metadata, r"strip\(metadata=\['OfflineMemoryAllocation'\]\)"),
    (state_behind, "dtypes are float32 and resource"),
    (lambda: (m := diamond(), lambda: m.remove("stem")), "still reads"),
    (lambda: (m := diamond(), lambda: m.bypass("left")), "shapes are"),
    (lambda: (m := diamond(), lambda: m.insert("stem", diamond())), "shapes are"),
    (
        lambda: (m := diamond(), lambda: m.replace(["left", "right"], chain("NEG"))),
        "has 1 inputs, and they would have to fit",
    ),
    (
        lambda: (
            m := diamond(),
            lambda: m.insert("stem", "CAST", out_data_type=1, typo=2),
        ),
        "no option 'typo'",
    ),
    (lambda: (m := diamond(), lambda: m.expose("absent")), "no tensor 'absent'"),
    (lambda: (m := unsigned(), lambda: m.expose({"f": "t0"})), "has none; pass the"),
    (
        lambda: (m := chain("NEG"), lambda: m.expose({"f": "t0"})),
        "is an output already, and signature 'serve' does not call it 'f'",
    ),
    (
        lambda: (m := chain("NEG", "EXP"), lambda: m.expose({"f": "t0", "g": "t0"})),
        "cannot be called 'f' and 'g'",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1][:20])
def test_a_refused_edit_leaves_the_file_as_it_was(case):
    make, reason = case
    m, edit = make()
    before = m.to_bytes()
    with pytest.raises(TFLiteError, match=reason):
        edit()
    assert m.to_bytes() == before
