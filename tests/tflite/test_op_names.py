"""Names changed: of ends in signatures and as tensors, of tensors, of signatures."""

import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from tests.interpreter import new_interpreter
from tests.tflite.declared import chain, diamond
from tests.tflite_files import int8, two_signatures


def told(m):
    """Return the names that the interpreter tells: tensors' and signatures'."""
    interpreter = new_interpreter(m.to_bytes())
    ends = interpreter.get_input_details(), interpreter.get_output_details()
    names = [[end["name"] for end in side] for side in ends]
    return names, interpreter.get_signature_list()


def test_ends_are_renamed_in_both_places():
    m = tflite.open(int8().blob)
    (key,) = m.signatures
    (old_input,), (old_output,) = m.signatures[key].inputs, m.signatures[key].outputs
    m.rename({old_input: "photo"}, {old_output: "scores"}, signatures={key: "predict"})
    names, signatures = told(m)
    assert names == [["photo"], ["scores"]]
    assert signatures == {"predict": {"inputs": ["photo"], "outputs": ["scores"]}}
    assert m.signatures["predict"].key == "predict"


def test_tensors_take_the_names_of_the_signature():
    m = tflite.open(two_signatures().blob)
    m.rename(from_signature=True)
    for signature in m.signatures.values():
        for ends in (signature.inputs, signature.outputs):
            assert {name: t.name for name, t in ends.items()} == {n: n for n in ends}
    one = tflite.open(two_signatures().blob)
    one.rename(from_signature="decode")
    (end,) = one.signatures["encode"].inputs.values()
    assert end.name != "x"
    (end,) = one.signatures["decode"].inputs.values()
    assert end.name == "code"


def test_tensors_change_names_and_can_swap_them():
    m = chain("NEG", "EXP", "ABS")
    first, second = m.tensor("t0"), m.tensor("t1")
    m.rename(tensors={"t0": "t1", "t1": "t0"})
    assert (first.name, second.name) == ("t1", "t0")
    # By the name that the tensor has, where no signature says another.
    m.rename({"x": "y"})
    assert m.signatures["serve"].inputs == {"y": m.tensor("y")}


def test_signatures_that_cross_names_follow_the_tensor():
    m = tflite.LiteFile()
    one, two = (m.add_input(name, "float32", [2]) for name in ("one", "two"))
    m.set_outputs(m.add("SUB", [one, two], name="d"))
    first = m.add_signature("first", {"x": one, "y": two})
    second = m.add_signature("second", {"y": one, "x": two})
    m.rename({"one": "left"})
    assert first.inputs == {"left": one, "y": two}
    assert second.inputs == {"left": one, "x": two}


def test_of_two_names_of_a_tensor_the_one_that_is_passed_changes():
    m = chain("NEG")
    signature = m.signatures["serve"]
    signature.outputs = {"a": m.tensor("t0"), "b": m.tensor("t0")}
    m.rename({}, {"b": "c"})
    assert [*signature.outputs] == ["a", "c"]


def test_names_in_each_subgraph_stay_different():
    m = chain("NEG")
    second = m.add_graph("second")
    x = m.add_input("in", "float32", [2], graph=second)
    y = m.add("NEG", m.add("NEG", x, name="y", graph=second), graph=second)
    m.set_outputs(y, graph=second)
    m.add_signature("other", None, {"y": y}, graph=second)
    with pytest.raises(TFLiteError, match="would both be called 'y'"):
        m.rename(from_signature=True)
    assert [t.name for t in second.tensors] == ["in", "y", "neg"]


REFUSED = [
    ({"inputs": {"y": "z"}}, r"'y' names 0 inputs of .*; they are called \['x'\]"),
    ({"inputs": {"x": "t0"}}, "would both be called 't0'; rename the other"),
    ({"tensors": {"t0": "same", "t1": "same"}}, "would both be called 'same'"),
    ({"tensors": {"t0": ""}}, r"needs a name; strip\(names=True\)"),
    ({"signatures": {"run": "serve"}}, r"no signature 'run'; there are \['serve'\]"),
    ({"signatures": {"serve": ""}}, "signatures need different names"),
    ({"from_signature": "run"}, "no signature 'run'"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case[0]))
def test_refused(case):
    arguments, reason = case
    m = chain("NEG", "EXP")
    before = m.to_bytes()
    with pytest.raises(TFLiteError, match=reason):
        m.rename(**arguments)
    assert m.to_bytes() == before
    with pytest.raises(TFLiteError, match="no signature whose names"):
        diamond().rename(from_signature=True)
