"""Files of data are compared with a network's inputs by their headers alone."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from geutil.data_files import FileBatches, Header, Wanted, misfit
from tests.model.refusal_tables import not_refused

IMAGES = {"image": Wanted("float32", (None, 4, 4, 3))}
X = np.arange(5 * 48, dtype=np.float32).reshape(5, 4, 4, 3)


def of(path, inputs=None, size=2):
    return FileBatches(path, size, ValueError, IMAGES if inputs is None else inputs)


def test_the_only_array_needs_no_key_and_may_be_a_npy_file(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "x.npz", x=X)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "0.npy", X[:3])
    np.savez(tmp_path / "folder" / "1.npz", x=X[3:])
    for name, sizes in (("x.npy", [2, 2, 1]), ("x.npz", [2, 2, 1]), ("folder", [3, 2])):
        batches = of(tmp_path / name)
        batches.check()
        found = [batch["image"] for batch in batches]
        assert [len(part) for part in found] == sizes == [len(p) for p in found]
        assert len(batches) == len(sizes)
        np.testing.assert_array_equal(np.concatenate(found), X)


def test_arrays_for_no_input_are_left_out_and_bytes_are_told(tmp_path, caplog):
    np.savez(tmp_path / "x.npz", image=X.astype(np.uint8), label=np.arange(5))
    with caplog.at_level(logging.WARNING, "geutil"):
        of(tmp_path / "x.npz").check()
    left_out, scaled = [record.getMessage() for record in caplog.records]
    assert "left out 'label'" in left_out
    assert "takes floats and is given uint8: 0 to 255 is used as it is" in scaled
    assert [set(batch) for batch in of(tmp_path / "x.npz")] == [{"image"}] * 3


def test_no_values_are_read_to_compare(tmp_path):
    # Of a short entry zipfile reads the whole with the header.
    np.savez(tmp_path / "x.npz", image=np.tile(X, [100, 1, 1, 1]))
    whole = (tmp_path / "x.npz").read_bytes()
    at = whole.rindex(X[4].tobytes())
    (tmp_path / "x.npz").write_bytes(whole[:at] + bytes(192) + whole[at + 192 :])
    of(tmp_path / "x.npz").check()
    with pytest.raises(ValueError, match="Bad CRC-32"):
        list(of(tmp_path / "x.npz"))


def test_files_that_do_not_fit_are_refused_with_the_remedy(tmp_path):
    two = {"a": Wanted("float32", (None, 2)), "b": Wanted("int32", (None, 3))}
    a, b = np.zeros([4, 2], np.float32), np.zeros([4, 3], np.int32)
    cases = []
    for name, arrays, inputs, message in (
        (
            "keys",
            {"p": b, "q": a},
            two,
            r"\{'a': arrays\['q'\], 'b': arrays\['p'\]\}\)",
        ),
        ("samples", {"a": a, "b": b[:3]}, two, "different numbers of samples"),
        ("axes", {"x": X.transpose(0, 3, 1, 2)}, None, r"numpy\.moveaxis\(x, 1, -1\)"),
        ("one", {"x": X[0]}, None, r"with x\[None\]"),
        ("shape", {"x": X[:, :3]}, None, r"the shape \[5,3,4,3\]"),
        ("fractions", {"a": a, "b": b + 0.5}, two, r"x\.astype\('int32'\)"),
        ("text", {"x": np.full(X.shape, "a")}, None, "takes float32; convert it"),
        ("objects", {"x": np.array([{}])}, None, "objects of Python"),
        ("empty", {"x": X[:0]}, None, "has no sample"),
        ("none", {}, None, "is empty: it holds no array"),
    ):
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        cases.append((name, of(path, inputs).check, message))
    np.save(tmp_path / "a.npy", a)
    one = r"\{'a': numpy\.load\('.*a\.npy'\), 'b': \.\.\.\}\)"
    cases.append(("one of two", of(tmp_path / "a.npy", two).check, one))
    (tmp_path / "no.npz").write_text("no")
    (tmp_path / "folder").mkdir()
    cases += [
        ("no archive", of(tmp_path / "no.npz").check, "File is not a zip file"),
        ("no file", of(tmp_path / "folder").check, r"no \.npz or \.npy file in"),
    ]
    assert not_refused(ValueError, cases) == {}


def test_a_batch_of_its_own_is_as_large_as_a_network_takes():
    one = Wanted("float32", (1, 2))
    header = Header(np.dtype("float32"), (3, 2))
    assert misfit(header, one, whole=False) == ""
    assert "takes [1,2]" in misfit(header, one, whole=True)
    assert misfit(header, Wanted("float32", None), whole=True) == ""
