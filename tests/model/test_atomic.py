from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from geutil.model.saving import written_atomically
from tests.processes import run_python


def tree(path):
    """Return the names and contents of all that is below a directory."""
    return {
        str(p.relative_to(path)): p.read_text() if p.is_file() else None
        for p in sorted(path.rglob("*"))
    }


def write_directory(new, text):
    (new / "sub").mkdir(parents=True)
    (new / "sub" / "file").write_text(text)


def test_what_is_written_replaces_what_is_there(tmp_path):
    path = tmp_path / "out"
    for text in ("one", "two"):
        with written_atomically(path, overwrite=text != "one") as new:
            new.write_text(text)
        assert tree(tmp_path) == {"out": text}
    # A directory replaces a file and another directory, and a file a directory.
    for text in ("three", "four"):
        with written_atomically(path, overwrite=True) as new:
            write_directory(new, text)
        assert tree(tmp_path) == {"out": None, "out/sub": None, "out/sub/file": text}
    with written_atomically(path, overwrite=True) as new:
        new.write_text("five")
    assert tree(tmp_path) == {"out": "five"}


def test_without_a_swap_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr("geutil.model.saving._exchanged", lambda *_: False)
    path = tmp_path / "out"
    write_directory(path, "old")
    with written_atomically(path, overwrite=True) as new:
        write_directory(new, "new")
    whole = {"out": None, "out/sub": None, "out/sub/file": "new"}
    assert tree(tmp_path) == whole
    # One that fails puts the old back.
    with (
        pytest.raises(FileNotFoundError),
        written_atomically(path, overwrite=True) as new,
    ):
        new.mkdir()
        new.rmdir()
    assert tree(tmp_path) == whole


KILLED = """
import os, pathlib, signal
from geutil.model.saving import written_atomically
path = pathlib.Path({!r})
with written_atomically(path, overwrite=True) as new:
    new.mkdir()
    (new / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path):
    """The hidden folder of a process that was killed while it wrote."""
    write_directory(tmp_path / "out", "old")
    done = run_python("-c", KILLED.format(str(tmp_path / "out")))
    assert done.returncode == -signal.SIGKILL
    assert tree(tmp_path / "out") == {"sub": None, "sub/file": "old"}
    (hidden,) = tmp_path.glob(".out.*")
    return hidden


def test_a_folder_that_was_never_locked_is_cleared_later(tmp_path):
    contents = (), ("out.lock.new",), ("out.lock.new", "out")
    cases = list(itertools.product(contents, (-1000.0, 1e6)))
    for number, (content, age) in enumerate(cases):
        hidden = tmp_path / f".out.abcdefg{number}"
        hidden.mkdir()
        for name in content:
            (hidden / name).write_text("")
        then = time.time() + age
        os.utime(hidden, (then, then))
    with written_atomically(tmp_path / "out", overwrite=False) as new:
        new.write_text("new")
    # What is in use, or holds something, stays.
    stays = [age > 0 or "out" in content for content, age in cases]
    found = [(tmp_path / f".out.abcdefg{i}").exists() for i in range(len(cases))]
    assert found == stays


def test_what_a_living_writer_or_a_crash_between_renames_left_stays(left, tmp_path):
    path = tmp_path / "out"
    (left / "out.old").write_text("old")
    with written_atomically(path, overwrite=True) as slow:
        slow.write_text("slow")
        with written_atomically(path, overwrite=True) as fast:
            fast.write_text("fast")
        assert path.read_text() == "fast"
    assert path.read_text() == "slow"
    assert sorted(p.name for p in tmp_path.iterdir()) == [left.name, "out"]
    assert (left / "out.old").read_text() == "old"
