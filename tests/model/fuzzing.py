"""Opens damaged models in a process of their own.

`python -m tests.model.fuzzing ANSWERS JOBS FOLDER` is that process: it opens each
target after the mutation of its seed, and answers with a line.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.model.field_mutations import mutate_fields
from tests.model.mutations import mutate
from tests.processes import run_python

TARGETS = {
    "pb": ("frozen.pb", "."),
    "pbtxt": ("frozen.pbtxt", "."),
    "saved_model": ("lookup", "saved_model.pb"),
    "index": ("lookup", "variables/variables.index"),
    "data": ("lookup", "variables/variables.data-00000-of-00001"),
    "pb fields": ("frozen.pb", "."),
    "saved_model fields": ("lookup", "saved_model.pb"),
}
"""What is opened, and which of its files is damaged."""

_FIELDS = ("pb fields", "saved_model fields")

OPENED, REFUSED = "opened", "refused"
_SECONDS = 600
"""It ends a hang only."""
_EXTRA_BYTES = 6 << 30


@dataclass(frozen=True)
class Outcome:
    """What became of one damaged model.

    Attributes:
        target: which file was damaged.
        seed: the seed of the damage.
        result: "opened", "refused", or what else happened.
        detail: the message or the traceback.
    """

    target: str
    seed: int
    result: str
    detail: str

    @property
    def ok(self) -> bool:
        return self.result in (OPENED, REFUSED)


def run(
    folder: Path, jobs: Iterable[tuple[str, int]], module: str = "tests.model.fuzzing"
) -> Iterator[Outcome]:
    """Open each (target, seed) in a process; after its end, the rest in another one."""
    waiting = list(jobs)
    while waiting:
        with tempfile.NamedTemporaryFile() as answers:
            listed = json.dumps(waiting)
            done = run_python("-m", module, answers.name, listed, folder)
            told = [json.loads(line) for line in answers.read().splitlines()]
        for (target, seed), answer in zip(waiting, told, strict=False):
            yield Outcome(target, seed, *answer)
        waiting = waiting[len(told) :]
        if waiting:
            result = f"ended with {done.returncode}"
            detail = done.stderr[-3000:].decode(errors="replace")
            yield Outcome(*waiting.pop(0), result, detail)


def serve(answer: Callable[[Path, str, int, Path], tuple[str, str]]) -> None:
    """Answer each job of the command line by a line; a hang ends the process."""
    answers, jobs, folder = sys.argv[1:]
    with Path(answers).open("w") as file:
        for target, seed in json.loads(jobs):
            signal.alarm(_SECONDS)
            with tempfile.TemporaryDirectory() as scratch:
                told = answer(Path(folder), target, seed, Path(scratch))
            file.write(json.dumps(told) + "\n")
            file.flush()


def _opened(folder: Path, target: str, seed: int, scratch: Path) -> tuple[str, str]:
    """Open a damaged model, and return what became of that."""
    from geutil import model

    path = damaged(folder, target, seed, scratch)
    try:
        _open(model, path)
    except model.ModelError as error:
        return REFUSED, str(error)[:500]
    except BaseException:
        return "raised another error", traceback.format_exc()[-3000:]
    return OPENED, ""


def _open(model: Any, path: Path) -> None:
    """Open a model, and with it each of its signatures."""
    try:
        opened = model.open(path)
    except model.ModelError as error:
        name = re.search(r"signature= as one of \['(\w+)'", str(error))
        if name is None:
            raise
        opened = model.open(path, signature=name[1])
    for name in opened.signatures:
        _ = opened.signatures[name].outputs


def damaged(folder: Path, target: str, seed: int, scratch: Path) -> Path:
    """Copy a model, damage the copy, and return its path."""
    model, file = TARGETS[target]
    copy = scratch / model
    if (folder / model).is_dir():
        shutil.copytree(folder / model, copy)
    else:
        shutil.copy(folder / model, copy)
    victim = copy / file if copy.is_dir() else copy
    victim.write_bytes(_mutated(victim.read_bytes(), target, seed))
    return copy


def _mutated(data: bytes, target: str, seed: int) -> bytes:
    from geutil.graph.protos import GraphDef, SavedModel

    rng = random.Random(f"{target} {seed}")
    if target in _FIELDS:
        proto = GraphDef if target == "pb fields" else SavedModel
        return mutate_fields(data, proto, rng)
    return mutate(data, rng)[1]


def _limit_memory() -> None:
    """Let an absurd allocation fail at once, rather than fill the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _limit_memory()
    serve(_opened)
