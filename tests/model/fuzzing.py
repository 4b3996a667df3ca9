"""Opens damaged models in a child process.

`python -m tests.model.fuzzing FOLDER` is the child: it reads a target and a seed from
standard input, opens the target after the mutation of that seed, and answers with a
line.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.model.field_mutations import mutate_fields
from tests.model.mutations import mutate

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
_SECONDS = 600.0
"""It ends a hang only."""
_EXTRA_BYTES = 6 << 30
_ROOT = Path(__file__).parents[2]


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
    """Open each (target, seed) in a child, with a new child after a death or a hang."""
    child = _Child(folder, module)
    try:
        for target, seed in jobs:
            outcome = child.ask(target, seed)
            if not child.lives:
                child.close()
                child = _Child(folder, module)
            yield outcome
    finally:
        child.close()


class _Child:
    def __init__(self, folder, module):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=_ROOT,
            text=True,
        )
        self.lives = True
        ready = self._line(_SECONDS)
        if ready != "ready":
            raise RuntimeError(f"the child did not start: {self._tail()}")

    def ask(self, target, seed):
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps([target, seed])}\n")
            self._process.stdin.flush()
        line = self._line(_SECONDS)
        if line is None:
            self.lives = False
            return Outcome(target, seed, f"hung for {_SECONDS} s", self._tail())
        if not line:
            self.lives = False
            code = self._process.wait()
            return Outcome(target, seed, f"died with {code}", self._tail())
        return Outcome(target, seed, *json.loads(line))

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _line(self, seconds):
        """Return a line, "" after the child's death, None when time is up."""
        # Answers are short and flushed whole, so a readable pipe holds a line.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self._process.stdout.readline().strip()

    def _tail(self):
        self._errors.seek(0)
        return self._errors.read()[-3000:].decode(errors="replace")


def _serve(folder: Path) -> None:
    from geutil import model

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ops that print do not answer.
    _limit_memory()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        target, seed = json.loads(line)
        with tempfile.TemporaryDirectory() as scratch:
            path = damaged(folder, target, seed, Path(scratch))
            try:
                _open(model, path)
                answer = [OPENED, ""]
            except model.ModelError as error:
                answer = [REFUSED, str(error)[:500]]
            except BaseException:
                answer = ["raised another error", traceback.format_exc()[-3000:]]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


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
    _serve(Path(sys.argv[1]))
