"""Functions that processes of a batch import: steps of pipelines, and data."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np


def fault(model, marker):
    """Do what the name of an output says; before a hang, write which process hangs."""
    from geutil.errors import ModelError

    (name,) = model.outputs
    place = Path(marker)
    if name == "abort":
        os.abort()
    if name == "refuse":
        raise ModelError("it is refused")
    if name == "hang":
        _hang(place, f"{os.getpid()}")
    # In the second try the worker that watches this process lives.
    if name == "kill" and not place.exists():
        _hang(place, f"{os.getpid()} {os.getppid()}", os.getppid())


def _hang(place, text, victim=None):
    fresh = place.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(place)
    if victim is not None:
        # The end of the worker ends this process, too.
        os.kill(victim, signal.SIGKILL)
    time.sleep(600)


def no_job(job, marker):
    """Kill this worker, the first time; then say that a job is done."""
    place = Path(marker)
    if not place.exists():
        place.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    reason = f"by {job.server}" if job.server else "without a server"
    return dataclasses.replace(job.entry, action="done", reason=reason)


def text_bytes(model):
    """Return bytes that are no TFLite file."""
    return b"some text"


def number(model):
    """Return what no step may return."""
    return 3


def drawn_data(path):
    """Return one batch for an input `x` of two numbers."""
    return {"x": np.random.default_rng(len(path)).normal(size=(8, 2))}
