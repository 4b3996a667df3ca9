"""The rows of the table: each step in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.rows import Row
from benchmarks.schedules.steps import OPTIMIZERS, SIZES

FAMILY = "schedules"
SESSIONS = 3
"""For each of four numbers of threads, on an idle machine and on a busy one."""
ROUNDS = 7
_QUICK = ("ResNet50", "U-Net")
_MEGA = 1e6
_MOST, _WORST, _PREDICTED, _TIME = 1.05, 1.15, 1.03, 1.01


def rows(quick: bool) -> Iterator[Row]:
    """Measure all networks, or a few small ones with one Session each."""
    for network in _QUICK if quick else SIZES:
        for optimizer in OPTIMIZERS[:1] if quick else OPTIMIZERS:
            name = f"{network}, {optimizer}"
            yield from _peaks(
                name, _child("peaks", network, optimizer, 1 if quick else SESSIONS)
            )
            yield from _times(name, _child("times", network, optimizer, ROUNDS))


def _peaks(name: str, found: dict[str, Any]) -> Iterator[Row]:
    report = found["report"]
    compared = {
        f"highest of {len(found['sessions'])} Sessions": (
            max(found["sessions"]),
            report,
            _MOST,
        ),
        f"highest of {len(found['functions'])} calls from eager code": (
            max(found["functions"]),
            report,
            _MOST,
        ),
        "worst case, 8 ops at once": (found["worst"], report, _WORST),
        "prediction of the finished step": (found["predicted"], report, _PREDICTED),
        "with checkpoints, against plain": (max(found["sessions"]), found["plain"], 1),
        "order alone, against plain": (found["ordered"], found["plain"], 1),
    }
    for work, (ours, against, limit) in compared.items():
        yield Row(FAMILY, work, name, ours / _MEGA, against / _MEGA, limit, unit="MB")


def _times(name: str, found: dict[str, Any]) -> Iterator[Row]:
    compared = {
        "step time, against the same without its order": ("memory", "unordered", _TIME),
        "step time of order alone, against plain": ("ordered", "plain", _TIME),
    }
    for work, (ours, against, limit) in compared.items():
        milliseconds = 1000 * found[ours], 1000 * found[against]
        yield Row(FAMILY, work, name, *milliseconds, limit)


def _child(work: str, network: str, optimizer: str, count: int) -> dict[str, Any]:
    print(f"measuring {FAMILY}: {work} of {network}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.schedules.child"]
    command += [work, network, optimizer, str(count)]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer
