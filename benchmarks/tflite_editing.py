"""`python -m benchmarks.tflite_editing [FILE_OR_FOLDER ...]`: each edit on each file.

The files are those that are passed, and the samples of the tests. An edit is refused,
or its file is run in another process, beside the one before; the table shows the
largest difference in the results, in steps of a quantized output, else by its largest
value. Edits that keep every value (renamed, stripped, exposed, cut at 8 tensors and by
thirds of the ops, split at up to 24 places into halves that run in turn) are compared
bit by bit with the tensors inside the whole file, in two runs, since some files have
variables: "8 equal, 2 refused". Of files with custom ops, the invariants are checked.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geutil import tflite
from geutil.errors import TFLiteError
from geutil.tflite import LiteFile, LiteTensor, Quantization, lookups
from geutil.tflite.verify import find_violations

Array = np.ndarray[Any, Any]
Feeds = list[Array]
ROWS = 3


@dataclass(frozen=True)
class Outcome:
    """The result of an edit of a file.

    Attributes:
        word: "equal", "near", "refused", "custom" (nothing can run it) or "WRONG".
        detail: the largest difference, or the reason.
    """

    word: str
    detail: str = ""


def run(
    blob: bytes, runs: list[Feeds], kept: Iterable[int] = ()
) -> list[tuple[list[Array], dict[int, Array]]]:
    """Run a file in turn with inputs of the shapes that are passed.

    Returns:
        For each run its outputs, and the tensors of the places that are kept.
    """
    from geutil.tflite.interpreter import new_interpreter

    places = [*kept]
    interpreter = new_interpreter(blob, keep_tensors=bool(places))
    ends = interpreter.get_input_details()
    for end, value in zip(ends, runs[0], strict=True):
        if tuple(end["shape"]) != value.shape:
            interpreter.resize_tensor_input(end["index"], value.shape)
    interpreter.allocate_tensors()
    results = []
    for feeds in runs:
        for end, value in zip(ends, feeds, strict=True):
            interpreter.set_tensor(end["index"], value)
        interpreter.invoke()
        made = [e["index"] for e in interpreter.get_output_details()]
        outputs = [interpreter.get_tensor(place) for place in made]
        results.append((outputs, {k: interpreter.get_tensor(k) for k in places}))
    return results


class Runner:
    """Runs files in another process, which may die of them."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, blob: bytes, runs: list[Feeds], kept: Iterable[int] = ()) -> Any:
        """Return the results of `run`."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1)
        try:
            return self._pool.submit(run, blob, runs, [*kept]).result()
        except BrokenProcessPool:
            self._pool = None
            raise RuntimeError("the interpreter died") from None


def drawn(file: LiteFile, rows: int | None = None, seed: int = 0) -> Feeds:
    """Return inputs of a file: small integers, and uniform floats."""
    random = np.random.default_rng(seed)
    feeds = []
    for end in file.graphs[0].inputs:
        shape = list(end.sizes)
        if rows is not None and shape:
            shape[0] = rows
        if end.dtype.startswith("float"):
            feeds.append(random.random(shape).astype(end.dtype))
        elif end.quantization is not None:
            feeds.append(random.integers(-100, 100, shape).astype(end.dtype))
        else:
            feeds.append(random.integers(0, 2, shape).astype(end.dtype))
    return feeds


def numbers(value: Array, tensor: LiteTensor) -> Array:
    """Return the numbers that a result stands for."""
    steps = tensor.quantization
    if steps is None:
        return value.astype(np.float64)
    return (value.astype(np.float64) - steps.zero_points[0]) * steps.scales[0]


def integers(value: Array, tensor: LiteTensor) -> Array:
    """Return an input as the integers of a tensor, where it has steps."""
    steps = tensor.quantization
    if steps is None:
        return value.astype(tensor.dtype)
    info = np.iinfo(tensor.dtype)
    levels = np.round(value / steps.scales[0]) + steps.zero_points[0]
    return np.clip(levels, info.min, info.max).astype(tensor.dtype)


def compared(file: LiteFile, made: list[Array], wanted: list[Array]) -> Outcome:
    """Compare numbers of results; steps are those of the file before."""
    worst, unit = 0.0, "of the largest"
    for tensor, one, other in zip(file.graphs[0].outputs, made, wanted, strict=True):
        if one.shape != other.shape:
            return Outcome("WRONG", f"shapes {one.shape} and {other.shape}")
        if not one.size:
            continue
        size = float(np.abs(other).max()) or 1.0
        if tensor.quantization is not None:
            size, unit = tensor.quantization.scales[0], "steps"
        worst = max(worst, float(np.abs(one - other).max()) / size)
    return Outcome("near", f"{worst:.2g} {unit}") if worst else Outcome("equal")


Job = Callable[[LiteFile, Runner], Outcome]


def _results(file: LiteFile, runner: Runner, feeds: Feeds) -> list[Array]:
    ((made, _),) = runner(file.to_bytes(), [feeds])
    return [numbers(v, t) for v, t in zip(made, file.graphs[0].outputs, strict=True)]


def batch(file: LiteFile, runner: Runner) -> Outcome:
    """Rows of a batch are those of single runs."""
    one = tflite.open(file.to_bytes())
    if all((t.shape or (1,))[0] is None for t in one.graphs[0].inputs):
        one.set_batch_size(1)
    file.set_batch_size(ROWS)
    feeds = drawn(file)
    made = _results(file, runner, feeds)
    alone = [
        _results(one, runner, [f[i : i + 1] if f.ndim else f for f in feeds])
        for i in range(ROWS)
    ]
    return compared(
        one, made, [np.concatenate(rows) for rows in zip(*alone, strict=True)]
    )


def free_batch(file: LiteFile, runner: Runner) -> Outcome:
    """A free batch takes several rows."""
    fixed = tflite.open(file.to_bytes())
    fixed.set_batch_size(ROWS)
    file.set_batch_size(None)
    feeds = drawn(fixed)
    return compared(
        fixed, _results(file, runner, feeds), _results(fixed, runner, feeds)
    )


def constants(file: LiteFile, runner: Runner) -> Outcome:
    """Constants that are read and written back are those of before."""
    before = tflite.open(file.to_bytes())
    names = [t.name for t in file.tensors]
    for name in file.constants:
        if names.count(name) == 1 and not file.constants.tensor(name).is_sparse:
            file.constants[name] = file.constants[name]
    feeds = drawn(before)
    return compared(
        before, _results(file, runner, feeds), _results(before, runner, feeds)
    )


def steps(file: LiteFile, runner: Runner) -> Outcome:
    """An input in steps of twice the size gives nearly the same."""
    before = tflite.open(file.to_bytes())
    feeds = drawn(before)
    tensor = file.graphs[0].inputs[0]
    old = tensor.quantization or Quantization((1.0,))
    file.set_quantization(tensor, old.scales[0] * 2, old.zero_points[0] // 2)
    new = [integers(numbers(feeds[0], before.graphs[0].inputs[0]), tensor), *feeds[1:]]
    return compared(
        before, _results(file, runner, new), _results(before, runner, feeds)
    )


def ends(dtype: str) -> Job:
    """Return the job that gives ends another type."""

    def job(file: LiteFile, runner: Runner) -> Outcome:
        before = tflite.open(file.to_bytes())
        graph = file.graphs[0]
        feeds = drawn(before)
        if all(t.quantization is None for t in graph.inputs) and dtype != "float32":
            reach = {
                t.name: float(np.ptp(f)) or 1.0
                for t, f in zip(graph.inputs, feeds, strict=True)
            }
            names = [t.name for t in graph.inputs if t.dtype == "float32"]
            own = next(iter(file.signatures.values()), None)
            called = {t: n for n, t in own.inputs.items()} if own else {}
            taken = {
                called.get(t, t.name): Quantization((reach[t.name] / 100,), (0,))
                for t in graph.inputs
                if t.name in names
            }
            file.set_io_type(dict.fromkeys(taken, dtype), steps=taken)
        else:
            file.set_io_type(dtype, dtype)
        values = [
            numbers(f, t) for f, t in zip(feeds, before.graphs[0].inputs, strict=True)
        ]
        new = [
            integers(v, t) for v, t in zip(values, file.graphs[0].inputs, strict=True)
        ]
        old = [
            integers(numbers(v, t), u)
            for v, t, u in zip(
                new, file.graphs[0].inputs, before.graphs[0].inputs, strict=True
            )
        ]
        return compared(
            before, _results(file, runner, new), _results(before, runner, old)
        )

    return job


def floats(file: LiteFile, runner: Runner) -> Outcome:
    """A file in float gives nearly the numbers of the one in integers."""
    before = tflite.open(file.to_bytes())
    feeds = drawn(before)
    file.dequantize()
    new = [
        numbers(f, t).astype(u.dtype)
        for f, t, u in zip(
            feeds, before.graphs[0].inputs, file.graphs[0].inputs, strict=True
        )
    ]
    return compared(
        before, _results(file, runner, new), _results(before, runner, feeds)
    )


def halves(file: LiteFile, runner: Runner) -> Outcome:
    """The two halves of a file, joined, are the file."""
    before = tflite.open(file.to_bytes())
    ops = file.graphs[0].ops
    number = {op: i for i, op in enumerate(ops)}
    reasons = []
    for place in sorted(range(1, len(ops)), key=lambda i: abs(i - len(ops) // 2)):
        at = [
            t
            for op in ops[:place]
            for t in op.outputs
            if t.dtype != "resource"
            and any(number[reader] >= place for reader in t.readers)
        ]
        try:
            first, second = file.split(at)
        except TFLiteError as error:
            reasons.append(str(error))
            continue
        first.append(second)
        feeds = drawn(before)
        named = {t.name: f for t, f in zip(before.graphs[0].inputs, feeds, strict=True)}
        fed = [named[t.name] for t in first.graphs[0].inputs]
        made = _results(first, runner, fed)
        results = dict(
            zip([t.name for t in first.graphs[0].outputs], made, strict=True)
        )
        wanted = _results(before, runner, feeds)
        # An output of the file that its second half reads is no output of both.
        pairs = [
            (results.get(t.name, value), value)
            for t, value in zip(before.graphs[0].outputs, wanted, strict=True)
        ]
        return compared(before, *([*each] for each in zip(*pairs, strict=True)))
    return Outcome("refused", f"no place to split at: {reasons[:1]}")


def merged(file: LiteFile, runner: Runner) -> Outcome:
    """A file merged with itself has its weights once, and gives the same."""
    before = tflite.open(file.to_bytes())
    file.merge({"another": tflite.open(file.to_bytes())})
    feeds = drawn(before)
    return compared(
        before, _results(file, runner, feeds), _results(before, runner, feeds)
    )


Parts = tuple[LiteFile, ...]
_CUTS, _SPLITS, _MOST_TOGETHER = 8, 24, 6
_HANDLES = ("resource", "string", "variant")


def kept(
    edits: Callable[[LiteFile, list[LiteTensor]], Iterable[Callable[[], Parts]]],
    names: Mapping[str, str] | None = None,
) -> Job:
    """Return the job of edits that keep every value of the whole file.

    Args:
        edits: makes, of the file and its tensors, the calls of edits.
        names: the name of each end inside the files that they make, if it is another.
    """

    def job(file: LiteFile, runner: Runner) -> Outcome:
        main = file.graphs[0]
        place = {t: i for i, t in enumerate(main.tensors)}
        constant = lookups.constant_ops(main)
        tensors = [
            t
            for op in main.ops
            for t in op.outputs
            if op not in constant and t.dtype not in _HANDLES
        ]
        alone = Counter(t.name for t in tensors)
        # The interpreter has no values of what nothing reads.
        told = [t for t in tensors if t.readers or t in main.outputs]
        inside = {t.name: place[t] for t in told if alone[t.name] == 1}
        is_run = not any(op.is_custom for op in file.ops)
        runs = [drawn(file, seed=seed) for seed in (0, 1)] if is_run else []
        whole = runner(file.to_bytes(), runs, inside.values()) if is_run else []
        counts: Counter[str] = Counter()
        for edit in edits(file, tensors):
            try:
                parts = edit()
            except TFLiteError:
                counts["refused"] += 1
                continue
            faults = [v for part in parts for v in find_violations(part)]
            given = [
                dict(zip([t.name for t in main.inputs], feeds, strict=True))
                for feeds in runs
            ]
            good = not faults
            for part in parts if is_run else ():
                ends = part.graphs[0]
                fed = [
                    [values[(names or {}).get(t.name, t.name)] for t in ends.inputs]
                    for values in given
                ]
                found = runner(part.to_bytes(), fed)
                for values, (outputs, _), (_, known) in zip(
                    given, found, whole, strict=True
                ):
                    for t, value in zip(ends.outputs, outputs, strict=True):
                        name = (names or {}).get(t.name, t.name)
                        values[name] = value
                        if name in inside:
                            good &= _same(value, known[inside[name]])
            counts["equal" if good else "WRONG"] += 1
        said = ", ".join(f"{count} {word}" for word, count in counts.items())
        return Outcome("WRONG" if counts["WRONG"] else "near", said)

    return job


def _same(a: Array, b: Array) -> bool:
    equal = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return bool(a.dtype == b.dtype and a.shape == b.shape and equal)


def _copied(file: LiteFile, change: Callable[[LiteFile], None]) -> Parts:
    new = tflite.open(file.to_bytes())
    change(new)
    return (new,)


def _spread(tensors: list[LiteTensor], count: int) -> list[LiteTensor]:
    step = len(tensors) / (count + 1)
    places = (round(step * (i + 1)) for i in range(count))
    return [*dict.fromkeys(tensors[i] for i in places if i < len(tensors))]


def _thirds(file: LiteFile) -> Parts:
    count = len(file.graphs[0].ops)
    thirds = [range(i * count // 3, (i + 1) * count // 3) for i in range(3)]
    return tuple(file.cut(ops=third) for third in thirds)


def split(file: LiteFile, tensor: LiteTensor) -> Parts:
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


def renamed(file: LiteFile, runner: Runner) -> Outcome:
    """Ends have other names, and the same values."""
    main = file.graphs[0]
    inputs = {t.name: f"in{i}" for i, t in enumerate(main.inputs)}
    outputs = {t.name: f"out{i}" for i, t in enumerate(main.outputs)}
    back = {new: old for old, new in (*inputs.items(), *outputs.items())}
    one = lambda m, _: [lambda: _copied(m, lambda n: n.rename(inputs, outputs))]  # noqa: E731
    return kept(one, back)(file, runner)


JOBS: dict[str, Job] = {
    "rename": renamed,
    "strip": kept(lambda m, _: [lambda: _copied(m, lambda n: n.strip(metadata=True))]),
    "expose": kept(
        lambda m, ts: [
            lambda: _copied(m, lambda n: n.expose([t.name for t in _spread(ts, _CUTS)]))
        ]
    ),
    "cut": kept(
        lambda m, ts: [lambda t=t: (m.cut(outputs=t),) for t in _spread(ts, _CUTS)]
    ),
    "thirds": kept(lambda m, _: [lambda: _thirds(m)]),
    "split": kept(
        lambda m, ts: [lambda t=t: split(m, t) for t in _spread(ts, _SPLITS)]
    ),
    f"batch of {ROWS}": batch,
    "free batch": free_batch,
    "constants": constants,
    "steps": steps,
    "int8 ends": ends("int8"),
    "uint8 ends": ends("uint8"),
    "int16 ends": ends("int16"),
    "float ends": ends("float32"),
    "dequantize": floats,
    "halves": halves,
    "merge": merged,
}


def outcome(blob: bytes, job: Job, runner: Runner) -> Outcome:
    """Return the result of a job on a file."""
    file = tflite.open(blob)
    try:
        return job(file, runner)
    except TFLiteError as error:
        return Outcome("refused", str(error))
    except (RuntimeError, ValueError) as error:
        if any(op.is_custom for op in tflite.open(blob).ops):
            return Outcome("custom")
        return Outcome("WRONG", str(error))


def files(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the files by name: those passed, and the samples of the tests."""
    from tests.tflite_files import SAMPLES

    for path in paths:
        found = sorted(path.rglob("*.tflite")) if path.is_dir() else [path]
        yield from ((one.stem, one.read_bytes()) for one in found)
    yield from ((f"sample {name}", made().blob) for name, made in SAMPLES.items())


def main() -> None:
    """Print the table, and the reasons of refusals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders")
    arguments = parser.parse_args()
    runner, wrong = Runner(), 0
    reasons: list[str] = []
    print("| file |", " | ".join(JOBS), "|")
    print("| --- " * (len(JOBS) + 1) + "|")
    for name, blob in files(arguments.paths):
        cells = []
        for title, job in JOBS.items():
            found = outcome(blob, job, runner)
            cells.append(found.detail if found.word == "near" else found.word)
            wrong += found.word == "WRONG"
            if found.word in ("refused", "WRONG"):
                reasons.append(f"- {name}, {title}: {found.word}: {found.detail}")
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
    print("", *reasons, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
