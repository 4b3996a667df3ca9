"""Edits of TFLite files, each run beside the file that was edited, bit for bit.

`python -m benchmarks.tflite_edits PATH...` takes files and folders of files. Each file
is saved, renamed, stripped, cut at 8 tensors, exposed there, cut by thirds of its ops,
and split at up to 24 places into halves that run in turn, two times each, since some
files have variables. Files with ops that the interpreter lacks are edited and verified,
and not run. The interpreter runs in a process of its own, `--child`.
"""

from __future__ import annotations

import argparse
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from geutil import tflite
from geutil.errors import TFLiteError
from geutil.tflite import looking
from geutil.tflite.run import new_interpreter
from geutil.tflite.verify import find_violations

_RUNS = 2
_CUTS, _SPLITS = 8, 24
_MOST_TOGETHER = 6
"""How often a split is tried again, at the tensors that the refusal names, too."""
_HANDLES = ("resource", "string", "variant")
Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass
class Outcome:
    """The edits of one file.

    Attributes:
        name: its name.
        ops: how many it has.
        runs: whether the interpreter has all its ops.
        same: by edit, how many results were bit-equal to those of the whole file, or,
            of a file that does not run, kept all invariants.
        refused: by edit, how many were refused.
        wrong: a line for each other result.
        seconds: of the processor for opening, editing, verifying and writing.
    """

    name: str
    ops: int
    runs: bool = True
    same: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Interpreter:
    """The process that runs files; it is started again when one ends it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.tflite_edits", "--child"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(
        self, blob: bytes, feeds: Sequence[Arrays] | None, kept: Iterable[int] = ()
    ) -> Any:
        """Return (inputs, outputs, tensors inside) of each run, or a reason why not."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        pickle.dump((blob, feeds, [*kept]), stdin)
        stdin.flush()
        try:
            return pickle.load(stdout)
        except EOFError:
            self._start()
            return "the interpreter died"


