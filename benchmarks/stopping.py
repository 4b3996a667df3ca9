"""Commands that are stopped at many points, by each signal, and all that they leave.

`python -m benchmarks.stopping [--only COMMAND] [--by SIGINT] [--points 20] [--in-turn]`
prints a line for each command and signal, and exits with 1 if anything went wrong.

A point is an event of Python's audit (a file is opened or renamed, a module imported, a
process started), counted, so that it does not depend on the clock. There the worker
sleeps and holds Python's lock, as C++ may do for as long. Half of the points are events
that change files, the others are spread over all. Processes are forks of this one,
which imports TensorFlow and does no more, and is told of all that they leave behind.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from geutil.jobs.batch_report import STATE
from geutil.progress import SHOWN

COMMANDS = {
    "inspect": "inspect {net}",
    "ops": "ops {net}.pb",
    "cut": "cut {net} --to first -o {out}/cut",
    "split": "split {net}.tflite --at {relu} -o {out}/a.tflite --second {out}/b.tflite",
    "expose": "expose {net}.tflite --to {relu} -o {out}/exposed.tflite",
    "splice": "splice {net} {net} --replace last=last --feed image=image -o {out}/new",
    "rename": "rename {net} --input image=pixels -o {out}/renamed.pb",
    "batch-size": "batch-size {net} 3 -o {out}/three.pb",
    "strip": "strip {net} -o {out}/stripped",
    "unroll": "unroll {net}.keras -o {out}/unrolled.pb",
    "fold": "fold {net} -o {out}/folded --html {out}/folded.html",
    "bits": "bits {net} --data {data} --size 90% --method min_max -o {out}/plan.json",
    "quantize": "quantize {net} --data {data} --method min_max -o {out}/q.tflite",
    "calibrate": "calibrate {quantized} --data {data} -o {out}/calibrated",
    "memory": "memory {net} --html {out}/memory.html",
    "convert": "convert {net} -o {out}/net.tflite",
    "run": "run {net} --data {data} -o {out}/outputs.npz",
    "batch": "batch {net}.pb {net} -o {out}/all --pipeline fold,save=graph_def",
    "diff": "diff {net} {quantized} --html {out}/diff.html",
    "check": "check {net} {net} --samples 2",
    "view": "view {net} -o {out}/net.html",
}
"""All commands, with places that a run fills in."""
KILL, PIPE = "SIGKILL", "pipe"
CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, KILL: -9, PIPE: 141}
"""Stops, and the exit codes: of the first process itself, where it is killed."""
LIMIT = 5.0
"""Seconds from the stop to the end of the last process, on a machine that is busy."""
_HANGS = 300.0
_PR_SET_CHILD_SUBREAPER = 36
"""Linux: `prctl(2)`."""
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "subprocess.Popen")


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped.

    Attributes:
        point: the number of the event.
        seconds: from the stop to the end of its last process.
        wrong: the reasons that it is not as it must be.
        reached: whether it came to the point; else it ended by itself before.
    """

    point: int
    seconds: float
    wrong: tuple[str, ...]
    reached: bool


