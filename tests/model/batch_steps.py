"""Functions that processes of a batch import: steps of pipelines, and data."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

FAULTS = ("abort", "hang", "refuse")


def fault(model):
    """Do what the name of an output says."""
    from geutil.errors import ModelError

    (name,) = model.outputs
    if name == "abort":
        os.abort()
    if name == "hang":
        time.sleep(600)
    if name == "refuse":
        raise ModelError("it is refused")


def kill_worker(model, marker):
    """Kill the worker that watches this process, once; go on in the second try."""
    (name,) = model.outputs
    place = Path(marker)
    if name != "kill" or place.exists():
        return
    place.write_text(f"{os.getpid()} {os.getppid()}")
    os.kill(os.getppid(), signal.SIGKILL)
    # The end of the worker ends this process, too.
    time.sleep(600)


def note_and_hang(model, marker):
    """Write down which process this is, and hang."""
    Path(marker).write_text(str(os.getpid()))
    time.sleep(600)


def text_bytes(model):
    """Return bytes that are no TFLite file."""
    return b"some text"


def number(model):
    """Return what no step may return."""
    return 3


def drawn_data(path):
    """Return one batch for an input `x` of two numbers."""
    return {"x": np.random.default_rng(len(path)).normal(size=(8, 2))}
