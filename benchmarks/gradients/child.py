"""`python -m benchmarks.gradients.child peak|prediction|times NETWORK SETTING WAY ...`.

The process that is measured. It prints one line of JSON: the figures, or what was
raised.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.gradients.cases import SETTINGS, Setting

MESSAGE_LENGTH = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ChildError(Exception):
    """The steps could not be run."""


def in_a_child(work: str, network: str, setting: Setting, *ways: str) -> Any:
    """Return what `work` finds in a process of its own.

    Raises:
        ChildError: it raised, or died.
    """
    command = [
        *(sys.executable, "-m", "benchmarks.gradients.child"),
        *(work, network, setting.name, *ways),
    ]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(setting.onednn))}
    child = subprocess.run(
        command, capture_output=True, check=False, text=True, env=environment
    )
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:]
        raise ChildError(f"exit code {child.returncode}: {' '.join(last)}")
    answer = json.loads(child.stdout.splitlines()[-1])
    if "raises" in answer:
        raise ChildError(answer["raises"])
    return answer


def _answer(work: str, network: str, setting: Setting, ways: list[str]) -> Any:
    from benchmarks.gradients.peaks import measure_peak
    from benchmarks.gradients.predictions import measure_prediction
    from benchmarks.gradients.times import measure_times

    if work == "times":
        return measure_times(network, setting, ways)
    measure_one = {"peak": measure_peak, "prediction": measure_prediction}[work]
    (way,) = ways
    return asdict(measure_one(network, setting, way))


def main() -> None:
    work, network, setting, *ways = sys.argv[1:]
    try:
        answer = _answer(work, network, SETTINGS[setting], ways)
    except Exception as error:  # Of whatever a way to compute gradients raises.
        message = " ".join(_COLOUR.sub("", str(error)).split())
        answer = {"raises": f"{type(error).__name__}: {message[:MESSAGE_LENGTH]}"}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