class Place:
    """Folders of runs, with the models that they read.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._values = {
            "net": str(folder / "net"),
            "quantized": str(folder / "quantized"),
            "data": str(folder / "data.npz"),
            "out": str(folder / "run" / "out"),
        }
        done = _forked(lambda: _write_models(folder))
        if _wait(done):
            raise RuntimeError("the models could not be written")
        self._values["relu"] = (folder / "relu").read_text()

    def words(self, command: str) -> list[str]:
        """Return the arguments of a command."""
        return COMMANDS[command].format(**self._values).split()

    def events(self, command: str) -> tuple[int, list[int]]:
        """Return how many events a command has, and the numbers of those of changes."""
        counted = self.folder / "counted"

        def count() -> None:
            seen: list[int] = [0]
            changes: list[int] = []

            def hook(event: str, arguments: Any) -> None:
                seen[0] += 1
                if _is_change(event, arguments):
                    changes.append(seen[0])

            def told() -> None:
                counted.write_text(" ".join(map(str, (seen[0], *changes))))

            self._become(command, hook, told)

        first, out, _ = self._started(count)
        while os.read(out, 1 << 16):
            pass
        os.close(out)
        code = _wait(first)
        if code not in (0, 1) or not counted.exists():
            raise RuntimeError(f"{command}: {code}, {self._said()}")
        total, *changes = map(int, counted.read_text().split())
        return total, changes

    def stop(self, command: str, by: str, point: int) -> Stopped:
        """Run a command, and stop it at a point."""
        reached, here = os.pipe()
        go, hold = os.pipe()

        def run() -> None:
            os.close(reached)
            os.close(hold)
            seen = [0]

            def hook(event: str, arguments: Any) -> None:
                seen[0] += 1
                if seen[0] == point:
                    os.write(here, b"x")
                    # C's `read`, by a library that keeps Python's lock meanwhile.
                    ctypes.PyDLL(None).read(go, ctypes.create_string_buffer(1), 1)

            self._become(command, hook, lambda: None)

        first, out, before = self._started(run)
        os.close(here)
        os.close(go)
        is_there = self._reads_until(reached, out)
        began = time.monotonic()
        has_shown = f'["{SHOWN}"]' in self._notes()
        if is_there and by == PIPE:
            os.close(out)
            out = -1
            if has_shown:
                os.close(hold)
                hold = -1
        elif is_there:
            os.kill(first, getattr(signal, by))
        code = _wait(first)
        wrong = [] if _no_child_left(began + LIMIT) else ["a process is left"]
        seconds = time.monotonic() - began
        for descriptor in (reached, hold, out):
            if descriptor >= 0:
                os.close(descriptor)
        own = not is_there or (by == PIPE and has_shown)
        wrong += self._wrong(code, by, own, before)
        if is_there and seconds > LIMIT:
            wrong.append(f"{seconds:.1f} s")
        return Stopped(point, seconds, tuple(wrong), is_there)

    def _wrong(self, code: int, by: str, own: bool, before: set[str]) -> Iterator[str]:
        """Yield all that is wrong about a run that has ended, by itself or stopped.

        In the home are settings and caches of Keras and matplotlib, which processes
        write that import these anew; the report of a batch is there to go on.
        """
        said, run = self._said(), self.folder / "run"
        if code not in ((0, 1) if own else (CODES[by],)):
            yield f"exit code {code}"
        lines = [line for line in said.splitlines() if "geutil: wrote " not in line]
        if "Traceback" in said or any(not s.startswith("geutil: ") for s in lines):
            yield f"said {said!r}"
        if own:
            return
        if len(lines) != 1 or "stopped" not in lines[0]:
            yield f"said {said!r}"
        named = [path for path in run.rglob("*") if f"'{path}'" in said]
        for path in map(Path, sorted(_files(run) - before)):
            known = path.is_relative_to(run / "home") or path.name == STATE
            if not known and not any(_belongs(path, one) for one in named):
                yield f"left {path.relative_to(run)}"
        if not named and "nothing was written" not in said:
            yield f"said {said!r}"

    def _started(self, what: Callable[[], None]) -> tuple[int, int, set[str]]:
        """Fork a process with folders of its own; return it, its output, its files."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        for name in ("out", "tmp", "home"):
            (run / name).mkdir(parents=True)
        read, write = os.pipe()

        def process() -> None:
            os.setsid()
            os.close(read)
            errors = os.open(self.folder / "errors", os.O_WRONLY | os.O_CREAT, 0o600)
            os.ftruncate(errors, 0)
            os.dup2(write, 1)
            os.dup2(errors, 2)
            os.close(write)
            os.close(errors)
            os.chdir(run)
            os.environ.update(
                TMPDIR=str(run / "tmp"), HOME=str(run / "home"), PYTHONHASHSEED="0"
            )
            tempfile.tempdir = None
            what()

        first = _forked(process)
        os.close(write)
        return first, read, _files(run)

    def _become(
        self, command: str, hook: Callable[[str, Any], None], told: Callable[[], None]
    ) -> None:
        """Be the command, with a hook in the worker, and something at its end."""
        from geutil.cli import main

        work = main._run

        def hooked() -> int:
            sys.addaudithook(hook)
            code = work()
            told()
            return code

        main._run = hooked
        sys.argv = ["geutil", *self.words(command)]
        main.main()

    def _reads_until(self, reached: int, out: int) -> bool:
        """Take the output of a run until its point; return False if there is none."""
        end = time.monotonic() + _HANGS
        while time.monotonic() < end:
            ready, _, _ = select.select([reached, out], [], [], 1.0)
            if reached in ready:
                # Its end, if the run ended before.
                return os.read(reached, 1) == b"x"
            if out in ready and not os.read(out, 1 << 16):
                return False
        raise TimeoutError(self._said())

    def _notes(self) -> str:
        found = list((self.folder / "run" / "tmp").glob("geutil-*/notes"))
        return found[0].read_text() if found else ""

    def _said(self) -> str:
        return (self.folder / "errors").read_text()