class Trial:
    """One file, the runs of it as it is, and edits that are compared with these."""

    def __init__(self, path: Path, interpreter: Interpreter) -> None:
        self._path, self._interpreter = path, interpreter
        start = process_time()
        self.file = tflite.open(path)
        main = self.file.graphs[0]
        self.outcome = Outcome(path.stem, len([*self.file.ops]))
        self.outcome.seconds = process_time() - start
        constant = looking.constant_ops(main)
        self.tensors = [
            t
            for op in main.ops
            for t in op.outputs
            if op not in constant and t.dtype not in _HANDLES
        ]
        self.place = {t: i for i, t in enumerate(main.tensors)}
        inside = {self.place[t] for t in self.tensors if t.readers}
        inside |= {self.place[t] for t in main.outputs}
        found = interpreter.run(path.read_bytes(), None, inside)
        self.outcome.runs = not isinstance(found, str)
        self.whole = found if self.outcome.runs else []

    def made(self, edit: str, make: Callable[[], Any]) -> Any:
        """Return what an edit gives, whose invariants hold, or None."""
        start = process_time()
        try:
            result = make()
            files = result if isinstance(result, tuple) else (result,)
            blobs = [file.to_bytes() for file in files]
            faults = [str(v) for file in files for v in find_violations(file)]
        except TFLiteError:
            self.outcome.refused[edit] += 1
            return None
        finally:
            self.outcome.seconds += process_time() - start
        if faults:
            self.outcome.wrong.append(f"{edit}: {faults[0]}")
            return None
        return list(zip(files, blobs, strict=True))

    def judge(
        self,
        edit: str,
        made: Any,
        expected: Callable[[Any, tflite.LiteTensor, int], Any],
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Run files in turn, and compare each output with what is expected of it."""
        if made is None:
            return
        given: list[dict[str, Any]] = [dict(inputs) for inputs, *_ in self.whole]
        for old, new in (names or {}).items():
            for feed in given:
                feed[new] = feed[old]
        good = True
        for file, blob in made if self.outcome.runs else ():
            ends = {t.name for t in file.graphs[0].inputs}
            feeds = [{name: feed[name] for name in ends} for feed in given]
            found = self._interpreter.run(blob, feeds)
            if isinstance(found, str):
                self.outcome.wrong.append(f"{edit}: {found.splitlines()[0]}")
                return
            for feed, (_, outputs, _), run in zip(
                given, found, self.whole, strict=True
            ):
                feed.update(outputs)
                for i, t in enumerate(file.graphs[0].outputs):
                    want = expected(run, t, i)
                    good &= want is None or _same(outputs[t.name], want)
        if good:
            self.outcome.same[edit] += 1
        else:
            self.outcome.wrong.append(f"{edit}: other values")

    def inside(self, run: Any, t: tflite.LiteTensor, _: int) -> Any:
        """Return the values that the whole file computes for a tensor of a name."""
        own = [o for o in self.tensors if o.name == t.name]
        return run[2].get(self.place[own[0]]) if len(own) == 1 else None

    def output(self, run: Any, _: tflite.LiteTensor, i: int) -> Any:
        """Return the values of the whole file's output of the same place."""
        main = self.file.graphs[0]
        return run[1][main.outputs[i].name] if i < len(main.outputs) else None


def _same(a: Any, b: Any) -> bool:
    equal = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return bool(a.dtype == b.dtype and a.shape == b.shape and equal)


def judged(path: Path, interpreter: Interpreter) -> Outcome:
    """Return the outcome of all edits of a file."""
    trial = Trial(path, interpreter)
    file, main = trial.file, trial.file.graphs[0]

    def edited(change: Callable[[tflite.LiteFile], None]) -> tflite.LiteFile:
        new = tflite.open(path)
        change(new)
        return new

    trial.judge("save", trial.made("save", lambda: file), trial.output)
    inputs = {t.name: f"in{i}" for i, t in enumerate(main.inputs)}
    outputs = {t.name: f"out{i}" for i, t in enumerate(main.outputs)}
    made = trial.made("rename", lambda: edited(lambda m: m.rename(inputs, outputs)))
    trial.judge("rename", made, trial.output, inputs)
    made = trial.made("strip", lambda: edited(lambda m: m.strip(metadata=True)))
    trial.judge("strip", made, trial.output)
    for t in _spread(trial.tensors, _CUTS):
        made = trial.made("cut", lambda t=t: file.cut(outputs=t))
        trial.judge("cut", made, trial.inside)
    names = [t.name for t in _spread(trial.tensors, _CUTS)]
    made = trial.made("expose", lambda: edited(lambda m: m.expose(names)))
    trial.judge("expose", made, trial.inside)
    count = len(main.ops)
    thirds = [range(i * count // 3, (i + 1) * count // 3) for i in range(3)]
    made = trial.made("thirds", lambda: tuple(file.cut(ops=third) for third in thirds))
    trial.judge("thirds", made, trial.inside)
    for t in _spread(trial.tensors, _SPLITS):
        made = trial.made("split", lambda t=t: split(file, t))
        trial.judge("split", made, trial.inside)
    return trial.outcome


def _spread(tensors: Sequence[Any], count: int) -> list[Any]:
    step = len(tensors) / (count + 1)
    places = (round(step * (i + 1)) for i in range(count))
    return [*dict.fromkeys(tensors[i] for i in places if i < len(tensors))]


def split(file: tflite.LiteFile, tensor: tflite.LiteTensor) -> Any:
    """Return the halves of a split at a tensor, and at those that cross there, too."""
    places: list[Any] = [tensor]
    for _ in range(_MOST_TOGETHER):
        try:
            return file.split(places)
        except TFLiteError as error:
            told = str(error).partition("the file still reads ")[2]
            if not told:
                raise
            places += re.findall(r"'([^']*)'", told)
    raise TFLiteError(f"{tensor!r}: too much crosses")


def answer(blob: bytes, feeds: Any, kept: Sequence[int]) -> Any:
    """Run a file, on random inputs if there are none."""
    interpreter = new_interpreter(blob, keep_tensors=bool(kept))
    interpreter.allocate_tensors()
    ends = interpreter.get_input_details()
    runs = []
    for i in range(_RUNS):
        random = np.random.default_rng(i)
        feed = feeds[i] if feeds else {end["name"]: _drawn(end, random) for end in ends}
        for end in ends:
            interpreter.set_tensor(end["index"], feed[end["name"]])
        interpreter.invoke()
        outputs = {
            end["name"]: interpreter.get_tensor(end["index"]).copy()
            for end in interpreter.get_output_details()
        }
        runs.append(
            (feed, outputs, {k: interpreter.get_tensor(k).copy() for k in kept})
        )
    return runs


def _drawn(end: Any, random: np.random.Generator) -> Any:
    if np.issubdtype(end["dtype"], np.floating):
        return random.random(end["shape"]).astype(end["dtype"])
    return random.integers(1, 5, end["shape"]).astype(end["dtype"])


def serve() -> None:
    """Answer jobs until there are no more."""
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = answer(*job)
        except (RuntimeError, ValueError) as error:
            result = str(error)
        pickle.dump(result, sys.stdout.buffer)
        sys.stdout.buffer.flush()


_EDITS = ("save", "rename", "strip", "cut", "expose", "thirds", "split")


def main() -> int:
    """Print a line for each file; return how many files have results that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve()
        return 0
    files = [
        file
        for path in arguments.paths
        for file in (sorted(path.rglob("*.tflite")) if path.is_dir() else [path])
    ]
    interpreter = Interpreter()
    print("| file | ops | runs |", " | ".join(_EDITS), "| refused | seconds |")
    print("|---|---|---|" + "---|" * (len(_EDITS) + 2))
    wrong = 0
    for file in files:
        found = judged(file, interpreter)
        counts = " | ".join(str(found.same[edit]) for edit in _EDITS)
        refused = ", ".join(f"{k} {v}" for k, v in found.refused.items()) or "none"
        runs = "yes" if found.runs else "no"
        print(
            f"| {found.name} | {found.ops} | {runs} | {counts} | {refused} | "
            f"{found.seconds:.1f} |"
        )
        for line in found.wrong:
            print(f"WRONG {found.name}: {line}")
        wrong += bool(found.wrong)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
