"""Child processes end by themselves, at the limit or by a word, and none is left."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from geutil.child_processes import ForkedCall, watch


def hangs(pipe):
    os.write(pipe, b"begun")
    while True:
        signal.pause()


def writes(pipe, code):
    # More than a pipe holds.
    data = b"x" * (1 << 20)
    while data:
        data = data[os.write(pipe, data) :]
    return code


def fails(pipe):
    os.write(pipe, b"begun")
    raise ValueError("no")


def assert_gone(process):
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, 0)


@pytest.mark.parametrize("code", [0, 3])
def test_its_output_and_its_result_are_reported(code):
    process = ForkedCall(functools.partial(writes, code=code))
    assert watch(process, None, every=600) == "ended"
    assert (process.code, process.output) == (code, b"x" * (1 << 20))
    assert_gone(process)


def test_an_error_is_a_status(capfd):
    process = ForkedCall(fails)
    assert watch(process, None, every=600) == "ended"
    assert (process.code, process.output) == (1, b"begun")
    assert "ValueError: no" in capfd.readouterr().err
    assert_gone(process)


def test_a_process_that_hangs_is_ended_at_the_limit():
    process = ForkedCall(hangs)
    assert watch(process, 0.0, every=600) == "timed out"
    assert process.code == -signal.SIGKILL
    assert_gone(process)


def test_a_process_is_ended_by_a_word():
    process = ForkedCall(hangs)
    word = watch(process, None, 600, lambda: "stopped" if process.output else "")
    assert (word, process.output) == ("stopped", b"begun")
    assert process.code == -signal.SIGKILL
    assert_gone(process)


def test_output_does_not_put_the_limit_off(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    def goes_on(pipe):
        while True:
            os.write(pipe, b"x")

    process = ForkedCall(goes_on)
    assert watch(process, 100, every=600) == "timed out"
    assert_gone(process)


def test_a_signal_leaves_no_process():
    def interrupt():
        raise KeyboardInterrupt

    process = ForkedCall(hangs)
    with pytest.raises(KeyboardInterrupt):
        watch(process, None, 600, interrupt)
    assert process.code == -signal.SIGKILL
    assert_gone(process)


ORPHAN = """
import os
from geutil.child_processes import ForkedCall

def writes(pipe):
    while True:
        os.write(pipe, b"x" * (1 << 20))

ForkedCall(writes)
os._exit(0)
"""


def test_a_process_whose_first_one_died_does_not_wait_for_ever():
    # Its errors end with the last process that can write them.
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], stderr=subprocess.PIPE, check=True, timeout=60
    )
    assert b"BrokenPipeError" in done.stderr