def _is_change(event: str, arguments: Any) -> bool:
    if event == "open":
        mode, flags = arguments[1:]
        return bool(flags & (os.O_WRONLY | os.O_RDWR)) or "w" in (mode or "")
    return event in _CHANGES


def _belongs(path: Path, named: Path) -> bool:
    """Tell whether a path is a written one, inside it, or a folder around it."""
    return path.is_relative_to(named) or named.is_relative_to(path)


def _files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def _forked(what: Callable[[], Any]) -> int:
    """Fork a process that does something, and return its number."""
    process = os.fork()
    if not process:
        _do(what)
    return process


def _do(what: Callable[[], Any]) -> NoReturn:
    code: Any = 1
    try:
        what()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _wait(process: int) -> int:
    """Return the exit code of a process, and take those that others left meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == process:
            return os.waitstatus_to_exitcode(status)


def _no_child_left(end: float) -> bool:
    """Wait until no process is left; return False if one does not end, and end it."""
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return True
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    return False


def _write_models(folder: Path) -> None:
    import numpy as np

    from geutil import model, tflite
    from geutil.quantize import quantize

    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    network = tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 3], name="image"),
            layers.Conv2D(4, 3, use_bias=False, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, name="last"),
        ]
    )
    stack = [tf.keras.Input([3, 3], name="x"), layers.LSTM(4)]
    tf.keras.Sequential(stack).save(folder / "net.keras")
    opened = model.open(network)
    opened.save(folder / "net")
    opened.save(folder / "net.pb", "graph_def")
    opened.save(folder / "net.tflite", "tflite")
    first = next(iter(tflite.open(folder / "net.tflite").ops))
    (folder / "relu").write_text(first.outputs[0].name)
    quantize(opened, is_training=False)
    opened.save(folder / "quantized")
    samples = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32)
    np.savez(folder / "data.npz", image=samples)


def points(total: int, changes: Sequence[int], count: int) -> list[int]:
    """Return points of a run: half of them changes of files, the others among all."""
    chosen = set(_spread(changes, count // 2))
    others = [event for event in range(1, total + 1) if event not in chosen]
    return sorted(chosen.union(_spread(others, count - len(chosen))))


def _spread(events: Sequence[int], count: int) -> Iterator[int]:
    """Yield some of the events, the first and the last among them; all if so few."""
    count = min(count, len(events))
    for at in range(count):
        yield events[at * (len(events) - 1) // max(count - 1, 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(COMMANDS))
    parser.add_argument("--by", nargs="*", default=list(CODES))
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--in-turn", action="store_true", help="one signal a point")
    given = parser.parse_args()
    # Orphans become children of this process, so that none is overlooked.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print("| command | stopped by | points | longest, s | wrong |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    any_wrong = False
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder).resolve())
        for command in given.only:
            at = points(*place.events(command), given.points)
            for stops in [given.by] if given.in_turn else [[by] for by in given.by]:
                runs = list(map(place.stop, repeat(command), cycle(stops), at))
                stopped = [run for run in runs if run.reached]
                wrong = [f"at {r.point}: {', '.join(r.wrong)}" for r in runs if r.wrong]
                any_wrong |= bool(wrong)
                longest = max((run.seconds for run in stopped), default=0.0)
                told = "; ".join(wrong) or "nothing"
                row = (command, ", ".join(stops), len(stopped), f"{longest:.2f}", told)
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    return int(any_wrong)


if __name__ == "__main__":
    sys.exit(main())
