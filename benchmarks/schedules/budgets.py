"""Steps within a budget: `python -m benchmarks.schedules.budgets [NETWORK ...]`.

For each network and each share of what plain gradients hold, the plan, what no schedule
is below, how long it took to find, the peaks of Sessions against the budget, and step
times against plain ones, in turns. Each network has a process of its own. With `--full`
the networks have the sizes in which they are trained, and are planned only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

import tensorflow as tf

from benchmarks.schedules.child import session_peaks
from benchmarks.schedules.steps import PLAIN, SIZES, Traced, traced
from geutil.errors import PlanError
from geutil.gradients import Budget

SHARES = (0.5, 0.25)
_THREADS = (1, 8, None)
_HEAD = (
    "| network | budget | plan: peak | extra time, as planned | no schedule is below "
    "| step time / plain | highest of Sessions / budget | found in |\n"
    "|---|---|---|---|---|---|---|---|"
)


def measured(
    network: str, rounds: int, sessions: int, *, full: bool
) -> list[dict[str, Any]]:
    """Return what becomes of each share.

    Args:
        network: a name in `SIZES`.
        rounds: how often each step runs for its time; 0 for no times.
        sessions: how many Sessions there are for each number of threads; 0 for none.
        full: whether in the size in which it is trained.
    """
    plain = traced(network, "sgd", PLAIN, full=full) if rounds else None
    rows = []
    for share in SHARES:
        began = perf_counter()
        try:
            step = traced(network, "sgd", {"checkpoints": Budget(share)}, full=full)
        except PlanError as error:
            rows.append({"share": share, "error": str(error)})
            continue
        seconds = perf_counter() - began
        report = step.report
        found = [
            peak
            for threads in (_THREADS if sessions else ())
            for peak in session_peaks(step, threads, sessions)
        ]
        rows.append(
            {
                "share": share,
                "peak": report.peak / report.plain_peak,
                "extra_time": report.extra_time,
                "bound": report.extra_time_bound,
                "seconds": seconds,
                "times": _times(plain, step, rounds) if plain else None,
                "sessions": max(found) / Budget(share).bytes(report.plain_peak)
                if found
                else None,
                "ops": len(step.function.graph.get_operations()),
            }
        )
    return rows


def _times(plain: Traced, step: Traced, rounds: int) -> float:
    """Return the median time of a step against that of the plain one, in turns."""
    pairs = [(made, made.step.tensors()) for made in (plain, step)]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for side, (made, batch) in enumerate(pairs):
            start = perf_counter()
            made.function(*batch)
            tf.test.experimental.sync_devices()
            if number:
                seconds[side].append(perf_counter() - start)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def _printed(network: str, row: dict[str, Any]) -> str:
    said = f"| {network} | {row['share']:.0%} |"
    if "error" in row:
        return f"{said} {row['error'].split('; pass')[0]} ||||||"
    times = "" if row["times"] is None else f"{row['times']:.2f}"
    sessions = "" if row["sessions"] is None else f"{row['sessions']:.3f}"
    return (
        f"{said} {row['peak']:.3f} | {row['extra_time']:.1%} | {row['bound']:.1%} | "
        f"{times} | {sessions} | {row['seconds']:.0f} s |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.schedules.budgets")
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=7, help="steps that are timed")
    parser.add_argument("--sessions", type=int, default=2, help="for each of 3 threads")
    parser.add_argument("--full", action="store_true", help="plan only, in full size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.full:
        options.rounds = options.sessions = 0
    if options.child:
        rows = measured(
            options.child, options.rounds, options.sessions, full=options.full
        )
        sys.stdout.write(f"\n{json.dumps(rows)}\n")
        return
    print(_HEAD, flush=True)
    for network in options.networks or SIZES:
        command = [sys.executable, "-m", "benchmarks.schedules.budgets"]
        command += ["--child", network, "--rounds", str(options.rounds)]
        command += ["--sessions", str(options.sessions)]
        command += ["--full"] if options.full else []
        run = subprocess.run(command, capture_output=True, check=True, text=True)
        for row in json.loads(run.stdout.splitlines()[-1]):
            print(_printed(network, row), flush=True)


if __name__ == "__main__":
    main()
