"""Parts of files compute bit for bit what the whole computes of them."""

import functools

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from tests.tflite.declared import chain, counter, diamond
from tests.tflite.running import runs
from tests.tflite_files import SAMPLES, two_signatures

RUN = sorted({*SAMPLES} - {"flex"})


@functools.cache
def whole(name):
    """Return a file, its runs, and the places of computed tensors in its main graph."""
    blob = SAMPLES[name]().blob
    m = tflite.open(blob)
    main = m.graphs[0]
    # A loop does not allocate what nothing reads of it.
    read = {t for t in main.tensors if t.readers} | {*main.outputs}
    places = [i for i, t in enumerate(main.tensors) if t.makers and t in read]
    return blob, runs(blob, kept=places)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


@pytest.mark.parametrize("name", RUN)
def test_a_cut_gives_what_the_whole_computes(name):
    blob, expected = whole(name)
    m = tflite.open(blob)
    main = m.graphs[0]
    for i, t in enumerate(main.tensors):
        if i not in expected[0].kept or i % 3:
            continue
        part = m.cut(outputs=t)
        part.verify()
        found = runs(part.to_bytes(), [run.inputs for run in expected])
        assert all(
            same(*got.outputs.values(), run.kept[i])
            for got, run in zip(found, expected, strict=True)
        )
    assert m.to_bytes() == tflite.open(blob).to_bytes()


@pytest.mark.parametrize("name", ["floats", "int8", "attention"])
def test_a_cut_takes_what_the_whole_computes(name):
    blob, expected = whole(name)
    m = tflite.open(blob)
    main = m.graphs[0]
    tried = 0
    for i, t in enumerate(main.tensors):
        try:
            part = m.cut(inputs=t)
        except TFLiteError:
            # A path around the tensor: its message is tested below.
            continue
        if i not in expected[0].kept:
            continue
        tried += 1
        found = runs(part.to_bytes(), [{t.name: run.kept[i]} for run in expected])
        assert all(
            same(*got.outputs.values(), *run.outputs.values())
            for got, run in zip(found, expected, strict=True)
        )
    assert tried > 4


@pytest.mark.parametrize("name", RUN)
def test_the_halves_of_a_split_compute_what_the_whole_does(name):
    blob, expected = whole(name)
    m = tflite.open(blob)
    done = 0
    for op in m.graphs[0].ops[::2]:
        try:
            first, second = m.split(op.outputs)
        except TFLiteError as error:
            assert "nothing is split" in str(error) or "split at these" in str(error)
            continue
        done += 1
        first.verify()
        second.verify()
        feeds = [run.inputs for run in expected]
        ahead = runs(first.to_bytes(), feeds)
        given = [{**f, **run.outputs} for f, run in zip(feeds, ahead, strict=True)]
        behind = runs(second.to_bytes(), given)
        for one, other, run in zip(ahead, behind, expected, strict=True):
            both = {**one.outputs, **other.outputs}
            assert all(same(both[end], v) for end, v in run.outputs.items())
    assert done or name == "two_signatures"


def test_a_split_at_all_that_crosses():
    m = diamond()
    with pytest.raises(TFLiteError, match=r"still reads 'stem'.* split at these, too"):
        m.split("left")
    first, second = m.split(["left", "stem"])
    # The weight that is computed of a constant is where it is read.
    assert [op.kind for op in first.ops] == ["ABS", "FULLY_CONNECTED"]
    assert [op.kind for op in second.ops] == ["DEQUANTIZE", "FULLY_CONNECTED", "ADD"]
    with pytest.raises(TFLiteError, match="no op behind 'sum'"):
        m.split("sum")
    with pytest.raises(TFLiteError, match="no op ahead of 'x'"):
        m.split("x")


def test_ends_of_a_cut_are_all_needed():
    m = diamond()
    with pytest.raises(TFLiteError, match="still need <LiteTensor 'x'"):
        m.cut(inputs="left")
    with pytest.raises(TFLiteError, match="do not need <LiteTensor 'right'"):
        m.cut(inputs=["stem", "right"], outputs="left")
    with pytest.raises(TFLiteError, match="no tensor 'steam'; near it are 'stem'"):
        m.cut("steam")
    with pytest.raises(TFLiteError, match="at least one output"):
        m.cut(outputs=[])
    # A weight can be an input; the part is then given its values.
    part = m.cut(inputs=["stem", "w"], outputs="left")
    (w,) = (t for t in part.graphs[0].inputs if t.name == "w")
    assert w.value is None
    assert m.tensor("w").value is not None


def test_ops_are_cut_with_the_constants_computed_for_them():
    m = diamond()
    part = m.cut(ops="right")
    assert [op.kind for op in part.ops] == ["DEQUANTIZE", "FULLY_CONNECTED"]
    assert [t.name for t in part.graphs[0].inputs] == ["stem"]
    by_range = m.cut(ops=range(3, 5))
    assert [t.name for t in by_range.graphs[0].inputs] == ["stem", "left"]
    assert m.cut(ops=slice(3, 5)).to_bytes() == by_range.to_bytes()
    with pytest.raises(TFLiteError, match=r"no op of .* is selected"):
        m.cut(ops=slice(9, 12))
    with pytest.raises(TFLiteError, match="there is no op 7"):
        m.cut(ops=range(7, 8))


def test_clusters_are_subgraphs_with_signatures():
    m = diamond()
    parts = m.clusters([["stem", "left"], ["right", "sum"]], ["stem", "head"])
    parts.verify()
    assert [[*s.inputs] for s in parts.signatures.values()] == [["x"], ["stem", "left"]]
    assert [[*s.outputs] for s in parts.signatures.values()] == [
        ["stem", "left"],
        ["sum"],
    ]
    # Each alone is the file that a cut gives.
    alone = parts.keep_signatures("head")
    assert [op.kind for op in alone.ops] == ["DEQUANTIZE", "FULLY_CONNECTED", "ADD"]
    with pytest.raises(TFLiteError, match="2 clusters cannot be called"):
        m.clusters([["stem"], ["left"]], ["a", "a"])


