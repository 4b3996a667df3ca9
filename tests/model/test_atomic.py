from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from geutil.model import ModelError
from geutil.model.saving import written_atomically


def tree(path):
    """Return the names and contents of all that is below a directory."""
    return {
        str(p.relative_to(path)): p.read_text() if p.is_file() else None
        for p in sorted(path.rglob("*"))
    }


def write_directory(new, text):
    (new / "sub").mkdir(parents=True)
    (new / "sub" / "file").write_text(text)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_written_is_moved_in(tmp_path, kind):
    path = tmp_path / "out"
    for text in ("one", "two"):
        with written_atomically(path, overwrite=True) as new:
            new.write_text(text) if kind == "file" else write_directory(new, text)
        found = path.read_text() if kind == "file" else (path / "sub/file").read_text()
        assert found == text
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("before", ["file", "directory"])
def test_a_failure_leaves_the_old(tmp_path, before):
    path = tmp_path / "out"
    path.write_text("old") if before == "file" else write_directory(path, "old")
    whole = tree(tmp_path)
    with pytest.raises(KeyError), written_atomically(path, overwrite=True) as new:
        write_directory(new, "half")
        raise KeyError
    assert tree(tmp_path) == whole


def test_a_directory_replaces_a_file_and_the_other_way_round(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with written_atomically(path, overwrite=True) as new:
        write_directory(new, "new")
    assert tree(tmp_path) == {"out": None, "out/sub": None, "out/sub/file": "new"}
    with written_atomically(path, overwrite=True) as new:
        new.write_text("again")
    assert tree(tmp_path) == {"out": "again"}


def test_without_a_swap_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr("geutil.model.saving._exchanged", lambda *_: False)
    path = tmp_path / "out"
    write_directory(path, "old")
    with written_atomically(path, overwrite=True) as new:
        write_directory(new, "new")
    assert tree(tmp_path) == {"out": None, "out/sub": None, "out/sub/file": "new"}


def test_a_rename_that_fails_puts_the_old_back(tmp_path, monkeypatch):
    monkeypatch.setattr("geutil.model.saving._exchanged", lambda *_: False)
    path = tmp_path / "out"
    write_directory(path, "old")
    whole = tree(tmp_path)
    with (
        pytest.raises(FileNotFoundError),
        written_atomically(path, overwrite=True) as new,
    ):
        new.mkdir()
        new.rmdir()
    assert tree(tmp_path) == whole


def test_what_exists_is_refused(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with (
        pytest.raises(ModelError, match=r"out' exists; pass overwrite=True"),
        written_atomically(path, overwrite=False),
    ):
        pytest.fail("the block runs")
    assert tree(tmp_path) == {"out": "old"}


def test_a_dangling_link_exists(tmp_path):
    path = tmp_path / "out"
    path.symlink_to(tmp_path / "nowhere")
    with (
        pytest.raises(ModelError, match="exists"),
        written_atomically(path, overwrite=False),
    ):
        pytest.fail("the block runs")


def test_a_missing_parent_is_refused(tmp_path):
    with (
        pytest.raises(ModelError, match=r"no directory '.*missing'"),
        written_atomically(tmp_path / "missing" / "out", overwrite=False),
    ):
        pytest.fail("the block runs")


KILLED = """
import os, pathlib, signal, sys
from geutil.model.saving import written_atomically
path = pathlib.Path(sys.argv[1])
with written_atomically(path, overwrite=True) as new:
    new.mkdir()
    (new / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What there is after a process was killed that wrote to an old directory."""
    folder = tmp_path_factory.mktemp("killed")
    write_directory(folder / "out", "old")
    script = [sys.executable, "-c", KILLED, str(folder / "out")]
    done = subprocess.run(script, check=False)
    assert done.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def left(killed, tmp_path):
    """The hidden folder that it left, copied for one test."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    (hidden,) = tmp_path.glob(".out.*")
    return hidden


def test_a_killed_process_leaves_the_old(killed):
    assert tree(killed / "out") == {"sub": None, "sub/file": "old"}


def test_the_next_writer_clears_what_a_killed_process_left(left, tmp_path):
    with written_atomically(tmp_path / "out", overwrite=True) as new:
        new.write_text("new")
    assert tree(tmp_path) == {"out": "new"}


@pytest.mark.parametrize("content", [(), ("out.lock.new",), ("out.lock.new", "out")])
@pytest.mark.parametrize("age", [0.0, 1000.0])
def test_a_folder_that_was_never_locked_is_cleared_later(tmp_path, content, age):
    hidden = tmp_path / ".out.abcdefgh"
    hidden.mkdir()
    for name in content:
        (hidden / name).write_text("")
    then = time.time() - age
    os.utime(hidden, (then, then))
    with written_atomically(tmp_path / "out", overwrite=False) as new:
        new.write_text("new")
    # What is in use, or holds something, stays.
    assert hidden.exists() == (not age or "out" in content)


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
