"""Starts the measuring process and takes its result."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from geutil.errors import MeasurementError
from geutil.memory.measuring.job import Job, Options
from geutil.memory.measuring.measurement import Measurement

_CHILD = "geutil.memory.measuring.child"
_TAIL = 3000
"""Characters of the process's last words that a message shows."""


def run_in_child(job: Job, options: Options) -> Measurement:
    """Run a job in a fresh process.

    Raises:
        MeasurementError: it failed, died or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="geutil-measure-") as folder:
        job_path, result_path = Path(folder, "job"), Path(folder, "result")
        with job_path.open("wb") as file:
            pickle.dump((job, options), file)
        command = [sys.executable, "-m", _CHILD, str(job_path), str(result_path)]
        try:
            finished = subprocess.run(
                command,
                check=False,
                capture_output=True,
                env=_environment(options),
                timeout=options.timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(
                f"the step was not measured within {options.timeout} s; pass a longer "
                "timeout or fewer steps"
            ) from error
        if finished.returncode != 0:
            raise MeasurementError(_last_words(finished))
        measurement: Measurement = pickle.loads(result_path.read_bytes())
        return measurement


def _environment(options: Options) -> dict[str, str]:
    """Return the environment of the process: this one's, and where to import from."""
    environment = dict(os.environ)
    folders = [folder or str(Path.cwd()) for folder in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # This process may hold a part of the GPU.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if options.onednn is not None:
        environment["TF_ENABLE_ONEDNN_OPTS"] = str(int(options.onednn))
    return environment


def _last_words(finished: subprocess.CompletedProcess[bytes]) -> str:
    code = finished.returncode
    how = f"ended with status {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == getattr(signal, "SIGKILL", None):
            how += " (out of memory?)"
    words = finished.stderr.decode(errors="replace").strip()
    tail = words[-_TAIL:].partition("\n")[2] if len(words) > _TAIL else words
    return f"the measuring process {how}; its last words:\n{tail}"