def test_variables_come_along_with_what_writes_them():
    m = counter()
    feeds = [{"x": np.float32([1, 2, 3])}] * 3
    expected = runs(m.to_bytes(), feeds)
    part = m.cut(outputs="new")
    assert len(part.graphs) == 2
    sums = [run.outputs["new"] for run in runs(part.to_bytes(), feeds)]
    assert [run.outputs["squared"].tolist() for run in expected] == [
        (total * total).tolist() for total in sums
    ]
    # Behind the sum there is no variable, and no subgraph that sets one.
    assert [op.kind for op in m.cut("new").ops] == ["MUL"]
    assert len(m.cut("new").graphs) == 1
    first, second = m.split("new")
    ahead = runs(first.to_bytes(), feeds)
    behind = runs(second.to_bytes(), [run.outputs for run in ahead])
    for run, got in zip(expected, behind, strict=True):
        assert same(got.outputs["squared"], run.outputs["squared"])
    with pytest.raises(TFLiteError, match=r"LiteOp ADD .* add it to ops="):
        m.cut(ops="old")


def test_a_state_stays_on_one_side_of_a_split():
    m = counter()
    handle = m.tensor("handle", graph=0)
    late = m.add("READ_VARIABLE", [handle], name="late", shape=[3], dtype="float32")
    m.set_outputs([m.add("ADD", ["squared", late], name="y")])
    with pytest.raises(TFLiteError, match="a state that is needed ahead of 'squared'"):
        m.split("squared")


def test_a_signature_is_kept_with_its_subgraph():
    m = tflite.open(two_signatures().blob)
    kept = m.keep_signatures("encode")
    assert kept.signatures.keys() == {"encode"}
    kept.verify()
    assert len(kept.graphs) == 1 < len(m.graphs)
    x = np.eye(3, dtype=np.float32)
    signature = m.signatures["encode"]
    (end,) = signature.inputs.values()
    (run,) = runs(kept.to_bytes(), [{end.name: x[:1]}])
    # The codes are all one.
    assert next(iter(run.outputs.values())).tolist() == [[1.0] * 4]
    with pytest.raises(TFLiteError, match="no signature 'embed'; there are"):
        m.keep_signatures("embed")


def test_subgraphs_are_kept_with_those_that_they_call():
    m = tflite.open(SAMPLES["flow"]().blob)
    assert len(m.keep_subgraphs(0).graphs) == len(m.graphs)
    body = m.graphs[1]
    kept = m.keep_subgraphs(body)
    kept.verify()
    assert [g.name for g in kept.graphs] == [body.name]
    for graph in (m.graphs[-1], len(m.graphs) - 1, m.graphs[-1].name):
        assert m.keep_subgraphs(graph).graphs[0].name == m.graphs[-1].name
    with pytest.raises(TFLiteError, match="no subgraph is selected"):
        m.keep_subgraphs()
    with pytest.raises(TFLiteError, match="is the name of 0 subgraphs"):
        m.keep_subgraphs("elsewhere")


def test_ends_get_names_in_signatures():
    m = chain("NEG", "EXP", "ABS")
    part = m.cut({"hidden": "t0"}, {"last": "t1"})
    signature = part.signatures["serve"]
    assert ([*signature.inputs], [*signature.outputs]) == (["hidden"], ["last"])
    # Those of before keep theirs, others are called after their tensors.
    signature = m.cut("t1").signatures["serve"]
    assert ([*signature.inputs], [*signature.outputs]) == (["t1"], ["scores"])
    with pytest.raises(TFLiteError, match="would both be called 't0'"):
        m.cut(outputs={"t0": "t1", "": "t0"})
    plain = diamond()
    assert not plain.cut("stem").signatures
    assert [*plain.cut({"a": "stem"}).signatures] == ["serving_default"]


def test_metadata_that_no_longer_fit():
    m = chain("NEG", "EXP")
    note = tflite.parts.Buffer(np.zeros(4, np.uint8))
    m.metadata = {"TFLITE_METADATA": note, "other": note}
    assert [*m.cut().metadata] == ["TFLITE_METADATA", "other"]
    assert [*m.cut("t0").metadata] == ["other"]
    for name in ("model_control_dependencies", "OfflineMemoryAllocation"):
        m.metadata = {name: note}
        for edit in (
            lambda: m.cut("t0"),
            lambda: m.split("t0"),
            lambda: m.clusters([range(1)]),
            lambda: m.keep_subgraphs(0),
        ):
            with pytest.raises(TFLiteError, match=rf"strip\(metadata=\['{name}'\]\)"):
                edit()
        m.strip(metadata=[name])
        m.cut("t0")


def test_outputs_that_a_file_gives_twice_survive_a_split():
    m = chain("NEG", "EXP")
    m.signatures["serve"].outputs["again"] = m.tensor("t1")
    m.graphs[0].outputs *= 2
    first, second = m.split("t0")
    assert [t.name for t in second.graphs[0].outputs] == ["t1", "t1"]
    assert [*second.signatures["serve"].outputs] == ["scores", "again"]
    m.graphs[0].outputs = (m.tensor("t0"), m.tensor("t0"), m.tensor("t1"))
    first, second = m.split("t0")
    assert [t.name for t in first.graphs[0].outputs] == ["t0", "t0"]
    assert [t.name for t in second.graphs[0].outputs] == ["t1"]
