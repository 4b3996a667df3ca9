"""The report of a batch: the outcome of each model, step by step, with the reason."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from geutil.errors import ModelError
from geutil.lazy import Shown
from geutil.progress import MADE, note
from geutil.sizes import size_text

BatchAction: TypeAlias = Literal[
    "done",
    "done before",
    "failed",
    "crashed",
    "timed out",
    "lost",
    "stopped",
    "not a model",
]
STATE = "batch.json"
"""The file in the folder of results that lists finished models."""
_KIND = "geutil batch"
# The version of the format of saved reports.
_VERSION = 1


@dataclass(frozen=True)
class BatchStep:
    """A step that was done on one model.

    Attributes:
        name: the step, with its options.
        seconds: the time that it took.
        text: the report of the step; "" if it has none.
    """

    name: str
    seconds: float
    text: str = ""

    def __str__(self) -> str:
        head = self.text.partition("\n")[0]
        return f"{self.name}, {self.seconds:.1f} s{': ' if head else ''}{head}"


@dataclass(frozen=True)
class BatchEntry:
    """The outcome of one path of a batch.

    Attributes:
        name: its name, and that of its folder of results.
        path: its path.
        action: "done"; "done before", by an earlier call, with the numbers of that
            call; "failed" with an error; "crashed", "timed out": its process died or
            was killed; "lost": the workers that ran it died; "stopped" by the user; or
            "not a model".
        reason: the error or other reason; "" if it is done.
        step: the step that was running when it ended; "" if it is done.
        seconds: from the start of its process to the end.
        peak_bytes: the peak resident memory of the process; 0 if it is not known.
        files: the bytes of each written file, by its name in the folder of results.
        steps: the steps that were done.
        tries: the number of attempts; more than one if workers died.
        fingerprint: identifies model, data and pipeline across calls.
    """

    name: str
    path: str
    action: BatchAction
    reason: str = ""
    step: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    files: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[BatchStep, ...] = ()
    tries: int = 1
    fingerprint: str = ""

    @property
    def is_done(self) -> bool:
        """True if its results exist, from this call or an earlier one."""
        return self.action in ("done", "done before")

    def __str__(self) -> str:
        if self.is_done:
            files = ", ".join(f"{n} {s:,} bytes" for n, s in self.files.items())
            told = files
        else:
            at = f"at '{self.step}': " if self.step else ""
            told = at + self.reason
        tries = f" (try {self.tries})" if self.tries > 1 else ""
        return f"{self.action}{tries}: {told}" if told else f"{self.action}{tries}"


@dataclass(frozen=True)
class BatchReport(Shown):
    """The report of `batch`: an entry for each path, sorted by name.

    Attributes:
        output: the folder of the results.
        pipeline: the steps, as text.
        entries: the outcome of each path.
        notes: events of the batch as a whole, such as the loss of workers.
        seconds: the duration of the call.

    Example:
        >>> from geutil.model import BatchEntry, BatchReport
        >>> entry = BatchEntry("net", "models/net.keras", "failed", "no op", "fold")
        >>> print(BatchReport("out", "fold,tflite", (entry,)))
        0 of 1 model(s) done, 1 failed: fold,tflite
          net  0.0 s  0 B  failed: at 'fold': no op
    """

    output: str
    pipeline: str
    entries: tuple[BatchEntry, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def done(self) -> tuple[BatchEntry, ...]:
        """The models whose results exist."""
        return tuple(entry for entry in self.entries if entry.is_done)

    @property
    def undone(self) -> tuple[BatchEntry, ...]:
        """The models whose results are missing; paths without a model are left out."""
        return tuple(
            entry
            for entry in self.entries
            if not entry.is_done and entry.action != "not a model"
        )

    def __str__(self) -> str:
        counts = Counter(entry.action for entry in self.entries)
        models = len(self.entries) - counts["not a model"]
        parts = [f"{len(self.done)} of {models} model(s) done"]
        if counts["done before"]:
            parts[0] += f" ({counts['done before']} before)"
        parts += [f"{n} {a}" for a, n in counts.items() if not a.startswith("done")]
        lines = [f"{', '.join(parts)}: {self.pipeline}"]
        lines += [f"  note: {note}" for note in self.notes]
        width = max((len(entry.name) for entry in self.entries), default=0)
        for entry in self.entries:
            spent = f"{entry.seconds:.1f} s  {size_text(entry.peak_bytes)}  "
            cost = spent if entry.action != "not a model" else ""
            lines.append(f"  {entry.name:<{width}}  {cost}{entry}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict that can be written as JSON."""
        return {"kind": _KIND, "version": _VERSION, **asdict(self)}

    def write(self) -> None:
        """Write the report to the folder of results, atomically.

        Cost: linear in the entries.
        """
        write_json(Path(self.output) / STATE, self.to_dict())

    @classmethod
    def load(cls, output: str | os.PathLike[str]) -> BatchReport:
        """Read the report of the last call that wrote to a folder.

        Args:
            output: the folder of the results.

        Raises:
            ModelError: there is no report, or the file is not one.

        Cost: linear in the entries.
        """
        file = Path(output) / STATE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(
                f"there is no report of a batch at '{file}'; geutil.model.batch writes "
                "one"
            ) from error
        except ValueError as error:
            raise ModelError(f"'{file}' is no report of a batch: {error}") from error
        return _read(content, file)


def _read(content: Any, file: Path) -> BatchReport:
    """Return a report that was written as JSON."""
    if not isinstance(content, dict) or content.pop("kind", None) != _KIND:
        raise ModelError(
            f"'{file}' is no report of a batch; choose another folder for the results"
        )
    version = content.pop("version", None)
    if version != _VERSION:
        raise ModelError(
            f"'{file}' is a report of version {version}, and this geutil reads "
            f"{_VERSION}; choose another folder for the results"
        )
    try:
        entries = tuple(
            BatchEntry(**{**e, "steps": tuple(BatchStep(**s) for s in e["steps"])})
            for e in content.pop("entries")
        )
        notes = tuple(content.pop("notes"))
        return BatchReport(**content, entries=entries, notes=notes)
    except (KeyError, TypeError) as error:
        raise ModelError(f"'{file}' is a damaged report: {error!r}") from error


def write_json(path: Path, content: Any) -> None:
    """Write a file whole, or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    note(MADE, str(new))
    try:
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
